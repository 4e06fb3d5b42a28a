"""What is observed of a round that has closed. It looks at the evidence and cannot change the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hansa.aggregate.base import Aggregator, Share, Weights, normalise, weighted_sum
from hansa.aggregate.diversity import diversity
from hansa.algorithm import Algorithm
from hansa.core.keys import Key
from hansa.core.protocols import declared
from hansa.core.types import MODEL, Vectors
from hansa.core.vectors.arithmetic import norm
from hansa.rounds.aggregation import RoundDiagnostics
from hansa.rounds.measures import Measure, Probe, measured
from hansa.rounds.round import received


def diagnose(
    algorithm: Algorithm,
    evidence: RoundDiagnostics,
    measures: Sequence[Measure],
    before: Callable[[int], Vectors],
    after: Mapping[int, Vectors],
    key: Key,
) -> dict[str, float]:
    """The diversity and aggregate norm of every round, and the measures asked for.

    ``before`` reads a client's memory as it was when the round began, ``after`` is what will be committed.
    """
    aggregate = evidence.combined[MODEL]
    length = norm(aggregate)
    found = {"diversity": _diversity(algorithm, evidence, length), "aggregate_norm": length}
    if not measures:
        return found
    uploads: dict[int, Vectors] = {}
    for name, updates in evidence.updates.items():
        for update in updates:
            uploads.setdefault(update.client, {})[name] = update.vector
    first = next(iter(evidence.orders.values()))
    got = received(algorithm, first, {})
    assert got is not None
    probe = Probe(
        evidence.round,
        algorithm,
        key,
        got,
        uploads,
        {client: before(client) for client in uploads},
        after,
        evidence.mean,
    )
    return {**found, **measured(measures, probe)}


def _diversity(algorithm: Algorithm, evidence: RoundDiagnostics, length: float) -> float:
    """D = sqrt(sum w_i ||Delta_i||^2 / ||sum w_i Delta_i||^2) with the weights of the objective; ``length`` is that of
    the aggregate."""
    aggregate = algorithm.channels[MODEL].aggregate
    rule: Weights = declared(aggregate, Aggregator, "weights")
    samples = evidence.population.samples
    clients = sorted(evidence.norms)
    weights = normalise(rule, [Share(c, evidence.orders[c].cohort, samples[c]) for c in clients])
    updates = evidence.updates.get(MODEL)
    if updates is not None and not declared(aggregate, Aggregator, "running"):  # what is folded as it comes is a mean
        length = norm(weighted_sum(sorted(updates, key=lambda update: update.client), weights))
    squares = [evidence.norms[client] * evidence.norms[client] for client in clients]  # ** would raise on overflow
    return diversity(squares, weights, length * length)
