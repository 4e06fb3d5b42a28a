"""Local work: the number of steps and the batch size of a client in a round, and the distributions that they, and the
speeds of devices, are drawn from.

Batches: how the rows of a client are divided into the batches of its local steps.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, get_args, runtime_checkable

import numpy as np

from hansa.core import bounds
from hansa.core.bounds import Checked, bound, numbers_above_zero, rule_or_numbers
from hansa.core.errors import (
    HansaError,
    check_integer,
    check_non_negative,
    check_positive,
    invalid_argument,
    suggestion,
)
from hansa.core.keys import Key
from hansa.core.protocols import check_component

Positions: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Pieces: TypeAlias = list[tuple[int, int, int]]  # of a batch: the number of a pass, start and stop in it
LastBatch: TypeAlias = Literal["fill", "short", "drop"]
BatchWord: TypeAlias = Literal["full", "short", "drop", "continued"]


class PassPosition(NamedTuple):
    """A client's position in its passes.

    Args:
        number: The pass, counted from 0.
        used: The rows of this pass that are in earlier batches.

    >>> PassPosition().number
    0
    """

    number: int = 0
    used: int = 0


START = PassPosition()


@runtime_checkable
class PassOrder(Protocol):
    """The order in which a client's rows are used in a pass."""

    __slots__ = ()

    @abstractmethod
    def permutation(self, client: int, samples: int, number: int, key: Key) -> Sequence[int]:
        """Return the positions 0..samples-1 in the order of pass ``number``; ``key`` is the address of the pass."""


@dataclass(frozen=True, slots=True)
class in_order(PassOrder):
    """Rows in the order of the data in every pass: no shuffling.

    >>> in_order().permutation(client=0, samples=3, number=7, key=Key(0))
    range(0, 3)
    """

    def permutation(self, client: int, samples: int, number: int, key: Key) -> Sequence[int]:
        return range(samples)


def _check_bool(part: str, argument: str, value: object) -> None:
    if not isinstance(value, bool):
        raise invalid_argument(part, argument, value, "True or False")


def _check_order(part: str, argument: str, value: object) -> None:
    check_component(part, argument, value, PassOrder, "an order of passes", example="in_order().")


