"""A site's store of client memory, by version. A version is durable before the upload made with it leaves the site."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hansa.core.errors import HansaError
from hansa.federation.messages import MemoryVersion
from hansa.rounds import wire_format
from hansa.rounds.wire_format import Blobs
from hansa.runs.store import DamagedFileError, io
from hansa.runs.store.database import Database, RowEntry


class MemoryStore(ABC):
    """Stores versions of client memory."""

    @abstractmethod
    def get(self, client: int, version: MemoryVersion) -> dict[str, Tensor] | None:
        """Return the rows of a version, or None if it is not stored."""

    @abstractmethod
    def put(
        self, client: int, version: MemoryVersion, rows: Mapping[str, Tensor], parent: MemoryVersion | None = None
    ) -> None:
        """Store a version that was made from ``parent``; durable when this returns."""

    @abstractmethod
    def clients(self) -> list[int]:
        """Return the clients that have a version."""

    def prune(self, client: int, named: MemoryVersion | None, keep_from: int) -> None:
        """Delete the versions that no server can name any more, given the version that it named last.

        The named version was accepted, and so were its ancestors. A server that resumes, at the earliest from round
        ``keep_from``, names the newest ancestor from before that round, or a newer one. All other versions from before
        that round were never accepted or are older. If that newest ancestor is not known, nothing is deleted.
        """
        versions, newest = self._versions(client), named
        while newest is not None and newest.round >= keep_from:
            newest, _ = versions.get(newest, (None, None))
        if newest is not None:
            old = [version for version in versions if version != newest and version.round < keep_from]
            self._delete(client, {version: versions[version][1] for version in old})

    @abstractmethod
    def _versions(self, client: int) -> Mapping[MemoryVersion, tuple[MemoryVersion | None, Any]]:
        """Return a client's versions, each with its parent and its rows or their place."""

    @abstractmethod
    def _delete(self, client: int, versions: Mapping[MemoryVersion, Any]) -> None: ...


class RamMemoryStore(MemoryStore):
    """Client memory in RAM, for tests and for sites that may lose it."""

    def __init__(self) -> None:
        self._stored: dict[int, dict[MemoryVersion, tuple[MemoryVersion | None, dict[str, Tensor]]]] = {}

    def get(self, client: int, version: MemoryVersion) -> dict[str, Tensor] | None:
        _, rows = self._versions(client).get(version, (None, None))
        return None if rows is None else {name: row.clone() for name, row in rows.items()}

    def put(
        self, client: int, version: MemoryVersion, rows: Mapping[str, Tensor], parent: MemoryVersion | None = None
    ) -> None:
        self._versions(client)[version] = parent, {name: row.detach().clone() for name, row in rows.items()}

    def clients(self) -> list[int]:
        return sorted(client for client, versions in self._stored.items() if versions)

    def _versions(self, client: int) -> dict[MemoryVersion, tuple[MemoryVersion | None, dict[str, Tensor]]]:
        return self._stored.setdefault(client, {})

    def _delete(self, client: int, versions: Mapping[MemoryVersion, Any]) -> None:
        for version in versions:
            del self._stored[client][version]


class DiskMemoryStore(MemoryStore):
    """Client memory in a folder, in a database as that of a run. A version is durable when `put` returns.

    Several processes may use it.

    Args:
        folder: The folder, created if it is absent; one for each run.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        io.make_folder(self.folder)
        Database.ensure(self.folder)
        self._opened: Database | None = None

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
        blobs = Blobs()
        head = {"rows": blobs.tensors(rows)}
        content = torch.frombuffer(bytearray(wire_format.pack("memory", head, blobs.blobs)), dtype=torch.uint8)
        name = " ".join(str(named) for named in (version, parent) if named is not None)
        with self._writing() as database:
            for known, (_, entry) in self._versions(client).items():
                if known == version:
                    database.delete("id = ?", [entry.id])
            database.put("memory", client, name, version.round, content)

    def clients(self) -> list[int]:
        return sorted({entry.client for entry in self._database.entries("kind = 'memory'")})

    def _versions(self, client: int) -> dict[MemoryVersion, tuple[MemoryVersion | None, RowEntry]]:
        versions: dict[MemoryVersion, tuple[MemoryVersion | None, RowEntry]] = {}
        for entry in self._database.entries("kind = 'memory' AND client = ?", [client]):
            version, *parent = map(MemoryVersion.parse, entry.name.split(" "))
            versions[version] = (parent[0] if parent else None), entry
        return versions

    def _delete(self, client: int, versions: Mapping[MemoryVersion, Any]) -> None:
        if versions:
            with self._writing() as database:
                for entry in versions.values():
                    database.delete("id = ?", [entry.id])

    @contextmanager
    def _writing(self) -> Iterator[Database]:
        """Write in one transaction, which is durable afterwards."""
        database = self._database
        database.check_present()
        with database.writing_rows():
            database.see_others()
            yield database
            database.commit()
