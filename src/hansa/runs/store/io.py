"""Durable file operations. Tests can make each of the first functions fail, through which every write goes.

Files appear atomically: they are written under a temporary name, synced and renamed, and their folder is synced. Reads
are checked against a SHA-256 stored elsewhere or at the start of the file.

A lock is held by one process, and released by the system when the process ends. POSIX systems have ``flock``, Windows
``msvcrt.locking``; each module is imported where it is used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from sqlite3 import Connection
from typing import Any, TypeAlias

from hansa.core.errors import HansaError

Bytes: TypeAlias = bytes | bytearray | memoryview

TEMPORARY_SUFFIX = ".part"
_LOCKED_BYTE = 1 << 30
"""The byte that is locked on Windows, far beyond the content of the file."""
_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class DamagedFileError(HansaError):
    """The content of a file changed since it was written. The message has the path, and the row if there is one."""


SYNCHRONOUS = "FULL"
"""SQLite's ``PRAGMA synchronous``."""


def open_file(path: Path, *, fresh: bool = False) -> int:
    """Return a descriptor for reading and writing; the file is created if absent, truncated if ``fresh``."""
    more = os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0) if fresh else 0
    return os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS | more, 0o666)


def write_some(file: int, offset: int, data: Bytes) -> int:
    """Write at an offset; may write fewer bytes, like the system call."""
    if hasattr(os, "pwrite"):
        return os.pwrite(file, data, offset)
    os.lseek(file, offset, os.SEEK_SET)  # Windows; one thread writes
    return os.write(file, data)


sync = os.fsync
replace = os.replace
mkdir = os.mkdir


def commit(connection: Connection) -> None:
    """Commit a transaction of SQLite."""
    connection.execute("COMMIT")


def unlink(path: Path) -> None:
    """Remove a file, a link (not its target) or an empty folder."""
    path.rmdir() if is_folder(path) else path.unlink()


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable; Windows has no such call."""
    if os.name != "nt":
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def write_at(file: int, offset: int, data: Bytes) -> None:
    """Write all of ``data`` at an offset, in several calls if necessary."""
    view = memoryview(data).cast("B")
    while len(view):
        count = write_some(file, offset, view)
        if count <= 0:
            raise OSError(errno.EIO, "nothing was written")
        offset, view = offset + count, view[count:]


def write_file(path: Path, data: Bytes) -> None:
    """Replace the content of a file atomically; durable on return."""
    aside = path.with_name(path.name + TEMPORARY_SUFFIX)
    if aside.is_symlink():  # its target is not ours
        remove(aside)
    with naming(aside):
        file = open_file(aside, fresh=True)
        try:
            write_at(file, 0, data)
            sync(file)
        finally:
            os.close(file)
    rename(aside, path)


def rename(source: Path, target: Path) -> None:
    """Rename a file, durable on return."""
    with naming(target):
        replace(source, target)
        sync_folder(target.parent)


def append(path: Path, data: Bytes) -> None:
    """Append to a file. It is not durable: a crash may truncate it."""
    with naming(path), path.open("ab") as file:
        file.write(data)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, durable on return."""
    if path.is_dir():
        return
    make_folder(path.parent)
    if not create_folder(path) and not path.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def create_folder(path: Path) -> bool:
    """Create a folder in an existing one, durable on return; return False if the name exists."""
    with naming(path):
        try:
            mkdir(path)
        except FileExistsError:
            return False
        sync_folder(path.parent)
        return True


def create_numbered(path: Path) -> Path:
    """Create a folder with the next free name of name, name-2, name-3, ...; return its path."""
    make_folder(path.parent.absolute())
    names = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(name for name in chain([path], names) if create_folder(name.absolute()))


def remove(path: Path, *, durable: bool = False) -> None:
    """Remove a file or a folder with its content, if it exists. Links are removed, not followed."""
    if not os.path.lexists(path):
        return
    with naming(path):
        if is_folder(path):
            for child in sorted(path.iterdir()):
                remove(child)
        unlink(path)
        if durable:
            sync_folder(path.parent)


def is_folder(path: Path) -> bool:
    """Return whether the path is a folder, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def sha256(*chunks: Bytes) -> str:
    """Return the SHA-256 of concatenated chunks.

    >>> sha256(b"ab", b"c") == sha256(b"abc")
    True
    """
    state = hashlib.sha256()
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()


def write_sealed(path: Path, body: dict[str, Any]) -> None:
    """Write JSON after a line with its SHA-256."""
    data = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    write_file(path, sha256(data).encode() + b"\n" + data)


def read_sealed(path: Path) -> dict[str, Any]:
    """Read what `write_sealed` wrote, or raise `DamagedFileError`."""
    try:
        seal, _, data = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        raise DamagedFileError(f"{path} is missing. Restore it, or start from another checkpoint.") from None
    if seal.decode("ascii", "replace") != sha256(data):
        raise DamagedFileError(
            f"{path} is damaged: its SHA-256 does not match. Restore it, or start from another checkpoint."
        )
    body: dict[str, Any] = json.loads(data)
    return body


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON for people and other programs."""
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    write_file(path, f"{text}\n".encode(errors="backslashreplace"))  # arguments of a command may be no UTF-8


def read_json(path: Path) -> dict[str, Any]:
    """Read a file with a JSON mapping, or raise `DamagedFileError`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path}: damaged: not JSON ({str(error)[:200]}). Restore it.") from error
    if not isinstance(content, dict):
        raise DamagedFileError(f"{path}: damaged: expected a mapping, found {str(content)[:60]!r}.")
    return content


class InUseError(HansaError):
    """Another process holds the lock."""


class FileLock:
    """A lock held until `close`, the end of the process, or the deletion of this object.

    If another process holds it or replaces the file, `InUseError` names that process. The file remains after release:
    removing it would let two processes lock two files of one name.
    """

    def __init__(self, path: Path) -> None:
        self._file = -1
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            _lock_file(self._file, path)
        except OSError:
            self.close()
            holder = _describe_holder(path)
            raise InUseError(f"{path.parent} is in use by {holder}. Wait for it, or choose another folder.") from None
        since = datetime.now(UTC).isoformat(timespec="seconds")
        signature = json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": since}) + "\n"
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


def _lock_file(file: int, path: Path) -> None:
    """Lock an open file, or raise `OSError` if it is locked or no longer the file at its path."""
    try:
        import fcntl
    except ImportError:
        import msvcrt

        os.lseek(file, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not os.path.samestat(os.fstat(file), os.stat(path)):
        raise FileNotFoundError(path)


def _describe_holder(path: Path) -> str:
    """Describe the process that a lock file names."""
    try:
        content = json.loads(path.read_bytes()[:1000])
        return f"process {int(content['process'])} on {str(content['host'])[:100]} since {str(content['since'])[:40]}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another run"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to system errors that lack it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
