"""Tests of configurations may import the code that these name; tests/test_looking.py tests that reading does not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hansa.config import allow_code


@pytest.fixture(autouse=True)
def _code_is_allowed() -> Iterator[None]:
    with allow_code():
        yield


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """Write a module of one's own into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(name: str, text: str) -> Path:
        sys.modules.pop(name, None)
        written.append(name)
        (tmp_path / f"{name}.py").write_text(text)
        return tmp_path

    yield write
    for name in written:
        sys.modules.pop(name, None)
