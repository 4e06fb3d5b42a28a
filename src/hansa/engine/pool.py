"""The pool: executes orders on all cores, with the results of the serial engine bit for bit.

Longer requests start first and each worker takes the next when it is done, which balances uneven work. All randomness
is keyed and reports are aggregated in client order, so results do not depend on the assignment to workers.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch

from hansa.algorithm import Algorithm
from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.core.types import Vector, Vectors
from hansa.engine.processes import ProcessGroup
from hansa.engine.requests import (
    EvaluationRequest,
    LoadEvaluationMemory,
    LoadMemory,
    RemoteError,
    combine_evaluation,
    describe_request,
    estimated_cost,
    evaluation_requests,
    unchanged,
)
from hansa.engine.threads import ThreadGroup
from hansa.engine.worker_group import Event, Job, JobDone, WorkerExited, WorkerGroup, WorkerStartError
from hansa.rounds.messages import Report, WorkOrder
from hansa.training import TaskLike
from hansa.training.evaluation import ClientMetrics, EvaluationJob

log = logging.getLogger("hansa")

WorkerKind: TypeAlias = Literal["process", "thread"]
_REPORT_BYTES = 1 << 28  # of reports that may be buffered until earlier ones arrive
_MAX_CRASHES = 3  # of workers at one job, or at the start of a pool


class Pool:
    """An engine with several workers, one intra-op thread each. They start at once, in the background.

    A worker that dies is replaced and its order executed again, with the same keys and so the same result. An error in
    a worker is raised here and names the client, the round and the step.

    Args:
        algorithm: The algorithm of the run.
        task: The task of the run.
        dtype: The dtype of the model.
        device: The device of all workers, unless ``devices`` are given.
        workers: The number of workers.
        kind: ``"process"`` or ``"thread"``.
        group: Worker processes that outlive this pool; None starts its own.
        devices: Devices, assigned to workers in turn.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        task: TaskLike,
        dtype: torch.dtype,
        device: torch.device,
        *,
        workers: int = 2,
        kind: WorkerKind = "process",
        group: ProcessGroup | None = None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        check_integer("Pool", "workers", workers)
        if kind not in ("process", "thread"):
            raise invalid_argument("Pool", "kind", kind, "'process' or 'thread'")
        refuse_inside_worker()
        self.task = task
        self._workers, self._pending, self._failed_starts = workers, list[Job](), 0
        self._owns_group = group is None
        self._group: WorkerGroup
        if kind == "thread":
            self._group = ThreadGroup(algorithm, task, dtype, devices or (device,), workers)
        else:
            self._group = group or ProcessGroup()
            self._group.set_up(algorithm, task, dtype, devices or (device,))
            self.grow(workers)

    def run(self, orders: Sequence[WorkOrder], load_memory: LoadMemory = unchanged) -> Iterator[Report]:
        """Yield the reports in the order of completion."""
        self._finish(WorkOrder)
        self._group.publish(WorkOrder, _broadcast_vectors(orders))
        finished: deque[Job] = deque()
        block, jobs, before = _block_size(orders, self._workers), list[Job](), 0
        for request in (part for order in orders for part in self._group.divide(order, self.task, self._workers)):
            jobs.append(Job(request, estimated_cost(request), finished, load_memory, before // block))
            before += 1 if request.cohort is not None else len(request.clients)
        self._submit(jobs)
        try:
            for _ in jobs:
                yield self._next_answer(finished, drop=True)
        finally:  # if the caller stops early, its pending jobs are not started
            own = set(map(id, jobs))
            self._pending = [job for job in self._pending if id(job) not in own]

    def evaluate(self, vectors: Vectors) -> dict[str, float]:
        """Evaluate on all workers."""
        return self.evaluate_async(vectors).result()

    def evaluate_async(self, vectors: Vectors) -> PendingEvaluation:
        """Start an evaluation of a copy of the vectors; the next round may run meanwhile."""
        self._finish((EvaluationRequest, EvaluationJob))
        vectors = {name: vector.detach().clone() for name, vector in vectors.items()}
        self._group.publish(EvaluationRequest, vectors.values())
        requests = evaluation_requests(self.task, vectors)
        finished: deque[Job] = deque()
        jobs = [Job(request, estimated_cost(request), finished) for request in requests]
        self._submit(jobs)
        return PendingEvaluation(self, jobs, finished)

    def evaluate_clients(
        self, requests: Sequence[EvaluationJob], load_memory: LoadEvaluationMemory
    ) -> Iterator[list[ClientMetrics]]:
        """Yield the clients' results, request by request."""
        self._finish((EvaluationRequest, EvaluationJob))
        self._group.publish(EvaluationJob, requests[0].vectors.values() if requests else ())
        finished: deque[Job] = deque()
        jobs = [Job(request, estimated_cost(request), finished, load_memory) for request in requests]
        self._submit(jobs)
        for _ in jobs:
            self._next_answer(finished)
        yield from (job.answer for job in jobs)

    @property
    def workers(self) -> int:
        """The number of workers that this pool uses."""
        return self._workers

    def grow(self, workers: int) -> None:
        """Use at least this many workers; missing ones start in the background."""
        while len(self._group.workers) < workers:
            self._group.spawn()
        self._workers = max(self._workers, workers)

    def ready(self) -> bool:
        """Whether all workers have started; does not wait."""
        while not all(worker.ready for worker in self._group.workers):
            events = self._group.wait(0)
            if not events:
                return False
            self._handle(events)
        return True

    def wait_until_ready(self) -> Pool:
        """Wait until all workers have started."""
        while not self.ready():
            self._handle(self._group.wait())
        return self

    def close(self) -> None:
        """Stop the workers; those of a given group only drop this run."""
        self._pending.clear()
        if self._owns_group:
            self._group.close()
        elif isinstance(self._group, ProcessGroup):
            self._group.reset()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _submit(self, jobs: Sequence[Job]) -> None:
        self._pending = sorted([*self._pending, *jobs], key=lambda job: (job.block, -job.cost))
        self._assign()

    def _next_answer(self, finished: deque[Job], *, drop: bool = False) -> Any:
        while not finished:
            self._handle(self._group.wait())
        job = finished.popleft()
        answer = job.answer
        if drop:
            job.answer = None
        if isinstance(answer, RemoteError):
            raise answer.to_exception()
        return answer

    def _finish(self, kind: type | tuple[type, ...]) -> None:
        """Wait for all requests of a kind, so that the vectors they read may be overwritten."""
        while any(isinstance(job.request, kind) for job in self._unfinished()):
            self._handle(self._group.wait())

    def _unfinished(self) -> Iterator[Job]:
        yield from self._pending
        yield from (job for worker in self._group.workers for job in worker.jobs)

    def _handle(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, JobDone):
                job = event.worker.jobs[0] if event.job is None else event.job
                event.worker.jobs.remove(job)
                job.answer = event.answer
                job.finished.append(job)
            elif isinstance(event, WorkerExited):
                self._replace(event)
        self._assign()

    def _replace(self, exited: WorkerExited) -> None:
        """Replace a dead worker and execute its jobs again. The oldest job counts as the cause of the crash."""
        jobs = list(exited.worker.jobs)
        self._group.stop(exited.worker)
        if not exited.worker.ready and not exited.not_at_fault:
            self._failed_starts += 1
            if exited.cannot_start or self._failed_starts >= _MAX_CRASHES:
                raise WorkerStartError(f"a worker process could not start: {exited.cause.strip()}")
        if jobs:
            job, request = jobs[0], describe_request(jobs[0].request)
            job.crashes += not exited.not_at_fault
            log.warning("%s: the worker died (%s); it is replaced and the work repeated", request, exited.cause)
            if job.crashes >= _MAX_CRASHES:
                message = f"{request}: {_MAX_CRASHES} workers in a row died executing it ({exited.cause})"
                job.answer = RemoteError(message, exited.cause)
                job.finished.append(jobs.pop(0))
        self._pending = [*jobs, *self._pending]
        self._group.spawn()

    def _assign(self) -> None:
        """Give each idle worker the longest job, then a second one in advance so that it never waits. In advance only
        up to a fair share of the remaining cost, so that nothing queues behind a long job."""
        workers = [worker for worker in self._group.workers[: self._workers] if worker.ready]
        for worker in workers:
            if self._pending and not worker.jobs:
                self._group.submit(worker, self._pending.pop(0))
        share = sum(job.cost for job in self._unfinished()) / self._workers if self._pending else 0.0
        for worker in workers:
            if self._pending and len(worker.jobs) == 1 and worker.jobs[0].cost + self._pending[0].cost <= share:
                self._group.submit(worker, self._pending.pop(0))
        for worker in workers:  # threads share one queue, which may be filled
            while self._pending and 2 <= len(worker.jobs) < self._group.jobs_per_worker:
                self._group.submit(worker, self._pending.pop(0))


class PendingEvaluation:
    """An evaluation that runs in the background."""

    def __init__(self, pool: Pool, jobs: Sequence[Job], finished: deque[Job]) -> None:
        self._pool, self._jobs, self._finished = pool, jobs, finished
        self._left = len(jobs)

    def result(self) -> dict[str, float]:
        """Wait for the metrics and return them."""
        while self._left:
            self._pool._next_answer(self._finished)
            self._left -= 1
        return combine_evaluation(self._pool.task, [job.answer for job in self._jobs])


def refuse_inside_worker() -> None:
    """Raise in a worker process: importing the model's module there must not start a run."""
    if "HANSA_WORKER" in os.environ:
        raise HansaError(
            "a worker process tried to start a run: importing the module that defines your model, loss or data starts "
            'it. Put that code under `if __name__ == "__main__":`.'
        )


def _broadcast_vectors(orders: Sequence[WorkOrder]) -> Iterator[Vector]:
    """Yield the vectors in the orders' broadcasts, which all workers share."""
    for order in orders:
        for sent in order.broadcasts.values():
            for packet in sent.packets:
                if isinstance(packet.content, torch.Tensor):
                    yield packet.content


def _block_size(orders: Sequence[WorkOrder], workers: int) -> int:
    """Return how many clients may be reordered by cost: reports wait for earlier ones, within a memory bound."""
    if not orders:
        return 1
    size = sum(packet.nbytes for sent in orders[0].broadcasts.values() for packet in sent.packets)
    return max(4 * workers, _REPORT_BYTES // max(size, 1))
