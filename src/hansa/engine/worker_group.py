"""Jobs, the events that workers report, and the protocol of a group of workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

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
    """One pending request; once done, it holds its answer and is appended to ``finished``. Jobs of a lower
    ``block`` are started first."""

    request: Request
    cost: float = 0.0
    finished: deque[Job] = field(default_factory=deque)
    load_memory: LoadMemory | LoadEvaluationMemory | None = None
    block: int = 0
    crashes: int = 0
    answer: Any = field(default=None, repr=False)

    def load_request(self) -> Request:
        """Return the request with the memory of its clients, read now; the job does not keep it."""
        if self.load_memory is None or isinstance(self.request, EvaluationRequest):
            return self.request
        return self.load_memory(self.request)  # type: ignore[arg-type]


class WorkerReady(NamedTuple):
    """A worker has started."""

    worker: Any


class JobDone(NamedTuple):
    """A worker has finished a job: its oldest, unless ``job`` names another."""

    worker: Any
    answer: Any
    job: Job | None = None


class WorkerExited(NamedTuple):
    """A worker has ended. ``cannot_start``: its setup failed, and ``cause`` is the traceback. ``not_at_fault``: its job
    did not cause this."""

    worker: Any
    cause: str
    cannot_start: bool = False
    not_at_fault: bool = False


Event: TypeAlias = WorkerReady | JobDone | WorkerExited


class WorkerGroup(Protocol):
    """The workers of a pool, processes or threads. Each has a queue of ``jobs`` and a flag ``ready``."""

    workers: list[Any]
    jobs_per_worker: int

    def divide(self, order: WorkOrder, task: TaskLike, workers: int) -> list[WorkOrder]:
        """Return an order as the requests of its clients."""
        ...

    def spawn(self) -> None: ...

    def stop(self, worker: Any) -> None: ...

    def publish(self, kind: type, vectors: Iterable[Vector]) -> None:
        """Share the vectors that all requests of a kind refer to; none of that kind may be running."""
        ...

    def submit(self, worker: Any, job: Job) -> None: ...

    def wait(self, timeout: float | None = None) -> list[Event]:
        """Wait for events and return them. The caller's thread may execute jobs meanwhile."""
        ...

    def close(self) -> None: ...
