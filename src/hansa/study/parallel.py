"""Runs of a study side by side: in worker processes where that saves time, and in this process.

One run of a small model cannot use all cores, several can. Worker processes take runs from a queue, the longest first.
A worker is a fork of this process where that is safe: it starts in milliseconds, since all modules are imported and all
data are there. Elsewhere it is a new interpreter, which first imports torch and Hansa, about two seconds of a core.

With forks there are as many workers as runs may be under way, and this process only collects results: a forked process
executes a run a little faster, because it allocates memory that imports have not fragmented, and processes that are
equally fast end at the same time. Otherwise there is one less, and this process takes runs, too. Results do not depend
on who executes a run, nor on the order in which runs end. What fails in a worker is executed again here, so that its
error is raised where it can be seen; this process also continues the run of a worker that dies, and takes its place.

Messages are JSON lines over a private pipe; jobs and results are packed into shared memory (`hansa.engine` does the
same with client work). Workers ignore the signals that stop a study, since a terminal or a batch system sends them to
all its processes: this process decides what they mean. They end with it, however it ends; runs in folders are then
resumed from their last checkpoints.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import spawn
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch

from hansa.config import allow_code
from hansa.config.registry.import_path import is_trusted, may_import
from hansa.core.errors import check_integer
from hansa.engine import workers as worker_block
from hansa.engine.auto import START_SECONDS, available_cores
from hansa.engine.processes import current_workers
from hansa.engine.requests import NumericSettings
from hansa.engine.shared_memory import CodeChecker, CodePacker, PackedObject, Packer, SharedMemory, unpack_object
from hansa.runs import provenance
from hansa.runs.driver import Run
from hansa.runs.options import Callback, Record
from hansa.runs.store.lock import InUseError
from hansa.study.report.progress import LatestMetrics, ProgressDisplay, RunProgress

log = logging.getLogger("hansa")

SHOW_SECONDS = 0.2
"""The least time between two messages about the progress of a run."""
STOP_SIGNALS = [number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None))]
BOOT = (
    "import json, sys\n"
    "options = json.loads(sys.argv[1]); sys.path[:] = options['path']; sys.argv[:] = options['argv']\n"
    "import signal\n"
    "for number in options['ignore']: signal.signal(number, lambda *_: None)\n"
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, options['ignore'])\n"
    "from hansa.study.parallel import worker_main; worker_main(options)"
)
"""The program of a new interpreter. Processes that it starts do not inherit handlers, as they would ``SIG_IGN``."""

READY, STARTED, ROUND, SKIPPED, NOTE, LOG = "ready", "started", "round", "skipped", "note", "log"
DONE, STOPPED, FAILED, IN_USE = "done", "stopped", "failed", "in use"


class Job(Protocol):
    """A run of a study, which a worker process can execute."""

    @property
    def title(self) -> str: ...
    @property
    def rounds(self) -> int: ...
    @property
    def size(self) -> float:
        """Its estimated work, in any unit that the jobs of a study share."""
        ...

    @property
    def shared(self) -> bool:
        """Whether other studies may execute the same run; while one does, the others wait for it."""
        ...

    def work(self, display: ProgressDisplay) -> Any:
        """Execute it in a worker process; the result is sent to the study."""
        ...


J = TypeVar("J", bound=Job)
R = TypeVar("R")


class JobStopped(Exception):
    """The study stopped the run after a round; it is saved if it has a folder."""


def choose_parallel(
    parallel: int | None,
    runs: int,
    workers: int | None = None,
    devices: Sequence[str] = ("cpu",),
    *,
    obstacle: str = "",
) -> int:
    """Return how many runs of a study may be under way at once.

    By default as many as there are cores, divided by the workers of each; one on other devices than the CPU.

    Args:
        parallel: The number that the user asks for; None chooses it.
        runs: The number of runs.
        workers: The number of workers of each run, if it is set.
        devices: The kinds of devices on which they train.
        obstacle: Why they cannot be sent to other processes, if they cannot.

    >>> choose_parallel(3, runs=2), choose_parallel(3, runs=9), choose_parallel(None, 9, devices=["cuda"])
    (2, 3, 1)
    """
    if parallel is not None:
        check_integer("study", "parallel", parallel, "None uses all cores; 1 runs one after the other.")
    if current := current_workers():
        workers = current.count if workers is None else workers
    cores = 1 if set(devices) != {"cpu"} else available_cores() // (workers or 1)
    count = min(cores if parallel is None else parallel, runs)
    if count > 1 and os.name != "posix":
        warn_sequential("worker processes need a POSIX system")
        return 1
    if "HANSA_WORKER" in os.environ:
        obstacle = "this is a worker process"
    if count > 1 and obstacle:  # the user's choice, unless they ask for more
        log.log(logging.INFO if parallel is None else logging.WARNING, "runs one after the other: %s", obstacle)
    return 1 if obstacle else max(1, count)


@cache
def warn_sequential(reason: str) -> None:
    """Warn that runs use one core for a reason which the user did not choose; once in a process for each reason."""
    log.warning("runs one after the other: %s", reason)


class StudyScheduler(Generic[J, R]):
    """Executes the runs of a study; `run` returns their results in the order of the jobs.

    If a run fails, the runs after it end with their current round and no others are started; those before it are
    finished, as if one had been executed after the other. Then its error is raised. A shared run that another process
    executes is put last.

    Args:
        jobs: The runs.
        run_here: Executes a job in this process, with a further callback of its run.
        collect: Returns the result of a job that a worker executed, from what it answered.
        parallel: How many runs may be under way at once, from `choose_parallel`.
        eager: Start worker processes at once, not when they have been found to save time. Those that are forked cost
            nothing: they are always started at once.
        display: Shows progress.
        saved: Whether runs are saved when they are stopped, as those in folders are.
        interrupted: Returns whether the user wants to stop; asked while this process waits.
    """

    def __init__(
        self,
        jobs: Sequence[J],
        run_here: Callable[[J, Callback], R],
        collect: Callable[[J, Any], R],
        *,
        parallel: int = 1,
        eager: bool = False,
        display: ProgressDisplay | None = None,
        saved: bool = True,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.jobs, self._run_here, self._collect = list(jobs), run_here, collect
        self._parallel, self._eager, self._saved = parallel, eager, saved
        self._display, self._interrupted = ProgressDisplay() if display is None else display, interrupted
        self._changed = threading.Condition()
        self._queue = deque(range(len(self.jobs)))
        self._repeat: list[int] = []  # jobs that failed in a worker
        self._in_use: dict[int, float] = {}  # jobs that another process executes, each with when to ask again
        self._failed: tuple[int, BaseException] | None = None
        self._stopped = False
        self._workers: list[Worker] = []
        self._threads: list[threading.Thread] = []
        self._memory: SharedMemory | None = None  # with the jobs, for new interpreters
        self._undecided = parallel > 1
        self._checker = CodeChecker()
        self._answers: dict[int, Any] = {}
        self._results: dict[int, R] = {}
        self._began, self._rounds = 0.0, 0

    def run(self) -> list[R]:
        """Execute all jobs."""
        if self._parallel > 1 and (reason := self._checker.check(self.jobs)):
            warn_sequential(reason)
            self._parallel, self._undecided = 1, False
        self._began = time.monotonic()
        try:
            if self._undecided and can_fork():
                self._fork_workers()
            if self._eager and self._undecided:
                self._start_workers()
            while (index := self._next_here()) is not None:
                self._execute_here(index)
            if self._failed is not None:
                raise self._failed[1]
        except BaseException:
            self._stop_all()
            raise
        finally:
            self._close()
        for index in sorted(self._answers.keys() - self._results.keys()):
            self._results[index] = self._collect(self.jobs[index], self._answers[index])
        return [self._results[index] for index in range(len(self.jobs))]

    def _execute_here(self, index: int) -> None:
        one_core = nullcontext() if self._parallel == 1 or self._alone(index) else worker_block(1)
        try:
            with one_core:
                self._results[index] = self._run_here(self.jobs[index], self._after_round)
        except Exception as error:
            if self._interrupted():
                raise
            if isinstance(error, InUseError) and self.jobs[index].shared:
                self._put_last(index, str(error))
            else:
                self._fail(index, error)

    def _alone(self, index: int) -> bool:
        """Whether a run that does not set its workers may use all cores: it is the last, and the others are equal."""
        alike = len({job.size for job in self.jobs}) == 1
        return alike and len(self.jobs) % self._parallel == 1 and index == len(self.jobs) - 1

    def _put_last(self, index: int, reason: str) -> None:
        with self._changed:
            if index not in self._in_use:
                log.info("%s: another process executes this run. %s", self.jobs[index].title, reason)
            self._in_use[index] = time.monotonic() + SHOW_SECONDS
            self._queue.append(index)

    def _take(self) -> int | None:
        """Return the next job of the queue, but for those that another process executed a moment ago."""
        now = time.monotonic()
        for index in self._queue:
            if self._in_use.get(index, 0.0) <= now:
                self._queue.remove(index)
                return index
        return None

    def _next_here(self) -> int | None:
        """Return the next job for this process; collect results while workers are busy. None at the end."""
        while True:
            with self._changed:
                if self._interrupted():
                    raise KeyboardInterrupt
                if self._repeat:
                    self._repeat.sort()
                    return self._repeat.pop(0)
                if len(self._workers) < self._parallel and (index := self._take()) is not None:
                    return index
                if not (answered := self._answers.keys() - self._results.keys()):
                    if not self._queue and all(worker.job is None for worker in self._workers):
                        return None
                    self._changed.wait(0.2)
                    continue
            index = min(answered)
            self._results[index] = self._collect(self.jobs[index], self._answers[index])

    def _after_round(self, run: Run, record: Record) -> None:
        """Start workers as soon as the remaining runs are long enough."""
        self._rounds += 1
        if self._undecided and self._queue:
            left = sum(self.jobs[index].rounds for index in self._queue)
            seconds = (time.monotonic() - self._began) / self._rounds * left
            if seconds * (1 - 1 / self._parallel) >= 2 * START_SECONDS:
                self._start_workers()

    def _fork_workers(self) -> None:
        """Start workers before the first run opens files."""
        self._undecided, setup = False, self._describe()
        started: list[Worker] = []
        for _ in range(self._count_workers(self._parallel)):
            started.append(Worker.forked(setup, started))
        self._attend(started)

    def _start_workers(self) -> None:
        """Start workers as new interpreters, which map the packed jobs."""
        self._undecided = False
        if not (count := self._count_workers(self._parallel - 1)):
            return
        self._memory = SharedMemory()
        try:
            packed = CodePacker(self._memory).pack(self._describe())
        except Exception as error:
            log.warning("no worker process: %s", error)
            return
        self._memory.unmap()
        self._attend([Worker.spawned(packed, self._memory) for _ in range(count)])

    def _count_workers(self, wanted: int) -> int:
        """Return how many workers there may be, and put the longest runs first: a long run that begins last keeps one
        core busy while the others wait."""
        count = workers_that_fit(min(wanted, len(self._queue)))
        if count:
            self._queue = deque(sorted(self._queue, key=lambda index: (-self.jobs[index].size, index)))
        else:
            warn_sequential("there is not enough free memory for another process")
        return count

    def _describe(self) -> StudySetup:
        sources = provenance.sources_of(self._checker.code)
        return StudySetup(self.jobs, sources, type(self._display) is not ProgressDisplay)

    def _attend(self, workers: Sequence[Worker]) -> None:
        """Give jobs to new workers, a thread for each."""
        if workers:
            log.info("%d runs side by side", min(self._parallel, len(workers) + 1))
        for worker in workers:
            self._workers.append(worker)
            thread = threading.Thread(target=self._serve, args=(worker,), name="hansa study", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, worker: Worker) -> None:
        """Give jobs to a worker until there are no more or it dies, and show what it reports."""
        progress: RunProgress | None = None
        try:
            while (message := worker.receive()) is not None:
                kind = message["kind"]
                if kind == STARTED:
                    assert worker.job is not None
                    progress = self._display.follow(self.jobs[worker.job].title, message["rounds"], message["done"])
                elif kind == ROUND and progress is not None:
                    progress.update(message["round"], LatestMetrics.from_json(message["metrics"]))
                elif kind == SKIPPED:
                    self._display.skip(message["rounds"])
                elif kind == NOTE:
                    self._display.print_once(message["text"], message["topic"])
                elif kind == LOG:
                    logging.getLogger(message["name"]).log(message["level"], "%s", message["text"])
                elif kind in (READY, DONE, STOPPED, FAILED, IN_USE):
                    if progress is not None and kind != DONE:
                        progress.close()
                    progress = None
                    self._settle(worker, message)
                    if not self._give_job(worker):
                        worker.end()
                        return
        except Exception:
            log.exception("a worker process is given up")
        if progress is not None:
            progress.close()
        self._bury(worker)

    def _settle(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """Take a worker's answer to its job."""
        with self._changed:
            job, worker.job = worker.job, None
            if job is not None and message["kind"] == DONE:
                self._answers[job] = message["answer"]
            elif job is not None and message["kind"] == IN_USE:
                self._put_last(job, message["error"])
            elif job is not None and message["kind"] == FAILED:
                log.info("%s: failed in a worker process, repeated here: %s", self.jobs[job].title, message["error"])
                self._repeat_here(job)
            self._changed.notify_all()

    def _give_job(self, worker: Worker) -> bool:
        """Give a worker its next job; return whether there was one."""
        with self._changed:
            while self._queue and not self._stopped:
                if (index := self._take()) is not None:
                    worker.start(index, alone=self._alone(index))
                    return True
                self._changed.wait(SHOW_SECONDS)
            self._workers.remove(worker)
            self._changed.notify_all()
            return False

    def _repeat_here(self, job: int) -> None:
        if not self._stopped and (self._failed is None or job < self._failed[0]):
            self._repeat.append(job)

    def _bury(self, worker: Worker) -> None:
        """Have this process continue the run of a worker that died."""
        worker.end()
        with self._changed:
            self._workers.remove(worker)
            if worker.job is not None:
                log.warning(
                    "%s: the worker process died (exit code %s); the run is continued here",
                    self.jobs[worker.job].title, worker.exit_code,
                )  # fmt: skip
                self._repeat_here(worker.job)
            self._changed.notify_all()

    def _fail(self, index: int, error: BaseException) -> None:
        """Record the first error in the order of the jobs, and stop the jobs after it."""
        with self._changed:
            if self._failed is None or index < self._failed[0]:
                self._failed = index, error
            first = self._failed[0]
            self._queue = deque(job for job in self._queue if job < first)
            self._repeat = [job for job in self._repeat if job < first]
            for worker in self._workers:
                if worker.job is not None and worker.job > first:
                    worker.stop()

    def _stop_all(self) -> None:
        """Stop all workers: after their rounds if that saves their runs, or at once."""
        with self._changed:
            self._stopped = True
            self._queue.clear()
            for worker in self._workers:
                worker.stop()
            while self._saved and any(worker.job is not None for worker in self._workers):
                self._changed.wait(0.2)

    def _close(self) -> None:
        with self._changed:
            self._stopped = True
            self._queue.clear()
            for worker in self._workers:
                worker.process.kill()
        for thread in self._threads:
            thread.join()
        if self._memory is not None:
            self._memory.close()


