from __future__ import annotations

import pytest
import torch

import hansa
from hansa import HansaError, presets
from hansa.runs.text_table import text_table


def test_a_run_prints_its_last_rounds():
    task = hansa.training.quadratic(torch.ones(2, 3, 1), torch.tensor([[1.0] * 3, [3.0] * 3]))
    run = hansa.run(presets.fedavg(local_lr=0.1, steps=1), task, rounds=7)
    lines = run.table("round", "loss", last=3).splitlines()
    assert [line.split()[0] for line in lines] == ["round", "5", "6", "7"]
    assert float(lines[-1].split()[1]) == pytest.approx(run.history[-1]["loss"], rel=1e-3)
    assert run.table().splitlines()[0].split() == ["round", "train_loss", "up_bytes"]


def test_a_column_that_is_not_there_is_named():
    with pytest.raises(HansaError, match=r"table\('los'\): no such column. Did you mean loss"):
        text_table([{"loss": 1.0}], ["los"])
    assert text_table([], []) == ""
