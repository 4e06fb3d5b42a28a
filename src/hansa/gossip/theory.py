"""Theoretical conditions on a topology: [HAFED] Corollary 5.11 and [AFGA] Theorems 4.6 and D.3.

Also the smallest change that makes the corollary hold, and the scaling of the learning rates. All results are orders
without constants: only ratios are meaningful.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hansa.core.errors import HansaError, check_integer
from hansa.gossip.activity import count_of
from hansa.gossip.spectral import messages, rho_max
from hansa.gossip.topology import Topology, complete, exponential, hypercube, ring, torus

CANDIDATES: tuple[Topology, ...] = (ring(), torus(), hypercube(), exponential(), complete())
SLACK = 1e-9  # rho and its bound are often equal up to rounding (hypercube of 8: 1/2)
SEARCH_UP_TO = 4096  # clients per cluster: above this, the search takes minutes


def drift(rho: float, steps: int) -> float:
    """Return min{1/(1 - rho), tau}, the factor with which drift within a cluster grows over tau local steps.

    Steps beyond 1/(1 - rho) add nothing ([HAFED] Theorem 5.6).

    Args:
        rho: Mixing rate of the topology.
        steps: Local steps per round.

    >>> drift(0.75, 2), drift(0.75, 48)
    (2.0, 4.0)
    """
    return float(steps) if rho >= 1 else min(1 / (1 - rho), float(steps))


@dataclass(frozen=True, slots=True)
class ParameterOrders:
    """The rounds a theorem requires, its scaling of both learning rates, and its convergence rate.

    Each is given as text and, if the local steps and rounds are known, as a number up to constants.

    >>> corollary(ring(), [8] * 4, 8).orders(steps=48).rate
    'O(1/sqrt(T tau M))'
    """

    rounds: str
    server_lr: str
    local_lr: str
    rate: str
    least_rounds: int | None
    server_scale: float | None
    local_scale: float | None
    rate_scale: float | None

    def enough(self, rounds: int | None) -> bool | None:
        """Return whether this many rounds are enough up to constants; None if the local steps are not known."""
        return None if rounds is None or self.least_rounds is None else rounds >= self.least_rounds


@dataclass(frozen=True, slots=True)
class Corollary:
    """The numbers of Corollary 5.11 for K clusters of ``sizes`` clients, ``reporters`` of each reporting.

    It holds if rho_max <= 1/(2 sqrt(n - m)) and K < n; m = n does not constrain rho. The paper assumes equal sizes; for
    unequal sizes the tightest bound and the smallest cluster are used.

    >>> corollary(ring(), [8] * 4, 8).holds, corollary(ring(), [8] * 4, 2).holds
    (True, False)
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
    def participants(self) -> int:
        """M."""
        return sum(self.reporters)

    @property
    def bound(self) -> float:
        """1/(2 sqrt(n - m)), infinite if all clients report."""
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

    def orders(self, steps: int | None = None, rounds: int | None = None) -> ParameterOrders:
        """For T > tau M rounds: eta = Theta(sqrt(tau M)), eta_l = Theta(1/sqrt(T tau)), rate O(1/sqrt(T tau M)).

        >>> from hansa.gossip import complete
        >>> found = corollary(complete(), [8] * 4, 2).orders(steps=48, rounds=500)
        >>> found.least_rounds, round(found.server_scale, 1), found.enough(500)
        (385, 19.6, True)
        """
        M, both = self.participants, None if steps is None or rounds is None else rounds * steps
        return ParameterOrders(
            rounds="T > tau M",
            server_lr="Theta(sqrt(tau M))",
            local_lr="Theta(1/sqrt(T tau))",
            rate="O(1/sqrt(T tau M))",
            least_rounds=None if steps is None else steps * M + 1,
            server_scale=None if steps is None else math.sqrt(steps * M),
            local_scale=None if both is None else 1 / math.sqrt(both),
            rate_scale=None if both is None else 1 / math.sqrt(both * M),
        )


