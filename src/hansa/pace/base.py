"""Paces: which updates a server step waits for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from hansa.core.bounds import Checked, bound, share_or_count
from hansa.core.errors import HansaError, check_integer, check_non_negative, check_speed, invalid_argument


class Pace(Checked):
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

    seconds: float = field(metadata=bound(check_speed, "math.inf (.inf in YAML) waits for everybody."))
    min_updates: int = field(default=1, metadata=bound(check_integer, "Rounds without updates would not train."))
    cites: ClassVar[tuple[str, ...]] = ("bonawitz2019",)

    def check(self, population: int, participants: int | None) -> None:
        count = population if participants is None else participants
        check_integer("deadline", "min_updates", self.min_updates, "A round has no more participants.", maximum=count)

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

    factor: float = field(default=1.3, metadata=bound(check_non_negative, "1.3 selects a third more.", minimum=1))
    cites: ClassVar[tuple[str, ...]] = ("bonawitz2019",)

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

    size: int | float = field(default=0.2, metadata=bound(share_or_count, "0.2 is a fifth of the clients at work."))
    concurrency: int | None = field(default=None, metadata=bound(check_integer))
    max_staleness: int | None = field(default=None, metadata=bound(check_integer, "None refuses none.", minimum=0))
    cites: ClassVar[tuple[str, ...]] = ("nguyen2022",)
    asynchronous: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.concurrency is not None:
            remedy = "Fewer clients at work never make a step. Use a smaller size."
            check_integer("buffered", "concurrency", self.concurrency, remedy, minimum=math.ceil(self.size))

    def updates(self, concurrency: int) -> int:
        """Return the updates per server step.

        Args:
            concurrency: Clients that train at the same time.

        >>> buffered(0.2).updates(48), buffered(3).updates(48)
        (10, 3)
        """
        return max(1, math.floor(self.size * concurrency + 0.5)) if isinstance(self.size, float) else self.size

    def check(self, population: int, participants: int | None) -> None:
        for argument in ("size", "concurrency"):
            if (getattr(self, argument) or 0) > population:
                expected = f"at most the population of {population} clients"
                raise invalid_argument("buffered", argument, getattr(self, argument), expected)
        if self.concurrency is None and participants is not None and participants < self.size:
            expected = f"at most the {participants} clients that the sampler selects"
            raise invalid_argument("buffered", "size", self.size, expected, "Raise participation, or set concurrency.")


def require_pace(owner: str, argument: str, value: object) -> None:
    """Raise unless the value is a pace."""
    if not isinstance(value, Pace):
        text = f"{owner}({argument}={value!r}): expected a pace. hansa.pace.buffered(size=10) is one."
        raise HansaError(text, component=owner, argument=argument, value=value)
