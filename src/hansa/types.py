"""The words every part shares: vectors, states, the frozen facts of a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

Vector: TypeAlias = torch.Tensor
Vectors: TypeAlias = dict[str, torch.Tensor]
State: TypeAlias = dict[str, Any]
"""A plain tree of tensors, numbers, words, lists and dicts, so that a checkpoint can write it without pickle."""

MODEL = "model"
CONTROL = "control"
BUFFERS = "buffers"


@dataclass(frozen=True, slots=True)
class Population:
    """The server's own table: how many clients there are and how many samples each holds."""

    samples: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.samples)


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
    """One admitted vector, with its owner: identity travels with the update."""

    client: int
    cohort: int
    vector: torch.Tensor
    samples: int
    steps: float


class Packed(Update):
    """An update that stays as it arrived: its vector is decoded each time it is asked for, and held by nobody."""

    __slots__ = ("_decode",)
    _decode: Callable[[], Vector]

    def __init__(self, client: int, cohort: int, decode: Callable[[], Vector], samples: int, steps: float) -> None:
        for name, value in (("client", client), ("cohort", cohort), ("samples", samples), ("steps", steps)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_decode", decode)

    @property
    def vector(self) -> Vector:
        return self._decode()


def in_client_order(updates: Sequence[Update]) -> list[Update]:
    """The one order in which updates are folded, so that arrival order never matters."""
    return sorted(updates, key=lambda update: update.client)
