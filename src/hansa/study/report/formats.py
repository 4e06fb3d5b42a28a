"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Callable


def percent(value: float | None) -> str:
    """
    >>> percent(0.8123), percent(None)
    ('81.2%', '–')
    """
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.1f}%"


def bits(value: float | None) -> str:
    """
    >>> bits(0), bits(1_234_567), bits(3.58e11)
    ('0 bit', '1.23 Mbit', '358 Gbit')
    """
    return "–" if value is None else _scaled(float(value), ("bit", "kbit", "Mbit", "Gbit", "Tbit", "Pbit"))


def duration(seconds: float | None) -> str:
    """
    >>> duration(0.25), duration(75), duration(600), duration(9000)
    ('250 ms', '75 s', '10 min', '2.5 h')
    """
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86_400:.3g} d"


def number(value: float | None) -> str:
    """
    >>> number(0.123456), number(None), number(1_234_567)
    ('0.123', '–', '1.23e+06')
    """
    return "–" if value is None or not math.isfinite(value) else f"{value:.3g}"


def count(value: float | None) -> str:
    """
    >>> count(12), count(12.333), count(None)
    ('12', '12.3', 'never')
    """
    return "never" if value is None else str(value) if isinstance(value, int) else f"{value:.1f}"


def give_or_take(write: Callable[[float | None], str], mean: float | None, deviation: float | None) -> str:
    """A mean over seeds with its deviation, in one unit.

    >>> give_or_take(percent, 0.8123, 0.0041), give_or_take(number, 1.5, None)
    ('81.2 ± 0.4%', '1.5')
    """
    if mean is None or deviation is None:
        return write(mean)
    return f"{write(mean).removesuffix('%')} ± {write(deviation)}"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    place = 0
    while value >= 999.5 and place < len(units) - 1:
        value /= 1000
        place += 1
    return f"{value:.3g} {units[place]}"
