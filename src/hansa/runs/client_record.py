"""The client record: one row per client and round, as columns in memory or in ``clients.columns``.

There is one block for each round::

    "HCC1"  u32 size of the head  u32 size of the body  head  body  seal

The head is JSON: the round, and how each column is stored in the body. A constant column is in the head, integers take
as few bytes as their range needs, client numbers are stored as differences, and floats are single precision: eight
bytes per client and round where only loss and norm differ. The seal of a block is the first eight bytes of SHA-256(seal
before + block), so that damaged, missing, duplicated or moved blocks are detected; a checkpoint has the seal of its
round. Pickle is not used.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hansa.runs.client_columns import Array, ClientColumns, ClientTotals, fill_columns, join_rounds, union_of_clients
from hansa.runs.store import DamagedFileError, io

Table: TypeAlias = Mapping[str, Array]
"""Columns of equal length, with ascending client numbers."""

MAGIC = b"HCC1"
INITIAL_SEAL = b"hansa!cc"
"""The seal before the first block."""

_FRAME = struct.Struct("<4sII")
_SEAL = 8
_HEAD = 1 << 20  # maximum size of a head in bytes; usual heads take a few hundred
_WIDTHS = ("<u1", "<u2", "<u4", "<u8")
_encode_head = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
REMEDY = "Restore it, or use an older checkpoint: `hansa resume --fallback`."


class RoundBlock(NamedTuple):
    """A round of the record."""

    round: int
    tables: Mapping[str, Table]
    seal: bytes


class ClientRecord:
    """The client record of a run, in the file ``path`` or in memory."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._blocks: list[bytes] = []
        self._seal = INITIAL_SEAL
        self._unsynced = False

    @classmethod
    def load(cls, path: Path, round: int, seal: str | None) -> ClientRecord:
        """Load the record up to a round and remove later rounds, which will be run again.

        Args:
            path: The file.
            round: The round of the checkpoint.
            seal: The seal in the checkpoint; None if it has none.
        """
        record = cls(path)
        blocks = [] if seal is None else _blocks_up_to(path, round, seal)
        if not blocks:
            io.remove(path)
            return record
        record._seal = blocks[-1][-_SEAL:]
        if path.stat().st_size != sum(map(len, blocks)):
            io.write_file(path, *blocks)
        return record

    @property
    def seal(self) -> str:
        """The seal of the newest block."""
        return self._seal.hex()

    def add(self, round: int, **tables: Table) -> None:
        """Add a closed round. In a file it is durable after `sync`."""
        block = _encode_block(round, tables, self._seal)
        self._seal = block[-_SEAL:]
        if self.path is None:
            self._blocks.append(block)
        else:
            io.append(self.path, block, sync=False)
            self._unsynced = True

    def sync(self) -> None:
        """Make all added rounds durable."""
        if self.path is not None and self._unsynced:
            io.sync_file(self.path)
            self._unsynced = False

    def columns(self, *names: str) -> ClientColumns:
        """Return the record as columns, all of them or those named."""
        blocks = _in_memory(self._blocks) if self.path is None else _read_blocks(self.path)
        return join_rounds(((block.round, block.tables) for block in blocks), names)


def read_columns(path: Path | str, *names: str) -> ClientColumns:
    """Read the columns of a file. A last block truncated by a crash is skipped; other damage is an error."""
    return join_rounds(((block.round, block.tables) for block in _read_blocks(Path(path))), names)


def read_by_client(path: Path | str) -> ClientColumns:
    """Read one row per client; the file is read round by round, so it may be larger than memory."""
    totals = ClientTotals()
    for block in _read_blocks(Path(path)):
        clients = union_of_clients([table["client"] for table in block.tables.values()])
        totals.add(fill_columns(block.round, clients, block.tables))
    return totals.result()


def is_intact(path: Path, round: int, seal: str | None) -> bool:
    """Return whether a file has undamaged blocks up to the round and seal of a checkpoint."""
    try:
        return seal is None or bool(_blocks_up_to(path, round, seal)) or seal == INITIAL_SEAL.hex()
    except DamagedFileError:
        return False


def _blocks_up_to(path: Path, round: int, seal: str) -> list[bytes]:
    """Return the blocks up to a round; the last must have this seal."""
    if seal == INITIAL_SEAL.hex():  # later rounds are not needed, damaged or not
        return []
    blocks = list(_read_raw_blocks(path, round)) if path.is_file() else []
    if not blocks or blocks[-1][-_SEAL:].hex() != seal:
        raise DamagedFileError(f"{path}: not the record of the checkpoint of round {round}. {REMEDY}")
    return blocks


def _encode_block(round: int, tables: Mapping[str, Table], before: bytes) -> bytes:
    body: list[bytes] = []
    head: dict[str, Any] = {"round": round}
    for name, table in tables.items():
        rows = len(next(iter(table.values()))) if table else 0
        if rows:
            head[name] = {"rows": rows, "columns": {key: _encode_column(key, table[key], body) for key in table}}
    encoded_head = _encode_head(head).encode()
    content = b"".join(body)
    block = _FRAME.pack(MAGIC, len(encoded_head), len(content)) + encoded_head + content
    return block + hashlib.sha256(before + block).digest()[:_SEAL]


