"""Client rows on disk, for rows that do not fit in memory or must outlive the process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import TracebackType

import torch
from torch import Tensor

from hansa.core.errors import HansaError, invalid_argument
from hansa.core.vectors import arithmetic
from hansa.runs.store import io
from hansa.runs.store.base import (
    BLOCK,
    DTYPES,
    SERVER,
    Rows,
    blocks,
    check_commit,
    check_matrix,
    check_rows,
    check_vectors,
    combine_blocks,
    dot_blocks,
    missing_row_error,
    row_digest,
    store_digest,
)
from hansa.runs.store.index import Index
from hansa.runs.store.lock import FileLock
from hansa.runs.store.row_file import RowEntry, RowFile

FEW = 4  # rows in memory at a time when they are added sequentially


class DiskStore:
    """A `ClientStore` in a folder. After a crash it is exactly at a closed round.

    ``at_round`` opens it at an older generation that was kept with `retain`, and removes what came after.

    Every row has a SHA-256: ``read`` always checks it; ``read_many``, ``dot`` and ``combine`` check it at the first
    read of a row, and its CRC-32 afterwards. A damaged row is an error that names its client, its name and its file.
    Only changed rows are written. Only one process may open a store.
    """

    def __init__(self, folder: str | os.PathLike[str], *, at_round: int | None = None) -> None:
        self.folder = Path(folder)
        for below in ("index", "rows"):
            io.make_folder(self.folder / below)
        self._lock = FileLock(self.folder / "lock")
        self._usable, self._staged = True, list[RowEntry]()
        try:
            self._index = Index(self.folder / "index", at_round)
        except BaseException:
            self._lock.close()
            raise
        self._slots = RowFile(self.folder / "rows")
        self._slots.reserve(self._index.entries())
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="rows")

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, at_round: int | None = None) -> DiskStore:
        """Open a store that must exist."""
        if not (Path(folder) / "index").is_dir():
            raise invalid_argument("DiskStore.open", "folder", str(folder), "a folder with a store")
        return cls(folder, at_round=at_round)

    @property
    def generation(self) -> int:
        return self._index.generation

    def read(self, client: int) -> dict[str, Tensor]:
        mine = sorted(self._index.rows.get(client, {}).items())
        return {name: self._slots.get(entry) for name, entry in mine if not name.startswith(SERVER)}

    def read_many(self, clients: Sequence[int], name: str) -> Tensor:
        return self._matrix([self._entry(client, name) for client in clients], name, quick=True)

    def dot(self, clients: Sequence[int], name: str, vectors: Tensor) -> Tensor:
        check_vectors(vectors)
        entries = self._alike(clients, name)
        check_vectors(vectors, entries[0].count)
        if entries[0].dtype != "float32" or vectors.dtype != torch.float32 or not arithmetic.native_fits(vectors):
            return dot_blocks(self._stream(entries, name, BLOCK), len(entries), vectors)
        # a block is read, checked and multiplied by one thread, piece by piece
        stop = Event()
        jobs = [self._readers.submit(self._slots.dot, some, vectors, stop) for some in blocks(entries)]
        try:
            return torch.cat([job.result() for job in jobs])
        finally:
            stop.set()  # after an error or an interruption the other threads end early

    def combine(self, clients: Sequence[int], name: str, weights: Sequence[float]) -> Tensor:
        return combine_blocks(self._stream(self._alike(clients, name), name, FEW), weights)

    def stage(self, client: int, rows: Mapping[str, Tensor]) -> None:
        check_rows({client: rows})
        with self._writing():
            self._staged += self._put({client: rows})

    def discard(self) -> None:
        for entry in self._staged:
            self._slots.free(entry)
        self._staged = []

    def commit(self, round: int, rows: Rows) -> None:
        check_commit(round, self.generation, rows)
        with self._writing():
            fresh = [*self._staged, *self._put(rows)]
            self._slots.sync()
            for entry in self._index.commit(fresh):
                self._slots.free(entry)
            self._index.compact()
            self._staged = []

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Make the store unusable if a write fails: only reopening can tell what reached the disk."""
        if not self._usable:
            raise HansaError(f"{self.folder}: an earlier write failed or the store was closed. Open it again.")
        self._usable = False
        yield
        self._usable = True

    def _put(self, rows: Rows) -> list[RowEntry]:
        """Write new rows into free slots."""
        fresh = []
        for client in sorted(rows):
            for name, row in sorted(rows[client].items()):
                sha = row_digest(row)
                known = self._index.rows.get(client, {}).get(name)
                if known is None or known.sha != sha:
                    fresh.append(self._slots.put(client, name, self.generation + 1, row, sha))
        return fresh

    def retain(self, rounds: Iterable[int]) -> None:
        """Keep these generations; others are removed at the next commit.

        Call it after a checkpoint is written, with the rounds of all remaining checkpoints. Only the present generation
        and those already retained can be retained; others are ignored.
        """
        self._index.generations = set(rounds) & (self._index.generations | {self.generation})

    @property
    def retained(self) -> list[int]:
        """The older generations at which this store can be opened."""
        return sorted(self._index.generations)

    def clients(self, name: str | None = None) -> list[int]:
        return sorted(client for client, rows in self._index.rows.items() if name is None or name in rows)

    def digest(self) -> str:
        rows = self._index.rows
        return store_digest(
            (client, name, rows[client][name].sha) for client in sorted(rows) for name in sorted(rows[client])
        )

    def verify(self) -> int:
        """Read and check every row of the present generation; return their number."""
        entries = [entry for client in self.clients() for entry in self._index.rows[client].values()]
        for entry in entries:
            self._slots.get(entry)
        return len(entries)

    def close(self) -> None:
        self._usable = False
        self._readers.shutdown()
        self._slots.close()
        self._lock.close()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _entry(self, client: int, name: str) -> RowEntry:
        try:
            return self._index.rows[client][name]
        except KeyError:
            raise missing_row_error(client, name, self._index.rows.get(client, {})) from None

    def _matrix(
        self, entries: Sequence[RowEntry], name: str, into: Tensor | None = None, *, quick: bool = False
    ) -> Tensor:
        check_matrix(name, {(entry.dtype, entry.count) for entry in entries})
        first = entries[0]
        rows = (
            torch.empty(len(entries), first.count, dtype=DTYPES[first.dtype]) if into is None else into[: len(entries)]
        )
        # reading and hashing release the interpreter lock
        jobs = [
            self._readers.submit(self._slots.get, entry, row, quick=quick)
            for entry, row in zip(entries, rows, strict=True)
        ]
        for job in jobs:
            job.result()
        return rows

    def _alike(self, clients: Sequence[int], name: str) -> list[RowEntry]:
        """Return the entries of rows that form a matrix."""
        entries = [self._entry(client, name) for client in clients]
        check_matrix(name, {(entry.dtype, entry.count) for entry in entries})
        return entries

    def _stream(self, entries: Sequence[RowEntry], name: str, block: int) -> Iterator[Tensor]:
        """Yield blocks of rows in two buffers; the next block is read while one is used."""
        shape = (min(block, len(entries)), entries[0].count)
        buffers = [torch.empty(shape, dtype=DTYPES[entries[0].dtype]) for _ in range(2)]
        with ThreadPoolExecutor(1) as ahead:
            waiting = None
            for turn, start in enumerate(range(0, len(entries), block)):
                some = entries[start : start + block]
                job = ahead.submit(self._matrix, some, name, buffers[turn % 2], quick=True)
                if waiting is not None:
                    yield waiting.result()
                waiting = job
            if waiting is not None:
                yield waiting.result()
