"""Worker threads: for training that releases the interpreter lock (native steps, long steps), and for GPUs.

All threads share torch's generator, so the results of a model that draws from it (dropout) would depend on the order of
execution. Such a model is refused if a probe step draws; a later draw raises an error.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from hansa.algorithm import Algorithm
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.types import BUFFERS, MODEL, Vector
from hansa.engine.requests import (
    MAX_COHORTS,
    BatchSizer,
    Event,
    Job,
    JobDone,
    Request,
    RequestFailed,
    WorkerGroup,
    WorkersUnsupported,
    describe_request,
    execute,
)
from hansa.local import BaseTrainer
from hansa.rounds.messages import Report, WorkOrder
from hansa.training import TaskLike, random_state
from hansa.training.random_state import NumericSettings

_DRAWS = "its model draws random numbers (dropout?) from a generator that threads share: use worker processes"


@dataclass(slots=True, eq=False)
class WorkerThread:
    """One worker: its own trainer, and a thread unless it is the caller's."""

    trainer: Any
    batch_sizer: BatchSizer
    jobs: deque[Job] = field(default_factory=deque)
    ready: bool = True
    stopping: bool = False
    thread: threading.Thread | None = None


class QueuedJob(NamedTuple):
    """A job, its request with the clients' memory, and the worker that it is assigned to."""

    job: Job
    request: Request
    worker: WorkerThread


