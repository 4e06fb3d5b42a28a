"""Runs of a study side by side: in worker processes where that saves time, and in this process.

One run of a small model cannot use all cores, several can. Worker processes take runs from a queue, the longest first.
Where processes can be forked, there are as many as runs may be under way, and this process only collects results: a
forked process executes a run a little faster, because it allocates memory that imports have not fragmented, and
processes that are equally fast end at the same time. Elsewhere there is one less, and this process takes runs, too.
Results do not depend on who executes a run, nor on the order in which runs end. What fails in a worker is executed
again here, so that its error is raised where it can be seen; a worker that dies is replaced.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from hansa.core.errors import check_integer
from hansa.engine import workers as worker_block
from hansa.engine.auto import START_SECONDS, available_cores
from hansa.engine.processes import current_workers
from hansa.engine.shared_memory import CodeChecker, PackedObject, SharedMemory
from hansa.runs.driver import Run
from hansa.runs.options import Callback, Record
from hansa.runs.provenance import sources_of
from hansa.study import run_worker
from hansa.study.report.progress import LatestMetrics, ProgressDisplay, RunProgress
from hansa.study.run_worker import RunWorker, StudyJob, StudySetup, pack_setup
from hansa.study.worker_process import can_fork

log = logging.getLogger("hansa")

J = TypeVar("J", bound=StudyJob)
R = TypeVar("R")
MAX_DEATHS = 3
"""How many worker processes that died are replaced."""


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
    finished, as if one had been executed after the other. Then its error is raised.

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
        self._failed: tuple[int, BaseException] | None = None
        self._stopped = False
        self._workers: list[RunWorker] = []
        self._threads: list[threading.Thread] = []
        self._packed: tuple[PackedObject, SharedMemory] | None = None
        self._deaths = 0
        self._undecided = parallel > 1
        self._checker = CodeChecker()
        self._answers: dict[int, Any] = {}
        self._results: dict[int, R] = {}
        self._began, self._rounds = 0.0, 0

    @property
    def workers(self) -> list[RunWorker]:
        """The worker processes that are running."""
        return self._workers

    def run(self) -> list[R]:
        """Execute all jobs."""
        if self._parallel > 1 and (reason := self._checker.check(self.jobs)):
            warn_sequential(reason)
            self._parallel, self._undecided = 1, False
        self._began = time.monotonic()
        try:
            if self._undecided:
                self._fork_workers()
            if self._eager and self._undecided:
                self._start_workers()
            while (index := self._next_here()) is not None:
                try:
                    with self._one_core(index):
                        self._results[index] = self._run_here(self.jobs[index], self._after_round)
                except Exception as error:
                    if self._interrupted():
                        raise
                    self._fail(index, error)
            if self._failed is not None:
                raise self._failed[1]
        except BaseException:
            self._stop_all()
            raise
        finally:
            self._close()
        for index in sorted(self._answers.keys() - self._results.keys()):
            self._collect_answer(index)
        return [self._results[index] for index in range(len(self.jobs))]

    def _one_core(self, index: int) -> Any:
        """Limit a run that does not set its workers to one, unless it is the last and runs alone."""
        return nullcontext() if self._parallel == 1 or self._alone(index) else worker_block(1)

    def _alone(self, index: int) -> bool:
        alike = len({job.size for job in self.jobs}) == 1
        return alike and len(self.jobs) % self._parallel == 1 and index == len(self.jobs) - 1

    def _sort_queue(self) -> None:
        """Put the longest runs first: a long run that begins last keeps one core busy while the others wait."""
        with self._changed:
            self._queue = deque(sorted(self._queue, key=lambda index: (-self.jobs[index].size, index)))

    def _next_here(self) -> int | None:
        """Return the next job for this process; collect results while workers are busy. None at the end."""
        while True:
            with self._changed:
                if self._interrupted():
                    raise KeyboardInterrupt
                if self._repeat:
                    self._repeat.sort()
                    return self._repeat.pop(0)
                if self._queue and len(self._workers) < self._parallel:
                    return self._queue.popleft()
                if not (answered := self._answers.keys() - self._results.keys()):
                    if not self._queue and all(worker.job is None for worker in self._workers):
                        return None
                    self._changed.wait(0.2)
                    continue
            self._collect_answer(min(answered))

    def _collect_answer(self, index: int) -> None:
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
        """Start workers before the first run opens files, if this process can be forked: that costs milliseconds."""
        with self._display.paused():
            if not can_fork():
                return
            self._undecided, setup = False, self._describe()
            started: list[RunWorker] = []
            for _ in range(self._count_workers(self._parallel)):
                started.append(RunWorker.forked(setup, started))
        if started:
            self._sort_queue()
        self._attend(started)

    def _start_workers(self) -> None:
        """Start workers as new interpreters."""
        self._undecided = False
        if count := self._count_workers(self._parallel - 1):
            self._sort_queue()
            self._attend([worker for _ in range(count) if (worker := self._spawn_worker()) is not None])

    def _count_workers(self, wanted: int) -> int:
        count = workers_that_fit(min(wanted, len(self._queue)))
        if not count:
            warn_sequential("there is not enough free memory for another process")
        return count

    def _describe(self) -> StudySetup:
        return StudySetup(self.jobs, sources_of(self._checker.code), type(self._display) is not ProgressDisplay)

    def _spawn_worker(self) -> RunWorker | None:
        if self._packed is None:
            try:
                self._packed = pack_setup(self._describe())
            except Exception as error:
                log.warning("no further worker process: %s", error)
                return None
        return RunWorker.spawned(*self._packed)

    def _attend(self, workers: Sequence[RunWorker]) -> None:
        """Give jobs to new workers, a thread for each."""
        if workers:
            log.info("%d runs side by side", min(self._parallel, len(self._workers) + len(workers) + 1))
        for worker in workers:
            self._workers.append(worker)
            thread = threading.Thread(target=self._serve, args=(worker,), name="hansa study", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, worker: RunWorker) -> None:
        """Give jobs to a worker until there are no more or it dies."""
        finished = False
        try:
            finished = self._converse(worker)
        except Exception:
            log.exception("a worker process is given up")
        finally:
            if not finished:
                self._bury(worker)

    def _converse(self, worker: RunWorker) -> bool:
        """Show what a worker says; return whether it has done all that it was given."""
        progress: RunProgress | None = None
        while (message := worker.receive()) is not None:
            kind = message["kind"]
            if kind in (run_worker.READY, run_worker.DONE, run_worker.STOPPED, run_worker.FAILED):
                if kind in (run_worker.STOPPED, run_worker.FAILED) and progress is not None:
                    progress.close()
                progress = None
                if not self._settle(worker, message):
                    worker.end()
                    return True
            elif kind == run_worker.STARTED:
                assert worker.job is not None
                progress = self._display.follow(self.jobs[worker.job].title, message["rounds"], message["done"])
            elif kind == run_worker.ROUND and progress is not None:
                progress.update(message["round"], LatestMetrics.from_json(message["metrics"]))
            elif kind == run_worker.SKIPPED:
                self._display.skip(message["rounds"])
            elif kind == run_worker.NOTE:
                self._display.print_once(message["text"], message["topic"])
            elif kind == run_worker.LOG:
                logging.getLogger(message["name"]).log(message["level"], "%s", message["text"])
        if progress is not None:
            progress.close()
        return False

    def _settle(self, worker: RunWorker, message: dict[str, Any]) -> bool:
        """Take a worker's answer and give it the next job; return whether there was one."""
        with self._changed:
            job, worker.job = worker.job, None
            if message["kind"] == run_worker.DONE:
                assert job is not None
                self._answers[job] = message["answer"]
            elif message["kind"] == run_worker.FAILED and job is not None:
                log.info("%s: failed in a worker process, repeated here: %s", self.jobs[job].title, message["error"])
                self._repeat_here(job)
            more = bool(self._queue) and not self._stopped
            if more:
                index = self._queue.popleft()
                worker.start(index, alone=self._alone(index))
            else:
                self._workers.remove(worker)
            self._changed.notify_all()
            return more

    def _repeat_here(self, job: int) -> None:
        if not self._stopped and (self._failed is None or job < self._failed[0]):
            self._repeat.append(job)

    def _bury(self, worker: RunWorker) -> None:
        """Replace a worker that died; its run is continued here."""
        worker.end(at_once=True)
        with self._changed:
            self._workers.remove(worker)
            if worker.job is not None:
                log.warning(
                    "%s: the worker process died (exit code %s); the run is continued here",
                    self.jobs[worker.job].title, worker.process.returncode,
                )  # fmt: skip
                self._repeat_here(worker.job)
            self._deaths += 1
            if not self._stopped and self._queue and self._deaths <= MAX_DEATHS:
                successor = self._spawn_worker()
                self._attend([] if successor is None else [successor])
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
        if self._packed is not None:
            self._packed[1].close()


def workers_that_fit(count: int) -> int:
    """Return how many processes of the size of this one fit into the free memory, at most ``count``."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        own = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, StopIteration):  # not Linux
        return count
    return min(count, int(free // (1.2 * own)))
