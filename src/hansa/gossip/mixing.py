"""Mixing: gossip among the clients of a cluster between local steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias, get_args

from hansa.compress import Compressor
from hansa.compress.base import require_compressor
from hansa.core.errors import HansaError, check_fraction, check_integer, invalid_argument
from hansa.gossip import Activity, Clustering, MixingRule, Topology, everyone, resample, selected, trimmed
from hansa.gossip.activity import require_activity
from hansa.gossip.robust import require_mixing_rule
from hansa.gossip.topology import require_topology

StepOrder: TypeAlias = Literal["adapt-then-combine", "combine-then-adapt"]
"""Whether gossiping clients mix their models after or before the local step."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """Gossip inside clusters: X <- W X after local steps, the rows of X being a cluster's models.

    Args:
        topology: The communication graph, which determines the mixing matrix W; `hansa.gossip.by_cluster` has one for
            each cluster.
        clusters: The number of clusters, lists of clients, or a clustering.
        active: Which clients compute at a step; all clients gossip.
        gossip_every: Number of local steps between gossip exchanges.
        reporters_only: Only the round's reporters train and gossip, at every step, on a separate topology.
        keep_local_models: Every client keeps its model between rounds, without server traffic; the server's model is
            their mean.
        average_every: Number of steps of the run between exact averages, which replace gossip (Gossip-PGA); they do not
            depend on ``gossip_every``.
        compressor: Compressor of the differences to public copies that neighbours exchange (CHOCO-Gossip, Koloskova
            2019); the copies live as long as the models.
        consensus_rate: The step size of compressed gossip.
        order: adapt-then-combine is x_i <- sum_j W_ij (x_j - lr g_j(x_j)); combine-then-adapt is
            x_i <- sum_j W_ij x_j - lr g_i(x_i), with the gradient taken before mixing, at the client's own model.
        robust: Rule that replaces sum_j W_ij x_j where neighbours may be malicious, such as `hansa.gossip.clipped`.

    >>> from hansa.gossip import ring
    >>> Mixing(ring(), clusters=4).gossip_every
    1
    """

    topology: Topology
    clusters: int | Sequence[Sequence[int]] | Clustering = 1
    active: Activity = field(default_factory=everyone)
    gossip_every: int = 1
    reporters_only: bool = False
    keep_local_models: bool = False
    average_every: int | None = None
    compressor: Compressor | None = None
    consensus_rate: float = 1.0
    order: StepOrder = "adapt-then-combine"
    robust: MixingRule | None = None

    def __repr__(self) -> str:
        shown = [item.name for item in fields(self) if item.name != "robust" or self.robust is not None]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def __post_init__(self) -> None:
        require_topology("Mixing", "topology", self.topology)
        require_activity("Mixing", "active", self.active)
        if self.compressor is not None:
            require_compressor("Mixing", "compressor", self.compressor)
        check_integer("Mixing", "gossip_every", self.gossip_every, "1 gossips after every step.")
        if self.average_every is not None:
            check_integer("Mixing", "average_every", self.average_every)
        check_fraction("Mixing", "consensus_rate", self.consensus_rate)
        if self.order not in get_args(StepOrder):
            raise invalid_argument("Mixing", "order", self.order, " or ".join(map(repr, get_args(StepOrder))))
        if self.compressor is None and self.consensus_rate != 1:
            raise invalid_argument(
                "Mixing", "consensus_rate", self.consensus_rate, "1 without a compressor", "It is CHOCO-Gossip's."
            )
        if self.compressor is not None and self.order == "combine-then-adapt":
            raise HansaError(
                f"Mixing(compressor={self.compressor!r}, order='combine-then-adapt'): compressed gossip sends what the "
                "local step made. Use order='adapt-then-combine'.",
                component="Mixing",
                argument="compressor",
            )
        if self.robust is not None:
            self._check_robust()
        if self.reporters_only and self.keep_local_models:
            raise HansaError(
                "Mixing(reporters_only=True, keep_local_models=True): reporters_only keeps no models between rounds.",
                component="Mixing",
                argument="reporters_only",
            )
        if self.reporters_only and self.active not in (everyone(), selected()):
            raise HansaError(
                f"Mixing(reporters_only=True, active={self.active!r}): with reporters_only all reporters compute "
                "at every step. Leave out active or reporters_only.",
                component="Mixing",
                argument="reporters_only",
            )

    def _check_robust(self) -> None:
        """Raise for exchanges that a mixing rule does not protect."""
        require_mixing_rule("Mixing", "robust", self.robust)
        for argument, exchanged in (
            ("compressor", "compressed differences, which a rule cannot judge"),
            ("average_every", "exact averages, which every client enters in full"),
        ):
            if getattr(self, argument) is not None:
                raise HansaError(
                    f"Mixing(robust={self.robust!r}, {argument}={getattr(self, argument)!r}): neighbours exchange "
                    f"{exchanged}. Leave out {argument} or robust.",
                    component="Mixing",
                    argument="robust",
                )

    def check_neighbours(self) -> None:
        """Raise if a client has too few neighbours for the trimming; requires an algorithm bound to a population."""
        if not isinstance(self.robust, trimmed) or self.reporters_only:
            return
        from hansa.gossip.rows import neighbour_counts  # imports NumPy, which listing presets does not need

        for number, group in enumerate(self.cluster_lists()):
            fewest = int(neighbour_counts(self.topology.of_cluster(number).sparse(len(group))).min())
            if fewest <= 2 * self.robust.count:
                expected = f"less than half of the {fewest} neighbours that a client of cluster {number} has"
                remedy = "Use a denser topology, or clipped()."
                raise invalid_argument("Mixing", "robust", self.robust, expected, remedy)

    @property
    def cites(self) -> tuple[str, ...]:
        kind = ("lian2017",) if self.keep_local_models else () if isinstance(self.active, resample) else ("hafed2023",)
        exact = ("chen2021",) if self.average_every is not None else ()
        return (*kind, *exact, *(("koloskova2019",) if self.compressor is not None else ()))

    def cluster_lists(self) -> tuple[tuple[int, ...], ...]:
        """Return the clusters as lists of clients; requires an algorithm bound to a population."""
        assert isinstance(self.clusters, tuple)
        return self.clusters
