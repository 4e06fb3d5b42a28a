"""Worker processes as the run sees them: started afresh (never forked), given work, replaced when they die."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe, connection, reduction, spawn
from typing import Any

import torch

from hansa.algorithm import Algorithm
from hansa.core.devices import CPU
from hansa.core.types import Vector
from hansa.engine.requests import Arithmetic
from hansa.engine.shared_memory import CodePacker, Memory, PackedObject, Packer, TensorPlace, unpack
from hansa.engine.worker import BOOT, ENVIRONMENT, FORGET, MESSAGE, SETUP, WorkerSetup
from hansa.engine.worker_group import Answered, Event, Gone, Job, NotShareable, Ready
from hansa.rounds.messages import WorkOrder
from hansa.training import TaskLike

TICK, LOOKS = 1.0, 5
"""Seconds between looks at workers from whom nothing is heard, and the looks after which a stopped one is replaced."""


@dataclass(slots=True, eq=False)
class Process:
    """One worker's parent end. It has two slots and at most two jobs: a slot is free again once its answer is read."""

    popen: subprocess.Popen[bytes]
    wire: connection.Connection
    lifeline: int
    slots: tuple[Memory, Memory]
    number: int = 0
    setups: int = 0
    jobs: deque[Job] = field(default_factory=deque)
    turn: int = 0
    stopped: int = 0

    @property
    def ready(self) -> bool:
        """Whether it has taken all it was told."""
        return self.setups == 0

    def tell(self, packed: PackedObject, memory: Memory) -> None:
        """WorkerSetup the worker."""
        self.setups += 1
        with suppress(OSError):  # that it has died is noticed when its answer is awaited
            self.wire.send_bytes(MESSAGE.pack(SETUP, *packed))
            reduction.send_handle(self.wire, memory.descriptor, self.popen.pid)

    def stands_still(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP, a debugger) and it has not gone on since."""
        if not hasattr(os, "waitid"):
            return False
        try:
            found = os.waitid(os.P_PID, self.popen.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return found is not None and found.si_code in (os.CLD_STOPPED, os.CLD_TRAPPED)

    def end(self) -> None:
        """End the worker, at once and whatever it does, and free what it held."""
        self.wire.close()
        os.close(self.lifeline)
        try:
            self.popen.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        for slot in self.slots:
            slot.close()


class Processes:
    """Worker processes and the memory they share. Runs can use them one after the other: their start takes seconds.

    ``with Processes(2) as crew: Pool(..., crew=crew)``; a `Pool` that is given none has its own.
    """

    ahead = 2

    def __init__(self, workers: int = 0) -> None:
        if os.name != "posix":
            raise NotShareable("worker processes need a POSIX system")
        self.members: list[Process] = []
        self._round, self._exam = Memory(), Memory()
        self._placed: dict[str, dict[int, TensorPlace]] = {}
        self._setup: tuple[PackedObject, Memory] | None = None
        self._close = weakref.finalize(self, _close, self.members, (self._round, self._exam))
        for _ in range(workers):
            self.hire()

    def set_up(
        self, algorithm: Algorithm, task: TaskLike, dtype: torch.dtype, devices: Sequence[torch.device] = (CPU,)
    ) -> None:
        """Lay method and task into shared memory, once for all workers, and tell them; they take devices in turn."""
        memory = Memory()
        try:
            packed = CodePacker(memory).pack(WorkerSetup(algorithm, task, dtype, Arithmetic.here(), tuple(devices)))
        except Exception as error:
            raise NotShareable(_unsendable(algorithm, task, error)) from error
        memory.unmap()
        self._setup = packed, memory
        for worker in self.members:
            worker.tell(packed, memory)

    def rest(self) -> None:
        """Between two runs: workers that are still at something end, the others forget method, task and data, and what
        was shared is given back."""
        for worker in list(self.members):
            if worker.jobs:
                self.dismiss(worker, at_once=True)
        self._setup, self._placed = None, {}
        for worker in self.members:
            with suppress(OSError):
                worker.wire.send_bytes(MESSAGE.pack(FORGET, 0, 0))
        for memory in (self._round, self._exam, *(slot for worker in self.members for slot in worker.slots)):
            memory.clear()

    def hire(self) -> None:
        """Start one more worker; it is ready some seconds later."""
        wire, far = Pipe()
        held, lifeline = os.pipe()
        slots = Memory(), Memory()
        taken = {worker.number for worker in self.members}
        number = next(place for place in itertools.count() if place not in taken)
        shared = (self._round, self._exam, *slots)
        told = {
            "path": sys.path,
            "wire": far.fileno(),
            "lifeline": held,
            "number": number,
            "common": [self._round.descriptor, self._exam.descriptor],
            "slots": [slot.descriptor for slot in slots],
        }
        popen = subprocess.Popen(
            [os.fsdecode(spawn.get_executable()), "-c", BOOT, json.dumps(told)],
            stdin=subprocess.DEVNULL,
            pass_fds=(far.fileno(), held, *(memory.descriptor for memory in shared)),
            env={**os.environ, **ENVIRONMENT},
        )
        far.close()
        os.close(held)
        worker = Process(popen, wire, lifeline, slots, number)
        self.members.append(worker)
        if self._setup is not None:
            worker.tell(*self._setup)

    def dismiss(self, worker: Process, *, at_once: bool = False) -> None:
        """End one worker and forget it."""
        self.members.remove(worker)
        if at_once:
            worker.popen.terminate()
        worker.end()

    def publish(self, kind: type, vectors: Iterable[Vector]) -> None:
        """Write what all workers are sent, once; no request of this kind may be under way."""
        number = 1 if kind is WorkOrder else 2
        packer = Packer(self._round if kind is WorkOrder else self._exam)
        self._placed[kind.__name__] = {id(vector): packer.lay(vector, number) for vector in _distinct(vectors)}

    def give(self, worker: Process, job: Job) -> None:
        """Send a job."""
        worker.turn ^= 1
        placed = self._placed.get(type(job.request).__name__)
        packed = Packer(worker.slots[worker.turn], placed=placed).pack(job.recalled())
        worker.jobs.append(job)
        with suppress(OSError):
            worker.wire.send_bytes(MESSAGE.pack(worker.turn, *packed))

    def wait(self, timeout: float | None = None) -> list[Event]:
        """What has happened since, as soon as something has; a worker that stands still is gone after a while."""
        while True:
            tick = TICK if timeout is None else timeout
            heard = connection.wait([worker.wire for worker in self.members], tick)
            events: list[Event] = [self._listen(worker) for worker in self.members if worker.wire in heard]
            if not events and timeout is None:
                events = self._watch()
            if events or timeout is not None:
                return events

    def _watch(self) -> list[Event]:
        """The workers that stood still at so many looks in a row. Looks are counted, not seconds: where the whole group
        was stopped, as by Ctrl-Z, the run did not look either."""
        given_up: list[Event] = []
        for worker in self.members:
            worker.stopped = worker.stopped + 1 if worker.stands_still() else 0
            if worker.stopped >= LOOKS:
                worker.popen.kill()
                worker.popen.wait()
                given_up.append(Gone(worker, f"stopped by a signal for {TICK * LOOKS:g} s", blameless=True))
        return given_up

    def _listen(self, worker: Process) -> Event:
        try:
            message = worker.wire.recv_bytes()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                worker.popen.wait(timeout=5)
            return Gone(worker, _cause(worker.popen.returncode))
        if not worker.ready:
            if message:  # a setup that a later one has replaced is nobody's concern
                return Gone(worker, message.decode(), unable=worker.setups == 1, blameless=worker.setups > 1)
            worker.setups -= 1
            return Ready(worker)
        number, *packed = MESSAGE.unpack(message)
        return Answered(worker, unpack(PackedObject(*packed), [worker.slots[number]], copy=True))

    def close(self) -> None:
        """End all workers and free what they share."""
        self._close()
        self._setup = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _close(members: list[Process], memories: Iterable[Memory]) -> None:
    for worker in members:  # all at once, then each
        worker.popen.terminate()
    while members:
        members.pop().end()
    for memory in memories:
        memory.close()


def _unsendable(algorithm: Algorithm, task: TaskLike, error: Exception) -> str:
    """Why a run cannot be sent, with the piece of it that does not travel by itself."""
    whole: list[tuple[str, Any]] = [("the algorithm", algorithm)]
    whole += [(f"its {name}", value) for name, value in getattr(task, "__dict__", {}).items()]
    for name, piece in whole:
        try:
            CodePacker(Memory()).pack(piece)
        except Exception as reason:
            return f"{name} cannot be sent to another process ({_first_line(reason)})"
    return f"it cannot be sent to another process ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _distinct(vectors: Iterable[Vector]) -> list[Vector]:
    return list({id(vector): vector for vector in vectors}.values())


def _cause(code: int | None) -> str:
    """The end of a process in words.

    >>> _cause(-9)
    'killed by SIGKILL; was memory short?'
    """
    if code is None or code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"killed by {name}" + ("; was memory short?" if code == -signal.SIGKILL else "")
