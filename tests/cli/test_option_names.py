"""One name for one thing: an option of a command is an argument of the function that does the same in Python."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

import hansa
from hansa.cli import compare, run, show
from hansa.runs.driver import RunOptions
from hansa.runs.export import export

ONLY_COMMANDS = {"as_json",
    "config", "sets", "base",  # a configuration file and changes to it
    "preset",  # an algorithm by name
    "quiet",  # progress=False
    "trust", "track", "engine", "address", "resume", "fallback",  # run --resume is hansa.resume; trackers are callbacks
    "report", "latex", "metric", "window", "target",  # of the result: Comparison.report, .latex, .ranking
    "search", "grid", "runs",  # axes and methods
    "folder",
}  # fmt: skip
"""Arguments of commands that have no counterpart in the function of the same name."""
PAIRS = {
    "run": (run.run, hansa.run),
    "resume": (run.resume, hansa.resume),
    "compare": (compare.compare, hansa.compare),
    "sweep": (compare.sweep, hansa.search),
}


@pytest.mark.parametrize("name", PAIRS)
def test_an_option_and_an_argument_have_one_name(name):
    command, function = PAIRS[name]
    known = {*inspect.signature(function).parameters, *(field.name for field in fields(RunOptions))}
    shared = set(inspect.signature(command).parameters) - ONLY_COMMANDS
    single_seed = {"seed"} if name in ("compare", "sweep") else set()  # in Python seeds=[3]
    assert shared - single_seed <= known, shared - known


def test_results_take_the_same_words_as_the_commands():
    words = {"metric", "window", "target"}
    for command in (compare.compare, show.report, compare.sweep):
        assert words | {"latex"} <= set(inspect.signature(command).parameters)
    for method in (hansa.Comparison.ranking, hansa.Comparison.table, hansa.Comparison.report, hansa.Comparison.latex):
        assert words <= set(inspect.signature(method).parameters)
    assert {"metric", "window"} <= set(inspect.signature(hansa.search).parameters)
    assert "trust" in inspect.signature(export).parameters
