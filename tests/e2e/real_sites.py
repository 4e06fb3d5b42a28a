"""A real federation on this machine: keys, sites as processes of their own, a server here or as a process too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

COMMAND = [sys.executable, "-c", "from hansa_command import main; main()"]
HERE = Path(__file__).parent
TEXT = """
name: trial
rounds: 3
data: {factory: flower_mine:data}
model: {factory: flower_mine:Net}
algorithm: fedavg
local: {steps: 4, batch_size: 3}
checkpoint: {every: 1}
engine: {kind: flower, sites: {north: 4, south: 4}, deadline: 240}
"""
POLICY = "factories: ['flower_mine:data', 'flower_mine:Net']\nrounds: 50\nmessage: 200000000\nmin_rows: 1\n"


class Process:
    """A ``hansa`` command with its output in a file, ended by its number."""

    def __init__(self, folder: Path, name: str, *words: str) -> None:
        self.log = folder / f"{name}.log"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*sys.path, str(HERE)])}
        with open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                [*COMMAND, *words], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        """kill -9, without a word."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Ask it to end; then its whole session is gone."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def told(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def join(folder: Path, site: str, address: str, *trust: str, data: str = "config", called: str = "") -> Process:
    (folder / "policy.yaml").write_text(POLICY)
    rules = ["--policy", "policy.yaml", "--folder", str(folder / "sites" / site)]
    return Process(folder, called or site, "join", address, "--site", site, "--data", data, *rules, *trust)


def children(process: int) -> list[int]:
    """All descendants of a process."""
    table: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                table.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [process]
    while todo:
        below = table.get(todo.pop(), [])
        found += below
        todo += below
    return found


def rounds(run: Path) -> int:
    """How many rounds of a run are written down."""
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def history(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def until(true, seconds: float, *processes: Process) -> None:
    """Wait until something is so; say what the processes said where it never is."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise AssertionError("\n".join([f"not within {seconds} s", *(process.told for process in processes)]))
        time.sleep(0.3)
