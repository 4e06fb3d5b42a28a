"""Per-client results of a run: evaluation, client models, and participation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hansa.algorithm import Algorithm
from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.core.protocols import with_defaults
from hansa.core.types import BUFFERS, MODEL, Vectors
from hansa.engine import BaseEngine, Engine
from hansa.engine.serial import Serial
from hansa.pace.events import RoundTiming
from hansa.rounds import OpenedRound, Outcome
from hansa.runs.client_columns import Array, summarize_clients
from hansa.runs.columns import column_of
from hansa.runs.store import ClientStore
from hansa.training import TaskLike, personalise
from hansa.training.evaluation import ClientMetrics, EvaluationJob, client_model, split_job
from hansa.training.metric_direction import Direction

if TYPE_CHECKING:
    from hansa.runs.driver import RunOptions

OWN_MODEL = ("local/private", "local/private_buffers", "local/row")
"""The rows of client memory with a client's own model."""


class ClientEvaluationPlan(NamedTuple):
    """The schedule of per-client evaluation (never if ``every`` is -1), and the local steps before it."""

    every: int
    personalise: personalise | None = None

    @classmethod
    def from_options(cls, task: TaskLike, options: RunOptions) -> ClientEvaluationPlan:
        """Read the schedule from the options; by default at each evaluation if test rows have owners."""
        steps: Any = options.personalise
        owned = bool(getattr(task, "client_test_sizes", None))
        requested = owned if options.per_client is None else options.per_client
        if requested is False:
            if steps is not None:
                raise invalid_argument(
                    "run", "personalise", steps, "per_client=True beside it", "It is part of per-client evaluation."
                )
            return cls(-1)
        if requested is not True:
            check_integer("run", "per_client", requested, "True evaluates with each evaluation, False never.")
        if not owned:
            raise HansaError(
                f"{task.name}: test rows have no owners, so clients cannot be evaluated one by one. "
                "from_arrays(..., test_clients=OWNERS) names them; data: {test_clients: labels} assigns them."
            )
        return cls(options.evaluate_every if requested is True else requested, steps)

    def is_due(self, round: int, final: bool) -> bool:
        """Return whether clients are evaluated after this round."""
        return self.every >= 0 and (final or (self.every > 0 and round % self.every == 0))


def evaluate_clients(
    engine: Engine, algorithm: Algorithm, task: Any, job: EvaluationJob, store: ClientStore
) -> dict[str, Array]:
    """Evaluate all clients that own test rows, and return columns for the client record."""
    personal = algorithm.serverless or algorithm.local.private_blocks is not None

    def with_memory(batch: EvaluationJob) -> EvaluationJob:
        if not personal:
            return batch
        rows = {client: store.read(client) for client in batch.clients}
        memory = {client: {name: of[name] for name in OWN_MODEL if name in of} for client, of in rows.items()}
        return replace(batch, memory=memory)

    batches = list(split_job(task.client_test_sizes, job))
    answers = with_defaults(engine, BaseEngine).evaluate_clients(batches, with_memory)
    if answers is None:
        vector = next(iter(job.vectors.values()))
        answers = Serial(algorithm, task, vector.dtype, vector.device).evaluate_clients(batches, with_memory)
    results: list[ClientMetrics] = [metrics for answer in answers for metrics in answer]
    clients = [client for batch in batches for client in batch.clients]
    columns: dict[str, Array] = {"client": np.array(clients, np.int64)}
    with np.errstate(over="ignore"):  # values beyond single precision become infinite
        for name in results[0]:
            columns[name] = np.array([metrics[name] for metrics in results], np.float64).astype(np.float32)
    return columns


def aggregate_client_metrics(
    columns: Mapping[str, Array], better: Mapping[str, Direction] | None = None
) -> dict[str, float]:
    """Return the history columns over clients: client_NAME, client_NAME_std, client_NAME_worst, and personal_NAME.

    ``better`` has the directions of the task's own metrics, which determine the worst tenth.
    """
    record: dict[str, float] = {}
    for name, values in columns.items():
        if name == "client":
            continue
        column = f"client_{name.removeprefix('test_')}" if name.startswith("test_") else name
        direction = column_of(name, better).better
        mean, deviation, worst = summarize_clients(values.astype(np.float64).tolist(), direction == "lower")
        record |= {column: mean, f"{column}_std": deviation}
        if direction:  # otherwise the worst tenth is unknown
            record[f"{column}_worst"] = worst
    return record


