"""The pool: cohorts on all cores, with the results of the serial engine bit for bit.

Requests go to workers longest first, each worker taking the next when it is done, so that uneven work balances. Which
worker does what, and in which order, changes nothing: all randomness is keyed, and reports are folded in client order.
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
from hansa.engine.processes import Processes
from hansa.engine.requests import Divisible, EvaluationRequest, Failure, Recall, RecallExam, as_it_is, cost, describe
from hansa.engine.threads import Threads
from hansa.engine.worker_group import Answered, Crew, Event, Gone, Job, StartError
from hansa.rounds.messages import Report, WorkOrder
from hansa.training import TaskLike
from hansa.training.client_evaluation import Exam, Marks

log = logging.getLogger("hansa")

Kind: TypeAlias = Literal["process", "thread"]
_WAITING = 1 << 28  # bytes of reports that may wait for those before them
_DEATHS = 3  # a job may cost this many workers, and a pool this many that never began


class Pool:
    """A run's workers: processes, or threads with ``kind="thread"``, one intra-op thread each.

    They start at once in the background and stay until `close`; a ``crew`` of processes can serve one pool after the
    other, each with ``workers`` of it. A worker that dies is replaced and its cohort run again,
    with the same keys and so the same result. An error in a worker is raised here, with its client, round and step.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        task: TaskLike,
        dtype: torch.dtype,
        device: torch.device,
        *,
        workers: int = 2,
        kind: Kind = "process",
        crew: Processes | None = None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        """``devices`` are taken by the workers in turn; none means ``device`` for all."""
        check_integer("Pool", "workers", workers)
        if kind not in ("process", "thread"):
            raise invalid_argument("Pool", "kind", kind, "'process' or 'thread'")
        refuse_inside_worker()
        self.task = task
        self._workers, self._pending, self._stillborn = workers, list[Job](), 0
        self._own = crew is None
        self._crew: Crew = (
            _told(crew or Processes(), algorithm, task, dtype, workers, devices or (device,))
            if kind == "process"
            else Threads(algorithm, task, dtype, devices or (device,), workers)
        )

    def run(self, orders: Sequence[WorkOrder], recall: Recall = as_it_is) -> Iterator[Report]:
        """The reports, in order of completion."""
        self._drain(WorkOrder)
        self._crew.publish(WorkOrder, _carried(orders))
        home: deque[Job] = deque()
        block = _block(orders, self._workers)
        jobs = [Job(order, cost(order), home, recall, place // block) for place, order in enumerate(orders)]
        self._submit(jobs)
        try:
            for _ in jobs:
                yield self._next(home, forget=True)
        finally:  # a round that is left early gives no more work
            mine = set(map(id, jobs))
            self._pending = [job for job in self._pending if id(job) not in mine]

    def evaluate(self, vectors: Vectors) -> dict[str, float]:
        """The task's evaluation, its pieces shared out to all workers."""
        return self.evaluate_later(vectors).result()

    def evaluate_later(self, vectors: Vectors) -> Evaluation:
        """An evaluation of the vectors as they are now; the next round may run meanwhile."""
        self._drain((EvaluationRequest, Exam))
        vectors = {name: vector.detach().clone() for name, vector in vectors.items()}
        self._crew.publish(EvaluationRequest, vectors.values())
        exams = [EvaluationRequest(vectors)]
        if isinstance(self.task, Divisible):
            exams = [EvaluationRequest(vectors, piece) for piece in self.task.pieces()]
        home: deque[Job] = deque()
        jobs = [Job(exam, cost(exam), home) for exam in exams]
        self._submit(jobs)
        return Evaluation(self, jobs, home)

    def examine(self, exams: Sequence[Exam], recall: RecallExam) -> Iterator[list[Marks]]:
        """Clients' marks, exam by exam, shared out to all workers."""
        self._drain((EvaluationRequest, Exam))
        self._crew.publish(Exam, exams[0].vectors.values() if exams else ())
        home: deque[Job] = deque()
        jobs = [Job(exam, cost(exam), home, recall) for exam in exams]
        self._submit(jobs)
        for _ in jobs:
            self._next(home)
        yield from (job.answer for job in jobs)

    @property
    def workers(self) -> int:
        """How many of the crew work here."""
        return self._workers

    def widen(self, workers: int) -> None:
        """Have at least so many workers; those that are missing start in the background."""
        while len(self._crew.members) < workers:
            self._crew.hire()
        self._workers = max(self._workers, workers)

    def ready(self) -> bool:
        """Whether every worker has come to work; never waits."""
        while not all(worker.ready for worker in self._crew.members):
            events = self._crew.wait(0)
            if not events:
                return False
            self._take(events)
        return True

    def start(self) -> Pool:
        """Wait until every worker has come to work."""
        while not self.ready():
            self._take(self._crew.wait())
        return self

    def close(self) -> None:
        """End the workers; those of a given crew only stop."""
        self._pending.clear()
        if self._own:
            self._crew.close()
        elif isinstance(self._crew, Processes):
            self._crew.rest()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _submit(self, jobs: Sequence[Job]) -> None:
        self._pending = sorted([*self._pending, *jobs], key=lambda job: (job.block, -job.cost))
        self._share_out()

    def _next(self, home: deque[Job], *, forget: bool = False) -> Any:
        """The next answer of those awaited at one home."""
        while not home:
            self._take(self._crew.wait())
        job = home.popleft()
        answer = job.answer
        if forget:
            job.answer = None
        if isinstance(answer, Failure):
            raise answer.error()
        return answer

    def _drain(self, kind: type | tuple[type, ...]) -> None:
        """Wait until nothing of a kind is under way, so that what it reads may be overwritten."""
        while any(isinstance(job.request, kind) for job in self._unanswered()):
            self._take(self._crew.wait())

    def _unanswered(self) -> Iterator[Job]:
        yield from self._pending
        yield from (job for worker in self._crew.members for job in worker.jobs)

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Answered):
                job = event.worker.jobs[0] if event.job is None else event.job
                event.worker.jobs.remove(job)
                job.answer = event.answer
                job.home.append(job)
            elif isinstance(event, Gone):
                self._replace(event)
        self._share_out()

    def _replace(self, gone: Gone) -> None:
        """A worker has died: another one comes, and its jobs are done again; the oldest is the one it died of."""
        jobs = list(gone.worker.jobs)
        self._crew.dismiss(gone.worker)
        if not gone.worker.ready and not gone.blameless:
            self._stillborn += 1
            if gone.unable or self._stillborn >= _DEATHS:
                raise StartError(f"a worker process could not begin: {gone.cause.strip()}")
        if jobs:
            jobs[0].deaths += not gone.blameless
            log.warning("%s: the worker died (%s); it is replaced and the work done again", *_obituary(jobs[0], gone))
            if jobs[0].deaths >= _DEATHS:
                what, cause = _obituary(lost := jobs.pop(0), gone)
                lost.answer = Failure(f"{what}: {_DEATHS} workers died of it, one after the other ({cause})", cause)
                lost.home.append(lost)
        self._pending = [*jobs, *self._pending]
        self._crew.hire()

    def _share_out(self) -> None:
        """Longest first to whoever has nothing; one in advance to those who will need it soon, so that nobody waits
        for the next. In advance only up to a fair share of what is left, so that nothing queues behind a long one."""
        workers = [worker for worker in self._crew.members[: self._workers] if worker.ready]
        for worker in workers:
            if self._pending and not worker.jobs:
                self._crew.give(worker, self._pending.pop(0))
        share = sum(job.cost for job in self._unanswered()) / self._workers if self._pending else 0.0
        for worker in workers:
            if self._pending and len(worker.jobs) == 1 and worker.jobs[0].cost + self._pending[0].cost <= share:
                self._crew.give(worker, self._pending.pop(0))
        for worker in workers:  # where all take from one queue, whatever is in it
            while self._pending and 2 <= len(worker.jobs) < self._crew.ahead:
                self._crew.give(worker, self._pending.pop(0))


class Evaluation:
    """An evaluation under way."""

    def __init__(self, pool: Pool, jobs: Sequence[Job], home: deque[Job]) -> None:
        self._pool, self._jobs, self._home = pool, jobs, home
        self._left = len(jobs)

    def result(self) -> dict[str, float]:
        """Its numbers, once they are there."""
        while self._left:
            self._pool._next(self._home)
            self._left -= 1
        parts = [job.answer for job in self._jobs]
        task = self._pool.task
        return task.total(parts) if isinstance(task, Divisible) else dict(parts[0])


def _told(
    crew: Processes,
    algorithm: Algorithm,
    task: TaskLike,
    dtype: torch.dtype,
    workers: int,
    devices: Sequence[torch.device],
) -> Processes:
    crew.set_up(algorithm, task, dtype, devices)
    while len(crew.members) < workers:
        crew.hire()
    return crew


def refuse_inside_worker() -> None:
    """A worker imports the modules that define its model; one that starts a run by that would do so in each."""
    if "HANSA_WORKER" in os.environ:
        raise HansaError(
            "a worker process tried to start a run: a module that defines your model, loss or data does so when it is "
            'imported. Put what it does under `if __name__ == "__main__":`.'
        )


def _carried(orders: Sequence[WorkOrder]) -> Iterator[Vector]:
    """The vectors that orders bring with them, which all workers read in one place."""
    for order in orders:
        for sent in order.broadcasts.values():
            for packet in sent.packets:
                if isinstance(packet.content, torch.Tensor):
                    yield packet.content


def _block(orders: Sequence[WorkOrder], workers: int) -> int:
    """How many orders may be done in any order: reports wait for those before them, so that long ones can go first as
    long as what waits is small."""
    if not orders:
        return 1
    size = sum(packet.nbytes for sent in orders[0].broadcasts.values() for packet in sent.packets)
    return max(4 * workers, _WAITING // max(size, 1))


def _obituary(job: Job, gone: Gone) -> tuple[str, str]:
    return describe(job.request), gone.cause
