"""What every client did in every round, in columns: losses, norms, bytes, participations, and how well it was served.

A block a round, in memory or appended to ``clients.columns``::

    "HCC1"  u32 size of the head  u32 size of the body  head  body  seal

The head is JSON: the round, and of each column how it lies in the body. Equal values are one value in the head, whole
numbers take as few bytes as they need above their least, clients are told by the steps between them, and numbers are
single precision: eight bytes a client and round where loss and norm are all that differs. The seal of a block is the
first eight bytes of SHA-256(seal before + block): damage, a block left out, doubled or moved shows from there on, and a
checkpoint remembers the seal of its round. Nothing is read by pickle.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hansa.runs.client_columns import Array, ClientColumns, Tally, filled, joined, union
from hansa.runs.store import Damaged, io

Table: TypeAlias = Mapping[str, Array]
"""Columns of equal length; the one called client ascends."""

MAGIC = b"HCC1"
FIRST = b"hansa!cc"
"""What the first block is sealed upon."""

_FRAME = struct.Struct("<4sII")
_SEAL = 8
_HEAD = 1 << 20  # bytes of a head, at most: a handful of columns take a few hundred
_WIDTHS = ("<u1", "<u2", "<u4", "<u8")
REMEDY = "Restore it, or go on from an older checkpoint: `hansa resume --fallback`."


class Block(NamedTuple):
    """A round of the record as it lies in a file."""

    round: int
    tables: Mapping[str, Table]
    seal: bytes


class ClientRecord:
    """The record of a run, round after round. With a ``path`` it is kept in that file, otherwise in memory."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._blocks: list[bytes] = []
        self._seal = FIRST
        self._unsynced = False

    @classmethod
    def taken_up(cls, path: Path, round: int, seal: str | None) -> ClientRecord:
        """The record of a run's folder as it was after a round; what is of later rounds, which are about to be run
        again, is forgotten. ``seal`` is what the checkpoint remembers of it, None where it knew of no record."""
        found = cls(path)
        kept = [] if seal is None else _kept(path, round, seal)
        if not kept:
            io.remove(path)
            return found
        found._seal = kept[-1][-_SEAL:]
        if path.stat().st_size != sum(map(len, kept)):
            io.write_file(path, *kept)
        return found

    @property
    def seal(self) -> str:
        """Of the newest block."""
        return self._seal.hex()

    def add(self, round: int, **tables: Table) -> None:
        """Note a closed round. In a file it is durable after `sync`."""
        block = _encoded(round, tables, self._seal)
        self._seal = block[-_SEAL:]
        if self.path is None:
            self._blocks.append(block)
        else:
            io.append(self.path, block, sync=False)
            self._unsynced = True

    def sync(self) -> None:
        """Make all that was added durable."""
        if self.path is not None and self._unsynced:
            io.sync_file(self.path)
            self._unsynced = False

    def columns(self, *names: str) -> ClientColumns:
        """The record as columns, all of them or those named."""
        blocks = _in_memory(self._blocks) if self.path is None else _of_file(self.path)
        return joined(((block.round, block.tables) for block in blocks), names)


def read(path: Path | str, *names: str) -> ClientColumns:
    """The columns of a file. A last block that a crash cut short is left out; any other damage is an error."""
    return joined(((block.round, block.tables) for block in _of_file(Path(path))), names)


def read_by_client(path: Path | str) -> ClientColumns:
    """One row a client of the record in a file, however long that is: it is read round by round."""
    tally = Tally()
    for block in _of_file(Path(path)):
        clients = union([table["client"] for table in block.tables.values()])
        tally.take(filled(block.round, clients, block.tables))
    return tally.found()


def sound(path: Path, round: int, seal: str | None) -> bool:
    """Whether a file has, undamaged, what a checkpoint of this round remembers of it."""
    try:
        return seal is None or bool(_kept(path, round, seal)) or seal == FIRST.hex()
    except Damaged:
        return False


def _kept(path: Path, round: int, seal: str) -> list[bytes]:
    """The blocks up to a round, the last of which must have this seal."""
    if seal == FIRST.hex():  # of later rounds nothing is wanted, damaged or not
        return []
    kept = list(_raw(path, round)) if path.is_file() else []
    if not kept or kept[-1][-_SEAL:].hex() != seal:
        raise Damaged(f"{path}: not the record that led to the checkpoint of round {round}. {REMEDY}")
    return kept


def _encoded(round: int, tables: Mapping[str, Table], before: bytes) -> bytes:
    body: list[bytes] = []
    head: dict[str, Any] = {"round": round}
    for name, table in tables.items():
        rows = len(next(iter(table.values()))) if table else 0
        if rows:
            head[name] = {"rows": rows, "columns": {key: _packed(key, table[key], body) for key in table}}
    told = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
    content = b"".join(body)
    block = _FRAME.pack(MAGIC, len(told), len(content)) + told + content
    return block + hashlib.sha256(before + block).digest()[:_SEAL]


