"""Run a contender in processes of its own: with a time limit, a log, and the peak of the memory they all hold."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "HANSA_BENCH_RUN"  # in the environment of every process of a run, whoever started it
LOOK = 0.1  # seconds between two looks at memory
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended: ``reason`` is empty when it went well. Memory in bytes, the resident sets summed."""

    seconds: float
    peak: int
    reason: str = ""


def run(
    command: Sequence[str | Path], log: Path, *, timeout: float, environment: Mapping[str, str | None] | None = None
) -> Ended:
    """Run a command to its end, or end it and all that it started when the time is up.

    ``environment`` adds to this process's own; None takes a variable away.
    """
    mark = uuid.uuid4().hex
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    watch = _Watch(mark)
    variables: dict[str, str | None] = {**os.environ, **(environment or {}), MARK: mark}
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in variables.items() if value is not None},
            start_new_session=True,
        )
        reason = ""
        try:
            while process.poll() is None:
                watch.look()
                if time.perf_counter() - began > timeout:
                    reason = f"took longer than {timeout:.0f} s"
                    break
                time.sleep(LOOK)
        finally:
            seconds = time.perf_counter() - began
            watch.end()
            process.wait()
    if not reason and process.returncode:
        reason = _last_line(log) or f"ended with code {process.returncode}"
    return Ended(seconds, watch.peak, reason)


class _Watch:
    """The processes that carry a mark, also those that were started by others or left their parents."""

    def __init__(self, mark: str) -> None:
        self.mark, self.peak = f"{MARK}={mark}".encode(), 0
        self._ours: set[int] = set()
        self._others = _all()  # made before the run begins

    def look(self) -> None:
        """Find new processes, and note the memory of all."""
        held = 0
        for pid in self.alive():
            with contextlib.suppress(OSError, ValueError, IndexError):
                held += int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * PAGE
        self.peak = max(self.peak, held)

    def alive(self) -> set[int]:
        there = _all()
        self._ours &= there
        self._others &= there
        for pid in there - self._ours - self._others:
            try:
                told = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:  # someone else's
                self._others.add(pid)
                continue
            if told:  # it is empty for a moment while a process begins
                (self._ours if self.mark in told.split(b"\0") else self._others).add(pid)
        return self._ours

    def end(self, patience: float = 5.0) -> None:
        """Ask whatever is left to end, then make it."""
        for wanted in (signal.SIGTERM, signal.SIGKILL):
            left = set(self.alive())
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, wanted)
            until = time.perf_counter() + patience
            while left and time.perf_counter() < until:
                left = {pid for pid in left if _runs(pid)}
                time.sleep(0.02)
            if not left:
                return


def _all() -> set[int]:
    """Every process there is; none where there is no /proc, and then memory is not measured."""
    try:
        return {int(name) for name in os.listdir("/proc") if name.isdigit()}
    except OSError:
        return set()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if any(map(str.isalpha, line))]
    return lines[-1][:200] if lines else ""