def workers_that_fit(count: int) -> int:
    """Return how many processes of the size of this one fit into the free memory, at most ``count``."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        own = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, StopIteration):  # not Linux
        return count
    return min(count, int(free // (1.2 * own)))


# ----------------------------------------------------------------------------------------- worker processes


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
    """A handle to a worker process.

    Args:
        start: Starts the process, given its end of a pipe and the memory for its answers.
    """

    def __init__(self, start: Callable[[Worker, Connection], subprocess.Popen[bytes] | BaseProcess]) -> None:
        self.pipe, other = multiprocessing.Pipe()
        self.answers = SharedMemory()
        self.job: int | None = None
        with _signals_blocked():  # a new process has them blocked until it ignores them
            self.process = start(self, other)
        other.close()

    @classmethod
    def forked(cls, setup: StudySetup, others: Sequence[Worker]) -> Worker:
        """Fork this process; ``others`` are the workers that it has."""

        def start(worker: Worker, pipe: Connection) -> BaseProcess:
            ends = [each.pipe.fileno() for each in (*others, worker)]  # a worker ends when nobody holds the other end
            return fork_process(lambda: execute_jobs(setup, pipe, worker.answers), ends)

        return cls(start)

    @classmethod
    def spawned(cls, packed: PackedObject, memory: SharedMemory) -> Worker:
        """Start a new interpreter with a packed setup."""

        def start(worker: Worker, pipe: Connection) -> subprocess.Popen[bytes]:
            used = {"pipe": pipe.fileno(), "setup": memory.fd, "answers": worker.answers.fd}
            options = {"path": sys.path, "argv": sys.argv, "ignore": STOP_SIGNALS, "packed": list(packed), **used}
            return subprocess.Popen(
                [os.fsdecode(spawn.get_executable()), "-c", BOOT, json.dumps(options)],
                stdin=subprocess.DEVNULL,
                pass_fds=tuple(used.values()),
                env={**os.environ, "HANSA_WORKER": "1"},
            )

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

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process, negative after a signal; None while it runs."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.poll()
        return self.process.exitcode

    def end(self) -> None:
        """Have the process end by itself, or kill it, and free its memory."""
        self.pipe.close()
        if isinstance(self.process, subprocess.Popen):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
            self.process.kill()
            self.process.wait()
        else:
            self.process.join(timeout=5)
            self.process.kill()
            self.process.join()
        self.answers.close()


def can_fork() -> bool:
    """Return whether this process can be forked safely; the variable ``HANSA_FORK=off`` forbids it.

    Only the thread that forks exists in the new process: a lock that another thread of Python holds would stay locked.
    So there may be no other, as there is in a notebook. The threads of BLAS and OpenMP do nothing between two calls.
    Accelerators cannot be used after a fork, and on macOS neither can system libraries.
    """
    if sys.platform != "linux" or os.environ.get("HANSA_FORK") == "off":
        return False
    if multiprocessing.current_process().daemon:  # of a pool of the user's; it may not have children of this kind
        return False
    alone = len(sys._current_frames()) == 1 and threading.current_thread() is threading.main_thread()
    return alone and not torch.cuda.is_initialized() and not torch.xpu.is_initialized()  # type: ignore[no-untyped-call]


def fork_process(main: Callable[[], object], close: Sequence[int] = ()) -> BaseProcess:
    """Fork this process to call a function, which must end the new process.

    Args:
        main: The function. It is called in a new thread: the OpenMP threads of this one are missing in a fork, and a
            new thread starts its own.
        close: Descriptors of this process that the new one must not hold.
    """
    process = multiprocessing.get_context("fork").Process(target=_become_worker, args=(main, close))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 counts the threads of BLAS and OpenMP
        process.start()
    return process


def _become_worker(main: Callable[[], object], close: Sequence[int]) -> NoReturn:
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        for descriptor in close:
            os.close(descriptor)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a progress display may have replaced them
        gc.freeze()  # what was there before is neither searched nor finalized here
        thread = threading.Thread(target=main, name="hansa run")
        thread.start()
        thread.join()
    finally:
        os._exit(1)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals that stop a study."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    log.setLevel(setup.level)
    log.propagate = False
    log.handlers[:] = [_SendLog(send)]
    display = WorkerDisplay(send, stopping, setup.shown)
    send({"kind": READY})
    while True:
        order = inbox.get()
        job = setup.jobs[order["job"]]
        try:
            with ExitStack() as stack:
                may, trust = setup.code
                if may:
                    stack.enter_context(allow_code(trust=trust))
                if not order["alone"]:
                    stack.enter_context(worker_block(1))
                packed = Packer(answers).pack(job.work(display))
            send({"kind": DONE, "packed": list(packed)})
        except JobStopped:
            send({"kind": STOPPED})
        except Exception as error:
            kind = IN_USE if job.shared and isinstance(error, InUseError) else FAILED
            send({"kind": kind, "error": f"{type(error).__name__}: {error}"})
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
            stopping.clear()
            inbox.put(message)


class WorkerDisplay(ProgressDisplay):
    """Sends the progress of a worker's run to the study, and stops the run when the study says so."""

    signals = ()

    def __init__(self, send: Callable[[Mapping[str, Any]], None], stopping: threading.Event, shown: bool) -> None:
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

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send({"kind": LOG, "name": record.name, "level": record.levelno, "text": record.getMessage()})
