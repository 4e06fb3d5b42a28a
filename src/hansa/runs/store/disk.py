"""Client rows on disk, for rows that do not fit in memory or must outlive the process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import TracebackType

import torch
from torch import Tensor

from hansa.core.vectors import arithmetic, kernels
from hansa.runs.store import io
from hansa.runs.store.database import REMEDY, Database, RowEntry
from hansa.runs.store.io import DamagedFileError
from hansa.runs.store.lock import FileLock
from hansa.runs.store.rows import BLOCK, DTYPES, ClientStore, Rows, check_rows, row_digest


class DiskStore(ClientStore):
    """A `ClientStore` in a folder. After a crash it is exactly at a closed round.

    Every row has a SHA-256: ``read`` always checks it; ``read_many``, ``dot`` and ``combine`` check it at the first
    read of a row that this process did not write, and its CRC-32 otherwise. A damaged row is an error that names its
    client, its name and its file. Only changed rows are written. Only one process may open a store.

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
            Database.ensure(path)
            self._open(Database(path, writing=True, durable=durable))
        except BaseException:
            lock.close()
            raise
        self._lock = lock

    @classmethod
    def of(cls, database: Database, at_round: int | None = None) -> DiskStore:
        """Return the rows of a run's record, which closes its rounds: at its end, or at the round of a checkpoint."""
        store = cls.__new__(cls)
        store._open(database, at_round)
        return store

    def _open(self, database: Database, at_round: int | None = None) -> None:
        self.database = database
        self.checkpoint = -1  # the newest round whose rows must be kept
        self._staged: list[RowEntry] = []
        self._rows: dict[int, dict[str, RowEntry]] = {}
        self._readers: ThreadPoolExecutor | None = None
        self.generation = database.head.generation if at_round is None else at_round
        there = "kind = 'client' AND born <= ? AND (died IS NULL OR died > ?)"
        for entry in database.entries(there, [self.generation, self.generation]):
            self._rows.setdefault(entry.client, {})[entry.name] = entry
        if at_round is None:
            self.check_sum(database.head.sum)

    def check_sum(self, expected: int) -> None:
        """Refuse rows other than those that were committed; ``expected`` is the sum of their seals."""
        if sum(_number(entry) for named in self._rows.values() for entry in named.values()) % (1 << 256) != expected:
            raise DamagedFileError(
                f"{self.database.path} is damaged: it does not have the rows of round {self.generation}. {REMEDY}"
            )

    def stage(self, client: int, rows: Mapping[str, Tensor]) -> None:
        check_rows({client: rows})
        with self.database.writing_rows():
            self._staged += self._put({client: rows})

    def discard(self) -> None:
        if self._staged:
            staged, self._staged = self._staged, []
            with self.database.writing_rows():
                for entry in staged:
                    self.database.delete("id = ?", [entry.id])

    def commit(self, round: int, rows: Rows) -> None:
        """Close a round. In the record of a run it is durable when the record commits the round."""
        self.database.check_usable()
        self._check_round(round, rows)
        with self.database.writing_rows():
            fresh, self._staged = [*self._staged, *self._put(rows)], []
            self.generation += 1
            total = self.database.head.sum
            for entry in fresh:
                named = self._rows.setdefault(entry.client, {})
                if entry.name in named:
                    total -= _number(named[entry.name])
                    self._retire(named[entry.name])
                named[entry.name] = entry
                total += _number(entry)
            self.database.set_head(generation=self.generation, sum=total % (1 << 256))
        if self._lock is not None:
            self.database.commit()

    def _put(self, rows: Rows) -> list[RowEntry]:
        """Write the rows that changed."""
        fresh = []
        for client in sorted(rows):
            for name, row in sorted(rows[client].items()):
                known, sha = self._rows.get(client, {}).get(name), row_digest(row)
                if known is None or known.sha.hex() != sha:
                    fresh.append(self.database.put("client", client, name, self.generation + 1, row, sha))
        return fresh

    def _retire(self, entry: RowEntry) -> None:
        """Keep a replaced row if a checkpoint may need it, otherwise delete it."""
        if entry.born <= self.checkpoint:
            self.database.execute("UPDATE vectors SET died = ? WHERE id = ?", [self.generation, entry.id])
        else:
            self.database.delete("id = ?", [entry.id])

    def verify(self) -> int:
        """Read and check every row; return their number."""
        entries = [entry for named in self._rows.values() for entry in named.values()]
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

    def _load(self, row: RowEntry) -> Tensor:
        return self.database.get(row)

    def _layout(self, row: RowEntry) -> tuple[str, int]:
        return row.dtype, row.length

    def _sha(self, row: RowEntry) -> str:
        return row.sha.hex()

    def _blocks(self, rows: Sequence[RowEntry], size: int) -> Iterator[Tensor]:
        """Yield blocks of rows in two buffers; the next block is read while one is used."""
        starts = range(0, len(rows), size)
        shape = (min(size, len(rows)), rows[0].length)
        buffers = [torch.empty(shape, dtype=DTYPES[rows[0].dtype]) for _ in starts[:2]]
        with ThreadPoolExecutor(1) as ahead:
            waiting = None
            for turn, start in enumerate(starts):
                job = ahead.submit(self._fill, rows[start : start + size], buffers[turn % 2])
                if waiting is not None:
                    yield waiting.result()
                waiting = job
            if waiting is not None:
                yield waiting.result()

    def _fill(self, entries: Sequence[RowEntry], into: Tensor) -> Tensor:
        """Read rows into a buffer; large ones in threads, since reading and hashing release the interpreter lock."""
        run = map if entries[0].place is None else self._threads.map
        for _ in run(lambda entry, row: self.database.get(entry, row, quick=True), entries, into):
            pass
        return into[: len(entries)]

    def _products(self, rows: Sequence[RowEntry], vectors: Tensor) -> Tensor:
        native = rows[0].dtype == "float32" == str(vectors.dtype)[6:] and arithmetic.native_fits(vectors)
        if not native or not kernels.reads_rows() or any(entry.place is None for entry in rows):
            return super()._products(rows, vectors)
        # a block is read, checked and multiplied by one thread, piece by piece
        stop, blocks = Event(), [rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK)]
        jobs = [self._threads.submit(self.database.dot, some, vectors, stop) for some in blocks]
        try:
            return torch.cat([job.result() for job in jobs])
        finally:
            stop.set()  # after an error or an interruption the other threads end early


def _number(entry: RowEntry) -> int:
    """Return the seal of a row as a number."""
    return int.from_bytes(entry.seal, "big")
