"""The list of runs that this user created on this machine, with the code that they name; other folders need consent.

The list is a text file that only this user can write. A line has the random id of a run folder or group of seeds, and
the code that its configuration named at creation. A folder from elsewhere, or that names other code now, has no line.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import platformdirs

from hansa.core.errors import HansaError
from hansa.runs.store import io

IDENTITY = ".hansa-id"
"""The file of a folder's random id."""
VARIABLE = "HANSA_CREATED_RUNS"
"""The environment variable that names another file."""


class UntrustedFolderError(HansaError):
    """A run folder names code and is not on the list of this user's runs."""


def list_path() -> Path:
    """Return the file of the list."""
    configured = os.environ.get(VARIABLE)
    return Path(configured).expanduser() if configured else platformdirs.user_data_path("hansa") / "created-runs.txt"


def remember(folder: Path, names: Sequence[str]) -> None:
    """Add a folder whose configuration names code to the list, if it is writable."""
    path = list_path()
    if names:
        if not _identity(folder):
            io.write_file(folder / IDENTITY, secrets.token_hex(16).encode())
        with suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, _line(_identity(folder), names))  # one call, so that lines are not interleaved
            finally:
                os.close(descriptor)


def is_listed(folder: Path, names: Sequence[str]) -> bool:
    """Return whether this user created this folder with this code."""
    try:
        with open(list_path(), "rb") as file:
            status, identity = os.fstat(file.fileno()), _identity(folder)
            private = os.name != "posix" or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
            return private and bool(identity) and _line(identity, names) in file
    except OSError:
        return False


def _identity(folder: Path) -> str:
    """Return the random id of a folder; "" if it has none."""
    try:
        with open(folder / IDENTITY, "rb") as file:
            return file.read(100).decode("ascii", "replace")
    except OSError:
        return ""


def _line(identity: str, names: Sequence[str]) -> bytes:
    return f"{json.dumps([identity, *sorted(set(names))])}\n".encode()
