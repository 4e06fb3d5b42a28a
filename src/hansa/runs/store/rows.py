"""Rows of clients: in memory, for runs that fit and need not outlive the process, or on disk."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from hansa.core.errors import HansaError, invalid_argument, suggestion
from hansa.core.vectors import arithmetic, kernels
from hansa.runs.store import io
from hansa.runs.store.database import DTYPES, REMEDY, Database, RowEntry, dtype_name, dtype_of, row_digest
from hansa.runs.store.io import DamagedFileError, FileLock, sha256

if TYPE_CHECKING:  # commands that only look load no torch
    from torch import Tensor

Rows: TypeAlias = "Mapping[int, Mapping[str, Tensor]]"

SERVER = "server/"
"""Prefix of rows that the server keeps per client (FedAWARE's momentum); ``read`` leaves them out."""

BLOCK = 32  # rows in memory at a time when they are multiplied, the same in every store: sums agree to the last bit
FEW = 4  # rows in memory at a time when they are added one after another
SPAN = 1 << 14  # coordinates converted to float64 at a time, in a buffer that stays in cache


class ClientStore(ABC):
    """Rows of every client: transactional, one commit per closed round.

    ``generation`` counts the rounds closed: 0 when new, r + 1 after ``commit(r, ...)``, so it equals
    ``ServerState.round``. A commit adds and replaces the rows it names and leaves all others as they are.
    """

    generation = 0
    _rows: dict[int, dict[str, Any]]

    def read(self, client: int) -> dict[str, Tensor]:
        """Return copies of the client's rows; empty if none were written."""
        mine = sorted(self._rows.get(client, {}).items())
        return {name: self._load(row) for name, row in mine if not name.startswith(SERVER)}

    def read_many(self, clients: Sequence[int], name: str) -> Tensor:
        """Return one row of several clients as [k, d]; raise if a client has none."""
        return next(self._blocks(self._alike(clients, name), len(clients)))

    def dot(self, clients: Sequence[int], name: str, vectors: Tensor) -> Tensor:
        """Return <row_i, vector_j> in float64, [k, v]; rows are streamed, never all in memory."""
        rows = self._alike(clients, name)
        length = self._layout(rows[0])[1]
        if vectors.ndim != 2 or vectors.shape[1] != length:
            raise invalid_argument(
                "dot", "vectors", tuple(vectors.shape), f"a matrix of vectors of {length} numbers, as the rows are"
            )
        return self._products(rows, vectors)

    def combine(self, clients: Sequence[int], name: str, weights: Sequence[float]) -> Tensor:
        """Return sum w_i row_i in float64, added in the given order; rows are streamed."""
        rows = self._alike(clients, name)
        total = torch.zeros(self._layout(rows[0])[1], dtype=torch.float64)
        streamed = (row for block in self._blocks(rows, FEW) for row in block)
        for row, weight in zip(streamed, weights, strict=True):
            for start in range(0, len(row), SPAN):
                total[start : start + SPAN].add_(row[start : start + SPAN].to(torch.float64), alpha=float(weight))
        return total

    def clients(self, name: str | None = None) -> list[int]:
        """Return the clients with any row, or with this one, in order."""
        return sorted(client for client, rows in self._rows.items() if name is None or name in rows)

    def digest(self) -> str:
        """Return one SHA-256 over every row of every client: equal for equal contents, in memory or on disk."""
        every = ((c, name, row) for c in self.clients() for name, row in sorted(self._rows[c].items()))
        return sha256(*(f"{c}:{len(name)}:{name}:{self._sha(row)}\n".encode() for c, name, row in every))

    @abstractmethod
    def stage(self, client: int, rows: Mapping[str, Tensor]) -> None:
        """Write rows for the next commit; until then reads return the old ones."""

    @abstractmethod
    def discard(self) -> None:
        """Discard staged rows."""

    @abstractmethod
    def commit(self, round: int, rows: Rows) -> None:
        """Close a round: commit the staged rows and these atomically."""

    def close(self) -> None:
        """Release what the store holds."""
        return

    @abstractmethod
    def _load(self, row: Any) -> Tensor:
        """Return a copy of a row."""

    @abstractmethod
    def _layout(self, row: Any) -> tuple[str, int]:
        """Return the dtype and the length of a row."""

    @abstractmethod
    def _sha(self, row: Any) -> str:
        """Return the `row_digest` of a row."""

    @abstractmethod
    def _blocks(self, rows: Sequence[Any], size: int) -> Iterator[Tensor]:
        """Yield rows of one layout as matrices of at most ``size`` rows, each valid until the next."""

    def _products(self, rows: Sequence[Any], vectors: Tensor) -> Tensor:
        return torch.cat([arithmetic.inner_products(block, vectors) for block in self._blocks(rows, BLOCK)])

    def _alike(self, clients: Sequence[int], name: str) -> list[Any]:
        """Return the named row of each client; refuse rows that do not form a matrix."""
        rows = []
        for client in clients:
            known = self._rows.get(client, {})
            if name not in known:
                hint = suggestion(name, list(known)) if known else "It was never written."
                raise HansaError(f"client {client} has no row {name!r}. {hint}")
            rows.append(known[name])
        layouts = set(map(self._layout, rows))
        if len(layouts) != 1:
            what = f"differ in dtype or length, {sorted(layouts)}" if rows else "of no clients were asked for"
            raise HansaError(f"rows {name!r} {what}: they cannot be stacked.")
        return rows

    def _check_round(self, round: int, rows: Rows) -> None:
        """Refuse a commit of another round, or of something that is not a row."""
        if round != self.generation:
            raise HansaError(
                f"commit(round={round}): the store is at round {self.generation}. Rounds close one after another; "
                "open the store at the round of the checkpoint you resume from."
            )
        check_rows(rows)


class RamStore(ClientStore):
    """A `ClientStore` in memory.

    >>> store = RamStore()
    >>> store.commit(0, {3: {"uplink/model/residual": torch.ones(2)}})
    >>> store.generation, store.clients(), store.read(3), store.read(4)
    (1, [3], {'uplink/model/residual': tensor([1., 1.])}, {})
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, Tensor]] = {}
        self._staged: list[tuple[int, dict[str, Tensor]]] = []

    def stage(self, client: int, rows: Mapping[str, Tensor]) -> None:
        check_rows({client: rows})
        self._staged.append((client, _copy_rows(rows)))

    def discard(self) -> None:
        self._staged = []

    def commit(self, round: int, rows: Rows) -> None:
        self._check_round(round, rows)
        for client, named in (*self._staged, *((client, _copy_rows(rows[client])) for client in rows)):
            if named:
                self._rows.setdefault(client, {}).update(named)
        self._staged, self.generation = [], round + 1

    def _load(self, row: Tensor) -> Tensor:
        return row.clone()

    def _layout(self, row: Tensor) -> tuple[str, int]:
        return dtype_name(row.dtype), row.numel()

    def _sha(self, row: Tensor) -> str:
        return row_digest(row)

    def _blocks(self, rows: Sequence[Tensor], size: int) -> Iterator[Tensor]:
        for start in range(0, len(rows), size):
            yield torch.stack([row.reshape(-1) for row in rows[start : start + size]])


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
        if entry.born <= self.database.kept:
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
        buffers = [torch.empty(shape, dtype=dtype_of(rows[0].dtype)) for _ in starts[:2]]
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


def _copy_rows(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: row.detach().to("cpu", copy=True).contiguous() for name, row in rows.items()}


def check_rows(rows: Rows) -> None:
    """Refuse values that are not rows."""
    for client, named in rows.items():
        if isinstance(client, bool) or not isinstance(client, int) or client < 0:
            raise invalid_argument("commit", "client", client, "a whole number >= 0")
        for name, row in named.items():
            found = dtype_name(row.dtype) if isinstance(row, torch.Tensor) else type(row).__name__
            if found not in DTYPES or not isinstance(name, str) or not name:
                kinds = ", ".join(DTYPES)
                raise HansaError(f"commit: client {client}, row {name!r}: expected a tensor of {kinds}, got {found}.")
