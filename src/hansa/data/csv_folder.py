"""Federated data from CSV files, one per client, encoded by a schema; a schema of files; the embedded hospital tables.

UCI Heart Disease (Janosi, Steinbrunn, Pfisterer, Detrano 1989, doi 10.24432/C52P4X), licensed under CC BY 4.0, is
embedded. Changes: a header, and the column ``disease``, 1 where ``num`` is above 0, in place of ``num``. Cells are as
published; ``?`` is a missing value. ``packaging/embedded_data.py`` builds the file.
"""

from __future__ import annotations

import io
import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from hansa.core.errors import check_decay, invalid_argument, short_repr
from hansa.data.federated import Dataset, FederatedData, partition_dataset
from hansa.data.partitions import natural
from hansa.data.schema import (
    MISSING_TEXTS,
    Missing,
    Scale,
    Schema,
    SplitColumn,
    Table,
    TableColumn,
    TableEncoding,
    as_schema,
    category_text,
    complete,
    encode,
    parse_date,
    parse_number,
    read_csv,
    table_moments,
)
from hansa.data.sources import DataError, MissingFileError, read_asset

TEST = 0.2
"""Fraction of each client's rows for testing, if nothing else is said."""

MAX_CLASSES = 10_000
"""Classes that are all integers below this are numbered by their value."""

MAX_CATEGORIES = 100
"""A text column with more distinct values is taken for names or free text and refused."""


def from_csv_folder(
    folder: Path | str,
    target: str | None = None,
    *,
    schema: Schema | Path | str | dict[str, Any] | None = None,
    test: float | None = None,
    seed: int = 0,
    name: str | None = None,
    **inference: Any,
) -> FederatedData:
    """Federated data from ``folder/*.csv``: every file is a client with the file's name.

    All files have a header and the same columns in any order. A schema says how columns become inputs. Without one it
    is inferred from all files: numeric columns are inputs, and a text column becomes one 0/1 input per value, over the
    sorted values of all files. The result's ``schema`` is the one that was used.

    Args:
        folder: The folder, or one file.
        target: Column of targets: text and integers from 0 are classes, other numbers are floats.
        schema: A `Schema`, or its file, instead of a target. Open means and deviations are those of all files.
        test: Fraction of each client's rows, chosen by ``seed``, that is its test rows; by default 0.2, or none with a
            split column.
        seed: Seed of the choice of test rows.
        name: Name of the data; by default that of the folder.
        **inference: Further arguments of `infer_schema`, such as ``split``, ``scale`` and ``missing``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as sites:
    ...     for site in ("north", "south"):
    ...         _ = Path(sites, f"{site}.csv").write_text(chr(10).join(["age,sex,y", "40,f,1", "50,m,0", "60,f,1"]))
    ...     clients = from_csv_folder(sites, target="y", test=0)
    >>> clients.population, clients.client_names, tuple(clients.inputs.shape)
    (2, ('north', 'south'), (6, 3))
    """
    if (target is None) == (schema is None) or (schema is not None and inference):
        arguments = {"target": target, "schema": schema} | inference
        raise invalid_argument("from_csv_folder", "target", arguments, "the column of targets, or else a schema alone")
    if schema is None:
        draft = infer_schema(folder, str(target), test=test, seed=seed, **inference)
    else:
        draft = as_schema(schema)
    tables, fraction = read_tables(folder, draft), fraction_of_test_rows(draft, test)
    title = Path(folder).stem if name is None else name
    return federate_tables(complete_schema(draft, tables, fraction, seed), tables, fraction, seed, title)


def read_tables(folder: Path | str, schema: Schema | None = None) -> list[Table]:
    """Read the CSV files of a folder, in the order of their names, or one file, written as the schema says."""
    folder = Path(folder)
    paths = [folder] if folder.is_file() else sorted(folder.glob("*.csv"))
    if not paths:
        raise MissingFileError(f"{folder}: no .csv files: expected one for each client.")
    return [read_csv(path, schema) for path in paths]


def complete_schema(draft: Schema, tables: Sequence[Table], test: float, seed: int) -> Schema:
    """Return the schema with open means and deviations computed over all tables."""
    return complete(draft, [table_moments(draft, table, test, seed) for table in tables])


def federate_tables(
    schema: Schema, tables: Sequence[Table], test: float = 0.0, seed: int = 0, name: str = "tables"
) -> FederatedData:
    """Return the data of tables, one per client, encoded by a schema in which nothing is open."""
    return partition_dataset(dataset_of_tables(schema, tables, test, seed, name), natural(), None, seed)


