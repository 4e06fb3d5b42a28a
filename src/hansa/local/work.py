"""Local work: the number of steps and the batch size of a client in a round."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from hansa.core.errors import HansaError, check_integer, check_non_negative, check_positive, invalid_argument
from hansa.core.keys import Key
from hansa.core.protocols import check_component
from hansa.local.batching import batching
from hansa.local.distributions import Drawn, between, check_drawn, drawn_value, lognormal


class Work(NamedTuple):
    """A client's work in one round.

    Args:
        steps: The number of local steps.
        batch_size: The examples per step.

    >>> Work(steps=5, batch_size=32).steps
    5
    """

    steps: int
    batch_size: int


@runtime_checkable
class LocalWork(Protocol):
    """An amount of local work; ``key`` is the address of (round, client). ``batch_size`` None means all samples."""

    __slots__ = ()

    @abstractmethod
    def draw(self, client: int, samples: int, batch_size: int | None, key: Key) -> Work:
        """Return the work of a client with ``samples`` samples."""


class BaseLocalWork(LocalWork):
    """The optional traits of local work, with their defaults.

    >>> fixed(3).common, epochs(2).common
    (3, None)
    """

    __slots__ = ()
    cites: ClassVar[tuple[str, ...]] = ()

    @property
    def common(self) -> int | None:
        """The number of steps if it is the same for every client and round, or else None."""
        return None

    def check(self, population: int) -> None:
        """Raise if the population is not supported."""
        return

    def draw_passes(self, client: int, samples: int, batch_size: int | None, key: Key, batches: batching) -> Work:
        """Return the work under a division into batches; it differs from `draw` where work is counted in passes."""
        return self.draw(client, samples, batch_size, key)


def require_work(owner: str, argument: str, value: object) -> None:
    """Raise unless the value is an amount of local work."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    several = isinstance(value, (list, tuple))
    instead = f"fixed({value!r})" if several or isinstance(value, int) else f"epochs({value!r})"
    check_component(
        owner,
        argument,
        value,
        LocalWork,
        "an amount of local work",
        instead=instead if number or several else "",
        example="fixed(5) is one.",
    )


def _batch(batch_size: int | None, samples: int) -> int:
    return samples if batch_size is None else min(batch_size, samples)


FULL = batching()


@dataclass(frozen=True, slots=True)
class fixed(BaseLocalWork):
    """The same number of steps in every round.

    Args:
        steps: One number for all clients, or one per client.

    >>> fixed([1, 2]).draw(1, 100, 10, Key(0))
    Work(steps=2, batch_size=10)
    """

    steps: int | Sequence[int]
    cites: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if isinstance(self.steps, Sequence) and not isinstance(self.steps, str):
            object.__setattr__(self, "steps", tuple(self.steps))
            for steps in self.steps:
                check_integer("fixed", "steps", steps)
        else:
            check_integer("fixed", "steps", self.steps)

    @property
    def common(self) -> int | None:
        return self.steps if isinstance(self.steps, int) else None

    def check(self, population: int) -> None:
        if isinstance(self.steps, tuple) and len(self.steps) != population:
            raise HansaError(
                f"fixed(steps): {len(self.steps)} numbers for {population} clients: give one number, or one a client."
            )

    def draw(self, client: int, samples: int, batch_size: int | None, key: Key) -> Work:
        steps = self.steps if isinstance(self.steps, int) else self.steps[client]
        return Work(steps, _batch(batch_size, samples))


@dataclass(frozen=True, slots=True)
class epochs(BaseLocalWork):
    """Passes over a client's data: tau_i = floor(E n_i / B) steps, at least 1; with the short last batches of
    `batching`, floor(E ceil(n_i / B)).

    Args:
        epochs: The number E of passes; it may be fractional.

    >>> epochs(1.5).draw(0, 100, 20, Key(0))
    Work(steps=7, batch_size=20)
    """

    epochs: float
    cites: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_positive("epochs", "epochs", self.epochs, "1.5 makes one pass and a half over a client's data.")

    def draw(self, client: int, samples: int, batch_size: int | None, key: Key) -> Work:
        return self.draw_passes(client, samples, batch_size, key, FULL)

    def draw_passes(self, client: int, samples: int, batch_size: int | None, key: Key, batches: batching) -> Work:
        batch = _batch(batch_size, samples)
        return Work(batches.epoch_steps(self.epochs, samples, batch), batch)


def is_set_by_samples(work: LocalWork) -> bool:
    """Return whether the work of a client depends on nothing but its number of samples.

    >>> is_set_by_samples(fixed(2)), is_set_by_samples(fixed([2, 3])), is_set_by_samples(random_steps(1, 5))
    (True, False, False)
    """
    return type(work) is epochs or (type(work) is fixed and work.common is not None)


