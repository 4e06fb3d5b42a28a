"""Every public name says what it is, with an example; the examples run with the suite, as doctests."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "site"))

from reference import names

NEEDS_AN_EXTRA = {"hansa.search", "hansa.data.from_hub"}
"""Whose examples cannot run with what the suite installs; they have tests of their own that say so."""

PUBLIC = sorted({name for line in names() for name in line.split()[1:]})


def test_the_reference_has_names() -> None:
    assert len(PUBLIC) > 250


@pytest.mark.parametrize("name", PUBLIC)
def test_has_a_docstring_with_an_example(name: str) -> None:
    module, _, last = name.rpartition(".")
    value = getattr(importlib.import_module(module), last)
    text = inspect.getdoc(value)
    assert text, f"{name} has no docstring"
    assert ">>> " in text or name in NEEDS_AN_EXTRA, f"{name} has no example"
