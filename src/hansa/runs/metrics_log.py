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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hansa.core.errors import HansaError
from hansa.runs.store.io import DamagedFileError, sha256

log = logging.getLogger("hansa")

INITIAL_SEAL = "hansa"
"""The seal before the first line."""

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
