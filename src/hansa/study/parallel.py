"""Parallel runs of a study in worker processes.

A single run of a small model cannot use all cores; several runs can. Worker processes take runs from a queue, the
longest first, so that no long run is left for last. This process collects results, shows progress and handles signals.
A worker is a fork of this process if that is safe: it starts in milliseconds, with all modules and data loaded.
Otherwise it is a new interpreter, which takes about two seconds to import torch and Hansa: these are started only if
the user asks for parallel runs.

Results do not depend on which process executes a run, nor on the order in which runs end. Errors of runs are raised in
this process. If a worker dies, another one executes its run again, or this process if no worker is left.

Workers ignore the signals that stop a study, since terminals and batch systems send them to all processes. They exit
when this process ends for any reason; runs in folders can then be resumed from their last checkpoints.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from functools import cache, cached_property, partial
from logging.handlers import QueueHandler
from multiprocessing import connection, reduction, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from hansa.config import allow_code
from hansa.config.import_path import is_trusted, may_import
from hansa.core.devices import available_cores, resolve_devices
from hansa.core.errors import check_integer
from hansa.engine import workers as worker_block
from hansa.engine.processes import current_workers
from hansa.engine.shared_memory import CodeChecker, PackedObject, Packer, SharedMemory, unpack_object
from hansa.runs import provenance
from hansa.runs.driver import Run
from hansa.runs.store.io import InUseError
from hansa.study.report.progress import ProgressDisplay, RunProgress
from hansa.training.random_state import NumericSettings

if TYPE_CHECKING:
    from hansa.study.session import Job, Session

log = logging.getLogger("hansa")

SHOW_SECONDS = 0.2
"""The minimum time between two progress messages of a run."""
STOP_SIGNALS = [number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None))]
STOP, LOG, DONE, FAILED = "stop", "log", "done", "failed"


class JobStopped(Exception):
    """The study stopped the run after a round; it is saved if it has a folder."""


def choose_parallel(parallel: int | None, jobs: Sequence[Job], obstacle: str = "") -> int:
    """Return the number of parallel runs of a study.

    By default the number of cores divided by the workers of a run; 1 on devices other than the CPU.

    Args:
        parallel: The requested number; None chooses it.
        jobs: The runs.
        obstacle: Why the runs cannot be sent to other processes, if they cannot.
    """
    if parallel is not None:
        check_integer("study", "parallel", parallel, "None uses all cores; 1 runs one after the other.")
    obstacle = obstacle or next((job.obstacle for job in jobs if job.obstacle), "")
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
    if count > 1 and obstacle:  # worth a warning only if the user asked for parallel runs
        log.log(logging.INFO if parallel is None else logging.WARNING, "runs one after the other: %s", obstacle)
    elif count > 1 and workers_that_fit(count) < 2:
        warn_sequential("there is not enough free memory for two processes")
    else:
        return max(1, workers_that_fit(count))
    return 1


@cache
def warn_sequential(reason: str) -> None:
    """Warn, once per reason, that runs are sequential for a reason that the user did not choose."""
    log.warning("runs one after the other: %s", reason)


class StudyScheduler:
    """Executes the runs of a study.

    If a run fails, later runs stop after their current round or are not started, and earlier ones are finished, as in
    sequential execution. Then its error is raised. A shared run that another process executes is put last.

    Args:
        session: Shows progress and receives signals.
        jobs: The runs.
        run_here: Executes a job in this process.
        parallel: The number of parallel runs, from `choose_parallel`; 1 executes all in this process.
    """

    def __init__(self, session: Session, jobs: Sequence[Job], run_here: Callable[[Job], None], parallel: int) -> None:
        self.jobs, self._session, self._run_here, self._parallel = list(jobs), session, run_here, parallel
        self._queue = deque(range(len(self.jobs)))
        self._in_use: dict[int, float] = {}  # jobs that another process executes: when to try each again
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
                elif (index := self._next_job()) is None:
                    time.sleep(SHOW_SECONDS)
                else:
                    try:
                        self._run_here(self.jobs[index])
                    except Exception as error:
                        if self._session.interrupt.received is not None:
                            raise
                        self._handle_failure(index, error)
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

    def _next_job(self) -> int | None:
        """Take the next job from the queue; skip those that another process executed a moment ago."""
        now = time.monotonic()
        index = next((index for index in self._queue if self._in_use.get(index, 0.0) <= now), None)
        if index is not None:
            self._queue.remove(index)
        return index

    def _may_use_all_cores(self, index: int) -> bool:
        """Return whether a run without a set number of workers may use all cores: the last of equally long runs."""
        equal_rounds = len({job.config.rounds for job in self.jobs}) == 1
        return equal_rounds and len(self.jobs) % self._parallel == 1 and index == len(self.jobs) - 1

    def _start_workers(self) -> None:
        """Start worker processes; forks must start before the first run opens files."""
        method, checker = "fork" if can_fork() else "spawn", CodeChecker()
        if method == "spawn" and (reason := checker.check(self.jobs)):
            warn_sequential(reason)
            return
        self._queue = deque(sorted(self._queue, key=lambda index: (-self.jobs[index].config.rounds, index)))
        sources = provenance.sources_of(checker.code)
        setup = StudySetup(self.jobs, sources, self._session.display.console is not None)
        self._workers = [Worker(setup, method) for _ in range(self._parallel)]
        log.info("%d runs side by side", self._parallel)

    def _serve_workers(self) -> None:
        """Send jobs to idle workers and handle the messages of the others."""
        for worker in self._workers:
            if worker.job is None and (index := self._next_job()) is not None:
                worker.start(index, all_cores=self._may_use_all_cores(index))
        ready = connection.wait([worker.pipe for worker in self._workers], SHOW_SECONDS)
        for worker in [worker for worker in self._workers if worker.pipe in ready]:
            if message := worker.receive():
                self._handle(worker, *message)
            else:
                self._remove_dead_worker(worker)

    def _handle(self, worker: Worker, kind: str, *content: Any) -> None:
        """Handle a worker's message: progress, a result or an error."""
        if kind == LOG:  # may arrive between two jobs
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
            self._handle_failure(index, *content)
        else:  # skip, print_once
            getattr(self._session.display, kind)(*content)

    def _remove_dead_worker(self, worker: Worker) -> None:
        """Remove a dead worker and return its job to the head of the queue."""
        self._workers.remove(worker)
        worker.end()
        if worker.job is not None:
            log.warning(
                "%s: the worker process died (exit code %s); another one continues the run",
                self.jobs[worker.job].title, worker.process.exitcode,
            )  # fmt: skip
            if self._failed is None or worker.job < self._failed[0]:
                self._queue.appendleft(worker.job)

    def _handle_failure(self, index: int, error: Exception) -> None:
        """Requeue a run that another process executes; otherwise record the error of the first failed job and stop the
        jobs after it."""
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
        failed_index = self._failed[0]
        self._queue = deque(job for job in self._queue if job < failed_index)
        for worker in self._busy:
            if worker.job is not None and worker.job > failed_index:
                worker.send(STOP)

    def _stop_workers(self) -> None:
        """Stop all runs of workers; those that are saved stop after their round."""
        self._queue.clear()
        self._failed = -1, KeyboardInterrupt()  # no job is queued any more
        for worker in self._busy:
            worker.send(STOP)
        while self._busy and self.jobs[0].folder is not None:
            self._serve_workers()


