"""The file of large rows: slots that the database points into. A slot is used again only when nothing needs its row."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from threading import Event, Lock
from typing import NamedTuple

import torch
from torch import Tensor

from hansa.core.vectors import allocator
from hansa.core.vectors.fingerprint import checksum
from hansa.core.vectors.inner_products import ShortRowError, StreamedInnerProducts
from hansa.runs.store import io
from hansa.runs.store.base import DTYPES, hash_header, row_bytes
from hansa.runs.store.io import DamagedFileError

PIECE = 1 << 17  # bytes read at a time, checked and multiplied while in cache
SPAN = 1 << 20  # entries of a row between two checks of ``stop``
_PAGE = 4096


class RowEntry(NamedTuple):
    """A row of the database, its checksums, and its place in the row file if it is kept there; ``born`` is the
    generation that wrote it."""

    id: int
    kind: str
    client: int
    name: str
    born: int
    dtype: str
    shape: tuple[int, ...]
    place: int | None
    crc: int
    sha: bytes

    @property
    def length(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.length * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        if self.kind == "client":
            return f"client {self.client}, row {self.name!r} of round {self.born - 1}"
        return f"{self.kind} {self.client}, {self.name!r}"


class RowFile:
    """The slots of the row file, used and free."""

    def __init__(self, path: Path, *, writing: bool) -> None:
        self.path, self._writing = path, writing
        self._file: io.File | None = None
        self._gaps: list[tuple[int, int]] = []  # (place, length), in order and never adjacent
        self._end = 0
        self._freed: list[tuple[int, int]] = []
        self._unsynced = False
        self._proven: set[tuple[int, bytes]] = set()
        self._opening = Lock()

    def reserve(self, used: Iterable[tuple[int, int]]) -> None:
        """Mark these places of these sizes as used, and everything between them as free."""
        self._gaps, self._end = [], 0
        for place, size in sorted(used):
            if place > self._end:
                self._gaps.append((self._end, place - self._end))
            self._end = max(self._end, place + _slot(size))

    def put(self, data: memoryview) -> int:
        """Write a row into the first gap that is large enough, or at the end; return its place."""
        size = _slot(len(data))
        for index, (place, length) in enumerate(self._gaps):
            if length >= size:
                self._gaps[index : index + 1] = [(place + size, length - size)] if length > size else []
                break
        else:
            place, self._end = self._end, self._end + size
        self._open().write(place, data)
        self._unsynced = True
        return place

    def release_freed(self) -> None:
        """Let later rows use the slots that were freed, after the transaction that freed them."""
        for place, length in self._freed:
            index = bisect.bisect(self._gaps, (place, length))
            if index < len(self._gaps) and self._gaps[index][0] == place + length:
                length += self._gaps.pop(index)[1]
            if index and sum(self._gaps[index - 1]) == place:
                place, before = self._gaps.pop(index - 1)
                index, length = index - 1, length + before
            self._gaps.insert(index, (place, length))
        self._freed = []

    def sync(self) -> None:
        """Make every row written since the last sync durable."""
        if self._unsynced and self._file is not None:
            self._file.sync()
        self._unsynced = False

    def get(self, entry: RowEntry, into: Tensor | None = None, *, quick: bool = False) -> Tensor:
        """Read a row, checked by SHA-256; with ``quick`` by CRC-32 if its SHA-256 has been checked before."""
        row = _RowReader(self, entry, quick)
        flat = torch.empty(entry.length, dtype=DTYPES[entry.dtype]) if into is None else into
        view = row_bytes(flat)
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
        """Close the file. It can still be read."""
        if self._file is not None:
            self._file.close()
        self._file, self._writing = None, False

    def is_verified(self, entry: RowEntry) -> bool:
        """Return whether the row's SHA-256 has been checked."""
        return (entry.id, entry.sha) in self._proven

    def mark_verified(self, entry: RowEntry) -> None:
        self._proven.add((entry.id, entry.sha))

    def forget(self, entry: RowEntry) -> None:
        """Free the slot of a deleted row, if it has one, at the next `release_freed`."""
        self._proven.discard((entry.id, entry.sha))
        if entry.place is not None:
            self._freed.append((entry.place, _slot(entry.nbytes)))

    def file_of(self, entry: RowEntry) -> io.File:
        """Return the open file of a row, which must reach to its end."""
        if self._file is None and not self.path.exists():
            raise DamagedFileError(
                f"{entry}: its file {self.path} is missing. Restore it, or start from another checkpoint."
            )
        file, end = self._open(), (entry.place or 0) + entry.nbytes
        if end > (size := file.size()):
            raise DamagedFileError(
                f"{entry} is damaged: the file ends after {max(0, size - end + entry.nbytes)} of {entry.nbytes} bytes "
                f"({self.path}). Restore the file, or start from another checkpoint."
            )
        return file

    def _open(self) -> io.File:
        with self._opening:
            if self._file is None:
                created = self._writing and not self.path.exists()
                self._file = io.File(self.path, reading=not self._writing)
                if created:
                    io.sync_folder(self.path.parent)
            return self._file


def _slot(size: int) -> int:
    """Return the size of the slot of a row."""
    return max(1, -(-size // _PAGE)) * _PAGE


class _RowReader:
    """Reads a row in pieces and checks it at the end: by SHA-256, or with ``quick`` by CRC-32 if that has passed."""

    def __init__(self, rows: RowFile, entry: RowEntry, quick: bool) -> None:
        self.file = rows.file_of(entry)
        self.offset = self._start = entry.place or 0  # of the next byte
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
        if self._sha is not None and self._sha.digest() != self._entry.sha:
            raise self._damaged("its SHA-256 does not match")
        if self._sha is None and self.crc != self._entry.crc:
            raise self._damaged("its CRC-32 does not match")
        self._rows.mark_verified(self._entry)

    def short(self, length: int) -> DamagedFileError:
        """Return the error for a file that ends early."""
        done = self.offset - self._start + length
        return self._damaged(f"the file ends after {done} of {self._entry.nbytes} bytes")

    def _damaged(self, why: str) -> DamagedFileError:
        return DamagedFileError(
            f"{self._entry} is damaged: {why} ({self.file.path}, bytes {self._start} to "
            f"{self._start + self._entry.nbytes}). Restore the file, or start from another checkpoint."
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
