"""Gradient diversity and related measures (Zeng et al., FedAWARE), from squared norms and weights alone."""

from __future__ import annotations

import math
from collections.abc import Sequence


def diversity(squares: Sequence[float], weights: Sequence[float], combined: float) -> float:
    """Return D = sqrt( sum lambda_i ||g_i||^2 / ||sum lambda_i g_i||^2 ) >= 1 (Def. 3.1).

    Args:
        squares: Squared norms ||g_i||^2.
        weights: Weights lambda of the objective.
        combined: Squared norm ||sum lambda_i g_i||^2.

    >>> round(diversity([1.0, 1.0], [0.5, 0.5], 0.5), 6)
    1.414214
    """
    if combined <= 0:
        return math.inf if any(squares) else 1.0
    return math.sqrt(math.fsum(w * s for w, s in zip(weights, squares, strict=True)) / combined)


def surrogate_diversity(squares: Sequence[float], weights: Sequence[float], surrogate: float) -> float:
    """Return D~ = sqrt( sum lambda_i ||g_i||^2 / ||sum lambda~_i g_i||^2 ) (Def. 3.2).

    The numerator has the objective's weights lambda, the denominator the direction's weights lambda~.

    Args:
        squares: Squared norms ||g_i||^2.
        weights: Weights lambda of the objective.
        surrogate: Squared norm ||sum lambda~_i g_i||^2.

    >>> round(surrogate_diversity([1.0, 9.0], [0.5, 0.5], 0.9), 6)  # sqrt(5 / 0.9)
    2.357023
    """
    return diversity(squares, weights, surrogate)


def chi_square(used: Sequence[float], weights: Sequence[float]) -> float:
    """Return chi^2 = sum lambda~_i^2 / lambda_i^2, how far the direction's weights are from the objective's (Thm. 4.1).

    It is n for lambda~ = lambda, and at uniform lambda n^2 sum lambda~_i^2: up to n^2 for a single client.

    Args:
        used: Weights lambda~ of the direction.
        weights: Weights lambda of the objective.

    >>> chi_square([0.25, 0.75], [0.5, 0.5])
    2.5
    """
    pairs = [(f, w) for f, w in zip(used, weights, strict=True) if f]
    return math.inf if any(w == 0 for _, w in pairs) else math.fsum((f / w) ** 2 for f, w in pairs)
