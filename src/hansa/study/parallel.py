"""Runs of a study side by side in worker processes.

One run of a small model cannot use all cores, several can. Worker processes take runs from a queue, the longest first:
one that begins last keeps one core busy while the others wait. This process collects results, shows progress and knows
what signals mean. A worker is a fork of this process where that is safe: it starts in milliseconds, since all modules
are imported and all data are there. Elsewhere it is a new interpreter, which first imports torch and Hansa, about two
seconds of a core: these are started only if the user asks for parallel runs.

Results do not depend on who executes a run, nor on the order in which runs end. The error of a run is raised here. The
run of a worker that dies is executed again by another one, or by this process when no worker is left.

Workers ignore the signals that stop a study, since a terminal or a batch system sends them to all its processes. They
end with this process, however it ends; runs in folders are then resumed from their last checkpoints.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from logging.handlers import QueueHandler
from multiprocessing import connection, reduction, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch

from hansa.config import allow_code
from hansa.config.import_path import is_trusted, may_import
from hansa.core.devices import available_cores, resolve_devices
from hansa.core.errors import check_integer
from hansa.engine import workers as worker_block
from hansa.engine.processes import current_workers
from hansa.engine.requests import NumericSettings
from hansa.engine.shared_memory import CodeChecker, PackedObject, Packer, SharedMemory, unpack_object
from hansa.runs import provenance
from hansa.runs.driver import Run
from hansa.runs.store.io import InUseError
from hansa.study.report.progress import ProgressDisplay, RunProgress

if TYPE_CHECKING:
    from hansa.study.session import Job, Session

log = logging.getLogger("hansa")

SHOW_SECONDS = 0.2
"""The least time between two messages about the progress of a run."""
STOP_SIGNALS = [number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None))]
STOP, LOG, DONE, FAILED = "stop", "log", "done", "failed"


class JobStopped(Exception):
    """The study stopped the run after a round; it is saved if it has a folder."""


def choose_parallel(parallel: int | None, jobs: Sequence[Job], obstacle: str = "") -> int:
    """Return how many runs of a study are under way at once.

    By default as many as there are cores, divided by the workers of each; one on other devices than the CPU.

    Args:
        parallel: The number that the user asks for; None chooses it.
        jobs: The runs.
        obstacle: Why they cannot be sent to other processes, if they cannot.
    """
    if parallel is not None:
        check_integer("study", "parallel", parallel, "None uses all cores; 1 runs one after the other.")
    for job in jobs:
        obstacle = obstacle or job.obstacle
    if "HANSA_WORKER" in os.environ or multiprocessing.current_process().daemon:
        obstacle = "this is a worker process"
    if os.name != "posix":
        obstacle = "worker processes need a POSIX system"
    if parallel is None and not can_fork():
        obstacle = obstacle or "this process cannot be forked; parallel=N starts N new ones"
    block = current_workers()
    set_workers = [job.config.workers for job in jobs if job.config.workers != "auto"]
    workers = max(set_workers, default=None if block is None else block.count)
    on_cpu = all(device.type == "cpu" for job in jobs for device in resolve_devices(job.config.device))
    cores = available_cores() // (workers or 1) if on_cpu else 1
    count = min(cores if parallel is None else parallel, len(jobs))
    if count > 1 and obstacle:  # the user's choice, unless they ask for more
        log.log(logging.INFO if parallel is None else logging.WARNING, "runs one after the other: %s", obstacle)
    elif count > 1 and workers_that_fit(count) < 2:
        warn_sequential("there is not enough free memory for two processes")
    else:
        return max(1, workers_that_fit(count))
    return 1


@cache
def warn_sequential(reason: str) -> None:
    """Warn that runs use one core for a reason which the user did not choose; once in a process for each reason."""
    log.warning("runs one after the other: %s", reason)


class StudyScheduler:
    """Executes the runs of a study.

    If a run fails, the runs after it end with their current round and no others are started; those before it are
    finished, as if one had been executed after the other. Then its error is raised. A shared run that another process
    executes is put last.

    Args:
        session: Shows progress, and knows whether the user wants to stop.
        jobs: The runs.
        run_here: Executes a job in this process.
        parallel: How many runs are under way at once, from `choose_parallel`; one is executed in this process.
    """

    def __init__(self, session: Session, jobs: Sequence[Job], run_here: Callable[[Job], None], parallel: int) -> None:
        self.jobs, self._session, self._run_here, self._parallel = list(jobs), session, run_here, parallel
        self._queue = deque(range(len(self.jobs)))
        self._in_use: dict[int, float] = {}  # jobs that another process executes, each with when to ask again
        self._failed: tuple[int, BaseException] | None = None
        self._workers: list[Worker] = []

    def run(self) -> None:
        """Execute all jobs."""
        try:
            if self._parallel > 1:
                self._start_workers()
            while self._queue or self._busy:
                if self._session.interrupt.received is not None:
                    raise KeyboardInterrupt
                if self._workers:
                    self._serve_workers()
                elif (index := self._take()) is None:
                    time.sleep(SHOW_SECONDS)
                else:
                    self._execute_here(index)
            if self._failed is not None:
                raise self._failed[1]
        except BaseException:
            self._stop_workers()
            raise
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.end()

    @property
    def _busy(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.job is not None]

    def _take(self) -> int | None:
        """Return the next job of the queue, but for those that another process executed a moment ago."""
        now = time.monotonic()
        index = next((index for index in self._queue if self._in_use.get(index, 0.0) <= now), None)
        if index is not None:
            self._queue.remove(index)
        return index

    def _execute_here(self, index: int) -> None:
        try:
            self._run_here(self.jobs[index])
        except Exception as error:
            if self._session.interrupt.received is not None:
                raise
            self._settle(index, error)

    def _alone(self, index: int) -> bool:
        """Whether a run that does not set its workers may use all cores: it is the last, and the others are equal."""
        alike = len({job.rounds for job in self.jobs}) == 1
        return alike and len(self.jobs) % self._parallel == 1 and index == len(self.jobs) - 1

    def _start_workers(self) -> None:
        """Start worker processes, before the first run opens files if they are forks."""
        sources: Mapping[str, str] = {}
        if not (fork := can_fork()):
            checker = CodeChecker()
            if reason := checker.check(self.jobs):
                warn_sequential(reason)
                return
            sources = provenance.sources_of(checker.code)
        self._queue = deque(sorted(self._queue, key=lambda index: (-self.jobs[index].rounds, index)))
        setup: Any = StudySetup(self.jobs, sources, self._session.display.console is not None)
        if not fork:
            memory = SharedMemory()
            setup = Packer(memory).pack(setup), memory
        self._workers = [Worker(setup) for _ in range(self._parallel)]
        log.info("%d runs side by side", self._parallel)

    def _serve_workers(self) -> None:
        """Give jobs to idle workers, and take a message of each that has one."""
        for worker in self._workers:
            if worker.job is None and (index := self._take()) is not None:
                worker.start(index, alone=self._alone(index))
        ready = connection.wait([worker.pipe for worker in self._workers], SHOW_SECONDS)
        for worker in [worker for worker in self._workers if worker.pipe in ready]:
            if message := worker.receive():
                self._handle(worker, *message)
            else:
                self._bury(worker)

    def _handle(self, worker: Worker, kind: str, *content: Any) -> None:
        """Take a worker's message: show the progress of its run, or settle its job."""
        if kind == LOG:  # also between two jobs
            (record,) = content
            logging.getLogger(record.name).handle(record)
            return
        index = worker.job
        assert index is not None
        job = self.jobs[index]
        if kind == "follow":
            worker.progress = self._session.display.follow(job.title, *content)
        elif kind == "update":
            assert worker.progress is not None
            worker.progress.update(*content)
        elif kind == DONE:
            worker.job = None
            job.collect(*content)
        elif kind == FAILED:
            worker.job = None
            if worker.progress is not None:
                worker.progress.close()
            self._settle(index, *content)
        else:  # skip, print_once
            getattr(self._session.display, kind)(*content)

    def _bury(self, worker: Worker) -> None:
        """Put the job of a worker that died first in the queue."""
        self._workers.remove(worker)
        worker.end()
        if worker.job is not None:
            log.warning(
                "%s: the worker process died (exit code %s); the run is continued by another one",
                self.jobs[worker.job].title, worker.process.exitcode,
            )  # fmt: skip
            if self._failed is None or worker.job < self._failed[0]:
                self._queue.appendleft(worker.job)

    def _settle(self, index: int, error: Exception) -> None:
        """Put a run last that another process executes; else record the first error in the order of the jobs, and stop
        the jobs after it."""
        if isinstance(error, JobStopped):
            return
        if isinstance(error, InUseError) and self.jobs[index].shared:
            if index not in self._in_use:
                log.info("%s: another process executes this run. %s", self.jobs[index].title, error)
            self._in_use[index] = time.monotonic() + SHOW_SECONDS
            if self._failed is None or index < self._failed[0]:
                self._queue.append(index)
            return
        if self._failed is None or index < self._failed[0]:
            self._failed = index, error
        first = self._failed[0]
        self._queue = deque(job for job in self._queue if job < first)
        for worker in self._busy:
            if worker.job is not None and worker.job > first:
                worker.send(STOP)

    def _stop_workers(self) -> None:
        """Stop all runs of workers after their rounds, if that saves them."""
        self._queue.clear()
        self._failed = -1, KeyboardInterrupt()  # nothing is queued any more
        for worker in self._busy:
            worker.send(STOP)
        while self._busy and self.jobs[0].folder is not None:
            self._serve_workers()


