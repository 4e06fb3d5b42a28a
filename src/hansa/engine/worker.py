"""A worker process: it has a model of its own, reads the data it shares with the others, and does what it is asked.

It ends when the run ends, however that happens: the run holds the other end of its lifeline.
"""

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
from hansa.engine.requests import Arithmetic, Request, perform
from hansa.engine.shared_memory import Memory, PackedObject, Packer, unpack
from hansa.training import TaskLike
from hansa.training.random_state import repeatable

BOOT = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "told = json.loads(sys.argv[1]); sys.path[:] = told['path']; "
    "from hansa.engine.worker import serve; serve(told)"
)
"""What a new interpreter runs. It leaves Ctrl-C to the run from its first moment on."""

MESSAGE = struct.Struct("<BQQ")
"""All that goes through the socket: the number of a memory, the offset and the size of a skeleton in it."""

SETUP = 255
"""The number of the memory that holds what workers are told once; the others are slots."""

FORGET = 254
"""In its place: the run has ended, and another may come."""

ENVIRONMENT = {
    "HANSA_WORKER": "1",
    **dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS"),
        "1",
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class WorkerSetup:
    """What a worker is told once: the method, the task, and how numbers are made."""

    algorithm: Algorithm
    task: TaskLike
    dtype: torch.dtype
    arithmetic: Arithmetic
    devices: tuple[torch.device, ...] = (torch.device("cpu"),)


class WorkerState:
    """Where requests are done: a method, a task, and a model of one's own."""

    def __init__(self, packed: PackedObject, memory: Memory, number: int) -> None:
        setup: WorkerSetup = unpack(packed, [memory], copy=False)
        setup.arithmetic.apply()
        self.algorithm, self.task = setup.algorithm, setup.task
        repeatable(setup.devices)
        self.shell = setup.task.shell(setup.dtype, setup.devices[number % len(setup.devices)])

    def do(self, request: Request) -> Any:
        return perform(request, self.algorithm, self.task, self.shell)


def serve(told: Mapping[str, Any]) -> NoReturn:
    """Work until the run ends."""
    threading.Thread(target=_end_with_run, args=(told["lifeline"],), daemon=True).start()
    torch.set_num_interop_threads(1)
    wire = Connection(told["wire"])
    common = [Memory(descriptor) for descriptor in told["common"]]
    slots = [Memory(descriptor) for descriptor in told["slots"]]
    state: WorkerState | None = None
    while True:
        number, *where = MESSAGE.unpack(_receive(wire))
        packed = PackedObject(*where)
        if number == FORGET:
            state = None
            for memory in (*common, *slots):
                memory.unmap()
            gc.collect()
            continue
        if number == SETUP:
            state = None  # the old one's memory first
            state = _settle(wire, packed, Memory(reduction.recv_handle(wire), private=True), told["number"])
            continue
        assert state is not None
        slot = slots[number]
        answer = state.do(unpack(packed, [slot, *common], copy=False))
        # after the request: what the client remembered may lie in the slot and be part of the answer
        reply = Packer(slot, start=sum(packed)).pack(answer)
        wire.send_bytes(MESSAGE.pack(number, *reply))


def _settle(wire: Connection, packed: PackedObject, memory: Memory, number: int) -> WorkerState:
    """Take a setup. The answer is empty, or the traceback of what prevents it."""
    try:
        state = WorkerState(packed, memory, number)
    except Exception:
        wire.send_bytes(traceback.format_exc().encode())
        _end()
    wire.send_bytes(b"")
    return state


def _receive(wire: Connection) -> bytes:
    try:
        return wire.recv_bytes()
    except (EOFError, OSError):
        _end()


def _end_with_run(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os._exit(0)


def _end() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