def workers_that_fit(count: int) -> int:
    """Return the number of processes of this size that fit into the free memory, at most ``count``."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free_bytes = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, StopIteration):  # not Linux
        return count
    return min(count, int(free_bytes // (1.2 * resident_pages * os.sysconf("SC_PAGE_SIZE"))))


@dataclass(frozen=True, eq=False)
class StudySetup:
    """The setup of a worker: jobs, and settings of its process. A new interpreter receives it in shared memory."""

    jobs: Sequence[Job]
    sources: Mapping[str, str]
    show_progress: bool
    settings: NumericSettings = field(default_factory=NumericSettings.current)
    threads: int = field(default_factory=torch.get_num_threads)
    level: int = field(default_factory=logging.getLogger("hansa").getEffectiveLevel)
    code: tuple[bool, bool] = field(default_factory=lambda: (may_import(), is_trusted()))

    @cached_property
    def _packed(self) -> tuple[PackedObject, SharedMemory]:
        memory = SharedMemory()
        return Packer(memory).pack([getattr(self, item.name) for item in fields(self)]), memory

    def __reduce__(self) -> tuple[Any, ...]:
        packed, memory = self._packed
        return _load_setup, (packed, reduction.DupFd(memory.fd))


def _load_setup(packed: PackedObject, descriptor: Any) -> StudySetup:
    """Unpack the setup in a new interpreter."""
    os.environ["HANSA_WORKER"] = "1"  # importing the user's modules must not start runs
    memory = SharedMemory(descriptor.detach(), private=True)
    setup = StudySetup(*unpack_object(packed, [memory], copy=False))
    del os.environ["HANSA_WORKER"]
    provenance.SOURCES.update(setup.sources)
    return setup


class Worker:
    """A worker process and its job."""

    def __init__(self, setup: StudySetup, method: str) -> None:
        self.pipe, worker_end = multiprocessing.Pipe()
        self.job: int | None = None
        self.progress: RunProgress | None = None
        self.process = start_process(execute_jobs, (worker_end, setup), method)
        worker_end.close()

    def start(self, job: int, *, all_cores: bool) -> None:
        """Start a job; ``all_cores`` if it may use all cores."""
        self.job, self.progress = job, None
        self.send((job, all_cores))

    def send(self, message: object) -> None:
        """Send a message; `receive` detects a dead worker."""
        with suppress(OSError):
            self.pipe.send(message)

    def receive(self) -> Sequence[Any]:
        """Return the next message, with the result of a finished job; empty if the process has ended."""
        try:
            message: Sequence[Any] = self.pipe.recv()
            if message[0] != DONE:
                return message
            memory = SharedMemory(reduction.recv_handle(self.pipe), private=True)
        except (EOFError, OSError):
            return ()
        return DONE, unpack_object(PackedObject(*message[1:]), [memory], copy=False)

    def end(self) -> None:
        """Close the pipe and wait for the process, which has ended or was killed."""
        if self.progress is not None:
            self.progress.close()
        self.pipe.close()
        self.process.join(timeout=5)
        self.process.kill()
        self.process.join()


def can_fork() -> bool:
    """Return whether this process can be forked safely; the variable ``HANSA_FORK=off`` forbids it.

    Only the forking thread exists in the new process, so a lock held by another Python thread would stay locked: there
    must be no other thread, as there is in a notebook. BLAS and OpenMP threads are idle between calls. Accelerators,
    and on macOS system libraries, cannot be used after a fork.
    """
    if sys.platform != "linux" or os.environ.get("HANSA_FORK") == "off":
        return False
    single_threaded = len(sys._current_frames()) == 1 and threading.current_thread() is threading.main_thread()
    return single_threaded and not torch.cuda.is_initialized() and not torch.xpu.is_initialized()  # type: ignore[no-untyped-call]


def start_process(main: Callable[..., object], arguments: Sequence[Any], method: str) -> BaseProcess:
    """Start a process that calls a function and ends with this one.

    Args:
        main: The function, called in a new thread: a fork lacks the OpenMP threads of this process, and a new thread
            starts its own.
        arguments: Its arguments.
        method: ``fork``, or ``spawn`` for a new interpreter, which does not execute the user's program again.
    """
    if method == "spawn":
        resource_tracker.ensure_running()  # it unblocks signals when it starts
    context: Any = multiprocessing.get_context(method)
    process: BaseProcess = context.Process(target=_become_worker, args=(main, *arguments))
    with ExitStack() as stack:
        # the new process inherits the mask, until it ignores the signals that stop a study
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 counts the threads of BLAS and OpenMP
        if method == "spawn":
            program = sys.modules["__main__"]
            stack.callback(sys.modules.__setitem__, "__main__", program)
            sys.modules["__main__"] = ModuleType("__main__")
        process.start()
    return process


def _become_worker(main: Callable[..., object], *arguments: Any) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which child processes would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a progress display may have replaced them
    gc.freeze()  # inherited objects are neither collected nor finalized
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


def execute_jobs(pipe: Connection, setup: StudySetup) -> None:
    """Execute jobs until the study ends this process."""
    lock = threading.Lock()

    def send(*message: object) -> None:
        with lock, suppress(OSError):
            pipe.send(message)

    setup.settings.apply()
    torch.set_num_threads(setup.threads)  # the study's number: preprocessing must give the same bits
    log.setLevel(setup.level)
    log.propagate = False
    log.handlers[:] = [QueueHandler(SimpleNamespace(put_nowait=partial(send, LOG)))]
    display = WorkerDisplay(send, pipe.poll, setup.show_progress)
    while True:
        if (message := pipe.recv()) == STOP:  # the run had already ended
            continue
        index, all_cores = message
        memory = SharedMemory()
        try:
            with ExitStack() as stack:
                may, trust = setup.code
                if may:
                    stack.enter_context(allow_code(trust=trust))
                if not all_cores:
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
    except Exception:  # a user's exception may fail in any way
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(text)
    return error


class WorkerDisplay(ProgressDisplay):
    """Sends the progress of a worker's run to the study, as method names of its display with arguments; stops the run
    on any message of the study, which during a run can only be STOP."""

    def __init__(self, send: Callable[..., None], stopping: Callable[[], bool], show_progress: bool) -> None:
        self.send, self.stopping, self.show_progress = send, stopping, show_progress

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
        self._worker, self._rounds, self._sent_at = display, rounds, 0.0

    def __call__(self, run: Run, record: Mapping[str, Any]) -> bool:
        super().__call__(run, record)
        return self._worker.stopping()

    def update(self, round: int, numbers: str) -> None:
        now = time.monotonic()
        if self._worker.show_progress and (now - self._sent_at >= SHOW_SECONDS or round == self._rounds):
            self._sent_at = now
            self._worker.send("update", round, numbers)
