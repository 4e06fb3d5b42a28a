"""Disks that fail: the n-th call errs, the process dies there, or the power goes and takes all that was not synced."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import hansa.runs.folder
from hansa.runs.store.io import Bytes, Disk, FileLock

FAULTS = ("EIO", "ENOSPC", "short")


class Dead(BaseException):
    """The process is gone: nothing may catch this, and no later call reaches the disk."""


class Hasty(Disk):
    """Never waits for the platter: only the order of calls matters here, and the real wait is most of the time."""

    synchronous = "OFF"

    def sync(self, file: int) -> None:
        """Nothing."""

    def sync_folder(self, path: Path) -> None:
        """Nothing."""


class Counting(Hasty):
    """Counts the calls that could fail, and lets them pass."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def before(self, call: str) -> None:
        self.calls.append(call)


def _announced(name: str) -> Callable[..., Any]:
    def call(self: Counting, *arguments: Any) -> Any:
        self.before(name)
        return getattr(Hasty, name)(self, *arguments)

    return call


for _name in ("open", "write", "sync", "commit", "rename", "remove", "make_folder", "sync_folder"):
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
        if len(self.calls) - 1 == self.at and not (self.fault == "short" and call == "write"):
            self.struck = True
            code = errno.EIO if self.fault == "EIO" else errno.ENOSPC
            raise OSError(code, os.strerror(code))

    def write(self, file: int, offset: int, data: Bytes) -> int:
        if self.fault == "short" and len(self.calls) == self.at:
            self.struck = True
            Disk.write(self, file, offset, memoryview(data)[: len(memoryview(data)) // 2])
            self.calls.append("write")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(file, offset, data)


class Stingy(Hasty):
    """Every write takes at most a few bytes, as the system call may."""

    def write(self, file: int, offset: int, data: Bytes) -> int:
        return super().write(file, offset, memoryview(data)[:7])


class PowerCut(Counting):
    """The power goes before the n-th call; what was not synced is then lost, all or any part of it.

    Data is safe after ``sync`` of its file, a name after ``sync_folder`` of its folder, a transaction after its commit,
    which `torture.faults` proves by cutting its log. `cut` undoes the rest: each
    unsynced write or not, as drawn; of the unsynced names of a folder, the last ones.
    """

    def __init__(self, at: int | None, draw: np.random.Generator) -> None:
        super().__init__()
        self.at, self.draw = at, draw
        self.dead = False
        self._files: dict[int, int] = {}  # descriptor -> inode
        self._paths: dict[int, Path] = {}  # inode -> where it is now
        self._writes: list[tuple[int, int, int, bytes]] = []  # inode, offset, length, what was there before
        self._names: list[tuple[Path, Callable[[], object]]] = []
        self._trash = Path(tempfile.mkdtemp(prefix="trash"))

    def before(self, call: str) -> None:
        super().before(call)
        if self.dead or len(self.calls) - 1 == self.at:
            self.dead = True
            raise Dead

    def open(self, path: Path, fresh: bool = False) -> int:
        absent = not path.exists()
        old = path.read_bytes() if fresh and not absent else b""
        file = super().open(path, fresh)
        inode = os.fstat(file).st_ino
        self._files[file], self._paths[inode] = inode, path
        if absent:
            self._names.append((path.parent, partial(self._unmake, inode)))
        elif old:
            self._writes.append((inode, 0, 0, old))
        return file

    def write(self, file: int, offset: int, data: Bytes) -> int:
        old = os.pread(file, len(memoryview(data)), offset)
        done = super().write(file, offset, data)
        self._writes.append((self._inode(file), offset, done, old))
        return done

    def sync(self, file: int) -> None:
        super().sync(file)
        inode = self._inode(file)
        self._writes = [write for write in self._writes if write[0] != inode]

    def rename(self, source: Path, target: Path) -> None:
        saved = self._save(target) if target.exists() else None
        super().rename(source, target)
        self._gone(target)
        self._moved(source, target)

        def undo() -> None:
            if target.exists():
                os.replace(target, source)
                self._moved(target, source)
            if saved is not None:
                shutil.move(saved, target)

        self._names.append((target.parent, undo))

    def remove(self, path: Path) -> None:
        saved = self._save(path)
        super().remove(path)
        self._gone(path)
        self._names.append((path.parent, lambda: path.parent.exists() and shutil.move(saved, path)))

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self._names.append((path.parent, lambda: shutil.rmtree(path, ignore_errors=True)))

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self._names = [name for name in self._names if name[0] != path]

    def cut(self) -> None:
        """The state of the disk when the power is back."""
        self.dead = True
        keep = {folder: int(self.draw.integers(0, 4)) for folder in {folder for folder, _ in self._names}}
        for inode, offset, length, old in reversed(self._writes):
            path = self._paths[inode]
            if self.draw.random() < 0.7 and path.is_file():
                with path.open("r+b") as file:
                    last = path.stat().st_size == offset + length
                    file.seek(offset)
                    file.write(old if last else old.ljust(length, b"\0"))
                    if last:
                        file.truncate(offset + len(old))
        survivors: set[int] = set()
        for position, (folder, _) in enumerate(self._names):
            if keep[folder] > 0:
                keep[folder] -= 1
                survivors.add(position)
        for position in reversed(range(len(self._names))):
            if position not in survivors:
                self._names[position][1]()
        shutil.rmtree(self._trash, ignore_errors=True)

    def _inode(self, file: int) -> int:
        """Also of a file that was opened before this disk took over."""
        if file not in self._files:
            inode = os.fstat(file).st_ino
            self._files[file], self._paths[inode] = inode, Path(os.readlink(f"/proc/self/fd/{file}"))
        return self._files[file]

    def _save(self, path: Path) -> str:
        place = self._trash / str(len(self.calls))
        if path.is_dir():
            shutil.copytree(path, place)
        else:
            shutil.copy2(path, place)
        return str(place)

    def _unmake(self, inode: int) -> None:
        if inode in self._paths:
            self._paths[inode].unlink(missing_ok=True)

    def _gone(self, path: Path) -> None:
        for inode in [inode for inode, where in self._paths.items() if where == path]:
            del self._paths[inode]
            self._writes = [write for write in self._writes if write[0] != inode]

    def _moved(self, source: Path, target: Path) -> None:
        for inode, path in self._paths.items():
            if path == source:
                self._paths[inode] = target
            elif source in path.parents:
                self._paths[inode] = target / path.relative_to(source)
