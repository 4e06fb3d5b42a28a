"""Paired differences over seeds: two methods share the partition and the first model of each seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from hansa.core.errors import HansaError

MIN_SEEDS = 3
"""The fewest seeds from which a spread is estimated."""


class MeanInterval(NamedTuple):
    """A mean over seeds and half the width of its confidence interval; infinite below `MIN_SEEDS` seeds."""

    mean: float
    half: float
    seeds: int

    @property
    def sign(self) -> int:
        """1 if the whole interval is above zero, -1 if it is below, 0 if it contains zero.

        >>> MeanInterval(0.5, 0.2, 3).sign, MeanInterval(-0.5, 0.2, 3).sign, MeanInterval(0.1, 0.2, 3).sign
        (1, -1, 0)
        """
        return 1 if self.mean - self.half > 0 else -1 if self.mean + self.half < 0 else 0


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> MeanInterval:
    """Return mean ± t s / sqrt(n), with the quantile t of Student's distribution with n - 1 degrees of freedom.

    Args:
        values: One number for each seed.
        confidence: The confidence level, between 0 and 1.

    >>> interval = mean_interval([1.0, 2.0, 3.0])
    >>> interval.mean, round(interval.half, 3)
    (2.0, 2.484)
    >>> mean_interval([1.0, 2.0]).half
    inf
    """
    if not values:
        raise HansaError("mean_interval(values=[]): expected at least one number.")
    if not 0 < confidence < 1:
        raise HansaError(f"mean_interval(confidence={confidence}): expected a number between 0 and 1.")
    count = len(values)
    if count < MIN_SEEDS:
        return MeanInterval(fmean(values), math.inf, count)
    from scipy.special import stdtrit

    quantile = float(stdtrit(count - 1, 0.5 + confidence / 2))
    return MeanInterval(fmean(values), quantile * stdev(values) / math.sqrt(count), count)


def paired_interval(first: Sequence[float], second: Sequence[float], confidence: float = 0.95) -> MeanInterval:
    """Return the interval of the mean of ``first[seed] - second[seed]``.

    The difference within a seed cancels what both methods share: the partition and the first model. Numbers that are
    equal up to rounding have the difference 0.

    Args:
        first: The numbers of one method, by seed.
        second: Those of the other method, in the same order of seeds.
        confidence: The confidence level.

    >>> paired_interval([81.0, 85.0, 89.0], [80.0, 84.0, 88.0])
    MeanInterval(mean=1.0, half=0.0, seeds=3)
    """
    if len(first) != len(second):
        raise HansaError(
            f"paired_interval: {len(first)} and {len(second)} numbers; expected one of each for every seed."
        )
    differences = [
        0.0 if math.isclose(one, other, rel_tol=1e-12) else one - other
        for one, other in zip(first, second, strict=True)
    ]
    return mean_interval(differences, confidence)
