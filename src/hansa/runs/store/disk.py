"""Client rows on disk, for rows that do not fit in memory or must outlive the process."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import TracebackType

import torch
from torch import Tensor

from hansa.core.errors import invalid_argument
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
from hansa.runs.store.database import DATABASE, FILES, REMEDY, ROWS, Database
from hansa.runs.store.io import DamagedFileError
from hansa.runs.store.lock import FileLock
from hansa.runs.store.row_file import RowEntry

FEW = 4  # rows in memory at a time when they are added sequentially


class DiskStore:
    """A `ClientStore` in a folder. After a crash it is exactly at a closed round.

    Every row has a SHA-256: ``read`` always checks it; ``read_many``, ``dot`` and ``combine`` check it at the first
    read of a row, and its CRC-32 afterwards. A damaged row is an error that names its client, its name and its file.
    Only changed rows are written. Only one process may open a store.

    Args:
        folder: The folder, created if it is absent.
        durable: Whether a closed round survives a loss of power; not needed for a temporary store.
    """

    _lock: FileLock | None = None  # of its own folder; that of a run is locked by the run

    def __init__(self, folder: str | os.PathLike[str], *, durable: bool = True) -> None:
        path = Path(folder)
        io.make_folder(path)
        lock = FileLock(path / "lock")
        try:
            if not os.path.lexists(path / DATABASE):
                if os.path.lexists(path / ROWS):
                    raise DamagedFileError(f"{path / DATABASE} is missing. Restore it, or start from another folder.")
                Database.create(path)
            self._open(Database(path, writing=True, durable=durable))
        except BaseException:
            lock.close()
            raise
        self._lock = lock

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> DiskStore:
        """Open a store that must exist."""
        if not (Path(folder) / DATABASE).is_file():
            raise invalid_argument("DiskStore.open", "folder", str(folder), "a folder with a store")
        return cls(folder)

    @classmethod
    def of(cls, database: Database, at_round: int | None = None) -> DiskStore:
        """Return the rows of a run's record, which closes its rounds: at its end, or at the round of a checkpoint."""
        store = cls.__new__(cls)
        store._open(database, at_round)
        return store

    def _open(self, database: Database, at_round: int | None = None) -> None:
        self.database = database
        self._staged: list[RowEntry] = []
        self.kept: Collection[int] = ()
        self._rows: dict[int, dict[str, RowEntry]] = {}
        self._retired: list[tuple[RowEntry, int]] = []
        self.generation = database.head.generation if at_round is None else at_round
        for entry, died in database.entries("kind = 'client'"):
            if entry.born > self.generation:
                continue
            if died is None or died > self.generation:
                self._rows.setdefault(entry.client, {})[entry.name] = entry
            else:
                self._retired.append((entry, died))
        self._readers: ThreadPoolExecutor | None = None
        if at_round is None:
            self.check_sum(database.head.sum)

    def check_sum(self, expected: int) -> None:
        """Refuse rows other than those that were committed; ``expected`` is the sum of their seals."""
        if self.sum() != expected:
            raise DamagedFileError(
                f"{self.database.path} is damaged: it does not have the rows of round {self.generation}. {REMEDY}"
            )

    def sum(self) -> int:
        """Return the sum of the seals of all rows."""
        return self.database.seals(entry for named in self._rows.values() for entry in named.values())

    def read(self, client: int) -> dict[str, Tensor]:
        mine = sorted(self._rows.get(client, {}).items())
        return {name: self.database.get(entry) for name, entry in mine if not name.startswith(SERVER)}

    def read_many(self, clients: Sequence[int], name: str) -> Tensor:
        return self._matrix([self._entry(client, name) for client in clients], name)

    def dot(self, clients: Sequence[int], name: str, vectors: Tensor) -> Tensor:
        check_vectors(vectors)
        entries = self._alike(clients, name)
        check_vectors(vectors, entries[0].length)
        native = entries[0].dtype == "float32" == str(vectors.dtype)[6:] and arithmetic.native_fits(vectors)
        if not native or any(entry.place is None for entry in entries):
            return dot_blocks(self._stream(entries, name, BLOCK), len(entries), vectors)
        # a block is read, checked and multiplied by one thread, piece by piece
        stop = Event()
        jobs = [self._threads.submit(self.database.rows.dot, some, vectors, stop) for some in blocks(entries)]
        try:
            return torch.cat([job.result() for job in jobs])
        finally:
            stop.set()  # after an error or an interruption the other threads end early

    def combine(self, clients: Sequence[int], name: str, weights: Sequence[float]) -> Tensor:
        return combine_blocks(self._stream(self._alike(clients, name), name, FEW), weights)

    def stage(self, client: int, rows: Mapping[str, Tensor]) -> None:
        check_rows({client: rows})
        with self.database.writing_rows():
            self._staged += self._put({client: rows})

    def discard(self) -> None:
        if self._staged:
            staged, self._staged = self._staged, []
            with self.database.writing_rows():
                self.database.delete(staged)

    def commit(self, round: int, rows: Rows) -> None:
        """Close a round. In the record of a run it is durable when the record commits the round."""
        self.database.check_usable()
        check_commit(round, self.generation, rows)
        with self.database.writing_rows():
            fresh, self._staged = [*self._staged, *self._put(rows)], []
            self.generation += 1
            total = self.database.head.sum + self.database.seals(fresh)
            replaced = []
            for entry in fresh:
                named = self._rows.setdefault(entry.client, {})
                if entry.name in named:
                    replaced.append(named[entry.name])
                named[entry.name] = entry
            total -= self.database.seals(replaced)
            self._retire(replaced)
            self.database.set_head(generation=self.generation, sum=total % (1 << 256))
        if self._lock is not None:
            self.database.commit()

    def _retire(self, replaced: Sequence[RowEntry]) -> None:
        """Keep the replaced rows that a checkpoint needs, delete the others."""
        newest = max(self.kept, default=-1)
        needed = [entry for entry in replaced if entry.born <= newest]
        for entry in needed:
            self.database.execute("UPDATE vectors SET died = ? WHERE id = ?", [self.generation, entry.id])
            self._retired.append((entry, self.generation))
        self.database.delete(entry for entry in replaced if entry.born > newest)

    def keep(self, rounds: Collection[int]) -> None:
        """Keep the rows of these rounds, which have checkpoints, and delete those that only others needed."""
        self.kept = rounds
        retired = self._retired
        self._retired = [(entry, died) for entry, died in retired if any(entry.born <= at < died for at in rounds)]
        if len(self._retired) < len(retired):
            needed = {entry for entry, _ in self._retired}
            with self.database.writing_rows():
                self.database.delete(entry for entry, _ in retired if entry not in needed)

    def _put(self, rows: Rows) -> list[RowEntry]:
        """Write the rows that changed."""
        fresh = []
        for client in sorted(rows):
            for name, row in sorted(rows[client].items()):
                known, sha = self._rows.get(client, {}).get(name), row_digest(row)
                if known is None or known.sha.hex() != sha:
                    fresh.append(self.database.put("client", client, name, self.generation + 1, row, sha))
        return fresh

    def clients(self, name: str | None = None) -> list[int]:
        return sorted(client for client, rows in self._rows.items() if name is None or name in rows)

    def digest(self) -> str:
        rows = self._rows
        return store_digest(
            (client, name, rows[client][name].sha.hex()) for client in sorted(rows) for name in sorted(rows[client])
        )

    def verify(self) -> int:
        """Read and check every row; return their number."""
        entries = [entry for client in self.clients() for entry in self._rows[client].values()]
        for entry in entries:
            self.database.get(entry)
        return len(entries)

    def close(self) -> None:
        if self._readers is not None:
            self._readers.shutdown()
            self._readers = None
        try:
            self.database.close()
        finally:
            if self._lock is not None:
                self._lock.close()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def _threads(self) -> ThreadPoolExecutor:
        """Two threads that read rows, started when they are first needed."""
        if self._readers is None:
            self._readers = ThreadPoolExecutor(2, thread_name_prefix="rows")
        return self._readers

    def _entry(self, client: int, name: str) -> RowEntry:
        try:
            return self._rows[client][name]
        except KeyError:
            raise missing_row_error(client, name, self._rows.get(client, {})) from None

    def _matrix(self, entries: Sequence[RowEntry], name: str, into: Tensor | None = None) -> Tensor:
        check_matrix(name, {(entry.dtype, entry.length) for entry in entries})
        first = entries[0]
        shape = len(entries), first.length
        rows = torch.empty(shape, dtype=DTYPES[first.dtype]) if into is None else into[: len(entries)]
        if first.place is None:
            for entry, row in zip(entries, rows, strict=True):
                self.database.get(entry, row, quick=True)
            return rows
        # reading and hashing release the interpreter lock
        jobs = [
            self._threads.submit(self.database.get, entry, row, quick=True)
            for entry, row in zip(entries, rows, strict=True)
        ]
        for job in jobs:
            job.result()
        return rows

    def _alike(self, clients: Sequence[int], name: str) -> list[RowEntry]:
        """Return the entries of rows that form a matrix."""
        entries = [self._entry(client, name) for client in clients]
        check_matrix(name, {(entry.dtype, entry.length) for entry in entries})
        return entries

    def _stream(self, entries: Sequence[RowEntry], name: str, block: int) -> Iterator[Tensor]:
        """Yield blocks of rows in two buffers; the next block is read while one is used."""
        shape = (min(block, len(entries)), entries[0].length)
        buffers = [torch.empty(shape, dtype=DTYPES[entries[0].dtype]) for _ in range(2)]
        with ThreadPoolExecutor(1) as ahead:
            waiting = None
            for turn, start in enumerate(range(0, len(entries), block)):
                some = entries[start : start + block]
                job = ahead.submit(self._matrix, some, name, buffers[turn % 2])
                if waiting is not None:
                    yield waiting.result()
                waiting = job
            if waiting is not None:
                yield waiting.result()


__all__ = ["FILES", "DiskStore"]
