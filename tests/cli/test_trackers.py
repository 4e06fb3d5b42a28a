"""TensorBoard and MLflow, seen through fakes at the import boundary."""

from __future__ import annotations

import math
import sys
import types
from typing import ClassVar

import pytest

import hansa
from hansa.runs import trackers
from hansa.runs.folder import RunFolder


class Writer:
    made: ClassVar[list[Writer]] = []

    def __init__(self, folder):
        self.folder, self.scalars = folder, []
        Writer.made.append(self)

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def flush(self):
        pass


class Mlflow(types.ModuleType):
    def __init__(self):
        super().__init__("mlflow")
        self.calls, self.open = [], None

    def active_run(self):
        return self.open

    def end_run(self):
        self.calls.append(("end", self.open))
        self.open = None

    def start_run(self, run_name):
        self.open = run_name
        self.calls.append(("start", run_name))

    def log_params(self, params):
        self.calls.append(("params", params))

    def log_metrics(self, numbers, step):
        self.calls.append(("metrics", step, numbers))


@pytest.fixture
def tensorboard(monkeypatch):
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    Writer.made.clear()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)


@pytest.fixture
def mlflow(monkeypatch):
    module = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


def test_tensorboard_gets_every_finite_number_of_every_round(cli, tensorboard, folder):
    assert cli("run", "small.yaml", "-o", "out", "-q", "--track", "tensorboard").exit_code == 0
    (writer,) = Writer.made
    assert writer.folder == "out/tensorboard"
    accuracy = [(step, value) for name, value, step in writer.scalars if name == "test_accuracy"]
    expected = RunFolder(folder / "out").history
    assert accuracy == [(record["round"], record["test_accuracy"]) for record in expected]
    assert all(math.isfinite(value) for _, value, _ in writer.scalars)


def test_mlflow_gets_the_settings_once_and_the_numbers_every_round(cli, mlflow):
    assert cli("run", "small.yaml", "-q", "--track", "mlflow").exit_code == 0
    kinds = [entry[0] for entry in mlflow.calls]
    assert kinds == ["start", "params", "metrics", "metrics", "metrics"]
    params = mlflow.calls[1][1]
    assert params["local.lr"] == "0.05"
    assert [entry[1] for entry in mlflow.calls[2:]] == [1, 2, 3]


def test_an_open_mlflow_run_is_ended_before_the_next_begins(mlflow):
    trackers.mlflow("first")
    trackers.mlflow("second")
    assert mlflow.calls == [("start", "first"), ("end", "first"), ("start", "second")]


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_what_is_not_installed_is_said_before_anything_is_begun(cli, folder, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else "mlflow", None)
    result = cli("run", "small.yaml", "-o", "out", "--track", name)
    assert result.exit_code == 2
    assert "pip install 'hansa[track]'" in result.stderr
    assert not (folder / "out").exists()


class Wandb(types.ModuleType):
    def __init__(self, name):
        super().__init__(name)
        self.calls = []

    def init(self, **arguments):
        self.calls.append(("init", arguments))

    def log(self, numbers, step):
        self.calls.append(("log", step, numbers))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_what_looks_like_wandb_gets_settings_once_and_numbers_each_round(cli, folder, monkeypatch, name):
    fake = Wandb(name)
    monkeypatch.setitem(sys.modules, name, fake)
    assert cli("run", "small.yaml", "-o", "x", "-q", "--track", name).exit_code == 0
    (begun, arguments), *logged = fake.calls
    assert (begun, arguments["project"], arguments["name"], arguments["config"]["local.lr"]) == (
        "init",
        "hansa",
        "small",
        0.05,
    )
    assert [(kind, step) for kind, step, _ in logged] == [("log", 1), ("log", 2), ("log", 3)]
    assert all(math.isfinite(logged[-1][2][key]) for key in ("test_accuracy", "train_loss", "up_bytes"))


def test_wandb_that_is_not_installed_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(hansa.HansaError, match="pip install wandb"):
        trackers.wandb("mine")
