"""Worker processes: spawned (never forked), replaced when they die, reused between runs.

A worker exits when the run ends for any reason: the run holds the other end of its pipe.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from multiprocessing import Pipe, connection, reduction, spawn
from typing import Any, NamedTuple, NoReturn

import torch

from hansa.algorithm import Algorithm
from hansa.core.devices import use_device
from hansa.core.errors import check_integer
from hansa.core.types import Vector
from hansa.engine.requests import (
    Event,
    Job,
    JobDone,
    WorkerExited,
    WorkerGroup,
    WorkersUnsupported,
    execute,
)
from hansa.engine.shared_memory import CodeChecker, PackedObject, Packer, SharedMemory, TensorSpan, unpack_object
from hansa.training import TaskLike
from hansa.training.random_state import NumericSettings

BOOT = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "options = json.loads(sys.argv[1]); sys.path[:] = options['path']; "
    "from hansa.engine.processes import worker_main; worker_main(options)"
)
"""The program of a new interpreter. It ignores Ctrl-C from the start: the run handles it."""

MESSAGE = struct.Struct("<BQQ")
"""The message format of the pipe: the number of a slot, and the offset and size of a packed object in it."""

SETUP, RESET = 255, 254
"""Sent instead of a slot number: a setup follows, with its own memory; the run has ended, drop its data."""

ENVIRONMENT = dict.fromkeys(("HANSA_WORKER", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
                             "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")  # fmt: skip


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A handle to one worker. It has at most two jobs, one per slot; a slot is free once its answer is read."""

    popen: subprocess.Popen[bytes]
    pipe: connection.Connection
    slots: tuple[SharedMemory, SharedMemory]
    number: int = 0
    pending_setups: int = 0
    jobs: deque[Job] = field(default_factory=deque)
    slot: int = 0

    @property
    def ready(self) -> bool:
        return self.pending_setups == 0

    def send_setup(self, packed: PackedObject, memory: SharedMemory) -> None:
        self.pending_setups += 1
        with suppress(OSError):  # a dead worker is noticed when its answer is awaited
            self.pipe.send_bytes(MESSAGE.pack(SETUP, *packed))
            reduction.send_handle(self.pipe, memory.fd, self.popen.pid)

    def end(self) -> None:
        """End the process, by force if necessary, and free its resources."""
        self.pipe.close()
        try:
            self.popen.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        for slot in self.slots:
            slot.close()


class ProcessGroup(WorkerGroup):
    """Worker processes and the memory they share. One group can serve several runs, one after the other."""

    in_use = False

    def __init__(self) -> None:
        if os.name != "posix" or not hasattr(socket, "AF_UNIX"):
            raise WorkersUnsupported("worker processes need a POSIX system: they receive files by sockets")
        self.workers: list[WorkerProcess] = []
        self._shared = SharedMemory()
        self._spans: dict[int, TensorSpan] = {}
        self._setup: tuple[PackedObject, SharedMemory] | None = None
        self._close = weakref.finalize(self, _close, self.workers, self._shared)

    def set_up(
        self, algorithm: Algorithm, task: TaskLike, dtype: torch.dtype, devices: Sequence[torch.device] = ()
    ) -> None:
        """Send the algorithm and the task to all workers, through shared memory; devices are assigned in turn, and are
        the CPU if there are none."""
        memory = SharedMemory()
        chosen = tuple(devices) or (torch.device("cpu"),)
        try:
            packed = Packer(memory).pack(WorkerSetup(algorithm, task, dtype, NumericSettings.current(), chosen))
        except Exception as error:
            self.in_use = False
            raise WorkersUnsupported(_unpicklable(algorithm, task)) from error
        memory.unmap()
        self._setup = packed, memory
        for worker in self.workers:
            worker.send_setup(packed, memory)

    def reset(self) -> None:
        """Prepare for the next run: stop busy workers, have the others drop algorithm, task and data, free memory."""
        for worker in [worker for worker in self.workers if worker.jobs]:
            worker.popen.terminate()
            self.stop(worker)
        self._setup, self._spans = None, {}
        for worker in self.workers:
            with suppress(OSError):
                worker.pipe.send_bytes(MESSAGE.pack(RESET, 0, 0))
        for memory in (self._shared, *(slot for worker in self.workers for slot in worker.slots)):
            memory.clear()
        self.in_use = False

    def spawn(self) -> None:
        """Start one more worker; it is ready after some seconds."""
        pipe, worker_pipe = Pipe()
        slots = SharedMemory(), SharedMemory()
        numbers = {worker.number for worker in self.workers}
        number = next(number for number in itertools.count() if number not in numbers)
        memories = [self._shared.fd, *(slot.fd for slot in slots)]
        options = {"path": sys.path, "pipe": worker_pipe.fileno(), "number": number, "memories": memories}
        program = [os.fsdecode(spawn.get_executable()), "-c", BOOT, json.dumps(options)]
        environment, passed = {**os.environ, **ENVIRONMENT}, (worker_pipe.fileno(), *memories)
        popen = subprocess.Popen(program, stdin=subprocess.DEVNULL, pass_fds=passed, env=environment)
        worker_pipe.close()
        worker = WorkerProcess(popen, pipe, slots, number)
        self.workers.append(worker)
        if self._setup is not None:
            worker.send_setup(*self._setup)

    def stop(self, worker: WorkerProcess) -> None:
        self.workers.remove(worker)
        worker.end()

    def publish(self, vectors: Iterable[Vector]) -> None:
        self._spans = Packer(self._shared).write_shared(vectors)

    def submit(self, worker: WorkerProcess, job: Job) -> None:
        worker.slot ^= 1
        packed = Packer(worker.slots[worker.slot], spans=self._spans).pack(job.load_memory(job.request))
        worker.jobs.append(job)
        with suppress(OSError):
            worker.pipe.send_bytes(MESSAGE.pack(worker.slot, *packed))

    def wait(self) -> list[Event]:
        readable = connection.wait([worker.pipe for worker in self.workers])
        events = [self._receive(worker) for worker in self.workers if worker.pipe in readable]
        return [event for event in events if event is not None]

    def _receive(self, worker: WorkerProcess) -> Event | None:
        """Return the event of a worker's message; None for the answer to a setup that has succeeded or was replaced by
        a later one."""
        try:
            message = worker.pipe.recv_bytes()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                worker.popen.wait(timeout=5)
            return WorkerExited(worker, _exit_reason(worker.popen.returncode))
        if worker.ready:
            number, *packed = MESSAGE.unpack(message)
            answer = unpack_object(PackedObject(*packed), [worker.slots[number]], copy=True)
            return JobDone(worker, worker.jobs[0], answer)
        if message and worker.pending_setups == 1:
            return WorkerExited(worker, message.decode("utf-8", "replace"), cannot_start=True)
        worker.pending_setups -= 1
        return None

    def close(self) -> None:
        """End all workers and free their memory."""
        self._close()
        self._setup = None


