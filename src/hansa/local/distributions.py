"""Distributions of numbers drawn per client, for local work and device speeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np

from hansa.core.errors import HansaError, check_integer, check_non_negative, check_positive, invalid_argument


class Distribution(Protocol):
    """A distribution that may depend on the client's number of samples."""

    def draw(self, chance: np.random.Generator, samples: int) -> float: ...


Drawn: TypeAlias = float | Distribution


def drawn_value(value: Drawn, chance: np.random.Generator, samples: int) -> float:
    """Return a number unchanged, or a draw from a distribution."""
    return float(value) if isinstance(value, (int, float)) else value.draw(chance, samples)


def check_drawn(part: str, argument: str, value: object) -> None:
    """Raise unless the value is a positive number or a distribution."""
    if not hasattr(value, "draw"):
        check_positive(part, argument, value, "A number, or a distribution such as between(2, 5).")


@dataclass(frozen=True, slots=True)
class between:
    """An integer, uniform in {low..high}; ``high`` may be "samples", the client's number of samples.

    >>> between(3, 3).draw(np.random.default_rng(0), 10)
    3.0
    """

    low: int
    high: int | Literal["samples"]

    def __post_init__(self) -> None:
        check_integer("between", "low", self.low)
        if self.high != "samples":
            check_integer("between", "high", self.high, "A whole number, or 'samples'.")
            if isinstance(self.high, int) and self.high < self.low:
                raise invalid_argument("between", "high", self.high, f"high >= low = {self.low}")

    def draw(self, chance: np.random.Generator, samples: int) -> float:
        high = samples if isinstance(self.high, str) else self.high
        return float(chance.integers(min(self.low, high), high + 1))


@dataclass(frozen=True, slots=True)
class one_of:
    """One of the given numbers, uniformly or with the given probabilities.

    >>> one_of([1, 5], chances=[0.9, 0.1]).values
    (1, 5)
    """

    values: Sequence[float]
    chances: Sequence[float] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        for value in self.values:
            check_positive("one_of", "values", value)
        if not self.values:
            raise invalid_argument("one_of", "values", self.values, "at least one number")
        if self.chances is not None:
            object.__setattr__(self, "chances", tuple(self.chances))
            for chance in self.chances:
                check_non_negative("one_of", "chances", chance)
            if len(self.chances) != len(self.values) or not math.isclose(sum(self.chances), 1.0, rel_tol=1e-9):
                raise HansaError(
                    f"one_of(chances={self.chances!r}): expected {len(self.values)} numbers that sum to 1.",
                    component="one_of",
                    argument="chances",
                )

    def draw(self, chance: np.random.Generator, samples: int) -> float:
        return float(chance.choice(np.asarray(self.values, dtype=np.float64), p=self.chances))


@dataclass(frozen=True, slots=True)
class lognormal:
    """median * exp(sigma z), z standard normal: the usual model of device speeds.

    >>> lognormal(10.0).median
    10.0
    """

    median: float
    sigma: float = 0.5

    def __post_init__(self) -> None:
        check_positive("lognormal", "median", self.median)
        check_non_negative("lognormal", "sigma", self.sigma)

    def draw(self, chance: np.random.Generator, samples: int) -> float:
        return self.median * math.exp(self.sigma * float(chance.standard_normal()))


@dataclass(frozen=True, slots=True)
class half_normal:
    """|z| * scale with z standard normal, at least ``minimum``: most devices are fast, few are slow.

    >>> half_normal(2.0).draw(np.random.default_rng(0), 10) > 0
    True
    """

    scale: float
    minimum: float = 0.001

    def __post_init__(self) -> None:
        check_positive("half_normal", "scale", self.scale)
        check_positive("half_normal", "minimum", self.minimum)

    def draw(self, chance: np.random.Generator, samples: int) -> float:
        return max(self.minimum, self.scale * abs(float(chance.standard_normal())))


@dataclass(frozen=True, slots=True)
class zipf:
    """unit * k with P(k) proportional to k^-exponent, k at most ``maximum``: a heavy tail of slow devices.

    >>> zipf(1.7, unit=0.5, maximum=1).draw(np.random.default_rng(0), 10)
    0.5
    """

    exponent: float = 1.7
    unit: float = 1.0
    maximum: int = 1000

    def __post_init__(self) -> None:
        check_positive("zipf", "unit", self.unit)
        check_integer("zipf", "maximum", self.maximum)
        if not isinstance(self.exponent, (int, float)) or not 1 < self.exponent < math.inf:
            raise invalid_argument("zipf", "exponent", self.exponent, "exponent > 1", "1.7 is a heavy tail.")

    def draw(self, chance: np.random.Generator, samples: int) -> float:
        return self.unit * min(self.maximum, int(chance.zipf(self.exponent)))
