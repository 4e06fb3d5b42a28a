"""Topologies: functions from a number of clients to a doubly stochastic mixing matrix."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import scipy
import torch

from hansa.core.bounds import Checked, bound
from hansa.core.errors import HansaError, argument_error, check_fraction, check_integer, invalid_argument
from hansa.core.keys import Key
from hansa.core.protocols import not_a_component
from hansa.gossip.weights import (
    as_sparse,
    check_mixing_matrix,
    circulant,
    metropolis,
    reroute,
    sinkhorn,
    sparse_identity,
    to_dense,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from hansa.gossip.weights import Matrix, WeightMatrix

DRAWS = 100  # attempts at a connected random graph before an error is raised


class Topology(Checked, ABC):
    """A rule for the mixing matrix W of n clients: row i holds the weights of the models that client i receives.

    ``topology(n)`` is a float64 tensor; ``topology.sparse(n)`` is the same matrix in CSR form, never built densely.

    >>> isinstance(ring(), Topology)
    True
    """

    __slots__ = ()
    cites: ClassVar[tuple[str, ...]] = ()
    connected: ClassVar[bool] = True
    averages: ClassVar[bool] = False
    """Whether W is 11'/n for every n; the matrix is then never built."""
    isolates: ClassVar[bool] = False
    """Whether W is I for every n; nothing is then mixed."""

    @abstractmethod
    def weights(self, n: int) -> WeightMatrix:
        """Return the matrix for n >= 1 clients, not yet validated."""

    def of_cluster(self, number: int) -> Topology:
        """Return the topology of a cluster, counted from 0; by default it is the same for all."""
        return self

    def check_clusters(self, count: int) -> None:
        """Raise if there are no topologies for so many clusters."""
        check_integer(type(self).__name__, "count", count)

    def sparse(self, n: int) -> WeightMatrix:
        """Return the validated matrix for n clients in CSR form."""
        check_integer(type(self).__name__, "n", n, "A cluster has at least one client.")
        W = self.weights(n)
        check_mixing_matrix(W, connected=self.connected, name=f"{type(self).__name__} over {n} clients")
        return W

    def __call__(self, n: int) -> Tensor:
        """Return the validated matrix for n clients."""
        return torch.from_numpy(self.sparse(n).toarray())

    def __str__(self) -> str:
        """Return the constructor call, shortened if it holds a whole graph."""
        call = repr(self)
        return call if len(call) <= 60 else f"{type(self).__name__}(...)"


def require_topology(owner: str, argument: str, value: object) -> None:
    """Raise unless the value is a topology."""
    if not isinstance(value, Topology):
        raise not_a_component(owner, argument, value, Topology, "a topology", example="ring() is one.")


@dataclass(frozen=True, slots=True)
class ring(Topology):
    """Self and two neighbours, 1/3 each (n = 2: 1/2). rho = (1 + 2 cos(2 pi / n)) / 3 for n >= 4.

    >>> (ring()(4)[0] * 3).tolist()
    [1.0, 1.0, 0.0, 1.0]
    """

    def weights(self, n: int) -> WeightMatrix:
        return circulant(n, (1, -1))


@dataclass(frozen=True, slots=True)
class complete(Topology):
    """Complete graph: W = 11'/n, rho = 0. The sparse form holds n^2 weights.

    >>> complete().weights(8).toarray()[0].round(3).tolist()
    [0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125]
    """

    averages: ClassVar[bool] = True

    def weights(self, n: int) -> WeightMatrix:
        return circulant(n, range(n))


@dataclass(frozen=True, slots=True)
class unbalanced_complete(Topology):
    """Complete graph with random weights, uniform on 1 -+ ``spread``, made doubly stochastic by Sinkhorn.

    Args:
        seed: Seed of the weights.
        spread: Weights are drawn from 1 - spread to 1 + spread, 0 < spread <= 1.

    >>> unbalanced_complete(spread=0.5).weights(4).toarray().sum(axis=1).round(6).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    seed: int = field(default=0, metadata=bound(check_integer, minimum=0))
    spread: float = field(default=1.0, metadata=bound(check_fraction, "complete() has no spread."))

    def weights(self, n: int) -> WeightMatrix:
        draw = Key(self.seed).child("unbalanced_complete", n).numpy().random((n, n))
        return as_sparse(sinkhorn(1 + self.spread * (2 * draw - 1)))


@dataclass(frozen=True, slots=True)
class erdos_renyi(Topology):
    """Each pair is joined with probability p, re-drawn until connected; Metropolis-Hastings weights.

    Args:
        p: Probability of an edge.
        seed: Seed of the graph.

    >>> erdos_renyi(0.5, seed=1).weights(4).toarray().sum(axis=0).round(6).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    p: float = field(metadata=bound(check_fraction))
    seed: int = field(default=0, metadata=bound(check_integer, minimum=0))

    def weights(self, n: int) -> WeightMatrix:
        for draw in range(DRAWS):
            pairs = _random_pairs(n, self.p, Key(self.seed).child("erdos_renyi", n, draw).numpy())
            W = metropolis(n, pairs)
            if scipy.sparse.csgraph.connected_components(W, directed=False)[0] == 1:
                return W
        raise HansaError(
            f"{self!r}: none of {DRAWS} graphs over {n} clients was connected. "
            f"Use p above ln(n)/n = {math.log(n) / n:.3g}."
        )


