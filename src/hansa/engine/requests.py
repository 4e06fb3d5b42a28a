"""Requests that engines send to workers, their execution, and the interface of worker groups.

The workers of a group are threads, processes or actors of a cluster.
"""

from __future__ import annotations

import logging
import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from hansa.algorithm import Algorithm
from hansa.core.errors import HansaError, failed_step
from hansa.core.protocols import with_defaults
from hansa.core.types import Vector, Vectors
from hansa.local import BaseTrainer
from hansa.rounds import client_round
from hansa.rounds.messages import WorkOrder, joined_reports
from hansa.training import TaskLike
from hansa.training.evaluation import EvaluationChunk, EvaluationJob, run_evaluation
from hansa.training.execution_mode import MODELS

log = logging.getLogger("hansa")

MAX_COHORTS, _MAX_CLIENTS = 32, 2048  # of a batch
_BATCH_SECONDS = 0.05  # so that no worker waits long for a batch to finish
_BATCH_BYTES = 1 << 22  # of updates that a batch holds


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationRequest:
    """Evaluate vectors on one range of the test rows, or, without a range, with the task's own evaluation."""

    vectors: Vectors
    piece: EvaluationChunk | None = None


Request: TypeAlias = WorkOrder | EvaluationRequest | EvaluationJob
LoadMemory: TypeAlias = Callable[[WorkOrder], WorkOrder]
LoadEvaluationMemory: TypeAlias = Callable[[EvaluationJob], EvaluationJob]


def unchanged(request: Any) -> Any:
    """Return the request as it is: a `LoadMemory` for orders that already have their memory."""
    return request


def single_orders(order: WorkOrder) -> list[WorkOrder]:
    """Return an order for each client that trains alone, or that of a gossiping cohort."""
    if order.cohort is not None:
        return [order]
    return [order.part([index]) for index in range(len(order.clients))]


def count_requests(orders: Sequence[WorkOrder]) -> int:
    """Return how many workers could be busy with orders: the clients that train alone, and the cohorts."""
    return sum(1 if order.cohort is not None else len(order.clients) for order in orders)


def estimated_cost(request: Request) -> float:
    """Return the cost of a request in samples passed forward and backward; a forward pass alone counts a third."""
    if isinstance(request, WorkOrder):
        return float(sum([work.steps * work.batch_size for work in request.works]))
    if isinstance(request, EvaluationJob):
        tuning = request.personalisation
        steps = 0 if tuning is None else tuning.steps * (tuning.batch_size or 32)
        return float(len(request.clients) * (10 + steps))
    return 0.0 if request.piece is None else (request.piece.stop - request.piece.start) / 3


