"""Taking a folder for a run: a marker that says it is ours, a lock for as long as the run lives, an old run put aside.

A name is taken by ``mkdir``, a folder by its lock, and nothing else is written before. To start anew in a folder, the
old run's files are renamed into ``.replacing`` and that into ``.replaced`` once all are there; when the new run can be
taken up they are removed. Whatever happens in between, the next to take the folder finds a whole run, the new or the
old, and files that are not ours are never moved.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hansa.core.errors import HansaError
from hansa.runs.store import Damaged, io
from hansa.runs.store.lock import InUse, Lock

CONFIG = "config.yaml"
PARTITION = "partition.safetensors"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
MODEL = "model.safetensors"
RECORD = "clients.columns"
CHECKPOINT = "checkpoint"
CLIENTS = "clients"
MARKER = ".hansa-run"
NAMES = (CONFIG, PARTITION, METRICS, RECORD, SUMMARY, MODEL, CHECKPOINT, CLIENTS, ENVIRONMENT, MARKER)
"""All that is ours in a folder, in the order in which it is cleared away: without the first it is no run any more, and
with the last it is still ours."""

LOCK = ".hansa-lock"
REPLACING, REPLACED = ".replacing", ".replaced"
FORMAT = 1


class Claim:
    """The hold on one folder: taken by `take` or `hold`, let go of by `release`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: Lock | None = None
        self._made = False

    @property
    def held(self) -> bool:
        """Whether this object holds the folder."""
        return self._lock is not None

    def check(self, *, overwrite: bool = False) -> None:
        """Refuse a folder that holds something; with ``overwrite`` a run of ours may be in it. Nothing is changed."""
        if not os.path.lexists(self.path):
            return
        if not self.path.is_dir() or not (_begun(self.path) or _barely_begun(self.path)):
            raise HansaError(f"{self.path}: holds something that is not a run. Choose another folder.")
        if not _begun(self.path):
            return
        if not overwrite:
            raise HansaError(
                f"{self.path}: holds a run already. `hansa resume {self.path}` goes on with it, "
                "--overwrite starts anew."
            )
        if not _ours(self.path):
            raise HansaError(
                f"{self.path}: there is a {CONFIG}, but nothing that says that hansa made the rest. Remove by hand "
                "what is not needed, or choose another folder."
            )

    def take(self, *, overwrite: bool = False) -> None:
        """Lock the folder, made if absent, and clear the place for a new run: an old one is put aside."""
        self.check(overwrite=overwrite)
        io.make_folder(self.path.parent.absolute())
        self._made = io.take_folder(self.path.absolute())
        self._hold()
        try:
            self._settle()
            self.check(overwrite=overwrite)
            if _begun(self.path):
                self._put_aside()
            else:
                self._clear()
        except BaseException:
            self.release()
            raise

    def take_numbered(self) -> None:
        """Take the folder of this name, or of the next free one: name, name-2, name-3, ..."""
        wanted, number = self.path, 1
        io.make_folder(wanted.parent.absolute())
        while not io.take_folder(self.path.absolute()):
            number += 1
            self.path = wanted.with_name(f"{wanted.name}-{number}")
        self._made = True
        self._hold()

    def hold(self) -> None:
        """Lock the folder of a run that is to go on."""
        if not self.path.is_dir() or not (_begun(self.path) or self._interrupted()):
            raise HansaError(f"{self.path}: no run here, for there is no {CONFIG}.")
        self._hold()
        self._settle()

    def done(self) -> None:
        """The new run can be taken up: what it replaced goes now."""
        io.remove(self.path / REPLACED)

    def withdraw(self) -> None:
        """The new run did not come about: all is as it was before `take`."""
        if self._interrupted():
            self._settle()
        else:
            self._clear()
        if self._made:
            io.remove(self.path / LOCK)
            io.remove(self.path)
        self.release()

    def release(self) -> None:
        """Let go of the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _hold(self) -> None:
        path = self.path / LOCK
        lock = Lock(path)
        if not lock.guards(path):  # the folder was moved or replaced in the meantime
            lock.close()
            raise InUse(f"{self.path} is being replaced by another run. Wait for it, or choose another folder.")
        self._lock = lock

    def _interrupted(self) -> bool:
        return any((self.path / name).is_dir() for name in (REPLACING, REPLACED))

    def _put_aside(self) -> None:
        io.make_folder((self.path / REPLACING).absolute())
        for name in NAMES:
            io.remove(self.path / (name + io.ASIDE))
            if os.path.lexists(self.path / name):
                io.rename(self.path / name, self.path / REPLACING / name)
        io.rename(self.path / REPLACING, self.path / REPLACED)

    def _settle(self) -> None:
        """Finish or undo a replacement that was cut short."""
        if (self.path / REPLACED).is_dir():
            if _begun(self.path):
                return self.done()
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
            io.remove(self.path / (name + io.ASIDE))
            io.remove(self.path / name)


def write_marker(path: Path, facts: dict[str, Any]) -> None:
    """Say that a folder is a run's, and what the run is bound to."""
    io.write_sealed(path / MARKER, {"format": FORMAT, **facts})


def read_marker(path: Path) -> dict[str, Any] | None:
    """What a folder says of its run; None in folders of hansa 0.1, which have no marker."""
    if not (path / MARKER).exists():
        return None
    facts = io.read_sealed(path / MARKER)
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise HansaError(f"{path / MARKER}: written by another hansa, which this one does not understand.")
    return facts


def _begun(path: Path) -> bool:
    return (path / CONFIG).is_file()


def _found(path: Path) -> set[str]:
    return {entry.name.removesuffix(io.ASIDE) for entry in os.scandir(path)}


def _ours(path: Path) -> bool:
    """Whether hansa made what our names stand for: it left its marker, or (0.1) there is nothing but our names."""
    try:
        if read_marker(path) is not None:
            return True
    except Damaged:
        return False
    found = _found(path) - {LOCK}
    return {CONFIG, ENVIRONMENT} <= found <= set(NAMES)


def _barely_begun(path: Path) -> bool:
    """Whether all there is, if anything, was left by a run that was killed before it had its configuration."""
    found = _found(path)
    ours = {LOCK, MARKER} & found
    return not found or (bool(ours) and found <= {*NAMES, LOCK, REPLACING, REPLACED})
