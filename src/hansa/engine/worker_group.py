"""Jobs, the events that workers report, and what a group of workers is: threads, processes or actors of a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from hansa.core.errors import HansaError
from hansa.core.types import Vector
from hansa.engine.requests import EvaluationRequest, LoadEvaluationMemory, LoadMemory, Request
from hansa.rounds.messages import WorkOrder
from hansa.training import TaskLike


class WorkersUnsupported(HansaError):
    """The algorithm or the task cannot run in this kind of worker."""


class WorkerStartError(HansaError):
    """Workers failed to start."""


@dataclass(slots=True, eq=False)
class Job:
    """One pending request. Jobs of a lower ``block`` are started first."""

    request: Request
    cost: float = 0.0
    load_memory: LoadMemory | LoadEvaluationMemory | None = None
    block: int = 0
    crashes: int = 0

    def load_request(self) -> Request:
        """Return the request with the memory of its clients, read now; the job does not keep it."""
        if self.load_memory is None or isinstance(self.request, EvaluationRequest):
            return self.request
        return self.load_memory(self.request)  # type: ignore[arg-type]


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
        """Return an order as one of each client, or of the clients that are trained together, so that every worker has
        some; a gossiping cohort is not divided."""
        if order.cohort is not None:
            return [order]
        plan, count = getattr(task, "client_batching", None), len(order.clients)
        size = 1 if plan is None else max(1, min(plan.models, -(-count // workers)))
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
    def wait(self, timeout: float | None = None) -> list[Event]:
        """Wait until a worker does something; return no event if workers have only become ready. The caller's thread
        may execute jobs meanwhile."""

    @abstractmethod
    def close(self) -> None:
        """End all workers."""

    def reset(self) -> None:
        """Prepare the workers for the next run."""
        self.close()
