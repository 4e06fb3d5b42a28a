"""The record of a run: every round, every client, and checkpoints, in one SQLite file that grows by a transaction a
round.

A client block has the columns of one round: a JSON head that says how each column is stored, and the body. A constant
column is in the head, integers take as few bytes as their range needs, client numbers are stored as differences, and
floats are single precision: eight bytes per client and round where only loss and norm differ. Pickle is not used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hansa import __version__
from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.core.types import State
from hansa.runs.client_columns import Array, ClientColumns, ClientTotals, fill_columns, join_rounds, union_of_clients
from hansa.runs.store.base import DTYPES, dtype_name
from hansa.runs.store.database import DATABASE, REMEDY, Database, Head
from hansa.runs.store.disk import DiskStore
from hansa.runs.store.io import DamagedFileError
from hansa.runs.store.row_file import RowEntry

log = logging.getLogger("hansa")

Meta: TypeAlias = dict[str, Any]
"""Plain data beside the state: round, seed, digest of the configuration, and versions."""
Table: TypeAlias = Mapping[str, Array]
"""Columns of equal length, with ascending client numbers."""

_SIZE = struct.Struct("<I")
_WIDTHS = ("<u1", "<u2", "<u4", "<u8")
_MAX_CLIENTS = 10_000_000  # of one round
_encode_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Checkpoint(NamedTuple):
    """The state of a run after a round, and its metadata."""

    state: State
    meta: Meta


class RecordedRound(NamedTuple):
    """A closed round as it is stored."""

    round: int
    record: dict[str, Any]
    digest: str


class RunRecord:
    """The record of a run in its folder, open for writing by the process that holds the folder's lock, or for reading.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, RunRecord.create(folder) as record:
    ...     record.add_round({"round": 1, "loss": 0.5}, encode_clients({"work": {"client": np.array([3])}}))
    ...     record.save_checkpoint({"x": torch.ones(2)}, {"round": 1})
    ...     record.commit()
    ...     [each.record for each in record.rounds()], record.checkpoint_rounds(), record.load_checkpoint().state
    ([{'round': 1, 'loss': 0.5}], [1], {'x': tensor([1., 1.])})
    """

    def __init__(self, folder: Path | str, *, writing: bool = False) -> None:
        self.database = Database(folder, writing=writing)
        self.store: DiskStore | None = None

    @classmethod
    def create(cls, folder: Path | str) -> RunRecord:
        """Create an empty record, open for writing."""
        Database.create(folder)
        return cls(folder, writing=True)

    @staticmethod
    def exists(folder: Path | str) -> bool:
        """Return whether a folder has a record."""
        return (Path(folder) / DATABASE).is_file()

    @property
    def path(self) -> Path:
        """The path of the database."""
        return self.database.path

    def open_rows(self, at_round: int | None = None) -> DiskStore:
        """Return the client rows, as the record has them or as they were at the round of a checkpoint."""
        if self.store is None:
            self.store = DiskStore.of(self.database, at_round)
            self.store.kept = self.checkpoint_rounds()
        return self.store

    def add_round(self, record: Mapping[str, Any], clients: bytes) -> None:
        """Add a closed round; `commit` makes it durable, together with the rows of its clients."""
        database, head = self.database, self.database.head
        round = head.rounds + 1
        if record.get("round") != round:
            raise HansaError(f"add_round(round={record.get('round')}): the record is at round {head.rounds}.")
        text, sha = to_line(record), hashlib.sha256(clients).digest()
        chain = self._chain(head.chain, round, text, sha)
        with database.writing_rows():
            database.execute("INSERT INTO rounds VALUES (?, ?, ?, ?)", [round, text, sha, chain])
            database.execute("INSERT INTO clients VALUES (?, ?)", [round, clients])
            database.set_head(rounds=round, chain=chain)

    def commit(self) -> None:
        """Close the transaction: everything written since the last one is durable, or nothing."""
        self.database.commit()

    def rounds(self, last: int | None = None) -> Iterator[RecordedRound]:
        """Yield the closed rounds, checked: 1, 2, 3, ... and every digest."""
        with self.database.reading():
            for round, text, _, chain in self._checked_rounds(last):
                yield RecordedRound(round, from_line(text), chain.hex())

    def client_blocks(self) -> Iterator[tuple[int, dict[str, Table]]]:
        """Yield the client tables of every round, checked."""
        database = self.database
        with database.reading():
            for round, _, sha, _ in self._checked_rounds(None):
                with database.checked():
                    (content,) = database.execute("SELECT content FROM clients WHERE round = ?", [round]).fetchone()
                    if hashlib.sha256(content).digest() != sha:
                        raise ValueError(f"the clients of round {round} were changed")
                    tables = decode_clients(content)
                yield round, tables

    def _checked_rounds(self, last: int | None) -> Iterator[tuple[int, str, bytes, bytes]]:
        database, before, round = self.database, b"", 0
        end = database.head.rounds if last is None else last
        with database.checked():
            statement = "SELECT round, record, clients, digest FROM rounds WHERE round <= ? ORDER BY round"
            for number, text, sha, chain in database.execute(statement, [end]):
                round += 1
                if number != round or chain != self._chain(before, round, text, sha):
                    raise ValueError(f"round {round}, or one before it, was changed or is missing")
                yield number, text, sha, chain
                before = chain
            if round != end or (last is None and before != database.head.chain):
                raise ValueError(f"it has {round} of {end} rounds")

    def _chain(self, before: bytes, round: int, text: str, clients: bytes) -> bytes:
        state = hashlib.sha256(f"{self.database.identity} {round} ".encode() + before + clients)
        state.update(text.encode())
        return state.digest()

    @property
    def digest(self) -> str:
        """The running digest of all rounds; empty before the first."""
        return self.database.head.chain.hex()

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def checkpoint_rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, oldest first."""
        with self.database.checked():
            return sorted(int(round) for (round,) in self.database.execute("SELECT round FROM checkpoints").fetchall())

    def save_checkpoint(self, state: State, meta: Mapping[str, Any], *, keep: int = 3) -> None:
        """Write the state after ``meta["round"]`` and remove all but the newest ``keep``; durable after `commit`."""
        check_integer("save_checkpoint", "keep", keep)
        encoder, meta_encoder = _Encoder(), _Encoder()
        tree = _encode_json(encoder.encode(state, "state"))
        encoded = meta_encoder.encode({**meta, "versions": _versions()}, "meta")
        if meta_encoder.tensors:
            raise invalid_argument("save_checkpoint", "meta", "a tensor", "plain data", "Tensors belong in the state.")
        database, round = self.database, int(meta["round"])
        head = database.head
        facts = {"meta": encoded, "chain": head.chain.hex(), "generation": head.generation, "sum": f"{head.sum:x}",
                 "rounds": head.rounds}  # fmt: skip
        text = _encode_json(facts)
        with database.writing_rows():
            rounds = self.checkpoint_rounds()
            for old in {*rounds[: max(0, len({*rounds, round}) - keep)], *(r for r in rounds if r == round)}:
                self._delete_checkpoint(old)
            put = [database.put("checkpoint", round, name, round, row) for name, row in encoder.tensors.items()]
            digest = self._digest(round, text, tree, put)
            database.execute("INSERT INTO checkpoints VALUES (?, ?, ?, ?)", [round, text, tree, digest])
            if self.store is not None:
                self.store.keep(self.checkpoint_rounds())

    def load_checkpoint(self, round: int | None = None) -> Checkpoint:
        """Return the newest checkpoint, or that of a round, every byte checked."""
        text, tree, entries = self._read_checkpoint(round)
        with self.database.checked():
            tensors = {entry.name: self.database.get(entry) for entry in entries}
            return Checkpoint(_decode(json.loads(tree), tensors), _decode(json.loads(text)["meta"], {}))

    def head_of_checkpoint(self, round: int) -> Head:
        """Return what the head was when a checkpoint was written."""
        text, _, _ = self._read_checkpoint(round)
        with self.database.checked():
            facts = json.loads(text)
            return Head(
                int(facts["rounds"]), bytes.fromhex(facts["chain"]), int(facts["generation"]), int(facts["sum"], 16)
            )

    def newest_checkpoint(self) -> int:
        """Return the round of the newest checkpoint."""
        if not (rounds := self.checkpoint_rounds()):
            raise HansaError(f"{self.path.parent}: no checkpoint. Use the folder of a run that has saved one.")
        return rounds[-1]

    def _read_checkpoint(self, round: int | None) -> tuple[str, str, list[RowEntry]]:
        round = self.newest_checkpoint() if round is None else round
        database = self.database
        with database.checked():
            statement = "SELECT meta, state, digest FROM checkpoints WHERE round = ?"
            text, tree, digest = database.execute(statement, [round]).fetchone()
            entries = [entry for entry, _ in database.entries("kind = 'checkpoint' AND client = ?", [round])]
            if digest != self._digest(round, text, tree, entries):
                raise ValueError(f"the checkpoint of round {round} was changed")
        return text, tree, entries

    def _digest(self, round: int, text: str, tree: str, entries: Sequence[RowEntry]) -> bytes:
        state = hashlib.sha256(
            f"{self.database.identity} {round} {len(text)} ".encode() + text.encode() + tree.encode()
        )
        for entry in entries:
            state.update(self.database.seal(entry))
        return state.digest()

    def _delete_checkpoint(self, round: int) -> None:
        tensors = [entry for entry, _ in self.database.entries("kind = 'checkpoint' AND client = ?", [round])]
        self.database.delete(tensors)
        self.database.execute("DELETE FROM checkpoints WHERE round = ?", [round])

    def check_checkpoint(self, round: int) -> None:
        """Refuse a checkpoint if anything that a run needs to go on from it is damaged: state, rows, rounds."""
        head = self.head_of_checkpoint(round)
        self.load_checkpoint(round)
        self._check_chain(head)
        rows = DiskStore.of(self.database, head.generation)
        rows.check_sum(head.sum)
        rows.verify()

    def _check_chain(self, head: Head) -> list[dict[str, Any]]:
        rounds = list(self.rounds(head.rounds))
        if (rounds[-1].digest if rounds else "") != head.chain.hex():
            raise DamagedFileError(f"{self.path} is damaged: not the rounds of the checkpoint of round {head.rounds}.")
        return [each.record for each in rounds]

    def intact_checkpoint(self) -> int:
        """Return the newest round whose checkpoint, rows and rounds are undamaged, and warn about the others.

        If anything is damaged, the database is written anew with that checkpoint only.
        """
        rounds = self.checkpoint_rounds()
        for round in reversed(rounds):
            try:
                self.check_checkpoint(round)
            except HansaError as damage:
                log.warning("%s Falling back to the checkpoint before it.", damage)
                continue
            try:
                self.database.check_pages()
                damaged = round != rounds[-1]
            except DamagedFileError as damage:
                log.warning("%s", damage)
                damaged = True
            if damaged:
                self._salvage(round)
            return round
        raise DamagedFileError(
            f"{self.path.parent}: no checkpoint has undamaged state, rows and rounds. Start a new run."
        )

    def _salvage(self, round: int) -> None:
        """Write the database anew: one checkpoint and all that belongs to it."""
        head = self.head_of_checkpoint(round)
        live = "kind = 'client' AND born <= ? AND (died IS NULL OR died > ?)"
        self.database.salvage(
            head,
            {
                "rounds": ("round <= ?", [head.rounds]),
                "clients": ("round <= ?", [head.rounds]),
                "checkpoints": ("round = ?", [round]),
                "vectors": (f"({live}) OR (kind = 'checkpoint' AND client = ?)", [*[head.generation] * 2, round]),
            },
        )
        self.database = Database(self.path.parent, writing=True)
        with self.database.writing_rows():
            self.database.execute("UPDATE vectors SET died = NULL WHERE kind = 'client'")
        self.commit()

    def rewind(self, round: int) -> list[dict[str, Any]]:
        """Go back to the checkpoint of a round, in one transaction, and return the records of the rounds before it."""
        database, head = self.database, self.head_of_checkpoint(round)
        records = self._check_chain(head)
        rows = self.open_rows(head.generation)
        rows.check_sum(head.sum)
        with database.writing_rows():
            for table in ("rounds", "clients"):
                database.execute(f"DELETE FROM {table} WHERE round > ?", [head.rounds])
            for later in self.checkpoint_rounds():
                if later > round:
                    self._delete_checkpoint(later)
            database.execute("DELETE FROM vectors WHERE kind = 'client' AND born > ?", [head.generation])
            database.execute("UPDATE vectors SET died = NULL WHERE kind = 'client' AND died > ?", [head.generation])
            database.set_head(**head._asdict())
        rows.keep(self.checkpoint_rounds())
        self.commit()
        database.reserve_slots()
        return records

    def close(self) -> None:
        """Close the record. What was not committed is undone."""
        (self.database if self.store is None else self.store).close()

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class ClientRecord:
    """The client columns of a run: in memory, or in its record."""

    def __init__(self, record: RunRecord | None = None) -> None:
        self._record = record
        self._blocks: list[tuple[int, bytes]] = []
        self.newest = b""
        """The block of the newest round."""

    def add(self, round: int, **tables: Table) -> None:
        """Add a closed round."""
        self.newest = encode_clients(tables)
        if self._record is None:
            self._blocks.append((round, self.newest))

    def columns(self, *names: str) -> ClientColumns:
        """Return the columns, all of them or those named."""
        if self._record is not None:
            return join_rounds(self._record.client_blocks(), names)
        return join_rounds(((round, decode_clients(block)) for round, block in self._blocks), names)


