"""Sweeps of Weights & Biases: our search space in its form, and trials that are plain runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import hansa
from hansa.study.wandb_sweeps import sweep_config, sweep_trial

A = torch.stack([torch.eye(2), 3 * torch.eye(2), torch.tensor([[1.0, 0.5], [0.0, 2.0]])])
TASK = hansa.training.quadratic(A, torch.tensor([[1.0, 2.0], [0.5, -1.0], [2.0, 0.0]]))
RINGS = [hansa.gossip.ring(), hansa.gossip.complete()]
AXES: dict[str, Any] = {
    "local_lr": hansa.search_range(1e-3, 0.3, log=True),
    "server_lr": hansa.search_range(0.5, 1.0),
    "steps": hansa.search_range(1, 4),
    "epochs_of": hansa.search_range(1, 64, log=True),
    "flag": [True, 1, None, "one"],
    "topology": RINGS,
}


class Tracked:
    """As much of a tracked run as is asked for."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.summary, self.logged, self.exit_code = config, {}, [], None

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged.append((step, numbers))

    def finish(self, exit_code: int = 0) -> None:
        self.exit_code = exit_code


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with wandb's interface whose sweep proposes a point."""
    import sys
    from types import SimpleNamespace

    runs: list[Tracked] = []

    def propose(**config: Any) -> list[Tracked]:
        made = SimpleNamespace(init=lambda **options: runs.append(Tracked({**config, **options})) or runs[-1])
        monkeypatch.setitem(sys.modules, "fake_wandb", made)
        return runs

    return propose


def test_the_search_space_in_the_form_of_wandb() -> None:
    config = sweep_config(AXES, "test_rmse", stop_after=5, name="mine")
    assert config == {
        "name": "mine",
        "method": "bayes",
        "metric": {"name": "test_rmse", "goal": "minimize"},
        "parameters": {
            "local_lr": {"distribution": "log_uniform_values", "min": 1e-3, "max": 0.3},
            "server_lr": {"distribution": "uniform", "min": 0.5, "max": 1.0},
            "steps": {"distribution": "int_uniform", "min": 1, "max": 4},
            "epochs_of": {"distribution": "q_log_uniform_values", "min": 1, "max": 64, "q": 1},
            "flag": {"values": [True, 1, None, "one"]},
            "topology": {"values": ["ring()", "complete()"]},
        },
        "early_terminate": {"type": "hyperband", "min_iter": 5},
    }
    assert sweep_config({"x": [1]}, "test_accuracy")["metric"]["goal"] == "maximize"
    assert sweep_config({"x": [1]}, "delay:lower")["metric"] == {"name": "delay", "goal": "minimize"}


@pytest.mark.parametrize(
    ("axes", "options", "message"),
    [
        ({}, {}, "expected at least one axis"),
        ({"x": []}, {}, "expected some values"),
        ({"x": hansa.search_range(0, 1)}, {"method": "grid"}, "values for a grid"),
        ({"x": [1]}, {"method": "bays"}, "Did you mean bayes"),
        ({"x": [1]}, {"metric": "delay"}, "delay"),
    ],
)
def test_what_does_not_fit_is_refused(axes: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(hansa.HansaError, match=message):
        sweep_config(axes, **options)


def test_a_trial_is_the_plain_run_and_its_value_the_mean_over_seeds(tracker: Any) -> None:
    axes = {"local_lr": hansa.search_range(1e-3, 0.3, log=True), "steps": [2, 3]}
    runs = tracker(local_lr=0.0123456789, steps=3)
    trial = sweep_trial(hansa.presets.fedavg, TASK, axes, rounds=4, seeds=2, metric="loss", module="fake_wandb",
                        init={"mode": "offline"})  # fmt: skip
    value = trial()
    method = hansa.presets.fedavg(local_lr=0.0123457, steps=3)
    plain = [hansa.run(method, TASK, rounds=4, seed=seed).history for seed in (0, 1)]
    assert value == math.fsum(history[-1]["loss"] for history in plain) / 2
    (tracked,) = runs
    assert tracked.summary == {"loss": value}
    assert tracked.config["mode"] == "offline"
    assert tracked.exit_code == 0
    assert [step for step, _ in tracked.logged] == list(range(1, 9))
    assert [numbers["loss"] for _, numbers in tracked.logged] == [r["loss"] for history in plain for r in history]


def test_a_trial_that_fails_is_marked_and_other_axes_are_refused(tracker: Any) -> None:
    axes = {"local_lr": hansa.search_range(1e-3, 1e30)}
    runs = tracker(local_lr=1e30)
    trial = sweep_trial(hansa.presets.fedavg, TASK, axes, rounds=2, metric="loss", module="fake_wandb")
    assert trial() is None
    assert runs[-1].exit_code == 1
    tracker(steps=2)
    with pytest.raises(hansa.HansaError, match="the sweep has no parameter 'local_lr'"):
        trial()
    tracker(local_lr=4)
    with pytest.raises(hansa.HansaError, match="the sweep proposes local_lr=4"):
        sweep_trial(hansa.presets.fedavg, TASK, {"local_lr": [1, 2]}, rounds=2, module="fake_wandb")()
    with pytest.raises(hansa.HansaError, match=r"pip install 'hansa\[wandb\]'"):
        sweep_trial(hansa.presets.fedavg, TASK, {"steps": [1]}, rounds=2, module="no_such_tracker")()


def test_values_that_are_not_plain_are_found_by_their_repr(tracker: Any) -> None:
    seen = []

    def factory(topology: Any, flag: Any) -> Any:
        seen.append((topology, flag))
        return hansa.presets.fedavg(steps=1)

    for flag in (True, 1, None):
        tracker(topology="complete()", flag=flag)
        sweep_trial(factory, TASK, {name: AXES[name] for name in ("topology", "flag")}, rounds=1, metric="loss",
                    module="fake_wandb")()  # fmt: skip
    assert seen == [(RINGS[1], True), (RINGS[1], 1), (RINGS[1], None)]
    assert [type(flag) for _, flag in seen] == [bool, int, type(None)]


def test_points_of_wandbs_own_sampler_run_offline(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its schema accepts our configuration, its sampler proposes points, and wandb tracks the trials in files."""
    wandb = pytest.importorskip("wandb", reason="not exercised: pip install 'hansa[wandb]'")
    sweeps = pytest.importorskip("sweeps", reason="the sampler of W&B is not exercised: pip install sweeps")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    axes = {"local_lr": hansa.search_range(1e-3, 0.3, log=True), "steps": hansa.search_range(1, 4)}
    config = sweeps.config.SweepConfig(sweep_config(axes, "loss", method="random"))
    values = []
    for _ in range(2):
        point = {name: each["value"] for name, each in sweeps.next_run(config, []).config.items()}
        assert 1e-3 <= point["local_lr"] <= 0.3
        assert point["steps"] in (1, 2, 3, 4)
        init = {"mode": "offline", "config": point, "dir": str(tmp_path), "project": "mine"}
        values.append(sweep_trial(hansa.presets.fedavg, TASK, axes, rounds=2, metric="loss", init=init)())
        assert wandb.run is None  # finished
    assert all(isinstance(value, float) for value in values)
    assert len(list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))) == 2
