"""Gradient heterogeneity of the clients: the sigmas and zetas that the papers' theorems assume bounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hansa.aggregate import BaseAggregator, client_weights, diversity
from hansa.aggregate.base import Weights, check_weights
from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.types import MODEL, Vector, Vectors
from hansa.rounds.measures.client_gradients import ClientGradients, Trainable, square


@dataclass(frozen=True, slots=True)
class Heterogeneity:
    """With g_i the full gradient of client i, lambda the objective's weights and g = sum lambda_i g_i:

    - ``zeta``: ||g_i - g||^2 of every client ([AWARE] Corollary 3.2);
    - ``sigma_g``: sqrt(sum lambda_i ||g_i - g||^2) ([AWARE] Assumption 3.1, [AFGA] 4.4);
    - ``sigma_l``: sqrt(mean_i E||g_i(batch) - g_i||^2), the noise of a batch ([AWARE] Assumption 2.2);
    - ``sigma_within``: sqrt(mean_k mean_{i in k} ||g_i - g_k||^2) with g_k the mean gradient of cluster k ([HAFED]
      Assumption 5.4, the average of its sigma_k^2), ``sigma_between``: sqrt(mean_k ||g_k - mean_k g_k||^2), its sigma_g
      at alpha = 1; None without clusters;
    - ``gradient_norm``: ||g||, and ``diversity``: D of the g_i ([AWARE] Definition 3.1).

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> heterogeneity(task, torch.zeros(2)).sigma_g
    0.0
    """

    zeta: tuple[float, ...]
    sigma_g: float
    sigma_l: float
    sigma_within: float | None
    sigma_between: float | None
    gradient_norm: float
    diversity: float

    def record(self) -> dict[str, Any]:
        """Return the measured values as plain data, for a round's record."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return {**values, "zeta": list(self.zeta), "gradient_diversity": values.pop("diversity")}


def heterogeneity(
    task: Trainable,
    at: Vectors | Vector | None = None,
    *,
    clusters: Sequence[Sequence[int]] | None = None,
    weights: Weights = "uniform",
    batch_size: int = 1,
    samples: int | None = 64,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> Heterogeneity:
    """Measure a task's heterogeneity at a model, by default the initial model of ``seed``, from full gradients.

    ``at`` is a flat vector, or ``run.state.vectors``. The noise is that of batches of ``batch_size`` drawn without
    replacement, estimated from at most ``samples`` per-sample gradients per client (None: all), or from that many
    batches (None: as many as the client has rows) if the loss of a batch is not the mean of the losses of its rows.
    Models are in evaluation mode, so dropout and batch statistics add no noise. Tasks with full gradients only have no
    noise. A full gradient is that of the loss of all of a client's rows: with class weights or ignored labels that of
    the weighted mean, and for a loss that sums that of the sum divided by the rows.

    Two clients with f_i = (x - b_i)^2/2 at x = 0, b = 1 and 3: g_i = -1 and -3, g = -2.

    >>> from hansa.training import quadratic
    >>> found = heterogeneity(quadratic([[[1.0]], [[1.0]]], [[1.0], [3.0]]))
    >>> found.zeta, found.sigma_g, found.gradient_norm
    ((1.0, 1.0), 1.0, 2.0)
    """
    check_integer("heterogeneity", "batch_size", batch_size)
    if samples is not None:
        check_integer("heterogeneity", "samples", samples, "None takes all of a client's samples.")
    if check_weights("heterogeneity", weights) == "clusters":
        raise invalid_argument("heterogeneity", "weights", weights, "'uniform', 'samples' or one number a client")
    groups = _groups(clusters, task.population.count)
    key = Key(seed)
    measuring = ClientGradients("heterogeneity", task, at, key, task.dtype if dtype is None else dtype)
    lam = client_weights(weights, range(task.population.count), task.population.samples)

    noise = []
    total = torch.zeros(measuring.dim, dtype=torch.float64)
    means = [torch.zeros_like(total) for _ in groups]
    where = {client: k for k, group in enumerate(groups) for client in group}
    squares = []
    for client, gradient in measuring.each():
        total.add_(gradient, alpha=lam[client])
        if where:
            means[where[client]].add_(gradient, alpha=1 / len(groups[where[client]]))
        squares.append(float(gradient @ gradient))
        noise.append(measuring.noise(client, gradient, batch_size, samples))
    zeta = []
    within = [0.0] * len(groups)
    for client, gradient in measuring.each():
        zeta.append(square(gradient - total))
        if where:
            k = where[client]
            within[k] += square(gradient - means[k]) / len(groups[k])
    centre = torch.stack(means).mean(dim=0) if means else total
    length = float(total @ total)
    return Heterogeneity(
        zeta=tuple(zeta),
        sigma_g=math.sqrt(math.fsum(w * z for w, z in zip(lam, zeta, strict=True))),
        sigma_l=math.sqrt(math.fsum(noise) / len(noise)),
        sigma_within=math.sqrt(math.fsum(within) / len(groups)) if groups else None,
        sigma_between=math.sqrt(math.fsum(square(mean - centre) for mean in means) / len(means)) if means else None,
        gradient_norm=math.sqrt(length),
        diversity=diversity(squares, lam, length),
    )


def track_heterogeneity(every: int = 1, **options: Any) -> Callable[[Any, dict[str, Any]], None]:
    """Return a callback that adds `heterogeneity` at the server's model to the record of every ``every``-th round.

    Clusters and weights default to those of the run's method and objective; ``options`` override them.

    ``hansa.run(..., callbacks=[hansa.measures.track_heterogeneity(every=10)])``

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> done = hansa.run(hansa.presets.fedavg(steps=2), task, rounds=2, callbacks=[track_heterogeneity()])
    >>> "sigma_g" in done.history[-1]
    True
    """
    check_integer("track_heterogeneity", "every", every)

    def measure(run: Any, record: dict[str, Any]) -> None:
        if record["round"] % every:
            return
        mixing = run.algorithm.local.mixing
        weights = with_defaults(run.algorithm.channels[MODEL].aggregate, BaseAggregator).weights
        arguments = {
            "clusters": None if mixing is None else mixing.cluster_lists(),
            "weights": "uniform" if weights == "clusters" else weights,
            "seed": run.key.seed,
            "dtype": run.dtype,
            **options,
        }
        record.update(heterogeneity(run.task, run.host_vectors, **arguments).record())

    return measure


def _groups(clusters: Sequence[Sequence[int]] | None, population: int) -> list[list[int]]:
    if clusters is None:
        return []
    groups = [[int(client) for client in group] for group in clusters]
    if sorted(client for group in groups for client in group) != list(range(population)) or not all(groups):
        raise HansaError(f"heterogeneity(clusters): expected every one of the {population} clients in one cluster.")
    return groups