def read_history(folder: Path | str) -> list[dict[str, Any]]:
    """Read the records of all closed rounds of a run folder."""
    with RunRecord(folder) as record:
        return [each.record for each in record.rounds()]


def read_columns(folder: Path | str, *names: str) -> ClientColumns:
    """Read the client columns of a run folder."""
    with RunRecord(folder) as record:
        return join_rounds(record.client_blocks(), names)


def read_by_client(folder: Path | str) -> ClientColumns:
    """Read one row per client; the record is read round by round, so it may be larger than memory."""
    totals = ClientTotals()
    with RunRecord(folder) as record:
        for round, tables in record.client_blocks():
            clients = union_of_clients([table["client"] for table in tables.values()])
            totals.add(fill_columns(round, clients, tables))
    return totals.result()


# --- records as JSON ------------------------------------------------------------------------------------------------


def to_line(record: Mapping[str, Any]) -> str:
    """Return a record as one line of strict JSON: NaN is null, infinities are "inf" and "-inf".

    >>> to_line({"round": 1, "loss": float("nan"), "diversity": float("inf")})
    '{"round": 1, "loss": null, "diversity": "inf"}'
    """
    return json.dumps(to_plain_json(record), allow_nan=False)


def from_line(line: str) -> dict[str, Any]:
    """Return the record that `to_line` wrote, with nulls as NaN.

    >>> from_line('{"round": 1, "loss": null, "diversity": "inf"}')
    {'round': 1, 'loss': nan, 'diversity': inf}
    """
    record = json.loads(line)
    if not isinstance(record, dict) or type(record.get("round")) is not int:
        raise ValueError(f"expected a record with its round, found {line[:60]!r}")
    for name, value in record.items():
        if value is None:
            record[name] = math.nan
        elif value == "inf" or value == "-inf":
            record[name] = float(value)
    return record


