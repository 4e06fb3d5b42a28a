"""A process that executes whole runs of a study, one after another, for the process that started it.

Messages are JSON lines over a private pipe; jobs and results are packed into shared memory (`hansa.engine` does the
same with client work). A forked process has the jobs without packing them. The process ends with its starter, however
that ends: runs in folders are then resumed from their last checkpoints.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NoReturn, Protocol

import torch

from hansa.config import allow_code
from hansa.config.registry.import_path import is_trusted, may_import
from hansa.engine import workers
from hansa.engine.requests import NumericSettings
from hansa.engine.shared_memory import CodePacker, PackedObject, Packer, SharedMemory, unpack_object
from hansa.runs import provenance
from hansa.runs.driver import Run
from hansa.study.report.progress import LatestMetrics, ProgressDisplay, RunProgress
from hansa.study.worker_process import ForkedProcess, fork_process, spawn_process

SHOW_SECONDS = 0.2
"""The least time between two messages about the progress of a run."""

READY, STARTED, ROUND, SKIPPED, NOTE, LOG = "ready", "started", "round", "skipped", "note", "log"
DONE, STOPPED, FAILED = "done", "stopped", "failed"


class StudyJob(Protocol):
    """One run of a study, which a worker process can execute."""

    @property
    def title(self) -> str:
        """Its name in the progress display."""
        ...

    @property
    def rounds(self) -> int:
        """Its number of rounds."""
        ...

    @property
    def size(self) -> float:
        """Its estimated work, in any unit that the jobs of a study share."""
        ...

    def work(self, display: ProgressDisplay) -> Any:
        """Execute it in a worker process; the result is sent to the study."""
        ...


class JobStopped(Exception):
    """The study stopped the run after a round; it is saved if it has a folder."""


@dataclass(frozen=True, slots=True, eq=False)
class StudySetup:
    """What a worker receives once: the jobs of the study, and the settings of its process."""

    jobs: Sequence[StudyJob]
    sources: Mapping[str, str]
    shown: bool
    settings: NumericSettings = field(default_factory=NumericSettings.current)
    threads: int = field(default_factory=torch.get_num_threads)
    level: int = field(default_factory=logging.getLogger("hansa").getEffectiveLevel)
    code: tuple[bool, bool] = field(default_factory=lambda: (may_import(), is_trusted()))


class RunWorker:
    """A handle to a worker process.

    Args:
        start: Starts the process, given its end of a pipe and the memory for its answers.
    """

    def __init__(self, start: Callable[[RunWorker, Connection], subprocess.Popen[bytes] | ForkedProcess]) -> None:
        self.pipe, other = Pipe()
        self.answers = SharedMemory()
        self.job: int | None = None
        self.process = start(self, other)
        other.close()

    @classmethod
    def forked(cls, setup: StudySetup, others: Sequence[RunWorker]) -> RunWorker:
        """Fork this process; ``others`` are the workers that it has."""

        def start(worker: RunWorker, pipe: Connection) -> ForkedProcess:
            ends = [each.pipe.fileno() for each in (*others, worker)]  # a worker ends when nobody holds the other end
            return fork_process(lambda: execute_jobs(setup, pipe, worker.answers), close=ends)

        return cls(start)

    @classmethod
    def spawned(cls, packed: PackedObject, memory: SharedMemory) -> RunWorker:
        """Start a new interpreter with a packed setup."""

        def start(worker: RunWorker, pipe: Connection) -> subprocess.Popen[bytes]:
            used = {"pipe": pipe.fileno(), "setup": memory.fd, "answers": worker.answers.fd}
            return spawn_process({**used, "packed": list(packed)}, tuple(used.values()))

        return cls(start)

    def start(self, job: int, *, alone: bool) -> None:
        """Start a job; ``alone`` if it may use all cores."""
        self.job = job
        self._send({"job": job, "alone": alone})

    def stop(self) -> None:
        """Have the current run end after its round."""
        self._send({"stop": True})

    def _send(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # a dead worker is noticed by whoever waits for its answer
            self.pipe.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message; None if the process has ended."""
        try:
            message: dict[str, Any] = json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return None
        if message["kind"] == DONE:
            packed = PackedObject(*message["packed"])
            message["answer"] = unpack_object(packed, [self.answers], copy=True)
            self.answers.clear()
        return message

    def end(self, *, at_once: bool = False) -> None:
        """End the process and free its memory."""
        if at_once:
            self.process.kill()
        self.pipe.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.answers.close()


