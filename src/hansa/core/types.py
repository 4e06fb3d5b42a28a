"""Types shared by all components: vectors, states, and the immutable context of a round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from hansa.core.errors import HansaError
from hansa.core.keys import Key

Vector: TypeAlias = "torch.Tensor"
Vectors: TypeAlias = dict[str, "torch.Tensor"]
State: TypeAlias = dict[str, Any]
"""A plain tree of tensors, numbers, strings, lists and dicts, which a checkpoint can store without pickle."""

_NO_KEY = Key(0)
MODEL = "model"
CONTROL = "control"
BUFFERS = "buffers"


class ClientStats(NamedTuple):
    """The last reported statistics of every client, one tensor [population] each."""

    losses: torch.Tensor
    norms: torch.Tensor
    participations: torch.Tensor

    @classmethod
    def empty(cls, population: int) -> ClientStats:
        """Return the statistics before the first round."""
        unknown = torch.full((population,), math.nan, dtype=torch.float64)
        return cls(unknown, unknown.clone(), torch.zeros(population, dtype=torch.int64))

    def updated(self, losses: Mapping[int, float | None], norms: Mapping[int, float]) -> ClientStats:
        """Return a copy updated with the reports of a round."""
        stats = ClientStats(*(column.clone() for column in self))
        clients = sorted(norms)
        reported = [math.nan if (loss := losses[client]) is None else loss for client in clients]
        stats.losses[clients] = torch.tensor(reported, dtype=torch.float64)
        stats.norms[clients] = torch.tensor([norms[client] for client in clients], dtype=torch.float64)
        stats.participations[clients] += 1
        return stats


@dataclass(frozen=True, slots=True)
class Population:
    """The clients known to the server and their sample counts, with `ClientStats` if a component needs them."""

    samples: tuple[int, ...]
    stats: ClientStats | None = field(default=None, compare=False, repr=False)

    @property
    def count(self) -> int:
        return len(self.samples)

    @property
    def losses(self) -> torch.Tensor:
        """The last reported training loss of each client, [count]; NaN for clients that never participated."""
        return self._require_stats("losses").losses

    @property
    def norms(self) -> torch.Tensor:
        """The norm of each client's last update, [count]; NaN for clients that never participated."""
        return self._require_stats("norms").norms

    @property
    def participations(self) -> torch.Tensor:
        """The number of participations of each client so far, [count]."""
        return self._require_stats("participations").participations

    def _require_stats(self, name: str) -> ClientStats:
        if self.stats is None:
            raise HansaError(
                f"population.{name}: is stored only on request. Give your sampler or aggregator the attribute "
                "`needs_client_stats = True`."
            )
        return self.stats


class RowReader(Protocol):
    """Read access to the rows stored per client, without loading all of them."""

    def read_many(self, clients: Sequence[int], name: str) -> torch.Tensor: ...

    def dot(self, clients: Sequence[int], name: str, vectors: torch.Tensor) -> torch.Tensor: ...

    def combine(self, clients: Sequence[int], name: str, weights: Sequence[float]) -> torch.Tensor: ...

    def clients(self, name: str | None = None) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class RoundContext:
    """The information about a round available to server-side components."""

    round: int
    population: Population
    clients: tuple[int, ...]
    rows: RowReader | None = None
    staleness: tuple[int, ...] = ()
    """The staleness of each accepted update, in the order of ``clients``; empty if all are of the newest version."""
    key: Key = _NO_KEY
    """The run's key. A component that draws noise takes ``ctx.key.child("its name", ctx.round)``: its draws differ by
    seed and round, and are the same after a resume. A local optimizer's context has no key of the run."""

    @property
    def count(self) -> int:
        """Number of accepted updates."""
        return len(self.clients)

    @property
    def fraction(self) -> float:
        """Accepted updates over the population, M/N."""
        return len(self.clients) / self.population.count

    @property
    def max_staleness(self) -> int:
        """The largest staleness of an accepted update."""
        return max(self.staleness, default=0)


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """One accepted update with the id of its client.

    ``loss`` is the mean training loss reported with it, or None if no loss was computed. ``staleness`` is the number of
    server steps since the version that it started from, and ``arrival`` its index among the arrivals of an asynchronous
    step. ``base_change`` is the version that it started from minus the server's vector, None if they are the same.
    `dataclasses.replace` gives an update with another vector.
    """

    client: int
    cohort: int
    vector: torch.Tensor
    samples: int
    steps: float
    loss: float | None = None
    staleness: int = 0
    arrival: int = 0
    base_change: torch.Tensor | None = None


def _computed_property(name: str) -> Any:
    """Return a property for a field of `Update` that holds a function: its result, computed on each access."""
    slot = vars(Update)[name]

    def value(update: Update) -> Any:
        stored = slot.__get__(update)
        return stored() if callable(stored) else stored

    return property(value, slot.__set__)


class EncodedUpdate(Update):
    """An update whose ``vector`` and ``base_change`` are given as functions that decode them; they are not kept."""

    __slots__ = ()
    vector = _computed_property("vector")
    base_change = _computed_property("base_change")


def in_client_order(updates: Sequence[Update]) -> list[Update]:
    """Return the updates sorted by client, so that results do not depend on the engine; those of an asynchronous step
    in the order of their arrival on the virtual clock."""
    return sorted(updates, key=lambda update: (update.arrival, update.client))
