"""Samplers: the selection of a round's participants.

Each is a function of (round, population, key), so samplers have no state to resume. Client statistics for samplers with
``needs_client_stats`` are part of the population, and so of the server's state.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from hansa.core.bounds import Checked, bound, one_of, round_share, rule_or_numbers, share_or_count
from hansa.core.errors import HansaError, check_fraction, check_integer, invalid_argument
from hansa.core.keys import Key
from hansa.core.native.random_draws import draws_without_replacement
from hansa.core.protocols import check_component, with_defaults
from hansa.core.types import Population
from hansa.gossip.activity import count_of

__all__ = [
    "BaseSampler", "Sampler", "availability", "everyone", "explore", "per_cluster", "replay", "startup", "uniform",
    "varying", "weighted",
]  # fmt: skip


ClusterMembers: TypeAlias = tuple[tuple[int, ...], ...]
"""The clients of each cluster."""
TENTH = "participation=0.1 takes a tenth of the clients, count=10 takes ten."


@runtime_checkable
class Sampler(Protocol):
    """Selects the participants as a function of (round, population, key)."""

    __slots__ = ()

    @abstractmethod
    def select(self, round: int, population: Population, key: Key) -> tuple[int, ...]:
        """Return the participants of a round, in ascending order."""


class BaseSampler(Checked, Sampler):
    """The optional traits of samplers, with their defaults.

    >>> uniform(0.5).needs_client_stats
    False
    """

    __slots__ = ()
    cites: ClassVar[tuple[str, ...]] = ()

    @property
    def needs_client_stats(self) -> bool:
        """Whether it needs ``population.losses``, ``norms`` and ``participations``, as last reported."""
        return False

    def check(self, population: int) -> None:
        """Raise if the sampler does not support a population of this size."""
        return

    def bind(self, clusters: ClusterMembers) -> Sampler:
        """Return the sampler with the clusters of the population, if it needs them."""
        return self


require_sampler = partial(check_component, protocol=Sampler, noun="a sampler", example="uniform(0.1) is one.")


def _parse_rounds(component: str, argument: str, rounds: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    parsed = tuple(tuple(sorted(int(c) for c in clients)) for clients in rounds)
    if not parsed or not all(parsed):
        raise invalid_argument(component, argument, rounds, "at least one round, and at least one client in each")
    for position, clients in enumerate(parsed):
        if len(set(clients)) != len(clients):
            raise HansaError(f"{component}({argument}): a client stands twice in round {position}: {list(clients)}.")
    return parsed


class _Sized(BaseSampler):
    """Samplers of a fraction of the clients, or of a number of them."""

    __slots__ = ()
    participation: float | None
    count: int | None

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if (self.participation is None) == (self.count is None):
            values = f"participation={self.participation!r}, count={self.count!r}"
            raise HansaError(
                f"{type(self).__name__}({values}): expected one of the two. {TENTH}",
                component=type(self).__name__,
                argument="participation",
            )

    def check(self, population: int) -> None:
        self.size(population)

    def size(self, population: int) -> int:
        """Return the number of participants of a round."""
        if self.participation is not None:
            return max(1, round_share(self.participation, population))
        check_integer(type(self).__name__, "count", self.count, "The population has no more.", maximum=population)
        assert self.count is not None
        return self.count


@dataclass(frozen=True, slots=True)
class uniform(_Sized):
    """M clients uniformly, without replacement.

    Args:
        participation: Fraction of the clients.
        count: Number of clients, instead of ``participation``.

    >>> len(uniform(0.1).select(0, Population((1,) * 50), Key(0)))
    5
    """

    participation: float | None = field(default=None, metadata=bound(check_fraction, TENTH))
    count: int | None = field(default=None, metadata=bound(check_integer))

    def select(self, round: int, population: Population, key: Key) -> tuple[int, ...]:
        size = self.size(population.count)
        if size == population.count:
            return tuple(range(size))
        drawn = key.child("sample", round).numpy().choice(population.count, size, replace=False, shuffle=False)
        return tuple(sorted(drawn.tolist()))


@dataclass(frozen=True, slots=True)
class varying(BaseSampler):
    """n clients uniformly, without replacement; n is drawn uniformly from ``low`` to ``high`` in every round ([CAMS]
    section 3.2 lets it vary).

    Args:
        low: The fewest participants of a round.
        high: The most participants of a round.

    >>> sizes = [len(varying(2, 5).select(round, Population((1,) * 50), Key(0))) for round in range(100)]
    >>> min(sizes), max(sizes)
    (2, 5)
    """

    low: int = field(metadata=bound(check_integer))
    high: int

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        check_integer("varying", "high", self.high, minimum=self.low)

    def check(self, population: int) -> None:
        check_integer("varying", "high", self.high, "The population has no more.", maximum=population)

    def select(self, round: int, population: Population, key: Key) -> tuple[int, ...]:
        self.check(population.count)
        draw = key.child("sample", round).numpy()
        size = int(draw.integers(self.low, self.high, endpoint=True))
        return tuple(sorted(draw.choice(population.count, size, replace=False, shuffle=False).tolist()))


def everyone() -> uniform:
    """Full participation.

    >>> everyone()
    uniform(participation=1.0, count=None)
    """
    return uniform(1.0)


@dataclass(frozen=True, slots=True)
class weighted(_Sized):
    """M clients without replacement, with probabilities proportional to sample counts or given weights.

    Args:
        weights: "samples", or one number per client.
        participation: Fraction of the clients.
        count: Number of clients, instead of ``participation``.

    >>> weighted("samples", count=2).count
    2
    """

    weights: Literal["samples"] | tuple[float, ...] = field(
        default="samples", metadata=bound(rule_or_numbers, "samples")
    )
    participation: float | None = field(default=None, metadata=bound(check_fraction, TENTH))
    count: int | None = field(default=None, metadata=bound(check_integer))

    def check(self, population: int) -> None:
        size = self.size(population)
        if isinstance(self.weights, tuple):
            if len(self.weights) != population:
                raise HansaError(f"weighted(weights): {len(self.weights)} numbers for {population} clients.")
            positive = sum(w > 0 for w in self.weights)
            if positive < size:
                raise HansaError(f"weighted: {size} clients a round, but only {positive} have a weight above 0.")

    def select(self, round: int, population: Population, key: Key) -> tuple[int, ...]:
        size = self.size(population.count)
        weights = population.samples if isinstance(self.weights, str) else self.weights
        shares = np.asarray(weights, dtype=np.float64)
        drawn = key.child("sample", round).numpy().choice(len(shares), size, replace=False, p=shares / shares.sum())
        return tuple(sorted(drawn.tolist()))


@dataclass(frozen=True, slots=True)
class explore(_Sized):
    """Every client once, M per round in random order, before any is selected again; then a new order
    (``then="again"``) or uniform sampling (``then="uniform"``).

    Args:
        participation: Fraction of the clients.
        count: Number of clients, instead of ``participation``.
        then: What follows the first pass: "again" for a new order, or "uniform".

    >>> explore(0.1).then
    'again'
    """

    participation: float | None = field(default=None, metadata=bound(check_fraction, TENTH))
    count: int | None = field(default=None, metadata=bound(check_integer))
    then: Literal["again", "uniform"] = field(default="again", metadata=bound(one_of, "again", "uniform"))

    def select(self, round: int, population: Population, key: Key) -> tuple[int, ...]:
        size = self.size(population.count)
        rounds_a_lap = -(-population.count // size)
        lap, turn = divmod(round, rounds_a_lap)
        if lap and self.then == "uniform":
            return uniform(count=size).select(round, population, key)
        order = _epoch_order(key.child("explore", lap), population.count)
        return tuple(sorted(order[turn * size : (turn + 1) * size].tolist()))


@lru_cache(maxsize=4)
def _epoch_order(key: Key, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the order of one pass over the clients, cached for its rounds."""
    return key.numpy().permutation(count)


