"""The words every part shares: vectors, states, the frozen facts of a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from hansa.core.errors import HansaError

Vector: TypeAlias = "torch.Tensor"
Vectors: TypeAlias = dict[str, "torch.Tensor"]
State: TypeAlias = dict[str, Any]
"""A plain tree of tensors, numbers, words, lists and dicts, so that a checkpoint can write it without pickle."""

MODEL = "model"
CONTROL = "control"
BUFFERS = "buffers"


class ClientStats(NamedTuple):
    """What the server last heard of every client: a tensor each, [population]."""

    losses: torch.Tensor
    norms: torch.Tensor
    participations: torch.Tensor

    @classmethod
    def empty(cls, population: int) -> ClientStats:
        """Before the first round."""
        unknown = torch.full((population,), math.nan, dtype=torch.float64)
        return cls(unknown, unknown.clone(), torch.zeros(population, dtype=torch.int64))

    def updated(self, losses: Mapping[int, float | None], norms: Mapping[int, float]) -> ClientStats:
        """With what the clients of a round said; this one stays as it is."""
        stats = ClientStats(*(column.clone() for column in self))
        clients = sorted(norms)
        reported = [math.nan if (loss := losses[client]) is None else loss for client in clients]
        stats.losses[clients] = torch.tensor(reported, dtype=torch.float64)
        stats.norms[clients] = torch.tensor([norms[client] for client in clients], dtype=torch.float64)
        stats.participations[clients] += 1
        return stats


@dataclass(frozen=True, slots=True)
class Population:
    """The server's own table: how many clients there are and how many samples each holds; where a sampler or an
    aggregator is ``needs_client_stats``, also what was last heard of each."""

    samples: tuple[int, ...]
    stats: ClientStats | None = field(default=None, compare=False, repr=False)

    @property
    def count(self) -> int:
        return len(self.samples)

    @property
    def losses(self) -> torch.Tensor:
        """The training loss that each client reported last, [count]; NaN of those that never took part."""
        return self._require_stats("losses").losses

    @property
    def norms(self) -> torch.Tensor:
        """The length of each client's last update, [count]; NaN of those that never took part."""
        return self._require_stats("norms").norms

    @property
    def participations(self) -> torch.Tensor:
        """How often each client took part so far, [count]."""
        return self._require_stats("participations").participations

    def _require_stats(self, what: str) -> ClientStats:
        if self.stats is None:
            raise HansaError(
                f"population.{what}: is kept for parts that ask for it. Give your sampler or aggregator the attribute "
                "`needs_client_stats = True`."
            )
        return self.stats


class RowReader(Protocol):
    """Rows that the server keeps of every client, read without loading all of them."""

    def read_many(self, clients: Sequence[int], name: str) -> torch.Tensor: ...

    def dot(self, clients: Sequence[int], name: str, vectors: torch.Tensor) -> torch.Tensor: ...

    def combine(self, clients: Sequence[int], name: str, weights: Sequence[float]) -> torch.Tensor: ...

    def clients(self, name: str | None = None) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class RoundContext:
    """What a server-side part may know of the round it closes."""

    round: int
    population: Population
    clients: tuple[int, ...]
    rows: RowReader | None = None

    @property
    def count(self) -> int:
        """How many updates were admitted."""
        return len(self.clients)

    @property
    def fraction(self) -> float:
        """Admitted updates over the population, M/N."""
        return len(self.clients) / self.population.count


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """One admitted vector, with its owner: identity travels with the update. ``loss`` is the mean training loss that
    the client reported with it, None where nobody computed."""

    client: int
    cohort: int
    vector: torch.Tensor
    samples: int
    steps: float
    loss: float | None = None


class EncodedUpdate(Update):
    """An update that stays as it arrived: its vector is decoded each time it is asked for, and held by nobody."""

    __slots__ = ("_decode",)
    _decode: Callable[[], Vector]

    def __init__(
        self,
        client: int,
        cohort: int,
        decode: Callable[[], Vector],
        samples: int,
        steps: float,
        loss: float | None = None,
    ) -> None:
        fields = (("client", client), ("cohort", cohort), ("samples", samples), ("steps", steps), ("loss", loss))
        for name, value in fields:
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_decode", decode)

    @property
    def vector(self) -> Vector:
        return self._decode()


def in_client_order(updates: Sequence[Update]) -> list[Update]:
    """The one order in which updates are folded, so that arrival order never matters."""
    return sorted(updates, key=lambda update: update.client)
