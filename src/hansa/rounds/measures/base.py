"""Diagnostics of a closed round, and the measures that ``hansa.run(..., measures=[hansa.measures.compression])`` adds.
They read what happened and cannot change the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hansa.aggregate import BaseAggregator
from hansa.aggregate.aware import diversity
from hansa.aggregate.base import Participants, Weights, normalize_weights, sum_updates
from hansa.algorithm import Algorithm
from hansa.compress import Compressor, decode, error_feedback
from hansa.core.errors import HansaError, check_integer
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.types import MODEL, Vectors
from hansa.core.vectors.arithmetic import norm, vectors_to
from hansa.rounds.aggregation import RoundAggregation
from hansa.rounds.round import decode_broadcasts


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """The input of a measure: the broadcast vectors, each client's accepted vectors and its memory before and after,
    and the ``mean`` of all local models in rounds where a measure's ``wants_mean(round)`` is true.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> def up_norm(probe: Probe) -> dict[str, float]:
    ...     return {"clients_heard": float(len(probe.received))}
    >>> hansa.run(hansa.presets.fedavg(steps=2), task, rounds=1, measures=[up_norm]).history[0]["clients_heard"]
    4.0
    """

    round: int
    algorithm: Algorithm
    key: Key
    got: Vectors
    received: Mapping[int, Vectors]
    before: Mapping[int, Vectors]
    after: Mapping[int, Vectors]
    mean: Vectors | None = None


Measure: TypeAlias = Callable[[Probe], dict[str, float]]


def wants_mean(measures: Sequence[Measure], round: int) -> bool:
    """Return whether any measure needs the mean of all local models in a round.

    >>> wants_mean([], round=1)
    False
    """
    return any(measure.wants_mean(round) for measure in measures if hasattr(measure, "wants_mean"))


def take_measures(measures: Sequence[Measure], probe: Probe) -> dict[str, float]:
    """Return all measures of a round in one record.

    >>> take_measures([lambda probe: {"answer": 42.0}], None)
    {'answer': 42.0}
    """
    return {name: value for measure in measures for name, value in measure(probe).items()}


def diagnose(
    algorithm: Algorithm,
    closed: RoundAggregation,
    measures: Sequence[Measure],
    before: Callable[[int], Vectors],
    after: Mapping[int, Vectors],
    key: Key,
) -> dict[str, float]:
    """Return the diversity and aggregate norm of a round, and the requested measures.

    ``before`` reads a client's memory as it was when the round began, ``after`` is what will be committed.
    """
    length = norm(closed.combined[MODEL].vector)
    diagnostics = {"diversity": _diversity(algorithm, closed, length), "aggregate_norm": length}
    if not measures:
        return diagnostics
    uploads: dict[int, Vectors] = {}
    for name, updates in closed.updates.items():
        for update in updates:
            uploads.setdefault(update.client, {})[name] = update.vector.cpu()
    got = decode_broadcasts(algorithm, closed.orders[0], {})
    assert got is not None
    vectors, memory = vectors_to(got, torch.device("cpu")), {client: before(client) for client in uploads}
    probe = Probe(closed.state.round, algorithm, key, vectors, uploads, memory, after, closed.mean_model())
    return {**diagnostics, **take_measures(measures, probe)}


def _diversity(algorithm: Algorithm, closed: RoundAggregation, length: float) -> float:
    """D = sqrt(sum w_i ||Delta_i||^2 / ||sum w_i Delta_i||^2) with the objective's weights; ``length`` is the
    aggregate's norm."""
    aggregate = with_defaults(algorithm.channels[MODEL].aggregate, BaseAggregator)
    rule: Weights = aggregate.weights
    clients = sorted(closed.norms)
    weights = normalize_weights(rule, Participants.of(clients, closed.cohorts, closed.population.samples))
    updates = closed.updates.get(MODEL)
    if updates is not None and not aggregate.running:  # a running aggregate is a mean
        length = norm(sum_updates(sorted(updates, key=lambda update: update.client), weights))
    squares = [closed.norms[client] * closed.norms[client] for client in clients]  # ** would raise on overflow
    return diversity(squares, weights, length * length)


