"""Tests of what is refused: one for each mistake, which must be an error that says the key words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hansa import HansaError


def refused(
    *mistakes: tuple[Any, str], by: Callable[[Any], Any] = lambda make: make(), error: type[Exception] = HansaError
) -> Callable[..., None]:
    """A test function: ``test_rates = refused((lambda: scale(0), "lr=0"), ...)``; ``by`` takes what is refused."""

    @pytest.mark.parametrize(("wrong", "message"), mistakes)
    def test(wrong: Any, message: str) -> None:
        with pytest.raises(error, match=message):
            by(wrong)

    return test
