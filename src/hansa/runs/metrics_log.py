"""metrics.jsonl: one line of strict JSON per round, chained by seals.

Each line ends with ``"seal": s_t``, the first 16 digits of SHA-256(s_{t-1} + the line without it): a line that was
changed, removed, duplicated or moved breaks the chain. A checkpoint has the seal of its round and the summary that of
the last, so that a truncated file or that of another run is detected too.
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
from hansa.runs.store.io import DamagedFileError, sha256

log = logging.getLogger("hansa")

INITIAL_SEAL = "hansa"
"""The seal before the first line."""

_NUMBERS = frozenset({bool, int, float})
_SEAL = re.compile(rb', "seal": "([0-9a-f]{16})"\}$')


class LogLine(NamedTuple):
    """A record and the seal of its line, empty in files without seals."""

    record: dict[str, Any]
    seal: str


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
        raise HansaError(f"expected a record with its round, found {line[:60]!r}")
    for name, value in record.items():
        if value is None:
            record[name] = math.nan
        elif value == "inf" or value == "-inf":
            record[name] = float(value)
    return record


def seal_record(record: Mapping[str, Any], before: str) -> tuple[str, str]:
    """Return a record as a sealed line, and its seal.

    >>> seal_record({"round": 1}, INITIAL_SEAL)
    ('{"round": 1, "seal": "e17357e59b0f0029"}', 'e17357e59b0f0029')
    """
    line = to_line(record)
    seal = _line_seal(before, line.encode())
    return f'{line[:-1]}, "seal": "{seal}"}}', seal


def read_lines(path: Path | str, *, require_seals: bool = False) -> Iterator[LogLine]:
    """Yield the lines of a metrics file, checked: rounds 1, 2, 3, ..., and every seal.

    A last line truncated by a crash is skipped; any other damage is an error that names the line. A file without
    seals is read with a warning, or refused with ``require_seals``.
    """
    path = Path(path)
    last_seal, unsealed = INITIAL_SEAL, not require_seals
    with _open(path) as file:
        for number, raw in enumerate(file, start=1):
            text = raw.rstrip(b"\n")
            seal = _SEAL.search(text)
            if number == 1 and not seal and unsealed and raw.endswith(b"\n"):
                log.warning("%s has no seals: damage to it would not be noticed", path)
            elif number == 1:
                unsealed = False
            try:
                if unsealed and seal:
                    raise HansaError("it has a seal, the lines before it do not")
                body = text if unsealed else _check_seal(text, seal, last_seal)
                record = from_line(body.decode())
                if record["round"] != number:
                    raise HansaError(f"round {record['round']} instead of round {number}")
            except (ValueError, RecursionError) as error:
                if not raw.endswith(b"\n"):
                    return
                reason = "not text" if isinstance(error, UnicodeDecodeError) else str(error)[:200].rstrip(".")
                raise DamagedFileError(f"{path}:{number}: not a valid record of a round ({reason}).") from error
            last_seal = "" if seal is None else seal[1].decode()
            yield LogLine(record, "" if unsealed else last_seal)


def read_history(path: Path | str, *, require_seals: bool = False) -> list[dict[str, Any]]:
    """Return all records of a metrics file."""
    return [line.record for line in read_lines(path, require_seals=require_seals)]


class HistoryColumns(Sequence[dict[str, Any]]):
    """The numbers of a history as columns: enough for curves and tables, in a tenth of the memory.

    >>> both = HistoryColumns([{"round": 1, "loss": 0.5, "moved": True}, {"round": 2, "loss": 0.25, "clients": [3]}])
    >>> both[0], both.column("loss"), len(both)
    ({'round': 1, 'loss': 0.5, 'moved': True}, [0.5, 0.25], 2)
    """

    def __init__(self, records: Iterator[Mapping[str, Any]] | Sequence[Mapping[str, Any]] = ()) -> None:
        self.reasons: Counter[str] = Counter()
        self.seal = INITIAL_SEAL
        self.sites: dict[str, Counter[str]] = {}
        """The sums of what was counted at each site of a federation: bytes and seconds."""
        self.combined_by: dict[str, str] = {}
        """How each metric was last combined over sites."""
        self._columns: dict[str, array[float]] = {}
        self._kinds: dict[str, type] = {}
        self._length = 0
        self.facts: Any = None
        """What the run states about its metrics, a `hansa.runs.metric_facts.MetricFacts`."""
        self.cache: dict[str, Any] = {}
        """Cache of results computed from these numbers; a new round clears it."""
        for record in records:
            self.add(record)

    @classmethod
    def from_file(cls, path: Path | str, *, require_seals: bool = False) -> HistoryColumns:
        """Read the numbers of a metrics file, and the seal of its last line."""
        columns = cls()
        for line in read_lines(path, require_seals=require_seals):
            columns.add(line.record)
            columns.seal = line.seal
        return columns

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a round; values that are not numbers are left out, except for drop reasons, which are counted."""
        columns, kinds = self._columns, self._kinds
        self.cache.clear()
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
        if isinstance(sites := record.get("sites"), dict):
            for site, counts in sites.items():
                self.sites.setdefault(str(site), Counter()).update(counts)
        if isinstance(combined := record.get("combined_by"), dict):
            self.combined_by = {str(name): str(how) for name, how in combined.items()}

    def select(self, names: Collection[str]) -> HistoryColumns:
        """Return the same history with these columns only: faster to iterate."""
        selected = HistoryColumns()
        selected.reasons, selected.seal, selected._length = self.reasons, self.seal, self._length
        selected.facts, selected.sites, selected.combined_by = self.facts, self.sites, self.combined_by
        selected._columns = {name: column for name, column in self._columns.items() if name in names}
        selected._kinds = self._kinds
        return selected

    def column(self, name: str) -> list[Any]:
        """Return one column, NaN where it was not measured."""
        kind = self._kinds[name]
        values = self._columns[name]
        return list(values) if kind is float else [kind(value) if value == value else value for value in values]

    def floats(self, name: str) -> array[float]:
        """Return one column as it is stored, in double precision."""
        return self._columns[name]

    @property
    def names(self) -> list[str]:
        """The names of all columns."""
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
        record: dict[str, Any] = {}
        for name, column in self._columns.items():
            value = column[place]
            if value == value:
                record[name] = self._kinds[name](value)
        return record

    def __iter__(self) -> Iterator[dict[str, Any]]:
        parts = [(name, self._kinds[name], column) for name, column in self._columns.items()]
        for place in range(self._length):
            record = {}
            for name, kind, column in parts:
                value = column[place]
                if value == value:
                    record[name] = value if kind is float else kind(value)
            yield record


def to_plain_json(value: Any) -> Any:
    """Convert a tree of numbers to values that strict JSON can represent."""
    if isinstance(value, Mapping):
        return {str(name): to_plain_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value.item() if hasattr(value, "item") else value


def _line_seal(before: str, body: bytes) -> str:
    return sha256(before.encode(), body)[:16]


def _check_seal(text: bytes, match: re.Match[bytes] | None, before: str) -> bytes:
    if match is None:
        raise HansaError("it has no seal")
    body = text[: match.start()] + b"}"
    if _line_seal(before, body) != match[1].decode():
        raise HansaError("its seal does not match: it or a line before it was changed")
    return body


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise HansaError(f"{path}: no such file. A run writes it after its first round.") from None
