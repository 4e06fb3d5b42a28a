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
from contextlib import ExitStack, nullcontext, suppress
from functools import cache, partial
from logging.handlers import QueueHandler
from multiprocessing import connection, reduction, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.progress import TaskID

from hansa.config import allow_code
from hansa.config.import_path import is_trusted, may_import
from hansa.core.devices import available_cores, resolve_devices
from hansa.core.errors import check_integer
from hansa.engine import workers as worker_block
from hansa.engine.processes import current_workers
from hansa.engine.shared_memory import CodeChecker, PackedObject, Packer, SharedMemory, unpack_object
from hansa.runs import provenance
from hansa.study.report.progress import ProgressDisplay, RunProgress
from hansa.training.random_state import NumericSettings

if TYPE_CHECKING:
    from hansa.study.session import Job, Session

log = logging.getLogger("hansa")

SHOW_SECONDS = 0.2
"""The minimum time between two progress messages of a run."""
STOP_SIGNALS = [number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None))]
STOP = "stop"


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
    sequential execution. Then its error is raised.

    Args:
        session: Shows progress and receives signals.
        jobs: The runs.
        run_here: Executes a job in this process.
        parallel: The number of parallel runs, from `choose_parallel`; 1 executes all in this process.
    """

    def __init__(self, session: Session, jobs: Sequence[Job], run_here: Callable[[Job], None], parallel: int) -> None:
        self.jobs, self._session, self._run_here, self._parallel = list(jobs), session, run_here, parallel
        self._queue = deque(range(len(self.jobs)))
        self._end = len(self.jobs)  # the first job that failed
        self._error: Exception | None = None
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
                else:  # none were started, or all have died
                    self._run_here(self.jobs[self._queue.popleft()])
            if self._error is not None:
                raise self._error
        except BaseException:
            self._stop_after(-1)
            while self._busy and self.jobs[0].folder is not None:  # saved runs stop after their round
                self._serve_workers()
            raise
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.end()

    @property
    def _busy(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.job is not None]

    def _start_workers(self) -> None:
        """Start worker processes; forks must start before the first run opens files."""
        memory, checker = None if can_fork() else SharedMemory(), CodeChecker()
        if memory is not None and (reason := checker.check(self.jobs)):
            warn_sequential(reason)
            return
        self._queue = deque(sorted(self._queue, key=lambda index: (-self.jobs[index].config.rounds, index)))
        code = may_import(), is_trusted()
        state = NumericSettings.current(), torch.get_num_threads(), log.getEffectiveLevel(), code
        setup = StudySetup(self.jobs, provenance.sources_of(checker.code), *state)
        packed = None if memory is None else (Packer(memory).pack(setup), memory)
        self._workers = [Worker(setup, packed) for _ in range(self._parallel)]
        log.info("%d runs side by side", self._parallel)

    def _serve_workers(self) -> None:
        """Send jobs to idle workers and handle the messages of the others."""
        equally_long = len({job.config.rounds for job in self.jobs}) == 1
        for worker in self._workers:
            if worker.job is None and self._queue:
                worker.job, worker.progress = self._queue.popleft(), None
                # the last one of equally long runs may use all cores
                alone = equally_long and len(self.jobs) % self._parallel == 1 and worker.job == len(self.jobs) - 1
                worker.send((worker.job, alone))
        ready = connection.wait([worker.pipe for worker in self._workers], SHOW_SECONDS)
        for worker in [worker for worker in self._workers if worker.pipe in ready]:
            self._handle(worker, *worker.receive())

    def _handle(self, worker: Worker, kind: str, *content: Any) -> None:
        """Handle a worker's message: progress, a result, an error or its end."""
        display, index = self._session.display, worker.job
        if kind == "log":  # may arrive between two jobs
            logging.getLogger(content[0].name).handle(content[0])
        elif kind == "follow":
            worker.progress = display.follow(*content)
        elif kind == "update" and worker.progress is not None:
            worker.progress.update(*content)
        elif kind == "done" and index is not None:
            worker.job = None
            self.jobs[index].collect(*content)
        elif kind == "failed" and index is not None:
            worker.job = None
            if worker.progress is not None:
                worker.progress.close()
            if index < self._end:
                (self._error,) = content
                self._stop_after(index)
        elif kind == "dead":
            self._workers.remove(worker)
            worker.end()
            if index is not None:
                log.warning("%s: the worker process died (exit code %s); another one continues the run",
                            self.jobs[index].title, worker.process.exitcode)  # fmt: skip
                self._queue.extendleft([index] * (index < self._end))
        else:  # skip, print_once
            getattr(display, kind)(*content)

    def _stop_after(self, last: int) -> None:
        """Stop the jobs after one, and start no others after it."""
        self._end, self._queue = last, deque(index for index in self._queue if index < last)
        for worker in self._workers:
            if worker.job is not None and worker.job > last:
                worker.send(STOP)


