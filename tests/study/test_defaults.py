"""The defaults of the presets are those that were measured, and were within 5 points of the best of their grids.

`make defaults` measures again; here the recorded numbers are checked.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from hansa import presets

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("defaults", ROOT / "benchmarks" / "studies" / "defaults.py")
assert SPEC is not None
assert SPEC.loader is not None
defaults: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(defaults)
RECORDED = json.loads(defaults.RESULTS.read_text())


def test_every_preset_was_measured() -> None:
    assert RECORDED.keys() == defaults.GRIDS.keys() == presets.catalogue().keys()


@pytest.mark.parametrize("name", presets.catalogue())
def test_a_default_is_the_measured_one_and_close_to_the_best(name: str) -> None:
    table = RECORDED[name]
    default = defaults.label(defaults.defaults_of(name))
    assert list(table[default]) == defaults.settings_of(name)
    assert len(table) >= 3
    points = defaults.shortfall(table, default)
    assert points <= defaults.EXCEPTIONS.get(name, defaults.POINTS)
    assert points > defaults.POINTS or name not in defaults.EXCEPTIONS


def test_the_shortfall_is_that_of_the_worst_setting() -> None:
    table = {"rate=0.1": {"a": 70.0, "b": 50.0}, "rate=0.3": {"a": 60.0, "b": 58.0}}
    assert defaults.shortfall(table, "rate=0.1") == 8.0
    assert defaults.shortfall(table, "rate=0.3") == 10.0
