"""Which engine a run gets: never a crash, always a logged reason, always the same numbers."""

from __future__ import annotations

import logging
import sys
import threading
from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch import nn

import hansa
from engine import problems
from hansa import presets
from hansa.core.devices import available_cores
from hansa.engine.auto import auto_engine
from hansa.engine.pool import Pool
from hansa.engine.serial import Serial
from hansa.runs.driver import Run
from same_runs import assert_same_run

auto = import_module("hansa.engine.auto")
WORDS = {"local_lr": 0.05, "steps": 3, "batch_size": 7}


def both(algorithm, task, factory, rounds: int = 3) -> list[Run]:
    return [Run(algorithm, task, keep_params=True, engine=engine).advance(rounds) for engine in (Serial, factory)]


def messages(caplog) -> list[str]:
    """What was logged about workers."""
    return [record.message for record in caplog.records if "count equally" not in record.message]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(auto, "available_cores", lambda: 2)


def test_one_worker_or_one_core_is_serial(monkeypatch):
    assert auto_engine(1, rounds=100) is Serial
    monkeypatch.setattr(auto, "available_cores", lambda: 1)
    assert auto_engine(None, rounds=100) is Serial


NO_GAIN = "serial: workers would not save time in this short run"
SHORT = "serial: a client's steps take less time than handing them to a worker"


@pytest.mark.parametrize(
    ("limits", "outside_lock", "asked", "message"),
    [
        ({}, False, {"workers": None}, NO_GAIN),
        ({"START_SECONDS": 0.0}, False, {"workers": None, "kind": "thread"}, "2 workers: threads"),
        ({"HANDOVER_SECONDS": 0.0}, True, {"workers": 2}, "2 workers: threads"),
        ({"HANDOVER_SECONDS": 10.0}, True, {"workers": 2}, SHORT),
    ],
)
def test_the_choice_is_said_and_the_result_does_not_depend_on_it(
    limits, outside_lock, asked, message, caplog, monkeypatch
):
    for name, seconds in limits.items():
        monkeypatch.setattr(auto, name, seconds)
    if outside_lock:
        monkeypatch.setattr(hansa.training.trainer.ModuleTrainer, "releases_gil", True)
    task = problems.task()
    with caplog.at_level(logging.INFO, "hansa"):
        assert_same_run(*both(presets.scaffold(**WORDS), task, auto_engine(rounds=3, **asked)))
    assert messages(caplog) == [message]


@pytest.mark.parametrize(("rounds", "starts"), [(10, False), (1000, True)])
def test_the_rule_weighs_the_time_ahead_against_the_start(monkeypatch, rounds, starts):
    """6 clients of 0.01 s a round on 2 cores: 10 rounds save 0.3 s, 1000 rounds 30 s; workers take 2 s to start."""
    monkeypatch.setattr(auto, "probe_step", lambda *_: (False, 0.01))
    task, algorithm = problems.bowls(), presets.fedavg(local_lr=0.1, steps=1)
    engine = auto_engine(None, rounds, kind="thread")(algorithm, task, torch.float64, problems.CPU)
    assert isinstance(engine, Pool) == starts
    engine.close()


class _Local(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(36, 3))


class _Held:
    """A loss that cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target)


def test_a_model_that_cannot_be_sent_runs_in_threads_if_its_steps_are_long(caplog, monkeypatch):
    monkeypatch.setattr(auto, "LONG_STEP_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, "hansa"):
        task = hansa.Task(_Local, _Held(), problems.data(), execution="eager")
        assert_same_run(*both(presets.fedavg(**WORDS), task, auto_engine(2, rounds=3)))
    assert caplog.records[-1].message == "2 workers: threads"


def test_a_model_for_which_neither_is_safe_runs_serially_and_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(auto, "LONG_STEP_SECONDS", 0.0)
    auto._warn_once.cache_clear()
    task = hansa.Task(problems.dropout, _Held(), problems.data(), execution="eager", name="locked")
    with caplog.at_level(logging.WARNING, "hansa"):
        for _ in range(2):
            assert_same_run(*both(presets.fedavg(**WORDS), task, auto_engine(2, rounds=3)))
    (warning,) = messages(caplog)
    assert warning.startswith(
        "locked: runs serially, without workers: its loss cannot be sent to another process (cannot pickle "
        "'_thread.lock' object); its model draws random numbers"
    )


def test_a_worker_that_cannot_read_its_task_leaves_the_run_serial(caplog, monkeypatch):
    """A module that only this process has."""
    hidden = ModuleType("hidden_module")
    exec("from engine.problems import perceptron\ndef net(): return perceptron()", hidden.__dict__)
    monkeypatch.setitem(sys.modules, "hidden_module", hidden)
    task = hansa.Task(hidden.net, nn.functional.cross_entropy, problems.data(), execution="eager")
    with caplog.at_level(logging.INFO, "hansa"):
        assert_same_run(*both(presets.fedavg(**WORDS), task, auto_engine(2, rounds=3)))
    assert "No module named 'hidden_module'" in caplog.text
    assert "runs serially, without workers" in caplog.records[-1].message


def test_wrong_arguments_are_refused():
    with pytest.raises(hansa.HansaError, match=r"run\(workers=0\).*None uses all cores"):
        auto_engine(0, rounds=1)
    with pytest.raises(hansa.HansaError, match=r"run\(kind='fibre'\)"):
        auto_engine(2, rounds=1, kind="fibre")


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000", 3),
        ("100000 100000", 1),
        ("200000 100000", 2),
        ("900000 100000", 3),
        ("10000 100000", 1),
        (None, 3),
    ],
)
def test_cores_are_those_that_this_process_may_use_within_its_quota(monkeypatch, quota, expected):
    def read(path, encoding):
        assert str(path) == "/sys/fs/cgroup/cpu.max"
        if quota is None:
            raise FileNotFoundError(path)
        return quota + "\n"

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 3, 5})
    monkeypatch.setattr("pathlib.Path.read_text", read)
    assert available_cores() == expected
