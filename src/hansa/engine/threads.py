"""Worker threads: for steps that run outside the interpreter's lock (native ones, or long ones), and for GPUs.

Nothing is copied or sent. Torch's generator is one for all threads, so a model that draws from it (dropout) would draw
other numbers in another order: such a model is refused when one trial step draws, and is an error if a later one does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from hansa.algorithm import Algorithm
from hansa.core.keys import Key
from hansa.core.protocols import declared
from hansa.core.types import BUFFERS, MODEL, Vector
from hansa.engine.requests import BUNDLE, Arithmetic, Bundle, Failure, Request, describe, perform_all
from hansa.engine.worker_group import Answered, Event, Job, NotShareable
from hansa.local.descent import Trainer
from hansa.rounds.messages import WorkOrder
from hansa.training import TaskLike, random_state

_DRAWS = "its model draws random numbers (dropout?), which threads would share: use worker processes"


@dataclass(slots=True, eq=False)
class Thread:
    """One worker: a shell of its own, and a thread unless it is the caller's own."""

    shell: Any
    bundle: Bundle
    jobs: deque[Job] = field(default_factory=deque)
    ready: bool = True
    leaving: bool = False
    thread: threading.Thread | None = None


class Given(NamedTuple):
    """A job, the request with what its clients remember, and the worker that it counts for."""

    job: Job
    request: Request
    worker: Thread