@dataclass(frozen=True, slots=True)
class batching(Checked):
    """The division of a client's rows into batches. A pass is one shuffled walk over all rows.

    The words "full", "short", "drop" and "continued" stand for ``batching()``, ``batching("short")``,
    ``batching("drop")`` and ``batching("short", continued=True)``.

    Args:
        last: How the n mod B rows at the end of a pass are used: "fill" completes their batch from the next pass,
            "short" puts them in a smaller batch, "drop" omits them.
        continued: Whether a round continues the pass of the client's last round instead of starting a new one.
        order: The order of the rows in a pass; None shuffles them anew in every pass.

    >>> [len(batch) for batch in batching("short").draw(0, 10, 4, 5, Key(0), Key(0))]
    [4, 4, 2, 4, 4]
    >>> as_batching("continued")
    batching(last='short', continued=True, order=None)
    """

    last: LastBatch = field(default="fill", metadata=bound(bounds.one_of, *get_args(LastBatch)))
    continued: bool = field(default=False, metadata=bound(_check_bool))
    order: PassOrder | None = field(default=None, metadata=bound(_check_order))

    @property
    def is_default(self) -> bool:
        """Whether these are the full batches of new passes that trainers draw themselves."""
        return self.last == "fill" and not self.continued and self.order is None

    def epoch_steps(self, epochs: float, samples: int, batch_size: int) -> int:
        """Return the steps of E passes, at least 1: floor(E n / B), floor(E ceil(n / B)) with short last batches, or
        floor(E floor(n / B)) without the last ones. The small slack absorbs the rounding of E such as 0.1.

        >>> [batching(last).epoch_steps(2, 10, 4) for last in ("fill", "short", "drop")]
        [5, 6, 4]
        """
        if self.last == "fill":
            return max(1, math.floor(epochs * samples / batch_size + 1e-9))
        per_pass = -(-samples // batch_size) if self.last == "short" else samples // batch_size
        return max(1, math.floor(epochs * per_pass + 1e-9))

    def draw(
        self,
        client: int,
        samples: int,
        batch_size: int,
        steps: int,
        round_key: Key,
        run_key: Key,
        position: PassPosition = START,
    ) -> list[Positions]:
        """Return the positions of each batch among the client's rows.

        New passes are shuffled with ``round_key``, the address of the client's batches in the round, and continued ones
        with ``run_key``, by client and pass; ``position`` is the client's in them.
        """
        passes = self._passes(client, samples, round_key, run_key)
        return [
            np.concatenate([passes(number)[start:stop] for number, start, stop in pieces])
            for pieces in self._spans(samples, batch_size, steps, position)
        ]

    def position_after(self, samples: int, batch_size: int, steps: int, position: PassPosition) -> PassPosition:
        """Return a client's position in its passes after some steps.

        >>> batching("short", continued=True).position_after(10, 4, 4, PassPosition())
        PassPosition(number=1, used=4)
        """
        for pieces in self._spans(samples, batch_size, steps, position):
            number, _, used = pieces[-1]
            position = PassPosition(number, used)
        return position

    def _passes(self, client: int, samples: int, round_key: Key, run_key: Key) -> Callable[[int], Positions]:
        """Return the function from the number of a pass to its order; new passes come from one generator, in turn."""
        order, key = self.order, run_key.child("pass", client) if self.continued else round_key
        generator = round_key.numpy()

        @cache
        def positions(number: int) -> Positions:
            if order is not None:
                return self._checked(order, client, samples, number, key.child(number))
            chance = key.child(number).numpy() if self.continued else generator
            return chance.permutation(samples)

        return positions

    @staticmethod
    def _checked(order: PassOrder, client: int, samples: int, number: int, key: Key) -> Positions:
        positions = np.asarray(order.permutation(client, samples, number, key), dtype=np.int64)
        if positions.shape != (samples,) or not np.array_equal(np.sort(positions), np.arange(samples)):
            raise HansaError(
                f"{order!r}: pass {number} of client {client} is not a permutation of its {samples} rows: expected "
                f"each of 0..{samples - 1} once."
            )
        return positions

    def _spans(self, samples: int, batch_size: int, steps: int, position: PassPosition) -> Iterator[Pieces]:
        """Yield the pieces of each batch."""
        number, used = position
        for _ in range(steps):
            pieces, missing = [], batch_size
            while missing:
                remaining = samples - used
                if remaining <= 0 or (self.last == "drop" and remaining < batch_size):
                    number, used, remaining = number + 1, 0, samples
                size = min(missing, remaining)
                pieces.append((number, used, used + size))
                used += size
                missing = missing - size if self.last == "fill" else 0
            yield pieces


Batches: TypeAlias = batching | BatchWord
WORDS: dict[str, batching] = {
    "full": batching(),
    "short": batching("short"),
    "drop": batching("drop"),
    "continued": batching("short", continued=True),
}


def as_batching(value: object, owner: str = "LocalPhase") -> batching:
    """Return a division into batches, from a component or a word.

    >>> as_batching("short")
    batching(last='short', continued=False, order=None)
    """
    if isinstance(value, batching):
        return value
    if isinstance(value, str) and value in WORDS:
        return WORDS[value]
    hint = suggestion(value, WORDS) if isinstance(value, str) else "batching(last='drop', continued=True) is one."
    raise invalid_argument(owner, "batches", value, f"{', '.join(map(repr, WORDS))} or batching(...)", hint)


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


class BaseLocalWork(Checked, LocalWork):
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

    counts_passes: ClassVar[bool] = False
    """Whether ``draw`` takes the division into batches as a last argument, because work is counted in passes."""


require_work = partial(check_component, protocol=LocalWork, noun="an amount of local work", example="fixed(5) is one.")


def _check_range(part: str, low: Any, high: Any) -> None:
    check_integer(part, "low", low)
    check_integer(part, "high", high)
    if high < low:
        raise invalid_argument(part, "high", high, f"high >= low = {low}")


def _effective_batch(batch_size: int | None, samples: int) -> int:
    return samples if batch_size is None else min(batch_size, samples)


FULL = batching()


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
        _check_range("between", self.low, self.low if self.high == "samples" else self.high)

    def draw(self, chance: np.random.Generator, samples: int) -> float:
        high = samples if isinstance(self.high, str) else self.high
        return float(chance.integers(min(self.low, high), high + 1))


@dataclass(frozen=True, slots=True)
class one_of(Checked):
    """One of the given numbers, uniformly or with the given probabilities.

    >>> one_of([1, 5], chances=[0.9, 0.1]).values
    (1, 5)
    """

    values: Sequence[float] = field(metadata=bound(numbers_above_zero))
    chances: Sequence[float] | None = field(default=None, metadata=bound(rule_or_numbers))

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        chances = [1 / len(self.values)] * len(self.values) if self.chances is None else self.chances
        if len(chances) != len(self.values) or not math.isclose(sum(chances), 1.0, rel_tol=1e-9):
            raise invalid_argument("one_of", "chances", self.chances, f"{len(self.values)} numbers that sum to 1")

    def draw(self, chance: np.random.Generator, samples: int) -> float:
        return float(chance.choice(np.asarray(self.values, dtype=np.float64), p=self.chances))


@dataclass(frozen=True, slots=True)
class lognormal(Checked):
    """median * exp(sigma z), z standard normal: the usual model of device speeds.

    >>> lognormal(10.0).median
    10.0
    """

    median: float = field(metadata=bound(check_positive))
    sigma: float = field(default=0.5, metadata=bound(check_non_negative))

    def draw(self, chance: np.random.Generator, samples: int) -> float:
        return self.median * math.exp(self.sigma * float(chance.standard_normal()))


@dataclass(frozen=True, slots=True)
class half_normal(Checked):
    """|z| * scale with z standard normal, at least ``minimum``: most devices are fast, few are slow.

    >>> half_normal(2.0).draw(np.random.default_rng(0), 10) > 0
    True
    """

    scale: float = field(metadata=bound(check_positive))
    minimum: float = field(default=0.001, metadata=bound(check_positive))

    def draw(self, chance: np.random.Generator, samples: int) -> float:
        return max(self.minimum, self.scale * abs(float(chance.standard_normal())))


@dataclass(frozen=True, slots=True)
class zipf(Checked):
    """unit * k with P(k) proportional to k^-exponent, k at most ``maximum``: a heavy tail of slow devices.

    >>> zipf(1.7, unit=0.5, maximum=1).draw(np.random.default_rng(0), 10)
    0.5
    """

    exponent: float = 1.7
    unit: float = field(default=1.0, metadata=bound(check_positive))
    maximum: int = field(default=1000, metadata=bound(check_integer))

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if not isinstance(self.exponent, (int, float)) or not 1 < self.exponent < math.inf:
            raise invalid_argument("zipf", "exponent", self.exponent, "exponent > 1", "1.7 is a heavy tail.")

    def draw(self, chance: np.random.Generator, samples: int) -> float:
        return self.unit * min(self.maximum, int(chance.zipf(self.exponent)))


@dataclass(frozen=True, slots=True)
class fixed(BaseLocalWork):
    """The same number of steps in every round.

    Args:
        steps: One number for all clients, or one per client.

    >>> fixed([1, 2]).draw(1, 100, 10, Key(0))
    Work(steps=2, batch_size=10)
    """

    steps: int | Sequence[int]

    def __post_init__(self) -> None:
        if isinstance(self.steps, Sequence) and not isinstance(self.steps, str):
            object.__setattr__(self, "steps", tuple(self.steps))
        for steps in self.steps if isinstance(self.steps, tuple) else (self.steps,):
            check_integer("fixed", "steps", steps)

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
        return Work(steps, _effective_batch(batch_size, samples))


@dataclass(frozen=True, slots=True)
class epochs(BaseLocalWork):
    """Passes over a client's data: tau_i = floor(E n_i / B) steps, at least 1; with the short last batches of
    `batching`, floor(E ceil(n_i / B)).

    Args:
        epochs: The number E of passes; it may be fractional.

    >>> epochs(1.5).draw(0, 100, 20, Key(0))
    Work(steps=7, batch_size=20)
    """

    epochs: float = field(metadata=bound(check_positive, "1.5 makes one pass and a half over a client's data."))
    counts_passes: ClassVar[bool] = True

    def draw(self, client: int, samples: int, batch_size: int | None, key: Key, batches: batching = FULL) -> Work:
        batch = _effective_batch(batch_size, samples)
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

    def __post_init__(self) -> None:
        _check_range("random_steps", self.low, self.high)

    def draw(self, client: int, samples: int, batch_size: int | None, key: Key) -> Work:
        steps = int(key.numpy().integers(self.low, self.high + 1))
        return Work(steps, _effective_batch(batch_size, samples))


@dataclass(frozen=True, slots=True)
class drawn(BaseLocalWork):
    """E and B drawn anew for every client and round; tau = floor(E n_i / B) steps, at least 1.

    Args:
        epochs: The passes E, a number or a distribution.
        batch: The batch size B, a number or a distribution; None takes that of the local phase.

    >>> drawn(epochs=2, batch=5).draw(0, 10, None, Key(0))
    Work(steps=4, batch_size=5)
    """

    epochs: Drawn = field(metadata=bound(check_drawn))
    batch: Drawn | None = field(default=None, metadata=bound(check_drawn))
    counts_passes: ClassVar[bool] = True

    def draw(self, client: int, samples: int, batch_size: int | None, key: Key, batches: batching = FULL) -> Work:
        chance = key.numpy()
        passes = drawn_value(self.epochs, chance, samples)
        size = _effective_batch(batch_size, samples)
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
    counts_passes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "epochs", tuple(self.epochs))
        for argument, value in (*(("epochs", passes) for passes in self.epochs), ("min_batch", self.min_batch)):
            check_integer("hybrid_plus", argument, value)
        if self.epochs[1] < self.epochs[0]:
            raise invalid_argument("hybrid_plus", "epochs", self.epochs, "low <= high")

    def draw(self, client: int, samples: int, batch_size: int | None, key: Key, batches: batching = FULL) -> Work:
        work = drawn(between(*self.epochs), between(self.min_batch, "samples"))
        return work.draw(client, samples, batch_size, key, batches)


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

    seconds: float = field(metadata=bound(check_positive))
    speed: Drawn = field(default=TYPICAL, metadata=bound(check_drawn))
    epochs: float | None = field(default=None, metadata=bound(check_positive))
    jitter: float = field(default=0.0, metadata=bound(check_non_negative))
    seed: int = field(default=0, metadata=bound(check_integer, minimum=0))
    counts_passes: ClassVar[bool] = True

    def draw(self, client: int, samples: int, batch_size: int | None, key: Key, batches: batching = FULL) -> Work:
        size = _effective_batch(batch_size, samples)
        speed = drawn_value(self.speed, Key(self.seed).child("speed", client).numpy(), samples)
        factor = lognormal(1.0, self.jitter).draw(key.numpy(), samples) if self.jitter else 1.0
        steps = max(1, math.floor(speed * factor * self.seconds + 1e-9))
        limit = steps if self.epochs is None else batches.epoch_steps(self.epochs, samples, size)
        return Work(min(steps, limit), size)
