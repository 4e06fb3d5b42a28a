"""Gossip: topologies and their mixing rates, activities, and clusterings of a population."""

from __future__ import annotations

from hansa.gossip.activity import (
    Activity,
    BaseActivity,
    as_activity,
    available,
    bernoulli,
    everyone,
    replay,
    resample,
    selected,
)
from hansa.gossip.clusters import BaseClustering, Clustering, by_labels, equal, given, random, resolve
from hansa.gossip.describe import Match, describe, draw, with_rho
from hansa.gossip.optimizers import consensus_amsgrad
from hansa.gossip.robust import Attack, MixingRule, clipped, trimmed
from hansa.gossip.spectral import cluster_rho, edge_count, messages, rho, rho_max
from hansa.gossip.topology import (
    Topology,
    as_topology,
    by_cluster,
    complete,
    edges,
    erdos_renyi,
    exponential,
    hypercube,
    isolated,
    matrix,
    over_survivors,
    redrawn,
    ring,
    star,
    torus,
    unbalanced_complete,
)
from hansa.gossip.weights import WeightMatrix, check_mixing_matrix, metropolis, sinkhorn, to_dense

__all__ = [
    "Activity", "Attack", "BaseActivity", "BaseClustering", "Clustering", "Match", "MixingRule", "Topology",
    "WeightMatrix", "as_activity", "as_topology", "available", "bernoulli", "by_cluster", "by_labels",
    "check_mixing_matrix", "clipped", "cluster_rho", "complete", "consensus_amsgrad", "describe",
    "draw", "edge_count", "edges", "equal", "erdos_renyi", "everyone", "exponential", "given", "hypercube",
    "isolated", "matrix", "messages", "metropolis", "over_survivors", "random", "redrawn", "replay", "resample",
    "resolve", "rho", "rho_max", "ring", "selected", "sinkhorn", "star", "to_dense", "torus",
    "trimmed", "unbalanced_complete", "with_rho",
]  # fmt: skip