@dataclass(frozen=True, slots=True)
class random_steps(BaseLocalWork):
    """tau ~ U{low..high} steps, drawn anew for every client and round.

    Args:
        low: The smallest number of steps.
        high: The largest number of steps.

    >>> random_steps(3, 3).draw(0, 10, 5, Key(0))
    Work(steps=3, batch_size=5)
    """

    low: int
    high: int
    cites: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_integer("random_steps", "low", self.low)
        check_integer("random_steps", "high", self.high)
        if self.high < self.low:
            raise invalid_argument("random_steps", "high", self.high, f"high >= low = {self.low}")

    def draw(self, client: int, samples: int, batch_size: int | None, key: Key) -> Work:
        steps = int(key.numpy().integers(self.low, self.high + 1))
        return Work(steps, _batch(batch_size, samples))


@dataclass(frozen=True, slots=True)
class drawn(BaseLocalWork):
    """E and B drawn anew for every client and round; tau = floor(E n_i / B) steps, at least 1.

    Args:
        epochs: The passes E, a number or a distribution.
        batch: The batch size B, a number or a distribution; None takes that of the local phase.

    >>> drawn(epochs=2, batch=5).draw(0, 10, None, Key(0))
    Work(steps=4, batch_size=5)
    """

    epochs: Drawn
    batch: Drawn | None = None
    cites: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_drawn("drawn", "epochs", self.epochs)
        if self.batch is not None:
            check_drawn("drawn", "batch", self.batch)

    def draw(self, client: int, samples: int, batch_size: int | None, key: Key) -> Work:
        return self.draw_passes(client, samples, batch_size, key, FULL)

    def draw_passes(self, client: int, samples: int, batch_size: int | None, key: Key, batches: batching) -> Work:
        chance = key.numpy()
        passes = drawn_value(self.epochs, chance, samples)
        size = _batch(batch_size, samples)
        if self.batch is not None:
            size = min(max(1, math.floor(drawn_value(self.batch, chance, samples))), samples)
        return Work(batches.epoch_steps(passes, samples, size), size)


@dataclass(frozen=True, slots=True)
class hybrid_plus(BaseLocalWork):
    """E ~ U{low..high}, B ~ U{min_batch..n_i}, tau = floor(E n_i / B), at least 1, drawn anew for every client and
    round (the hybrid+ setting of Zeng et al.).

    Args:
        epochs: The smallest and the largest number of passes.
        min_batch: The smallest batch size.

    >>> hybrid_plus(epochs=(2, 2), min_batch=10).draw(0, 10, None, Key(0))
    Work(steps=2, batch_size=10)
    """

    epochs: tuple[int, int] = (2, 5)
    min_batch: int = 10
    cites: ClassVar[tuple[str, ...]] = ("zeng2024",)

    def __post_init__(self) -> None:
        low, high = self.epochs
        object.__setattr__(self, "epochs", (low, high))
        check_integer("hybrid_plus", "epochs", low)
        check_integer("hybrid_plus", "epochs", high)
        check_integer("hybrid_plus", "min_batch", self.min_batch)
        if high < low:
            raise invalid_argument("hybrid_plus", "epochs", self.epochs, "low <= high")

    def draw(self, client: int, samples: int, batch_size: int | None, key: Key) -> Work:
        return self.draw_passes(client, samples, batch_size, key, FULL)

    def draw_passes(self, client: int, samples: int, batch_size: int | None, key: Key, batches: batching) -> Work:
        both = drawn(between(*self.epochs), between(self.min_batch, "samples"))
        return both.draw_passes(client, samples, batch_size, key, batches)


TYPICAL = lognormal(median=10.0, sigma=0.5)


@dataclass(frozen=True, slots=True)
class deadline(BaseLocalWork):
    """The steps a device completes before a deadline: floor(speed_i * seconds), at least 1.

    Args:
        seconds: The time until the deadline.
        speed: Steps per second, a number or a distribution, drawn once per client.
        epochs: The largest number of passes; None is no limit.
        jitter: The sigma of a lognormal factor that varies a client's speed from round to round.
        seed: The seed of the clients' speeds.

    >>> deadline(2.0, speed=3.0, epochs=10).draw(0, 100, 10, Key(0))
    Work(steps=6, batch_size=10)
    """

    seconds: float
    speed: Drawn = TYPICAL
    epochs: float | None = None
    jitter: float = 0.0
    seed: int = 0
    cites: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_positive("deadline", "seconds", self.seconds)
        check_drawn("deadline", "speed", self.speed)
        check_non_negative("deadline", "jitter", self.jitter)
        check_integer("deadline", "seed", self.seed, minimum=0)
        if self.epochs is not None:
            check_positive("deadline", "epochs", self.epochs)

    def draw(self, client: int, samples: int, batch_size: int | None, key: Key) -> Work:
        return self.draw_passes(client, samples, batch_size, key, FULL)

    def draw_passes(self, client: int, samples: int, batch_size: int | None, key: Key, batches: batching) -> Work:
        size = _batch(batch_size, samples)
        speed = drawn_value(self.speed, Key(self.seed).child("speed", client).numpy(), samples)
        factor = lognormal(1.0, self.jitter).draw(key.numpy(), samples) if self.jitter else 1.0
        steps = max(1, math.floor(speed * factor * self.seconds + 1e-9))
        most = steps if self.epochs is None else batches.epoch_steps(self.epochs, samples, size)
        return Work(min(steps, most), size)
