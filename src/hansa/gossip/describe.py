"""Describe and draw a topology, and find one with a given rho: the papers report the number, not the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hansa.core.bounds import one_of
from hansa.core.errors import HansaError, argument_error, check_decay, check_integer, invalid_argument
from hansa.core.keys import Key
from hansa.gossip.clusters import Clustering, resolve
from hansa.gossip.spectral import cluster_rho, edge_count, messages, rho_max
from hansa.gossip.topology import (
    Topology,
    complete,
    erdos_renyi,
    exponential,
    hypercube,
    ring,
    star,
    torus,
    unbalanced_complete,
)
from hansa.gossip.weights import as_sparse

if TYPE_CHECKING:
    from hansa.gossip.weights import Matrix

CIRCLE_UP_TO = 64  # clients: above this, the pattern of the matrix is drawn
CLOSE = 0.005  # within this distance, prefer the graph with fewer messages
SEEDS = 10
TENTHS = [tenth / 10 for tenth in range(1, 11)]
ALIKE = 200  # clients: larger random graphs have nearly the same rho for every seed
FIXED: dict[str, Topology] = {
    type(graph).__name__: graph for graph in (ring(), torus(), star(), hypercube(), exponential(), complete())
}
RANDOM: dict[str, Callable[[float, int], Topology]] = {
    "erdos_renyi": lambda size, seed: erdos_renyi(p=size, seed=seed),
    "unbalanced_complete": lambda size, seed: unbalanced_complete(seed=seed, spread=size),
}


def describe(
    topology: Topology,
    clients: int,
    clusters: int | Sequence[Sequence[int]] | Clustering = 1,
    *,
    dim: int = 1_000_000,
    itemsize: int = 4,
) -> dict[str, Any]:
    """Describe a topology before a run: rho, edges, and the messages and bytes of a gossip step of all clusters.

    Local steps beyond 1/(1 - rho) add nothing to the drift within a cluster, which grows with min{1/(1 - rho), tau}.

    Args:
        topology: Topology of every cluster, or `by_cluster`.
        clients: Number of clients.
        clusters: Number of clusters, or the clusters.
        dim: Entries of a model.
        itemsize: Bytes of an entry.

    >>> found = describe(ring(), 32, 4, dim=1000)
    >>> found["cluster_sizes"], found["edges"], found["messages_per_step"], found["bytes_per_step"]
    ([8, 8, 8, 8], 32, 64, 256000)
    """
    check_integer("describe", "dim", dim)
    check_integer("describe", "itemsize", itemsize)
    sizes = [len(group) for group in resolve(clusters, clients, Key(0))]
    rates = cluster_rho(topology, sizes)
    graphs = [(topology.of_cluster(number), n) for number, n in enumerate(sizes)]
    matrices = {repr(pair): graph.sparse(n) for pair in graphs for graph, n in [pair]}
    sent = sum(messages(matrices[repr(pair)]) for pair in graphs)
    return {
        "topology": str(topology),
        "clients": clients,
        "clusters": len(sizes),
        "cluster_sizes": sizes,
        "cluster_rho": list(rates),
        "rho_max": max(rates),
        "drift_limit": 1 / (1 - max(rates)) if max(rates) < 1 else None,
        "edges": sum(edge_count(matrices[repr(pair)]) for pair in graphs),
        "messages_per_step": sent,
        "bytes_per_step": sent * dim * itemsize,
    }


def draw(W: Matrix, ax: Any = None) -> Any:
    """Draw the graph of a mixing matrix by networkx, with its clients on a circle, and return the axes of matplotlib.

    Wider lines are larger weights. Above 64 clients the pattern of the matrix is drawn. Needs the extra ``plot``.

    Args:
        W: Mixing matrix.
        ax: Axes of matplotlib; by default those of a new figure.

    >>> len(draw(ring().sparse(8)).texts)
    8
    """
    import networkx

    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HansaError("drawings need matplotlib: pip install 'hansa[plot]'.") from error
    S = as_sparse(W)
    ax = Figure(figsize=(4, 4), layout="constrained").subplots() if ax is None else ax
    if S.shape[0] > CIRCLE_UP_TO:
        ax.spy(S, markersize=1)
        return ax
    graph = networkx.from_scipy_sparse_array(S.maximum(S.T))
    graph.remove_edges_from(list(networkx.selfloop_edges(graph)))
    weights = [weight for _, _, weight in graph.edges.data("weight")]
    widths = [0.4 + 2 * weight / max(weights) for weight in weights]
    networkx.draw_circular(graph, ax=ax, width=widths, with_labels=True, node_color="#99d5cf", edge_color="#64748b")
    return ax


class Match(NamedTuple):
    """A topology and its rho over the requested sizes.

    >>> Match(ring(), 0.805).rho
    0.805
    """

    topology: Topology
    rho: float


def with_rho(target: float, sizes: Sequence[int], kind: str | None = None) -> Match:
    """Return the topology whose rho_max over clusters of ``sizes`` is nearest to ``target``.

    The search covers the fixed graphs, and random ones over their option and seed. Among those within 0.005 of the
    target it returns the one with the fewest messages. The result is deterministic.

    Args:
        target: Target rho.
        sizes: Sizes of the clusters.
        kind: Restrict the search to one kind of topology.

    >>> with_rho(0.805, [8]).topology
    ring()
    >>> match = with_rho(0.6, [8], "erdos_renyi")
    >>> match.topology, round(match.rho, 3)
    (erdos_renyi(p=0.68, seed=9), 0.605)
    """
    check_decay("with_rho", "target", target, "0 is the complete graph, 1 would be no graph.")
    if not sizes:
        raise invalid_argument("with_rho", "sizes", sizes, "at least one cluster size")
    for n in sizes:
        check_integer("with_rho", "sizes", n)
    if kind is not None:
        kind = kind.replace("-", "_")
        one_of("with_rho", "kind", kind, *FIXED, *RANDOM)
    candidates = _measure([graph for name, graph in FIXED.items() if kind in (None, name)], sizes, target)
    for name, make in RANDOM.items():
        if kind in (None, name):
            candidates += _search_random(make, sizes, target)
    if not candidates:
        raise argument_error("with_rho", "kind", kind, f"does not come in the sizes {sorted(set(sizes))}.")
    return min(candidates, key=lambda entry: entry[:3])[3]


def _measure(graphs: Sequence[Topology], sizes: Sequence[int], target: float) -> list[tuple[float, int, float, Match]]:
    """Return the graphs that exist in these sizes, ordered by distance beyond `CLOSE`, messages and distance."""
    evaluated = []
    for graph in graphs:
        try:
            value = rho_max(graph, sizes)
            sent = sum(messages(graph.sparse(n)) for n in sizes)
        except HansaError:  # no hypercube of that size, or no connected graph that sparse
            continue
        distance = abs(value - target)
        evaluated.append((distance if distance > CLOSE else 0.0, sent, distance, Match(graph, value)))
    return evaluated


def _search_random(
    make: Callable[[float, int], Topology], sizes: Sequence[int], target: float
) -> list[tuple[float, int, float, Match]]:
    """Search the option in tenths with seed 0, then finer around the nearest value and with other seeds."""
    coarse = [(size, tried[0]) for size in TENTHS if (tried := _measure([make(size, 0)], sizes, target))]
    if not coarse:
        return []
    nearest = min(coarse, key=lambda pair: pair[1][2])[0]
    finer = [size for part in range(-8, 9, 2) if 0 < (size := round(nearest + part / 100, 2)) <= 1]
    graphs = [make(size, seed) for size in finer for seed in range(SEEDS if max(sizes) <= ALIKE else 1)]
    return [entry for _, entry in coarse] + _measure(graphs, sizes, target)
