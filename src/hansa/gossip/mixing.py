"""Mixing: gossip among the clients of a cluster between local steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias, get_args

from hansa.compress import Compressor
from hansa.compress.base import require_compressor
from hansa.core.bounds import Checked, bound, one_of
from hansa.core.errors import check_fraction, check_integer, invalid_argument
from hansa.gossip import Activity, Clustering, MixingRule, Topology, everyone, resample, selected, trimmed
from hansa.gossip.activity import require_activity
from hansa.gossip.robust import require_mixing_rule
from hansa.gossip.topology import require_topology

StepOrder: TypeAlias = Literal["adapt-then-combine", "combine-then-adapt"]
"""Whether gossiping clients mix their models after or before the local step."""


@dataclass(frozen=True, slots=True)
class Mixing(Checked):
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

    topology: Topology = field(metadata=bound(require_topology))
    clusters: int | Sequence[Sequence[int]] | Clustering = 1
    active: Activity = field(default_factory=everyone, metadata=bound(require_activity))
    gossip_every: int = field(default=1, metadata=bound(check_integer, "1 gossips after every step."))
    reporters_only: bool = False
    keep_local_models: bool = False
    average_every: int | None = field(default=None, metadata=bound(check_integer))
    compressor: Compressor | None = field(default=None, metadata=bound(require_compressor))
    consensus_rate: float = field(default=1.0, metadata=bound(check_fraction))
    order: StepOrder = field(default="adapt-then-combine", metadata=bound(one_of, *get_args(StepOrder)))
    robust: MixingRule | None = field(default=None, metadata=bound(require_mixing_rule))

    def __repr__(self) -> str:
        shown = [item.name for item in fields(self) if item.name != "robust" or self.robust is not None]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        compressed, robust = self.compressor is not None, self.robust is not None
        reporters_only, keeps_models = self.reporters_only, self.keep_local_models
        computing = self.active not in (everyone(), selected())
        for invalid, argument, expected in (
            (not compressed and self.consensus_rate != 1, "consensus_rate", "1 without a compressor"),
            (compressed and self.order == "combine-then-adapt", "compressor", "order='adapt-then-combine' with it"),
            (robust and compressed, "robust", "no compressor with it: a rule cannot judge compressed differences"),
            (robust and self.average_every is not None, "robust", "no average_every with it: all enter an average"),
            (reporters_only and keeps_models, "reporters_only", "False with keep_local_models=True"),
            (reporters_only and computing, "reporters_only", f"False with active={self.active!r}: all compute"),
        ):
            if invalid:
                raise invalid_argument("Mixing", argument, getattr(self, argument), expected)

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
