"""One holder at a time: a file that the system locks for a process and lets go of when the process dies.

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
"""Windows locks bytes: one that lies far behind what the file says of its holder."""


class InUse(HansaError):
    """Another process holds it."""


class Lock:
    """Held from here until `close`, the end of the process, or the end of this object; `InUse` names who has it.

    The file stays when the lock is gone: to remove it would let two processes hold two files of one name.
    """

    def __init__(self, path: Path) -> None:
        self._file = -1
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            _take(file)
        except OSError:
            who = holder(path)
            os.close(file)
            raise InUse(f"{path.parent} is in use by {who}. Wait for it, or choose another folder.") from None
        self._file = file
        self._sign()

    def _sign(self) -> None:
        """Say who holds it; that is a help to the reader and proves nothing."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        said = json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": now}) + "\n"
        with suppress(OSError):
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            os.write(self._file, said.encode())

    def guards(self, path: Path) -> bool:
        """Whether the file of this name is the one that is held, not another that was put in its place."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(path))
        except OSError:
            return False

    def close(self) -> None:
        """Let go."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def __del__(self) -> None:
        self.close()


def holder(path: Path) -> str:
    """Who said that they hold a lock, in words."""
    try:
        said = json.loads(path.read_bytes()[:1000])
        return f"process {int(said['process'])} on {str(said['host'])[:100]} since {str(said['since'])[:40]}"
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
