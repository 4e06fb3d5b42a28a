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


@pytest.mark.parametrize("name", RECORDED)
def test_a_default_is_the_measured_one_and_close_to_the_best(name: str) -> None:
    entry = RECORDED[name]
    knob, _ = defaults.GRIDS[name]
    assert (entry["knob"], entry["default"]) == (knob, defaults.default_of(name, knob))
    assert defaults.shortfall(entry["accuracy"], entry["default"]) <= defaults.POINTS


def test_the_adaptive_presets_were_measured_and_all_have_a_grid() -> None:
    assert {"fedams", "fedcams", "fedadam"} <= RECORDED.keys() <= defaults.GRIDS.keys()
    asynchronous = {"fedasync", "fedbuff", "fadas", "ca2fl"}
    assert defaults.GRIDS.keys() == presets.catalogue().keys() - asynchronous


def test_the_page_shows_the_recorded_numbers() -> None:
    _, table, _ = defaults.PAGE.read_text().split(defaults.MARK)
    assert table.strip().splitlines() == defaults.table_lines(RECORDED)


def test_the_shortfall_is_that_of_the_worst_setting() -> None:
    table = {"0.1": {"a": 70.0, "b": 50.0}, "0.3": {"a": 60.0, "b": 58.0}}
    assert defaults.shortfall(table, 0.1) == 8.0
    assert defaults.shortfall(table, 0.3) == 10.0
