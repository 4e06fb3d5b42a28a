"""A second process that restarts ``hansa serve`` or ``hansa join`` when it is killed, fails or stands still."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from hansa.federation.owned_folders import remove_stale
from hansa.federation.relay import APP
from hansa.federation.watchdog import CHECK_SECONDS, STOPPED_CHECKS

log = logging.getLogger("hansa")

FAILED = 1  # the exit code that is worth another attempt; 0 and 2 and those of signals are final
MAX_FAILURES = 5  # in a row, each within a minute of its start
MAX_PAUSE = 30.0
_HANSA = (sys.executable, "-c", "from hansa_command import main; main()")


def supervise(arguments: Sequence[str], *, program: Sequence[str] = _HANSA) -> int:
    """Run ``hansa`` with some arguments until it ends by itself or a signal is sent to this process.

    Args:
        arguments: The arguments of the command.
        program: The program, for tests.

    Returns:
        The exit code.
    """
    launcher = [sys.executable, str(APP / "hansa_relay" / "exit_with_parent.py"), str(os.getpid())]
    child: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if child is not None and child.poll() is None:
            with suppress(ProcessLookupError):
                child.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    failures = 0
    try:
        while True:
            start = time.monotonic()
            child = subprocess.Popen([*launcher, *program, *arguments], start_new_session=True)
            code = _watch(child)
            failures = failures + 1 if time.monotonic() - start < 60.0 else 1
            if received or (code >= 0 and (code != FAILED or failures >= MAX_FAILURES)):
                return code if code >= 0 else 128 - code
            pause = min(MAX_PAUSE, 2.0 ** (failures - 1))
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            log.warning("hansa %s (process %d) %s; restarted in %.0f s", arguments[0], child.pid, how, pause)
            end = time.monotonic() + pause
            while time.monotonic() < end and not received:
                time.sleep(0.1)
            if received:
                return 128 + received[0]
    finally:
        remove_stale()  # of a process that was killed and not restarted
        for number, handler in previous.items():
            signal.signal(number, handler)


def _watch(child: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process, and return its code. A stopped process is continued, or killed if that fails."""
    checks = 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(CHECK_SECONDS)
        checks = checks + 1 if _is_stopped(child.pid) else 0
        if checks == STOPPED_CHECKS:
            log.warning("process %d stood still for %.0f s; it is continued", child.pid, checks * CHECK_SECONDS)
            child.send_signal(signal.SIGCONT)
        elif checks >= 2 * STOPPED_CHECKS:
            log.warning("process %d cannot be continued; it is killed", child.pid)
            child.kill()


def _is_stopped(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