@dataclass(frozen=True, slots=True)
class startup(BaseSampler):
    """All clients in the first round, then another sampler, starting at its first round.

    Args:
        sampler: Sampler of the rounds after the first.

    >>> sampler = startup(replay([[2], [0, 1]]))
    >>> [sampler.select(round, Population((1,) * 3), Key(0)) for round in range(3)]
    [(0, 1, 2), (2,), (0, 1)]
    """

    sampler: Sampler = field(metadata=bound(require_sampler))

    def check(self, population: int) -> None:
        with_defaults(self.sampler, BaseSampler).check(population)

    def bind(self, clusters: ClusterMembers) -> startup:
        return startup(with_defaults(self.sampler, BaseSampler).bind(clusters))

    def select(self, round: int, population: Population, key: Key) -> tuple[int, ...]:
        return self.sampler.select(round - 1, population, key) if round else tuple(range(population.count))


@dataclass(frozen=True, slots=True)
class availability(_Sized):
    """M clients uniformly among those available in the round according to a trace, or all if fewer are available.

    Args:
        trace: Available clients of each round; repeated when it ends.
        participation: Fraction of the clients.
        count: Number of clients, instead of ``participation``.

    >>> availability(((0, 1), (2, 3)), count=1).count
    1
    """

    trace: tuple[tuple[int, ...], ...] = field(metadata=bound(_parse_rounds))
    participation: float | None = field(default=None, metadata=bound(check_fraction, TENTH))
    count: int | None = field(default=None, metadata=bound(check_integer))

    def check(self, population: int) -> None:
        self.size(population)
        _check_clients("availability", self.trace, population)

    def select(self, round: int, population: Population, key: Key) -> tuple[int, ...]:
        size = self.size(population.count)
        available = self.trace[round % len(self.trace)]
        if len(available) <= size:
            return available
        drawn = key.child("sample", round).numpy().choice(len(available), size, replace=False, shuffle=False)
        return tuple(sorted(available[i] for i in drawn.tolist()))


