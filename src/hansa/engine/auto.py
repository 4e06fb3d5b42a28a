"""Which engine a run gets. Results never depend on it: only the time they take does."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeAlias

import torch

from hansa.algorithm import Algorithm
from hansa.core.errors import check_integer, invalid_argument
from hansa.core.protocols import declared
from hansa.core.types import Vectors
from hansa.engine.pool import Kind, Pool, refuse_inside_worker
from hansa.engine.processes import Processes
from hansa.engine.requests import Recall, RecallExam, as_it_is, cost
from hansa.engine.serial import Engine, Serial
from hansa.engine.threads import trial
from hansa.engine.worker_group import NotShareable, StartError
from hansa.engine.worker_reuse import here
from hansa.local import Trainer
from hansa.rounds.messages import Report, WorkOrder
from hansa.training import TaskLike
from hansa.training.client_evaluation import Exam, Marks

log = logging.getLogger("hansa")

EngineFactory: TypeAlias = Callable[[Algorithm, TaskLike, torch.dtype, torch.device], Engine]
START = 2.0  # seconds until worker processes are at work
HANDOVER = 0.0003  # seconds of Python for an order, which no two threads can do at a time
LONG_STEP = 0.005  # seconds from which a step spends nearly all its time outside the interpreter's lock


def choose(
    workers: int | None, rounds: int, kind: Kind | None = None, devices: Sequence[torch.device] = ()
) -> EngineFactory:
    """The engine for a run of ``rounds`` rounds: serial for one worker, a pool for several, and for None the best.

    None begins serially and measures. When the rest of the run, at that pace, would take workers on all cores at least
    twice their start-up less time, they are started in the background and take over; so a small run stays serial.
    ``kind`` None means threads where steps leave the interpreter's lock (native ones) or data is on a GPU, processes
    otherwise. What cannot be sent to processes runs in threads if these are safe and worth while, or else serially,
    and a warning says so once. Several ``devices`` have a worker each, or more in turn. Within
    ``with hansa.workers(2):`` None means that number, and processes stay.
    """
    refuse_inside_worker()
    if workers is None and (staff := here()) is not None:
        workers = staff.count
    if workers is not None:
        check_integer("run", "workers", workers, "None uses all cores when that pays.")
    if kind not in (None, "process", "thread"):
        raise invalid_argument("run", "kind", kind, "None, 'process' or 'thread'")
    if workers is None and len(devices) > 1:
        workers = len(devices)
    if (cores() if workers is None else workers) == 1:
        return Serial
    return partial(Auto, workers=workers, rounds=rounds, kind=kind, devices=devices)


class Auto:
    """Serial at first, then a pool: from the beginning if ``workers`` is a number, when it pays if it is None."""

    def __init__(
        self,
        algorithm: Algorithm,
        task: TaskLike,
        dtype: torch.dtype,
        device: torch.device,
        *,
        workers: int | None = None,
        rounds: int = 1,
        kind: Kind | None = None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        self._devices = devices
        self._parts = (algorithm, task, dtype, device)
        self._workers, self._kind = workers, kind
        self._rounds, self._pace = rounds, Pace()
        self._open = True  # whether workers are still to be thought of
        self._pool: Pool | None = None
        self._staff_around = here()
        self._borrowed: Processes | None = None
        self._serial: Serial | None = Serial(*self._parts)

    def run(self, orders: Sequence[WorkOrder], recall: Recall = as_it_is) -> Iterator[Report]:
        """Reports of the serial engine, then of the pool as soon as that is there."""
        self._rounds -= 1
        self._staff(orders)
        done = 0
        while done < len(orders):
            if self._at_work():
                assert self._pool is not None
                yield from self._pool.run(orders[done:], recall)
                return
            assert self._serial is not None
            some = orders[done : done + self._serial.bundle.size(orders[done])]
            began = time.perf_counter()
            reports = list(self._serial.run(some, recall))
            for order in some:
                self._pace.note(order, (time.perf_counter() - began) / len(some))
            done += len(some)
            self._consider(orders, done)
            yield from reports

    def evaluate(self, vectors: Vectors) -> dict[str, float]:
        engine = self._pool if self._at_work() else self._serial
        assert engine is not None
        return engine.evaluate(vectors)

    def examine(self, exams: Sequence[Exam], recall: RecallExam) -> Iterator[list[Marks]]:
        engine = self._pool if self._at_work() else self._serial
        assert engine is not None
        return engine.examine(exams, recall)

    def close(self) -> None:
        if self._open:
            log.info("serial: workers would not have paid in so short a run")
        self._dismiss()

    def _dismiss(self) -> None:
        """End the pool; workers that were borrowed go back."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None
        if self._staff_around is not None and self._borrowed is not None:
            self._staff_around.give_back(self._borrowed)
        self._borrowed = None

    def _at_work(self) -> bool:
        """Whether the pool can take over; from then on the serial engine is not needed."""
        if self._pool is None:
            return False
        if self._serial is not None:
            try:
                if not self._pool.ready():
                    return False
            except StartError as problem:
                self._dismiss()
                say_once(f"{self._parts[1].name}: runs serially, without workers: {problem}")
                return False
            self._serial = None
        return True

    def _staff(self, orders: Sequence[WorkOrder]) -> None:
        """Where a number of workers was asked for: that many, but never more than there are orders in a round."""
        wanted = min(self._workers or 1, len(orders))
        if wanted < 2:
            return
        if self._open and self._tiny(orders):
            self._open = False
            log.info("serial: a client's steps take less time than handing them to a worker")
        elif self._open:
            self._hire(wanted)
        elif self._pool is not None and wanted > self._pool.workers:
            self._pool.widen(wanted)

    def _consider(self, orders: Sequence[WorkOrder], done: int) -> None:
        """Start workers once the work ahead is worth it."""
        workers = min(cores(), len(orders))
        if not self._open or self._workers is not None or workers == 1:
            return
        whole_round = sum(map(cost, orders))
        ahead = self._pace.seconds(sum(map(cost, orders[done:])) + max(0, self._rounds) * whole_round)
        staff = self._staff_around
        start = START if staff is None or staff.started < workers else 0.0
        if ahead * (1 - 1 / workers) >= max(2 * start, START / 4):
            self._hire(workers)

    def _tiny(self, orders: Sequence[WorkOrder]) -> bool:
        """Whether native steps are so few and short that threads would mostly wait for one another's interpreter."""
        algorithm, task, dtype, device = self._parts
        if self._kind is not None or device.type != "cpu" or self._serial is None:
            return False
        if not declared(self._serial.shell, Trainer, "releases_gil"):
            return False
        steps = sum(order.work.steps * len(order.clients) for order in orders) / len(orders)
        return steps * trial(algorithm, task, self._serial.shell, dtype).seconds < HANDOVER

    def _hire(self, workers: int) -> None:
        """Start a pool of the first kind that can take the task."""
        self._open = False
        reasons = []
        for kind in self._kinds():
            try:
                if kind == "process" and self._staff_around is not None:
                    self._borrowed = self._staff_around.borrow()
                self._pool = Pool(*self._parts, workers=workers, kind=kind, crew=self._borrowed, devices=self._devices)
                if self._workers is not None:
                    self._pool.start()
            except (NotShareable, StartError) as problem:
                self._dismiss()
                reasons.append(str(problem))
                continue
            for reason in reasons:
                log.info("%s: %s", self._parts[1].name, reason)
            log.info("%d workers: %s", workers, "threads" if kind == "thread" else "processes")
            return
        say_once(f"{self._parts[1].name}: runs serially, without workers: {'; '.join(reasons)}")

    def _kinds(self) -> Iterator[Kind]:
        algorithm, task, dtype, device = self._parts
        assert self._serial is not None
        if self._kind is not None:
            yield self._kind
        elif device.type != "cpu" or declared(self._serial.shell, Trainer, "releases_gil"):
            yield from ("thread", "process")
        else:
            yield "process"
            step = self._pace.step or trial(algorithm, task, self._serial.shell, dtype).seconds
            if step >= LONG_STEP:
                yield "thread"


@lru_cache(maxsize=1000)
def say_once(what: str) -> None:
    """Warn of something; of the same thing once."""
    log.warning("%s", what)


class Pace:
    """How fast work was done. A short first cohort does not count: much is made and loaded on the way."""

    def __init__(self) -> None:
        self._cohorts, self._cost, self._steps, self._seconds = 0, 0.0, 0, 0.0

    def note(self, order: WorkOrder, seconds: float) -> None:
        """An order took this long."""
        self._cohorts += 1
        if self._cohorts > 1 or seconds > START / 2:
            self._cost += cost(order)
            self._steps += order.work.steps * len(order.clients)
            self._seconds += seconds

    def seconds(self, cost: float) -> float:
        """How long that much work takes; 0 while there is nothing to judge by."""
        return self._seconds * cost / self._cost if self._cost else 0.0

    @property
    def step(self) -> float:
        """Seconds a step."""
        return self._seconds / self._steps if self._steps else 0.0


def cores() -> int:
    """The cores this process may use: those it is bound to, within the quota of its container."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(count, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no quota: "max", or no control groups
        return count
