"""Supervision of Flower's programs: what is stopped is continued, what is missing or stuck is a reason to restart."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hansa.federation import flower_processes
from hansa.federation.flower_processes import EXECUTOR, RELAY_TASK, RunningProcess

log = logging.getLogger("hansa")

CHECK_SECONDS = 1.0  # between checks
STOPPED_CHECKS = 3  # before a stopped process is continued, and again before it is replaced
MISSING_CHECKS = 3  # before a missing executor is a reason to restart
START_SECONDS = 60.0  # for a program to start its executor
IDLE_SECONDS = 20.0  # that a node may wait for an answer which no task is working on


class Watchdog:
    """Checks the processes of a link or node.

    Args:
        home: Their ``FLWR_HOME``.
        name: What they are, for the log.
        processes: Returns the processes; for tests.
        clock: The time in seconds.
    """

    def __init__(
        self,
        home: Path,
        name: str,
        *,
        processes: Callable[[Path], Sequence[RunningProcess]] = flower_processes.running_processes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.home, self.name, self.clock = home, name, clock
        self._processes = processes
        self._stopped: dict[int, int] = {}  # checks by process
        self._missing = 0
        self._executor_seen = False
        self._started = self._busy_at = clock()

    def check(self) -> str | None:
        """Continue stopped processes; return a reason to restart all of them, if there is one."""
        processes = self._processes(self.home)
        return self._check_stopped(processes) or self._check_executor(processes) or self._check_task(processes)

    def _check_stopped(self, processes: Sequence[RunningProcess]) -> str | None:
        stopped = {process.pid: process for process in processes if process.stopped}
        self._stopped = {pid: self._stopped.get(pid, 0) + 1 for pid in stopped}
        for pid, checks in self._stopped.items():
            program = stopped[pid].program
            if checks == STOPPED_CHECKS:
                log.warning(
                    "%s: %s (process %d) stood still for %.0f s; it is continued", self.name, program, pid,
                    STOPPED_CHECKS * CHECK_SECONDS,
                )  # fmt: skip
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGCONT)
            elif checks >= 2 * STOPPED_CHECKS:
                return f"{program} (process {pid}) cannot be continued"
        return None

    def _check_executor(self, processes: Sequence[RunningProcess]) -> str | None:
        if any(process.program == EXECUTOR for process in processes):
            self._missing, self._executor_seen = 0, True
        elif self._executor_seen:
            self._missing += 1
        elif self.clock() - self._started > START_SECONDS:
            return f"{EXECUTOR} did not start within {START_SECONDS:.0f} s"
        return f"{EXECUTOR} has ended" if self._missing >= MISSING_CHECKS else None

    def _check_task(self, processes: Sequence[RunningProcess]) -> str | None:
        """A node waits for the answer of a task without a limit, also if the task has ended."""
        if (self.home.parent / flower_processes.LOST).exists():
            return f"{RELAY_TASK} was killed"
        if any(process.program == RELAY_TASK for process in processes):
            self._busy_at = self.clock()
        try:
            waiting = time.time() - (self.home.parent / flower_processes.WAITING).stat().st_mtime
        except OSError:
            return None
        if waiting > IDLE_SECONDS and self.clock() - self._busy_at > IDLE_SECONDS:
            return f"it has waited for {waiting:.0f} s for an answer that no task is working on"
        return None
