"""The main loop of a worker process. It exits when the run ends for any reason: the run holds the other end of its
lifeline, a pipe."""

from __future__ import annotations

import gc
import os
import struct
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from hansa.algorithm import Algorithm
from hansa.core.devices import use_device
from hansa.engine.requests import NumericSettings, Request, execute
from hansa.engine.shared_memory import PackedObject, Packer, SharedMemory, unpack_object
from hansa.training import TaskLike

BOOT = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "options = json.loads(sys.argv[1]); sys.path[:] = options['path']; "
    "from hansa.engine.worker import worker_main; worker_main(options)"
)
"""The program of a new interpreter. It ignores Ctrl-C from the start: the run handles it."""

MESSAGE = struct.Struct("<BQQ")
"""The message format of the pipe: the number of a memory, and the offset and size of a packed object in it."""

SETUP = 255
"""Sent instead of a slot number: a setup follows, with its own memory."""

RESET = 254
"""Sent instead of a slot number: the run has ended; drop its data."""

ENVIRONMENT = {
    "HANSA_WORKER": "1",
    **dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS"),
        "1",
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class WorkerSetup:
    """The data that a worker receives once per run."""

    algorithm: Algorithm
    task: TaskLike
    dtype: torch.dtype
    settings: NumericSettings
    devices: tuple[torch.device, ...] = (torch.device("cpu"),)


class WorkerState:
    """The algorithm, the task and the trainer of a worker."""

    def __init__(self, packed: PackedObject, memory: SharedMemory, number: int) -> None:
        setup: WorkerSetup = unpack_object(packed, [memory], copy=False)
        setup.settings.apply()
        self.algorithm, self.task = setup.algorithm, setup.task
        device = setup.devices[number % len(setup.devices)]
        use_device(device)
        self.trainer = setup.task.trainer(setup.dtype, device)

    def execute(self, request: Request) -> Any:
        return execute(request, self.algorithm, self.task, self.trainer)


def worker_main(options: Mapping[str, Any]) -> NoReturn:
    """Execute requests until the run ends."""
    threading.Thread(target=_exit_with_run, args=(options["lifeline"],), daemon=True).start()
    torch.set_num_interop_threads(1)
    pipe = Connection(options["pipe"])
    shared = [SharedMemory(fd) for fd in options["shared"]]
    slots = [SharedMemory(fd) for fd in options["slots"]]
    state: WorkerState | None = None
    while True:
        number, *location = MESSAGE.unpack(_receive(pipe))
        packed = PackedObject(*location)
        if number == RESET:
            state = None
            for memory in (*shared, *slots):
                memory.unmap()
            gc.collect()
            continue
        if number == SETUP:
            state = None  # frees the old one's memory first
            state = _set_up(pipe, packed, SharedMemory(reduction.recv_handle(pipe), private=True), options["number"])
            continue
        assert state is not None
        slot = slots[number]
        answer = state.execute(unpack_object(packed, [slot, *shared], copy=False))
        # written after the request: the client's memory may lie in the slot and be part of the answer
        reply = Packer(slot, start=sum(packed)).pack(answer)
        pipe.send_bytes(MESSAGE.pack(number, *reply))


def _set_up(pipe: Connection, packed: PackedObject, memory: SharedMemory, number: int) -> WorkerState:
    """Build the state and answer with nothing, or with the traceback if that fails."""
    try:
        state = WorkerState(packed, memory, number)
    except Exception:
        pipe.send_bytes(traceback.format_exc().encode("utf-8", "surrogateescape"))
        _exit()
    pipe.send_bytes(b"")
    return state


def _receive(pipe: Connection) -> bytes:
    try:
        return pipe.recv_bytes()
    except (EOFError, OSError):
        _exit()


def _exit_with_run(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os._exit(0)


def _exit() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
