"""Numbers formatted for people: percentages, bits, durations, and means with deviations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from hansa.runs.columns import column_of

Formatter: TypeAlias = Callable[[float | None], str]


def format_percent(value: float | None) -> str:
    """
    >>> format_percent(0.8123), format_percent(None)
    ('81.2%', '–')
    """
    return "–" if value is None or not math.isfinite(value) else f"{value:.1%}"


def format_bits(value: float | None) -> str:
    """
    >>> format_bits(0), format_bits(1_234_567), format_bits(3.58e11)
    ('0 bit', '1.23 Mbit', '358 Gbit')
    """
    if value is None:
        return "–"
    for unit in ("bit", "kbit", "Mbit", "Gbit", "Tbit"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} Pbit"


def format_duration(seconds: float | None) -> str:
    """
    >>> format_duration(0.25), format_duration(75), format_duration(600), format_duration(9000)
    ('250 ms', '75 s', '10 min', '2.5 h')
    """
    if seconds is None or not math.isfinite(seconds):
        return "–"
    for limit, unit, name in ((1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86_400:.3g} d"


def format_number(value: float | None) -> str:
    """
    >>> format_number(0.123456), format_number(None), format_number(1_234_567)
    ('0.123', '–', '1.23e+06')
    """
    return "–" if value is None or not math.isfinite(value) else f"{value:.3g}"


def format_count(value: float | None) -> str:
    """
    >>> format_count(12), format_count(12.333), format_count(None)
    ('12', '12.3', '–')
    """
    return "–" if value is None else f"{value:.1f}".removesuffix(".0")


_FORMATTERS: dict[str, Formatter] = {
    "fraction": format_percent,
    "bits": format_bits,
    "bytes": lambda value: "–" if value is None else format_bits(8 * value),  # networks are measured in bits
    "seconds": format_duration,
    "count": format_count,
}


def formatter_of(column: str) -> Formatter:
    """Return the formatter of a column of a history or a summary.

    >>> formatter_of("last5_test_accuracy")(0.5), formatter_of("up_bits")(8000)
    ('50.0%', '8 kbit')
    """
    return _FORMATTERS.get(column_of(column).unit, format_number)


def format_spread(write: Formatter, mean: float, deviation: float) -> str:
    """Format a mean over seeds with its deviation, in one unit.

    >>> format_spread(format_percent, 0.8123, 0.0041), format_spread(format_number, 0.2754, 0.00279)
    ('81.2 ± 0.4%', '0.275 ± 0.003')
    """
    text, spread = write(mean), write(deviation)
    if write is format_number and "e" not in text and math.isfinite(deviation):  # as many decimals as the mean has
        rounded = f"{deviation:.{len(text.partition('.')[2])}f}"
        spread = rounded if float(rounded) else spread
    return f"{text.removesuffix('%')} ± {spread}"
