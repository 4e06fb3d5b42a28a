"""A site's store of client memory, by version. A version is durable before the upload made with it leaves the site."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hansa.core.errors import HansaError
from hansa.federation.messages import MemoryVersion
from hansa.rounds import wire_format
from hansa.rounds.wire_format import Blobs
from hansa.runs.store import DamagedFileError, io
from hansa.runs.store.database import DATABASE, ROWS, Database
from hansa.runs.store.row_file import RowEntry


class MemoryStore(Protocol):
    """Stores versions of client memory."""

    def get(self, client: int, version: MemoryVersion) -> dict[str, Tensor] | None:
        """Return the rows of a version, or None if it is not stored."""
        ...

    def put(
        self, client: int, version: MemoryVersion, rows: Mapping[str, Tensor], parent: MemoryVersion | None = None
    ) -> None:
        """Store a version that was made from ``parent``; durable when this returns."""
        ...

    def prune(self, client: int, named: MemoryVersion | None, keep_from: int) -> None:
        """Delete the versions that no server can name any more, given the version that it named last."""
        ...

    def clients(self) -> list[int]: ...


def obsolete_versions(
    parents: Mapping[MemoryVersion, MemoryVersion | None], named: MemoryVersion | None, keep_from: int
) -> list[MemoryVersion]:
    """Return the versions that no server can name any more, given the parent of each and the version named last.

    The named version was accepted, and so were its ancestors. A server that resumes, at the earliest from round
    ``keep_from``, names the newest ancestor from before that round, or a newer one. All other versions from before that
    round were never accepted or are older. If that newest ancestor is not known, nothing is deleted.
    """
    newest = named
    while newest is not None and newest.round >= keep_from:
        newest = parents.get(newest)
    if newest is None:
        return []
    return [version for version in parents if version != newest and version.round < keep_from]


class RamMemoryStore:
    """Client memory in RAM, for tests and for sites that may lose it."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[MemoryVersion, dict[str, Tensor]]] = {}
        self._parents: dict[int, dict[MemoryVersion, MemoryVersion | None]] = {}

    def get(self, client: int, version: MemoryVersion) -> dict[str, Tensor] | None:
        rows = self._rows.get(client, {}).get(version)
        return None if rows is None else {name: row.clone() for name, row in rows.items()}

    def put(
        self, client: int, version: MemoryVersion, rows: Mapping[str, Tensor], parent: MemoryVersion | None = None
    ) -> None:
        self._rows.setdefault(client, {})[version] = {name: row.detach().clone() for name, row in rows.items()}
        self._parents.setdefault(client, {})[version] = parent

    def prune(self, client: int, named: MemoryVersion | None, keep_from: int) -> None:
        for version in obsolete_versions(self._parents.get(client, {}), named, keep_from):
            del self._rows[client][version], self._parents[client][version]

    def clients(self) -> list[int]:
        return sorted(client for client, versions in self._rows.items() if versions)


class DiskMemoryStore:
    """Client memory in a folder, in a database as that of a run. A version is durable when `put` returns.

    Several processes may use it.

    Args:
        folder: The folder, created if it is absent; one for each run.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        io.make_folder(self.folder)
        self._opened: Database | None = None
        if not os.path.lexists(self.folder / DATABASE):
            if os.path.lexists(self.folder / ROWS):
                raise DamagedFileError(f"{self.folder / DATABASE} is missing. Restore it from a backup.")
            Database.create(self.folder)

    @property
    def _database(self) -> Database:
        """The database, opened once in each process."""
        if self._opened is None or not self._opened.is_mine:
            self._opened = Database(self.folder, writing=True, shared=False)
        return self._opened

    def get(self, client: int, version: MemoryVersion) -> dict[str, Tensor] | None:
        try:
            _, entry = self._versions(client).get(version, (None, None))
            if entry is None:
                return None
            frame = wire_format.unpack(self._database.get(entry).numpy().tobytes(), "memory")
            return wire_format.read_tensors(frame.head.get("rows"), frame)
        except (wire_format.FrameError, DamagedFileError) as error:
            raise HansaError(
                f"{self.folder}: the memory of client {client} is damaged ({error}). Restore it from a backup, or "
                f"restart the server with --forget {client}."
            ) from error

    def put(
        self, client: int, version: MemoryVersion, rows: Mapping[str, Tensor], parent: MemoryVersion | None = None
    ) -> None:
        blobs, database = Blobs(), self._database
        head = {"rows": blobs.tensors(rows)}
        content = torch.frombuffer(bytearray(wire_format.pack("memory", head, blobs.blobs)), dtype=torch.uint8)
        name = " ".join(str(named) for named in (version, parent) if named is not None)
        database.check_present()
        with database.writing_rows():
            database.see_others()
            database.delete(entry for known, (_, entry) in self._versions(client).items() if known == version)
            database.put("memory", client, name, version.round, content)
            database.commit()

    def prune(self, client: int, named: MemoryVersion | None, keep_from: int) -> None:
        versions, database = self._versions(client), self._database
        parents = {version: parent for version, (parent, _) in versions.items()}
        if obsolete := obsolete_versions(parents, named, keep_from):
            with database.writing_rows():
                database.see_others()
                database.delete(versions[version][1] for version in obsolete)
                database.commit()

    def clients(self) -> list[int]:
        return sorted({entry.client for entry, _ in self._database.entries("kind = 'memory'")})

    def _versions(self, client: int) -> dict[MemoryVersion, tuple[MemoryVersion | None, RowEntry]]:
        """Return a client's versions, each with its parent and its row."""
        versions: dict[MemoryVersion, tuple[MemoryVersion | None, RowEntry]] = {}
        for entry, _ in self._database.entries("kind = 'memory' AND client = ?", [client]):
            version, *parent = map(MemoryVersion.parse, entry.name.split(" "))
            versions[version] = (parent[0] if parent else None), entry
        return versions
