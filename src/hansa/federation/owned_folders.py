"""Temporary folders that name the process that owns them; those of dead processes are removed by the next start."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hansa.federation import flower_processes

OWNER, STATUS = "owner", "status.json"
PREFIXES = ("hansa-link-", "hansa-node-")
_MAX_PATH = 80  # of the folder; the path of a local socket in it may have about 100 characters
_UNOWNED_SECONDS = 60.0  # a folder without an owner is being created, or is older than this


class OwnedFolder:
    """A private temporary folder with the id and the start time of this process in it.

    Args:
        prefix: How its name begins.
    """

    def __init__(self, prefix: str) -> None:
        place = tempfile.gettempdir()
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place if len(place) <= _MAX_PATH else "/tmp"))
        (self.path / OWNER).write_text(f"{os.getpid()} {start_time(os.getpid())}\n", encoding="utf-8")

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


def start_time(process: int) -> str | None:
    """Return when a process was started, in the system's ticks; None if it does not run."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def remove_stale(prefixes: Sequence[str] = PREFIXES) -> list[Path]:
    """Remove the folders of processes that have died, and kill what they left running. Return the removed folders."""
    removed = []
    places = [Path(place) for place in sorted({tempfile.gettempdir(), "/tmp"})]
    for folder in [folder for place in places for prefix in prefixes for folder in place.glob(f"{prefix}*")]:
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not _is_stale(folder):
                continue
            flower_processes.kill_all(folder / "flwr")
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def write_status(folder: Path, status: Mapping[str, Any]) -> None:
    """Write the status of a running process into its folder, by one rename."""
    (folder / f"{STATUS}.new").write_text(json.dumps({**status, "since": time.time()}), encoding="utf-8")
    os.replace(folder / f"{STATUS}.new", folder / STATUS)


def running_statuses(prefix: str) -> list[dict[str, Any]]:
    """Return the statuses of this user's running processes, with the process of each."""
    statuses = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{prefix}*")):
        with suppress(OSError, ValueError):
            if not folder.is_symlink() and folder.stat().st_uid == os.getuid() and not _is_stale(folder):
                process = int((folder / OWNER).read_text(encoding="utf-8").split()[0])
                status = json.loads((folder / STATUS).read_text(encoding="utf-8"))
                statuses.append({**status, "process": process})
    return statuses


def _is_stale(folder: Path) -> bool:
    try:
        process, started = (folder / OWNER).read_text(encoding="utf-8").split()
        return start_time(int(process)) != started
    except (OSError, ValueError):
        return time.time() - folder.stat().st_mtime > _UNOWNED_SECONDS