@dataclass(frozen=True, slots=True)
class torus(Topology):
    """A grid of ``rows`` x n/rows clients that wraps around: self and four neighbours, 1/5 each.

    By default the grid is as square as possible; a prime n gives one row, which is a ring. A side of two has one
    neighbour.

    Args:
        rows: Number of rows; None takes the most square shape.

    >>> torus(rows=2).weights(8).toarray()[0].round(3).tolist()
    [0.25, 0.25, 0.0, 0.25, 0.25, 0.0, 0.0, 0.0]
    """

    rows: int | None = field(default=None, metadata=bound(check_integer))

    def weights(self, n: int) -> WeightMatrix:
        rows = self.rows or max(r for r in range(1, math.isqrt(n) + 1) if n % r == 0)
        if n % rows:
            raise invalid_argument("torus", "rows", rows, f"a divisor of the {n} clients")
        ids = np.arange(n).reshape(rows, -1)
        down, right = np.roll(ids, -1, axis=0), np.roll(ids, -1, axis=1)
        return metropolis(n, np.stack([np.tile(ids.ravel(), 2), np.concatenate([down, right], axis=None)], axis=1))


@dataclass(frozen=True, slots=True)
class star(Topology):
    """Star with client 0 as the hub; Metropolis-Hastings weights, rho = 1 - 1/n.

    >>> star().weights(8).toarray()[0].round(3).tolist()
    [0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125]
    """

    def weights(self, n: int) -> WeightMatrix:
        return metropolis(n, ((0, leaf) for leaf in range(1, n)))


@dataclass(frozen=True, slots=True)
class exponential(Topology):
    """Client i receives from itself and from clients i + 1, 2, 4, ... with weight 1/(1 + ceil(log2 n)). Directed.

    rho = 1 - 2/(1 + ceil(log2 n)) for even n. Ying et al. (2021), Exponential Graph is Provably Efficient.

    >>> exponential().weights(8).toarray()[0].round(3).tolist()
    [0.25, 0.25, 0.25, 0.0, 0.25, 0.0, 0.0, 0.0]
    """

    def weights(self, n: int) -> WeightMatrix:
        return circulant(n, (2**k for k in range((n - 1).bit_length())))


@dataclass(frozen=True, slots=True)
class hypercube(Topology):
    """Clients whose ids differ in one bit are neighbours, with weights 1/(1 + log2 n); rho = 1 - 2/(1 + log2 n).

    >>> hypercube().weights(8).toarray()[0].round(3).tolist()
    [0.25, 0.25, 0.25, 0.0, 0.25, 0.0, 0.0, 0.0]
    """

    def weights(self, n: int) -> WeightMatrix:
        if n & (n - 1):
            raise invalid_argument("hypercube", "n", n, "a power of two", "exponential() takes any n.")
        corners = np.arange(n)
        pairs = [np.stack([corners, corners ^ (1 << bit)], axis=1) for bit in range(n.bit_length() - 1)]
        return metropolis(n, np.concatenate(pairs) if pairs else [])


@dataclass(frozen=True, slots=True)
class isolated(Topology):
    """No communication: W = I. The only disconnected topology, for baselines and reductions.

    >>> isolated().weights(8).toarray()[0].round(3).tolist()
    [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """

    connected: ClassVar[bool] = False
    isolates: ClassVar[bool] = True

    def weights(self, n: int) -> WeightMatrix:
        return sparse_identity(n)


