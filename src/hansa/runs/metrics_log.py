"""metrics.jsonl: a line of strict JSON a round, sealed one upon the other.

Each line ends with ``"seal": s_t``, the first 16 digits of SHA-256(s_{t-1} + the line without it): a line that was
changed, left out, doubled or moved breaks the chain from there on. A checkpoint remembers the seal of its round, the
summary that of the last, so that an end that is missing or another run's file shows too.
"""

from __future__ import annotations

import json
import logging
import math
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

from hansa.core.errors import HansaError
from hansa.runs.store.io import Damaged, sha256

log = logging.getLogger("hansa")

FIRST = "hansa"
"""What the first line is sealed upon."""

_NUMBERS = frozenset({bool, int, float})
_SEAL = re.compile(rb', "seal": "([0-9a-f]{16})"\}$')


class Line(NamedTuple):
    """A record, and the seal of its line: empty in files of hansa 0.1, which have none."""

    record: dict[str, Any]
    seal: str


def to_line(record: Mapping[str, Any]) -> str:
    """A record as one line of strict JSON: NaN is null, infinities are the words "inf" and "-inf".

    >>> to_line({"round": 1, "loss": float("nan"), "diversity": float("inf")})
    '{"round": 1, "loss": null, "diversity": "inf"}'
    """
    return json.dumps(plain(record), allow_nan=False)


def from_line(line: str) -> dict[str, Any]:
    """The record that `to_line` wrote, its nulls read as NaN.

    >>> from_line('{"round": 1, "loss": null, "diversity": "inf"}')
    {'round': 1, 'loss': nan, 'diversity': inf}
    """
    record = json.loads(line)
    if not isinstance(record, dict) or type(record.get("round")) is not int:
        raise HansaError(f"expected a record with its round, found {line[:60]!r}")
    for name, value in record.items():
        if value is None:
            record[name] = math.nan
        elif value == "inf" or value == "-inf":
            record[name] = float(value)
    return record


def sealed(record: Mapping[str, Any], before: str) -> tuple[str, str]:
    """A record as a sealed line, and its seal.

    >>> sealed({"round": 1}, FIRST)
    ('{"round": 1, "seal": "e17357e59b0f0029"}', 'e17357e59b0f0029')
    """
    line = to_line(record)
    seal = _seal(before, line.encode())
    return f'{line[:-1]}, "seal": "{seal}"}}', seal


def lines(path: Path | str, *, must: bool = False) -> Iterator[Line]:
    """The lines of a metrics file, one at a time, each checked: rounds 1, 2, 3, ..., every seal as it must be.

    A last line that a crash cut short is left out; any other damage is an error that names the line. A file of
    hansa 0.1, without seals, is read with a warning, and refused where seals ``must`` be.
    """
    path = Path(path)
    before, bare = FIRST, not must
    with _opened(path) as file:
        for number, raw in enumerate(file, start=1):
            text = raw.rstrip(b"\n")
            found = _SEAL.search(text)
            if number == 1 and not found and bare and raw.endswith(b"\n"):
                log.warning("%s carries no seals: damage to it would not be noticed", path)
            elif number == 1:
                bare = False
            try:
                if bare and found:
                    raise HansaError("it carries a seal, the lines before it do not")
                body = text if bare else _unsealed(text, found, before)
                record = from_line(body.decode())
                if record["round"] != number:
                    raise HansaError(f"round {record['round']} where round {number} belongs")
            except (ValueError, RecursionError) as error:
                if not raw.endswith(b"\n"):
                    return
                why = "not text" if isinstance(error, UnicodeDecodeError) else str(error)[:200].rstrip(".")
                raise Damaged(f"{path}:{number}: not a record of a round as it was written ({why}).") from error
            before = "" if found is None else found[1].decode()
            yield Line(record, "" if bare else before)


def read_history(path: Path | str, *, must: bool = False) -> list[dict[str, Any]]:
    """All records of a metrics file."""
    return [line.record for line in lines(path, must=must)]


