"""How the worker processes of a study start: as forks of this process where that is safe, or as new interpreters.

A fork starts in milliseconds: all modules are imported and all data are there. A new interpreter first imports torch
and Hansa, about two seconds of a core. Both ignore the signals that stop a study, since a terminal or a batch system
sends them to all its processes; the starter decides what they mean, and workers end with it.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import spawn
from typing import Any, NoReturn

import torch

STOP_SIGNALS = [number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None))]
BOOT = (
    "import json, sys\n"
    "options = json.loads(sys.argv[1]); sys.path[:] = options['path']; sys.argv[:] = options['argv']\n"
    "import signal\n"
    "for number in options['ignore']: signal.signal(number, lambda *_: None)\n"
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, options['ignore'])\n"
    "from hansa.study.run_worker import worker_main; worker_main(options)"
)
"""The program of a new interpreter. Processes that it starts do not inherit handlers, as they would ``SIG_IGN``."""


def can_fork() -> bool:
    """Return whether this process can be forked safely; the variable ``HANSA_FORK=off`` forbids it.

    Only the thread that forks exists in the new process: a lock that another thread of Python holds would stay locked.
    So there may be no other, as there is in a notebook. The threads of BLAS and OpenMP do nothing between two calls.
    Accelerators cannot be used after a fork, and on macOS neither can system libraries.
    """
    if sys.platform != "linux" or os.environ.get("HANSA_FORK") == "off":
        return False
    alone = len(sys._current_frames()) == 1 and threading.current_thread() is threading.main_thread()
    return alone and not torch.cuda.is_initialized() and not torch.xpu.is_initialized()  # type: ignore[no-untyped-call]


class ForkedProcess:
    """A forked process, with those methods of `subprocess.Popen` that a handle uses."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None if pid else 0
        self._lock = threading.Lock()  # a process that another thread has waited for may have lost its number

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while the process runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when the process has ended."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired("a forked worker process", timeout or 0.0)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        """Kill the process unless it has ended."""
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, signal.SIGKILL)


def fork_process(main: Callable[[], object], close: Sequence[int] = ()) -> ForkedProcess:
    """Fork this process to call a function, which must end the new process.

    Args:
        main: The function. It is called in a new thread: the OpenMP threads of this one are missing in a fork, and a
            new thread starts its own.
        close: Descriptors of this process that the new one must not hold.
    """
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    with _signals_blocked(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 counts the threads of BLAS and OpenMP
        pid = os.fork()
        if pid == 0:
            _become_worker(main, close)
    return ForkedProcess(pid)


def _become_worker(main: Callable[[], object], close: Sequence[int]) -> NoReturn:
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        for descriptor in close:
            os.close(descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a progress display may have replaced them
        gc.freeze()  # what was there before is neither searched nor finalized here
        thread = threading.Thread(target=main, name="hansa run")
        thread.start()
        thread.join()
    finally:
        os._exit(1)


def spawn_process(options: Mapping[str, Any], descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a new interpreter for `run_worker.worker_main`.

    Args:
        options: Its options, as JSON.
        descriptors: The descriptors of this process that it uses.
    """
    values = {"path": sys.path, "argv": sys.argv, "ignore": STOP_SIGNALS, **options}
    with _signals_blocked():
        return subprocess.Popen(
            [os.fsdecode(spawn.get_executable()), "-c", BOOT, json.dumps(values)],
            stdin=subprocess.DEVNULL,
            pass_fds=tuple(descriptors),
            env={**os.environ, "HANSA_WORKER": "1"},
        )


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals that stop a study: a new process has them blocked until it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
