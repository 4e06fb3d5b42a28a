"""Worker processes: spawned (never forked), replaced when they die, reused between runs."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from multiprocessing import Pipe, connection, reduction, spawn
from typing import Any

import torch

from hansa.algorithm import Algorithm
from hansa.core.errors import check_integer
from hansa.core.types import Vector
from hansa.engine.requests import NumericSettings, divided
from hansa.engine.shared_memory import CodePacker, PackedObject, Packer, SharedMemory, TensorPlace, unpack_object
from hansa.engine.worker import BOOT, ENVIRONMENT, MESSAGE, RESET, SETUP, WorkerSetup
from hansa.engine.worker_group import Event, Job, JobDone, WorkerExited, WorkerReady, WorkersUnsupported
from hansa.rounds.messages import WorkOrder
from hansa.training import TaskLike

POLL_SECONDS, STOPPED_POLLS = 1.0, 5
"""Seconds between checks of silent workers, and the checks after which a stopped one is replaced."""


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A handle to one worker. It has at most two jobs, one per slot; a slot is free once its answer is read."""

    popen: subprocess.Popen[bytes]
    pipe: connection.Connection
    lifeline: int
    slots: tuple[SharedMemory, SharedMemory]
    number: int = 0
    pending_setups: int = 0
    jobs: deque[Job] = field(default_factory=deque)
    slot: int = 0
    stopped_polls: int = 0

    @property
    def ready(self) -> bool:
        return self.pending_setups == 0

    def send_setup(self, packed: PackedObject, memory: SharedMemory) -> None:
        self.pending_setups += 1
        with suppress(OSError):  # a dead worker is noticed when its answer is awaited
            self.pipe.send_bytes(MESSAGE.pack(SETUP, *packed))
            reduction.send_handle(self.pipe, memory.fd, self.popen.pid)

    def is_stopped(self) -> bool:
        """Whether the process is stopped by a signal (SIGSTOP, a debugger)."""
        if not hasattr(os, "waitid"):
            return False
        try:
            status = os.waitid(os.P_PID, self.popen.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return status is not None and status.si_code in (os.CLD_STOPPED, os.CLD_TRAPPED)

    def end(self) -> None:
        """End the process, by force if necessary, and free its resources."""
        self.pipe.close()
        os.close(self.lifeline)
        try:
            self.popen.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        for slot in self.slots:
            slot.close()


class ProcessGroup:
    """Worker processes and the memory they share. One group can serve several runs, one after the other.

    ``with ProcessGroup(2) as group: Pool(..., group=group)``; a `Pool` without a group has its own.
    """

    jobs_per_worker = 2

    def __init__(self, workers: int = 0) -> None:
        if os.name != "posix" or not hasattr(socket, "AF_UNIX"):
            raise WorkersUnsupported("worker processes need a POSIX system: they receive files by sockets")
        self.workers: list[WorkerProcess] = []
        self._order_memory, self._evaluation_memory = SharedMemory(), SharedMemory()
        self._published: dict[str, dict[int, TensorPlace]] = {}
        self._setup: tuple[PackedObject, SharedMemory] | None = None
        self._close = weakref.finalize(self, _close, self.workers, (self._order_memory, self._evaluation_memory))
        for _ in range(workers):
            self.spawn()

    def set_up(
        self, algorithm: Algorithm, task: TaskLike, dtype: torch.dtype, devices: Sequence[torch.device] = ()
    ) -> None:
        """Send the algorithm and the task to all workers, through shared memory; devices are assigned in turn, and are
        the CPU if there are none."""
        memory = SharedMemory()
        try:
            chosen = tuple(devices) or (torch.device("cpu"),)
            setup = WorkerSetup(algorithm, task, dtype, NumericSettings.current(), chosen)
            packed = CodePacker(memory).pack(setup)
        except Exception as error:
            raise WorkersUnsupported(_unpicklable(algorithm, task, error)) from error
        memory.unmap()
        self._setup = packed, memory
        for worker in self.workers:
            worker.send_setup(packed, memory)

    def reset(self) -> None:
        """Prepare for the next run: stop busy workers, have the others drop algorithm, task and data, free memory."""
        for worker in list(self.workers):
            if worker.jobs:
                self.stop(worker, at_once=True)
        self._setup, self._published = None, {}
        for worker in self.workers:
            with suppress(OSError):
                worker.pipe.send_bytes(MESSAGE.pack(RESET, 0, 0))
        slots = (slot for worker in self.workers for slot in worker.slots)
        for memory in (self._order_memory, self._evaluation_memory, *slots):
            memory.clear()

    def spawn(self) -> None:
        """Start one more worker; it is ready after some seconds."""
        pipe, worker_pipe = Pipe()
        worker_lifeline, lifeline = os.pipe()
        slots = SharedMemory(), SharedMemory()
        numbers = {worker.number for worker in self.workers}
        number = next(number for number in itertools.count() if number not in numbers)
        shared = (self._order_memory, self._evaluation_memory, *slots)
        options = {
            "path": sys.path,
            "pipe": worker_pipe.fileno(),
            "lifeline": worker_lifeline,
            "number": number,
            "shared": [self._order_memory.fd, self._evaluation_memory.fd],
            "slots": [slot.fd for slot in slots],
        }
        popen = subprocess.Popen(
            [os.fsdecode(spawn.get_executable()), "-c", BOOT, json.dumps(options)],
            stdin=subprocess.DEVNULL,
            pass_fds=(worker_pipe.fileno(), worker_lifeline, *(memory.fd for memory in shared)),
            env={**os.environ, **ENVIRONMENT},
        )
        worker_pipe.close()
        os.close(worker_lifeline)
        worker = WorkerProcess(popen, pipe, lifeline, slots, number)
        self.workers.append(worker)
        if self._setup is not None:
            worker.send_setup(*self._setup)

    def stop(self, worker: WorkerProcess, *, at_once: bool = False) -> None:
        """End one worker and remove it."""
        self.workers.remove(worker)
        if at_once:
            worker.popen.terminate()
        worker.end()

    def publish(self, kind: type, vectors: Iterable[Vector]) -> None:
        number = 1 if kind is WorkOrder else 2
        packer = Packer(self._order_memory if kind is WorkOrder else self._evaluation_memory)
        self._published[kind.__name__] = {id(v): packer.write_tensor(v, number) for v in _unique(vectors)}

    def divide(self, order: WorkOrder, task: TaskLike, workers: int) -> list[WorkOrder]:
        return divided(task, order, workers)

    def submit(self, worker: WorkerProcess, job: Job) -> None:
        worker.slot ^= 1
        published = self._published.get(type(job.request).__name__)
        packed = Packer(worker.slots[worker.slot], placed=published).pack(job.load_request())
        worker.jobs.append(job)
        with suppress(OSError):
            worker.pipe.send_bytes(MESSAGE.pack(worker.slot, *packed))

    def wait(self, timeout: float | None = None) -> list[Event]:
        while True:
            poll = POLL_SECONDS if timeout is None else timeout
            readable = connection.wait([worker.pipe for worker in self.workers], poll)
            events: list[Event] = [self._receive(worker) for worker in self.workers if worker.pipe in readable]
            if not events and timeout is None:
                events = self._replace_stopped()
            if events or timeout is not None:
                return events

    def _replace_stopped(self) -> list[Event]:
        """Give up workers that were stopped at several consecutive checks. Checks are counted, not seconds: if Ctrl-Z
        stops the whole group, the run does not check either."""
        events: list[Event] = []
        for worker in self.workers:
            worker.stopped_polls = worker.stopped_polls + 1 if worker.is_stopped() else 0
            if worker.stopped_polls >= STOPPED_POLLS:
                worker.popen.kill()
                worker.popen.wait()
                cause = f"stopped by a signal for {POLL_SECONDS * STOPPED_POLLS:g} s"
                events.append(WorkerExited(worker, cause, not_at_fault=True))
        return events

    def _receive(self, worker: WorkerProcess) -> Event:
        try:
            message = worker.pipe.recv_bytes()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                worker.popen.wait(timeout=5)
            return WorkerExited(worker, _exit_reason(worker.popen.returncode))
        if not worker.ready:
            if message:  # a failed setup is ignored if a later one has replaced it
                superseded = worker.pending_setups > 1
                return WorkerExited(worker, message.decode(), cannot_start=not superseded, not_at_fault=superseded)
            worker.pending_setups -= 1
            return WorkerReady(worker)
        number, *packed = MESSAGE.unpack(message)
        return JobDone(worker, unpack_object(PackedObject(*packed), [worker.slots[number]], copy=True))

    def close(self) -> None:
        """End all workers and free their memory."""
        self._close()
        self._setup = None

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _close(workers: list[WorkerProcess], memories: Iterable[SharedMemory]) -> None:
    for worker in workers:  # signal all, then wait for each
        worker.popen.terminate()
    while workers:
        workers.pop().end()
    for memory in memories:
        memory.close()


def _unpicklable(algorithm: Algorithm, task: TaskLike, error: Exception) -> str:
    """Return a message that names the component that cannot be pickled."""
    components: list[tuple[str, Any]] = [("the algorithm", algorithm)]
    components += [(f"its {name}", value) for name, value in getattr(task, "__dict__", {}).items()]
    for name, component in components:
        try:
            CodePacker(SharedMemory()).pack(component)
        except Exception as reason:
            return f"{name} cannot be sent to another process ({_first_line(reason)})"
    return f"it cannot be sent to another process ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _unique(vectors: Iterable[Vector]) -> list[Vector]:
    return list({id(vector): vector for vector in vectors}.values())


def _exit_reason(code: int | None) -> str:
    """Describe how a process ended.

    >>> _exit_reason(-9)
    'killed by SIGKILL; out of memory?'
    """
    if code is None or code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"killed by {name}" + ("; out of memory?" if code == -signal.SIGKILL else "")


_current: ContextVar[workers | None] = ContextVar("hansa.workers", default=None)


class workers:
    """Keep worker processes between runs: the runs in a ``with`` block share them, and they end with the block.

    A run that does not set its own number of workers uses ``count``. Results do not depend on it. Between two runs the
    workers drop the data of the last one. `hansa.compare`, several seeds and sweeps keep their workers automatically.

    Args:
        count: The number of processes; None starts them only when that saves time, as outside the block.

    >>> with workers(2) as group:
    ...     group.count, current_workers() is group
    (2, True)
    """

    def __init__(self, count: int | None = None) -> None:
        if count is not None:
            check_integer("workers", "count", count, "None uses all cores when that saves time.")
        self.count = count
        self._group: ProcessGroup | None = None
        self._in_use = False
        self._tokens: list[Token[workers | None]] = []

    @property
    def started(self) -> int:
        """The number of running processes."""
        return 0 if self._group is None else len(self._group.workers)

    def acquire(self) -> ProcessGroup | None:
        """Return the processes for one run, or None while another run uses them."""
        if self._in_use:
            return None
        if self._group is None:
            self._group = ProcessGroup()
        self._in_use = True
        return self._group

    def release(self, group: ProcessGroup) -> None:
        """Return the processes after a run."""
        if group is self._group:
            self._in_use = False

    def close(self) -> None:
        """End the processes."""
        if self._group is not None:
            self._group.close()
        self._group, self._in_use = None, False

    def __enter__(self) -> workers:
        self._tokens.append(_current.set(self))
        return self

    def __exit__(self, *error: object) -> None:
        _current.reset(self._tokens.pop())
        if not self._tokens:
            self.close()


def current_workers() -> workers | None:
    """Return the innermost `workers` block that is open."""
    return _current.get()


@contextmanager
def reuse_workers() -> Iterator[workers]:
    """Open a `workers` block, or use the one that is open."""
    block = current_workers()
    if block is not None:
        yield block
        return
    with workers() as block:
        yield block
