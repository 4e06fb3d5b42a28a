"""The pool: executes orders on all cores, with the results of the serial engine bit for bit.

Longer requests start first and each worker takes the next when it is done, which balances uneven work. All randomness
is keyed and reports are aggregated in client order, so results do not depend on the assignment to workers. The workers
are threads, processes or actors of a Ray cluster: a `WorkerGroup`.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch

from hansa.algorithm import Algorithm
from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.core.types import Vector, Vectors
from hansa.engine.processes import ProcessGroup
from hansa.engine.requests import (
    EvaluationRequest,
    Event,
    Job,
    JobDone,
    LoadEvaluationMemory,
    LoadMemory,
    RequestFailed,
    WorkerGroup,
    WorkerStartError,
    describe_request,
    unchanged,
)
from hansa.engine.serial import BaseEngine
from hansa.engine.threads import ThreadGroup
from hansa.rounds.messages import Report, WorkOrder
from hansa.training import TaskLike
from hansa.training.evaluation import ClientMetrics, EvaluationJob

log = logging.getLogger("hansa")

WorkerKind: TypeAlias = Literal["process", "thread"]
_REPORT_BYTES = 1 << 28  # of reports that may be buffered until earlier ones arrive
_MAX_CRASHES = 3  # of workers at one job, or in a row while they start


class Pool(BaseEngine):
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
        if kind == "thread":
            self._use(task, ThreadGroup(algorithm, task, dtype, devices or (device,), workers))
        else:
            processes = ProcessGroup() if group is None else group
            processes.set_up(algorithm, task, dtype, devices or (device,))
            while len(processes.workers) < workers:
                processes.spawn()
            self._use(task, processes, owned=group is None)
            self.workers = workers

    def _use(self, task: TaskLike, group: WorkerGroup, *, owned: bool = True) -> None:
        self.task, self._group, self._owns_group = task, group, owned
        self.workers = len(group.workers)
        """The number of workers that this pool uses."""
        self._pending: list[Job] = []
        self._finished: deque[tuple[Job, Any]] = deque()
        self._failed_starts = 0

    def run(self, orders: Sequence[WorkOrder], load_memory: LoadMemory = unchanged) -> Iterator[Report]:
        """Yield the reports in the order of completion."""
        block, jobs, clients = _block_size(orders, self.workers), list[Job](), 0
        for order in orders:
            alone = order.cohort is None
            for request in self._group.divide(order, self.task, self.workers) if alone else [order]:
                jobs.append(Job(request, load_memory, clients // block))
                clients += len(request.clients) if alone else 1
        for _, report in self._execute(jobs, _broadcast_vectors(orders)):
            yield report

    def evaluate(self, vectors: Vectors) -> dict[str, float]:
        """Evaluate on all workers, which divide the fixed ranges of the task's ``test_chunks``, if it has them."""
        task, vectors = self.task, {name: vector.detach() for name, vector in vectors.items()}
        chunks = task.test_chunks() if hasattr(task, "test_chunks") else [None]
        parts = self._answers([Job(EvaluationRequest(vectors, chunk)) for chunk in chunks], vectors)
        return dict(task.compute_metrics(parts) if hasattr(task, "compute_metrics") else parts[0])

    def evaluate_clients(
        self, requests: Sequence[EvaluationJob], load_memory: LoadEvaluationMemory
    ) -> Iterator[list[ClientMetrics]]:
        """Yield the clients' results, request by request."""
        yield from self._answers([Job(request, load_memory) for request in requests], requests[0].vectors)

    def _answers(self, jobs: Sequence[Job], shared: Vectors) -> list[Any]:
        """Return the answers to all jobs, in their order."""
        answers = {id(job): answer for job, answer in self._execute(jobs, shared.values())}
        return [answers[id(job)] for job in jobs]

    def wait_until_ready(self) -> Pool:
        """Wait until all workers have started."""
        while not all(worker.ready for worker in self._group.workers):
            self._handle(self._group.wait())
        return self

    def close(self) -> None:
        """Stop the workers; those of a given group only drop this run."""
        self._pending.clear()
        if self._owns_group:
            self._group.close()
        else:
            self._group.reset()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _execute(self, jobs: Sequence[Job], shared: Iterable[Vector]) -> Iterator[tuple[Job, Any]]:
        """Yield each job with its answer when it is done. Jobs of an abandoned earlier call are awaited first: they
        read the shared vectors."""
        while any(worker.jobs for worker in self._group.workers):
            self._handle(self._group.wait())
        self._finished.clear()
        if not jobs:
            return
        self._group.publish(shared)
        self._pending = sorted(jobs, key=lambda job: (job.block, -job.cost))
        self._assign()
        try:
            for _ in jobs:
                while not self._finished:
                    self._handle(self._group.wait())
                job, answer = self._finished.popleft()
                if isinstance(answer, RequestFailed):
                    raise answer
                yield job, answer
        finally:
            self._pending.clear()

    def _handle(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, JobDone):
                event.worker.jobs.remove(event.job)
                self._finished.append((event.job, event.answer))
                self._failed_starts = 0
            else:
                self._replace(event.worker, event.cause, cannot_start=event.cannot_start)
        self._assign()

    def _replace(self, worker: Any, cause: str, *, cannot_start: bool) -> None:
        """Replace a dead worker and execute its jobs again. The oldest job counts as the cause of the crash."""
        jobs = list(worker.jobs)
        self._group.stop(worker)
        if not worker.ready:
            self._failed_starts += 1
            if cannot_start or self._failed_starts >= _MAX_CRASHES:
                raise WorkerStartError(f"a worker could not start: {cause.strip()}")
        if jobs:
            request = describe_request(jobs[0].request)
            jobs[0].crashes += 1
            log.warning("%s: the worker died (%s); it is replaced and the work repeated", request, cause)
            if jobs[0].crashes >= _MAX_CRASHES:
                message = f"{request}: {_MAX_CRASHES} workers in a row died executing it ({cause})"
                self._finished.append((jobs.pop(0), RequestFailed(message)))
        self._pending = [*jobs, *self._pending]
        self._group.spawn()

    def _assign(self) -> None:
        """Give each idle worker the longest job, then a second one in advance so that it never waits. Jobs are given in
        advance only up to a fair share of the remaining cost, so that nothing queues behind a long job."""
        workers = [worker for worker in self._group.workers[: self.workers] if worker.ready]
        for worker in workers:
            if self._pending and not worker.jobs:
                self._group.submit(worker, self._pending.pop(0))
        if not self._pending:
            return
        started = (job for worker in self._group.workers for job in worker.jobs)
        share = sum(job.cost for job in (*self._pending, *started)) / self.workers
        for worker in workers:
            if self._pending and len(worker.jobs) == 1 and worker.jobs[0].cost + self._pending[0].cost <= share:
                self._group.submit(worker, self._pending.pop(0))
        for worker in workers:  # threads share one queue, which may be filled
            while self._pending and 2 <= len(worker.jobs) < self._group.jobs_per_worker:
                self._group.submit(worker, self._pending.pop(0))


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
