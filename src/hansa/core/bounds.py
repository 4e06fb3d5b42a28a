"""Declared bounds of arguments, checked once by `Checked`; and counts from shares, computed from the decimal that was
written and not from its float.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, cast

from hansa.core.errors import check_fraction, check_integer, check_non_negative, check_positive, invalid_argument

_ROUNDING = 1e-15
"""A product of a float and a whole number is within this relative distance of the product of the decimal."""


def floor_share(share: float, total: int) -> int:
    """Return floor(share * total) for the decimal share that was written: 0.29 of 100 is 29, though the floats give
    28.999999999999996.

    >>> floor_share(0.29, 100), floor_share(0.299, 100), floor_share(1 / 3, 3)
    (29, 29, 1)
    """
    return _floor(share * total)


def round_share(share: float, total: int) -> int:
    """Return share * total rounded to the nearest whole number, halves up: 0.145 of 100 is 15.

    >>> round_share(0.145, 100), round_share(0.25, 10), round_share(0.144, 100)
    (15, 3, 14)
    """
    return _floor(share * total + 0.5)


def _floor(product: float) -> int:
    nearest = round(product)
    return nearest if math.isclose(product, nearest, rel_tol=_ROUNDING) else math.floor(product)


def bound(check: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any]:
    """Return the metadata of a field that is checked by ``check(component, field, value, *arguments, **options)``.

    The check raises an error, or returns the value to store, or None to keep the value.
    """
    return {"bound": lambda component, name, value: check(component, name, value, *arguments, **options)}


class Checked:
    """A base class of dataclasses that checks all fields with bounds. None passes where it is the default.

    A class with a check of several fields calls ``Checked.__post_init__(self)`` in its own ``__post_init__``.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        for item in fields(cast("Any", self)):
            value = getattr(self, item.name)
            if "bound" in item.metadata and not (value is None and item.default is None):
                stored = item.metadata["bound"](type(self).__name__, item.name, value)
                if stored is not None:
                    object.__setattr__(self, item.name, stored)


def or_none(component: str, argument: str, value: object, check: Callable[..., Any], *arguments: Any) -> None:
    """Check a value that may be None without that being the default."""
    if value is not None:
        check(component, argument, value, *arguments)


def one_of(component: str, argument: str, value: object, *choices: str) -> None:
    """Raise unless the value is one of the choices."""
    if not any(value == choice for choice in choices):
        *first, last = map(repr, choices)
        raise invalid_argument(component, argument, value, f"{', '.join(first)} or {last}")


def rule_or_numbers(component: str, argument: str, value: Any, *rules: str) -> Any:
    """Return a rule, or one number of at least 0 for each client or class as a tuple; raise for other values."""
    if isinstance(value, str) and value in rules:
        return value
    numbers = () if isinstance(value, str) or not hasattr(value, "__iter__") else tuple(map(float, value))
    if not numbers:
        expected = " or ".join(filter(None, [", ".join(map(repr, rules)), "one number each"]))
        raise invalid_argument(component, argument, value, expected)
    for client, number in enumerate(numbers):
        check_non_negative(component, f"{argument}[{client}]", number)
    return numbers


def numbers_above_zero(component: str, argument: str, values: Any) -> tuple[Any, ...]:
    """Return at least one number above 0 as a tuple; raise for others."""
    numbers = tuple(values)
    if not numbers:
        raise invalid_argument(component, argument, values, "at least one number")
    for number in numbers:
        check_positive(component, argument, number)
    return numbers


def share_or_count(component: str, argument: str, value: float, remedy: str = "") -> None:
    """Raise unless the value is a fraction of a number of things (float), or how many of them (int)."""
    check = check_fraction if isinstance(value, float) else check_integer
    check(component, argument, value, remedy)
