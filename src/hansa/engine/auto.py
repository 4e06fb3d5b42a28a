"""The automatic choice of an engine, and engines by name. Results do not depend on the engine."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from typing import TypeAlias

import torch

from hansa.algorithm import Algorithm, participants_of
from hansa.core.devices import available_cores, release_cached_memory
from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.engine.pool import Pool, WorkerKind, refuse_inside_worker
from hansa.engine.processes import current_workers
from hansa.engine.ray_pool import RayPool
from hansa.engine.requests import WorkerStartError, WorkersUnsupported
from hansa.engine.serial import Engine, Loopback, Serial
from hansa.engine.threads import probe_step
from hansa.local import BaseTrainer
from hansa.pace import buffered
from hansa.training import TaskLike

log = logging.getLogger("hansa")

EngineFactory: TypeAlias = Callable[[Algorithm, TaskLike, torch.dtype, torch.device], Engine]
START_SECONDS = 2.0  # until worker processes are ready
HANDOVER_SECONDS = 0.0003  # Python time per order, under the interpreter lock
LONG_STEP_SECONDS = 0.005  # a longer step spends nearly all its time without the interpreter lock


def auto_engine(
    workers: int | None, rounds: int, kind: WorkerKind | None = None, devices: Sequence[torch.device] = ()
) -> EngineFactory:
    """Choose the engine of a run: serial for one worker, a pool for several.

    With ``workers=None`` the time of a step is measured: if workers on all cores would save at least twice their
    start-up time in all rounds, they are started. A task that cannot be sent to processes runs in threads if these are
    safe and fast enough, or else serially with a warning.

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
    return partial(_choose_engine, workers=workers, rounds=rounds, kind=kind, devices=devices)


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


def _choose_engine(
    algorithm: Algorithm,
    task: TaskLike,
    dtype: torch.dtype,
    device: torch.device,
    *,
    workers: int | None,
    rounds: int,
    kind: WorkerKind | None,
    devices: Sequence[torch.device],
) -> Engine:
    """Return the engine of a run: a pool of the first kind of worker that supports the task, or the serial engine."""
    serial = Serial(algorithm, task, dtype, device)
    requests, clients = _round_size(algorithm, task.population.count)
    count = min(available_cores() if workers is None else workers, requests)
    if count < 2:
        return serial
    releases_lock = with_defaults(serial.trainer, BaseTrainer).releases_gil

    @cache
    def client_seconds() -> tuple[float, float]:
        """Return the time of a step, and of the steps of a client."""
        sizes = task.population.samples[:100]
        works = algorithm.local.draw_works(range(len(sizes)), sizes, Key(0))
        _, seconds = probe_step(algorithm, task, serial.trainer, dtype)
        return seconds, seconds * sum(work.steps for work in works) / len(works)

    block = current_workers()
    if workers is None:
        required = START_SECONDS / 4 if block is not None and block.started >= count else 2 * START_SECONDS
        if rounds * clients * client_seconds()[1] * (1 - 1 / count) < required:
            log.info("serial: workers would not save time in this short run")
            return serial
    elif kind is None and device.type == "cpu" and releases_lock and client_seconds()[1] < HANDOVER_SECONDS:
        log.info("serial: a client's steps take less time than handing them to a worker")
        return serial

    def kinds() -> Iterator[WorkerKind]:
        if kind is not None:
            yield kind
        elif len(set(devices)) > 1 and device.type != "cpu":
            yield from ("process", "thread")  # in one process the interpreter lock would let them start work in turn
        elif device.type != "cpu" or releases_lock:
            yield from ("thread", "process")
        else:
            yield "process"
            if client_seconds()[0] >= LONG_STEP_SECONDS:
                yield "thread"

    reasons = []
    for chosen in kinds():
        group = block.acquire() if chosen == "process" and block is not None else None
        pool = None
        try:
            pool = Pool(algorithm, task, dtype, device, workers=count, kind=chosen, group=group, devices=devices)
            pool.wait_until_ready()
        except (WorkersUnsupported, WorkerStartError) as error:
            if pool is not None:
                pool.close()
            reasons.append(str(error))
            continue
        for reason in reasons:
            log.info("%s: %s", task.name, reason)
        log.info("%d workers: %s", count, "threads" if chosen == "thread" else "processes")
        weakref.finalize(serial, release_cached_memory, device)
        return pool
    _warn_once(f"{task.name}: runs serially, without workers: {'; '.join(reasons)}")
    return serial


def _round_size(algorithm: Algorithm, population: int) -> tuple[int, int]:
    """Return how many requests a round has, and how many clients train in it, as far as is known before it."""
    participants = participants_of(algorithm.sampler, population) or population
    if algorithm.local.mixing is not None:
        return min(len(algorithm.local.mixing.cluster_lists()), participants), population
    if isinstance(algorithm.pace, buffered):
        participants = algorithm.pace.updates(algorithm.pace.concurrency or participants)
    return participants, participants


@lru_cache(maxsize=1000)
def _warn_once(message: str) -> None:
    """Log each distinct warning once."""
    log.warning("%s", message)