class Columns(Sequence[dict[str, Any]]):
    """The numbers of a history, a column each: as good as the records for curves and tables, in a tenth of the memory.

    >>> both = Columns([{"round": 1, "loss": 0.5, "moved": True}, {"round": 2, "loss": 0.25, "clients": [3]}])
    >>> both[0], both.column("loss"), len(both)
    ({'round': 1, 'loss': 0.5, 'moved': True}, [0.5, 0.25], 2)
    """

    def __init__(self, records: Iterator[Mapping[str, Any]] | Sequence[Mapping[str, Any]] = ()) -> None:
        self.reasons: Counter[str] = Counter()
        self.seal = FIRST
        self._columns: dict[str, array[float]] = {}
        self._kinds: dict[str, type] = {}
        self._length = 0
        self.notes: dict[str, Any] = {}
        """What was worked out of these numbers and may be asked for again; a new round empties it."""
        for record in records:
            self.add(record)

    @classmethod
    def of_file(cls, path: Path | str, *, must: bool = False) -> Columns:
        """The numbers of a metrics file, and the seal of its last line."""
        found = cls()
        for line in lines(path, must=must):
            found.add(line.record)
            found.seal = line.seal
        return found

    def add(self, record: Mapping[str, Any]) -> None:
        """Note a round; what is no number is left out, but for the reasons why clients were lost, which are counted."""
        columns, kinds = self._columns, self._kinds
        self.notes.clear()
        taken = 0
        for name, value in record.items():
            kind = type(value)
            if kind not in _NUMBERS:
                continue
            if name not in columns:
                columns[name], kinds[name] = array("d", [math.nan]) * self._length, kind
            if kind is not kinds[name] and value == value:
                kinds[name] = float
            columns[name].append(value)
            taken += 1
        self._length += 1
        if taken < len(columns):
            for column in columns.values():
                if len(column) < self._length:
                    column.append(math.nan)
        reasons = record.get("reasons")
        if reasons and isinstance(reasons, dict):
            self.reasons.update({str(name): int(count) for name, count in reasons.items()})

    def only(self, names: Collection[str]) -> Columns:
        """The same history with these columns alone: quicker to go through."""
        found = Columns()
        found.reasons, found.seal, found._length = self.reasons, self.seal, self._length
        found._columns = {name: column for name, column in self._columns.items() if name in names}
        found._kinds = self._kinds
        return found

    def column(self, name: str) -> list[Any]:
        """One number of every round, NaN where it was not measured."""
        kind = self._kinds[name]
        values = self._columns[name]
        return list(values) if kind is float else [kind(value) if value == value else value for value in values]

    def floats(self, name: str) -> array[float]:
        """One number of every round as it is kept, in double precision."""
        return self._columns[name]

    @property
    def names(self) -> list[str]:
        """What was ever measured."""
        return list(self._columns)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, place: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(self._length))]
        if not -self._length <= place < self._length:
            raise IndexError(place)
        found: dict[str, Any] = {}
        for name, column in self._columns.items():
            value = column[place]
            if value == value:
                found[name] = self._kinds[name](value)
        return found

    def __iter__(self) -> Iterator[dict[str, Any]]:
        parts = [(name, self._kinds[name], column) for name, column in self._columns.items()]
        for place in range(self._length):
            found = {}
            for name, kind, column in parts:
                value = column[place]
                if value == value:
                    found[name] = value if kind is float else kind(value)
            yield found


def plain(value: Any) -> Any:
    """Any tree of numbers as strict JSON has them."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value.item() if hasattr(value, "item") else value


def _seal(before: str, body: bytes) -> str:
    return sha256(before.encode(), body)[:16]


def _unsealed(text: bytes, found: re.Match[bytes] | None, before: str) -> bytes:
    if found is None:
        raise HansaError("it carries no seal")
    body = text[: found.start()] + b"}"
    if _seal(before, body) != found[1].decode():
        raise HansaError("its seal does not match: it was changed, or the lines before it were")
    return body


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise HansaError(f"{path}: no such file. A run writes it after its first round.") from None