def dataset_of_tables(schema: Schema, tables: Sequence[Table], test: float, seed: int, name: str) -> Dataset:
    """Return tables as one data set; the natural owners of its rows are the tables."""
    encoded = {table.name: encode(schema, table, training=True, test=test, seed=seed) for table in tables}
    encodings = encoded.values()
    is_test = torch.from_numpy(np.concatenate([table.is_test for table in encodings]))
    owners = torch.from_numpy(np.repeat(np.arange(len(tables)), [table.rows for table in tables]))
    x = torch.from_numpy(np.concatenate([table.inputs for table in encodings]))
    y = torch.from_numpy(np.concatenate([table.targets for table in encodings if table.targets is not None]))
    statistics = {client: table.statistics for client, table in encoded.items() if table.statistics}
    counts = {client: table.counts for client, table in encoded.items() if table.counts}
    tests = (x[is_test], y[is_test], owners[is_test]) if bool(is_test.any()) else (None, None, None)
    return Dataset(
        name,
        x[~is_test],
        y[~is_test],
        tests[0],
        tests[1],
        classes=schema.classes,
        groups=owners[~is_test],
        group_names=tuple(encoded),
        class_names=() if schema.target is None else schema.target.categories or (),
        test_groups=tests[2],
        encoding=TableEncoding(schema, statistics, counts),
    )


def schema_template(schema: Schema) -> FederatedData:
    """Return data of one row of zeros with the shape and classes of a schema, for a party without any table."""
    if schema.target is None:
        raise DataError("schema: has no target: no model can be built for it.")
    return zero_row((len(schema.inputs),), schema.classes, encoding=TableEncoding(schema))


def zero_row(shape: Sequence[int], classes: int | None, dtype: str = "float32", **options: Any) -> FederatedData:
    """Return data of one row of zeros, from which a model can be built."""
    inputs = torch.zeros(1, *shape, dtype=getattr(torch, dtype))
    targets = torch.zeros(1, dtype=torch.float32 if classes is None else torch.int64)
    return FederatedData(inputs, targets, torch.tensor([0]), torch.tensor([0, 1]), classes=classes, **options)


def fraction_of_test_rows(schema: Schema, test: float | None) -> float:
    """Return the fraction of test rows: none with a split column, otherwise 0.2 by default."""
    if schema.split is not None:
        if test is not None:
            expected = f"none: the column {schema.split.column!r} divides the rows"
            raise invalid_argument("from_csv_folder", "test", test, expected)
        return 0.0
    if test is None:
        return TEST
    check_decay("from_csv_folder", "test", test, "0.2 is a fifth of each client's rows.")
    return float(test)


# ---- infer a schema


def infer_schema(
    folder: Path | str,
    target: str,
    *,
    drop: Sequence[str] = (),
    ids: Sequence[str] = (),
    split: str | SplitColumn | Mapping[str, Any] | None = None,
    kind: Literal["class", "number"] | None = None,
    scale: Scale = "none",
    missing: Missing = "refuse",
    missing_values: Sequence[str] | None = None,
    test: float | None = None,
    seed: int = 0,
    delimiter: str = ",",
    decimal: Literal[".", ","] = ".",
    encoding: str = "utf-8",
) -> Schema:
    """Return the schema of one CSV file or of those of a folder, with nothing open.

    A column of numbers is a number, one of ISO dates a date and one of other texts a category.

    Args:
        folder: The folder, or one file.
        target: Column of targets: text and integers from 0 are classes, other numbers are floats.
        drop: Columns to leave out of the schema.
        ids: Columns that identify rows; the schema lists them, and they are not inputs.
        split: Column whose values ``train`` and ``test`` divide the rows, or ``{"column": NAME, "test": [VALUES]}``.
        kind: "class" or "number" to override the kind of target, such as "number" for BCE.
        scale: Scale of numeric columns: "none"; "pooled" to mean 0 and deviation 1 of the training rows of all
            clients, from their exact sums; "site" of each client's own.
        missing: What missing values become, in columns that have any: "refuse", "indicator", "mean", or "constant" (0);
            see `TableColumn`. Missing categories get an indicator.
        missing_values: Texts of missing values besides empty cells; by default ?, NA, N/A, NaN, nan and null, unless
            missing values are refused.
        test: Fraction of test rows, which pooled statistics leave out, as in `from_csv_folder`.
        seed: Seed of the choice of test rows.
        delimiter: What separates the cells.
        decimal: The decimal mark of numbers.
        encoding: The encoding of the files.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as sites:
    ...     for site, ward in (("north", "icu"), ("south", "surgery")):
    ...         _ = Path(sites, f"{site}.csv").write_text(chr(10).join(["age,ward,y", f"40,{ward},1", f"50,{ward},0"]))
    ...     infer_schema(sites, "y").inputs
    ('age', 'ward=icu', 'ward=surgery')
    """
    if kind not in (None, "class", "number"):
        raise invalid_argument("infer_schema", "kind", kind, "'class', 'number' or None")
    if missing_values is None:
        missing_values = () if missing == "refuse" else MISSING_TEXTS
    if isinstance(split, str):
        split = SplitColumn(split, ("test",), ("train",))
    elif isinstance(split, Mapping):
        split = SplitColumn(**split)
    form = Schema((TableColumn("any", "number"),), split, tuple(missing_values), Path(folder).stem,
                  delimiter, decimal, encoding)  # fmt: skip
    tables = read_tables(folder, form)
    first = tables[0]
    left_out = [*drop] if split is None else [*drop, split.column]
    for name in (target, *ids, *left_out):
        first.cells(name)  # all are there
    for table in tables[1:]:
        if different := sorted(set(first.columns) ^ set(table.columns)):
            names = ", ".join(map(short_repr, different[:5]))
            raise DataError(f"{table.source}: other columns than {first.name}.csv: {names}.")
    columns = []
    for name in first.columns:
        if name in ids:
            columns.append(TableColumn(name, "id"))
        elif name not in left_out:
            cells = [cell for table in tables for cell in table.columns[name] if cell not in form.missing_values]
            if not cells:
                raise DataError(f"{first.source}: {name!r} has no value in any file: drop=[{name!r}] leaves it out.")
            if name == target:
                columns.append(_infer_target(name, cells, decimal, kind))
            else:
                has_gaps = len(cells) < sum(table.rows for table in tables)
                becomes = missing if has_gaps else "refuse"
                columns.append(_infer_column(first.source, name, cells, decimal, scale, becomes))
    draft = replace(form, columns=tuple(columns))
    return complete_schema(draft, tables, fraction_of_test_rows(draft, test), seed)