@dataclass(frozen=True, slots=True)
class edges(Topology):
    """User-defined edges between positions in a cluster, with Metropolis-Hastings weights.

    Args:
        pairs: Edges as pairs of positions.

    >>> edges([(0, 1), (1, 2)])
    edges(pairs=((0, 1), (1, 2)))
    >>> import networkx
    >>> edges(networkx.petersen_graph().edges)(10).diagonal().tolist()[:3]
    [0.25, 0.25, 0.25]
    """

    pairs: Iterable[Sequence[int]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", tuple(_parse_pair(pair) for pair in self.pairs))

    def weights(self, n: int) -> WeightMatrix:
        ends = np.array(self.pairs, dtype=np.int64).reshape(-1, 2)
        if ends.max(initial=0) >= n:
            pair = tuple(ends[int(np.argmax(ends.max(axis=1)))].tolist())
            raise invalid_argument("edges", "pair", pair, f"positions 0 to {n - 1} of the {n} clients")
        return metropolis(n, ends)


@dataclass(frozen=True, slots=True)
class matrix(Topology):
    """User-defined mixing matrix, for as many clients as it has rows.

    Args:
        rows: The matrix W, doubly stochastic.

    >>> matrix([[0.5, 0.5], [0.5, 0.5]])
    matrix(rows=((0.5, 0.5), (0.5, 0.5)))
    """

    rows: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        check_mixing_matrix(self.rows, name="matrix")
        W = to_dense(self.rows)
        if torch.stack([W.sum(0), W.sum(1)]).sub(1).abs().max() > 1e-12:
            W = sinkhorn(W)  # given in single precision: restore exact sums in float64
        object.__setattr__(self, "rows", tuple(map(tuple, W.tolist())))

    def weights(self, n: int) -> WeightMatrix:
        if n != len(self.rows):
            raise invalid_argument("matrix", "n", n, f"{len(self.rows)}, the size of the given matrix")
        return as_sparse(self.rows, "matrix")


@dataclass(frozen=True, slots=True)
class by_cluster(Topology):
    """A topology for each cluster, in the order of the clusters. Methods also take a plain list of topologies.

    Where no cluster is named, such as in a drawing, it is the topology of the first.

    Args:
        topologies: One topology per cluster.

    >>> from hansa.gossip import rho_max
    >>> graphs = by_cluster([complete(), ring()])
    >>> graphs.of_cluster(1), round(rho_max(graphs, [8, 8]), 3)
    (ring(), 0.805)
    """

    topologies: Sequence[Topology]

    def __post_init__(self) -> None:
        if isinstance(self.topologies, (str, Topology)) or not len(self.topologies):
            raise invalid_argument("by_cluster", "topologies", self.topologies, "one topology per cluster")
        for topology in self.topologies:
            require_topology("by_cluster", "topologies", topology)
            if isinstance(topology, by_cluster):
                raise invalid_argument("by_cluster", "topologies", topology, "topologies of one cluster each")
        object.__setattr__(self, "topologies", tuple(self.topologies))

    def of_cluster(self, number: int) -> Topology:
        """Return the topology of a cluster, counted from 0."""
        if not 0 <= number < len(self.topologies):
            raise HansaError(f"{self}: there is no cluster {number}, only {len(self.topologies)} topologies.")
        return self.topologies[number]

    def check_clusters(self, count: int) -> None:
        """Raise unless there is one topology for each cluster."""
        if count != len(self.topologies):
            problem = f"{len(self.topologies)} topologies for {count} clusters. Give one per cluster, or one for all."
            raise argument_error("Mixing", "topology", self, problem)

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

    >>> from hansa.gossip import cluster_rho
    >>> graphs = redrawn(erdos_renyi(0.5, seed=3))
    >>> graphs.of_cluster(2), len(set(cluster_rho(graphs, [8, 8, 8])))
    (erdos_renyi(p=0.5, seed=5), 3)
    """

    topology: Topology

    def __post_init__(self) -> None:
        if not isinstance(getattr(self.topology, "seed", None), int):
            raise invalid_argument("redrawn", "topology", self.topology, "a topology with a seed")

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

    >>> as_topology([ring(), ring()])
    by_cluster(topologies=(ring(), ring()))
    """
    return by_cluster(value) if isinstance(value, (list, tuple)) else value  # type: ignore[return-value]


def _parse_pair(pair: object) -> tuple[int, int]:
    try:
        first, second = (index(end) for end in pair)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        first = second = -1
    if min(first, second) < 0 or first == second:
        raise invalid_argument("edges", "pair", pair, "the positions of two different clients in their cluster, from 0")
    return first, second


def _random_pairs(n: int, p: float, chance: np.random.Generator) -> NDArray[np.int64]:
    """Draw each of the n(n-1)/2 pairs with probability p, by geometric skips between chosen pairs."""
    total = n * (n - 1) // 2
    chunk = int(total * p + 6 * math.sqrt(total * p)) + 8
    skips = [np.full(1, -1)]
    while skips[-1][-1] < total:
        skips.append(skips[-1][-1] + np.cumsum(np.minimum(chance.geometric(p, chunk), total + 1)))
    pair_indices = np.concatenate(skips)[1:]
    pair_indices = pair_indices[pair_indices < total]
    # pair (i, j), i < j, has index j(j-1)/2 + i; at i = 0 the root is an integer, so floats find j exactly
    j = np.floor((1 + np.sqrt(1 + 8.0 * pair_indices)) / 2).astype(np.int64)
    return np.stack([pair_indices - j * (j - 1) // 2, j], axis=1)


def over_survivors(topology: Topology | Matrix, alive: Sequence[bool]) -> WeightMatrix:
    """Return W over the surviving clients, in order: doubly stochastic and connected.

    A topology that exists in that size is applied to the survivors: a ring closes, a star gets a new hub. Otherwise,
    and for a given matrix, weight through dropped clients is rerouted directly between their neighbours (the stochastic
    complement).

    Args:
        topology: Topology of the whole cluster.
        alive: Whether each client survives.

    >>> over_survivors(ring(), [True, True, False, True]).toarray().round(3).tolist()[0]
    [0.333, 0.333, 0.333]
    """
    if not isinstance(topology, Topology):
        return reroute(topology, alive)
    n, survivors = len(alive), sum(map(bool, alive))
    if survivors == 0:
        raise invalid_argument("over_survivors", "alive", alive, "at least one client")
    try:
        return topology.sparse(survivors)
    except HansaError:  # a fixed graph, a hypercube of seven, or a random graph too sparse to be connected
        return reroute(topology.sparse(n), alive)
