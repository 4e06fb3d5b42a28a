"""Summaries of a history, and metrics whose direction tasks state, folders record and everything follows."""

from __future__ import annotations

import functools
import json
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import hansa
from hansa.config import from_yaml
from hansa.config.build import load_data
from hansa.runs import metrics
from hansa.runs.columns import BITS, CLIENT_COLUMNS, COLUMNS, EVALUATED, TOTALS, MetricFacts, RunHistory
from hansa.runs.experiment import build_run, open_run
from hansa.runs.folder import RunFolder
from hansa.runs.metrics import summarize, with_totals
from hansa.runs.record import to_line
from hansa.study.report import ReportEntry, common_target, rank
from hansa.study.report.page import comparability_warnings
from hansa.study.report.ranking import choose_metric
from hansa.training.metric_direction import metric_directions
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


def history(values, name="test_accuracy"):
    return [{"round": r, name: value, "up_bytes": r} for r, value in enumerate(values, 1) if value is not None]


GOOD, BAD = history([0.2, 0.4, 0.5]), history([0.6, 0.9, math.nan])


@pytest.mark.parametrize("last", [math.nan, math.inf, -math.inf])
def test_the_final_value_is_not_the_last_finite_one(last):
    curve = history([0.6, 0.9, last])
    summary = metrics.summarize(curve, 0.8)
    assert math.isnan(summary["test_accuracy"])
    assert math.isnan(metrics.last(curve))
    assert math.isnan(metrics.last(curve, few_as_final=True))
    assert (summary["best_test_accuracy"], summary["rounds_to_target"]) == (0.9, 2)
    assert metrics.diverged_at(curve, "test_accuracy") == 3


def test_a_curve_that_recovers_has_not_diverged_and_rounds_without_a_measurement_say_nothing():
    assert metrics.diverged_at(history([0.1, math.nan, 0.3]), "test_accuracy") is None
    curve = [*history([0.1, math.nan, math.nan]), {"round": 4}]
    assert metrics.diverged_at(curve, "test_accuracy") == 2
    empty = [
        {"round": 1, "train_loss": 0.5, "participants": 2},
        {"round": 2, "train_loss": math.nan, "participants": 0},
    ]
    assert metrics.diverged_at(empty, "train_loss") is None


@pytest.mark.parametrize("seeds", [1, 3])
def test_it_is_last_named_and_never_bold(seeds):
    def entry(name, curves):
        return ReportEntry.from_seeds(name, [ReportEntry(name, curve, seed=s) for s, curve in enumerate(curves)])

    entries = [
        entry("bad", [BAD, *[GOOD] * (seeds - 1)]),
        entry("good", [GOOD] * seeds),
        entry("none", [history([None])]),
    ]
    ranking = rank(entries, 0.4)
    assert [ranked.entry.name for ranked in ranking] == ["good", "none", "bad"]
    assert math.isnan(ranking[-1].numbers["test_accuracy"])
    columns = ranking.columns()
    assert not any(column.best[-1] for column in columns)
    assert "diverged" in ranking[-1].cell(ranking.score) == columns[0].cells[-1]
    assert any("bad diverged" in w and "from round 3" in w for w in comparability_warnings(entries, "test_accuracy"))
    (row,) = [line for line in ranking.latex().splitlines() if line.startswith("bad")]
    assert "diverged" in row
    assert "textbf" not in row
    assert all(ranked.entry.name != "bad" for *_, ranked in ranking.tiles())


CONFIG = """
rounds: 2
workers: 1
data: {name: fashion-mini, clients: 6, test_clients: labels}
model: logistic
local: {steps: 2}
gossip: {clusters: 2}
algorithm: cafga
links: {up_bandwidth: 1.0e+6, latency: 0.1}
evaluate: {train: true, local_mean: true, personalise: {steps: 1}}
"""
MEASURED = {"gradient_norm", "gradient_diversity", "sigma_within", "sigma_between", "zeta"}


def test_every_number_of_a_run_is_declared(tmp_path):
    experiment = open_run(from_yaml(CONFIG), tmp_path / "run")
    experiment.execute()
    for record in with_totals(experiment.run.history):
        undeclared = {name for name in record if name not in COLUMNS and not name.startswith(EVALUATED)}
        assert undeclared <= MEASURED, undeclared
    task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    assert set(hansa.run(hansa.presets.fedavg(steps=2), task, rounds=2).history[-1]) <= set(COLUMNS)
    assert {"consensus", "simulated_seconds", "global_loss", "local_mean_loss", "personal_accuracy"} <= set(record)


def test_the_client_record_has_the_declared_columns_and_types(tmp_path):
    run = build_run(from_yaml(CONFIG), load_data(from_yaml(CONFIG))).advance(1)
    columns = run.clients()
    assert list(columns)[: len(CLIENT_COLUMNS)] == list(CLIENT_COLUMNS)
    for name, column in CLIENT_COLUMNS.items():
        assert columns[name].dtype == np.dtype(column.dtype), name
    assert {column.total for column in CLIENT_COLUMNS.values() if column.total} <= set(columns.by_client())


