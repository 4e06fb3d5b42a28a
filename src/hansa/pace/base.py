"""Paces: which updates a server step waits for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from hansa.core.errors import HansaError, check_fraction, check_integer, invalid_argument


class Pace:
    """The base class of paces.

    >>> synchronous().asynchronous, buffered(2).asynchronous
    (False, True)
    """

    __slots__ = ()
    cites: ClassVar[tuple[str, ...]] = ()
    asynchronous: ClassVar[bool] = False
    """Whether the updates of one server step may come from different versions of the model."""

    def check(self, population: int, participants: int | None) -> None:
        """Raise if the pace does not support this population, or this number of participants per round.

        Args:
            population: Number of clients.
            participants: Clients that the sampler selects, if that is known in advance.
        """
        return

    def first_arrivals(self, arrivals: list[tuple[float, int]]) -> tuple[int, float]:
        """Return how many of the sorted arrivals count, and the time at which a synchronous round closes.

        Args:
            arrivals: Seconds since the start of the round and the client, in ascending order.
        """
        return len(arrivals), arrivals[-1][0] if arrivals else 0.0


@dataclass(frozen=True, slots=True)
class synchronous(Pace):
    """Every round waits for all its participants.

    >>> synchronous().first_arrivals([(1.0, 4), (9.0, 2)])
    (2, 9.0)
    """


@dataclass(frozen=True, slots=True)
class deadline(Pace):
    """A round closes after ``seconds`` of virtual time; later clients are dropped and keep their memory.

    If fewer than ``min_updates`` have arrived by then, the round waits for that many. With ``math.inf`` it is the
    synchronous round.

    Args:
        seconds: Virtual time after which a round closes.
        min_updates: Updates that a round waits for in any case.

    >>> deadline(5.0).first_arrivals([(1.0, 4), (9.0, 2)])
    (1, 5.0)
    >>> deadline(5.0, min_updates=2).first_arrivals([(1.0, 4), (9.0, 2)])
    (2, 9.0)
    """

    seconds: float
    min_updates: int = 1
    cites: ClassVar[tuple[str, ...]] = ("bonawitz2019",)

    def __post_init__(self) -> None:
        number = isinstance(self.seconds, (int, float)) and not isinstance(self.seconds, bool)
        if not number or not self.seconds > 0:
            raise invalid_argument(
                "deadline", "seconds", self.seconds, "seconds > 0", "math.inf (.inf in YAML) waits for everybody."
            )
        check_integer("deadline", "min_updates", self.min_updates, "Rounds without updates would not train.")

    def check(self, population: int, participants: int | None) -> None:
        most = population if participants is None else participants
        if self.min_updates > most:
            raise invalid_argument(
                "deadline", "min_updates", self.min_updates, f"at most the {most} participants of a round"
            )

    def first_arrivals(self, arrivals: list[tuple[float, int]]) -> tuple[int, float]:
        if not arrivals or arrivals[-1][0] <= self.seconds:
            return len(arrivals), arrivals[-1][0] if arrivals else 0.0
        in_time = sum(seconds <= self.seconds for seconds, _ in arrivals)
        count = min(len(arrivals), max(in_time, self.min_updates))
        return count, max(self.seconds, arrivals[count - 1][0])


@dataclass(frozen=True, slots=True)
class overselect(Pace):
    """Of the M participants that the sampler selects, the first K = ceil(M / factor) count; the others are dropped and
    keep their memory (Bonawitz et al. 2019 select 1.3 times the clients they need).

    Args:
        factor: Selected clients per update that counts.

    >>> overselect(2.0).first_arrivals([(1.0, 4), (2.0, 0), (9.0, 2)])
    (2, 2.0)
    """

    factor: float = 1.3
    cites: ClassVar[tuple[str, ...]] = ("bonawitz2019",)

    def __post_init__(self) -> None:
        number = isinstance(self.factor, (int, float)) and not isinstance(self.factor, bool)
        if not number or not 1 <= self.factor < math.inf:
            raise invalid_argument("overselect", "factor", self.factor, "factor >= 1", "1.3 selects a third more.")

    def first_arrivals(self, arrivals: list[tuple[float, int]]) -> tuple[int, float]:
        count = min(len(arrivals), math.ceil(len(arrivals) / self.factor - 1e-9))
        return count, arrivals[count - 1][0] if count else 0.0


@dataclass(frozen=True, slots=True)
class buffered(Pace):
    """The server steps with every ``size`` updates that arrive (FedBuff, Nguyen et al. 2022); 1 is fully asynchronous.

    ``concurrency`` clients train at any time. A client that has finished frees its slot at once, and a newly sampled
    idle client starts there with the newest version of the model. Updates are aggregated in the order of their arrival
    on the virtual clock, at the same instant in client order. A client trains one job at a time, and starts another
    only after the server step that used the last one.

    Args:
        size: Updates per server step, K: a number, or a fraction of the concurrency.
        concurrency: Clients that train at the same time, C; None takes as many as the sampler selects.
        max_staleness: Updates of versions more than this many steps old are refused; None refuses none.

    >>> buffered(size=10, concurrency=100).asynchronous
    True
    """

    size: int | float = 0.2
    concurrency: int | None = None
    max_staleness: int | None = None
    cites: ClassVar[tuple[str, ...]] = ("nguyen2022",)
    asynchronous: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.size, float):
            check_fraction("buffered", "size", self.size, "0.2 is a fifth of the clients at work; for a number use 10.")
        else:
            check_integer("buffered", "size", self.size, "1 steps with every update.")
        if self.concurrency is not None:
            check_integer("buffered", "concurrency", self.concurrency)
            if self.concurrency < self.size:
                raise invalid_argument(
                    "buffered", "concurrency", self.concurrency, f"at least size={self.size}",
                    "With fewer clients at work a step would wait for clients that start later. Use a smaller size.",
                )  # fmt: skip
        if self.max_staleness is not None:
            check_integer("buffered", "max_staleness", self.max_staleness, "None refuses no update.", minimum=0)

    def updates(self, concurrency: int) -> int:
        """Return the updates per server step.

        Args:
            concurrency: Clients that train at the same time.

        >>> buffered(0.2).updates(48), buffered(3).updates(48)
        (10, 3)
        """
        return max(1, math.floor(self.size * concurrency + 0.5)) if isinstance(self.size, float) else self.size

    def check(self, population: int, participants: int | None) -> None:
        if self.size > population:
            raise invalid_argument(
                "buffered", "size", self.size, f"at most the population of {population} clients",
                "A client has one update in a step.",
            )  # fmt: skip
        if self.concurrency is not None and self.concurrency > population:
            raise invalid_argument(
                "buffered", "concurrency", self.concurrency, f"at most the population of {population} clients"
            )
        if self.concurrency is None and participants is not None and participants < self.size:
            raise invalid_argument(
                "buffered", "size", self.size, f"at most the {participants} clients that the sampler selects",
                "Raise participation, or set concurrency.",
            )  # fmt: skip


def require_pace(owner: str, argument: str, value: object) -> None:
    """Raise unless the value is a pace."""
    if not isinstance(value, Pace):
        text = f"{owner}({argument}={value!r}): expected a pace. hansa.pace.buffered(size=10) is one."
        raise HansaError(text, component=owner, argument=argument, value=value)
