"""The automatic choice of an engine, and engines by name. Results do not depend on the engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import TypeAlias

import torch

from hansa.algorithm import Algorithm
from hansa.core.devices import available_cores, release_cached_memory
from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.core.protocols import with_defaults
from hansa.core.types import Vectors
from hansa.engine.pool import Pool, WorkerKind, refuse_inside_worker
from hansa.engine.processes import current_workers
from hansa.engine.ray_pool import RayPool
from hansa.engine.requests import (
    LoadEvaluationMemory,
    LoadMemory,
    WorkerStartError,
    WorkersUnsupported,
    count_requests,
    estimated_cost,
    unchanged,
)
from hansa.engine.serial import BaseEngine, Engine, Loopback, Serial
from hansa.engine.threads import probe_step
from hansa.local import BaseTrainer
from hansa.rounds.messages import Report, WorkOrder
from hansa.training import TaskLike
from hansa.training.evaluation import ClientMetrics, EvaluationJob

log = logging.getLogger("hansa")

EngineFactory: TypeAlias = Callable[[Algorithm, TaskLike, torch.dtype, torch.device], Engine]
START_SECONDS = 2.0  # until worker processes are ready
HANDOVER_SECONDS = 0.0003  # Python time per order, under the interpreter lock
LONG_STEP_SECONDS = 0.005  # a longer step spends nearly all its time without the interpreter lock


def auto_engine(
    workers: int | None, rounds: int, kind: WorkerKind | None = None, devices: Sequence[torch.device] = ()
) -> EngineFactory:
    """Choose the engine of a run: serial for one worker, a pool for several.

    With ``workers=None`` the run starts serially and measures its speed. If workers on all cores would save at least
    twice their start-up time, they are started in the background and take over at the beginning of a round. A task that
    cannot be sent to processes runs in threads if these are safe and fast enough, or else serially with a warning.

    Args:
        workers: The number of workers; None chooses it, or uses that of an enclosing `workers` block. On accelerators
            it is one per device.
        rounds: The number of rounds of the run.
        kind: ``"process"`` or ``"thread"``; None uses threads for native training and for one GPU, else processes, of
            which each has one of several GPUs.
        devices: Devices, assigned to workers in turn.
    """
    refuse_inside_worker()
    if workers is None and (block := current_workers()) is not None:
        workers = block.count
    if workers is not None:
        check_integer("run", "workers", workers, "None uses all cores when that saves time.")
    if kind not in (None, "process", "thread"):
        raise invalid_argument("run", "kind", kind, "None, 'process' or 'thread'")
    if workers is None and (len(devices) > 1 or any(device.type != "cpu" for device in devices)):
        workers = len(devices)  # one per accelerator: more compete for it, and share its memory
    if (available_cores() if workers is None else workers) == 1:
        return Serial
    return partial(AutoEngine, workers=workers, rounds=rounds, kind=kind, devices=devices)


def build_engine(
    kind: str,
    workers: int | None = None,
    rounds: int = 1,
    devices: Sequence[torch.device] = (),
    address: str | None = None,
    gpus: float | None = None,
) -> EngineFactory:
    """Return the factory of an engine by its name in a configuration, with the options of a run and of its ``engine``
    section.

    >>> build_engine("serial") is Serial
    True
    """
    if kind == "pool":
        return auto_engine(workers, rounds, devices=devices)
    if kind == "ray":
        return partial(RayPool, workers=workers, address=address, gpus=gpus)
    if kind in ("serial", "loopback"):
        return Serial if kind == "serial" else Loopback
    raise HansaError(f"engine: {kind}: the clients are at sites. Start this configuration with `hansa serve`.")


class AutoEngine(BaseEngine):
    """Serial at first, then a pool: from the first round if ``workers`` is a number, when it saves time if None."""

    def __init__(
        self,
        algorithm: Algorithm,
        task: TaskLike,
        dtype: torch.dtype,
        device: torch.device,
        *,
        workers: int | None = None,
        rounds: int = 1,
        kind: WorkerKind | None = None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        self._arguments, self._devices = (algorithm, task, dtype, device), devices
        self._workers, self._kind, self._rounds = workers, kind, rounds
        self._undecided = True  # whether workers may still be started
        self._seconds_per_cost = math.inf  # of the fastest round so far: the first one includes one-time work
        self._pool: Pool | None = None
        self._block = current_workers()
        self._serial: Serial | None = Serial(*self._arguments)

    def run(self, orders: Sequence[WorkOrder], load_memory: LoadMemory = unchanged) -> Iterator[Report]:
        """Yield the reports of the pool if that is ready when the round begins, otherwise of the serial engine."""
        self._rounds -= 1
        if self._workers is not None:
            self._start_requested(orders, min(self._workers, count_requests(orders)))
        engine = self._engine()
        if not isinstance(engine, Serial):
            yield from engine.run(orders, load_memory)
            return
        seconds_before = engine.seconds
        yield from engine.run(orders, load_memory)
        if self._undecided and self._workers is None and orders:
            self._start_if_worthwhile(orders, engine.seconds - seconds_before)

    def evaluate(self, vectors: Vectors) -> dict[str, float]:
        return self._engine().evaluate(vectors)

    def evaluate_clients(
        self, requests: Sequence[EvaluationJob], load_memory: LoadEvaluationMemory
    ) -> Iterator[list[ClientMetrics]]:
        return self._engine().evaluate_clients(requests, load_memory)

    def close(self) -> None:
        if self._undecided:
            log.info("serial: workers would not have saved time in this short run")
        self._close_pool()

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def _engine(self) -> Serial | Pool:
        """Return the pool once all of its workers have started; from then on the serial engine is dropped."""
        if self._serial is None:
            assert self._pool is not None
            return self._pool
        try:
            if self._pool is None or not self._pool.ready():
                return self._serial
        except WorkerStartError as error:
            self._close_pool()
            _warn_once(f"{self._arguments[1].name}: runs serially, without workers: {error}")
            return self._serial
        self._serial = None
        release_cached_memory(self._arguments[3])
        return self._pool

    def _start_requested(self, orders: Sequence[WorkOrder], workers: int) -> None:
        """Start the requested number of workers, but at most one per order of a round."""
        if workers < 2:
            return
        if self._undecided:
            self._undecided = False
            if self._too_short(orders):
                log.info("serial: a client's steps take less time than handing them to a worker")
            else:
                self._start_pool(workers)
        elif self._pool is not None and workers > self._pool.workers:
            self._pool.grow(workers)

    def _start_if_worthwhile(self, orders: Sequence[WorkOrder], seconds: float) -> None:
        """Start workers on all cores if the remaining rounds, estimated by those so far, are long enough."""
        cost = sum(map(estimated_cost, orders))
        self._seconds_per_cost = min(self._seconds_per_cost, seconds / max(1.0, cost))
        workers = min(available_cores(), count_requests(orders))
        remaining = max(0, self._rounds) * cost * self._seconds_per_cost
        started = self._block is not None and self._block.started >= workers
        required = max(0.0 if started else 2 * START_SECONDS, START_SECONDS / 4)
        if workers > 1 and remaining * (1 - 1 / workers) >= required:
            self._start_pool(workers)

    def _too_short(self, orders: Sequence[WorkOrder]) -> bool:
        """Whether native steps are so few and short that threads would mostly wait for the interpreter lock."""
        if self._kind is not None or self._arguments[3].type != "cpu" or not self._releases_gil():
            return False
        steps = sum(work.steps for order in orders for work in order.works) / count_requests(orders)
        return steps * self._step_seconds() < HANDOVER_SECONDS

    def _releases_gil(self) -> bool:
        assert self._serial is not None
        return with_defaults(self._serial.trainer, BaseTrainer).releases_gil

    def _step_seconds(self) -> float:
        assert self._serial is not None
        algorithm, task, dtype, _ = self._arguments
        _, seconds = probe_step(algorithm, task, self._serial.trainer, dtype)
        return seconds

    def _start_pool(self, workers: int) -> None:
        """Start a pool of the first kind of worker that supports the task."""
        self._undecided = False
        task, reasons = self._arguments[1], []
        for kind in self._worker_kinds():
            try:
                group = self._block.acquire() if kind == "process" and self._block is not None else None
                self._pool = Pool(*self._arguments, workers=workers, kind=kind, group=group, devices=self._devices)
                if self._workers is not None:
                    self._pool.wait_until_ready()
            except (WorkersUnsupported, WorkerStartError) as error:
                self._close_pool()
                reasons.append(str(error))
            else:
                for reason in reasons:
                    log.info("%s: %s", task.name, reason)
                log.info("%d workers: %s", workers, "threads" if kind == "thread" else "processes")
                return
        _warn_once(f"{task.name}: runs serially, without workers: {'; '.join(reasons)}")

    def _worker_kinds(self) -> Iterator[WorkerKind]:
        device = self._arguments[3]
        if self._kind is not None:
            yield self._kind
        elif len(set(self._devices)) > 1 and device.type != "cpu":
            yield from ("process", "thread")  # in one process the interpreter lock would let them start work in turn
        elif device.type != "cpu" or self._releases_gil():
            yield from ("thread", "process")
        else:
            yield "process"
            if self._step_seconds() >= LONG_STEP_SECONDS:
                yield "thread"


@lru_cache(maxsize=1000)
def _warn_once(message: str) -> None:
    """Log each distinct warning once."""
    log.warning("%s", message)