def test_totals_add_up_declared_columns():
    assert all(part in COLUMNS for name in TOTALS for part in COLUMNS[name].sum_of)
    assert list(BITS) == ["up_bits", "down_bits", "peer_bits"]
    sizes = {"up_bytes": 2, "down_bytes": 3, "peer_bytes": 5}
    history = [{"round": 1, **sizes, "seconds": 0.5, "simulated_seconds": 2.0}] * 2
    last = with_totals(history)[-1]
    scale = {"bits": 8, "seconds": 1}
    for name in TOTALS:
        parts = sum(2 * history[0][part] for part in COLUMNS[name].sum_of)
        assert last[name] == scale[COLUMNS[name].unit] * parts, name
        assert name in summarize(history)


SIZES = (7, 30, 12, 21, 9, 16, 11, 25, 8, 14, 19)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 1)

    def forward(self, x):
        return self.out(x).squeeze(1)


def rmse(output, target):
    return ((output - target) ** 2).mean().sqrt()


def margin(output, target):
    return 1.0 - (output - target).abs().mean()


def delay(output, target):
    return (output - target).abs().max()


@pytest.fixture(scope="module")
def data():
    draw = np.random.default_rng(5)
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    x = draw.standard_normal((2 * len(owners), 3)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5]) + 0.3 * draw.standard_normal(len(x))).astype(np.float32)
    rows = len(owners)
    return hansa.data.from_arrays(x[:rows], y[:rows], clients=owners, test=(x[rows:], y[rows:]), test_clients=owners)


@pytest.fixture(scope="module")
def task(data):
    own = {"rmse": rmse, "margin": hansa.higher(margin), "delay": hansa.lower(delay)}
    return hansa.Task(Line, nn.functional.mse_loss, data, metrics=own)


@pytest.fixture(scope="module")
def compared(task, tmp_path_factory):
    methods = {
        name: hansa.presets.fedavg(local_lr=lr, steps=3, batch_size=5, participation=0.5)
        for name, lr in (("bad", 1e-4), ("good", 0.05))
    }
    folder = tmp_path_factory.mktemp("compared")
    return hansa.compare(methods, task, rounds=7, seeds=2, out=folder, workers=1), folder


def test_a_metric_states_its_direction_itself_or_by_its_functions_name():
    class OfTorchmetrics:
        higher_is_better = False

        def __call__(self, output, target):
            return 0.0

    stated = {"own": OfTorchmetrics(), "rmse": hansa.higher(rmse), "first": functools.partial(rmse)}
    directions = metric_directions({**stated, "second": hansa.lower(max)})
    assert directions == {"own": "lower", "rmse": "higher", "first": "lower", "second": "lower"}


def test_a_metric_without_a_direction_is_refused_with_the_remedy(data):
    with pytest.raises(hansa.HansaError, match=r"hansa.higher\(margin\) or hansa.lower\(margin\).*better: lower"):
        hansa.Task(Line, nn.functional.mse_loss, data, metrics={"margin": margin})
    with pytest.raises(hansa.HansaError, match=r"metric=lower\(delay\)"):
        hansa.Task(Line, nn.functional.mse_loss, data, metric=hansa.lower(delay))
    with pytest.raises(hansa.HansaError, match=r"main_metric='auc'.*margin, loss"):
        hansa.Task(Line, nn.functional.mse_loss, data, metrics={"margin": hansa.higher(margin)}, main_metric="auc")


def test_a_stated_metric_reaches_other_processes():
    copy = pickle.loads(pickle.dumps(hansa.lower(delay)))  # noqa: S301
    assert copy.higher_is_better is False
    assert float(copy(torch.tensor([1.0]), torch.tensor([4.0]))) == 3.0