@dataclass(frozen=True, slots=True)
class replay(BaseSampler):
    """Recorded participants, round by round; the rounds repeat.

    Args:
        rounds: Participants of each round; repeated when they end.

    >>> sampler = replay([[0, 2], [3, 1]])
    >>> sampler.select(3, Population((1,) * 4), Key(0))
    (1, 3)
    """

    rounds: tuple[tuple[int, ...], ...] = field(metadata=bound(_parse_rounds))

    def check(self, population: int) -> None:
        _check_clients("replay", self.rounds, population)

    def select(self, round: int, population: Population, key: Key) -> tuple[int, ...]:
        return self.rounds[round % len(self.rounds)]


@dataclass(frozen=True, slots=True)
class per_cluster(BaseSampler):
    """``reporters`` of each cluster, uniformly without replacement.

    Args:
        reporters: Clients of each cluster: a number or a fraction.
        clusters: Clients of each cluster; by default those that gossip.

    >>> per_cluster(1, ((0, 1), (2, 3, 4))).select(0, Population((1,) * 5), Key(0)).__len__()
    2
    """

    reporters: int | float = field(metadata=bound(share_or_count, "0.25 takes a quarter of each cluster."))
    clusters: tuple[tuple[int, ...], ...] = ()

    def bind(self, clusters: ClusterMembers) -> per_cluster:
        if self.clusters and {frozenset(cluster) for cluster in self.clusters} != {
            frozenset(group) for group in clusters
        }:
            raise HansaError(
                f"{self!r}: its clusters are not those that gossip, {clusters}. Without clusters it takes theirs."
            )
        return replace(self, clusters=clusters)

    def check(self, population: int) -> None:
        if not self.clusters:
            raise HansaError(
                f"{self!r}: there are no clusters. Give them, per_cluster(1, [[0, 1], [2]]), or have the clients "
                "gossip."
            )
        for index, cluster in enumerate(self.clusters):
            if not isinstance(self.reporters, float) and self.reporters > len(cluster):
                expected = f"at most the {len(cluster)} clients of cluster {index}"
                raise invalid_argument("per_cluster", "reporters", self.reporters, expected)

    def select(self, round: int, population: Population, key: Key) -> tuple[int, ...]:
        of_size: dict[int, list[tuple[int, ...]]] = {}
        for cluster in self.clusters:
            of_size.setdefault(len(cluster), []).append(cluster)
        chosen: list[int] = []
        for size, clusters in of_size.items():  # those of one size are drawn together
            m = count_of("per_cluster", "reporters", self.reporters, size)
            keys = key.child("sample", round, "cluster").digests([min(cluster) for cluster in clusters])
            for cluster, drawn in zip(clusters, draws_without_replacement(keys, size, m), strict=True):
                chosen += [cluster[i] for i in drawn]
        return tuple(sorted(chosen))


def _check_clients(component: str, rounds: tuple[tuple[int, ...], ...], population: int) -> None:
    for position, clients in enumerate(rounds):
        if clients[0] < 0 or clients[-1] >= population:
            wrong = clients[0] if clients[0] < 0 else clients[-1]
            raise HansaError(
                f"{component}: round {position} names client {wrong}, the population has clients 0 to {population - 1}."
            )
