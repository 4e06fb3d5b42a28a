"""The constants that the theorems assume of a problem: smoothness, bounds of gradients, variances.

Unknown constants are NaN, which makes every value that needs one unknown as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from hansa.core.errors import HansaError, invalid_argument, suggestion


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemConstants:
    """The constants of the papers' assumptions.

    Args:
        L: Smoothness of every client's loss ([CAMS] 4.1, [HAFED] 5.1, [AFGA] 4.1, [AWARE] 2.1).
        G: Bound of the norm of a stochastic gradient ([CAMS] 4.2, [HAFED] 5.2, [AFGA] 4.3).
        sigma_l: Deviation of a stochastic gradient from its client's; [HAFED] and [AFGA] call it sigma.
        sigma_g: Deviation of the clients' gradients from their mean ([CAMS] 4.3, [AFGA] 4.4, [AWARE] 3.1).
        sigma_within: Deviation of the clients' gradients from the mean of their cluster, the root of the mean of
            sigma_k^2 ([HAFED] 5.4, [AFGA] D.1).
        sigma_between: Deviation of the clusters' gradients from the global one: sigma_g of [HAFED] 5.4 and sigma_c of
            [AFGA] D.1, at alpha = 1.
        gap: f_0 - f*, the loss at the start above its minimum.
        gradient_norm: Norm of the global gradient.
        gradient_scale: sqrt(sum lambda_i ||grad f_i||^2), the G~ of [AWARE] Theorem 4.1.
        d: Number of parameters.
        zeta: ||grad f_i - grad f||^2 of every client ([AWARE] Corollary 3.2).

    >>> ProblemConstants(L=2.0).G
    nan
    """

    L: float = math.nan
    G: float = math.nan
    sigma_l: float = math.nan
    sigma_g: float = math.nan
    sigma_within: float = math.nan
    sigma_between: float = math.nan
    gap: float = math.nan
    gradient_norm: float = math.nan
    gradient_scale: float = math.nan
    d: float = math.nan
    zeta: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in NAMES:
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or value < 0 or math.isinf(value):
                raise invalid_argument("ProblemConstants", name, value, "a number of at least 0, or NaN if unknown")

    def known(self) -> dict[str, float]:
        """Return the known numbers by name."""
        return {name: getattr(self, name) for name in NAMES if not math.isnan(getattr(self, name))}

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of the names that are unknown."""
        return [name for name in names if math.isnan(getattr(self, name))]

    def updated(self, values: Mapping[str, float]) -> ProblemConstants:
        """Return the constants with some replaced."""
        for name in values:
            if name not in NAMES:
                raise HansaError(f"{name}: not a constant of the theorems. {suggestion(name, NAMES)}")
        return ProblemConstants(**{**{name: getattr(self, name) for name in (*NAMES, "zeta")}, **values})


NAMES = tuple(item.name for item in fields(ProblemConstants) if item.name != "zeta")
"""The names of the numbers."""
UNKNOWN = ProblemConstants()
"""No constant is known."""


def smallest(terms: Iterable[float]) -> float:
    """Return the smallest term, or NaN if one is unknown.

    >>> smallest([2.0, 1.0]), smallest([1.0, float("nan")])
    (1.0, nan)
    """
    values = list(terms)
    return math.nan if any(math.isnan(value) for value in values) else min(values)


def divided(above: float, below: float) -> float:
    """Return above / below; infinite where a theorem divides by zero, which is then no condition.

    >>> divided(1.0, 4.0), divided(1.0, 0.0)
    (0.25, inf)
    """
    return math.inf if below == 0 else above / below
