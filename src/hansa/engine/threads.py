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
from hansa.engine.job import Answered, Event, Job, NotShareable
from hansa.engine.request import BUNDLE, Arithmetic, Bundle, Failure, Request, describe, perform_all
from hansa.keys import Key
from hansa.local.descent import Shell
from hansa.protocols import declared
from hansa.rounds.messages import Order
from hansa.tasks import TaskLike, generators
from hansa.types import BUFFERS, MODEL, Vector

_DRAWS = "its model draws random numbers (dropout?), which threads would share: use worker processes"


@dataclass(slots=True, eq=False)
class Thread:
    """One worker: a thread with a shell of its own."""

    shell: Any
    inbox: SimpleQueue[tuple[Job, Request] | None] = field(default_factory=SimpleQueue)
    jobs: deque[Job] = field(default_factory=deque)
    ready: bool = True
    thread: threading.Thread | None = None


class Threads:
    """The workers of a run, all in this process."""

    ahead = BUNDLE
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
        self._arithmetic = Arithmetic.here()
        self._note_generators()
        self._threads = torch.get_num_threads()
        first = task.shell(dtype, self.devices[0])
        if trial(algorithm, task, first, dtype).draws:
            raise NotShareable(_DRAWS)
        self.hire(first)
        for _ in range(workers - 1):
            self.hire()

    def hire(self, shell: Any = None) -> None:
        """Start one more worker. Its shell is made here: making a model borrows torch's generator."""
        device = self.devices[len(self.members) % len(self.devices)]
        worker = Thread(self.task.shell(self.dtype, device) if shell is None else shell)
        try:
            if not declared(worker.shell, Shell, "draws_alone"):
                worker.shell.seed = _unseeded
        except AttributeError as error:
            raise NotShareable("its shells seed the generator that threads share") from error
        worker.thread = threading.Thread(target=self._serve, args=(worker,), name="hansa worker", daemon=True)
        worker.thread.start()
        self.members.append(worker)

    def dismiss(self, worker: Thread) -> None:
        """End one worker, after what it has been given."""
        self.members.remove(worker)
        worker.inbox.put(None)
        assert worker.thread is not None
        worker.thread.join()

    def publish(self, kind: type, vectors: Iterable[Vector]) -> None:
        """Threads see the vectors that requests hold; from here on nobody may touch the common generators."""
        self._note_generators()

    def _note_generators(self) -> None:
        self._generators = {device: generators.state(device) for device in self.devices}

    def give(self, worker: Thread, job: Job) -> None:
        worker.jobs.append(job)
        worker.inbox.put((job, job.recalled()))

    def wait(self, timeout: float | None = None) -> list[Event]:
        """What has happened since, as soon as something has."""
        events: list[Event] = []
        try:
            events.append(self._outbox.get(timeout=timeout) if timeout != 0 else self._outbox.get_nowait())
            while True:
                events.append(self._outbox.get_nowait())
        except Empty:
            return events

    def _serve(self, worker: Thread) -> None:
        self._arithmetic.apply_to_thread()
        device = worker.shell.y.device
        with _stream(device) as stream:
            bundle = Bundle(worker.shell)
            while (given := worker.inbox.get()) is not None:
                jobs, requests, ended = _several(given, worker.inbox, bundle)
                if stream is not None:
                    stream.wait_stream(torch.cuda.default_stream(device))
                began = time.perf_counter()
                answers = perform_all(requests, self.algorithm, self.task, worker.shell)
                bundle.note(len(jobs), time.perf_counter() - began)
                if stream is not None:
                    stream.synchronize()
                if isinstance(jobs[0].request, Order) and generators.drawn(self._generators[device], device):
                    answers = [Failure(f"{describe(job.request)}: {_DRAWS}", "") for job in jobs]
                for answer in answers:
                    self._outbox.put(Answered(worker, answer))
                del given, jobs, requests, answers, answer  # while it waits for the next
                if ended:
                    return

    def close(self) -> None:
        """Let each worker finish the steps that it is at, and end."""
        for worker in self.members:
            worker.inbox.put(None)
            if (solo := getattr(worker.shell, "solo", None)) is not None:
                solo.stop = True
        while self.members:
            thread = self.members.pop().thread
            assert thread is not None
            thread.join()
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
    with generators.kept():
        shell.load(vectors[MODEL], vectors.get(BUFFERS))
        rows = shell.rows(client, work, key)
        batch = None if rows is None else rows[0]
        before = generators.state(shell.y.device)
        shell.gradient(client, batch)
        began = time.perf_counter()
        shell.gradient(client, batch)
        seconds = time.perf_counter() - began
        own = getattr(getattr(shell, "private", None), "generators", ())
        return Trial(bool(own) or generators.drawn(before, shell.y.device), seconds)


def _several(
    first: tuple[Job, Request], inbox: SimpleQueue[tuple[Job, Request] | None], bundle: Bundle
) -> tuple[list[Job], list[Request], bool]:
    """A job with those behind it that can be done together, and whether the worker is to end after them."""
    taken, ended = [first], False
    size = bundle.size(first[1]) if isinstance(first[1], Order) else 1
    while len(taken) < size:
        try:
            given = inbox.get_nowait()
        except Empty:
            break
        if given is None:
            ended = True
            break
        taken.append(given)
    return [job for job, _ in taken], [request for _, request in taken], ended


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
