"""Locks of run folders: a marker, a lock for as long as the run is active, and safe replacement of an old run.

``mkdir`` reserves a name and a lock its folder before anything else is written. To replace a run, its files are
renamed into ``.replacing``, and that into ``.replaced`` once all are there; they are removed when the new run can be
resumed. After a crash at any point, the next process finds a complete run, the new or the old one. Files that are not
part of a run are never moved.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hansa import __version__
from hansa.core.errors import HansaError
from hansa.runs.store import DamagedFileError, io
from hansa.runs.store.database import FILES
from hansa.runs.store.lock import FileLock, InUseError
from hansa.runs.trust import IDENTITY

CONFIG = "config.yaml"
PARTITION = "partition.safetensors"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
MODEL = "model.safetensors"
COMPOSITION = "composition.json"
PREPROCESSING = "preprocessing.json"
MARKER = ".hansa-run"
NAMES = (
    CONFIG, IDENTITY, COMPOSITION, PREPROCESSING, PARTITION, METRICS, *FILES, SUMMARY, MODEL, ENVIRONMENT, MARKER,
)  # fmt: skip
"""The files of a run in order of removal: the first makes the folder a run, the last identifies it as Hansa's."""

LOCK = ".hansa-lock"
REPLACING, REPLACED = ".replacing", ".replaced"
FORMAT = 3
"""Format of run folders. Earlier ones, without a database, are refused."""


class FolderLock:
    """The lock of one folder, acquired by `acquire` or `acquire_existing`, released by `release`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: FileLock | None = None
        self._created = False

    @property
    def is_locked(self) -> bool:
        """Whether this object holds the lock."""
        return self._lock is not None

    def check(self, *, overwrite: bool = False) -> None:
        """Refuse a folder that is not empty; with ``overwrite`` it may hold a run. Nothing is changed."""
        if not os.path.lexists(self.path):
            return
        if not self.path.is_dir() or not (_has_config(self.path) or _is_unfinished_start(self.path)):
            raise HansaError(f"{self.path}: not empty, and not a run folder. Choose another folder.")
        if not _has_config(self.path):
            return
        if not overwrite:
            raise HansaError(
                f"{self.path}: already holds a run. `hansa resume {self.path}` resumes it, --overwrite replaces it."
            )
        if not _is_run_folder(self.path):
            raise HansaError(
                f"{self.path}: has a {CONFIG}, but no marker of a run by Hansa. Remove it by hand, or choose another "
                "folder."
            )

    def acquire(self, *, overwrite: bool = False, numbered: bool = False) -> None:
        """Create and lock the folder for a new run.

        Args:
            overwrite: Set an existing run aside until `discard_replaced` or `roll_back`.
            numbered: Take the name, or the next free one: name, name-2, name-3, ...
        """
        if numbered:
            self._acquire_numbered()
            return
        self.check(overwrite=overwrite)
        io.make_folder(self.path.parent.absolute())
        self._created = io.create_folder(self.path.absolute())
        self._lock_folder()
        try:
            self._recover()
            self.check(overwrite=overwrite)
            if _has_config(self.path):
                self._move_aside()
            else:
                self._clear()
        except BaseException:
            self.release()
            raise

    def _acquire_numbered(self) -> None:
        wanted, number = self.path, 1
        io.make_folder(wanted.parent.absolute())
        while not io.create_folder(self.path.absolute()):
            number += 1
            self.path = wanted.with_name(f"{wanted.name}-{number}")
        self._created = True
        self._lock_folder()

    def acquire_existing(self) -> None:
        """Lock the folder of a run that is to be resumed."""
        if not self.path.is_dir() or not (_has_config(self.path) or self._interrupted()):
            raise HansaError(f"{self.path}: not a run folder: {CONFIG} is missing.")
        self._lock_folder()
        self._recover()

    def discard_replaced(self) -> None:
        """Remove the replaced run: the new one can be resumed."""
        io.remove(self.path / REPLACED)

    def roll_back(self) -> None:
        """Restore the folder as it was before `acquire`."""
        if self._interrupted():
            self._recover()
        else:
            self._clear()
        if self._created:
            io.remove(self.path / LOCK)
            io.remove(self.path)
        self.release()

    def release(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _lock_folder(self) -> None:
        path = self.path / LOCK
        lock = FileLock(path)
        if not lock.is_lock_of(path):  # the folder was moved or replaced in the meantime
            lock.close()
            raise InUseError(f"{self.path} is being replaced by another run. Wait for it, or choose another folder.")
        self._lock = lock

    def _interrupted(self) -> bool:
        return any((self.path / name).is_dir() for name in (REPLACING, REPLACED))

    def _move_aside(self) -> None:
        io.make_folder((self.path / REPLACING).absolute())
        for name in NAMES:
            io.remove(self.path / (name + io.TEMPORARY_SUFFIX))
            if os.path.lexists(self.path / name):
                io.rename(self.path / name, self.path / REPLACING / name)
        io.rename(self.path / REPLACING, self.path / REPLACED)

    def _recover(self) -> None:
        """Finish or undo an interrupted replacement."""
        if (self.path / REPLACED).is_dir():
            if _has_config(self.path):
                return self.discard_replaced()
            self._clear()
            io.rename(self.path / REPLACED, self.path / REPLACING)
        if (self.path / REPLACING).is_dir():
            for name in reversed(NAMES):
                if os.path.lexists(self.path / REPLACING / name):
                    io.rename(self.path / REPLACING / name, self.path / name)
            io.remove(self.path / REPLACING)
        return None

    def _clear(self) -> None:
        for name in NAMES:
            io.remove(self.path / (name + io.TEMPORARY_SUFFIX))
            io.remove(self.path / name)


def write_marker(path: Path, content: dict[str, Any]) -> None:
    """Mark a folder as a run folder."""
    io.write_sealed(path / MARKER, {"format": FORMAT, **content})


def read_marker(path: Path) -> dict[str, Any] | None:
    """Return the content of a folder's marker; None in folders of Hansa 0.1, which have none."""
    if not (path / MARKER).exists():
        return None
    content = io.read_sealed(path / MARKER)
    if not isinstance(content, dict) or content.get("format") not in range(1, FORMAT + 1):
        raise HansaError(f"{path / MARKER}: written by a newer Hansa; this is Hansa {__version__}.")
    return content


def _has_config(path: Path) -> bool:
    return (path / CONFIG).is_file()


def _entry_names(path: Path) -> set[str]:
    return {entry.name.removesuffix(io.TEMPORARY_SUFFIX) for entry in os.scandir(path)}


def _is_run_folder(path: Path) -> bool:
    """Return whether Hansa wrote the folder: it has a marker, or (0.1) contains nothing but the files of a run."""
    try:
        if read_marker(path) is not None:
            return True
    except DamagedFileError:
        return False
    names = _entry_names(path) - {LOCK}
    return {CONFIG, ENVIRONMENT} <= names <= set(NAMES)


def _is_unfinished_start(path: Path) -> bool:
    """Return whether the folder is empty, or was left by a run that was killed before it had its configuration."""
    names = _entry_names(path)
    marked = bool({LOCK, MARKER} & names)
    return not names or (marked and names <= {*NAMES, LOCK, REPLACING, REPLACED})
