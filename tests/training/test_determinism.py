"""Deterministic algorithms on accelerators: on by default, switchable, restored, and copied to workers."""

from __future__ import annotations

import os
from typing import ClassVar

import pytest
import torch
from torch import nn

import hansa
from engine import problems
from hansa.runs.driver import Run
from hansa.training.random_state import CUBLAS, NumericSettings, deterministic_algorithms

METHOD = hansa.presets.fedavg(local_lr=0.1, steps=2, batch_size=5, participation=0.4)


def settings() -> NumericSettings:
    """Those in force; what a run requests of other machines is not among them."""
    return NumericSettings.current()._replace(deterministic=True)


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Everything is as before after each test."""
    monkeypatch.delenv(CUBLAS, raising=False)
    monkeypatch.setenv("HANSA_NATIVE", "off")
    before = settings()
    yield
    assert settings() == before


class Watching(nn.Module):
    """Notes the settings under which it is trained."""

    seen: ClassVar[list[NumericSettings]] = []

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(settings())
        return self.head(x.flatten(1))


class Puts(Watching):
    """Uses an operation that has no deterministic form on any device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.zeros(2, dtype=torch.int64, device=x.device)
        return super().forward(x.clone().put_(index, torch.ones(2, device=x.device)))


def task(model=Watching) -> hansa.Task:
    made = hansa.Task(model, nn.functional.cross_entropy, problems.data(test=40), execution="eager")
    Watching.seen.clear()
    return made


def test_on_the_cpu_it_changes_neither_settings_nor_bits():
    mine, before = task(), settings()
    on, off = (Run(METHOD, mine, deterministic=wanted).advance(2) for wanted in (True, False))
    assert torch.equal(on.params, off.params)
    assert set(Watching.seen) == {before}
    Run(METHOD, task(Puts), deterministic=True).advance(1)  # not an error there


def test_own_settings_are_kept_where_they_are_stricter_or_chosen(monkeypatch):
    monkeypatch.setenv(CUBLAS, ":16:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_algorithms():
            now = settings()
            assert (now.enabled, now.warn_only, now.cublas) == (True, True, ":16:8")
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        with pytest.raises(KeyError), deterministic_algorithms():
            raise KeyError("another error stays as it is")
    finally:
        torch.use_deterministic_algorithms(False)
        monkeypatch.undo()


def test_workers_copy_the_settings():
    with deterministic_algorithms():
        inside = NumericSettings.current()
    before, threads = NumericSettings.current(), torch.get_num_threads()
    try:
        inside.apply()
        assert NumericSettings.current() == inside
        assert os.environ[CUBLAS] == ":4096:8"
        assert (torch.backends.cudnn.deterministic, inside.fill_memory) == (True, False)
    finally:
        before.apply()
        torch.set_num_threads(threads)


def test_it_is_an_option_of_files_and_of_runs():
    assert hansa.config.from_yaml("deterministic: false").deterministic is False
    assert hansa.config.from_yaml("rounds: 3").deterministic is True
    with pytest.raises(hansa.HansaError, match=r"run\(deterministic='no'\): expected True or False"):
        hansa.run(METHOD, task(), rounds=1, deterministic="no")
