"""The record of a run: rounds, clients and checkpoints in one SQLite file, with one transaction per round. Rows of
clients are in it, or in memory for runs that fit and need not outlive the process."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from hansa.core.errors import HansaError, check_integer, invalid_argument, suggestion
from hansa.core.types import State
from hansa.core.vectors import arithmetic, kernels
from hansa.runs.client_columns import ClientColumns, join_rounds, total_by_client
from hansa.runs.columns import check_record
from hansa.runs.store import io
from hansa.runs.store.database import DTYPES, REMEDY, Database, Head, RowEntry, dtype_name, row_digest, seal
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


class ClientStore:
    """Rows of every client, in memory: transactional, one commit per closed round.

    ``generation`` counts closed rounds: 0 when new, r + 1 after ``commit(r, ...)``, so it equals ``ServerState.round``.
    A commit adds or replaces the rows that it names and keeps all others.

    >>> store = ClientStore()
    >>> store.commit(0, {3: {"uplink/model/residual": torch.ones(2)}})
    >>> store.generation, store.clients(), store.read(3), store.read(4)
    (1, [3], {'uplink/model/residual': tensor([1., 1.])}, {})
    """

    def __init__(self) -> None:
        self.generation = 0
        self._rows: dict[int, dict[str, Any]] = {}  # tensors; entries of the database in a `DiskStore`
        self._staged: list[tuple[int, str, Any]] = []

    def read(self, client: int) -> dict[str, Tensor]:
        """Return copies of the client's rows, {} if there are none."""
        rows = self._rows.get(client, {})
        return {name: self._load(row) for name, row in sorted(rows.items()) if not name.startswith(SERVER)}

    def memories(self, clients: Iterable[int], forgotten: Collection[int] = ()) -> dict[int, dict[str, Tensor]]:
        """Return the rows of the clients that have any and are not forgotten."""
        known = [client for client in clients if client in self._rows and client not in forgotten] if self._rows else ()
        return {client: rows for client in known if (rows := self.read(client))}

    def read_many(self, clients: Sequence[int], name: str) -> Tensor:
        """Return one row of several clients as [k, d]; raise if a client has none."""
        return next(self._blocks(self._matching_rows(clients, name), len(clients)))

    def dot(self, clients: Sequence[int], name: str, vectors: Tensor) -> Tensor:
        """Return <row_i, vector_j> in float64, [k, v]; rows are streamed, never all in memory."""
        rows = self._matching_rows(clients, name)
        length = rows[0].numel()
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
        total = torch.zeros(rows[0].numel(), dtype=torch.float64)
        streamed = (row for block in self._blocks(rows, SUM_BLOCK) for row in block)
        for row, weight in zip(streamed, weights, strict=True):
            for start in range(0, len(row), SPAN):
                total[start : start + SPAN].add_(row[start : start + SPAN].to(torch.float64), alpha=float(weight))
        return total

    def clients(self, name: str | None = None) -> list[int]:
        """Return the clients with any row, or with this one, in order."""
        return sorted(client for client, rows in self._rows.items() if name is None or name in rows)

    def digest(self) -> str:
        """Read all rows of all clients; return their SHA-256, the same in memory and on disk."""
        rows = ((c, name, row) for c in self.clients() for name, row in sorted(self._rows[c].items()))
        digests = ((c, name, row_digest(self._load(row))) for c, name, row in rows)
        return sha256(*(f"{c}:{len(name)}:{name}:{digest}\n".encode() for c, name, digest in digests))

    def stage(self, client: int, rows: Mapping[str, Tensor]) -> None:
        """Write rows for the next commit; until then reads return the old ones."""
        check_rows({client: rows})
        self._staged += self._write({client: rows})

    def discard(self) -> None:
        """Discard staged rows."""
        self._staged = []

    def commit(self, round: int, rows: Rows) -> None:
        """Close a round: commit the staged rows and these atomically."""
        if round != self.generation:
            raise HansaError(
                f"commit(round={round}): the store is at round {self.generation}. Rounds are closed in order; open the "
                "store at the round of the checkpoint to resume from."
            )
        check_rows(rows)
        self._apply([*self._staged, *self._write(rows)], round + 1)
        self._staged, self.generation = [], round + 1

    def close(self) -> None:
        """Release files."""
        return

    def _write(self, rows: Rows) -> list[tuple[int, str, Any]]:
        """Store rows; return each with its client and name."""
        return [
            (client, name, row.detach().to("cpu", copy=True).contiguous())
            for client, client_rows in rows.items()
            for name, row in client_rows.items()
        ]

    def _apply(self, written: Iterable[tuple[int, str, Any]], generation: int) -> list[Any]:
        """Add the rows of a generation; return those that they replace."""
        replaced = []
        for client, name, row in written:
            client_rows = self._rows.setdefault(client, {})
            replaced += [client_rows[name]] if name in client_rows else []
            client_rows[name] = row
        return replaced

    def _load(self, row: Any) -> Tensor:
        """Return a copy of a row."""
        copy: Tensor = row.clone()
        return copy

    def _blocks(self, rows: Sequence[Any], size: int) -> Iterator[Tensor]:
        """Yield rows of one layout as matrices of at most ``size`` rows, each valid until the next."""
        for start in range(0, len(rows), size):
            yield torch.stack([row.reshape(-1) for row in rows[start : start + size]])

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
        layouts = {(dtype_name(row.dtype), row.numel()) for row in rows}
        if len(layouts) != 1:
            problem = f"they differ in dtype or length, {sorted(layouts)}" if rows else "no clients were passed"
            raise HansaError(f"rows {name!r} cannot be stacked: {problem}.")
        return rows


