"""Numbers formatted for people by their unit: percentages, bits, durations, and means with deviations."""

from __future__ import annotations

import math

from hansa.runs.columns import Unit, column_of

SCALES: dict[str, tuple[tuple[float, float, str], ...]] = {
    "bits": (
        (999.5, 1, "bit"), (999.5e3, 1e3, "kbit"), (999.5e6, 1e6, "Mbit"), (999.5e9, 1e9, "Gbit"),
        (999.5e12, 1e12, "Tbit"), (math.inf, 1e15, "Pbit"),
    ),
    "seconds": ((1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h"), (math.inf, 86_400, "d")),
}  # fmt: skip
"""The units of a scale: the limit of each, its size, and its name."""


def format_number(value: float | None, unit: Unit = "number") -> str:
    """Return a number as text, in the scale of its unit; – for None and for numbers that are not finite.

    >>> [format_number(value) for value in (0.123456, 1_234_567, None)]
    ['0.123', '1.23e+06', '–']
    >>> format_number(0.8123, "fraction"), format_number(12, "count"), format_number(12.333, "count")
    ('81.2%', '12', '12.3')
    >>> [format_number(value, "bits") for value in (0, 1_234_567, 3.58e11)]
    ['0 bit', '1.23 Mbit', '358 Gbit']
    >>> [format_number(value, "seconds") for value in (0.25, 75, 600, 9000)]
    ['250 ms', '75 s', '10 min', '2.5 h']
    """
    if value is None or not math.isfinite(value):
        return "–"
    if unit == "fraction":
        return f"{value:.1%}"
    if unit == "count":
        return f"{value:.1f}".removesuffix(".0")
    if unit == "bytes":  # networks are measured in bits
        return format_number(8 * value, "bits")
    for limit, size, name in SCALES.get(unit, ()):
        if value < limit:
            return f"{value / size:.3g} {name}"
    return f"{value:.3g}"


def format_value(column: str, value: float | None) -> str:
    """Return a value of a column of a history or a summary as text.

    >>> format_value("last5_test_accuracy", 0.5), format_value("up_bits", 8000)
    ('50.0%', '8 kbit')
    """
    return format_number(value, column_of(column).unit)


def format_spread(mean: float, deviation: float, unit: Unit = "number") -> str:
    """Return a mean over seeds with its deviation, in one unit.

    >>> format_spread(0.8123, 0.0041, "fraction"), format_spread(0.2754, 0.00279)
    ('81.2 ± 0.4%', '0.275 ± 0.003')
    """
    text, spread = format_number(mean, unit), format_number(deviation, unit)
    if unit == "number" and "e" not in text and math.isfinite(deviation):  # as many decimals as the mean has
        rounded = f"{deviation:.{len(text.partition('.')[2])}f}"
        spread = rounded if float(rounded) else spread
    return f"{text.removesuffix('%')} ± {spread}"
