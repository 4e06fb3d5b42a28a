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
from typing import NamedTuple

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

SHOW_OUTPUT = False  # whether messages about a restart quote the program's output
STOP_SECONDS = 5.0  # for a program to exit by itself
HOME = "FLWR_HOME"  # the variable that all programs of one link or node share
EXECUTOR, RELAY_TASK = "flower-superexec", "flwr-clientapp"
LOST = "lost"  # a file in the folder of a node: a task of it was killed
TASKS = "tasks"  # the socket of the process that runs a node's tasks
WAITING = "waiting"  # a file in the folder of a node: it waits for the answer of a task since the file's time
_UNUSED = ("flwr-serverapp", "flwr-agentapp", "flwr-simulation", "flwr-model", "flwr-connector")


def require_unix_sockets() -> None:
    """Refuse a system without the local sockets by which Hansa and Flower's programs talk: Windows."""
    if not hasattr(socket, "AF_UNIX"):
        raise HansaError(
            "a federation over Flower needs Unix sockets, which Python does not have on this system. "
            "Use Linux, macOS, the Windows Subsystem for Linux or a container."
        )


def find_program(program: str) -> str:
    """Return the path of one of Flower's programs, beside this interpreter or on PATH."""
    require_unix_sockets()
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
    return {**inherited, **ENVIRONMENT, HOME: str(home), "PATH": os.pathsep.join(folders)}


def write_task_programs(folder: Path) -> Path:
    """Write the programs that a site's node starts for tasks: client tasks run Hansa's app, all other kinds fail.

    Tasks are sent to the process that listens on ``tasks`` beside the folder, if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    client = APP / "hansa_relay" / "send_task.py"
    scripts = dict.fromkeys(_UNUSED, "#!/bin/sh\nexit 1\n")
    mark = f'[ $code -gt 128 ] && : > "{folder.parent / LOST}"'
    run = f'"{sys.executable}" -I -S "{client}" "{folder.parent / TASKS}" "$@"'  # of the standard library only
    scripts[RELAY_TASK] = f"#!/bin/sh\n{run}\ncode=$?\n{mark}\nexit $code\n"
    for name, text in scripts.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o700)
    return folder


class ManagedProcess:
    """A running program with its output in a file. The system kills it when this process ends."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, script: Path | None = None) -> None:
        """Start a program, or with ``script`` a script of this interpreter in its place."""
        launcher = [sys.executable, str(APP / "hansa_relay" / "exit_with_parent.py"), str(os.getpid())]
        self.log, self.name, self.home = log, command[0], env.get(HOME)
        program = [find_program(command[0])] if script is None else [sys.executable, str(script)]
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                [*launcher, *program, *command[1:]], env=dict(env), stdin=subprocess.DEVNULL,
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

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """End the program and everything that it started; it has some seconds to exit by itself."""
        if self.running and seconds > 0:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.home is not None:
            kill_all(Path(self.home))
        self.process.wait()


class RunningProcess(NamedTuple):
    """A process of a link or node: its id, the program, and whether it is stopped (SIGSTOP, a debugger)."""

    pid: int
    program: str
    stopped: bool


def running_processes(home: Path) -> list[RunningProcess]:
    """Return the processes with this ``FLWR_HOME``, also those that have left their parent; none except on Linux."""
    marker, processes = f"{HOME}={home}".encode(), []
    for entry in Path("/proc").iterdir() if sys.platform == "linux" else ():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            if marker not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                words = (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
                name = (entry / "comm").read_text().strip()
                program = name if name == RELAY_TASK else _program(words)
                processes.append(RunningProcess(int(entry.name), program, state in "Tt"))
    return processes


def _program(words: Sequence[str]) -> str:
    """Return the name of the program of a command line."""
    names = [Path(word).name for word in words if word]
    known = [name for name in names if name.startswith(("flower-", "flwr"))]
    if "run_site_app.py" in names:
        return "relay" if "--serve" in names else RELAY_TASK
    if "run_site_node.py" in names:
        return "flower-supernode"
    return known[0] if known else (names[0] if names else "")


def kill_all(home: Path) -> None:
    """Kill every process with this ``FLWR_HOME``, until there is none."""
    for _ in range(50):
        processes = running_processes(home)
        if not processes:
            return
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.02)


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
