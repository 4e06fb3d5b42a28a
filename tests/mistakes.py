"""Tests of what is refused: one for each mistake, which must be an error that says the key words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hansa import HansaError


def refused(*mistakes: tuple[Callable[[], Any], str], error: type[Exception] = HansaError) -> Callable[..., None]:
    """A test function: ``test_wrong_rates_are_refused = refused((lambda: scale(0), "lr=0"), ...)``."""

    @pytest.mark.parametrize(("make", "message"), mistakes)
    def test(make: Callable[[], Any], message: str) -> None:
        with pytest.raises(error, match=message):
            make()

    return test
