"""Local work: how many steps of which batch size a client does in a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from hansa.errors import HansaError, positive, refuse, whole
from hansa.keys import Key


class Work(NamedTuple):
    """A client's work of one round."""

    steps: int
    batch_size: int


class LocalWork(Protocol):
    """A draw of local work; ``key`` is the address of (round, client). ``batch_size`` None means all samples."""

    cites: ClassVar[tuple[str, ...]]

    def check(self, population: int) -> None: ...

    def draw(self, client: int, samples: int, batch_size: int | None, key: Key) -> Work: ...


def _batch(batch_size: int | None, samples: int) -> int:
    return samples if batch_size is None else min(batch_size, samples)


def _epoch_steps(epochs: float, samples: int, batch_size: int) -> int:
    """tau = floor(E n / B), at least 1; the tiny slack forgives E like 0.1 that binary cannot hold."""
    return max(1, math.floor(epochs * samples / batch_size + 1e-9))


@dataclass(frozen=True, slots=True)
class fixed:
    """The same number of steps each round: one number for all, or one a client.

    >>> fixed([1, 2]).draw(1, 100, 10, Key(0))
    Work(steps=2, batch_size=10)
    """

    steps: int | Sequence[int]
    cites: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if isinstance(self.steps, Sequence) and not isinstance(self.steps, str):
            object.__setattr__(self, "steps", tuple(self.steps))
            for steps in self.steps:
                whole("fixed", "steps", steps)
        else:
            whole("fixed", "steps", self.steps)

    def check(self, population: int) -> None:
        if isinstance(self.steps, tuple) and len(self.steps) != population:
            raise HansaError(
                f"fixed(steps): {len(self.steps)} numbers for {population} clients: give one number, or one a client."
            )

    def draw(self, client: int, samples: int, batch_size: int | None, key: Key) -> Work:
        steps = self.steps if isinstance(self.steps, int) else self.steps[client]
        return Work(steps, _batch(batch_size, samples))


@dataclass(frozen=True, slots=True)
class epochs:
    """tau_i = floor(E n_i / B) steps, at least 1; E may be fractional.

    >>> epochs(1.5).draw(0, 100, 20, Key(0))
    Work(steps=7, batch_size=20)
    """

    epochs: float
    cites: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        positive("epochs", "epochs", self.epochs, "1.5 makes one pass and a half over a client's data.")

    def check(self, population: int) -> None:
        return None

    def draw(self, client: int, samples: int, batch_size: int | None, key: Key) -> Work:
        batch = _batch(batch_size, samples)
        return Work(_epoch_steps(self.epochs, samples, batch), batch)


@dataclass(frozen=True, slots=True)
class random_steps:
    """tau ~ U{low..high}, drawn afresh for every client and round.

    >>> random_steps(3, 3).draw(0, 10, 5, Key(0))
    Work(steps=3, batch_size=5)
    """

    low: int
    high: int
    cites: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        whole("random_steps", "low", self.low)
        whole("random_steps", "high", self.high)
        if self.high < self.low:
            raise refuse("random_steps", "high", self.high, f"high >= low = {self.low}")

    def check(self, population: int) -> None:
        return None

    def draw(self, client: int, samples: int, batch_size: int | None, key: Key) -> Work:
        steps = int(key.numpy().integers(self.low, self.high + 1))
        return Work(steps, _batch(batch_size, samples))


@dataclass(frozen=True, slots=True)
class hybrid_plus:
    """E ~ U{low..high}, B ~ U{min_batch..n_i}, tau = floor(E n_i / B), at least 1, afresh for every client and round
    (the hybrid+ setting of Zeng et al.).

    >>> hybrid_plus(epochs=(2, 2), min_batch=10).draw(0, 10, None, Key(0))
    Work(steps=2, batch_size=10)
    """

    epochs: tuple[int, int] = (2, 5)
    min_batch: int = 10
    cites: ClassVar[tuple[str, ...]] = ("zeng2024",)

    def __post_init__(self) -> None:
        low, high = self.epochs
        object.__setattr__(self, "epochs", (low, high))
        whole("hybrid_plus", "epochs", low)
        whole("hybrid_plus", "epochs", high)
        whole("hybrid_plus", "min_batch", self.min_batch)
        if high < low:
            raise refuse("hybrid_plus", "epochs", self.epochs, "low <= high")

    def check(self, population: int) -> None:
        return None

    def draw(self, client: int, samples: int, batch_size: int | None, key: Key) -> Work:
        draw = key.numpy()
        passes = int(draw.integers(self.epochs[0], self.epochs[1] + 1))
        batch = int(draw.integers(min(self.min_batch, samples), samples + 1))
        return Work(_epoch_steps(passes, samples, batch), batch)
