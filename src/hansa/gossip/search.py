"""Search for a graph with a given rho: the papers report the number, not the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hansa.core.errors import HansaError, check_integer, invalid_argument, suggestion
from hansa.gossip.spectral import messages, rho_max
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

CLOSE = 0.005  # within this distance, prefer the graph with fewer messages
SEEDS = 10
ALIKE = 200  # clients: larger random graphs have nearly the same rho for every seed
FIXED: dict[str, Topology] = {
    type(graph).__name__: graph for graph in (ring(), torus(), star(), hypercube(), exponential(), complete())
}
RANDOM: dict[str, Callable[[float, int], Topology]] = {
    "erdos_renyi": lambda size, seed: erdos_renyi(p=size, seed=seed),
    "unbalanced_complete": lambda size, seed: unbalanced_complete(seed=seed, spread=size),
}


class Match(NamedTuple):
    """A topology and its rho over the requested sizes.

    >>> from hansa.gossip import ring
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
    if isinstance(target, bool) or not isinstance(target, (int, float)) or not 0 <= target < 1:
        raise invalid_argument(
            "with_rho", "target", target, "0 <= target < 1", "0 is the complete graph, 1 would be no graph."
        )
    if not sizes:
        raise invalid_argument("with_rho", "sizes", sizes, "at least one cluster size")
    for n in sizes:
        check_integer("with_rho", "sizes", n)
    name_wanted = None if kind is None else kind.strip().lower().replace("-", "_")
    known = {*FIXED, *RANDOM}
    if name_wanted is not None and name_wanted not in known:
        raise HansaError(
            f"with_rho(kind={kind!r}): no graph to choose from. {suggestion(name_wanted, known)}",
            component="with_rho",
            argument="kind",
        )
    candidates: list[tuple[float, int, float, Match]] = []
    for name, graph in FIXED.items():
        if name_wanted in (None, name):
            candidates += _evaluate([graph], sizes, target)
    for name, make in RANDOM.items():
        if name_wanted in (None, name):
            candidates += _random(make, sizes, target)
    if not candidates:
        raise HansaError(
            f"with_rho(kind={kind!r}): does not come in the sizes {sorted(set(sizes))}.",
            component="with_rho",
            argument="kind",
        )
    return min(candidates, key=lambda entry: entry[:3])[3]


def _evaluate(graphs: Sequence[Topology], sizes: Sequence[int], target: float) -> list[tuple[float, int, float, Match]]:
    """Return the graphs that exist in these sizes, ordered by distance beyond `CLOSE`, messages and distance."""
    evaluated = []
    for graph in graphs:
        try:
            value = rho_max(graph, sizes)
            sent = sum(messages(graph.sparse(n)) for n in sizes)
        except HansaError:  # no hypercube of that size, or no connected graph that sparse
            continue
        away = abs(value - target)
        evaluated.append((away if away > CLOSE else 0.0, sent, away, Match(graph, value)))
    return evaluated


def _random(
    make: Callable[[float, int], Topology], sizes: Sequence[int], target: float
) -> list[tuple[float, int, float, Match]]:
    """Search the option in tenths with seed 0, then finer around the nearest value and with other seeds."""
    options = [tenth / 10 for tenth in range(1, 11)]
    coarse = [(option, tried[0]) for option in options if (tried := _evaluate([make(option, 0)], sizes, target))]
    if not coarse:
        return []
    nearest = min(coarse, key=lambda pair: pair[1][2])[0]
    seeds = SEEDS if max(sizes) <= ALIKE else 1
    return [entry for _, entry in coarse] + _evaluate(list(_bisect(make, nearest, seeds)), sizes, target)


def _bisect(make: Callable[[float, int], Topology], option: float, seeds: int) -> Iterator[Topology]:
    for hundredths in range(-8, 9, 2):
        finer = round(option + hundredths / 100, 2)
        if 0 < finer <= 1:
            yield from (make(finer, seed) for seed in range(seeds))
