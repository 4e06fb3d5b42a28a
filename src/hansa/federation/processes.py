"""Flower's programs as children of ours: started with a quiet environment, ended with us, however we end."""

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
"""No telemetry, no look for updates, no installing of what an app says it needs."""

STOP = 5.0  # seconds that a program has to end by itself
_OTHERS = ("flwr-serverapp", "flwr-agentapp", "flwr-simulation", "flwr-model", "flwr-connector")


def find(program: str) -> str:
    """The path of one of Flower's programs, beside this interpreter or on the path."""
    beside = Path(sys.executable).parent / program
    found = str(beside) if beside.is_file() else shutil.which(program)
    if found is None:
        raise HansaError(f"a federation over Flower needs {program}: pip install 'hansa[flower]'.")
    return found


def environment(home: Path, first: Path | None = None) -> dict[str, str]:
    """What Flower's programs are started with; ``first`` is looked in before all other folders for programs."""
    before = [] if first is None else [str(first)]
    folders = [*before, str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLWR_", "PYTHONPATH"))}
    return {**kept, **ENVIRONMENT, "FLWR_HOME": str(home), "PATH": os.pathsep.join(folders)}


def guarded(folder: Path) -> Path:
    """A folder of programs for a site: tasks are done by our own app, and tasks of any other kind not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    guard = APP / "hansa_relay" / "guard.py"
    scripts = dict.fromkeys(_OTHERS, "#!/bin/sh\nexit 1\n")
    scripts["flwr-clientapp"] = f'#!/bin/sh\nexec "{sys.executable}" "{guard}" "$@"\n'
    for name, text in scripts.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o700)
    return folder


class Program:
    """One of Flower's programs, its output in a file. It is killed by the system when this process ends."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        tether = [sys.executable, str(APP / "hansa_relay" / "tether.py"), str(os.getpid())]
        self.log, self.name = log, command[0]
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                [*tether, find(command[0]), *command[1:]], env=dict(env), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def last_words(self, lines: int = 5) -> str:
        """The end of what it printed; what only informs is left out where there is anything else."""
        printed = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        grave = [line for line in printed if line.strip() and "INFO" not in line]
        return " | ".join((grave or printed)[-lines:])

    def stop(self) -> None:
        """End it and all that it started."""
        if self.running:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    """A port of the loopback device that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(host: str, port: int, program: Program, seconds: float = 60.0) -> None:
    """Wait until a program listens."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and program.running:
        try:
            socket.create_connection((host, port), 1.0).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise HansaError(f"{program.name} does not listen on {host}:{port}: {program.last_words()}")
