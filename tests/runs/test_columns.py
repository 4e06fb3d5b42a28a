"""Every column is declared once, and everything that a run records is declared."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hansa
from hansa.config import from_yaml
from hansa.config.build import load_data
from hansa.runs.columns import (
    BITS,
    CLIENT_COLUMNS,
    COLUMNS,
    EVALUATED,
    TOTALS,
    column_of,
    lower_is_better,
)
from hansa.runs.experiment import Experiment, build_run
from hansa.runs.metrics import summarize, with_totals

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
    experiment = Experiment.new(from_yaml(CONFIG), tmp_path / "run")
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


@pytest.mark.parametrize(
    ("name", "lower"),
    [("lost", True), ("test_f1", False), ("client_f1_std", True), ("client_loss_worst", True)],
)
def test_the_direction_of_a_column(name, lower):
    assert lower_is_better(name) is lower
    assert column_of(f"last5_{name}").better == ("lower" if lower else "higher")
