"""What the server knows between rounds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from hansa.algorithm import Algorithm
from hansa.core.types import MODEL, ClientStats, Population, State, Vectors


@dataclass(frozen=True, slots=True, eq=False)
class ServerState:
    """All that the server knows between rounds, as plain trees. States are keyed by channel."""

    round: int
    vectors: Vectors
    server: State
    aggregate: State
    downlink: State
    heard: State = field(default_factory=dict)
    """What was last heard of every client, where a part asks for it."""

    @classmethod
    def start(cls, algorithm: Algorithm, vectors: Vectors, population: int) -> ServerState:
        """The state before the first round; channels that a solver adds start at zero."""
        x = vectors[MODEL]
        vectors = {name: vectors.get(name, torch.zeros_like(x)) for name in algorithm.channels}
        parts = algorithm.channels.items()
        return cls(
            round=0,
            vectors=vectors,
            server={name: channel.server.init(vectors[name]) for name, channel in parts},
            aggregate={
                name: channel.aggregate.init(vectors[name].numel(), population)
                for name, channel in parts
                if channel.follows is None
            },
            downlink={name: channel.downlink.init(vectors[name]) for name, channel in parts},
            heard=ClientStats.empty(population)._asdict() if algorithm.needs_client_stats else {},
        )

    def population_with_stats(self, population: Population) -> Population:
        """The population as samplers and aggregators see it."""
        return replace(population, stats=ClientStats(**self.heard)) if self.heard else population

    def tree(self) -> State:
        """The state as one plain tree, for a checkpoint."""
        return {name: getattr(self, name) for name in self.__slots__}
