"""Disks that fail: the n-th call errs, the process dies there, or the power goes and takes all that was not synced."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hansa.runs.folder
from hansa.runs.store import io
from hansa.runs.store.io import Bytes, FileLock

CALLS = ("open_file", "write_some", "sync", "commit", "replace", "unlink", "mkdir", "sync_folder")
"""The functions of `hansa.runs.store.io` that change a disk."""
FAULTS = ("EIO", "ENOSPC", "short")


class Dead(BaseException):
    """The process is gone: nothing may catch this, and no later call reaches the disk."""


class Hasty:
    """Never waits for the platter: only the order of calls matters here, and the real wait is most of the time."""

    open_file, write_some = staticmethod(io.open_file), staticmethod(io.write_some)
    commit, replace = staticmethod(io.commit), staticmethod(io.replace)
    unlink, mkdir = staticmethod(io.unlink), staticmethod(io.mkdir)

    def sync(self, file: int) -> None:
        """Nothing."""

    def sync_folder(self, path: Path) -> None:
        """Nothing."""


@contextmanager
def use_disk(disk: Hasty) -> Iterator[Any]:
    """Files are written to this disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "SYNCHRONOUS", "OFF")
        for name in CALLS:
            patch.setattr(io, name, getattr(disk, name))
        yield disk


class Counting(Hasty):
    """Counts the calls that could fail, and lets them pass."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def before(self, call: str) -> None:
        self.calls.append(call)


def _announced(name: str) -> Callable[..., Any]:
    def call(self: Counting, *arguments: Any, **options: Any) -> Any:
        self.before(name)
        return getattr(super(Counting, self), name)(*arguments, **options)

    return call


for _name in CALLS:
    setattr(Counting, _name, _announced(_name))


class Dying(Counting):
    """The process dies before the n-th call that would change the disk; no later one reaches it."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def before(self, call: str) -> None:
        super().before(call)
        if len(self.calls) > self.at:
            raise Dead


@contextmanager
def remembered_locks() -> Iterator[Callable[[], None]]:
    """Yield what the system does for a dead process: the locks of folders are released."""
    held, real = [], hansa.runs.folder.FileLock

    def remember(path: Path) -> FileLock:
        held.append(real(path))
        return held[-1]

    def release() -> None:
        while held:
            held.pop().close()

    hansa.runs.folder.FileLock = remember  # type: ignore[assignment, misc]
    try:
        yield release
    finally:
        hansa.runs.folder.FileLock = real  # type: ignore[misc]
        release()


class Failing(Counting):
    """The n-th call fails with EIO or ENOSPC; ``short`` writes half of what it was given first."""

    def __init__(self, at: int, fault: str) -> None:
        super().__init__()
        self.at, self.fault = at, fault
        self.struck = False

    def before(self, call: str) -> None:
        super().before(call)
        if len(self.calls) - 1 == self.at and not (self.fault == "short" and call == "write_some"):
            self.struck = True
            code = errno.EIO if self.fault == "EIO" else errno.ENOSPC
            raise OSError(code, os.strerror(code))

    def write_some(self, file: int, offset: int, data: Bytes) -> int:
        if self.fault == "short" and len(self.calls) == self.at:
            self.struck = True
            Hasty.write_some(file, offset, memoryview(data)[: len(memoryview(data)) // 2])
            self.calls.append("write_some")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write_some(file, offset, data)


class Stingy(Hasty):
    """Every write takes at most a few bytes, as the system call may."""

    def write_some(self, file: int, offset: int, data: Bytes) -> int:
        return super().write_some(file, offset, memoryview(data)[:7])


class PowerCut(Counting):
    """The power goes before the n-th call; what was not synced is then lost, all or any part of it.

    Data is safe after ``sync`` of its file, a name after ``sync_folder`` of its folder, a transaction after its commit,
    which `torture.faults` proves by cutting its log. `cut` undoes the rest: each unsynced write or not, as drawn; of
    the unsynced names of a folder, the last ones.
    """

    def __init__(self, at: int | None, draw: np.random.Generator) -> None:
        super().__init__()
        self.at, self.draw = at, draw
        self.dead = False
        self._unsynced: list[tuple[int | Path, Callable[[], object]]] = []  # inode or folder, and how to undo it
        self._trash = Path(tempfile.mkdtemp(prefix="trash"))

    def before(self, call: str) -> None:
        super().before(call)
        if self.dead or len(self.calls) - 1 == self.at:
            self.dead = True
            raise Dead

    def open_file(self, path: Path, *, fresh: bool = False) -> int:
        old = path.read_bytes() if path.exists() else None
        file = super().open_file(path, fresh=fresh)
        inode = os.fstat(file).st_ino
        if old is None:
            self._unsynced.append((path.parent, lambda: [found.unlink() for found in _named(path.parent, inode)]))
        elif fresh:
            undo = lambda: [found.write_bytes(old) for found in _named(path.parent, inode)]  # noqa: E731
            self._unsynced.append((inode, undo))
        return file

    def write_some(self, file: int, offset: int, data: Bytes) -> int:
        old = os.pread(file, len(memoryview(data)), offset)
        done: int = super().write_some(file, offset, data)
        inode, folder = os.fstat(file).st_ino, Path(os.readlink(f"/proc/self/fd/{file}")).parent

        def undo() -> None:
            for path in _named(folder, inode):
                with path.open("r+b") as found:
                    last = path.stat().st_size == offset + done
                    found.seek(offset)
                    found.write(old if last else old.ljust(done, b"\0"))
                    if last:
                        found.truncate(offset + len(old))

        self._unsynced.append((inode, undo))
        return done

    def sync(self, file: int) -> None:
        super().sync(file)
        self._safe(os.fstat(file).st_ino)

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self._safe(path)

    def replace(self, source: Path, target: Path) -> None:
        saved = self._save(target) if target.exists() else None
        super().replace(source, target)

        def undo() -> None:
            if target.exists():
                os.replace(target, source)
            if saved is not None:
                shutil.move(saved, target)

        self._unsynced.append((target.parent, undo))

    def unlink(self, path: Path) -> None:
        saved = self._save(path)
        super().unlink(path)
        self._unsynced.append((path.parent, lambda: path.parent.exists() and shutil.move(saved, path)))

    def cut(self) -> None:
        """The state of the disk when the power is back."""
        self.dead = True
        folders = dict.fromkeys(of for of, _ in self._unsynced if isinstance(of, Path))
        kept = Counter({folder: int(self.draw.integers(3)) for folder in folders})
        lost = []
        for of, undo in self._unsynced:
            if isinstance(of, Path):
                kept[of] -= 1
            if kept[of] < 0 if isinstance(of, Path) else self.draw.random() < 0.7:
                lost.append(undo)
        for undo in reversed(lost):
            undo()
        shutil.rmtree(self._trash, ignore_errors=True)

    def _safe(self, what: int | Path) -> None:
        self._unsynced = [each for each in self._unsynced if each[0] != what]

    def _save(self, path: Path) -> str:
        return str(shutil.copy2(path, self._trash / str(len(self.calls))))


def _named(folder: Path, inode: int) -> list[Path]:
    """The file of an inode in a folder, under the name that it has now."""
    return [path for path in folder.iterdir() if path.stat().st_ino == inode] if folder.exists() else []