def _packed(name: str, values: Array, body: list[bytes]) -> list[Any]:
    """How a column lies in the body: as one value, as whole numbers above the least, as steps, or as they are."""
    if name == "client":
        steps = np.diff(values)
        least, most = (int(steps.min()), int(steps.max())) if len(steps) else (1, 1)
        if least == most:
            return ["steps", int(values[0]), least]
        return ["steps", int(values[0]), _whole(steps, most, body)]
    if values.dtype.kind == "f":
        single = values.astype("<f4")
        bits = single.view("<u4")
        if (bits == bits[0]).all():
            return ["equal", int(bits[0])]
        body.append(single.tobytes())
        return ["numbers"]
    whole = values.astype(np.int64)
    least, most = int(whole.min()), int(whole.max())
    if least == most:
        return ["whole", least, None]
    return ["whole", least, _whole(whole - least, most - least, body)]


def _whole(values: Array, most: int, body: list[bytes]) -> str:
    width = next(kind for kind in _WIDTHS if most <= np.iinfo(kind).max)
    body.append(values.astype(width).tobytes())
    return str(width)


def _decoded(round: int, head: Mapping[str, Any], body: memoryview) -> dict[str, Table]:
    at = 0
    found: dict[str, Table] = {}

    def take(kind: str, count: int) -> Array:
        nonlocal at
        if kind not in (*_WIDTHS, "<f4"):
            raise ValueError(f"no such width {kind!r}")
        values = np.frombuffer(body, kind, count, at)
        at += values.nbytes
        return values

    for name, table in head.items():
        if name == "round":
            continue
        rows, columns = int(table["rows"]), {}
        if rows < 1:
            raise ValueError("a table without rows")
        for key, how in table["columns"].items():
            columns[str(key)] = _unpacked(how, rows, take)
        found[name] = columns
    if at != len(body):
        raise ValueError(f"{len(body) - at} bytes too many")
    return found


def _unpacked(how: Sequence[Any], rows: int, take: Any) -> Array:
    if how[0] == "steps":
        first, step = int(how[1]), how[2]
        if isinstance(step, int):
            return first + step * np.arange(rows, dtype=np.int64)
        steps = take(step, rows - 1).astype(np.int64)
        return np.concatenate([[first], first + np.cumsum(steps)])
    if how[0] == "equal":
        return np.full(rows, how[1], np.uint32).view(np.float32)
    if how[0] == "numbers":
        numbers: Array = take("<f4", rows)
        return numbers
    if how[0] == "whole":
        least = int(how[1])
        return np.full(rows, least, np.int64) if how[2] is None else take(how[2], rows).astype(np.int64) + least
    raise ValueError(f"no such column {how[0]!r}")


def _of_file(path: Path) -> Iterator[Block]:
    if not path.is_file():
        return
    for block in _raw(path, None):
        yield _parsed(str(path), block)


def _in_memory(blocks: Sequence[bytes]) -> Iterator[Block]:
    for block in blocks:
        yield _parsed("the record of clients", block)


def _parsed(where: str, block: bytes) -> Block:
    _, told, size = _FRAME.unpack_from(block)
    start = _FRAME.size + told
    try:
        head = json.loads(block[_FRAME.size : start])
        tables = _decoded(int(head["round"]), head, memoryview(block)[start : start + size])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise Damaged(f"{where}: not a round of clients as it was written ({str(error)[:200]}).") from error
    return Block(int(head["round"]), tables, block[-_SEAL:])


def _round_of(block: bytes) -> int:
    _, told, _ = _FRAME.unpack_from(block)
    return int(json.loads(block[_FRAME.size : _FRAME.size + told])["round"])


def _raw(path: Path, last: int | None) -> Iterator[bytes]:
    """The blocks of a file up to a round, each checked against its seal and the one before: rounds in a row."""
    before, expected = FIRST, None
    size = path.stat().st_size
    with path.open("rb") as file:
        at = 0
        while at < size and (last is None or expected is None or expected <= last):
            frame = file.read(_FRAME.size)
            if len(frame) < _FRAME.size:
                return
            magic, told, length = _FRAME.unpack(frame)
            if magic != MAGIC or told > _HEAD:
                raise Damaged(f"{path}: at byte {at} no round of clients begins. {REMEDY}")
            whole = _FRAME.size + told + length + _SEAL
            if at + whole > size:
                return
            block = frame + file.read(whole - _FRAME.size)
            if hashlib.sha256(before + block[:-_SEAL]).digest()[:_SEAL] != block[-_SEAL:]:
                raise Damaged(f"{path}: the block at byte {at} was changed, or those before it were. {REMEDY}")
            try:
                round = _round_of(block)
            except (ValueError, KeyError, TypeError) as error:
                raise Damaged(f"{path}: the block at byte {at} says no round. {REMEDY}") from error
            if expected is not None and round != expected:
                raise Damaged(f"{path}: round {round} where round {expected} belongs. {REMEDY}")
            if last is not None and round > last:
                return
            yield block
            before, expected, at = block[-_SEAL:], round + 1, at + whole