def _encode_column(name: str, values: Array, body: list[bytes]) -> list[Any]:
    """Append a column to the body and return how it is stored: constant, offset integers, differences, or floats."""
    if name == "client":
        steps = np.diff(values)
        minimum, maximum = (int(steps.min()), int(steps.max())) if len(steps) else (1, 1)
        if minimum == maximum:
            return ["steps", int(values[0]), minimum]
        return ["steps", int(values[0]), _encode_integers(steps, maximum, body)]
    if values.dtype.kind == "f":
        single = values.astype("<f4")
        bits = single.view("<u4")
        if (bits == bits[0]).all():
            return ["equal", int(bits[0])]
        body.append(single.tobytes())
        return ["numbers"]
    integers = values.astype(np.int64)
    minimum, maximum = int(integers.min()), int(integers.max())
    if minimum == maximum:
        return ["whole", minimum, None]
    return ["whole", minimum, _encode_integers(integers - minimum, maximum - minimum, body)]


def _encode_integers(values: Array, maximum: int, body: list[bytes]) -> str:
    width = next(dtype for dtype in _WIDTHS if maximum < 1 << 8 * int(dtype[2:]))
    body.append(values.astype(width).tobytes())
    return str(width)


def _decode_tables(round: int, head: Mapping[str, Any], body: memoryview) -> dict[str, Table]:
    offset = 0
    decoded: dict[str, Table] = {}

    def take(dtype: str, count: int) -> Array:
        nonlocal offset
        if dtype not in (*_WIDTHS, "<f4"):
            raise ValueError(f"no such width {dtype!r}")
        values = np.frombuffer(body, dtype, count, offset)
        offset += values.nbytes
        return values

    for name, table in head.items():
        if name == "round":
            continue
        rows, columns = int(table["rows"]), {}
        if rows < 1:
            raise ValueError("a table without rows")
        for key, encoding in table["columns"].items():
            columns[str(key)] = _decode_column(encoding, rows, take)
        decoded[name] = columns
    if offset != len(body):
        raise ValueError(f"{len(body) - offset} bytes too many")
    return decoded


def _decode_column(encoding: Sequence[Any], rows: int, take: Any) -> Array:
    if encoding[0] == "steps":
        first, step = int(encoding[1]), encoding[2]
        if isinstance(step, int):
            return first + step * np.arange(rows, dtype=np.int64)
        steps = take(step, rows - 1).astype(np.int64)
        return np.concatenate([[first], first + np.cumsum(steps)])
    if encoding[0] == "equal":
        return np.full(rows, encoding[1], np.uint32).view(np.float32)
    if encoding[0] == "numbers":
        numbers: Array = take("<f4", rows)
        return numbers
    if encoding[0] == "whole":
        minimum = int(encoding[1])
        return (
            np.full(rows, minimum, np.int64)
            if encoding[2] is None
            else take(encoding[2], rows).astype(np.int64) + minimum
        )
    raise ValueError(f"no such column {encoding[0]!r}")


def _read_blocks(path: Path) -> Iterator[RoundBlock]:
    if not path.is_file():
        return
    for block in _read_raw_blocks(path, None):
        yield _parse_block(str(path), block)


def _in_memory(blocks: Sequence[bytes]) -> Iterator[RoundBlock]:
    for block in blocks:
        yield _parse_block("the record of clients", block)


def _parse_block(where: str, block: bytes) -> RoundBlock:
    _, head_size, size = _FRAME.unpack_from(block)
    start = _FRAME.size + head_size
    try:
        head = json.loads(block[_FRAME.size : start])
        tables = _decode_tables(int(head["round"]), head, memoryview(block)[start : start + size])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise DamagedFileError(f"{where}: not a valid round of the client record ({str(error)[:200]}).") from error
    return RoundBlock(int(head["round"]), tables, block[-_SEAL:])


def _round_of(block: bytes) -> int:
    _, head_size, _ = _FRAME.unpack_from(block)
    return int(json.loads(block[_FRAME.size : _FRAME.size + head_size])["round"])


def _read_raw_blocks(path: Path, last: int | None) -> Iterator[bytes]:
    """Yield the blocks of a file up to a round, checked: consecutive rounds, and every seal."""
    before, expected = INITIAL_SEAL, None
    size = path.stat().st_size
    with path.open("rb") as file:
        offset = 0
        while offset < size and (last is None or expected is None or expected <= last):
            frame = file.read(_FRAME.size)
            if len(frame) < _FRAME.size:
                return
            magic, head_size, length = _FRAME.unpack(frame)
            if magic != MAGIC or head_size > _HEAD:
                raise DamagedFileError(f"{path}: no block of the client record begins at byte {offset}. {REMEDY}")
            block_size = _FRAME.size + head_size + length + _SEAL
            if offset + block_size > size:
                return
            block = frame + file.read(block_size - _FRAME.size)
            if hashlib.sha256(before + block[:-_SEAL]).digest()[:_SEAL] != block[-_SEAL:]:
                raise DamagedFileError(f"{path}: the block at byte {offset} or one before it was changed. {REMEDY}")
            try:
                round = _round_of(block)
            except (ValueError, KeyError, TypeError) as error:
                raise DamagedFileError(f"{path}: the block at byte {offset} has no round. {REMEDY}") from error
            if expected is not None and round != expected:
                raise DamagedFileError(f"{path}: round {round} instead of round {expected}. {REMEDY}")
            if last is not None and round > last:
                return
            yield block
            before, expected, offset = block[-_SEAL:], round + 1, offset + block_size
