"""Encode tables by a schema: the one path from the cells of a file to inputs and targets, for every party."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from hansa.core.errors import short_repr, suggestion
from hansa.core.keys import Key
from hansa.data.files import DataError
from hansa.data.schema.columns import TableColumn, category_text
from hansa.data.schema.moments import Moments
from hansa.data.schema.table_schema import Schema
from hansa.data.schema.tables import Table, as_table

if TYPE_CHECKING:
    import numpy.typing as npt

Statistics: TypeAlias = Mapping[str, tuple[float, float]]
"""Mean and deviation of each column that is scaled by site."""
Floats: TypeAlias = "npt.NDArray[np.float64]"
Mask: TypeAlias = "npt.NDArray[np.bool_]"

MISFIT_CODES = (
    "column-missing", "value-missing", "not-a-number", "not-finite", "not-a-date", "unknown-category", "split-value",
    "no-training-rows", "scale-unknown", "not-agreed", "too-few-rows",
)  # fmt: skip
"""Why a table does not fit a schema. A site reveals nothing else of its table than one of these and a schema column."""


class SchemaMisfitError(DataError):
    """A table does not fit its schema.

    The message names file, line and value and stays with the owner of the table. ``code``, one of a fixed list, and
    ``column``, a name of the schema, are all that a site reveals.

    >>> SchemaMisfitError("north.csv, line 3: 'age' is 'old': not a number.", "not-a-number", "age").code
    'not-a-number'
    """

    def __init__(self, message: str, code: str = "value-missing", column: str = "") -> None:
        super().__init__(message)
        self.code, self.column = code, column

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.code, self.column)


@dataclass(frozen=True, slots=True, eq=False)
class EncodedTable:
    """Inputs [rows, inputs] in float32, targets, which rows are for testing, and the statistics of the site."""

    inputs: npt.NDArray[np.float32]
    targets: npt.NDArray[Any] | None
    is_test: Mask
    statistics: Statistics


@dataclass(frozen=True, slots=True, eq=False)
class TableEncoding:
    """How tables became inputs: a schema, and the statistics of each client where columns are scaled by site.

    Args:
        schema: The schema.
        statistics: By client name, the mean and deviation of each column that is scaled by site.

    >>> encoding = TableEncoding(Schema((TableColumn("age", "number", scale="pooled", mean=50.0, std=10.0),)))
    >>> encoding.inputs({"age": [40, 65]}).tolist()
    [[-1.0], [1.5]]
    """

    schema: Schema
    statistics: Mapping[str, Statistics] = field(default_factory=dict)

    def inputs(self, frame: Any, client: str | None = None) -> torch.Tensor:
        """Return the inputs of a model for the rows of a frame or CSV file; targets are not needed.

        Args:
            frame: A data frame, a dict of columns, a list of dicts, or the path of a CSV file.
            client: The client whose statistics scale the columns with ``scale: site``.
        """
        return torch.from_numpy(encode(self.schema, as_table(frame), self._statistics(client)).inputs)

    def targets(self, frame: Any) -> torch.Tensor | None:
        """Return the targets of a frame, or None if it has no column of targets."""
        targets = _targets(self.schema, as_table(frame), required=False)
        return None if targets is None else torch.from_numpy(targets)

    def _statistics(self, client: str | None) -> Statistics:
        by_site = [column.name for column in self.schema if column.scale == "site"]
        if not by_site or (client is not None and client in self.statistics):
            return {} if client is None else self.statistics.get(client, {})
        known = sorted(self.statistics)
        names = f" Known: {', '.join(known)}." if known else " They stay at the sites: predict there."
        raise SchemaMisfitError(
            f"{by_site[0]!r} is scaled by site: expected the client whose statistics are used, got {client!r}.{names}",
            "scale-unknown",
            by_site[0],
        )


def encode(schema: Schema, table: Table, statistics: Statistics | None = None) -> EncodedTable:
    """Encode new rows with known statistics: every row is used, and targets only if they are there.

    Args:
        schema: The schema, in which nothing is open.
        table: The table.
        statistics: Mean and deviation of the columns with ``scale: site``.
    """
    everything = np.zeros(table.rows, bool)
    targets = _targets(schema, table, required=False)
    return EncodedTable(_inputs(schema, table, statistics or {}), targets, everything, statistics or {})


def encode_for_training(schema: Schema, table: Table, *, test: float = 0.0, seed: int = 0) -> EncodedTable:
    """Encode a client's table: statistics of columns with ``scale: site`` come from its training rows.

    Args:
        schema: The schema, in which nothing is open.
        table: The table of one client.
        test: Fraction of rows for testing, if the schema has no split column.
        seed: Seed of the choice of test rows.
    """
    targets = _targets(schema, table, required=True)
    is_test = choose_test_rows(schema, table, test, seed)
    statistics = {
        column.name: column_moments(schema, column, table, ~is_test).mean_and_std()
        for column in schema
        if column.scale == "site"
    }
    return EncodedTable(_inputs(schema, table, statistics), targets, is_test, statistics)


def choose_test_rows(schema: Schema, table: Table, fraction: float, seed: int) -> Mask:
    """Return a mask of test rows: by the split column, or a fraction of the rows, rounded down, by the seed."""
    if schema.split is None:
        mask = np.zeros(table.rows, bool)
        draw = Key(seed).child("csv test", table.name).numpy()
        mask[draw.permutation(table.rows)[: math.floor(Fraction(repr(float(fraction))) * table.rows)]] = True
    else:
        cells = [category_text(cell) for cell in _cells(schema, schema.split.column, table)]
        train, test = schema.split.train, schema.split.test
        for row, cell in enumerate(cells):
            if cell not in test and (cell in schema.missing_values if train is None else cell not in train):
                expected = (
                    f"one of {', '.join([*(train or ()), *test])}" if train else f"a value; {test} is for testing"
                )
                raise _value_error(schema.split.column, table, row, f"expected {expected}", "split-value")
        mask = np.array([cell in test for cell in cells])
    if mask.all():
        split = "" if schema.split is None else schema.split.column
        raise SchemaMisfitError(f"{table.source}: no training rows, only test rows.", "no-training-rows", split)
    return mask


def column_moments(schema: Schema, column: TableColumn, table: Table, rows: Mask) -> Moments:
    """Return the exact moments of a numeric column over some rows, without missing values."""
    values, missing = parse_numbers(schema, column, table)
    chosen = values[rows & ~missing]
    if not len(chosen):
        raise SchemaMisfitError(
            f"{table.source}: {column.name!r} has no value in a training row: its mean is unknown.",
            "too-few-rows",
            column.name,
        )
    return Moments.of(chosen)


def parse_numbers(schema: Schema, column: TableColumn, table: Table) -> tuple[Floats, Mask]:
    """Return a numeric column as float64 and which values are missing (0 there)."""
    cells = _cells(schema, column.name, table)
    missing = _missing(schema, column, table, cells)
    values = np.zeros(len(cells))
    for row, cell in enumerate(cells):
        if missing[row]:
            continue
        try:
            values[row] = _number(column, cell)
        except (ValueError, OverflowError):
            problem, code = _PROBLEMS[column.kind]
            raise _value_error(column.name, table, row, problem, code) from None
        if not math.isfinite(values[row]):
            raise _value_error(column.name, table, row, "not finite", "not-finite")
    return values, missing


def parse_categories(schema: Schema, column: TableColumn, table: Table) -> list[str]:
    """Return the texts of a column of categories or classes; missing ones are empty."""
    cells = _cells(schema, column.name, table)
    missing = _missing(schema, column, table, cells)
    return ["" if missing[row] else category_text(cell) for row, cell in enumerate(cells)]


_PROBLEMS = {
    "number": ("not a number", "not-a-number"),
    "target": ("not a number", "not-a-number"),
    "date": ("not a date of the format of the schema", "not-a-date"),
    "ordinal": ("not one of the categories of the schema", "unknown-category"),
}


def _number(column: TableColumn, cell: str) -> float:
    if column.kind == "text_length":
        return float(len(cell))
    if column.kind == "ordinal":
        return float((column.categories or ()).index(category_text(cell)))
    if column.kind == "date":
        day = datetime.fromisoformat(cell) if column.format is None else datetime.strptime(cell, column.format)
        day = day if day.tzinfo is not None else day.replace(tzinfo=UTC)
        return (day - _EPOCH).total_seconds() / 86400
    return float(cell)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _cells(schema: Schema, name: str, table: Table) -> Sequence[str]:
    if name not in table.columns:
        raise SchemaMisfitError(
            f"{table.source}: no column {name!r}, which the schema has. {suggestion(name, table.columns)}",
            "column-missing",
            name,
        )
    return table.columns[name]


def _missing(schema: Schema, column: TableColumn, table: Table, cells: Sequence[str]) -> Mask:
    texts = set(schema.missing_values)
    missing = np.array([cell in texts for cell in cells])
    if column.missing == "refuse" and missing.any():
        row = int(np.flatnonzero(missing)[0])
        state = "is empty" if not cells[row] else f"is {short_repr(cells[row])}, a missing value"
        remedy = "Fill it in, or drop the row or the column."
        if column.kind != "target":
            remedy += " Or let the schema fill it in, with missing: indicator, mean or constant."
        raise SchemaMisfitError(
            f"{table.place(row)}: {column.name!r} {state}. {remedy}", "value-missing", column.name
        )  # fmt: skip
    return missing


def _inputs(schema: Schema, table: Table, statistics: Statistics) -> npt.NDArray[np.float32]:
    """Return the inputs of all columns side by side. Arithmetic is in float64, column by column and row by row."""
    if schema.is_open:
        name = next(column.name for column in schema if column.is_open)
        raise SchemaMisfitError(f"schema: {name!r} is not agreed yet: its categories or moments are open.",
                                "not-agreed", name)  # fmt: skip
    blocks = [_encode_column(schema, column, table, statistics) for column in schema if column.inputs]
    wide = np.concatenate(blocks, axis=1)
    with np.errstate(over="ignore"):
        inputs = wide.astype(np.float32)
    if not np.isfinite(inputs).all():
        row, place = np.argwhere(~np.isfinite(inputs))[0]
        raise SchemaMisfitError(
            f"{table.place(int(row))}: {schema.inputs[place]!r} is {wide[row, place]:g} after scaling: too large for "
            "float32.",
            "not-finite",
            next(column.name for column in schema if schema.inputs[place] in column.inputs),
        )
    return inputs


def _encode_column(schema: Schema, column: TableColumn, table: Table, statistics: Statistics) -> Floats:
    if column.kind == "category":
        return _encode_categories(schema, column, table)
    values, missing = parse_numbers(schema, column, table)
    mean, std = _scale(column, statistics)
    if column.fill is not None:
        fill = float(column.fill)
    else:
        fill = mean if column.missing == "mean" or column.scale != "none" else 0.0
    filled = np.where(missing, fill, values)
    scaled = filled if column.scale == "none" else (filled - mean) / std
    if column.missing == "indicator":
        return np.stack([scaled, missing.astype(np.float64)], axis=1)
    return scaled[:, None]


def _scale(column: TableColumn, statistics: Statistics) -> tuple[float, float]:
    if column.scale == "site":
        return statistics[column.name]
    return (column.mean or 0.0), (column.std or 1.0)


def _encode_categories(schema: Schema, column: TableColumn, table: Table) -> Floats:
    assert column.categories is not None
    texts, missing_value = parse_categories(schema, column, table), ""
    position = {text: i for i, text in enumerate(column.categories)}
    if column.missing == "constant":
        missing_value = str(column.fill)
    encoded = np.zeros((len(texts), len(column.inputs)))
    for row, text in enumerate(texts):
        if text == "" and column.missing == "indicator":
            encoded[row, -1] = 1.0
            continue
        place = position.get(text or missing_value)
        if place is not None:
            encoded[row, place] = 1.0
        elif column.unknown == "refuse":
            raise _unknown_category(column, table, row)
    return encoded


def _targets(schema: Schema, table: Table, *, required: bool) -> npt.NDArray[Any] | None:
    """Return class numbers or float32 numbers; None if the table has no targets and none are required."""
    column = schema.target
    if column is None:
        if required:
            raise DataError("schema: no column of the kind target, as training needs.")
        return None
    if not required and column.name not in table.columns:
        return None
    if not required and any(cell in schema.missing_values for cell in table.columns[column.name]):
        return None  # rows to predict, some of which have no target yet
    if column.target == "number":
        return parse_numbers(schema, column, table)[0].astype(np.float32)
    if column.categories is None:
        raise SchemaMisfitError(
            f"schema: the classes of {column.name!r} are not agreed yet.", "not-agreed", column.name
        )
    position = {text: i for i, text in enumerate(column.categories)}
    texts = parse_categories(schema, column, table)
    for row, text in enumerate(texts):
        if text not in position:
            raise _unknown_category(column, table, row)
    return np.array([position[text] for text in texts], dtype=np.int64)


def _unknown_category(column: TableColumn, table: Table, row: int) -> SchemaMisfitError:
    what = "class" if column.kind == "target" else "category"
    problem = f"the schema has the {'classes' if what == 'class' else 'categories'} {short_repr(column.categories)}"
    if what == "category":
        problem += ". Add it to the schema, or set unknown: zero"
    return _value_error(column.name, table, row, problem, "unknown-category")


def _value_error(name: str, table: Table, row: int, problem: str, code: str) -> SchemaMisfitError:
    value = short_repr(table.columns[name][row])
    return SchemaMisfitError(f"{table.place(row)}: {name!r} is {value}: {problem}.", code, name)
