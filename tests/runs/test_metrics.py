"""Summaries of a history, and its way to disk and back."""

from __future__ import annotations

import json
import math

import pytest
import torch

import hansa
from hansa.runs import metrics
from hansa.runs.record import to_line
from recorded import add_rounds, begin_record

CURVE = [0.10, 0.52, 0.48, 0.71, 0.69, 0.70, 0.74, 0.73]
COSTS = {"up_bytes": 10, "down_bytes": 30, "peer_bytes": 5, "seconds": 2.0}
HISTORY = [{"round": r, "test_accuracy": a, "test_loss": 1 - a, **COSTS} for r, a in enumerate(CURVE, start=1)]


def test_a_target_is_reached_in_the_first_round_even_if_later_ones_fall_back():
    assert [metrics.rounds_to(HISTORY, target) for target in (0.5, 0.71, 0.75)] == [2, 4, None]
    assert metrics.rounds_to(HISTORY, 0.5, "test_loss") == 2
    assert metrics.best(HISTORY, "test_loss") == pytest.approx(0.26)


def test_rounds_without_a_measurement_are_skipped_not_counted_as_zero():
    assert metrics.last(HISTORY) == pytest.approx((0.71 + 0.69 + 0.70 + 0.74 + 0.73) / 5)
    sparse = [record if record["round"] % 2 else {"round": record["round"]} for record in HISTORY]
    assert metrics.last(sparse, count=2) == pytest.approx((0.69 + 0.74) / 2)
    assert metrics.best(sparse) == 0.74
    assert metrics.rounds_to(sparse, 0.5) == 5


def test_a_summary_counts_lost_clients_and_rounds_without_effect():
    told = [{**HISTORY[0], "lost": 2, "moved": True}, {**HISTORY[1], "lost": 3, "moved": False}]
    found = metrics.summarize(told, target=0.5)
    assert (found["lost"], found["unmoved_rounds"], found["rounds_to_target"]) == (5, 1, 2)


def test_lines_are_strict_json_even_with_nan_and_infinity():
    record = {"round": 1, "loss": math.nan, "diversity": math.inf, "low": -math.inf, "clients": [1, 2]}
    back = json.loads(to_line(record), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert back == {"round": 1, "loss": None, "diversity": "inf", "low": "-inf", "clients": [1, 2]}


def test_a_run_loads_as_a_frame_with_one_call(tmp_path):
    begin_record(tmp_path)
    add_rounds(tmp_path, HISTORY)
    frame = metrics.load_run(tmp_path)
    assert frame["test_accuracy"].tolist() == CURVE
    assert frame["up_bits"].tolist() == [80 * r for r in range(1, 9)]
    with pytest.raises(hansa.HansaError, match="no completed round"):
        metrics.load_run(tmp_path / "nothing")


def test_a_run_prints_its_last_rounds():
    task = hansa.training.quadratic(torch.ones(2, 3, 1), torch.tensor([[1.0] * 3, [3.0] * 3]))
    run = hansa.run(hansa.presets.fedavg(local_lr=0.1, steps=1), task, rounds=7)
    lines = run.table("round", "loss", last=3).splitlines()
    assert [line.split()[0] for line in lines] == ["round", "5", "6", "7"]
    assert float(lines[-1].split()[1]) == pytest.approx(run.history[-1]["loss"], rel=1e-3)
    assert run.table().splitlines()[0].split() == ["round", "loss", "train_loss", "up_bytes"]


def test_a_column_that_is_not_there_is_named():
    with pytest.raises(hansa.HansaError, match=r"test_acuracy.*Did you mean test_accuracy"):
        metrics.best(HISTORY, "test_acuracy")
    with pytest.raises(hansa.HansaError, match=r"table\('los'\): no such column. Did you mean loss"):
        metrics.text_table([{"loss": 1.0}], ["los"])
    assert metrics.text_table([], []) == ""