@dataclass(frozen=True, slots=True)
class AfgaTheorem:
    """[AFGA] Theorem 4.6, for one cluster of all N clients: it holds if rho <= M/(M + N).

    Theorem D.3, for several clusters, holds if rho_max <= m/(m + n). For unequal sizes the tightest bound is used.

    >>> afga_theorem(complete(), [10] * 5, 1).holds
    True
    """

    topology: Topology
    sizes: tuple[int, ...]
    reporters: tuple[int, ...]
    rho_max: float

    @property
    def name(self) -> str:
        return "Theorem 4.6" if len(self.sizes) == 1 else "Theorem D.3"

    @property
    def bound(self) -> float:
        """m/(m + n), which is M/(M + N) in one cluster."""
        return min(m / (m + n) for n, m in zip(self.sizes, self.reporters, strict=True))

    @property
    def holds(self) -> bool:
        """rho_max <= m/(m + n)."""
        return self.rho_max <= self.bound + SLACK

    def orders(self, steps: int | None = None, rounds: int | None = None) -> ParameterOrders:
        """For R >= I M rounds: eta = Theta(n sqrt(I/m)), eta_l = Theta(1/sqrt(R I^2)), rate O(1/sqrt(R I m)).

        In one cluster n and m are N and M.
        """
        m, M = min(self.reporters), sum(self.reporters)
        ratio = max(n / math.sqrt(m) for n, m in zip(self.sizes, self.reporters, strict=True))
        n_, m_ = ("N", "M") if len(self.sizes) == 1 else ("n", "m")
        both = None if steps is None or rounds is None else rounds * steps
        return ParameterOrders(
            rounds="R >= I M",
            server_lr=f"Theta({n_} sqrt(I/{m_}))",
            local_lr="Theta(1/sqrt(R I^2))",
            rate=f"O(1/sqrt(R I {m_}))",
            least_rounds=None if steps is None else steps * M,
            server_scale=None if steps is None else ratio * math.sqrt(steps),
            local_scale=None if steps is None or rounds is None else 1 / (math.sqrt(rounds) * steps),
            rate_scale=None if both is None else 1 / math.sqrt(both * m),
        )


@dataclass(frozen=True, slots=True)
class Change:
    """A setting under which the corollary holds, and a summary of what changes.

    >>> suggest_changes(corollary(ring(), [8] * 4, 2), 2)[0].summary
    '8 reporters a cluster instead of 2'
    """

    kind: Literal["reporters", "graph", "clusters"]
    topology: Topology
    clusters: int
    reporters: int
    summary: str


def corollary(topology: Topology, sizes: Sequence[int], reporters: float) -> Corollary:
    """Check Corollary 5.11 for clusters of ``sizes`` with ``reporters`` per cluster (a count or a fraction).

    Args:
        topology: Topology of every cluster.
        sizes: Sizes of the clusters.
        reporters: Reporters of each cluster, a number or a fraction.

    >>> from hansa.gossip import complete, ring
    >>> found = corollary(ring(), [8, 8, 8, 8], 2)
    >>> round(found.rho_max, 3), round(found.bound, 3), found.holds
    (0.805, 0.204, False)
    >>> corollary(complete(), [8, 8, 8, 8], 2).holds
    True
    """
    for n in sizes:
        check_integer("corollary", "sizes", n)
    m = tuple(count_of("corollary", "reporters", reporters, n) for n in sizes)
    return Corollary(topology, tuple(sizes), m, rho_max(topology, sizes))


def afga_theorem(topology: Topology, sizes: Sequence[int], reporters: float) -> AfgaTheorem:
    """Check [AFGA] Theorem 4.6 (one cluster) or D.3 for clusters of ``sizes`` with ``reporters`` per cluster.

    Args:
        topology: Topology of every cluster.
        sizes: Sizes of the clusters.
        reporters: Reporters of each cluster, a number or a fraction.

    >>> from hansa.gossip import complete, ring
    >>> found = afga_theorem(ring(), [50], 5)
    >>> round(found.rho_max, 3), round(found.bound, 3), found.holds
    (0.995, 0.091, False)
    >>> afga_theorem(complete(), [10] * 5, 1).holds
    True
    """
    conditions = corollary(topology, sizes, reporters)
    return AfgaTheorem(conditions.topology, conditions.sizes, conditions.reporters, conditions.rho_max)


