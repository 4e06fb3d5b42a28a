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

    If another process holds it, or replaces the file, `InUseError` names that process. The file stays after release:
    removing it would let two processes lock two files of one name.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        self._file = -1
        self._file = os.open(path, flags, 0o666)
        try:
            _take(self._file, path)
        except OSError:
            self.close()
            who = _holder(path)
            raise InUseError(f"{path.parent} is in use by {who}. Wait for it, or choose another folder.") from None
        now = datetime.now(UTC).isoformat(timespec="seconds")
        signature = json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": now}) + "\n"
        with suppress(OSError):
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            os.write(self._file, signature.encode())

    def close(self) -> None:
        """Release the lock."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def __del__(self) -> None:
        self.close()


def _take(file: int, path: Path) -> None:
    """Lock a file that is still the one of its name, or raise `OSError`."""
    try:
        import fcntl
    except ImportError:
        import msvcrt

        os.lseek(file, _BYTE, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not os.path.samestat(os.fstat(file), os.stat(path)):
        raise FileNotFoundError(path)


def _holder(path: Path) -> str:
    """Return a description of the holder that is written in a lock file."""
    try:
        content = json.loads(path.read_bytes()[:1000])
        return f"process {int(content['process'])} on {str(content['host'])[:100]} since {str(content['since'])[:40]}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another run"
