"""Infer a schema from the tables of a simulation, which has them all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from hansa.core.errors import invalid_argument, short_repr, suggestion
from hansa.data.files import DataError
from hansa.data.schema.agreement import MAX_CLASSES
from hansa.data.schema.columns import Missing, Scale, SplitColumn, TableColumn, category_text
from hansa.data.schema.table_schema import MISSING_TEXTS, Schema
from hansa.data.schema.tables import Table

MAX_CATEGORIES = 100
"""A text column with more distinct values is taken for names or free text and refused."""

SplitLike: TypeAlias = "str | SplitColumn | Mapping[str, Any]"


@dataclass(frozen=True, slots=True)
class InferenceOptions:
    """How columns of tables are taken: those to drop, the kind of target, the scale, and missing values."""

    target: str
    drop: Sequence[str] = ()
    ids: Sequence[str] = ()
    split: SplitLike | None = None
    kind: Literal["class", "number"] | None = None
    scale: Scale = "none"
    missing: Missing = "refuse"
    missing_values: Sequence[str] | None = None

    @property
    def missing_texts(self) -> tuple[str, ...]:
        """Texts of missing values: by default only empty cells if they are refused."""
        if self.missing_values is not None:
            return ("", *self.missing_values)
        return ("",) if self.missing == "refuse" else MISSING_TEXTS


def infer_draft(tables: Sequence[Table], options: InferenceOptions, name: str = "table") -> Schema:
    """Return a schema with the kinds of all columns, in the order of the first table; the rest is open.

    A column of numbers is a number, a column of texts a category, and integers from 0 in the target are classes.
    """
    if options.kind not in (None, "class", "number"):
        raise invalid_argument("from_csv_folder", "kind", options.kind, "'class', 'number' or None")
    split = as_split(options.split)
    columns = []
    for column in _shared_columns(tables, options, split):
        if column in options.ids:
            columns.append(TableColumn(column, "id"))
        elif column == options.target:
            columns.append(_infer_target(tables, column, options))
        else:
            columns.append(_infer_column(tables, column, options))
    if not any(column.kind not in ("id", "target") for column in columns):
        raise DataError(f"{tables[0].source}: no column of inputs beside {options.target!r}.")
    return Schema(tuple(columns), split, options.missing_texts, name)


def as_split(split: SplitLike | None) -> SplitColumn | None:
    """Return the split column; of a column that is only named, ``train`` and ``test`` are the values.

    >>> as_split("fold")
    SplitColumn(column='fold', test=('test',), train=('train',))
    """
    if split is None or isinstance(split, SplitColumn):
        return split
    if isinstance(split, str):
        return SplitColumn(split, ("test",), ("train",))
    try:
        return SplitColumn(**split)
    except TypeError:
        raise invalid_argument(
            "from_csv_folder", "split", split, "the name of a column, or {'column': NAME, 'test': [VALUES]}"
        ) from None


def _shared_columns(tables: Sequence[Table], options: InferenceOptions, split: SplitColumn | None) -> list[str]:
    """Return the columns in the first table's order, without those to drop."""
    first = list(tables[0].columns)
    for column in (options.target, *options.drop, *options.ids, *(() if split is None else (split.column,))):
        if column not in first:
            raise DataError(f"{tables[0].source}: no column {column!r}. {suggestion(column, first)}")
    for table in tables[1:]:
        if different := sorted(set(first) ^ set(table.columns)):
            raise DataError(
                f"{table.source}: other columns than {tables[0].name}.csv: {', '.join(map(short_repr, different[:5]))}."
            )
    left_out = {*options.drop, *(() if split is None else (split.column,))}
    return [column for column in first if column not in left_out]


def _present(tables: Sequence[Table], column: str, options: InferenceOptions) -> list[tuple[Table, int, str]]:
    """Return the cells of a column that are not missing, with their places."""
    texts = set(options.missing_texts)
    cells = [(table, row, cell) for table in tables for row, cell in enumerate(table.columns[column])]
    present = [each for each in cells if each[2] not in texts]
    if len(present) < len(cells) and (options.missing == "refuse" or column == options.target):
        table, row, cell = next(each for each in cells if each[2] in texts)
        remedy = "" if column == options.target else " Or pass missing='indicator' or 'mean'."
        state = "is empty" if not cell else f"is {cell!r}, a missing value"
        raise DataError(
            f"{table.place(row)}: {column!r} {state}. Fill it in, or drop the row or the column.{remedy}"
        )  # fmt: skip
    if not present:
        raise DataError(f"{tables[0].source}: {column!r} has no value in any file: drop=[{column!r}] leaves it out.")
    return present


def _infer_column(tables: Sequence[Table], name: str, options: InferenceOptions) -> TableColumn:
    present = _present(tables, name, options)
    missing: Missing = options.missing if len(present) < sum(table.rows for table in tables) else "refuse"
    numbers = [_parse_number(cell) for _, _, cell in present]
    texts = [place for place, number in enumerate(numbers) if number is None]
    if not texts:
        for place, number in enumerate(numbers):
            if number is None or not math.isfinite(number):
                raise _error(name, present[place], "not finite")
        scale: Scale = options.scale if len(set(numbers)) > 2 else "none"
        return TableColumn(name, "number", missing=missing, fill=0.0 if missing == "constant" else None, scale=scale)
    if 2 * len(texts) < len(present):
        raise _error(name, present[texts[0]], "not a number, in a numeric column")
    distinct = {category_text(cell) for _, _, cell in present}
    if len(distinct) > MAX_CATEGORIES:
        raise DataError(
            f"{tables[0].source}: {name!r} has {len(distinct)} different texts, more than {MAX_CATEGORIES}: "
            f"drop=[{name!r}] leaves it out."
        )
    return TableColumn(name, "category", missing="refuse" if missing == "refuse" else "indicator")


def _infer_target(tables: Sequence[Table], name: str, options: InferenceOptions) -> TableColumn:
    present = _present(tables, name, options)
    numbers = [_parse_number(cell) for _, _, cell in present]
    texts = [place for place, number in enumerate(numbers) if number is None or not math.isfinite(number)]
    if options.kind == "number" or (options.kind is None and not texts):
        if texts:
            raise _error(name, present[texts[0]], "not a number")
        whole = all(number is not None and number % 1 == 0 and 0 <= number < MAX_CLASSES for number in numbers)
        if options.kind == "number" or not whole:
            return TableColumn(name, "target", target="number")
    return TableColumn(name, "target", target="class")


def _parse_number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _error(name: str, cell: tuple[Table, int, str], problem: str) -> DataError:
    table, row, value = cell
    return DataError(f"{table.place(row)}: {name!r} is {short_repr(value)}: {problem}.")
