"""Learning rates by round. A plain number is a constant rate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from hansa.core.bounds import Checked, bound, numbers_above_zero
from hansa.core.errors import check_integer, check_non_negative, check_positive, invalid_argument


@runtime_checkable
class Schedule(Protocol):
    """A rate as a function of the round, counted from 0."""

    def at(self, round: int) -> float: ...


Rate: TypeAlias = float | Schedule


def rate_at(rate: Rate, round: int) -> float:
    """Return the rate in a round."""
    at = getattr(rate, "at", None)  # isinstance of a protocol is ten times slower, and this is called often
    return float(rate) if at is None else float(at(round))  # type: ignore[arg-type]


def check_rate(component: str, argument: str, rate: object) -> None:
    """Raise unless the rate is a positive number or a schedule."""
    if not isinstance(rate, Schedule):
        check_positive(component, argument, rate, "Use a small positive rate such as 0.05, or a schedule.")


@dataclass(frozen=True, slots=True)
class step_decay(Checked):
    """lr * factor ** (round // every).

    Args:
        lr: Initial rate.
        every: Rounds between decays.
        factor: Factor of each decay.

    >>> step_decay(0.1, every=10, factor=0.5).at(25)
    0.025
    """

    lr: float = field(metadata=bound(check_positive))
    every: int = field(metadata=bound(check_integer))
    factor: float = field(default=0.1, metadata=bound(check_positive))

    def at(self, round: int) -> float:
        return self.lr * self.factor ** (round // self.every)


@dataclass(frozen=True, slots=True)
class inverse_sqrt(Checked):
    """lr / sqrt(1 + round / scale): the decay usually assumed in the theory of SGD.

    Args:
        lr: Initial rate.
        scale: Rounds after which the rate is lr / sqrt(2).

    >>> inverse_sqrt(0.2, scale=1).at(3)
    0.1
    """

    lr: float = field(metadata=bound(check_positive))
    scale: float = field(default=1.0, metadata=bound(check_positive))

    def at(self, round: int) -> float:
        return self.lr / math.sqrt(1 + round / self.scale)


@dataclass(frozen=True, slots=True)
class cosine(Checked):
    """Half a cosine from lr down to floor over the given rounds, then floor.

    Args:
        lr: Initial rate.
        rounds: Round in which the rate reaches its end.
        floor: Rate at the end.

    >>> cosine(1.0, rounds=10).at(5)
    0.5
    """

    lr: float = field(metadata=bound(check_positive))
    rounds: int = field(metadata=bound(check_integer))
    floor: float = field(default=0.0, metadata=bound(check_non_negative))

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.floor > self.lr:
            raise invalid_argument("cosine", "floor", self.floor, f"floor <= lr = {self.lr}")

    def at(self, round: int) -> float:
        phase = min(round / self.rounds, 1.0)
        return self.floor + (self.lr - self.floor) * (0.5 * (1 + math.cos(math.pi * phase)))


@dataclass(frozen=True, slots=True)
class warmup(Checked):
    """Linear increase over the first rounds, then the given rate or schedule.

    Args:
        lr: Rate, or schedule, after the warm-up.
        rounds: Rounds of the warm-up.

    >>> warmup(0.4, rounds=4).at(0), warmup(0.4, rounds=4).at(9)
    (0.1, 0.4)
    """

    lr: Rate = field(metadata=bound(check_rate))
    rounds: int = field(metadata=bound(check_integer))

    def at(self, round: int) -> float:
        return rate_at(self.lr, round) * min((round + 1) / self.rounds, 1.0)


@dataclass(frozen=True, slots=True)
class piecewise(Checked):
    """The given rates, one per round, then the last one.

    Args:
        rates: Rate of each round.

    >>> [piecewise((0.3, 0.2)).at(r) for r in range(3)]
    [0.3, 0.2, 0.2]
    """

    rates: tuple[float, ...] = field(metadata=bound(numbers_above_zero))

    def at(self, round: int) -> float:
        return self.rates[min(round, len(self.rates) - 1)]
