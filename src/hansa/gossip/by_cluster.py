"""A topology for each cluster: W_k, with rho_k and rho_max = max_k rho_k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hansa.core.errors import HansaError, invalid_argument
from hansa.gossip.topology import Topology, require_topology

if TYPE_CHECKING:
    from hansa.gossip.weights import WeightMatrix


@dataclass(frozen=True, slots=True)
class by_cluster(Topology):
    """A topology for each cluster, in the order of the clusters. Methods also take a plain list of topologies.

    Where no cluster is named, such as in a drawing, it is the topology of the first.

    Args:
        topologies: One topology per cluster.

    >>> from hansa.gossip import complete, rho_max, ring
    >>> graphs = by_cluster([complete(), ring()])
    >>> graphs.of_cluster(1), round(rho_max(graphs, [8, 8]), 3)
    (ring(), 0.805)
    """

    topologies: Sequence[Topology]

    def __post_init__(self) -> None:
        if isinstance(self.topologies, (str, Topology)) or not len(self.topologies):
            raise invalid_argument("by_cluster", "topologies", self.topologies, "one topology per cluster")
        for each in self.topologies:
            require_topology("by_cluster", "topologies", each)
            if isinstance(each, by_cluster):
                raise invalid_argument("by_cluster", "topologies", each, "topologies of one cluster each")
        object.__setattr__(self, "topologies", tuple(self.topologies))

    def of_cluster(self, number: int) -> Topology:
        """Return the topology of a cluster, counted from 0."""
        if not 0 <= number < len(self.topologies):
            raise HansaError(f"{self}: there is no cluster {number}, only {len(self.topologies)} topologies.")
        return self.topologies[number]

    def check_clusters(self, count: int) -> None:
        """Raise unless there is one topology for each cluster."""
        if count != len(self.topologies):
            raise HansaError(
                f"{self}: {len(self.topologies)} topologies for {count} clusters. Give one topology per cluster, or "
                "one for all.",
                component="Mixing",
                argument="topology",
            )

    def weights(self, n: int) -> WeightMatrix:
        return self.topologies[0].weights(n)

    def sparse(self, n: int) -> WeightMatrix:
        """Return the validated matrix of the first cluster for n clients."""
        return self.topologies[0].sparse(n)


@dataclass(frozen=True, slots=True)
class redrawn(Topology):
    """A random topology that every cluster draws for itself: cluster k has the seed of the topology plus k.

    A random topology alone gives all clusters of one size the same graph.

    Args:
        topology: A topology with a seed, such as `erdos_renyi`.

    >>> from hansa.gossip import cluster_rho, erdos_renyi
    >>> graphs = redrawn(erdos_renyi(0.5, seed=3))
    >>> graphs.of_cluster(2), len(set(cluster_rho(graphs, [8, 8, 8])))
    (erdos_renyi(p=0.5, seed=5), 3)
    """

    topology: Topology

    def __post_init__(self) -> None:
        require_topology("redrawn", "topology", self.topology)
        if not isinstance(getattr(self.topology, "seed", None), int):
            raise invalid_argument(
                "redrawn", "topology", self.topology, "a random topology with a seed", "erdos_renyi(0.5) is one."
            )

    def of_cluster(self, number: int) -> Topology:
        """Return the topology of a cluster, counted from 0."""
        random: Any = self.topology
        drawn: Topology = replace(random, seed=random.seed + number)
        return drawn

    def weights(self, n: int) -> WeightMatrix:
        return self.topology.weights(n)


def cluster_topologies(*topologies: Topology) -> by_cluster:
    """Return `by_cluster` of its arguments, as a list in a configuration means it."""
    return by_cluster(topologies)


def as_topology(value: Topology | Sequence[Topology]) -> Topology:
    """Return a topology; a list of topologies is one for each cluster.

    Args:
        value: a topology, or a list with one topology for each cluster.

    >>> from hansa.gossip import ring
    >>> as_topology([ring(), ring()])
    by_cluster(topologies=(ring(), ring()))
    """
    return by_cluster(value) if isinstance(value, (list, tuple)) else value  # type: ignore[return-value]