def _infer_column(
    source: str, name: str, cells: Sequence[str], decimal: str, scale: Scale, missing: Missing
) -> TableColumn:
    """Return a column by its cells; what does not fit is refused when the table is encoded."""
    numbers = [parse_number(cell, decimal) for cell in cells]
    is_date = all(_DATE.match(cell) and parse_date(cell) is not None for cell in cells)
    if is_date or 2 * numbers.count(None) < len(cells):
        binary = not is_date and len(set(numbers)) <= 2
        fill = 0.0 if missing == "constant" else None
        kind: Literal["date", "number"] = "date" if is_date else "number"
        return TableColumn(name, kind, missing=missing, fill=fill, scale="none" if binary else scale)
    distinct = sorted(set(map(category_text, cells)))
    if len(distinct) > MAX_CATEGORIES:
        problem = f"{len(distinct)} different texts, more than {MAX_CATEGORIES}"
        raise DataError(f"{source}: {name!r} has {problem}: drop=[{name!r}] leaves it out.")
    return TableColumn(name, "category", tuple(distinct), "refuse" if missing == "refuse" else "indicator")


_DATE = re.compile(r"\d{4}-\d\d-\d\d")


def _infer_target(name: str, cells: Sequence[str], decimal: str, kind: str | None) -> TableColumn:
    numbers = [math.nan if (number := parse_number(cell, decimal)) is None else number for cell in cells]
    are_classes = all(number % 1 == 0 and 0 <= number < MAX_CLASSES for number in numbers)
    if kind == "number" or (kind is None and all(map(math.isfinite, numbers)) and not are_classes):
        return TableColumn(name, "target", target="number")
    classes = sorted(set(map(category_text, cells)))
    if are_classes and all(text.isascii() and text.isdigit() and str(int(text)) == text for text in classes):
        classes = list(map(str, range(max(map(int, classes)) + 1)))
    return TableColumn(name, "target", tuple(classes))


# ---- the embedded tables of four hospitals

HEART_ASSET = "heart-disease.zip"
HEART_SHA256 = "5dbf55378f8e35518424dd861053b4ee3a00c669ac74c85f24ec9f9565f0b237"
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
SCHEMA_FILE, README_FILE = "schema.yaml", "README.txt"


def read_hospital_tables() -> tuple[list[Table], Schema]:
    """Return the tables of the four hospitals and the draft of their schema."""
    content = _read_asset()
    tables = [read_csv(f"{name}.csv", text=content[f"{name}.csv"]) for name in HOSPITALS]
    return tables, Schema.from_yaml(content[SCHEMA_FILE], SCHEMA_FILE)


def load_hospitals(name: str, test: float = TEST) -> Dataset:
    """Return the tables as one data set whose natural owners are the hospitals."""
    tables, draft = read_hospital_tables()
    return dataset_of_tables(complete_schema(draft, tables, test, 0), tables, test, 0, name)


def write_hospital_tables(folder: Path) -> None:
    """Write the four files, the draft of their schema and their licence into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in _read_asset().items():
        (folder / name).write_text(text, encoding="utf-8")


def _read_asset() -> dict[str, str]:
    with zipfile.ZipFile(io.BytesIO(read_asset(HEART_ASSET, HEART_SHA256))) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}
