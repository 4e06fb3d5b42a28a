"""Counts from shares, computed from the decimal that was written and not from its float."""

from __future__ import annotations

import math

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