class Threads:
    """The workers of a run, all in this process. What they are given they take from one queue, so that nobody waits for
    the next as long as there is one. Where steps leave the interpreter's lock alone the first worker is whoever waits
    for the others: the thread that folds reports would otherwise want a core that it has not got."""

    ahead = 2 * BUNDLE
    """Jobs that a worker may be given at a time."""

    def __init__(
        self,
        algorithm: Algorithm,
        task: TaskLike,
        dtype: torch.dtype,
        devices: Sequence[torch.device],
        workers: int,
    ) -> None:
        """Workers take the devices in turn."""
        self.algorithm, self.task, self.dtype, self.devices = algorithm, task, dtype, tuple(devices)
        self.members: list[Thread] = []
        self._outbox: SimpleQueue[Event] = SimpleQueue()
        self._queue: deque[Given] = deque()
        self._news = threading.Condition()
        self._arithmetic = Arithmetic.here()
        self._note_generators()
        self._threads = torch.get_num_threads()
        first = task.shell(dtype, self.devices[0])
        if trial(algorithm, task, first, dtype).draws:
            raise NotShareable(_DRAWS)
        self._here: Thread | None = None
        if workers > 1 and first.y.device.type == "cpu" and declared(first, Trainer, "releases_gil"):
            self._here = self._member(first)
            self._arithmetic.apply_to_thread()
        else:
            self.hire(first)
        for _ in range(workers - 1):
            self.hire()

    def hire(self, shell: Any = None) -> None:
        """Start one more worker. Its shell is made here: making a model borrows torch's generator."""
        device = self.devices[len(self.members) % len(self.devices)]
        worker = self._member(self.task.shell(self.dtype, device) if shell is None else shell)
        worker.thread = threading.Thread(target=self._serve, args=(worker,), name="hansa worker", daemon=True)
        worker.thread.start()

    def _member(self, shell: Any) -> Thread:
        try:
            if not declared(shell, Trainer, "draws_alone"):
                shell.seed = _unseeded
        except AttributeError as error:
            raise NotShareable("its shells seed the generator that threads share") from error
        self.members.append(worker := Thread(shell, Bundle(shell)))
        return worker

    def dismiss(self, worker: Thread) -> None:
        """End one worker, after what it is at."""
        self.members.remove(worker)
        if worker.thread is None:
            self._here = None
            return
        with self._news:
            worker.leaving = True
            self._news.notify_all()
        worker.thread.join()

    def publish(self, kind: type, vectors: Iterable[Vector]) -> None:
        """Threads see the vectors that requests hold; from here on nobody may touch the common generators."""
        self._note_generators()

    def _note_generators(self) -> None:
        self._generators = {device: random_state.state(device) for device in self.devices}

    def give(self, worker: Thread, job: Job) -> None:
        worker.jobs.append(job)
        given = Given(job, job.recalled(), worker)
        with self._news:
            self._queue.append(given)
            self._news.notify()

    def wait(self, timeout: float | None = None) -> list[Event]:
        events: list[Event] = []
        if self._here is not None and timeout is None and self._outbox.empty():
            self._do(self._here, self._several(self._here))
        try:
            events.append(self._outbox.get(timeout=timeout) if timeout != 0 else self._outbox.get_nowait())
            while True:
                events.append(self._outbox.get_nowait())
        except Empty:
            return events

    def _serve(self, worker: Thread) -> None:
        self._arithmetic.apply_to_thread()
        with _stream(worker.shell.y.device) as stream:
            while True:
                with self._news:
                    self._news.wait_for(lambda: self._queue or worker.leaving)
                    if worker.leaving:
                        return
                self._do(worker, self._several(worker), stream)

    def _several(self, worker: Thread) -> list[Given]:
        """The next job with those behind it that can be done together; towards the end fewer, so that all end alike."""
        with self._news:
            if not self._queue:
                return []
            first = self._queue[0].request
            most = worker.bundle.size(first) if isinstance(first, WorkOrder) else 1
            fair = -(-len(self._queue) // (2 * len(self.members)))
            return [self._queue.popleft() for _ in range(max(1, min(most, fair)))]

    def _do(self, worker: Thread, taken: Sequence[Given], stream: Any = None) -> None:
        if not taken:
            return
        device, requests = worker.shell.y.device, [given.request for given in taken]
        if stream is not None:
            stream.wait_stream(torch.cuda.default_stream(device))
        began = time.perf_counter()
        answers = perform_all(requests, self.algorithm, self.task, worker.shell)
        worker.bundle.note(len(taken), time.perf_counter() - began)
        if stream is not None:
            stream.synchronize()
        last = isinstance(requests[0], WorkOrder) and not self._queue  # looking at the generators takes its time
        if last and random_state.drawn(self._generators[device], device):
            answers = [Failure(f"{describe(request)}: {_DRAWS}", "") for request in requests]
        for given, answer in zip(taken, answers, strict=True):
            self._outbox.put(Answered(given.worker, answer, given.job))

    def close(self) -> None:
        """Let each worker finish the steps that it is at, and end."""
        with self._news:
            self._queue.clear()
            for worker in self.members:
                worker.leaving = True
                if (solo := getattr(worker.shell, "solo", None)) is not None:
                    solo.stop = True
            self._news.notify_all()
        while self.members:
            if (thread := self.members.pop().thread) is not None:
                thread.join()
        self._here = None
        torch.set_num_threads(self._threads)  # MKL has one number for all threads


class Trial(NamedTuple):
    """What one step showed: whether it draws random numbers, and the seconds it took."""

    draws: bool
    seconds: float


def trial(algorithm: Algorithm, task: TaskLike, shell: Any, dtype: torch.dtype) -> Trial:
    """The gradient of the largest client's first batch, twice since the first is slow. Generators stay put."""
    samples = task.population.samples
    client = max(range(len(samples)), key=samples.__getitem__)
    phase, key = algorithm.local, Key(0)
    work = phase.steps.draw(client, samples[client], phase.batch_size, key)._replace(steps=1)
    vectors = task.start(key, dtype)
    with random_state.kept():
        shell.load(vectors[MODEL], vectors.get(BUFFERS))
        rows = shell.rows(client, work, key)
        batch = None if rows is None else rows[0]
        before = random_state.state(shell.y.device)
        shell.gradient(client, batch)
        began = time.perf_counter()
        shell.gradient(client, batch)
        seconds = time.perf_counter() - began
        own = getattr(getattr(shell, "private", None), "generators", ())
        return Trial(bool(own) or random_state.drawn(before, shell.y.device), seconds)


def _unseeded(key: Key) -> None:
    """Threads leave torch's generator alone."""


@contextmanager
def _stream(device: torch.device) -> Iterator[Any]:
    """A stream of a worker's own on a GPU, so that workers overlap there; nothing on a CPU."""
    if device.type != "cuda":
        yield None
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield stream
