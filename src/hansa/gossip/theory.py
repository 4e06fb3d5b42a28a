"""[HAFED] Corollary 5.11: when more local steps pay, and the smallest change that makes them pay."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hansa.errors import HansaError, whole
from hansa.gossip.active import size_of
from hansa.gossip.spectral import messages, rho_max
from hansa.gossip.topology import Topology, complete, exponential, hypercube, ring, torus

CANDIDATES: tuple[Topology, ...] = (ring(), torus(), hypercube(), exponential(), complete())
SLACK = 1e-9  # rho and its bound often meet exactly (hypercube of 8: 1/2), one of them a rounding error above
SEARCH_UP_TO = 4096  # clients a cluster: beyond, trying out graphs takes minutes and nobody clusters so


@dataclass(frozen=True, slots=True)
class Corollary:
    """The numbers of Corollary 5.11 for K clusters of ``sizes`` clients, ``reporters`` of each reporting.

    It holds when rho_max <= 1/(2 sqrt(n - m)) and K < n; m = n leaves rho free. The paper has clusters of one size:
    where sizes differ, the tightest bound and the smallest cluster count.
    """

    topology: Topology
    sizes: tuple[int, ...]
    reporters: tuple[int, ...]
    rho_max: float

    @property
    def clients(self) -> int:
        """N."""
        return sum(self.sizes)

    @property
    def clusters(self) -> int:
        """K."""
        return len(self.sizes)

    @property
    def bound(self) -> float:
        """1/(2 sqrt(n - m)), infinite when everyone reports."""
        silent = max(n - m for n, m in zip(self.sizes, self.reporters, strict=True))
        return 1 / (2 * math.sqrt(silent)) if silent else math.inf

    @property
    def dense_enough(self) -> bool:
        """rho_max <= 1/(2 sqrt(n - m))."""
        return self.rho_max <= self.bound + SLACK

    @property
    def few_enough(self) -> bool:
        """K < n."""
        return self.clusters < min(self.sizes)

    @property
    def holds(self) -> bool:
        """Both conditions."""
        return self.dense_enough and self.few_enough


@dataclass(frozen=True, slots=True)
class Change:
    """A setting under which the corollary holds, and in words what is other than before."""

    kind: Literal["reporters", "graph", "clusters"]
    topology: Topology
    clusters: int
    reporters: int
    words: str


def corollary(topology: Topology, sizes: Sequence[int], reporters: float) -> Corollary:
    """Check Corollary 5.11 for clusters of ``sizes``, ``reporters`` a cluster (a count, or a share such as 0.25).

    >>> from hansa.gossip import complete, ring
    >>> found = corollary(ring(), [8, 8, 8, 8], 2)
    >>> round(found.rho_max, 3), round(found.bound, 3), found.holds
    (0.805, 0.204, False)
    >>> corollary(complete(), [8, 8, 8, 8], 2).holds
    True
    """
    for n in sizes:
        whole("corollary", "sizes", n)
    m = tuple(size_of("corollary", "reporters", reporters, n) for n in sizes)
    return Corollary(topology, tuple(sizes), m, rho_max(topology, sizes))


def changes(found: Corollary, reporters: float) -> tuple[Change, ...]:
    """The smallest change of each kind that makes the corollary hold: more reporters, a denser graph, fewer clusters.

    ``reporters`` is what was asked for: a count stays a count and a share a share as clusters grow. Where no single
    change is enough, fewer clusters come together with another.

    >>> for change in changes(corollary(ring(), [8] * 4, 2), 2):
    ...     print(change.words)
    8 reporters a cluster instead of 2
    complete() instead of ring(): rho 0.000
    """
    if found.holds:
        return ()
    single = [*_more_reporters(found), *_denser(found), *_fewer(found, reporters)]
    return tuple(single or _combined(found, reporters))


def _more_reporters(found: Corollary, prefix: str = "") -> Iterator[Change]:
    """The least m with n - m <= 1/(4 rho^2)."""
    if not found.few_enough:
        return
    for m in range(max(found.reporters) + 1, min(found.sizes) + 1):
        if Corollary(found.topology, found.sizes, (m,) * found.clusters, found.rho_max).holds:
            words = f"{prefix}{m} reporters a cluster instead of {max(found.reporters)}"
            yield Change("reporters", found.topology, found.clusters, m, words)
            return


def _denser(found: Corollary, prefix: str = "") -> Iterator[Change]:
    """Of the known graphs that are dense enough, the one with the fewest messages."""
    if not found.few_enough:
        return
    suited: list[tuple[int, int, float]] = []
    for place, topology in enumerate(CANDIDATES):
        try:
            sent = sum(messages(topology.sparse(n)) for n in set(found.sizes))
            value = rho_max(topology, found.sizes)
        except HansaError:  # no hypercube of that size
            continue
        if Corollary(topology, found.sizes, found.reporters, value).holds:
            suited.append((sent, place, value))
    if suited:
        _, place, value = min(suited)
        words = f"{prefix}{CANDIDATES[place]!r} instead of {found.topology}: rho {value:.3f}"
        yield Change("graph", CANDIDATES[place], found.clusters, max(found.reporters), words)


def _fewer(found: Corollary, reporters: float) -> Iterator[Change]:
    """The largest number of clusters below K that cuts the clients evenly and holds as it is."""
    for fewer in _cuts(found):
        try:
            again = corollary(found.topology, [found.clients // fewer] * fewer, reporters)
        except HansaError:  # the graph does not come in that size
            continue
        if again.holds:
            words = f"{fewer} clusters of {again.sizes[0]} instead of {found.clusters}"
            yield Change("clusters", found.topology, fewer, again.reporters[0], words)
            return


def _combined(found: Corollary, reporters: float) -> Iterator[Change]:
    """The largest K with K < n, and then what that still lacks."""
    for fewer in _cuts(found):
        sizes = [found.clients // fewer] * fewer
        prefix = f"{fewer} clusters of {sizes[0]} instead of {found.clusters}, and "
        try:
            again = corollary(found.topology, sizes, reporters)
            yield from _more_reporters(again, prefix)
        except HansaError:
            m = size_of("corollary", "reporters", reporters, sizes[0])
            again = Corollary(found.topology, tuple(sizes), (m,) * fewer, 1.0)
        yield from _denser(again, prefix)
        return


def _cuts(found: Corollary) -> Iterator[int]:
    """Numbers of clusters below K that divide N evenly into clusters larger than their number."""
    for fewer in range(found.clusters - 1, 0, -1):
        size, rest = divmod(found.clients, fewer)
        if rest == 0 and fewer < size <= SEARCH_UP_TO:
            yield fewer
