"""Versions of a client's memory, named by stamps. A site writes a version durably before it answers with the upload."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hansa.core.errors import HansaError
from hansa.federation.messages import Stamp
from hansa.rounds import wire_format
from hansa.rounds.wire_format import Blobs
from hansa.runs.store import io


class Versions(Protocol):
    """What a site remembers of its clients."""

    def get(self, client: int, stamp: Stamp) -> dict[str, Tensor] | None:
        """The rows of a version, or None where it is not held."""
        ...

    def put(self, client: int, stamp: Stamp, rows: Mapping[str, Tensor], parent: Stamp | None = None) -> None:
        """Keep a version, made upon ``parent``; durable when this returns."""
        ...

    def prune(self, client: int, named: Stamp | None, keep_from: int) -> None:
        """Forget versions that no server can name any more, the one just named being ``named``."""
        ...

    def clients(self) -> list[int]: ...


def outdated(parents: Mapping[Stamp, Stamp | None], named: Stamp | None, keep_from: int) -> list[Stamp]:
    """The versions that no server can name any more, given what each was made upon and which one was just named.

    What was named was admitted, and so was all that it was made upon. A server that goes back, at most to the beginning
    of round ``keep_from``, names the newest of these from before then, or a newer one. Whatever else is from before
    then was never admitted, or is older: nobody can name it. Where that newest one is not known nothing is forgotten.
    """
    at = named
    while at is not None and at.round >= keep_from:
        at = parents.get(at)
    if at is None:
        return []
    return [stamp for stamp in parents if stamp != at and stamp.round < keep_from]


class RamVersions:
    """Versions in memory, for tests and for sites that may forget."""

    def __init__(self) -> None:
        self._held: dict[int, dict[Stamp, dict[str, Tensor]]] = {}
        self._parents: dict[int, dict[Stamp, Stamp | None]] = {}

    def get(self, client: int, stamp: Stamp) -> dict[str, Tensor] | None:
        rows = self._held.get(client, {}).get(stamp)
        return None if rows is None else {name: row.clone() for name, row in rows.items()}

    def put(self, client: int, stamp: Stamp, rows: Mapping[str, Tensor], parent: Stamp | None = None) -> None:
        self._held.setdefault(client, {})[stamp] = {name: row.detach().clone() for name, row in rows.items()}
        self._parents.setdefault(client, {})[stamp] = parent

    def prune(self, client: int, named: Stamp | None, keep_from: int) -> None:
        for stamp in outdated(self._parents.get(client, {}), named, keep_from):
            del self._held[client][stamp], self._parents[client][stamp]

    def clients(self) -> list[int]:
        return sorted(client for client, held in self._held.items() if held)


class DiskVersions:
    """Versions in a folder, a file each, written whole and synced before their upload leaves the site."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        io.make_folder(self.folder)

    def get(self, client: int, stamp: Stamp) -> dict[str, Tensor] | None:
        found = self._found(client).get(stamp)
        if found is None:
            return None
        path, _ = found
        try:
            frame = wire_format.unpack(path.read_bytes(), "memory")
            return wire_format.read_tensors(frame.head.get("rows"), frame)
        except wire_format.FrameError as error:
            raise HansaError(
                f"{path}: the memory of client {client} is damaged ({error}). Restore the file from a backup, or let "
                f"the operator forget this client's memory."
            ) from error

    def put(self, client: int, stamp: Stamp, rows: Mapping[str, Tensor], parent: Stamp | None = None) -> None:
        blobs = Blobs()
        head = {"rows": blobs.tensors(rows)}
        io.make_folder(self.folder / str(client))
        names = [f"{named.round}-{named.digest}" for named in (stamp, parent) if named is not None]
        path = self.folder / str(client) / ("-".join(names) + _SUFFIX)
        io.write_file(path, wire_format.pack("memory", head, blobs.found))

    def prune(self, client: int, named: Stamp | None, keep_from: int) -> None:
        found = self._found(client)
        for stamp in outdated({stamp: parent for stamp, (_, parent) in found.items()}, named, keep_from):
            io.remove(found[stamp][0])

    def clients(self) -> list[int]:
        numbers = [int(path.name) for path in self.folder.iterdir() if path.name.isdigit()]
        return sorted(client for client in numbers if self._found(client))

    def _found(self, client: int) -> dict[Stamp, tuple[Path, Stamp | None]]:
        """A client's versions: the file of each, whose name also says what it was made upon."""
        folder = self.folder / str(client)
        found: dict[Stamp, tuple[Path, Stamp | None]] = {}
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name.endswith(_SUFFIX):
                parts = path.name.removesuffix(_SUFFIX).split("-")
                stamps = [Stamp.parse(":".join(parts[at : at + 2])) for at in range(0, len(parts), 2)]
                found[stamps[0]] = path, stamps[1] if len(stamps) > 1 else None
        return found


_SUFFIX = ".rows"
