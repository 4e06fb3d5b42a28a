"""Federated data as one party sees it: a site has the rows of its own clients, the server has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hansa.core.errors import HansaError
from hansa.data import FederatedData


@dataclass(frozen=True, slots=True, eq=False)
class SiteData(FederatedData):
    """A site's view: clients are numbered as in the federation, and only the rows of ``own`` clients can be read."""

    own: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def from_own(cls, data: FederatedData, clients: Sequence[int], population: int) -> SiteData:
        """Make the view from data whose i-th client is client ``clients[i]`` of the federation."""
        if data.population != len(clients):
            raise HansaError(f"{data.name}: has {data.population} clients, the federation expects {len(clients)} here.")
        rows = {client: data.rows(i) for i, client in enumerate(clients)}
        return cls._make(data, rows, population)

    @classmethod
    def from_all(cls, data: FederatedData, clients: Sequence[int], population: int) -> SiteData:
        """Make the view from data that has all clients of the federation, for trials."""
        if data.population != population:
            raise HansaError(f"{data.name}: has {data.population} clients, the federation {population}.")
        return cls._make(data, {client: data.rows(client) for client in clients}, population)

    @classmethod
    def _make(cls, data: FederatedData, rows: Mapping[int, torch.Tensor], population: int) -> SiteData:
        placeholder = torch.zeros(1, dtype=torch.int64)  # a client of another site: every client needs a sample
        parts = [rows.get(client, placeholder) for client in range(population)]
        offsets = torch.tensor([0, *map(len, parts)]).cumsum(0)
        return cls(
            data.inputs, data.targets, torch.cat(parts), offsets, data.test_inputs, data.test_targets, data.classes,
            data.name, encoding=data.encoding, own=frozenset(rows),
        )  # fmt: skip

    def rows(self, client: int) -> torch.Tensor:
        if client not in self.own:
            raise HansaError(f"{self.name}: client {client} is not at this site.")
        return FederatedData.rows(self, client)

    def samples(self, client: int) -> int:
        return int(self.sizes[client])

    def own_label_counts(self) -> dict[int, tuple[int, ...]]:
        """Return the label counts of each own client."""
        counts = FederatedData.label_counts(self)
        return {client: tuple(counts[client].tolist()) for client in sorted(self.own)}


@dataclass(frozen=True, slots=True, eq=False)
class ServerData(FederatedData):
    """The server's view: each client's number of samples, the test set if there is one, and no client's rows.
    ``counts`` has the numbers of samples; ``labels`` has label counts if all sites permit them."""

    counts: torch.Tensor | None = None
    labels: torch.Tensor | None = None

    @classmethod
    def from_counts(cls, data: FederatedData, samples: Sequence[int], labels: torch.Tensor | None = None) -> ServerData:
        """Make the view from the server's own data (used for its test set and one example) and the sites' counts."""
        index, offsets = torch.zeros(len(samples), dtype=torch.int64), torch.arange(len(samples) + 1)
        return cls(
            data.inputs, data.targets, index, offsets, data.test_inputs, data.test_targets, data.classes, data.name,
            encoding=data.encoding, counts=torch.tensor(samples), labels=labels,
        )  # fmt: skip

    @property
    def sizes(self) -> torch.Tensor:
        return FederatedData.sizes.fget(self) if self.counts is None else self.counts  # type: ignore[attr-defined]

    def rows(self, client: int) -> torch.Tensor:
        raise HansaError(f"{self.name}: the samples of client {client} are at its site and cannot be read here.")

    def samples(self, client: int) -> int:
        return int(self.sizes[client])

    @property
    def labelled(self) -> bool:
        return self.labels is not None

    def label_counts(self) -> torch.Tensor:
        if self.labels is None:
            raise HansaError(
                f"{self.name}: the sites have not sent label counts. Give the clusters as lists, or set "
                "label_counts: true in every site's policy."
            )
        return self.labels