class ThreadGroup(WorkerGroup):
    """The worker threads of a run. All take jobs from one queue, so that none idles while jobs remain.

    Where training releases the interpreter lock, the caller's thread is the first worker while it waits: it would
    otherwise compete for a core with the workers.
    """

    jobs_per_worker = 2 * MAX_COHORTS

    def __init__(
        self, algorithm: Algorithm, task: TaskLike, dtype: torch.dtype, devices: Sequence[torch.device], workers: int
    ) -> None:
        self.algorithm, self.task, self.dtype, self.devices = algorithm, task, dtype, tuple(devices)
        self.workers: list[WorkerThread] = []
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._queue: deque[QueuedJob] = deque()
        self._changed = threading.Condition()
        self._settings = NumericSettings.current()
        self.publish(())
        self._num_threads = torch.get_num_threads()
        trainer = task.trainer(dtype, self.devices[0])
        draws, _ = probe_step(algorithm, task, trainer, dtype)
        if draws:
            raise WorkersUnsupported(_DRAWS)
        self._caller: WorkerThread | None = None
        if workers > 1 and trainer.y.device.type == "cpu" and with_defaults(trainer, BaseTrainer).releases_gil:
            self._caller = self._add(trainer)
            self._settings.apply_to_thread()
        else:
            self.spawn(trainer)
        for _ in range(workers - 1):
            self.spawn()

    def spawn(self, trainer: Any = None) -> None:
        """Start one more worker. Its trainer is made here, since making a model uses torch's generator."""
        device = self.devices[len(self.workers) % len(self.devices)]
        worker = self._add(self.task.trainer(self.dtype, device) if trainer is None else trainer)
        worker.thread = threading.Thread(target=self._work, args=(worker,), name="hansa worker", daemon=True)
        worker.thread.start()

    def _add(self, trainer: Any) -> WorkerThread:
        if not with_defaults(trainer, BaseTrainer).seeds_own_generators:
            trainer.seed = lambda key: None  # threads do not seed torch's generator
        self.workers.append(worker := WorkerThread(trainer, BatchSizer(trainer)))
        return worker

    def stop(self, worker: WorkerThread) -> None:
        """End one worker after its current job."""
        self.workers.remove(worker)
        if worker.thread is None:
            self._caller = None
            return
        with self._changed:
            worker.stopping = True
            self._changed.notify_all()
        worker.thread.join()

    def publish(self, vectors: Iterable[Vector]) -> None:
        """Save the state of the shared generators, which must not change; threads read the vectors in place."""
        self._generators = {device: random_state.rng_state(device) for device in self.devices}

    def divide(self, order: WorkOrder, task: TaskLike, workers: int) -> list[WorkOrder]:
        """Return an order in parts of falling cost, so that all workers finish at the same time."""
        parts, first, count = [], 0, len(order.clients)
        costs = [work.steps * work.batch_size for work in order.works]
        limit, remaining = self.workers[0].batch_sizer.size(order), float(sum(costs))
        while first < count:
            stop, cost = first + 1, costs[first]
            share = remaining / (2 * len(self.workers))
            while stop < count and stop - first < limit and cost + costs[stop] <= share:
                cost += costs[stop]
                stop += 1
            parts.append(order.part(slice(first, stop)))
            first, remaining = stop, remaining - cost
        return parts

    def submit(self, worker: WorkerThread, job: Job) -> None:
        worker.jobs.append(job)
        queued = QueuedJob(job, job.load_memory(job.request), worker)
        with self._changed:
            self._queue.append(queued)
            self._changed.notify()

    def wait(self) -> list[Event]:
        if self._caller is not None and self._events.empty():
            self._execute(self._caller, self._take_batch(self._caller))
        events = [self._events.get()]
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def _work(self, worker: WorkerThread) -> None:
        self._settings.apply_to_thread()
        with _stream(worker.trainer.y.device) as stream:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queue or worker.stopping)
                    if worker.stopping:
                        return
                self._execute(worker, self._take_batch(worker), stream)

    def _take_batch(self, worker: WorkerThread) -> list[QueuedJob]:
        """Take the next job from the queue; of gossiping cohorts several, fewer towards its end."""
        with self._changed:
            if not self._queue:
                return []
            first = self._queue[0].request
            size = 1
            if isinstance(first, WorkOrder) and first.cohort is not None:
                size = worker.batch_sizer.size(first)
            share = -(-len(self._queue) // (2 * len(self.workers)))
            return [self._queue.popleft() for _ in range(max(1, min(size, share)))]

    def _execute(self, worker: WorkerThread, batch: Sequence[QueuedJob], stream: Any = None) -> None:
        if not batch:
            return
        device, requests = worker.trainer.y.device, [queued.request for queued in batch]
        if stream is not None:
            stream.wait_stream(torch.cuda.default_stream(device))
        start = time.perf_counter()
        answers = execute(requests, self.algorithm, self.task, worker.trainer)
        if orders := [request for request in requests if isinstance(request, WorkOrder)]:
            worker.batch_sizer.record(orders, time.perf_counter() - start)
        if stream is not None:
            stream.synchronize()
            _hold_for_server(answers)
        queue_empty = isinstance(requests[0], WorkOrder) and not self._queue  # reading the generators takes time
        if queue_empty and random_state.rng_state(device) != self._generators[device]:
            answers = [RequestFailed(f"{describe_request(request)}: {_DRAWS}") for request in requests]
        for queued, answer in zip(batch, answers, strict=True):
            self._events.put(JobDone(queued.worker, queued.job, answer))

    def close(self) -> None:
        """End all workers after their current steps."""
        with self._changed:
            self._queue.clear()
            for worker in self.workers:
                worker.stopping = True
                with_defaults(worker.trainer, BaseTrainer).interrupt()
            self._changed.notify_all()
        while self.workers:
            if (thread := self.workers.pop().thread) is not None:
                thread.join()
        self._caller = None
        torch.set_num_threads(self._num_threads)  # MKL has one number for all threads


def probe_step(algorithm: Algorithm, task: TaskLike, trainer: Any, dtype: torch.dtype) -> tuple[bool, float]:
    """Return whether a step draws random numbers from a shared generator, and its duration. The gradient of the largest
    client's first batch is computed twice, since the first time is slow, and the generators are restored."""
    samples = task.population.samples
    client = max(range(len(samples)), key=samples.__getitem__)
    phase, key = algorithm.local, Key(0)
    work = phase.steps.draw(client, samples[client], phase.batch_size, key)._replace(steps=1)
    vectors = task.start(key, dtype)
    with random_state.preserve_rng():
        trainer.load(vectors[MODEL], vectors.get(BUFFERS))
        rows = trainer.batches(client, work, key)
        batch = None if rows is None else rows[0]
        state_before = random_state.rng_state(trainer.y.device)
        trainer.gradient(client, batch)
        start = time.perf_counter()
        trainer.gradient(client, batch)
        seconds = time.perf_counter() - start
        generators = getattr(getattr(trainer, "private", None), "generators", ())
        return bool(generators) or random_state.rng_state(trainer.y.device) != state_before, seconds


def _hold_for_server(answers: Sequence[Any]) -> None:
    """Keep the memory of the uploads of a worker's stream until the server has read them."""
    columns = (rows for report in answers if isinstance(report, Report) for rows in report.rows.values())
    for content in (packet.content for rows in columns if not isinstance(rows, torch.Tensor) for packet in rows):
        if isinstance(content, torch.Tensor) and content.is_cuda:
            content.record_stream(torch.cuda.default_stream(content.device))


@contextmanager
def _stream(device: torch.device) -> Iterator[Any]:
    """Open a worker's own CUDA stream, so that workers overlap on a GPU; None on a CPU."""
    if device.type != "cuda":
        yield None
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield stream
