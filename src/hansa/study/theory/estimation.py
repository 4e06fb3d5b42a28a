"""Estimates of the theorems' constants from a task."""

from __future__ import annotations

import math
from typing import Any

from hansa.aggregate import BaseAggregator
from hansa.algorithm import Algorithm
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.types import MODEL
from hansa.rounds.measures import heterogeneity, smoothness
from hansa.study.theory.constants import ProblemConstants

SAMPLES = 16  # per-sample gradients of each client, for its noise
CLIENTS = 8  # whose Hessians are measured
ITERATIONS = 12  # of the power iteration of each, two full gradients each


def estimate_constants(algorithm: Algorithm, task: Any, *, at: Any = None, seed: int = 0) -> ProblemConstants:
    """Estimate L, G, the sigmas, zeta and f_0 at a model, by default the first one of the seed.

    Batches, clusters and weights are those of the algorithm. ``gap`` is the loss at the start, which bounds f_0 - f*
    for losses that are never negative. The assumptions bound these quantities at every model, the estimates at one.

    Args:
        algorithm: A preset or a composition.
        task: A task.
        at: A flat vector, or ``run.state.vectors``.
        seed: Seed of the first model and of all draws.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic([[[2.0]], [[3.0]]], [[0.0], [3.0]])
    >>> found = estimate_constants(hansa.presets.fedams(), task)
    >>> round(found.L, 6), found.sigma_g, found.gap
    (9.0, 4.5, 2.25)
    """
    population = task.population.count
    bound = algorithm.bind(population, Key(seed), getattr(getattr(task, "data", None), "label_counts", None))
    mixing = bound.local.mixing
    weights = with_defaults(bound.channels[MODEL].aggregate, BaseAggregator).weights
    size = bound.local.batch_size or max(task.population.samples)
    spread = heterogeneity(
        task,
        at,
        clusters=None if mixing is None else mixing.cluster_lists(),
        weights="uniform" if weights == "clusters" else weights,
        batch_size=size,
        samples=SAMPLES,
        seed=seed,
    )
    smooth = smoothness(task, at, clients=CLIENTS, iterations=ITERATIONS, batch_size=size, seed=seed)
    return ProblemConstants(
        L=smooth.L,
        G=smooth.G,
        sigma_l=spread.sigma_l,
        sigma_g=spread.sigma_g,
        sigma_within=math.nan if spread.sigma_within is None else spread.sigma_within,
        sigma_between=math.nan if spread.sigma_between is None else spread.sigma_between,
        gap=smooth.loss if smooth.loss >= 0 else math.nan,
        gradient_norm=spread.gradient_norm,
        gradient_scale=math.sqrt(spread.sigma_g**2 + spread.gradient_norm**2),
        d=float(task.start(Key(seed), task.dtype)[MODEL].numel()),
        zeta=spread.zeta,
    )
