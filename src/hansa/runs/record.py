"""The record of a run: rounds, clients and checkpoints in one SQLite file, with one transaction per round. Rows of
clients are in it, or in memory for runs that fit and need not outlive the process."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import ref

import torch

from hansa.core.errors import HansaError, check_integer, invalid_argument, suggestion
from hansa.core.types import State
from hansa.core.vectors import arithmetic, kernels
from hansa.runs.client_columns import ClientColumns, join_rounds, total_by_client
from hansa.runs.columns import check_record
from hansa.runs.store import database, io
from hansa.runs.store.database import DTYPES, REMEDY, Database, Head, RowEntry, dtype_name, dtype_of, row_digest
from hansa.runs.store.io import DamagedFileError, FileLock, sha256

if TYPE_CHECKING:  # commands that only look load no torch
    from torch import Tensor

log = logging.getLogger("hansa")

Meta: TypeAlias = dict[str, Any]
"""Plain data stored with the state: round, seed, digest of the configuration, and platform."""
Rows: TypeAlias = "Mapping[int, Mapping[str, Tensor]]"

SERVER = "server/"
"""Prefix of rows that the server keeps per client (FedAWARE's momentum); ``read`` omits them."""

BLOCK = 32  # rows multiplied at a time, the same in every store so that sums agree to the last bit
SUM_BLOCK = 4  # rows read at a time for sums
LIVE = "kind = 'client' AND born <= ? AND (died IS NULL OR died > ?)"  # the rows of a generation, given twice
SPAN = 1 << 14  # coordinates converted to float64 at a time, in a buffer that fits in cache


class ClientStore(ABC):
    """Rows of every client: transactional, one commit per closed round.

    ``generation`` counts closed rounds: 0 when new, r + 1 after ``commit(r, ...)``, so it equals ``ServerState.round``.
    A commit adds or replaces the rows that it names and keeps all others.
    """

    generation = 0
    _rows: dict[int, dict[str, Any]]

    def read(self, client: int) -> dict[str, Tensor]:
        """Return copies of the client's rows, {} if there are none."""
        if not (rows := self._rows.get(client)):
            return {}
        return {name: self._load(row) for name, row in sorted(rows.items()) if not name.startswith(SERVER)}

    def memories(self, clients: Iterable[int], forgotten: Collection[int] = ()) -> dict[int, dict[str, Tensor]]:
        """Return the rows of the clients that have any and are not forgotten."""
        return {client: rows for client in clients if client not in forgotten and (rows := self.read(client))}

    def read_many(self, clients: Sequence[int], name: str) -> Tensor:
        """Return one row of several clients as [k, d]; raise if a client has none."""
        return next(self._blocks(self._matching_rows(clients, name), len(clients)))

    def dot(self, clients: Sequence[int], name: str, vectors: Tensor) -> Tensor:
        """Return <row_i, vector_j> in float64, [k, v]; rows are streamed, never all in memory."""
        rows = self._matching_rows(clients, name)
        length = self._layout(rows[0])[1]
        if vectors.ndim != 2 or vectors.shape[1] != length:
            raise invalid_argument(
                "dot",
                "vectors",
                tuple(vectors.shape),
                f"a matrix of vectors of {length} numbers, the length of the rows",
            )
        return self._products(rows, vectors)

    def combine(self, clients: Sequence[int], name: str, weights: Sequence[float]) -> Tensor:
        """Return sum w_i row_i in float64, added in the given order; rows are streamed."""
        rows = self._matching_rows(clients, name)
        total = torch.zeros(self._layout(rows[0])[1], dtype=torch.float64)
        streamed = (row for block in self._blocks(rows, SUM_BLOCK) for row in block)
        for row, weight in zip(streamed, weights, strict=True):
            for start in range(0, len(row), SPAN):
                total[start : start + SPAN].add_(row[start : start + SPAN].to(torch.float64), alpha=float(weight))
        return total

    def clients(self, name: str | None = None) -> list[int]:
        """Return the clients with any row, or with this one, in order."""
        return sorted(client for client, rows in self._rows.items() if name is None or name in rows)

    def digest(self) -> str:
        """Return a SHA-256 of all rows of all clients, the same in memory and on disk."""
        rows = ((c, name, row) for c in self.clients() for name, row in sorted(self._rows[c].items()))
        return sha256(*(f"{c}:{len(name)}:{name}:{self._sha(row)}\n".encode() for c, name, row in rows))

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
        """Release files and threads."""
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

    def _matching_rows(self, clients: Sequence[int], name: str) -> list[Any]:
        """Return a row of each client; refuse rows that do not form a matrix."""
        rows = []
        for client in clients:
            client_rows = self._rows.get(client, {})
            if name not in client_rows:
                hint = suggestion(name, list(client_rows)) if client_rows else "It was never written."
                raise HansaError(f"client {client} has no row {name!r}. {hint}")
            rows.append(client_rows[name])
        layouts = set(map(self._layout, rows))
        if len(layouts) != 1:
            problem = f"they differ in dtype or length, {sorted(layouts)}" if rows else "no clients were passed"
            raise HansaError(f"rows {name!r} cannot be stacked: {problem}.")
        return rows

    def _check_round(self, round: int, rows: Rows) -> None:
        """Refuse a commit of another round, or of values that are not rows."""
        if round != self.generation:
            raise HansaError(
                f"commit(round={round}): the store is at round {self.generation}. Rounds are closed in order; open the "
                "store at the round of the checkpoint to resume from."
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
        for client, client_rows in (*self._staged, *((client, _copy_rows(rows[client])) for client in rows)):
            if client_rows:
                self._rows.setdefault(client, {}).update(client_rows)
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
    """A `ClientStore` in a folder. After a crash it is at the last closed round.

    Every row has a SHA-256: ``read`` always checks it; ``read_many``, ``dot`` and ``combine`` check it at the first
    read of a row that this process did not write, and its CRC-32 otherwise. The error for a damaged row has its client,
    name and file. Only changed rows are written. Only one process may open a store.

    Args:
        folder: The folder, created if it is absent.
        durable: Whether closed rounds survive a loss of power; unnecessary for temporary stores.
    """

    _lock: FileLock | None = None  # of its own folder; that of a run is locked by the run

    def __init__(self, folder: str | os.PathLike[str], *, durable: bool = True) -> None:
        path = Path(folder)
        io.make_folder(path)
        lock = FileLock(path / "lock")
        try:
            Database.ensure(path)
            database = Database(path, writing=True, durable=durable)
            self._open(database, database.head)
        except BaseException:
            lock.close()
            raise
        self._lock = lock

    @classmethod
    def of(cls, database: Database, head: Head | None = None) -> DiskStore:
        """Return the rows of a run's record, at its end or at the head of a checkpoint; the record commits them."""
        store = cls.__new__(cls)
        store._open(database, database.head if head is None else head)
        return store

    def _open(self, database: Database, head: Head) -> None:
        """Find the rows of a head; refuse others than those that were committed."""
        self.database, self.generation = database, head.generation
        self._staged: list[RowEntry] = []
        self._rows: dict[int, dict[str, RowEntry]] = {}
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="rows")  # they start at the first use
        entries = database.entries(LIVE, [self.generation, self.generation])
        for entry in entries:
            self._rows.setdefault(entry.client, {})[entry.name] = entry
        if sum(map(_seal_number, entries)) % (1 << 256) != head.sum:
            raise DamagedFileError(
                f"{database.path} is damaged: it does not have the rows of round {self.generation}. {REMEDY}"
            )

    def stage(self, client: int, rows: Mapping[str, Tensor]) -> None:
        check_rows({client: rows})
        with self.database.writing_rows():
            self._staged += self._write_changed({client: rows})

    def discard(self) -> None:
        if self._staged:
            staged, self._staged = self._staged, []
            with self.database.writing_rows():
                for entry in staged:
                    self.database.delete("id = ?", [entry.id])

    def commit(self, round: int, rows: Rows) -> None:
        """Close a round; in the record of a run the record's commit makes it durable."""
        self.database.check_usable()
        self._check_round(round, rows)
        with self.database.writing_rows():
            entries, self._staged = [*self._staged, *self._write_changed(rows)], []
            self.generation += 1
            total = self.database.head.sum
            for entry in entries:
                client_rows = self._rows.setdefault(entry.client, {})
                if entry.name in client_rows:
                    total -= _seal_number(client_rows[entry.name])
                    self._retire(client_rows[entry.name])
                client_rows[entry.name] = entry
                total += _seal_number(entry)
            self.database.set_head(generation=self.generation, sum=total % (1 << 256))
        if self._lock is not None:
            self.database.commit()

    def _write_changed(self, rows: Rows) -> list[RowEntry]:
        """Write the rows that changed."""
        entries = []
        for client in sorted(rows):
            for name, row in sorted(rows[client].items()):
                stored, sha = self._rows.get(client, {}).get(name), row_digest(row)
                if stored is None or stored.sha.hex() != sha:
                    entries.append(self.database.put("client", client, name, self.generation + 1, row, sha))
        return entries

    def _retire(self, entry: RowEntry) -> None:
        """Keep a replaced row if a checkpoint may need it, otherwise delete it."""
        if entry.born <= self.database.kept_round:
            self.database.execute("UPDATE vectors SET died = ? WHERE id = ?", [self.generation, entry.id])
        else:
            self.database.delete("id = ?", [entry.id])

    def verify(self) -> int:
        """Read and check every row; return their number."""
        entries = [entry for client_rows in self._rows.values() for entry in client_rows.values()]
        for entry in entries:
            self.database.get(entry)
        return len(entries)

    def close(self) -> None:
        self._threads.shutdown()
        self._threads = ThreadPoolExecutor(2)  # rows can still be read
        try:
            self.database.close()
        finally:
            if self._lock is not None:
                self._lock.close()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _load(self, row: RowEntry) -> Tensor:
        return self.database.get(row)

    def _layout(self, row: RowEntry) -> tuple[str, int]:
        return row.dtype, row.length

    def _sha(self, row: RowEntry) -> str:
        return row.sha.hex()

    def _blocks(self, rows: Sequence[RowEntry], size: int) -> Iterator[Tensor]:
        """Yield blocks of rows in two buffers; the next block is read while one is in use."""
        starts = range(0, len(rows), size)
        shape = (min(size, len(rows)), rows[0].length)
        buffers = [torch.empty(shape, dtype=dtype_of(rows[0].dtype)) for _ in starts[:2]]
        with ThreadPoolExecutor(1) as reader:
            pending = None
            for turn, start in enumerate(starts):
                job = reader.submit(self._read_block, rows[start : start + size], buffers[turn % 2])
                if pending is not None:
                    yield pending.result()
                pending = job
            if pending is not None:
                yield pending.result()

    def _read_block(self, entries: Sequence[RowEntry], into: Tensor) -> Tensor:
        """Read rows into a buffer; large ones in threads, since reading and hashing release the interpreter lock."""
        run = map if entries[0].offset is None else self._threads.map
        for _ in run(lambda entry, row: self.database.get(entry, row, quick=True), entries, into):
            pass
        return into[: len(entries)]

    def _products(self, rows: Sequence[RowEntry], vectors: Tensor) -> Tensor:
        native = rows[0].dtype == "float32" == str(vectors.dtype)[6:] and arithmetic.native_fits(vectors)
        if not native or not kernels.reads_rows() or any(entry.offset is None for entry in rows):
            return super()._products(rows, vectors)
        # one thread reads, checks and multiplies a block, piece by piece
        stop, blocks = Event(), [rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK)]
        jobs = [self._threads.submit(self.database.dot, entries, vectors, stop) for entries in blocks]
        try:
            return torch.cat([job.result() for job in jobs])
        finally:
            stop.set()  # stops the other threads after an error or an interruption


