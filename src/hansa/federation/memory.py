"""Versions of a client's memory, named by stamps. A site writes a version durably before it answers with the upload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hansa.errors import HansaError
from hansa.federation.exchange import Stamp
from hansa.rounds import frames
from hansa.rounds.frames import Blobs
from hansa.store import io


class Versions(Protocol):
    """What a site remembers of its clients."""

    def get(self, client: int, stamp: Stamp) -> dict[str, Tensor] | None:
        """The rows of a version, or None where it is not held."""
        ...

    def put(self, client: int, stamp: Stamp, rows: Mapping[str, Tensor]) -> None:
        """Keep a version; durable when this returns."""
        ...

    def prune(self, client: int, named: Stamp | None, keep_from: int) -> None:
        """Forget versions that no server can name any more: older than ``keep_from`` and not the one just named."""
        ...

    def clients(self) -> list[int]: ...


def _outdated(held: Iterable[Stamp], named: Stamp | None, keep_from: int) -> list[Stamp]:
    """A version that the server did not name was not admitted; it can only be named by a server that went back, and
    none goes back behind ``keep_from``."""
    return [stamp for stamp in held if stamp != named and stamp.round < keep_from]


class RamVersions:
    """Versions in memory, for tests and for sites that may forget."""

    def __init__(self) -> None:
        self._held: dict[int, dict[Stamp, dict[str, Tensor]]] = {}

    def get(self, client: int, stamp: Stamp) -> dict[str, Tensor] | None:
        rows = self._held.get(client, {}).get(stamp)
        return None if rows is None else {name: row.clone() for name, row in rows.items()}

    def put(self, client: int, stamp: Stamp, rows: Mapping[str, Tensor]) -> None:
        self._held.setdefault(client, {})[stamp] = {name: row.detach().clone() for name, row in rows.items()}

    def prune(self, client: int, named: Stamp | None, keep_from: int) -> None:
        held = self._held.get(client, {})
        for stamp in _outdated(list(held), named, keep_from):
            del held[stamp]

    def clients(self) -> list[int]:
        return sorted(client for client, held in self._held.items() if held)


class DiskVersions:
    """Versions in a folder, a file each, written whole and synced before their upload leaves the site."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        io.make_folder(self.folder)

    def get(self, client: int, stamp: Stamp) -> dict[str, Tensor] | None:
        path = self._path(client, stamp)
        if not path.is_file():
            return None
        try:
            frame = frames.unpack(path.read_bytes(), "memory")
            return frames.read_tensors(frame.head.get("rows"), frame)
        except frames.FrameError as error:
            raise HansaError(
                f"{path}: the memory of client {client} is damaged ({error}). Restore the file from a backup, or let "
                f"the operator forget this client's memory."
            ) from error

    def put(self, client: int, stamp: Stamp, rows: Mapping[str, Tensor]) -> None:
        blobs = Blobs()
        head = {"rows": blobs.tensors(rows)}
        io.make_folder(self.folder / str(client))
        io.write_file(self._path(client, stamp), frames.pack("memory", head, blobs.found))

    def prune(self, client: int, named: Stamp | None, keep_from: int) -> None:
        for stamp in _outdated(self._stamps(client), named, keep_from):
            io.remove(self._path(client, stamp))

    def clients(self) -> list[int]:
        numbers = [int(path.name) for path in self.folder.iterdir() if path.name.isdigit()]
        return sorted(client for client in numbers if self._stamps(client))

    def _stamps(self, client: int) -> list[Stamp]:
        folder = self.folder / str(client)
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return [Stamp.parse(name.removesuffix(".rows").replace("-", ":")) for name in names if name.endswith(".rows")]

    def _path(self, client: int, stamp: Stamp) -> Path:
        return self.folder / str(client) / f"{stamp.round}-{stamp.digest}.rows"
