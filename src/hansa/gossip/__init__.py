"""Gossip: who hears whom, how fast that averages, who computes, and how a population is clustered."""

from __future__ import annotations

from hansa.gossip.activity import Activity, as_activity, bernoulli, everyone, replay, resample, selected
from hansa.gossip.clusters import Clustering, by_labels, common_size, equal, given, random, resolve
from hansa.gossip.describe import Description, describe
from hansa.gossip.draw import svg, text
from hansa.gossip.optimizers import consensus_amsgrad
from hansa.gossip.search import Match, with_rho
from hansa.gossip.spectral import edge_count, messages, rho, rho_max, step_bytes
from hansa.gossip.theory import AfgaTheorem, Change, Corollary, Orders, afga_theorem, changes, corollary, drift
from hansa.gossip.topology import (
    Topology,
    complete,
    edges,
    erdos_renyi,
    exponential,
    hypercube,
    isolated,
    matrix,
    over_survivors,
    ring,
    star,
    torus,
    unbalanced_complete,
)
from hansa.gossip.weights import check, dense, metropolis, sinkhorn

__all__ = [
    "Activity", "AfgaTheorem", "Change", "Clustering", "Corollary",
    "Description", "Match", "Orders", "Topology", "afga_theorem", "as_activity", "bernoulli", "by_labels",
    "changes", "check", "common_size", "complete", "consensus_amsgrad", "corollary", "dense", "describe", "drift",
    "edge_count", "edges", "equal", "erdos_renyi", "everyone", "exponential", "given", "hypercube", "isolated",
    "matrix", "messages", "metropolis", "over_survivors", "random", "replay", "resample", "resolve", "rho",
    "rho_max", "ring", "selected", "sinkhorn", "star", "step_bytes", "svg", "text", "torus", "unbalanced_complete",
    "with_rho",
]  # fmt: skip
