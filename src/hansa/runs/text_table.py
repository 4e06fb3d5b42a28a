"""The last rounds of a history as a small table of text, which needs nothing but Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hansa.core.errors import HansaError, check_integer, short_repr, suggestion

COLUMNS = ("round", "train_loss", "test_loss", "test_accuracy", "up_bytes")


def text_table(history: Sequence[Mapping[str, Any]], columns: Sequence[str] = (), last: int = 5) -> str:
    """The named columns of the last rounds, right-aligned; without names those that a first look wants.

    >>> print(text_table([{"round": 1, "loss": 0.25}, {"round": 2, "loss": None}], ["round", "loss"]))
    round  loss
        1  0.25
        2     -
    """
    check_integer("table", "last", last)
    known = {name: None for record in history for name in record}
    for name in columns:
        if name not in known:
            raise HansaError(f"table({short_repr(name)}): no such column. {suggestion(str(name), known)}")
    chosen = list(columns) or [name for name in COLUMNS if name in known]
    cells = [chosen, *([_cell(record.get(name)) for name in chosen] for record in history[-last:])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
