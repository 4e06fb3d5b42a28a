"""File locks: held by one process at a time, and released by the system when the process ends.

POSIX systems have ``flock``, Windows ``msvcrt.locking``; neither module exists on the other, so each is imported where
it is used.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from hansa.core.errors import HansaError

_BYTE = 1 << 30
"""The byte that is locked on Windows, far beyond the content of the file."""


class InUseError(HansaError):
    """Another process holds the lock."""


class FileLock:
    """A lock that is held until `close`, the end of the process, or the deletion of this object.

    If another process holds it, `InUseError` names that process. The file stays after release: removing it would let
    two processes lock two files of one name.
    """

    def __init__(self, path: Path) -> None:
        self._file = -1
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            _take(file)
        except OSError:
            who = describe_holder(path)
            os.close(file)
            raise InUseError(f"{path.parent} is in use by {who}. Wait for it, or choose another folder.") from None
        self._file = file
        self._sign()

    def _sign(self) -> None:
        """Write the holder into the file, for messages only."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        content = json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": now}) + "\n"
        with suppress(OSError):
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            os.write(self._file, content.encode())

    def is_lock_of(self, path: Path) -> bool:
        """Return whether the file of this name is the locked one, not one that replaced it."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(path))
        except OSError:
            return False

    def close(self) -> None:
        """Release the lock."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def __del__(self) -> None:
        self.close()


def describe_holder(path: Path) -> str:
    """Return a description of the holder that is written in a lock file."""
    try:
        content = json.loads(path.read_bytes()[:1000])
        return f"process {int(content['process'])} on {str(content['host'])[:100]} since {str(content['since'])[:40]}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another run"


def _take(file: int) -> None:
    try:
        import fcntl
    except ImportError:
        import msvcrt

        os.lseek(file, _BYTE, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
