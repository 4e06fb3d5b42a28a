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
from hansa.runs.store.io import FileLock
from hansa.runs.trust import IDENTITY

CONFIG = "config.yaml"
PARTITION = "partition.safetensors"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
MODEL = "model.safetensors"
PREPROCESSING = "preprocessing.json"
MARKER = ".hansa-run"
NAMES = (
    CONFIG, IDENTITY, PREPROCESSING, PARTITION, METRICS, *FILES, SUMMARY, MODEL, ENVIRONMENT, MARKER,
)  # fmt: skip
"""The files of a run in order of removal: the first makes the folder a run, the last identifies it as Hansa's."""

LOCK = ".hansa-lock"
REPLACING, REPLACED = ".replacing", ".replaced"
FORMAT = 4
"""Format of run folders. Others are refused."""


class FolderLock:
    """The lock of one folder, acquired by `acquire` or `acquire_existing`, released by `release`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: FileLock | None = None
        self._created = False

    def check(self, *, overwrite: bool = False) -> None:
        """Refuse a folder that is not empty; with ``overwrite`` it may hold a run. Nothing is changed."""
        if not os.path.lexists(self.path):
            return
        holds_run = (self.path / CONFIG).is_file()
        if not holds_run and not (self.path.is_dir() and _is_unfinished_start(self.path)):
            raise HansaError(f"{self.path}: not empty, and not a run folder. Choose another folder.")
        if holds_run and not overwrite:
            raise HansaError(
                f"{self.path}: already holds a run. `hansa resume {self.path}` resumes it, --overwrite replaces it."
            )
        if holds_run and not _is_marked(self.path):
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
            self.path = io.create_numbered(self.path)
            self._created = True
        else:
            self.check(overwrite=overwrite)
            io.make_folder(self.path.parent.absolute())
            self._created = io.create_folder(self.path.absolute())
        self._lock = FileLock(self.path / LOCK)
        try:
            self._recover()
            self.check(overwrite=overwrite)
            if (self.path / CONFIG).is_file():
                self._move_aside()
            else:
                self._clear()
        except BaseException:
            self.release()
            raise

    def acquire_existing(self) -> None:
        """Lock the folder of a run that is to be resumed."""
        if not any((self.path / name).exists() for name in (CONFIG, REPLACING, REPLACED)):
            raise HansaError(f"{self.path}: not a run folder: {CONFIG} is missing.")
        self._lock = FileLock(self.path / LOCK)
        self._recover()

    def discard_replaced(self) -> None:
        """Remove the replaced run: the new one can be resumed."""
        io.remove(self.path / REPLACED)

    def roll_back(self) -> None:
        """Restore the folder as it was before `acquire`."""
        if not self._recover():
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

    def _move_aside(self) -> None:
        io.make_folder((self.path / REPLACING).absolute())
        for name in NAMES:
            io.remove(self.path / (name + io.TEMPORARY_SUFFIX))
            if os.path.lexists(self.path / name):
                io.rename(self.path / name, self.path / REPLACING / name)
        io.rename(self.path / REPLACING, self.path / REPLACED)

    def _recover(self) -> bool:
        """Finish or undo an interrupted replacement; return whether there was one."""
        replacing, replaced = self.path / REPLACING, self.path / REPLACED
        if replaced.is_dir():
            if (self.path / CONFIG).is_file():
                self.discard_replaced()
                return True
            self._clear()
            io.rename(replaced, replacing)
        if not replacing.is_dir():
            return False
        for name in reversed(NAMES):
            if os.path.lexists(replacing / name):
                io.rename(replacing / name, self.path / name)
        io.remove(replacing)
        return True

    def _clear(self) -> None:
        for name in NAMES:
            io.remove(self.path / (name + io.TEMPORARY_SUFFIX))
            io.remove(self.path / name)


def write_marker(path: Path, content: dict[str, Any]) -> None:
    """Mark a folder as a run folder."""
    io.write_sealed(path / MARKER, {"format": FORMAT, **content})


def read_marker(path: Path) -> dict[str, Any]:
    """Return the content of a folder's marker; one of another format is refused by the version that wrote it."""
    content = io.read_sealed(path / MARKER)
    if content["format"] != FORMAT:
        version = content["bound"]["version"]
        raise HansaError(
            f"{path}: written by Hansa {version} (format {content['format']}); this is Hansa {__version__}, which "
            f"reads format {FORMAT}. Use Hansa {version} for it, or start a new run."
        )
    return content


def _is_marked(path: Path) -> bool:
    try:
        return bool(io.read_sealed(path / MARKER))
    except DamagedFileError:
        return False


def _is_unfinished_start(path: Path) -> bool:
    """Return whether the folder is empty, or was left by a run that was killed before it had its configuration."""
    names = {entry.name.removesuffix(io.TEMPORARY_SUFFIX) for entry in os.scandir(path)}
    marked = bool({LOCK, MARKER} & names)
    return not names or (marked and names <= {*NAMES, LOCK, REPLACING, REPLACED})
