"""Row data on disk: files of equal slots. A row never overwrites one that any kept generation still needs."""

from __future__ import annotations

import heapq
import zlib
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from hansa.store import io
from hansa.store.base import DTYPES, dtype_name, raw, seal
from hansa.store.io import Damaged


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a row lies and what it must be: ``born`` is the generation that wrote it."""

    client: int
    name: str
    born: int
    dtype: str
    shape: tuple[int, ...]
    slot: int
    sha: str
    crc: int

    @property
    def count(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.count * DTYPES[self.dtype].itemsize

    @property
    def stride(self) -> int:
        """The size of the slots it lies in: a few size classes, so that equal models share one file."""
        unit = 64 if self.nbytes <= 4096 else 4096
        return max(1, -(-self.nbytes // unit)) * unit

    def to_json(self) -> list[object]:
        return [self.client, self.name, self.born, self.dtype, list(self.shape), self.slot, self.sha, self.crc]

    @classmethod
    def from_json(cls, fields: list[object]) -> Entry:
        client, name, born, dtype, shape, slot, sha, crc = fields
        return cls(client, name, born, dtype, tuple(shape), slot, sha, crc)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"client {self.client}, row {self.name!r} of round {self.born - 1}"


class RowFile:
    """The slot files of a store. Knows which slots are taken, not why."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[int, io.File] = {}
        self._free: dict[int, list[int]] = {}
        self._next: dict[int, int] = {}
        self._touched: set[int] = set()
        self._proven: set[Entry] = set()
        self._opening = Lock()

    def take(self, entries: list[Entry]) -> None:
        """Count these slots as taken and every other slot below the highest as free."""
        taken: dict[int, set[int]] = {}
        for entry in entries:
            taken.setdefault(entry.stride, set()).add(entry.slot)
        self._next = {stride: max(slots) + 1 for stride, slots in taken.items()}
        # ascending lists are heaps already
        self._free = {
            stride: [slot for slot in range(self._next[stride]) if slot not in slots] for stride, slots in taken.items()
        }

    def put(self, client: int, name: str, born: int, row: Tensor, sha: str) -> Entry:
        """Write a row into the lowest free slot."""
        data = raw(row)
        entry = Entry(client, name, born, dtype_name(row.dtype), tuple(row.shape), 0, sha, zlib.crc32(data))
        stride = entry.stride
        free = self._free.setdefault(stride, [])
        if free:
            slot = heapq.heappop(free)
        else:
            slot = self._next.get(stride, 0)
            self._next[stride] = slot + 1
        self._file(stride, make=True).write(slot * stride, data)
        self._touched.add(stride)
        return Entry(client, name, born, entry.dtype, entry.shape, slot, sha, entry.crc)

    def free(self, entry: Entry) -> None:
        """Give a slot up to later rows."""
        heapq.heappush(self._free.setdefault(entry.stride, []), entry.slot)
        self._proven.discard(entry)

    def sync(self) -> None:
        """Make every row put since the last sync durable."""
        for stride in sorted(self._touched):
            self._files[stride].sync()
        self._touched.clear()

    def get(self, entry: Entry, into: Tensor | None = None, *, quick: bool = False) -> Tensor:
        """Read a row, checked by SHA-256; ``quick`` lets CRC-32 do where SHA-256 has passed before."""
        flat = torch.empty(entry.count, dtype=DTYPES[entry.dtype]) if into is None else into
        view = raw(flat)
        path = self._path(entry.stride)
        if not path.exists():
            raise Damaged(f"{entry}: its file {path} is missing. Restore it, or start from another checkpoint.")
        found = self._file(entry.stride).read_into(entry.slot * entry.stride, view)
        if found < entry.nbytes:
            raise self._damaged(entry, f"the file ends after {found} of {entry.nbytes} bytes")
        if quick and entry in self._proven:
            if zlib.crc32(view) != entry.crc:
                raise self._damaged(entry, "its CRC-32 does not match")
        elif seal(entry.dtype, entry.shape, view) != entry.sha:
            raise self._damaged(entry, "its SHA-256 does not match")
        self._proven.add(entry)
        return flat if into is not None else flat.reshape(entry.shape)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _damaged(self, entry: Entry, why: str) -> Damaged:
        path, offset = self._path(entry.stride), entry.slot * entry.stride
        return Damaged(
            f"{entry} is damaged: {why} ({path}, bytes {offset} to {offset + entry.nbytes}). "
            "Restore the file, or start from another checkpoint."
        )

    def _path(self, stride: int) -> Path:
        return self.folder / f"{stride}.rows"

    def _file(self, stride: int, *, make: bool = False) -> io.File:
        with self._opening:
            if stride not in self._files:
                path = self._path(stride)
                made = make and not path.exists()
                self._files[stride] = io.File(path)
                if made:
                    io.sync_folder(self.folder)
            return self._files[stride]
