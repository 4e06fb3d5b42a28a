"""The record of a run: every round, every client, and checkpoints, in one SQLite file that grows by a transaction a
round."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import torch

from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.core.types import State
from hansa.runs.client_columns import Array, ClientColumns, encode_clients, join_rounds, total_by_client
from hansa.runs.store import io
from hansa.runs.store.database import ASIDE, DATABASE, DTYPES, LOGS, Database, Head, RowEntry, dtype_name
from hansa.runs.store.io import DamagedFileError
from hansa.runs.store.rows import DiskStore

log = logging.getLogger("hansa")

Meta: TypeAlias = dict[str, Any]
"""Plain data beside the state: round, seed, digest of the configuration, and platform."""


class Checkpoint(NamedTuple):
    """The state of a run after a round, and its metadata."""

    state: State
    meta: Meta


class RecordedRound(NamedTuple):
    """A closed round as it is stored."""

    round: int
    record: dict[str, Any]
    digest: str


class RunRecord(Database):
    """The record of a run in its folder, open for writing by the process that holds the folder's lock, or for reading.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder, RunRecord.create(folder) as record:
    ...     record.add_round({"round": 1, "loss": 0.5}, encode_clients({"client": np.array([3])}))
    ...     record.save_checkpoint({"x": torch.ones(2)}, {"round": 1})
    ...     record.commit()
    ...     [each.record for each in record.rounds()], record.checkpoint_rounds(), record.load_checkpoint().state
    ([{'round': 1, 'loss': 0.5}], [1], {'x': tensor([1., 1.])})
    """

    _store: ref[DiskStore] | None = None
    """The client rows while they are open; they refer to the record."""

    @classmethod
    def create(cls, folder: Path | str) -> RunRecord:
        """Create an empty record, open for writing."""
        cls.make(folder)
        return cls(folder, writing=True)

    @staticmethod
    def exists(folder: Path | str) -> bool:
        """Return whether a folder has a record."""
        return (Path(folder) / DATABASE).is_file()

    def open_rows(self, at_round: int | None = None) -> DiskStore:
        """Return the client rows, as the record has them or as they were at the round of a checkpoint."""
        store = None if self._store is None else self._store()
        if store is None:
            store = DiskStore.of(self, at_round)
            self._store, self.kept = ref(store), max(self.checkpoint_rounds(), default=-1)
        return store

    def add_round(self, record: Mapping[str, Any], clients: bytes) -> None:
        """Add a closed round; `commit` makes it durable, together with the rows of its clients."""
        head, round = self.head, self.head.rounds + 1
        if record.get("round") != round:
            raise HansaError(f"add_round(round={record.get('round')}): the record is at round {head.rounds}.")
        text, sha = json.dumps(record, default=lambda number: number.item()), hashlib.sha256(clients).digest()
        chain = self._chain(head.chain, round, text, sha)
        with self.writing_rows():
            self.execute("INSERT INTO rounds VALUES (?, ?, ?, ?, ?)", [round, text, chain, sha, clients])
            self.set_head(rounds=round, chain=chain)

    def rounds(self, last: int | None = None) -> Iterator[RecordedRound]:
        """Yield the closed rounds, checked: 1, 2, 3, ... and every digest."""
        with self.checked():
            for round, text, chain, _ in self._checked_rounds("NULL", last):
                yield RecordedRound(round, dict(json.loads(text)), chain)

    def client_blocks(self) -> Iterator[tuple[int, bytes]]:
        """Yield the client block of every round, checked."""
        with self.checked():
            for round, _, _, block in self._checked_rounds("clients"):
                yield round, block

    def client_columns(self, *names: str) -> ClientColumns:
        """Return the client columns, all of them or those named."""
        with self.checked():
            return join_rounds(self.client_blocks(), names)

    def by_client(self) -> ClientColumns:
        """Return one row per client; the record is read round by round, so it may be larger than memory."""
        blocks = self.client_blocks()
        with self.checked():
            return total_by_client(join_rounds([first, *islice(blocks, 99)]) for first in blocks)

    def _checked_rounds(self, content: str, last: int | None = None) -> Iterator[tuple[int, str, str, bytes]]:
        """Yield round, record, digest and client block, if ``content`` is its column."""
        before, round = "", 0
        with self.reading():
            end = self.head.rounds if last is None else last
            statement = f"SELECT round, record, digest, sha, {content} FROM rounds WHERE round <= ? ORDER BY round"
            for number, text, chain, sha, block in self.execute(statement, [end]):
                round += 1
                whole = block is None or hashlib.sha256(block).digest() == sha
                if number != round or not whole or chain != self._chain(before, round, text, sha):
                    raise ValueError(f"round {round}, or one before it, was changed or is missing")
                yield number, text, chain, block
                before = chain
            if round != end or (last is None and before != self.head.chain):
                raise ValueError(f"it has {round} of {end} rounds")

    def _chain(self, before: str, round: int, text: str, clients: bytes) -> str:
        state = hashlib.sha256(f"{self.identity} {round} {before} ".encode() + clients)
        state.update(text.encode())
        return state.hexdigest()

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def checkpoint_rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, oldest first."""
        with self.checked():
            return sorted(int(round) for (round,) in self.execute("SELECT round FROM checkpoints").fetchall())

    def save_checkpoint(self, state: State, meta: Mapping[str, Any], *, keep: int = 3) -> None:
        """Write the state after ``meta["round"]`` and remove all but the newest ``keep``; durable after `commit`."""
        check_integer("save_checkpoint", "keep", keep)
        tensors: dict[str, torch.Tensor] = {}
        tree = json.dumps(
            {name: _to_json(each, name, tensors) for name, each in (("state", state), ("meta", dict(meta)))}
        )
        round, head = int(meta["round"]), self.head.sealed(self.identity)
        with self.writing_rows():
            self._delete_checkpoints("= ?", round)
            put = [self.put("checkpoint", round, name, round, row) for name, row in tensors.items()]
            digest = self._digest(round, head, tree, put)
            self.execute("INSERT INTO checkpoints VALUES (?, ?, ?, ?)", [round, head, tree, digest])
            self._delete_checkpoints("< ?", self.checkpoint_rounds()[-keep:][0])
            self.delete(
                "died IS NOT NULL AND NOT EXISTS (SELECT 1 FROM checkpoints AS kept "
                "WHERE vectors.born <= kept.round AND kept.round < vectors.died)"
            )
            self.kept = round

    def _delete_checkpoints(self, which: str, round: int) -> None:
        self.delete(f"kind = 'checkpoint' AND client {which}", [round])
        self.execute(f"DELETE FROM checkpoints WHERE round {which}", [round])

    def load_checkpoint(self, round: int | None = None) -> Checkpoint:
        """Return the newest checkpoint, or that of a round, every byte checked."""
        _, tree, entries = self._read_checkpoint(self.newest_checkpoint() if round is None else round)
        with self.checked():
            tensors = {entry.name: self.get(entry) for entry in entries}
            content = json.loads(tree, object_hook=lambda node: tensors[node["$tensor"]] if "$tensor" in node else node)
            return Checkpoint(content["state"], content["meta"])

    def head_of_checkpoint(self, round: int) -> Head:
        """Return what the head was when a checkpoint was written."""
        return self._read_checkpoint(round)[0]

    def newest_checkpoint(self) -> int:
        """Return the round of the newest checkpoint."""
        if not (rounds := self.checkpoint_rounds()):
            raise HansaError(f"{self.path.parent}: no checkpoint. Use the folder of a run that has saved one.")
        return rounds[-1]

    def _read_checkpoint(self, round: int) -> tuple[Head, str, list[RowEntry]]:
        with self.checked():
            statement = "SELECT head, state, digest FROM checkpoints WHERE round = ?"
            head, tree, digest = self.execute(statement, [round]).fetchone()
            entries = self.entries("kind = 'checkpoint' AND client = ?", [round])
            if digest != self._digest(round, head, tree, entries):
                raise ValueError(f"the checkpoint of round {round} was changed")
            return self.parse_head(head), tree, entries

    def _digest(self, round: int, head: str, tree: str, entries: Sequence[RowEntry]) -> bytes:
        state = hashlib.sha256(f"{round} {head} {tree}".encode())
        for entry in entries:
            state.update(entry.seal)
        return state.digest()

    def check_checkpoint(self, round: int) -> None:
        """Refuse a checkpoint if anything that a run needs to go on from it is damaged: state, rows, rounds."""
        self.load_checkpoint(round)
        head = self.head_of_checkpoint(round)
        self._check_chain(head)
        rows = DiskStore.of(self, head.generation)
        rows.check_sum(head.sum)
        rows.verify()

    def _check_chain(self, head: Head) -> list[dict[str, Any]]:
        rounds = list(self.rounds(head.rounds))
        if (rounds[-1].digest if rounds else "") != head.chain:
            raise DamagedFileError(f"{self.path} is damaged: not the rounds of the checkpoint of round {head.rounds}.")
        return [each.record for each in rounds]

    def intact_checkpoint(self) -> int:
        """Return the newest round whose checkpoint, rows and rounds are undamaged, and warn about the others.

        The database is written anew with that checkpoint only: its pages may be damaged elsewhere.
        """
        for round in reversed(self.checkpoint_rounds()):
            try:
                self.check_checkpoint(round)
            except HansaError as damage:
                log.warning("%s Falling back to the checkpoint before it.", damage)
                continue
            self._salvage(round)
            return round
        raise DamagedFileError(
            f"{self.path.parent}: no checkpoint has undamaged state, rows and rounds. Start a new run."
        )

    def _salvage(self, round: int) -> None:
        """Write the database anew: one checkpoint and all that belongs to it."""
        head = self.head_of_checkpoint(round)
        live = "kind = 'client' AND born <= ? AND (died IS NULL OR died > ?)"
        chosen = {
            "rounds": ("round <= ?", [head.rounds]),
            "checkpoints": ("round = ?", [round]),
            "vectors": (f"({live}) OR (kind = 'checkpoint' AND client = ?)", [*[head.generation] * 2, round]),
        }
        with self.checked():
            content = {
                table: self.execute(f"SELECT * FROM {table} WHERE {where}", values)
                for table, (where, values) in chosen.items()
            }
            self._write(self.path, self.identity, head, content)
        self.close()
        for name in LOGS:  # a log of the old database must not be applied to the new one
            io.remove(self.path.with_name(name), sync=True)
        io.rename(self.path.with_name(ASIDE), self.path)
        Database.__init__(self, self.path.parent, writing=True)

    def rewind(self, round: int) -> list[dict[str, Any]]:
        """Go back to the checkpoint of a round, in one transaction, and return the records of the rounds before it."""
        head = self.head_of_checkpoint(round)
        records = self._check_chain(head)
        rows = self.open_rows(head.generation)
        rows.check_sum(head.sum)
        with self.writing_rows():
            self.execute("DELETE FROM rounds WHERE round > ?", [head.rounds])
            self._delete_checkpoints("> ?", round)
            self.delete("kind = 'client' AND born > ?", [head.generation])
            self.execute("UPDATE vectors SET died = NULL WHERE died > ?", [head.generation])
            self.set_head(**head._asdict())
        self.kept = round
        self.commit()
        return records


