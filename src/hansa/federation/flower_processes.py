"""Flower's programs as child processes, which always end with this process."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hansa.core.errors import HansaError
from hansa.federation.relay import APP

ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""No telemetry, no update check, no installation of an app's dependencies."""

STOP_SECONDS = 5.0  # for a program to exit by itself
_UNUSED = ("flwr-serverapp", "flwr-agentapp", "flwr-simulation", "flwr-model", "flwr-connector")


def find_program(program: str) -> str:
    """Return the path of one of Flower's programs, beside this interpreter or on PATH."""
    beside = Path(sys.executable).parent / program
    path = str(beside) if beside.is_file() else shutil.which(program)
    if path is None:
        raise HansaError(f"a federation over Flower needs {program}: pip install 'hansa[flower]'.")
    return path


def flower_environment(home: Path, first: Path | None = None) -> dict[str, str]:
    """Return the environment of Flower's programs; the folder ``first`` comes first on PATH."""
    before = [] if first is None else [str(first)]
    folders = [*before, str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("FLWR_", "PYTHONPATH"))}
    return {**inherited, **ENVIRONMENT, "FLWR_HOME": str(home), "PATH": os.pathsep.join(folders)}


def write_task_programs(folder: Path) -> Path:
    """Write the programs that a site's node starts for tasks: client tasks run Hansa's app, all other kinds fail."""
    folder.mkdir(parents=True, exist_ok=True)
    runner = APP / "hansa_relay" / "run_site_app.py"
    scripts = dict.fromkeys(_UNUSED, "#!/bin/sh\nexit 1\n")
    scripts["flwr-clientapp"] = f'#!/bin/sh\nexec "{sys.executable}" "{runner}" "$@"\n'
    for name, text in scripts.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o700)
    return folder


class ManagedProcess:
    """A running program with its output in a file. The system kills it when this process ends."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        launcher = [sys.executable, str(APP / "hansa_relay" / "exit_with_parent.py"), str(os.getpid())]
        self.log, self.name = log, command[0]
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                [*launcher, find_program(command[0]), *command[1:]], env=dict(env), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def log_tail(self, lines: int = 5) -> str:
        """Return the last lines of its output, without INFO lines if there are others."""
        output = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        important = [line for line in output if line.strip() and "INFO" not in line]
        return " | ".join((important or output)[-lines:])

    def stop(self) -> None:
        """End the program and all its child processes."""
        if self.running:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    """Return a free port of the loopback device."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(host: str, port: int, program: ManagedProcess, seconds: float = 60.0) -> None:
    """Wait until a program listens on a port."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and program.running:
        try:
            socket.create_connection((host, port), 1.0).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise HansaError(f"{program.name} does not listen on {host}:{port}: {program.log_tail()}")
