"""The report of `hansa topology`: connectivity, traffic, theoretical conditions, and a drawing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hansa.core.errors import HansaError, check_integer
from hansa.core.keys import Key
from hansa.gossip import draw
from hansa.gossip.clusters import Clustering, resolve
from hansa.gossip.spectral import cluster_rho, edge_count, messages
from hansa.gossip.theory import AfgaTheorem, Change, Corollary, ParameterOrders, corollary, drift, suggest_changes
from hansa.gossip.topology import Topology

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclass(frozen=True, slots=True)
class Description:
    """Measurements of a topology over a clustered population, printable on a rich console.

    >>> from hansa.gossip import ring
    >>> describe(ring(), clients=32, clusters=4).sizes
    (8, 8, 8, 8)
    """

    topology: Topology
    sizes: tuple[int, ...]
    rho: dict[int, float]
    edges: int
    messages: int
    dim: int
    itemsize: int
    corollary: Corollary
    changes: tuple[Change, ...]
    afga: AfgaTheorem
    steps: int | None = None
    rounds: int | None = None

    @property
    def step_bytes(self) -> int:
        """Bytes sent between clients in one gossip step of all clusters."""
        return self.messages * self.dim * self.itemsize

    def record(self) -> dict[str, Any]:
        """Return the description as plain data, for JSON."""
        corollary, afga = self.corollary, self.afga
        return {
            "topology": str(self.topology),
            "clients": corollary.clients,
            "clusters": corollary.clusters,
            "cluster_sizes": list(self.sizes),
            "reporters": list(corollary.reporters),
            "rho": {str(n): value for n, value in self.rho.items()},
            "cluster_rho": list(cluster_rho(self.topology, self.sizes)),
            "rho_max": corollary.rho_max,
            "edges": self.edges,
            "messages_per_step": self.messages,
            "bytes_per_step": self.step_bytes,
            "drift": None if self.steps is None else drift(corollary.rho_max, self.steps),
            "useful_steps": None if corollary.rho_max >= 1 else 1 / (1 - corollary.rho_max),
            "corollary_5_11": {
                "holds": corollary.holds,
                "bound": None if math.isinf(corollary.bound) else corollary.bound,
                "dense_enough": corollary.dense_enough,
                "few_enough": corollary.few_enough,
                "changes": [change.summary for change in self.changes],
                "orders": self._orders(corollary.orders(self.steps, self.rounds)),
            },
            "afga": {
                "theorem": afga.name,
                "holds": afga.holds,
                "bound": afga.bound,
                "orders": self._orders(afga.orders(self.steps, self.rounds)),
            },
        }

    def _orders(self, orders: ParameterOrders) -> dict[str, Any]:
        return {**asdict(orders), "enough_rounds": orders.enough(self.rounds)}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column()
        for name, value in self._lines():
            table.add_row(name, value)
        yield table
        yield ""
        many = "" if len(self.sizes) == 1 else " (one cluster)"
        yield Text(
            f"{self.topology} over {max(self.sizes)} clients{many}", style="dim", overflow="ellipsis", no_wrap=True
        )
        width = max(8, min(48, options.max_width))
        yield Text(draw.text(self.topology.sparse(max(self.sizes)), width, ascii_only=options.ascii_only))

    def _lines(self) -> Iterator[tuple[str, str]]:
        corollary = self.corollary
        low, high = min(self.sizes), max(self.sizes)
        sizes = low if low == high else f"{low} to {high}"
        yield "clients", f"{corollary.clients} in {_count(corollary.clusters, 'cluster')} of {sizes}"
        low, high = min(corollary.reporters), max(corollary.reporters)
        yield "reporters a cluster", str(low) if low == high else f"{low} to {high}"
        yield (
            "rho",
            ", ".join(f"{value:.3f}" + (f" (n = {n})" if len(self.rho) > 1 else "") for n, value in self.rho.items()),
        )
        rates = cluster_rho(self.topology, self.sizes)
        if len({round(rate, 3) for rate in rates}) > len(self.rho):
            yield "rho of each cluster", ", ".join(f"{rate:.3f}" for rate in rates)
        yield "rho_max", f"{corollary.rho_max:.3f}"
        yield "edges", f"{self.edges:,}"
        yield "messages a step", f"{self.messages:,}"
        yield "bytes a step", f"{self.step_bytes:,} ({self.dim:,} numbers of {self.itemsize} bytes)"
        yield "Corollary 5.11", "holds" if corollary.holds else "does not hold"
        if math.isinf(corollary.bound):
            yield "", "m = n: rho_max is free"
        else:
            sign = "<=" if corollary.dense_enough else ">"
            yield "", f"rho_max = {corollary.rho_max:.3f} {sign} 1/(2 sqrt(n - m)) = {corollary.bound:.3f}"
        yield "", f"K = {corollary.clusters} {'<' if corollary.few_enough else '>='} n = {min(self.sizes)}"
        for place, change in enumerate(self.changes):
            yield ("it would with" if place == 0 else "or with"), change.summary
        yield from self._order_lines(corollary.orders(self.steps, self.rounds))
        afga = self.afga
        yield f"AFGA {afga.name}", "holds" if afga.holds else "does not hold"
        bound = "M/(M + N)" if len(self.sizes) == 1 else "m/(m + n)"
        yield "", f"rho = {afga.rho_max:.3f} {'<=' if afga.holds else '>'} {bound} = {afga.bound:.3f}"
        yield from self._order_lines(afga.orders(self.steps, self.rounds))
        yield "local drift", self._drift()

    def _order_lines(self, orders: ParameterOrders) -> Iterator[tuple[str, str]]:
        """Yield the theorem's orders, each with its value if the steps and rounds are known."""
        said = "" if orders.least_rounds is None else f": {orders.least_rounds:,} or more"
        if (enough := orders.enough(self.rounds)) is not None:
            said += f"; {self.rounds:,} are {'enough' if enough else 'too few'}"
        yield "  rounds", orders.rounds + said
        for name, words, number in (
            ("  server rate", orders.server_lr, orders.server_scale),
            ("  local rate", orders.local_lr, orders.local_scale),
            ("  then", orders.rate, orders.rate_scale),
        ):
            yield name, words if number is None else f"{words}, with {number:.3g} inside"

    def _drift(self) -> str:
        rho = self.corollary.rho_max
        most = "no bound" if rho >= 1 else f"{1 / (1 - rho):.1f}"
        if self.steps is None:
            return f"grows with min{{1/(1 - rho), tau}}; 1/(1 - rho) = {most}"
        return f"grows with min{{1/(1 - rho), tau}} = min{{{most}, {self.steps}}} = {drift(rho, self.steps):.1f}"


