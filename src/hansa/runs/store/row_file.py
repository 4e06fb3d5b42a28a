"""Row data on disk, in files of equal-sized slots. A row never overwrites one that a kept generation needs."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock

import torch
from torch import Tensor

from hansa.core.vectors import allocator
from hansa.core.vectors.fingerprint import checksum
from hansa.core.vectors.inner_products import ShortRowError, StreamedInnerProducts
from hansa.runs.store import io
from hansa.runs.store.base import DTYPES, dtype_name, hash_header, row_bytes
from hansa.runs.store.io import DamagedFileError

PIECE = 1 << 17  # bytes read at a time, checked and multiplied while in cache
SPAN = 1 << 20  # entries of a row between two checks of ``stop``


@dataclass(frozen=True, slots=True)
class RowEntry:
    """The slot of a row and its checksums; ``born`` is the generation that wrote it."""

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
        """The size of its slot, one of a few size classes, so that equal models share one file."""
        unit = 64 if self.nbytes <= 4096 else 4096
        return max(1, -(-self.nbytes // unit)) * unit

    def to_json(self) -> list[object]:
        return [self.client, self.name, self.born, self.dtype, list(self.shape), self.slot, self.sha, self.crc]

    @classmethod
    def from_json(cls, fields: list[object]) -> RowEntry:
        client, name, born, dtype, shape, slot, sha, crc = fields
        return cls(client, name, born, dtype, tuple(shape), slot, sha, crc)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"client {self.client}, row {self.name!r} of round {self.born - 1}"


class RowFile:
    """The slot files of a store, with their used and free slots."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[int, io.File] = {}
        self._free: dict[int, list[int]] = {}
        self._next: dict[int, int] = {}
        self._touched: set[int] = set()
        self._proven: set[RowEntry] = set()
        self._opening = Lock()

    def reserve(self, entries: list[RowEntry]) -> None:
        """Mark these slots as used and every other slot below the highest as free."""
        taken: dict[int, set[int]] = {}
        for entry in entries:
            taken.setdefault(entry.stride, set()).add(entry.slot)
        self._next = {stride: max(slots) + 1 for stride, slots in taken.items()}
        # ascending lists are heaps already
        self._free = {
            stride: [slot for slot in range(self._next[stride]) if slot not in slots] for stride, slots in taken.items()
        }

    def put(self, client: int, name: str, born: int, row: Tensor, sha: str) -> RowEntry:
        """Write a row into the lowest free slot."""
        data = row_bytes(row)
        entry = RowEntry(client, name, born, dtype_name(row.dtype), tuple(row.shape), 0, sha, checksum(data))
        stride = entry.stride
        free = self._free.setdefault(stride, [])
        if free:
            slot = heapq.heappop(free)
        else:
            slot = self._next.get(stride, 0)
            self._next[stride] = slot + 1
        self._file(stride, make=True).write(slot * stride, data)
        self._touched.add(stride)
        return RowEntry(client, name, born, entry.dtype, entry.shape, slot, sha, entry.crc)

    def free(self, entry: RowEntry) -> None:
        """Release a slot for later rows."""
        heapq.heappush(self._free.setdefault(entry.stride, []), entry.slot)
        self._proven.discard(entry)

    def sync(self) -> None:
        """Make every row written since the last sync durable."""
        for stride in sorted(self._touched):
            self._files[stride].sync()
        self._touched.clear()

    def get(self, entry: RowEntry, into: Tensor | None = None, *, quick: bool = False) -> Tensor:
        """Read a row, checked by SHA-256; with ``quick`` by CRC-32 if its SHA-256 has been checked before."""
        flat = torch.empty(entry.count, dtype=DTYPES[entry.dtype]) if into is None else into
        view, row = row_bytes(flat), _RowReader(self, entry, quick)
        for start in range(0, entry.nbytes, PIECE):
            row.read(view[start : start + PIECE])
        row.close()
        return flat if into is not None else flat.reshape(entry.shape)

    def dot(self, entries: Sequence[RowEntry], vectors: Tensor, stop: Event) -> Tensor:
        """Return <row_i, vector_j> of float32 rows of one length, as `kernels.inner_products`, checked as by `get`. A
        piece of every row is in memory at a time. Raises `CancelledError` soon after ``stop`` is set."""
        rows = [_RowReader(self, entry, quick=True) for entry in entries]
        products = StreamedInnerProducts(len(entries), vectors)
        natively = products.reads and all(row.natively for row in rows)
        for start in range(0, vectors.shape[1], SPAN):
            if stop.is_set():
                raise CancelledError
            count = min(SPAN, vectors.shape[1] - start)
            _read_natively(rows, products, count) if natively else _read_in_pieces(rows, products, count)
        for row in rows:
            row.close()
        return products.total()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def is_verified(self, entry: RowEntry) -> bool:
        """Return whether the row's SHA-256 has been checked."""
        return entry in self._proven

    def mark_verified(self, entry: RowEntry) -> None:
        self._proven.add(entry)

    def file_of(self, entry: RowEntry) -> io.File:
        """Return the open file of a row."""
        path = self._path(entry.stride)
        if not path.exists():
            raise DamagedFileError(
                f"{entry}: its file {path} is missing. Restore it, or start from another checkpoint."
            )
        return self._file(entry.stride)

    def _path(self, stride: int) -> Path:
        return self.folder / f"{stride}.rows"

    def _file(self, stride: int, *, make: bool = False) -> io.File:
        with self._opening:
            if stride not in self._files:
                path = self._path(stride)
                created = make and not path.exists()
                self._files[stride] = io.File(path)
                if created:
                    io.sync_folder(self.folder)
            return self._files[stride]