def _seal_number(entry: RowEntry) -> int:
    """Return the seal of a row as a number."""
    return int.from_bytes(entry.seal, "big")


def _copy_rows(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: row.detach().to("cpu", copy=True).contiguous() for name, row in rows.items()}


def check_rows(rows: Rows) -> None:
    """Refuse values that are not rows."""
    for client, client_rows in rows.items():
        if type(client) is not int or client < 0:
            raise invalid_argument("commit", "client", client, "a whole number >= 0")
        for name, row in client_rows.items():
            dtype = dtype_name(row.dtype) if isinstance(row, torch.Tensor) else type(row).__name__
            if dtype not in DTYPES or not isinstance(name, str) or not name:
                names = ", ".join(DTYPES)
                raise HansaError(f"commit: client {client}, row {name!r}: expected a tensor of {names}, got {dtype}.")


# --- the record ------------------------------------------------------------------------------------------------------


class Checkpoint(NamedTuple):
    """The state of a run after a round, its metadata, and the head of the record at the time."""

    state: State
    meta: Meta
    head: Head


class RecordedRound(NamedTuple):
    """A closed round with its digest."""

    round: int
    record: dict[str, Any]
    digest: str


class RunRecord(Database):
    """The record of a run, open for writing by the process that holds the folder's lock, or for reading.

    >>> import tempfile
    >>> import numpy as np
    >>> from hansa.runs.client_columns import encode_clients
    >>> with tempfile.TemporaryDirectory() as folder, RunRecord.create(folder) as record:
    ...     record.add_round({"round": 1, "loss": 0.5}, encode_clients({"client": np.array([3])}))
    ...     record.save_checkpoint({"x": torch.ones(2)}, {"round": 1})
    ...     record.commit()
    ...     [round.record for round in record.rounds()], record.checkpoint_rounds(), record.load_checkpoint().state
    ([{'round': 1, 'loss': 0.5}], [1], {'x': tensor([1., 1.])})
    """

    _store: ref[DiskStore] | None = None
    """The open client rows, which refer to the record."""

    @classmethod
    def create(cls, folder: Path | str) -> RunRecord:
        """Create an empty record, open for writing."""
        cls.make(folder)
        return cls(folder, writing=True)

    @staticmethod
    def exists(folder: Path | str) -> bool:
        """Return whether a folder has a record."""
        return (Path(folder) / database.DATABASE).is_file()

    def open_rows(self, head: Head | None = None) -> DiskStore:
        """Return the client rows at the end of the record, or at the head of a checkpoint."""
        store = None if self._store is None else self._store()
        if store is None:
            store = DiskStore.of(self, head)
            self._store, self.kept_round = ref(store), max(self.checkpoint_rounds(), default=-1)
        return store

    def add_round(self, record: Mapping[str, Any], clients: bytes) -> None:
        """Add a closed round; `commit` makes it durable with the rows of its clients."""
        head, round = self.head, self.head.rounds + 1
        if record.get("round") != round:
            raise HansaError(f"add_round(round={record.get('round')}): the record is at round {head.rounds}.")
        text, sha = json.dumps(record, default=lambda number: number.item()), hashlib.sha256(clients).digest()
        chain = self._chain_digest(head.chain, round, text, sha)
        with self.writing_rows():
            self.execute("INSERT INTO rounds VALUES (?, ?, ?, ?, ?)", [round, text, chain, sha, clients])
            self.set_head(rounds=round, chain=chain)

    def rounds(self, head: Head | None = None) -> Iterator[RecordedRound]:
        """Yield the closed rounds in order, all or those of an earlier head, with numbers and digests checked."""
        with self.checked():
            for round, text, chain, _ in self._checked_rounds("NULL", head):
                record = dict(json.loads(text))
                if record.get("round") != round:
                    raise ValueError(f"the record of round {round} has another number")
                check_record(record)
                yield RecordedRound(round, record, chain)

    def client_blocks(self) -> Iterator[tuple[int, bytes]]:
        """Yield the client block of every round, checked."""
        with self.checked():
            for round, _, _, block in self._checked_rounds("clients"):
                yield round, block

    def client_columns(self, *names: str) -> ClientColumns:
        """Return the named client columns, by default all."""
        with self.checked():
            return join_rounds(self.client_blocks(), names)

    def by_client(self) -> ClientColumns:
        """Return one row per client; rounds are streamed, so the record may be larger than memory."""
        blocks = self.client_blocks()
        with self.checked():
            return total_by_client(join_rounds([first, *islice(blocks, 99)]) for first in blocks)

    def _checked_rounds(self, content: str, head: Head | None = None) -> Iterator[tuple[int, str, str, bytes]]:
        """Yield round, record, digest and client block, if ``content`` is its column."""
        previous, round = "", 0
        with self.reading():
            end = self.head if head is None else head
            statement = f"SELECT round, record, digest, sha, {content} FROM rounds WHERE round <= ? ORDER BY round"
            for number, text, chain, sha, block in self.execute(statement, [end.rounds]):
                round += 1
                intact = block is None or hashlib.sha256(block).digest() == sha
                if number != round or not intact or chain != self._chain_digest(previous, round, text, sha):
                    raise ValueError(f"round {round}, or one before it, was changed or is missing")
                yield number, text, chain, block
                previous = chain
            if (round, previous) != (end.rounds, end.chain):
                raise ValueError(f"its {round} rounds are not the {end.rounds} of its head or checkpoint")

    def _chain_digest(self, previous: str, round: int, text: str, clients: bytes) -> str:
        state = hashlib.sha256(f"{self.identity} {round} {previous} ".encode() + clients)
        state.update(text.encode())
        return state.hexdigest()

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def checkpoint_rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, oldest first."""
        with self.checked():
            return sorted(int(round) for (round,) in self.execute("SELECT round FROM checkpoints").fetchall())

    def save_checkpoint(self, state: State, meta: Mapping[str, Any], *, keep: int = 3) -> None:
        """Write the state after ``meta["round"]`` and keep the newest ``keep`` checkpoints; durable after `commit`."""
        check_integer("save_checkpoint", "keep", keep)
        tensors: dict[str, torch.Tensor] = {}
        tree = json.dumps(
            {name: to_json(value, name, tensors) for name, value in (("state", state), ("meta", dict(meta)))}
        )
        round, head = int(meta["round"]), self.head.sealed(self.identity)
        with self.writing_rows():
            self._delete_checkpoints("= ?", round)
            entries = [self.put("checkpoint", round, name, round, row) for name, row in tensors.items()]
            digest = self._checkpoint_digest(round, head, tree, entries)
            self.execute("INSERT INTO checkpoints VALUES (?, ?, ?, ?)", [round, head, tree, digest])
            self._delete_checkpoints("< ?", self.checkpoint_rounds()[-keep:][0])
            self.delete(
                "died IS NOT NULL AND NOT EXISTS (SELECT 1 FROM checkpoints AS kept "
                "WHERE vectors.born <= kept.round AND kept.round < vectors.died)"
            )
            self.kept_round = round

    def _delete_checkpoints(self, condition: str, round: int) -> None:
        self.delete(f"kind = 'checkpoint' AND client {condition}", [round])
        self.execute(f"DELETE FROM checkpoints WHERE round {condition}", [round])

    def load_checkpoint(self, round: int | None = None) -> Checkpoint:
        """Return the newest checkpoint, or that of a round, with all digests checked."""
        if round is None:
            if not (rounds := self.checkpoint_rounds()):
                raise HansaError(f"{self.path.parent}: no checkpoint. Use the folder of a run that saved one.")
            round = rounds[-1]
        with self.checked():
            statement = "SELECT head, state, digest FROM checkpoints WHERE round = ?"
            head, tree, digest = self.execute(statement, [round]).fetchone()
            entries = self.entries("kind = 'checkpoint' AND client = ?", [round])
            if digest != self._checkpoint_digest(round, head, tree, entries):
                raise ValueError(f"the checkpoint of round {round} was changed")
            tensors = {entry.name: self.get(entry) for entry in entries}
            content = json.loads(tree, object_hook=lambda node: tensors[node["$tensor"]] if "$tensor" in node else node)
            return Checkpoint(content["state"], content["meta"], self.parse_head(head))

    def _checkpoint_digest(self, round: int, head: str, tree: str, entries: Sequence[RowEntry]) -> bytes:
        state = hashlib.sha256(f"{round} {head} {tree}".encode())
        for entry in entries:
            state.update(entry.seal)
        return state.digest()

    def check_checkpoint(self, round: int) -> Checkpoint:
        """Return a checkpoint; refuse it if the state, rows or rounds that resuming needs are damaged."""
        checkpoint = self.load_checkpoint(round)
        for _ in self.rounds(checkpoint.head):
            pass
        DiskStore.of(self, checkpoint.head).verify()
        return checkpoint

    def intact_checkpoint(self) -> Checkpoint:
        """Return the newest checkpoint with undamaged state, rows and rounds, and warn about later ones.

        Rewrites the database with that checkpoint only, since other pages may be damaged.
        """
        for round in reversed(self.checkpoint_rounds()):
            try:
                checkpoint = self.check_checkpoint(round)
            except HansaError as damage:
                log.warning("%s Falling back to the checkpoint before it.", damage)
                continue
            self._salvage(checkpoint.head)
            return checkpoint
        raise DamagedFileError(
            f"{self.path.parent}: no checkpoint has undamaged state, rows and rounds. Start a new run."
        )

    def _salvage(self, head: Head) -> None:
        """Rewrite the database with the checkpoint of a head and its rounds and rows."""
        selections = {
            "rounds": ("round <= ?", [head.rounds]),
            "checkpoints": ("round = ?", [head.rounds]),
            "vectors": (f"({LIVE}) OR (kind = 'checkpoint' AND client = ?)", [*[head.generation] * 2, head.rounds]),
        }
        with self.checked():
            content = {
                table: self.execute(f"SELECT * FROM {table} WHERE {condition}", values)
                for table, (condition, values) in selections.items()
            }
            self._write(self.path, self.identity, head, content)
        self.close()
        for name in database.LOGS:  # a log of the old database must not be applied to the new one
            io.remove(self.path.with_name(name), sync=True)
        io.rename(self.path.with_name(database.ASIDE), self.path)
        Database.__init__(self, self.path.parent, writing=True)

    def rewind(self, head: Head) -> list[dict[str, Any]]:
        """Return to the head of a checkpoint in one transaction, and return the records up to it."""
        records = [recorded.record for recorded in self.rounds(head)]
        self.open_rows(head)
        with self.writing_rows():
            self.execute("DELETE FROM rounds WHERE round > ?", [head.rounds])
            self._delete_checkpoints("> ?", head.rounds)
            self.delete("kind = 'client' AND born > ?", [head.generation])
            self.execute("UPDATE vectors SET died = NULL WHERE died > ?", [head.generation])
            self.set_head(**head._asdict())
        self.kept_round = head.rounds
        self.commit()
        return records


# --- records as JSON ------------------------------------------------------------------------------------------------


def to_line(record: Mapping[str, Any]) -> str:
    """Return a record as one line of strict JSON: NaN is null, infinities are "inf" and "-inf".

    >>> to_line({"round": 1, "loss": float("nan"), "diversity": float("inf")})
    '{"round": 1, "loss": null, "diversity": "inf"}'
    """
    return json.dumps(to_plain_json(record), allow_nan=False)


def to_plain_json(value: Any) -> Any:
    """Convert a tree of numbers to values that strict JSON can represent."""
    if isinstance(value, Mapping):
        return {str(name): to_plain_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value.item() if hasattr(value, "item") else value


# --- states ---------------------------------------------------------------------------------------------------------


def to_json(node: object, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Replace tensors of a tree by ``{"$tensor": name}`` and add them to ``tensors`` by that name."""
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    if isinstance(node, list):
        return [to_json(value, f"{path}[{i}]", tensors) for i, value in enumerate(node)]
    if isinstance(node, dict):
        if wrong := [key for key in node if not isinstance(key, str) or key.startswith("$")]:
            raise invalid_argument("save_checkpoint", path, wrong[0], "string keys without a leading $")
        return {key: to_json(value, f"{path}.{key}", tensors) for key, value in node.items()}
    if isinstance(node, torch.Tensor) and dtype_name(node.dtype) in DTYPES:
        name = f"{len(tensors)}:{path}"  # keys may contain dots: the number makes names unique
        tensors[name] = node.detach().cpu().contiguous()
        return {"$tensor": name}
    found = str(node.dtype) if isinstance(node, torch.Tensor) else type(node).__name__
    raise invalid_argument("save_checkpoint", path, found, "tensors, numbers, strings, lists and dicts")