def test_worst_tenth_best_and_targets_follow_the_direction(compared):
    run = compared[0]["good"][0]
    last = run.clients().at_round(7)
    tenth = -(-len(SIZES) // 10)
    for name, worst in (("rmse", "largest"), ("delay", "largest"), ("margin", "smallest")):
        ordered = np.sort(last[f"test_{name}"].astype(np.float64))
        expected = (ordered[-tenth:] if worst == "largest" else ordered[:tenth]).mean()
        assert run.history[-1][f"client_{name}_worst"] == pytest.approx(expected)
    values = {name: [record[f"test_{name}"] for record in run.history] for name in ("rmse", "delay", "margin")}
    assert metrics.best(run.history, "test_delay") == min(values["delay"])
    assert metrics.best(run.history, "test_margin") == max(values["margin"])
    assert metrics.rounds_to(run.history, values["rmse"][3], "test_rmse") == next(
        r for r, value in enumerate(values["rmse"], 1) if value <= values["rmse"][3]
    )
    spent = metrics.cost_to(run.history, values["rmse"][3], "test_rmse")
    sent = [r["up_bytes"] + r["down_bytes"] + r["peer_bytes"] for r in run.history[: spent["round"]]]
    assert spent["bits"] == 8 * sum(sent)


def test_the_first_own_metric_ranks_a_task_without_accuracy(compared, task):
    comparison, _ = compared
    assert task.main_metric == "test_rmse"
    assert comparison.best == "good"
    assert comparison["good"].metric == "test_rmse"
    assert [r.entry.name for r in comparison.ranking(metric="test_margin")] == ["good", "bad"]
    assert [r.entry.name for r in comparison.ranking(metric="test_delay")] == ["good", "bad"]
    table = comparison.table(target=2.0)
    assert table.attrs["ranked_by"] == "last5_test_rmse"
    assert list(table["method"]) == ["good", "bad"]
    assert table["bits_to_target"][0] == comparison["good"].bits_to(2.0).mean
    assert comparison["good"].rounds_to(2.0).mean == table["rounds_to_target"][0]
    assert "test rmse, mean of last 5" in repr(comparison)
    figure = comparison.plot(metric="test_delay")
    assert figure.axes[0].get_ylabel() == "test delay"


def test_folders_know_the_metrics_without_their_code(compared):
    folder = compared[1] / "good" / "seed-1"
    facts = RunFolder(folder).history.facts
    assert facts == MetricFacts("test_rmse", {"rmse": "lower", "margin": "higher", "delay": "lower"}, None)
    entries = [ReportEntry.from_folder(compared[1] / name) for name in ("bad", "good")]
    assert [ranked.entry.name for ranked in rank(entries)] == ["good", "bad"]
    assert choose_metric(entries)[0] == "test_rmse"
    summary = RunFolder(folder).summary
    history = RunFolder(folder).history
    assert summary["best_test_delay"] == min(record["test_delay"] for record in history)


def test_a_column_of_unknown_direction_is_asked_for():
    history = [{"round": r, "test_odd": float(r)} for r in range(1, 4)]
    assert "best_test_odd" not in metrics.summarize(history)
    with pytest.raises(hansa.HansaError, match="Write test_odd:lower or test_odd:higher"):
        metrics.best(history, "test_odd")
    assert metrics.best(history, "test_odd:lower") == 1.0
    with pytest.raises(hansa.HansaError, match="expected lower or higher"):
        metrics.best(history, "test_odd:down")
    entries = [ReportEntry(name, [{"round": 1, "test_odd": value}]) for name, value in (("a", 1.0), ("b", 2.0))]
    assert [r.entry.name for r in rank(entries, metric="test_odd:lower")] == ["a", "b"]
    with pytest.raises(hansa.HansaError, match="no run has it"):
        rank(entries, metric="test_od:lower")


def test_a_search_follows_the_direction_of_the_task(task):
    pytest.importorskip("optuna")
    axes = {"local_lr": [1e-4, 0.05]}
    found_search = hansa.search(
        functools.partial(hansa.presets.fedavg, steps=2, batch_size=5), task, axes, rounds=2, trials=4, workers=1
    )
    assert found_search.metric == "test_rmse"
    assert found_search.best.point == {"local_lr": 0.05}


def test_scores_name_what_they_are():
    long = [{"round": r, "test_accuracy": r / 10} for r in range(1, 8)]
    short = long[:5]
    assert "last5_test_accuracy" not in metrics.summarize(short)
    assert metrics.summarize(long)["last5_test_accuracy"] == pytest.approx(0.5)
    assert metrics.summarize(long, window=2)["last2_test_accuracy"] == pytest.approx(0.65)
    assert metrics.last(short, few_as_final=True) == 0.5
    ranking = rank([ReportEntry("long", long), ReportEntry("short", short)])
    assert ranking.score == "test_accuracy"  # one has no mean of five: all are ranked by the final value
    assert rank([ReportEntry("long", long)]).score == "last5_test_accuracy"
    assert rank([ReportEntry("long", long)], window=1).score == "last1_test_accuracy"


def test_automatic_targets_are_above_chance():
    def entry(best, chance):
        return ReportEntry("a", RunHistory([{"round": 1, "test_accuracy": best}], MetricFacts(chance=chance)))

    assert common_target([entry(0.42, 0.1)]) == 0.4
    assert common_target([entry(0.42, 0.4)]) is None
    assert common_target([entry(0.42, 0.7)]) is None
    assert common_target([ReportEntry("b", [{"round": 1, "test_auc": 0.9}])]) is None


def test_a_seed_beside_a_list_of_seeds_is_refused():
    task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    with pytest.raises(hansa.HansaError, match=r"run\(seed=3\): expected none beside a list of seeds"):
        hansa.run(hansa.presets.fedavg(steps=1), task, rounds=1, seeds=[42], seed=3)
    assert hansa.run(hansa.presets.fedavg(steps=1), task, rounds=1, seeds=2, seed=3).seeds == [3, 4]
