"""Public names have a docstring with an example, and components document every argument. Examples run as doctests."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "site"))

from reference import names

NEEDS_AN_EXTRA = {"hansa.search"}
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
    protocol = getattr(value, "_is_protocol", False)  # docs/own-parts.md has an example of each
    assert ">>> " in text or protocol or name in NEEDS_AN_EXTRA, f"{name} has no example"


COMPONENTS = ("presets", "algorithm", "server", "aggregate", "compress", "gossip", "sample", "pace")


@pytest.mark.parametrize(
    "name", [name for name in PUBLIC if name.split(".")[1] in COMPONENTS and name.split(".")[2].islower()]
)
def test_documents_every_argument(name: str) -> None:
    module, _, last = name.rpartition(".")
    value = getattr(importlib.import_module(module), last)
    listed = (inspect.getdoc(value) or "").partition("Args:")[2]
    for argument in inspect.signature(value).parameters:
        assert f" {argument}: " in listed.replace("*", ""), f"{name} does not document {argument}"
