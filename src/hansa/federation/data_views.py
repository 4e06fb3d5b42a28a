"""Federated data as one party has it: a site holds its own clients' rows, the server holds nobody's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hansa.core.errors import HansaError
from hansa.data import FederatedData


@dataclass(frozen=True, slots=True, eq=False)
class SiteData(FederatedData):
    """A site's view: clients are numbered as in the federation, and only ``own`` ones hold rows that can be read."""

    own: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def of(cls, held: FederatedData, clients: Sequence[int], population: int) -> SiteData:
        """Data whose i-th client is client ``clients[i]`` of the federation."""
        if held.population != len(clients):
            raise HansaError(f"{held.name}: has {held.population} clients, the federation expects {len(clients)} here.")
        rows = {client: held.rows(i) for i, client in enumerate(clients)}
        return cls._made(held, rows, population)

    @classmethod
    def among(cls, held: FederatedData, clients: Sequence[int], population: int) -> SiteData:
        """Of data that has the whole federation's clients, on trials: these clients."""
        if held.population != population:
            raise HansaError(f"{held.name}: has {held.population} clients, the federation {population}.")
        return cls._made(held, {client: held.rows(client) for client in clients}, population)

    @classmethod
    def _made(cls, held: FederatedData, rows: Mapping[int, torch.Tensor], population: int) -> SiteData:
        one = torch.zeros(1, dtype=torch.int64)  # somebody else's samples, as many as a population must have
        parts = [rows.get(client, one) for client in range(population)]
        offsets = torch.tensor([0, *map(len, parts)]).cumsum(0)
        return cls(
            held.inputs, held.targets, torch.cat(parts), offsets, held.test_inputs, held.test_targets, held.classes,
            held.name, own=frozenset(rows),
        )  # fmt: skip

    def rows(self, client: int) -> torch.Tensor:
        if client not in self.own:
            raise HansaError(f"{self.name}: client {client} is not at this site.")
        return FederatedData.rows(self, client)

    def samples(self, client: int) -> int:
        return int(self.sizes[client])

    def own_label_counts(self) -> dict[int, tuple[int, ...]]:
        """How many samples of each label each own client holds."""
        counts = FederatedData.label_counts(self)
        return {client: tuple(counts[client].tolist()) for client in sorted(self.own)}


@dataclass(frozen=True, slots=True, eq=False)
class ServerData(FederatedData):
    """The server's view: how many samples each client says it holds, a test set where there is one, and no client's
    rows. ``labels`` has label counts where all sites let them leave."""

    labels: torch.Tensor | None = None

    @classmethod
    def of(cls, held: FederatedData, samples: Sequence[int], labels: torch.Tensor | None = None) -> ServerData:
        """The server's own data, of which only the test set and one example count, with the sites' numbers."""
        offsets = torch.tensor([0, *samples]).cumsum(0)
        index = torch.zeros(int(offsets[-1]), dtype=torch.int64)
        return cls(
            held.inputs, held.targets, index, offsets, held.test_inputs, held.test_targets, held.classes, held.name,
            labels,
        )  # fmt: skip

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
                f"{self.name}: the sites have not told their clients' label counts. Give the clusters as lists, or let "
                "every site's policy say label_counts: true."
            )
        return self.labels
