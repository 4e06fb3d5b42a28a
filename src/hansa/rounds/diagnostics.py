"""Diagnostics of a closed round. They read what happened and cannot change the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hansa.aggregate import BaseAggregator
from hansa.aggregate.aware import diversity
from hansa.aggregate.base import Participants, Weights, normalize_weights, sum_updates
from hansa.algorithm import Algorithm
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.types import MODEL, Vectors
from hansa.core.vectors.arithmetic import norm, vectors_to
from hansa.rounds.aggregation import RoundDiagnostics
from hansa.rounds.measures import Measure, Probe, take_measures
from hansa.rounds.round import decode_broadcasts


def diagnose(
    algorithm: Algorithm,
    closed: RoundDiagnostics,
    measures: Sequence[Measure],
    before: Callable[[int], Vectors],
    after: Mapping[int, Vectors],
    key: Key,
) -> dict[str, float]:
    """Return the diversity and aggregate norm of a round, and the requested measures.

    ``before`` reads a client's memory as it was when the round began, ``after`` is what will be committed.
    """
    aggregate = closed.combined[MODEL]
    length = norm(aggregate)
    diagnostics = {"diversity": _diversity(algorithm, closed, length), "aggregate_norm": length}
    if not measures:
        return diagnostics
    uploads: dict[int, Vectors] = {}
    for name, updates in closed.updates.items():
        for update in updates:
            uploads.setdefault(update.client, {})[name] = update.vector.cpu()
    first = closed.orders[0]
    got = decode_broadcasts(algorithm, first, {})
    assert got is not None
    probe = Probe(
        closed.round,
        algorithm,
        key,
        vectors_to(got, torch.device("cpu")),
        uploads,
        {client: before(client) for client in uploads},
        after,
        closed.mean,
    )
    return {**diagnostics, **take_measures(measures, probe)}


def _diversity(algorithm: Algorithm, evidence: RoundDiagnostics, length: float) -> float:
    """D = sqrt(sum w_i ||Delta_i||^2 / ||sum w_i Delta_i||^2) with the objective's weights; ``length`` is the
    aggregate's norm."""
    aggregate = algorithm.channels[MODEL].aggregate
    rule: Weights = with_defaults(aggregate, BaseAggregator).weights
    clients = sorted(evidence.norms)
    weights = normalize_weights(rule, Participants.of(clients, evidence.cohorts, evidence.population.samples))
    updates = evidence.updates.get(MODEL)
    if updates is not None and not with_defaults(aggregate, BaseAggregator).running:  # a running aggregate is a mean
        length = norm(sum_updates(sorted(updates, key=lambda update: update.client), weights))
    squares = [evidence.norms[client] * evidence.norms[client] for client in clients]  # ** would raise on overflow
    return diversity(squares, weights, length * length)
