"""Tests of configurations may import the code that these name; tests/test_looking.py tests that reading does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hansa.config import allow_code


@pytest.fixture(autouse=True)
def _code_is_allowed() -> Iterator[None]:
    with allow_code():
        yield