def compression(probe: Probe) -> dict[str, float]:
    """gamma = ||C(mean(Delta_i+e_i)) - mean C(Delta_i+e_i)|| / ||mean Delta_i|| (Assumption 4.17 of the FedCAMS paper),
    and q, the mean over clients of ||C(x)-x||/||x|| at x = Delta_i+e_i. Empty for links without error feedback.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> done = hansa.run(hansa.presets.fedcams(steps=2), task, rounds=2, measures=[compression])
    >>> sorted({"gamma", "q"} & done.history[-1].keys())
    ['gamma', 'q']
    """
    link = probe.algorithm.channels[MODEL].uplink
    if not isinstance(link, error_feedback):
        return {}
    row = f"uplink/{MODEL}/residual"
    deltas: list[torch.Tensor] = []
    residuals: list[torch.Tensor | None] = []
    ratios: list[float] = []
    for client in sorted(probe.received):
        left = probe.after[client][row]
        carried = probe.received[client][MODEL] + left
        before = probe.before.get(client, {}).get(row)
        deltas.append(carried if before is None else carried - before)
        residuals.append(before)
        length = float(torch.linalg.vector_norm(carried))
        ratios.append(float(torch.linalg.vector_norm(left)) / length if length else 0.0)
    round_gamma = gamma(link.compressor, deltas, residuals, probe.key.child("gamma", probe.round))
    return {"gamma": round_gamma, "q": math.fsum(ratios) / len(ratios)}


def q(x: Tensor, compressed: Tensor) -> float:
    """Return ||C(x) - x|| / ||x||, the smallest q of [CAMS] Assumption 4.14 for this vector; 0 for x = 0.

    >>> q(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 4.0]))
    0.6
    """
    size = float(torch.linalg.vector_norm(x.double()))
    return float(torch.linalg.vector_norm(compressed.double() - x.double())) / size if size else 0.0


def gamma(compressor: Compressor, deltas: Sequence[Tensor], residuals: Sequence[Tensor | None], key: Key) -> float:
    """Return the compression dissimilarity of a round ([CAMS] Assumption 4.17); inf if only the mean update is zero.

    gamma = ||C(mean(Delta_i + e_i)) - mean C(Delta_i + e_i)|| / ||mean Delta_i||, e_i = 0 where a residual is None.

    >>> import torch
    >>> from hansa.compress import sign
    >>> from hansa.core.keys import Key
    >>> round(gamma(sign(), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])], [None, None], Key(0)), 3)
    0.767
    """
    if not deltas or len(deltas) != len(residuals):
        raise HansaError(f"gamma: {len(deltas)} updates, {len(residuals)} residuals; expected as many, at least one.")
    totals = [delta if e is None else delta + e for delta, e in zip(deltas, residuals, strict=True)]

    def compressed(x: Tensor, key: Key) -> Tensor:
        return decode(compressor.encode(x, key), compressor, dim=x.numel())

    apart = _mean([compressed(total, key.child(i)) for i, total in enumerate(totals)])
    together = compressed(_mean(totals).to(deltas[0].dtype), key.child("mean")).double()
    above = float(torch.linalg.vector_norm(together - apart))
    below = float(torch.linalg.vector_norm(_mean(deltas)))
    if below:
        return above / below
    return math.inf if above else 0.0


def _mean(vectors: Sequence[Tensor]) -> Tensor:
    """Return the mean in float64, summed in order."""
    total = torch.zeros_like(vectors[0], dtype=torch.float64)
    for vector in vectors:
        total += vector
    return total / len(vectors)


class local_mean_loss:
    """f_global = f(w') at w' = mean_i w_i, where w_i is client i's model after the round's local work and f is the mean
    loss over all clients' training samples ([HAFED] F.1); recorded as ``local_mean_loss``.

    The mean is over all clients that trained, reporters or not, before any compression. It is not the server's next
    model, whose training loss is ``global_loss``. ``train_loss`` is the paper's f_local. Measured every ``every``-th
    round: ``hansa.run(..., measures=[hansa.measures.local_mean_loss(task)])``.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> done = hansa.run(hansa.presets.fedavg(steps=2), task, rounds=2, measures=[local_mean_loss(task)])
    >>> round(done.history[-1]["local_mean_loss"], 4)
    0.4083
    """

    def __init__(self, task: Any, every: int = 1) -> None:
        check_integer("local_mean_loss", "every", every)
        self.every = every
        self._task = task.on_training_data() if hasattr(task, "on_training_data") else task
        self._trainer: Any = None

    def wants_mean(self, round: int) -> bool:
        """Return whether the measure needs the mean in this round."""
        return (round + 1) % self.every == 0

    def __call__(self, probe: Probe) -> dict[str, float]:
        if probe.mean is None:
            return {}
        like = probe.mean[MODEL]
        if self._trainer is None:
            self._trainer = self._task.trainer(like.dtype, like.device)
        metrics = self._task.evaluate(self._trainer, probe.mean)
        return {"local_mean_loss": metrics["test_loss"] if "test_loss" in metrics else metrics["loss"]}