def workers_that_fit(count: int) -> int:
    """Return how many processes of the size of this one fit into the free memory, at most ``count``."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        own = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, StopIteration):  # not Linux
        return count
    return min(count, int(free // (1.2 * own)))


@dataclass(frozen=True, slots=True, eq=False)
class StudySetup:
    """What a worker receives once: the jobs of the study, and the settings of its process."""

    jobs: Sequence[Job]
    sources: Mapping[str, str]
    shown: bool
    settings: NumericSettings = field(default_factory=NumericSettings.current)
    threads: int = field(default_factory=torch.get_num_threads)
    level: int = field(default_factory=logging.getLogger("hansa").getEffectiveLevel)
    code: tuple[bool, bool] = field(default_factory=lambda: (may_import(), is_trusted()))


class Worker:
    """A worker process, and the job that it executes. A fork inherits the setup; a new interpreter receives it, packed
    in a memory."""

    def __init__(self, setup: StudySetup | tuple[PackedObject, SharedMemory]) -> None:
        self.pipe, other = multiprocessing.Pipe()
        self.job: int | None = None
        self.progress: RunProgress | None = None
        if isinstance(setup, StudySetup):
            self.process = start_process(execute_jobs, (other, setup), "fork")
        else:
            self.process = start_process(execute_jobs, (other, None), "spawn")
            self.send(tuple(setup[0]))
            with suppress(OSError):
                reduction.send_handle(self.pipe, setup[1].fd, self.process.pid)
        other.close()

    def start(self, job: int, *, alone: bool) -> None:
        """Start a job; ``alone`` if it may use all cores."""
        self.job, self.progress = job, None
        self.send((job, alone))

    def send(self, message: object) -> None:
        """Send an order; a dead worker is noticed when its answer is awaited."""
        with suppress(OSError):
            self.pipe.send(message)

    def receive(self) -> Sequence[Any]:
        """Return the next message, with the answer of a job that is done; nothing if the process has ended."""
        try:
            message: Sequence[Any] = self.pipe.recv()
            if message[0] != DONE:
                return message
            memory = SharedMemory(reduction.recv_handle(self.pipe), private=True)
        except (EOFError, OSError):
            return ()
        return DONE, unpack_object(PackedObject(*message[1:]), [memory], copy=False)

    def end(self) -> None:
        """Wait for the process, which has ended or been killed, and close the pipe."""
        if self.progress is not None:
            self.progress.close()
        self.pipe.close()
        self.process.join(timeout=5)
        self.process.kill()
        self.process.join()


def can_fork() -> bool:
    """Return whether this process can be forked safely; the variable ``HANSA_FORK=off`` forbids it.

    Only the thread that forks exists in the new process: a lock that another thread of Python holds would stay locked.
    So there may be no other, as there is in a notebook. The threads of BLAS and OpenMP do nothing between two calls.
    Accelerators cannot be used after a fork, and on macOS neither can system libraries.
    """
    if sys.platform != "linux" or os.environ.get("HANSA_FORK") == "off":
        return False
    alone = len(sys._current_frames()) == 1 and threading.current_thread() is threading.main_thread()
    return alone and not torch.cuda.is_initialized() and not torch.xpu.is_initialized()  # type: ignore[no-untyped-call]


def start_process(
    main: Callable[..., object], arguments: Sequence[Any], method: Literal["fork", "spawn"]
) -> BaseProcess:
    """Start a process that calls a function and ends with this one.

    Args:
        main: The function. It is called in a new thread: the OpenMP threads of this process are missing in a fork, and
            a new thread starts its own.
        arguments: Its arguments.
        method: Whether the process is a fork or a new interpreter, which does not execute the user's program again.
    """
    if method == "spawn":
        resource_tracker.ensure_running()  # it unblocks signals when it starts
    context: Any = multiprocessing.get_context(method)
    process: BaseProcess = context.Process(target=_become_worker, args=(main, *arguments))
    with ExitStack() as stack:
        stack.enter_context(_signals_blocked())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 counts the threads of BLAS and OpenMP
        if method == "spawn":
            program = sys.modules["__main__"]
            stack.callback(sys.modules.__setitem__, "__main__", program)
            sys.modules["__main__"] = ModuleType("__main__")
        process.start()
    return process


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals that stop a study: a new process has them blocked until it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become_worker(main: Callable[..., object], *arguments: Any) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which processes started here would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a progress display may have replaced them
    gc.freeze()  # what was there before is neither searched nor finalized here
    threading.Thread(target=_end_with_parent, daemon=True).start()
    thread = threading.Thread(target=main, args=arguments, name="hansa run")
    thread.start()
    thread.join()
    os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _receive_setup(pipe: Connection) -> StudySetup:
    """Receive and unpack the setup in a new interpreter."""
    packed = PackedObject(*pipe.recv())
    os.environ["HANSA_WORKER"] = "1"  # with it, importing the user's modules cannot start runs
    memory = SharedMemory(reduction.recv_handle(pipe), private=True)
    setup: StudySetup = unpack_object(packed, [memory], copy=False)
    del os.environ["HANSA_WORKER"]
    provenance.SOURCES.update(setup.sources)
    gc.collect()
    gc.freeze()
    return setup


def execute_jobs(pipe: Connection, setup: StudySetup | None) -> None:
    """Execute jobs until the study ends this process; without a setup, receive it first."""
    setup = _receive_setup(pipe) if setup is None else setup
    lock = threading.Lock()

    def send(*message: object) -> None:
        with lock, suppress(OSError):
            pipe.send(message)

    setup.settings.apply()
    torch.set_num_threads(setup.threads)  # as where the study was started: preprocessing must give the same bits
    log.setLevel(setup.level)
    log.propagate = False
    log.handlers[:] = [QueueHandler(SimpleNamespace(put_nowait=partial(send, LOG)))]
    display = WorkerDisplay(send, pipe.poll, setup.shown)
    while True:
        if (order := pipe.recv()) == STOP:  # the run had ended before
            continue
        index, alone = order
        memory = SharedMemory()
        try:
            with ExitStack() as stack:
                may, trust = setup.code
                if may:
                    stack.enter_context(allow_code(trust=trust))
                if not alone:
                    stack.enter_context(worker_block(1))
                packed = Packer(memory).pack(setup.jobs[index].work(display))
            with lock:
                pipe.send((DONE, *packed))
                reduction.send_handle(pipe, memory.fd, os.getppid())
        except Exception as error:
            send(FAILED, portable(error))
        memory.close()
        gc.collect()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def portable(error: Exception) -> Exception:
    """Return an error that another process can raise, with its traceback as a note.

    >>> class Own(Exception): ...
    >>> portable(Own("no data")), portable(KeyError("x"))
    (RuntimeError('Own: no data'), KeyError('x'))
    """
    text = "".join(traceback.format_exception(error))
    try:
        reduction.ForkingPickler.loads(reduction.ForkingPickler.dumps(error))
    except Exception:  # whatever a user's own error does
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(text)
    return error


class WorkerDisplay(ProgressDisplay):
    """Sends the progress of a worker's run to the study, as names of methods of its display with their arguments, and
    stops the run when there is an order of the study, which during a run can only be to stop."""

    def __init__(self, send: Callable[..., None], stopping: Callable[[], bool], shown: bool) -> None:
        self.send, self.stopping, self.shown = send, stopping, shown

    def follow(self, title: str, rounds: int, done: int = 0) -> RunProgress:
        self.send("follow", rounds, done)
        return _SentProgress(self, rounds)

    def skip(self, rounds: int) -> None:
        self.send("skip", rounds)

    def print_once(self, text: str, topic: str = "") -> None:
        self.send("print_once", text, topic)


class _SentProgress(RunProgress):
    def __init__(self, display: WorkerDisplay, rounds: int) -> None:
        super().__init__(display)
        self._worker, self._rounds, self._sent = display, rounds, 0.0

    def __call__(self, run: Run, record: Mapping[str, Any]) -> bool:
        super().__call__(run, record)
        return self._worker.stopping()

    def update(self, round: int, numbers: str) -> None:
        now = time.monotonic()
        if self._worker.shown and (now - self._sent >= SHOW_SECONDS or round == self._rounds):
            self._sent = now
            self._worker.send("update", round, numbers)
