"""A site's store of client memory, by version. A version is durable before the upload made with it leaves the site."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hansa.core.errors import HansaError
from hansa.federation.messages import MemoryVersion
from hansa.rounds import wire_format
from hansa.rounds.wire_format import Blobs
from hansa.runs.store import io


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
    """Client memory in a folder, one file per version, synced when `put` returns."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        io.make_folder(self.folder)

    def get(self, client: int, version: MemoryVersion) -> dict[str, Tensor] | None:
        entry = self._files(client).get(version)
        if entry is None:
            return None
        path, _ = entry
        try:
            frame = wire_format.unpack(path.read_bytes(), "memory")
            return wire_format.read_tensors(frame.head.get("rows"), frame)
        except wire_format.FrameError as error:
            raise HansaError(
                f"{path}: the memory of client {client} is damaged ({error}). Restore the file from a backup, or "
                f"restart the server with --forget {client}."
            ) from error

    def put(
        self, client: int, version: MemoryVersion, rows: Mapping[str, Tensor], parent: MemoryVersion | None = None
    ) -> None:
        blobs = Blobs()
        head = {"rows": blobs.tensors(rows)}
        io.make_folder(self.folder / str(client))
        names = [f"{named.round}-{named.digest}" for named in (version, parent) if named is not None]
        path = self.folder / str(client) / ("-".join(names) + _SUFFIX)
        io.write_file(path, wire_format.pack("memory", head, blobs.blobs))

    def prune(self, client: int, named: MemoryVersion | None, keep_from: int) -> None:
        files = self._files(client)
        parents = {version: parent for version, (_, parent) in files.items()}
        for version in obsolete_versions(parents, named, keep_from):
            io.remove(files[version][0])

    def clients(self) -> list[int]:
        numbers = [int(path.name) for path in self.folder.iterdir() if path.name.isdigit()]
        return sorted(client for client in numbers if self._files(client))

    def _files(self, client: int) -> dict[MemoryVersion, tuple[Path, MemoryVersion | None]]:
        """Return a client's versions with the file and the parent of each, both from the file name."""
        folder = self.folder / str(client)
        files: dict[MemoryVersion, tuple[Path, MemoryVersion | None]] = {}
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name.endswith(_SUFFIX):
                parts = path.name.removesuffix(_SUFFIX).split("-")
                versions = [MemoryVersion.parse(":".join(parts[at : at + 2])) for at in range(0, len(parts), 2)]
                files[versions[0]] = path, versions[1] if len(versions) > 1 else None
        return files


_SUFFIX = ".rows"