class _RowReader:
    """Reads a row in pieces and checks it at the end: by SHA-256, or with ``quick`` by CRC-32 if that has passed."""

    def __init__(self, rows: RowFile, entry: RowEntry, quick: bool) -> None:
        self.file = rows.file_of(entry)
        self.offset = entry.slot * entry.stride  # of the next byte
        self.crc = 0
        self._rows, self._entry = rows, entry
        self._sha = None if quick and rows.is_verified(entry) else hashlib.sha256(hash_header(entry.dtype, entry.shape))

    @property
    def natively(self) -> bool:
        """Whether native code can read it, which computes CRC-32 only."""
        return self._sha is None

    def read(self, into: memoryview) -> None:
        """Read the next bytes."""
        length = self.file.read_into(self.offset, into)
        if length < len(into):
            raise self.short(length)
        self.offset += length
        if self._sha is not None:
            self._sha.update(into)
        else:
            self.crc = checksum(into, self.crc)

    def close(self) -> None:
        """Check the row that was read."""
        if self._sha is not None and self._sha.hexdigest() != self._entry.sha:
            raise self._damaged("its SHA-256 does not match")
        if self._sha is None and self.crc != self._entry.crc:
            raise self._damaged("its CRC-32 does not match")
        self._rows.mark_verified(self._entry)

    def short(self, length: int) -> DamagedFileError:
        """Return the error for a file that ends early."""
        done = self.offset - self._entry.slot * self._entry.stride + length
        return self._damaged(f"the file ends after {done} of {self._entry.nbytes} bytes")

    def _damaged(self, why: str) -> DamagedFileError:
        start = self._entry.slot * self._entry.stride
        return DamagedFileError(
            f"{self._entry} is damaged: {why} ({self.file.path}, bytes {start} to {start + self._entry.nbytes}). "
            "Restore the file, or start from another checkpoint."
        )


def _read_in_pieces(rows: Sequence[_RowReader], products: StreamedInnerProducts, count: int) -> None:
    """Multiply the next entries of all rows."""
    room = PIECE // 4
    pieces = allocator.empty(len(rows) * room, torch.float32).view(-1, room)
    views = [row_bytes(piece) for piece in pieces]
    for start in range(0, count, room):
        some = min(room, count - start)
        for row, view in zip(rows, views, strict=True):
            row.read(view[: 4 * some])
        products.add(pieces[:, :some])


def _read_natively(rows: Sequence[_RowReader], products: StreamedInnerProducts, count: int) -> None:
    """Multiply the next entries in one native call, whose threads do not wait for each other."""
    try:
        with rows[0].file.descriptor() as file:
            crcs = products.add_from(file, [row.offset for row in rows], count, [row.crc for row in rows])
    except ShortRowError as short:
        raise rows[short.place].short(short.available) from None
    for row, crc in zip(rows, crcs, strict=True):
        row.offset, row.crc = row.offset + 4 * count, crc
