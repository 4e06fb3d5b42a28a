"""Exact moments of numbers: sums that do not depend on order or on which site holds which row."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from hansa.data.files import DataError

if TYPE_CHECKING:
    import numpy.typing as npt

_BLOCK = 512  # products below 2**54 are added in int64 without overflow
_MAX_DIGITS = 2400  # hexadecimal digits of a sum
_MAX_EXPONENT = 5000


@dataclass(frozen=True, slots=True)
class Moments:
    """Number, sum and sum of squares of float64 values, exact.

    A float is an integer times a power of two, so sums are fractions without rounding: the merged moments of sites are
    those of all rows, bit for bit, in any order.

    Args:
        count: Number of values.
        total: Their sum.
        squares: The sum of their squares.

    >>> whole = Moments.of(np.array([0.1, 0.2, 0.3]))
    >>> Moments.of(np.array([0.3])).merge(Moments.of(np.array([0.2, 0.1]))) == whole
    True
    >>> Moments.of(np.array([1.0, 3.0])).mean_and_std()
    (2.0, 1.0)
    """

    count: int
    total: Fraction
    squares: Fraction

    @classmethod
    def of(cls, values: npt.NDArray[np.float64]) -> Moments:
        """Return the moments of finite values."""
        return cls(len(values), *_exact_sums(np.asarray(values, np.float64)))

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the values of both."""
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    def mean_and_std(self) -> tuple[float, float]:
        """Return the mean and the standard deviation over n, correctly rounded; a deviation of 0 is returned as 1."""
        mean = self.total / self.count
        variance = self.squares / self.count - mean * mean
        try:
            deviation = math.sqrt(float(variance))
        except OverflowError:
            raise DataError("moments: the variance is too large for float64: rescale the column.") from None
        return float(mean), deviation if deviation > 0 else 1.0

    def to_json(self) -> list[Any]:
        """Return the moments as plain data."""
        return [self.count, _write(self.total), _write(self.squares)]

    @classmethod
    def from_json(cls, content: Any) -> Moments:
        """Return the moments of plain data; impossible ones are refused."""
        if not isinstance(content, list) or len(content) != 3 or isinstance(content[0], bool):
            raise DataError("moments: expected a count and two sums.")
        count, total, squares = content[0], _read(content[1]), _read(content[2])
        if not isinstance(count, int) or not 1 <= count < 1 << 48 or squares * count < total * total:
            raise DataError("moments: no values have this count, sum and sum of squares.")
        return cls(count, total, squares)


def _exact_sums(values: npt.NDArray[np.float64]) -> tuple[Fraction, Fraction]:
    mantissas, exponents = np.frexp(values)  # values = mantissas * 2**exponents
    whole = np.ldexp(mantissas, 53).astype(np.int64)
    total = squares = Fraction(0)
    for exponent in np.unique(exponents):
        part = whole[exponents == exponent]
        high, low = part >> 27, part & ((1 << 27) - 1)  # part = high * 2**27 + low
        unit = Fraction(2) ** (int(exponent) - 53)
        total += ((_sum(high) << 27) + _sum(low)) * unit
        squares += ((_sum(high * high) << 54) + (_sum(high * low) << 28) + _sum(low * low)) * unit * unit
    return total, squares


def _sum(parts: npt.NDArray[np.int64]) -> int:
    return sum(np.add.reduceat(parts, np.arange(0, len(parts), _BLOCK)).tolist())


def _write(value: Fraction) -> str:
    """Return a dyadic fraction as ``HEX/EXPONENT``: numerator / 2**exponent."""
    return f"{value.numerator:x}/{value.denominator.bit_length() - 1}"


def _read(text: Any) -> Fraction:
    match = _DYADIC.fullmatch(text) if isinstance(text, str) and len(text) <= _MAX_DIGITS + 10 else None
    if match is None or int(match.group(2)) > _MAX_EXPONENT:
        raise DataError("moments: not a sum of floats.")
    return Fraction(int(match.group(1), 16), 1 << int(match.group(2)))


_DYADIC = re.compile("(-?[0-9a-f]{1,2400})/([0-9]{1,4})")