def to_plain_json(value: Any) -> Any:
    """Convert a tree of numbers to values that strict JSON can represent."""
    if isinstance(value, Mapping):
        return {str(name): to_plain_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value.item() if hasattr(value, "item") else value


# --- client columns -------------------------------------------------------------------------------------------------


def encode_clients(tables: Mapping[str, Table]) -> bytes:
    """Return the client tables of a round as one block of bytes."""
    head: dict[str, Any] = {}
    body: list[bytes] = []
    for name, table in tables.items():
        rows = len(next(iter(table.values()))) if table else 0
        if rows:
            head[name] = {"rows": rows, "columns": {key: _encode_column(key, table[key], body) for key in table}}
    text = _encode_json(head).encode()
    return b"".join([_SIZE.pack(len(text)), text, *body])


def _encode_column(name: str, values: Array, body: list[bytes]) -> list[Any]:
    """Append a column to the body and return how it is stored: constant, offset integers, differences, or floats."""
    if values.dtype.kind == "f":
        single = values.astype("<f4")
        bits = single.view("<u4")
        if (bits == bits[0]).all():
            return ["equal", int(bits[0])]
        body.append(single.tobytes())
        return ["numbers"]
    integers = values.astype(np.int64)
    if name == "client":  # ascending: only the steps from one to the next are stored
        return ["steps", int(integers[0]), *_encode_integers(np.diff(integers), body)]
    return ["whole", *_encode_integers(integers, body)]


def _encode_integers(values: Array, body: list[bytes]) -> tuple[int, str | None]:
    """Return the least value, and the width in which the others are stored above it unless all are equal."""
    least, most = (int(values.min()), int(values.max())) if len(values) else (1, 1)
    if least == most:
        return least, None
    width = next(dtype for dtype in _WIDTHS if most - least < 1 << 8 * int(dtype[2:]))
    body.append((values - least).astype(width).tobytes())
    return least, width


def decode_clients(block: bytes) -> dict[str, Table]:
    """Return the tables of a block; raise `ValueError` and the like if it is not one."""
    (size,) = _SIZE.unpack_from(block)
    head, offset = json.loads(block[_SIZE.size : _SIZE.size + size]), _SIZE.size + size
    decoded: dict[str, Table] = {}

    def integers(rows: int, least: int, width: str | None) -> Array:
        nonlocal offset
        if width is None:
            return np.full(rows, least, np.int64)
        if width not in (*_WIDTHS, "<f4"):
            raise ValueError(f"no such width {width!r}")
        values = np.frombuffer(block, width, rows, offset)
        offset += values.nbytes
        return values if width == "<f4" else values.astype(np.int64) + least

    for name, table in head.items():
        rows = int(table["rows"])
        if not 1 <= rows <= _MAX_CLIENTS:
            raise ValueError(f"a table of {rows} rows")
        columns: dict[str, Array] = {}
        for key, (kind, *stored) in table["columns"].items():
            if kind == "steps":
                first, least, width = stored
                columns[key] = first + np.concatenate([[0], np.cumsum(integers(rows - 1, least, width))])
            elif kind == "whole":
                columns[key] = integers(rows, *stored)
            elif kind == "equal":
                columns[key] = np.full(rows, stored[0], np.uint32).view(np.float32)
            elif kind == "numbers":
                columns[key] = integers(rows, 0, "<f4")
            else:
                raise ValueError(f"no such column {kind!r}")
        decoded[name] = columns
    if offset != len(block):
        raise ValueError(f"{len(block) - offset} bytes too many")
    return decoded


# --- states ---------------------------------------------------------------------------------------------------------


class _Encoder:
    """Encodes a tree as JSON with ``{"$tensor": name}`` for each tensor, and collects the tensors by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def encode(self, node: object, path: str) -> Any:
        if node is None or isinstance(node, (bool, int, str)):
            return node
        if isinstance(node, float):  # JSON has no NaN or infinity
            return node if math.isfinite(node) else {"$float": repr(float(node))}
        if isinstance(node, list):
            return [self.encode(value, f"{path}[{i}]") for i, value in enumerate(node)]
        if isinstance(node, dict):
            if wrong := [key for key in node if not isinstance(key, str) or key.startswith("$")]:
                raise invalid_argument("save_checkpoint", path, wrong[0], "string keys without a leading $")
            return {key: self.encode(value, f"{path}.{key}") for key, value in node.items()}
        if isinstance(node, Tensor) and dtype_name(node.dtype) in DTYPES:
            name = f"{len(self.tensors)}:{path}"  # keys may contain dots: the number makes names unique
            self.tensors[name] = node.detach().cpu().contiguous()
            return {"$tensor": name}
        kind = str(node.dtype) if isinstance(node, Tensor) else type(node).__name__
        raise invalid_argument("save_checkpoint", path, kind, "tensors, numbers, strings, lists and dicts")


def _decode(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(value, tensors) for value in node]
    if isinstance(node, dict):
        if "$tensor" in node:
            return tensors[node["$tensor"]]
        if "$float" in node:
            return float(node["$float"])
        return {key: _decode(value, tensors) for key, value in node.items()}
    return node


def _versions() -> dict[str, str]:
    return {"hansa": __version__, "torch": torch.__version__, "python": platform.python_version()}


__all__ = [
    "REMEDY", "Checkpoint", "ClientRecord", "RecordedRound", "RunRecord", "decode_clients", "encode_clients",
    "from_line", "read_by_client", "read_columns", "read_history", "to_line", "to_plain_json",
]  # fmt: skip