def client_vectors(algorithm: Algorithm, vectors: Vectors, store: ClientStore, client: int) -> Vectors:
    """Return a client's model and buffers. A client that never participated has the server's."""
    check_client(client)
    if not has_client_models(algorithm):
        raise HansaError(
            f"{algorithm.name}: clients have no models of their own. They do with private blocks "
            "(local.private_blocks) and in methods without a server (dsgd, choco_sgd, ...)."
        )
    model, buffers = client_model(algorithm.local, vectors, store.read(client))
    return {MODEL: model} if buffers is None else {MODEL: model, BUFFERS: buffers}


def has_client_models(algorithm: Algorithm) -> bool:
    """Return whether clients have their own models."""
    mixing = algorithm.local.mixing
    return algorithm.local.private_blocks is not None or (mixing is not None and mixing.keep_local_models)


def check_client(client: int, population: int | None = None) -> None:
    """Raise if ``client`` is not a client number."""
    limit = "" if population is None else f" to {population - 1}"
    if isinstance(client, bool) or not isinstance(client, int) or client < 0 or client >= (population or client + 1):
        raise invalid_argument("load_model", "client", client, f"a client's number, from 0{limit}")


def timing_columns(algorithm: Algorithm, opened: OpenedRound, outcome: Outcome) -> dict[str, Any]:
    """Return the history columns of a round on the virtual clock."""
    timing = opened.timing
    assert timing is not None
    columns: dict[str, Any] = {
        "simulated_seconds": timing.end - timing.begin,
        "utilisation": timing.utilisation,
        "wasted_seconds": timing.wasted_seconds(outcome.admitted),
    }
    if algorithm.pace.asynchronous:
        ages = [outcome.round - timing.jobs[client].version for client in outcome.admitted]
        columns["staleness"] = math.fsum(ages) / len(ages) if ages else math.nan
        columns["staleness_max"] = max(ages, default=0)
        columns["versions"], columns["version_bytes"] = timing.versions, timing.version_bytes
    if timing.real:
        admitted = set(outcome.admitted)
        ended = sorted(timing.jobs.values())
        columns["arrivals"] = [[job.client, job.version, job.arrival, job.client in admitted] for job in ended]
    return columns


def participation_columns(
    down: Mapping[int, int], outcome: Outcome, timing: RoundTiming | None = None
) -> dict[str, Array]:
    """Return one row per client that was selected or gossiped; ``down`` has the bytes sent to each."""
    clients = sorted({*down, *outcome.peer_bytes})
    if not clients:
        return {}
    admitted, count = set(outcome.admitted), len(clients)

    def numbers(values: Iterable[float | None]) -> Array:
        return np.array([*values], np.float64).astype(np.float32)  # None becomes NaN

    def counts(of: Mapping[int, int]) -> Array:
        return np.fromiter(map(of.get, clients, repeat(0)), np.int64, count) if of else np.zeros(count, np.int64)

    with np.errstate(over="ignore"):  # values beyond single precision become infinite
        columns = {
            "client": np.array(clients, np.int64),
            "asked": np.fromiter(map(down.__contains__, clients), np.bool_, count),
            "admitted": np.fromiter(map(admitted.__contains__, clients), np.bool_, count),
            "loss": numbers(map(outcome.losses.get, clients)),
            "norm": numbers(map(outcome.norms.get, clients)),
            "up_bytes": counts(outcome.up_bytes),
            "down_bytes": counts(down),
            "peer_bytes": counts(outcome.peer_bytes),
        }
        if timing is not None:
            jobs = [timing.jobs[client] for client in clients]
            for phase in ("start", "download", "compute", "upload"):
                columns[f"{phase}_seconds"] = numbers(getattr(job, phase) for job in jobs)
            columns["staleness"] = numbers(outcome.round - job.version for job in jobs)
    return columns