class RequestFailed(HansaError):
    """A request that failed: the answer of a worker, and the error of the run. The message names the round, the client
    and the local step. In another process, the traceback of its cause is a note."""

    def __reduce__(self) -> tuple[object, ...]:
        notes = ["".join(traceback.format_exception(self.__cause__))] if self.__cause__ is not None else []
        return type(self), self.args, {"__notes__": [*getattr(self, "__notes__", ()), *notes]}

    @classmethod
    def of(cls, request: Request, error: Exception) -> RequestFailed:
        """Return the answer to a request whose execution raised an error."""
        location = describe_request(request)
        if isinstance(request, WorkOrder) and (failed := failed_step(error)) is not None:
            client, step = failed
            location = f"round {request.round}, client {client}" + ("" if step is None else f", step {step}")
        failure = cls(f"{location}: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure


def execute(requests: Sequence[Request], algorithm: Algorithm, task: TaskLike, trainer: Any) -> list[Any]:
    """Return the answers to requests: the report of an order, or the result of an evaluation; `RequestFailed` if there
    is none. Orders are executed together, and if that fails each client or cohort alone, so that the error names it."""
    orders = [request for request in requests if isinstance(request, WorkOrder)]
    if len(orders) == len(requests):
        try:
            return client_round(algorithm, orders, trainer, task.population)
        except Exception as error:
            if count_requests(orders) == 1:
                return [RequestFailed.of(orders[0], error)]
            log.debug("a batch of %d failed (%s); it is executed one by one", count_requests(orders), error)
    return [_execute_alone(request, algorithm, task, trainer) for request in requests]


def _execute_alone(request: Request, algorithm: Algorithm, task: TaskLike, trainer: Any) -> Any:
    reports = []
    for part in single_orders(request) if isinstance(request, WorkOrder) else [request]:
        try:
            if isinstance(part, EvaluationJob):
                return run_evaluation(algorithm, task, trainer, part)
            if isinstance(part, EvaluationRequest):
                rows = part.piece
                return task.evaluate(trainer, part.vectors) if rows is None else trainer.evaluate(part.vectors, *rows)
            reports += client_round(algorithm, [part], trainer, task.population)
        except Exception as error:
            return RequestFailed.of(part, error)
    return reports[0] if len(reports) == 1 else joined_reports(reports)


def describe_request(request: Request) -> str:
    """Return a short description of a request for messages.

    >>> describe_request(EvaluationRequest({}, EvaluationChunk(0, 500, "", 0)))
    'the evaluation of test rows 0 to 499'
    """
    if isinstance(request, WorkOrder):
        clients = ", ".join([*map(str, request.clients[:5]), *["..."] * (len(request.clients) > 5)])
        return f"round {request.round}, client{'s' if len(request.clients) > 1 else ''} {clients}"
    if isinstance(request, EvaluationJob):
        return f"the evaluation of clients {request.clients[0]} to {request.clients[-1]}"
    if request.piece is None:
        return "the evaluation"
    return f"the evaluation of test rows {request.piece.start} to {request.piece.stop - 1}"


class BatchSizer:
    """Chooses the size of batches, bounded in time and memory. It is one client or cohort unless training is native or
    takes several clients at once: otherwise a batch gains nothing, and user code may depend on the order."""

    def __init__(self, trainer: Any) -> None:
        self._native: bool = with_defaults(trainer, BaseTrainer).releases_gil
        self._clients: int = with_defaults(trainer, BaseTrainer).clients_per_call
        self._seconds_per_request = math.inf

    def record(self, orders: Sequence[WorkOrder], seconds: float) -> None:
        """Record the time that a batch took."""
        self._seconds_per_request = seconds / max(1, count_requests(orders))

    def batches(self, orders: Sequence[WorkOrder]) -> Iterator[list[WorkOrder]]:
        """Yield the orders in batches: several cohorts, or a part of the clients of an order."""
        cohorts: list[WorkOrder] = []
        for order in orders:
            if order.cohort is not None:
                cohorts.append(order)
                if len(cohorts) >= self.size(order):
                    yield cohorts
                    cohorts = []
                continue
            first = 0
            while first < len(order.clients):
                size = self.size(order)
                yield [order.part(slice(first, first + size))]
                first += size
        if cohorts:
            yield cohorts

    def size(self, order: WorkOrder) -> int:
        """Return the number of cohorts, or of clients, like those of this order for the next batch."""
        if not self._native:
            return self._clients
        entries = sum(packet.dim for sent in order.broadcasts.values() for packet in sent.packets)
        in_time = _BATCH_SECONDS / max(self._seconds_per_request, 1e-9)
        limit = _MAX_CLIENTS if order.cohort is None else MAX_COHORTS
        return int(max(1, min(limit, in_time, _BATCH_BYTES // max(1, 4 * entries))))


class WorkersUnsupported(HansaError):
    """The algorithm or the task cannot run in this kind of worker."""


class WorkerStartError(HansaError):
    """Workers failed to start."""


@dataclass(slots=True, eq=False)
class Job:
    """One pending request. Jobs of a lower ``block`` are started first. The clients' memory is loaded when the request
    is sent to a worker."""

    request: Request
    load_memory: Callable[[Any], Request] = unchanged
    block: int = 0
    crashes: int = 0
    cost: float = field(init=False)

    def __post_init__(self) -> None:
        self.cost = estimated_cost(self.request)


class JobDone(NamedTuple):
    """A worker has finished a job."""

    worker: Any
    job: Job
    answer: Any


class WorkerExited(NamedTuple):
    """A worker has ended. ``cannot_start``: its setup failed, as that of any other would."""

    worker: Any
    cause: str
    cannot_start: bool = False


Event: TypeAlias = JobDone | WorkerExited


class WorkerGroup(ABC):
    """The workers of a pool. Each has a queue of ``jobs``, and is ``ready`` once it has started."""

    workers: list[Any]
    jobs_per_worker: int = 2

    def divide(self, order: WorkOrder, task: TaskLike, workers: int) -> list[WorkOrder]:
        """Divide an order into one of each client, or of the clients that are trained together, so that every worker
        has some."""
        together, count = getattr(task, "vmap_batch_size", None) is not None, len(order.clients)
        size = max(1, min(MODELS, -(-count // workers))) if together else 1
        return [order.part(slice(first, first + size)) for first in range(0, count, size)]

    @abstractmethod
    def spawn(self) -> None:
        """Start one more worker, in the background."""

    @abstractmethod
    def stop(self, worker: Any) -> None:
        """End one worker and remove it."""

    @abstractmethod
    def publish(self, vectors: Iterable[Vector]) -> None:
        """Share the vectors that all requests from now on refer to; no request is running."""

    @abstractmethod
    def submit(self, worker: Any, job: Job) -> None:
        """Send a job to a worker, and add it to the worker's jobs."""

    @abstractmethod
    def wait(self) -> list[Event]:
        """Wait for events; return none if workers have only become ready. The caller's thread may execute jobs
        meanwhile."""

    @abstractmethod
    def close(self) -> None:
        """End all workers."""

    def reset(self) -> None:
        """Prepare the workers for the next run."""
        self.close()