def suggest_changes(setting: Corollary, reporters: float) -> tuple[Change, ...]:
    """Return the smallest changes that make the corollary hold: more reporters, a denser graph, fewer clusters.

    ``reporters`` is the requested value: a count stays a count and a fraction a fraction as clusters grow. If no single
    change is enough, fewer clusters are combined with another change.

    Args:
        setting: Setting that violates the corollary.
        reporters: Requested reporters of each cluster.

    >>> for change in suggest_changes(corollary(ring(), [8] * 4, 2), 2):
    ...     print(change.summary)
    8 reporters a cluster instead of 2
    complete() instead of ring(): rho 0.000
    """
    if setting.holds:
        return ()
    single = [*_more_reporters(setting), *_denser(setting), *_fewer(setting, reporters)]
    return tuple(single or _combine_changes(setting, reporters))


def _more_reporters(setting: Corollary, prefix: str = "") -> Iterator[Change]:
    """Yield the smallest m with n - m <= 1/(4 rho^2)."""
    if not setting.few_enough:
        return
    for m in range(max(setting.reporters) + 1, min(setting.sizes) + 1):
        if Corollary(setting.topology, setting.sizes, (m,) * setting.clusters, setting.rho_max).holds:
            summary = f"{prefix}{m} reporters a cluster instead of {max(setting.reporters)}"
            yield Change("reporters", setting.topology, setting.clusters, m, summary)
            return


def _denser(setting: Corollary, prefix: str = "") -> Iterator[Change]:
    """Yield the sufficiently dense graph with the fewest messages."""
    if not setting.few_enough:
        return
    suited: list[tuple[int, int, float]] = []
    for place, topology in enumerate(CANDIDATES):
        try:
            sent = sum(messages(topology.sparse(n)) for n in set(setting.sizes))
            value = rho_max(topology, setting.sizes)
        except HansaError:  # no hypercube of that size
            continue
        if Corollary(topology, setting.sizes, setting.reporters, value).holds:
            suited.append((sent, place, value))
    if suited:
        _, place, value = min(suited)
        summary = f"{prefix}{CANDIDATES[place]!r} instead of {setting.topology}: rho {value:.3f}"
        yield Change("graph", CANDIDATES[place], setting.clusters, max(setting.reporters), summary)


def _fewer(setting: Corollary, reporters: float) -> Iterator[Change]:
    """Yield the largest number of clusters below K that divides the clients evenly and satisfies the corollary."""
    for fewer in _cluster_counts(setting):
        try:
            again = corollary(setting.topology, [setting.clients // fewer] * fewer, reporters)
        except HansaError:  # the graph does not exist in that size
            continue
        if again.holds:
            summary = f"{fewer} clusters of {again.sizes[0]} instead of {setting.clusters}"
            yield Change("clusters", setting.topology, fewer, again.reporters[0], summary)
            return


def _combine_changes(setting: Corollary, reporters: float) -> Iterator[Change]:
    """Yield the largest K with K < n, combined with the other changes it needs."""
    for fewer in _cluster_counts(setting):
        sizes = [setting.clients // fewer] * fewer
        prefix = f"{fewer} clusters of {sizes[0]} instead of {setting.clusters}, and "
        try:
            again = corollary(setting.topology, sizes, reporters)
            yield from _more_reporters(again, prefix)
        except HansaError:
            m = count_of("corollary", "reporters", reporters, sizes[0])
            again = Corollary(setting.topology, tuple(sizes), (m,) * fewer, 1.0)
        yield from _denser(again, prefix)
        return


def _cluster_counts(setting: Corollary) -> Iterator[int]:
    """Yield the numbers of clusters K' < K that divide N evenly with more than K' clients per cluster."""
    for fewer in range(setting.clusters - 1, 0, -1):
        size, rest = divmod(setting.clients, fewer)
        if rest == 0 and fewer < size <= SEARCH_UP_TO:
            yield fewer