class DiskStore(ClientStore):
    """A `ClientStore` in a folder. After a crash it is at the last closed round.

    Every row has a SHA-256: ``read`` always checks it; ``read_many``, ``dot`` and ``combine`` check it at the first
    read of a row that this process did not write, and its CRC-32 otherwise. The error for a damaged row has its client,
    name and file. Only changed rows are written. Only one process may open a store.

    Args:
        folder: The folder, created if it is absent; or the record of a run, whose commits make rounds durable.
        durable: Whether closed rounds survive a loss of power; unnecessary for temporary stores.
        head: The rows of a run at a checkpoint; by default those at the end of the record.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | RunRecord, *, durable: bool = True, head: Head | None = None
    ) -> None:
        super().__init__()
        self._lock: FileLock | None = None  # of its own folder; that of a run is locked by the run
        if isinstance(folder, RunRecord):
            self.database = folder
        else:
            path = Path(folder)
            io.make_folder(path)
            self._lock = FileLock(path / "lock")
            self.database = RunRecord.create(path, durable=durable)
        head = self.database.head if head is None else head
        self.generation = head.generation
        entries = self.database.entries(LIVE, [head.generation, head.generation])
        for entry in entries:
            self._rows.setdefault(entry.client, {})[entry.name] = entry
        if _sum_seals(entries) % (1 << 256) != head.sum:
            raise DamagedFileError(
                f"{self.database.path} is damaged: it does not have the rows of round {self.generation}. {REMEDY}"
            )

    def discard(self) -> None:
        if self._staged:
            with self.database.writing_rows():
                for _, _, entry in self._staged:
                    self.database.delete("id = ?", [entry.id])
        super().discard()

    def _write(self, rows: Rows) -> list[tuple[int, str, Any]]:
        """Write the rows that changed."""
        written = []
        with self.database.writing_rows():
            for client in sorted(rows):
                for name, row in sorted(rows[client].items()):
                    stored, sha = self._rows.get(client, {}).get(name), row_digest(row)
                    if stored is None or stored.sha != sha:
                        entry = self.database.put("client", client, name, self.generation + 1, row, sha)
                        written.append((client, name, entry))
        return written

    def _apply(self, written: Iterable[tuple[int, str, Any]], generation: int) -> list[Any]:
        """Keep a replaced row if a checkpoint may need it, otherwise delete it."""
        replaced = super()._apply(written, generation)
        with self.database.writing_rows():
            kept = max(self.database.checkpoint_rounds(), default=-1)
            for entry in replaced:
                if entry.born <= kept:
                    self.database.execute("UPDATE vectors SET died = ? WHERE id = ?", [generation, entry.id])
                else:
                    self.database.delete("id = ?", [entry.id])
            total = self.database.head.sum + _sum_seals(entry for _, _, entry in written) - _sum_seals(replaced)
            self.database.set_head(generation=generation, sum=total % (1 << 256))
        if self._lock is not None:
            self.database.commit()
        return replaced

    def verify(self) -> int:
        """Read and check every row; return their number."""
        entries = [entry for client_rows in self._rows.values() for entry in client_rows.values()]
        for entry in entries:
            self.database.get(entry)
        return len(entries)

    def close(self) -> None:
        """Release files; rows can still be read."""
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

    def _blocks(self, rows: Sequence[RowEntry], size: int) -> Iterator[Tensor]:
        """Yield blocks of rows in two buffers; the next block is read while one is in use.

        Two threads read large rows, since reading and hashing release the interpreter lock.
        """
        starts, readers = range(0, len(rows), size), 1 if rows[0].offset is None else 2
        shape = (min(size, len(rows)), rows[0].numel())
        buffers = [torch.empty(shape, dtype=getattr(torch, rows[0].dtype)) for _ in starts[:2]]

        def read(entries: Sequence[RowEntry], into: Tensor) -> None:
            for entry, row in zip(entries, into, strict=True):
                self.database.get(entry, row, quick=True)

        with ThreadPoolExecutor(readers) as pool:
            pending: list[tuple[Tensor, list[Future[None]]]] = []
            for turn, start in enumerate([*starts, None]):
                if start is not None:
                    entries = rows[start : start + size]
                    block = buffers[turn % 2][: len(entries)]
                    parts = [(entries[part::readers], block[part::readers]) for part in range(readers)]
                    pending.append((block, [pool.submit(read, *part) for part in parts]))
                if turn:
                    block, jobs = pending.pop(0)
                    for job in jobs:
                        job.result()
                    yield block

    def _products(self, rows: Sequence[RowEntry], vectors: Tensor) -> Tensor:
        native = rows[0].dtype == "float32" == str(vectors.dtype)[6:] and arithmetic.native_fits(vectors)
        if not native or not kernels.reads_rows() or any(entry.offset is None for entry in rows):
            return super()._products(rows, vectors)
        # one thread reads, checks and multiplies a block, piece by piece
        stop, blocks = Event(), [rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK)]
        with ThreadPoolExecutor(2) as pool:
            try:
                return torch.cat([*pool.map(lambda entries: self.database.dot(entries, vectors, stop), blocks)])
            finally:
                stop.set()  # stops the other thread after an error or an interruption


def _sum_seals(entries: Iterable[RowEntry]) -> int:
    return sum(int(entry.seal, 16) for entry in entries)


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


class RunRecord(Database):
    """The record of a run, open for writing by the process that holds the folder's lock, or for reading.

    >>> import tempfile
    >>> import numpy as np
    >>> from hansa.runs.client_columns import encode_clients
    >>> with tempfile.TemporaryDirectory() as folder, RunRecord.create(folder) as record:
    ...     record.add_round({"round": 1, "loss": 0.5}, encode_clients({"client": np.array([3])}))
    ...     record.save_checkpoint({"x": torch.ones(2)}, {"round": 1})
    ...     record.commit()
    ...     [record for record, _ in record.rounds()], record.checkpoint_rounds(), record.load_checkpoint().state
    ([{'round': 1, 'loss': 0.5}], [1], {'x': tensor([1., 1.])})
    """

    def add_round(self, record: Mapping[str, Any], clients: bytes) -> None:
        """Add a closed round; `commit` makes it durable with the rows of its clients."""
        head, round = self.head, self.head.rounds + 1
        if record.get("round") != round:
            raise HansaError(f"add_round(round={record.get('round')}): the record is at round {head.rounds}.")
        text, sha = json.dumps(record, default=lambda number: number.item()), sha256(clients)
        chain = seal(self.identity, round, head.chain, text, sha)
        with self.writing_rows():
            self.execute("INSERT INTO rounds VALUES (?, ?, ?, ?, ?)", [round, text, chain, sha, clients])
            self.set_head(rounds=round, chain=chain)

    def rounds(self, head: Head | None = None) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield the closed rounds, all or those of an earlier head, each with the digest of those up to it."""
        with self.checked():
            for round, text, chain, _ in self._checked_rounds("NULL", head):
                record = dict(json.loads(text))
                if record.get("round") != round:
                    raise ValueError(f"the record of round {round} has another number")
                check_record(record)
                yield record, chain

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
        """Yield round, record, digest and client block, if ``content`` is its column, in one statement: a snapshot,
        whatever is written meanwhile."""
        previous, round, end = "", 0, head
        last = 1 << 62 if head is None else head.rounds
        statement = (
            "SELECT NULL, head, NULL, NULL, NULL FROM about UNION ALL "
            f"SELECT round, record, digest, sha, {content} FROM rounds WHERE round <= ?"
        )
        for number, text, chain, sha, block in self.execute(statement, [last]):
            if number is None:
                self.head = self.parse_head(text)
                end = self.head if end is None else end
                continue
            round += 1
            intact = block is None or sha256(block) == sha
            if number != round or not intact or chain != seal(self.identity, round, previous, text, sha):
                raise ValueError(f"round {round}, or one before it, was changed or is missing")
            yield number, text, chain, block
            previous = chain
        if end is None or (round, previous) != (end.rounds, end.chain):
            raise ValueError(f"its {round} rounds are not those of its head or checkpoint")

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
            digest = seal(self.identity, round, head, tree, [entry.seal for entry in entries])
            self.execute("INSERT INTO checkpoints VALUES (?, ?, ?, ?)", [round, head, tree, digest])
            self._delete_checkpoints("< ?", self.checkpoint_rounds()[-keep:][0])
            self.delete(
                "died IS NOT NULL AND NOT EXISTS (SELECT 1 FROM checkpoints AS kept "
                "WHERE vectors.born <= kept.round AND kept.round < vectors.died)"
            )

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
            if digest != seal(self.identity, round, head, tree, [entry.seal for entry in entries]):
                raise ValueError(f"the checkpoint of round {round} was changed")
            tensors = {entry.name: self.get(entry) for entry in entries}
            content = json.loads(tree, object_hook=lambda node: tensors[node["$tensor"]] if "$tensor" in node else node)
            return Checkpoint(content["state"], content["meta"], self.parse_head(head))

    def check_checkpoint(self, round: int) -> Checkpoint:
        """Return a checkpoint; refuse it if the state, rows or rounds that resuming needs are damaged."""
        checkpoint = self.load_checkpoint(round)
        for _ in self.rounds(checkpoint.head):
            pass
        DiskStore(self, head=checkpoint.head).verify()
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
        self._install(self.path)
        Database.__init__(self, self.path.parent, writing=True)

    def rewind(self, head: Head) -> list[dict[str, Any]]:
        """Return to the head of a checkpoint in one transaction, and return the records up to it."""
        records = [record for record, _ in self.rounds(head)]
        with self.writing_rows():
            self.execute("DELETE FROM rounds WHERE round > ?", [head.rounds])
            self._delete_checkpoints("> ?", head.rounds)
            self.delete("kind = 'client' AND born > ?", [head.generation])
            self.execute("UPDATE vectors SET died = NULL WHERE died > ?", [head.generation])
            self.set_head(**head._asdict())
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
