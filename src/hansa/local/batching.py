"""Batches: how the rows of a client are divided into the batches of its local steps."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args, runtime_checkable

import numpy as np

from hansa.core.bounds import Checked, bound, one_of
from hansa.core.errors import HansaError, invalid_argument, suggestion
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

    last: LastBatch = field(default="fill", metadata=bound(one_of, *get_args(LastBatch)))
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