class ClientRecord:
    """The client columns of a run: in memory, or in its record."""

    def __init__(self, record: RunRecord | None = None) -> None:
        self._record = record
        self._blocks: list[tuple[int, bytes]] = []
        self.newest = b""
        """The block of the newest round."""

    def add(self, round: int, *tables: Mapping[str, Array]) -> None:
        """Add a closed round."""
        self.newest = encode_clients(*tables)
        if self._record is None:
            self._blocks.append((round, self.newest))

    def columns(self, *names: str) -> ClientColumns:
        """Return the columns, all of them or those named."""
        if self._record is not None:
            return self._record.client_columns(*names)
        return join_rounds(self._blocks, names)


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


def _to_json(node: object, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a tree with ``{"$tensor": name}`` for each tensor, which is added to ``tensors`` by that name."""
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    if isinstance(node, list):
        return [_to_json(value, f"{path}[{i}]", tensors) for i, value in enumerate(node)]
    if isinstance(node, dict):
        if wrong := [key for key in node if not isinstance(key, str) or key.startswith("$")]:
            raise invalid_argument("save_checkpoint", path, wrong[0], "string keys without a leading $")
        return {key: _to_json(value, f"{path}.{key}", tensors) for key, value in node.items()}
    if isinstance(node, torch.Tensor) and dtype_name(node.dtype) in DTYPES:
        name = f"{len(tensors)}:{path}"  # keys may contain dots: the number makes names unique
        tensors[name] = node.detach().cpu().contiguous()
        return {"$tensor": name}
    kind = str(node.dtype) if isinstance(node, torch.Tensor) else type(node).__name__
    raise invalid_argument("save_checkpoint", path, kind, "tensors, numbers, strings, lists and dicts")