def describe(
    topology: Topology,
    clients: int,
    clusters: int | Sequence[Sequence[int]] | Clustering = 1,
    *,
    reporters: int | None = None,
    participation: float | None = None,
    dim: int = 1_000_000,
    itemsize: int = 4,
    steps: int | None = None,
    rounds: int | None = None,
) -> Description:
    """Describe a topology before a run: rho, messages, bytes, and whether the theorems hold.

    Args:
        topology: Topology of every cluster, or `by_cluster`.
        clients: Number of clients.
        clusters: Number of clusters.
        reporters: Reporters of each cluster.
        participation: Fraction of the clients that report, instead of ``reporters``.
        dim: Entries of a model.
        itemsize: Bytes of an entry.
        steps: Local steps per round.
        rounds: Number of rounds.

    >>> from hansa.gossip import ring
    >>> found = describe(ring(), 32, 4, participation=0.25, dim=1000)
    >>> found.edges, found.messages, found.step_bytes, found.corollary.holds
    (32, 64, 256000, False)
    """
    if reporters is not None and participation is not None:
        raise HansaError(f"describe(reporters={reporters}, participation={participation}): expected one of the two.")
    check_integer("describe", "dim", dim)
    check_integer("describe", "itemsize", itemsize)
    for name, number in (("steps", steps), ("rounds", rounds)):
        if number is not None:
            check_integer("describe", name, number)
    sizes = tuple(len(group) for group in resolve(clusters, clients, Key(0)))
    requested: float = reporters if reporters is not None else float(1 if participation is None else participation)
    result = corollary(topology, sizes, requested)
    rates = cluster_rho(topology, sizes)
    graphs = [(topology.of_cluster(number), n) for number, n in enumerate(sizes)]
    alike = Counter((repr(graph), n) for graph, n in graphs)
    different = {(repr(graph), n): graph for graph, n in graphs}
    counted = [(count, different[kind].sparse(kind[1])) for kind, count in alike.items()]
    return Description(
        topology=topology,
        sizes=sizes,
        rho={n: max(rate for rate, size in zip(rates, sizes, strict=True) if size == n) for n in sorted(set(sizes))},
        edges=sum(count * edge_count(W) for count, W in counted),
        messages=sum(count * messages(W) for count, W in counted),
        dim=dim,
        itemsize=itemsize,
        corollary=result,
        changes=suggest_changes(result, requested),
        afga=AfgaTheorem(result.topology, result.sizes, result.reporters, result.rho_max),
        steps=steps,
        rounds=rounds,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