def pack_setup(setup: StudySetup) -> tuple[PackedObject, SharedMemory]:
    """Return the setup in shared memory, from which each worker maps it."""
    memory = SharedMemory()
    packed = CodePacker(memory).pack(setup)
    memory.unmap()
    return packed, memory


class WorkerDisplay(ProgressDisplay):
    """Sends the progress of a worker's run to the study, and stops the run when the study says so."""

    signals = ()

    def __init__(self, send: Any, stopping: threading.Event, shown: bool) -> None:
        self.send, self.stopping, self.shown = send, stopping, shown

    def follow(self, title: str, rounds: int, done: int = 0) -> RunProgress:
        self.send({"kind": STARTED, "rounds": rounds, "done": done})
        return _SentProgress(self, rounds)

    def skip(self, rounds: int) -> None:
        self.send({"kind": SKIPPED, "rounds": rounds})

    def print_once(self, text: str, topic: str = "") -> None:
        if text:
            self.send({"kind": NOTE, "text": text, "topic": topic})


class _SentProgress(RunProgress):
    def __init__(self, display: WorkerDisplay, rounds: int) -> None:
        super().__init__(display)
        self._worker, self._rounds, self._sent = display, rounds, 0.0

    def __call__(self, run: Run, record: Mapping[str, Any]) -> bool:
        super().__call__(run, record)
        return self._worker.stopping.is_set()

    def update(self, round: int, metrics: LatestMetrics) -> None:
        now = time.monotonic()
        if self._worker.shown and (now - self._sent >= SHOW_SECONDS or round == self._rounds):
            self._sent = now
            self._worker.send({"kind": ROUND, "round": round, "metrics": vars(metrics)})


class _SendLog(logging.Handler):
    """Sends log records to the study, which logs them."""

    def __init__(self, send: Any) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send({"kind": LOG, "name": record.name, "level": record.levelno, "text": record.getMessage()})


def worker_main(options: Mapping[str, Any]) -> NoReturn:
    """Execute jobs in a new interpreter."""
    setup: StudySetup = unpack_object(
        PackedObject(*options["packed"]), [SharedMemory(options["setup"], private=True)], copy=False
    )
    provenance.SOURCES.update(setup.sources)
    del os.environ["HANSA_WORKER"]  # with it, importing the user's modules cannot start runs
    gc.collect()
    gc.freeze()
    execute_jobs(setup, Connection(options["pipe"]), SharedMemory(options["answers"]))


def execute_jobs(setup: StudySetup, pipe: Connection, answers: SharedMemory) -> NoReturn:
    """Execute jobs until the study ends, then end this process.

    Args:
        setup: The jobs, and the settings for this process.
        pipe: The connection to the study.
        answers: The memory for results.
    """
    lock = threading.Lock()
    inbox: SimpleQueue[Mapping[str, Any]] = SimpleQueue()
    stopping = threading.Event()

    def send(message: Mapping[str, Any]) -> None:
        with lock, suppress(OSError):
            pipe.send_bytes(json.dumps(message).encode())

    threading.Thread(target=_listen, args=(pipe, inbox, stopping), daemon=True).start()
    setup.settings.apply()
    torch.set_num_threads(setup.threads)  # as where the study was started: preprocessing must give the same bits
    log = logging.getLogger("hansa")
    log.setLevel(setup.level)
    log.propagate = False
    log.handlers[:] = [_SendLog(send)]
    display = WorkerDisplay(send, stopping, setup.shown)
    send({"kind": READY})
    while True:
        order = inbox.get()
        try:
            with ExitStack() as stack:
                may, trust = setup.code
                if may:
                    stack.enter_context(allow_code(trust=trust))
                if not order["alone"]:
                    stack.enter_context(workers(1))
                packed = Packer(answers).pack(setup.jobs[order["job"]].work(display))
            send({"kind": DONE, "packed": list(packed)})
        except JobStopped:
            send({"kind": STOPPED})
        except Exception as error:
            send({"kind": FAILED, "error": f"{type(error).__name__}: {error}"})
        answers.unmap()
        gc.collect()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def _listen(pipe: Connection, inbox: SimpleQueue[Mapping[str, Any]], stopping: threading.Event) -> None:
    while True:
        try:
            message = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        if "stop" in message:
            stopping.set()
        else:
            inbox.put(message)
