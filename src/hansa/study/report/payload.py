"""What the script of a page is given: curves in few bytes, thinned where there are too many points to see."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hansa.runs.metrics_log import Columns
from hansa.study.report.entries import DRAWN, POINTS, Entry, Standing

NUMBERS = 200_000
"""Numbers on a page, about 1.5 MB of them: longer histories are thinned, and the page says so."""


def payload(entries: Sequence[Entry], standings: Sequence[Standing], target: float | None) -> dict[str, Any]:
    """Target and curves, in the order of the entries."""
    colours = {id(standing.entry): standing.colour for standing in standings}
    most = thinning(entries)
    longest = max((min(map(len, entry.histories)) for entry in entries), default=0)
    return {
        "target": target,
        "stride": max(1, math.ceil(longest / most)),
        "runs": [_drawn(entry, colours[id(entry)], most) for entry in entries],
    }


def thinning(entries: Sequence[Entry]) -> int:
    """The most points that each curve may have, so that the page stays small."""
    curves = sum(len(entry.runs) for entry in entries) or 1
    columns = max((_measured(history) for entry in entries for history in entry.histories), default=1)
    return max(60, min(POINTS, NUMBERS // (curves * columns)))


def _measured(history: Sequence[Mapping[str, Any]]) -> int:
    """About how many columns of a history are drawn: those that rise evenly take no room."""
    names = history.names if isinstance(history, Columns) else history[-1] if history else ()
    return 2 + len(set(DRAWN) & set(names))


def _drawn(entry: Entry, colour: str, most: int) -> dict[str, Any]:
    """A method: its curves, or those of every seed."""
    tables = [{name: packed(values) for name, values in table.items()} for table in entry.curves(most)]
    found: dict[str, Any] = {"name": entry.name, "colour": colour}
    if entry.members:
        named = zip(entry.members, tables, strict=True)
        return {**found, "seeds": [{"seed": member.seed, "series": table} for member, table in named]}
    return {**found, "series": tables[0]}


def packed(values: Sequence[float | None]) -> Any:
    """A column as it is, or as its first value, step and length where it rises evenly, as counts of bits do.

    >>> packed([8, 16, 24]), packed([0.5, 0.7, 0.6]), packed([1, None, 3])
    ({'first': 8, 'step': 8, 'count': 3}, [0.5, 0.7, 0.6], [1, None, 3])
    """
    if len(values) > 2 and all(isinstance(value, int) for value in values):
        first, step = values[0], values[1] - values[0]  # type: ignore[operator]
        if all(value == first + place * step for place, value in enumerate(values)):  # type: ignore[operator]
            return {"first": first, "step": step, "count": len(values)}
    return list(values)


def written(content: Any) -> str:
    """JSON that is safe inside a script element."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