def workers_that_fit(count: int) -> int:
    """Return the number of processes of this size that fit into the free memory, at most ``count``."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free_bytes = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, StopIteration):  # not Linux
        return count
    return min(count, int(free_bytes // (1.2 * resident_pages * os.sysconf("SC_PAGE_SIZE"))))


class StudySetup(NamedTuple):
    """The setup of a worker: jobs, and settings of its process. A new interpreter receives it in shared memory."""

    jobs: Sequence[Job]
    sources: Mapping[str, str]
    settings: NumericSettings
    threads: int
    level: int
    code: tuple[bool, bool]


class Worker:
    """A worker process and its job: a fork of this process, or a new interpreter if the setup is ``packed``."""

    def __init__(self, setup: StudySetup, packed: tuple[PackedObject, SharedMemory] | None) -> None:
        self.pipe, worker_end = multiprocessing.Pipe()
        self.job: int | None = None
        self.progress: RunProgress | None = None
        arguments = worker_end, setup if packed is None else None
        self.process = start_process(execute_jobs, arguments, "fork" if packed is None else "spawn")
        worker_end.close()
        if packed is not None:
            self.send(packed[0])
            with suppress(OSError):
                reduction.send_handle(self.pipe, packed[1].fd, self.process.pid)

    def send(self, message: object) -> None:
        """Send a message; `receive` detects a dead worker."""
        with suppress(OSError):
            self.pipe.send(message)

    def receive(self) -> tuple[Any, ...]:
        """Return the next message, with the result of a finished job; "dead" if the process has ended."""
        try:
            kind, *content = self.pipe.recv()
            return kind, *([_receive_object(self.pipe, *content)] if kind == "done" else content)
        except (EOFError, OSError):
            return ("dead",)

    def end(self) -> None:
        """Close the pipe and wait for the process, which has ended or was killed."""
        if self.progress is not None:
            self.progress.close()
        self.pipe.close()
        self.process.join(timeout=5)
        self.process.kill()
        self.process.join()


def _receive_object(pipe: Connection, packed: PackedObject) -> Any:
    """Return an object whose location has been received; the descriptor of its memory follows."""
    return unpack_object(packed, [SharedMemory(reduction.recv_handle(pipe), private=True)], copy=False)


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


def execute_jobs(pipe: Connection, setup: StudySetup | None) -> None:
    """Execute jobs until the study ends this process; a new interpreter receives its setup first."""
    lock = threading.Lock()

    def send(*message: object) -> None:
        with lock, suppress(OSError):
            pipe.send(message)

    if setup is None:
        os.environ["HANSA_WORKER"] = "1"  # importing the user's modules must not start runs
        setup = StudySetup(*_receive_object(pipe, pipe.recv()))
        del os.environ["HANSA_WORKER"]
        provenance.SOURCES.update(setup.sources)
    setup.settings.apply()
    torch.set_num_threads(setup.threads)  # the study's number: preprocessing must give the same bits
    log.setLevel(setup.level)
    log.propagate = False
    log.handlers[:] = [QueueHandler(SimpleNamespace(put_nowait=partial(send, "log")))]
    display, (may, trust) = WorkerDisplay(send), setup.code
    while True:
        if (message := pipe.recv()) == STOP:  # the run had already ended
            continue
        index, all_cores = message
        memory = SharedMemory()
        try:
            with allow_code(trust=trust) if may else nullcontext(), nullcontext() if all_cores else worker_block(1):
                # during a run, the study sends nothing but STOP
                packed = Packer(memory).pack(setup.jobs[index].work(display, lambda *_: pipe.poll()))
            with lock:
                pipe.send(("done", packed))
                reduction.send_handle(pipe, memory.fd, os.getppid())
        except Exception as error:
            send("failed", portable(error))
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
    """Sends the progress of a worker's run to the study."""

    def __init__(self, send: Callable[..., None]) -> None:
        super().__init__()
        self._send, self._rounds, self._sent_at = send, 0, 0.0

    def follow(self, title: str, rounds: int, completed: int = 0) -> RunProgress:
        self._send("follow", title, rounds, completed)
        self._rounds = rounds
        return RunProgress(self, TaskID(0))

    def show(self, bar: TaskID, round: int, numbers: str) -> None:
        if time.monotonic() - self._sent_at >= SHOW_SECONDS or round == self._rounds:
            self._sent_at = time.monotonic()
            self._send("update", round, numbers)

    def skip(self, rounds: int) -> None:
        self._send("skip", rounds)

    def print_once(self, text: str, topic: str = "") -> None:
        self._send("print_once", text, topic)