def _close(workers: list[WorkerProcess], shared: SharedMemory) -> None:
    for worker in workers:  # signal all, then wait for each
        worker.popen.terminate()
    while workers:
        workers.pop().end()
    shared.close()


def _unpicklable(algorithm: Algorithm, task: TaskLike) -> str:
    """Return a message that names the component that cannot be pickled."""
    parts: dict[str, Any] = {"the algorithm": algorithm}
    parts |= {f"its {name}": value for name, value in getattr(task, "__dict__", {}).items()}
    for name, part in (*parts.items(), ("it", task)):
        if reason := CodeChecker().check(part):
            return f"{name} cannot be sent to another process ({reason})"
    return "it cannot be sent to another process"


def _exit_reason(code: int | None) -> str:
    """Describe how a process ended.

    >>> _exit_reason(-9)
    'killed by SIGKILL; out of memory?'
    """
    if code is None or code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"killed by {name}" + ("; out of memory?" if code == -signal.SIGKILL else "")


class WorkerSetup(NamedTuple):
    """The data that a worker receives once per run."""

    algorithm: Algorithm
    task: TaskLike
    dtype: torch.dtype
    settings: NumericSettings
    devices: tuple[torch.device, ...]

    def make_trainer(self, number: int) -> Any:
        """Prepare this process, and return the trainer of the worker of that number."""
        device = self.devices[number % len(self.devices)]
        self.settings.apply(device)
        use_device(device)
        return self.task.trainer(self.dtype, device)


def worker_main(options: Mapping[str, Any]) -> NoReturn:
    """The main loop of a worker process: execute requests until the run ends."""
    threading.Thread(target=_exit_with_run, args=(options["pipe"],), daemon=True).start()
    torch.set_num_interop_threads(1)
    pipe = connection.Connection(options["pipe"])
    shared, *slots = map(SharedMemory, options["memories"])
    setup: WorkerSetup | None = None
    trainer: Any = None
    while True:
        try:
            number, *location = MESSAGE.unpack(pipe.recv_bytes())
        except (EOFError, OSError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        packed = PackedObject(*location)
        if number == RESET:
            setup = trainer = None
            for memory in (shared, *slots):
                memory.unmap()
            gc.collect()
            continue
        if number == SETUP:
            setup = trainer = None  # frees the old one's memory first
            memory = SharedMemory(reduction.recv_handle(pipe), private=True)
            try:
                setup = unpack_object(packed, [memory], copy=False)
                trainer = setup.make_trainer(options["number"])
                pipe.send_bytes(b"")
            except Exception:
                pipe.send_bytes(traceback.format_exc().encode("utf-8", "replace"))
            continue
        assert setup is not None
        requests = [unpack_object(packed, [slots[number], shared], copy=False)]
        answer = execute(requests, setup.algorithm, setup.task, trainer).pop()
        requests.clear()
        # written after the request: the client's memory may lie in the slot and be part of the answer
        reply = Packer(slots[number], start=sum(packed)).pack(answer)
        pipe.send_bytes(MESSAGE.pack(number, *reply))


def _exit_with_run(descriptor: int) -> None:
    """Exit when the other end of the pipe is closed, also in the middle of a step."""
    hangup = select.poll()
    hangup.register(descriptor, 0)
    hangup.poll()
    os._exit(0)


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
        self._tokens: list[Token[workers | None]] = []

    @property
    def started(self) -> int:
        """The number of running processes."""
        return 0 if self._group is None else len(self._group.workers)

    def acquire(self) -> ProcessGroup | None:
        """Return the processes for one run, or None while another run uses them, which ends with `Pool.close`."""
        if self._group is None:
            self._group = ProcessGroup()
        elif self._group.in_use:
            return None
        self._group.in_use = True
        return self._group

    def close(self) -> None:
        """End the processes."""
        if self._group is not None:
            self._group.close()
        self._group = None

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
    with current_workers() or workers() as block:
        yield block
