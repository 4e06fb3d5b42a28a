"""Trackers, seen through a fake package that records what is called."""

from __future__ import annotations

import math
import sys
import types

import pytest

from hansa.runs import trackers
from hansa.runs.folder import RunFolder


class Recorder(types.ModuleType):
    """A package whose functions record their calls as (name, arguments, keywords), and return it."""

    def __init__(self, name):
        super().__init__(name)
        self.calls, self.open = [], None

    def __getattr__(self, name):
        def call(*arguments, **keywords):
            if name == "active_run":
                return self.open
            self.open = keywords.get("run_name")
            self.calls.append((name, arguments, keywords))
            return self

        return call

    def of(self, name):
        return [(arguments, keywords) for called, arguments, keywords in self.calls if called == name]


@pytest.fixture
def tracker(monkeypatch):
    """Put a recorder in the place of a tracker's package."""

    def install(name):
        recorder = Recorder(trackers.MODULES[name])
        monkeypatch.setitem(sys.modules, trackers.MODULES[name], recorder)
        return recorder

    return install


def test_tensorboard_gets_every_finite_number_of_every_round(cli, tracker, folder):
    recorder = tracker("tensorboard")
    cli.ok("run", "small.yaml", "-o", "out", "-q", "--track", "tensorboard")
    assert recorder.of("SummaryWriter") == [(("out/tensorboard",), {})]
    scalars = [arguments for arguments, _ in recorder.of("add_scalar")]
    accuracy = [(step, value) for name, value, step in scalars if name == "test_accuracy"]
    assert accuracy == [(record["round"], record["test_accuracy"]) for record in RunFolder(folder / "out").history]
    assert all(math.isfinite(value) for _, value, _ in scalars)


def test_mlflow_gets_the_settings_once_and_the_numbers_every_round(cli, tracker):
    recorder = tracker("mlflow")
    cli.ok("run", "small.yaml", "-q", "--track", "mlflow")
    assert [name for name, *_ in recorder.calls] == ["start_run", "log_params", *["log_metrics"] * 3]
    assert recorder.of("log_params")[0][0][0]["local.lr"] == "0.05"
    assert [keywords["step"] for _, keywords in recorder.of("log_metrics")] == [1, 2, 3]


def test_an_open_mlflow_run_is_ended_before_the_next_begins(tracker):
    recorder = tracker("mlflow")
    trackers.mlflow("first")
    trackers.mlflow("second")
    assert [name for name, *_ in recorder.calls] == ["start_run", "end_run", "start_run"]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_what_looks_like_wandb_gets_settings_once_and_numbers_each_round(cli, tracker, name):
    recorder = tracker(name)
    cli.ok("run", "small.yaml", "-o", "x", "-q", "--track", name)
    ((_, begun),) = recorder.of("init")
    assert (begun["project"], begun["name"], begun["config"]["local.lr"]) == ("hansa", "small", 0.05)
    logged = recorder.of("log")
    assert [keywords["step"] for _, keywords in logged] == [1, 2, 3]
    assert {"test_accuracy", "train_loss", "up_bytes"} <= set(logged[-1][0][0])


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_what_is_not_installed_is_said_before_anything_is_begun(cli, folder, monkeypatch, name):
    monkeypatch.setitem(sys.modules, trackers.MODULES[name], None)
    result = cli.refused("run", "small.yaml", "-o", "out", "--track", name)
    assert f"pip install {'wandb' if name == 'wandb' else chr(39) + 'hansa[track]' + chr(39)}" in result.stderr
    assert not (folder / "out").exists()
