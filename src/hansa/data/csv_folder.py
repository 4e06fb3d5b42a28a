"""Federated data from a folder of CSV files, one per client, encoded by a schema, without pandas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from hansa.core.errors import invalid_argument
from hansa.data.federated import Dataset, FederatedData, partition_dataset
from hansa.data.files import DataError, MissingFileError
from hansa.data.partitions import natural
from hansa.data.schema.agreement import complete, summarize
from hansa.data.schema.columns import Missing, Scale
from hansa.data.schema.encoding import TableEncoding, encode_for_training
from hansa.data.schema.inference import InferenceOptions, SplitLike, infer_draft
from hansa.data.schema.table_schema import Schema, as_schema
from hansa.data.schema.tables import Table, read_csv

TEST = 0.2
"""Fraction of each client's rows for testing, if nothing else is said."""


def from_csv_folder(
    folder: Path | str,
    target: str | None = None,
    *,
    schema: Schema | Path | str | dict[str, Any] | None = None,
    test: float | None = None,
    split: SplitLike | None = None,
    drop: Sequence[str] = (),
    kind: Literal["class", "number"] | None = None,
    standardize: bool | Literal["pooled", "site"] = False,
    missing: Missing = "refuse",
    missing_values: Sequence[str] | None = None,
    seed: int = 0,
    name: str | None = None,
) -> FederatedData:
    """Federated data from ``folder/*.csv``: every file is a client with the file's name.

    All files have a header and the same columns in any order. A schema says how columns become inputs. Without one it
    is inferred from all files: numeric columns are inputs, and a text column becomes one 0/1 input per value, over the
    sorted values of all files. The result's ``schema`` is the one that was used.

    Args:
        folder: The folder, or one file.
        target: Column of targets: text and integers from 0 are classes, other numbers are floats.
        schema: A `Schema`, or its file, instead of the other arguments about columns. What is open in it is agreed over
            all files.
        test: Fraction of each client's rows, chosen by ``seed``, that is its test rows; by default 0.2, or none with a
            split column.
        split: Column whose values ``train`` and ``test`` divide the rows, or ``{"column": NAME, "test": [VALUES]}``.
        drop: Columns to leave out.
        kind: "class" or "number" to override the kind of target, such as "number" for BCE.
        standardize: Scale numeric columns to mean 0 and deviation 1 of training rows: True or "pooled" of those of all
            clients, from their exact sums; "site" of each client's own.
        missing: What missing values become, in columns that have any: "refuse", "indicator", "mean", or "constant" (0);
            see `TableColumn`. Missing categories get an indicator.
        missing_values: Texts of missing values besides empty cells; by default ?, NA, N/A, NaN, nan and null, unless
            missing values are refused.
        seed: Seed of the choice of test rows.
        name: Name of the data; by default that of the folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as sites:
    ...     for site in ("north", "south"):
    ...         _ = Path(sites, f"{site}.csv").write_text(chr(10).join(["age,sex,y", "40,f,1", "50,m,0", "60,f,1"]))
    ...     clients = from_csv_folder(sites, target="y", test=0)
    >>> clients.population, clients.client_names, tuple(clients.inputs.shape)
    (2, ('north', 'south'), (6, 3))
    """
    tables = read_tables(folder)
    title = Path(folder).stem if name is None else name
    if schema is None:
        if target is None:
            raise invalid_argument("from_csv_folder", "target", None, "the column of targets, or a schema")
        scale = _scale(standardize)
        options = InferenceOptions(target, drop, (), split, kind, scale, missing, missing_values)
        chosen = infer_draft(tables, options, title)
    else:
        columns = {"target": target, "split": split, "drop": drop or None, "kind": kind,
                   "standardize": standardize or None, "missing": None if missing == "refuse" else missing,
                   "missing_values": missing_values}  # fmt: skip
        for argument, value in columns.items():
            if value is not None:
                raise invalid_argument("from_csv_folder", argument, value, "none with a schema", "Change the schema.")
        chosen = as_schema(schema)
    fraction = fraction_of_test_rows(chosen, test)
    return federate_tables(complete_schema(chosen, tables, fraction, seed), tables, fraction, seed, title)


def infer_schema(
    folder: Path | str,
    target: str,
    *,
    drop: Sequence[str] = (),
    ids: Sequence[str] = (),
    split: SplitLike | None = None,
    kind: Literal["class", "number"] | None = None,
    scale: Scale = "none",
    missing: Missing = "indicator",
    missing_values: Sequence[str] | None = None,
    test: float | None = None,
    seed: int = 0,
) -> Schema:
    """Return the schema of the CSV files of a folder, with nothing open.

    Args:
        folder: The folder, or one file.
        target: Column of targets.
        drop: Columns to leave out of the schema.
        ids: Columns that identify rows; the schema lists them, and they are not inputs.
        split: As in `from_csv_folder`.
        kind: "class" or "number" to override the kind of target.
        scale: Scale of numeric columns: "none", "site" or "pooled".
        missing: What missing values become, in columns that have any.
        missing_values: Texts of missing values besides empty cells.
        test: Fraction of test rows, which pooled statistics leave out, as in `from_csv_folder`.
        seed: Seed of the choice of test rows.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as sites:
    ...     for site, ward in (("north", "icu"), ("south", "surgery")):
    ...         _ = Path(sites, f"{site}.csv").write_text(chr(10).join(["age,ward,y", f"40,{ward},1", f"50,{ward},0"]))
    ...     infer_schema(sites, "y").inputs
    ('age', 'ward=icu', 'ward=surgery')
    """
    tables = read_tables(folder)
    options = InferenceOptions(target, drop, ids, split, kind, scale, missing, missing_values)
    draft = infer_draft(tables, options, Path(folder).stem)
    return complete_schema(draft, tables, fraction_of_test_rows(draft, test), seed)


def read_tables(folder: Path | str) -> list[Table]:
    """Read the CSV files of a folder, in the order of their names, or one file."""
    folder = Path(folder)
    if folder.is_file():
        return [read_csv(folder)]
    paths = sorted(folder.glob("*.csv")) if folder.is_dir() else []
    if not paths:
        raise MissingFileError(f"{folder}: no .csv files: expected one for each client.")
    return [read_csv(path) for path in paths]


def complete_schema(draft: Schema, tables: Sequence[Table], test: float, seed: int) -> Schema:
    """Return the schema with what is open agreed over all tables."""
    return complete(draft, [summarize(draft, table, test=test, seed=seed) for table in tables])


def federate_tables(
    schema: Schema, tables: Sequence[Table], test: float = 0.0, seed: int = 0, name: str = "tables"
) -> FederatedData:
    """Return the data of tables, one per client, encoded by a schema in which nothing is open."""
    return partition_dataset(dataset_of_tables(schema, tables, test, seed, name), natural(), None, seed)


def dataset_of_tables(schema: Schema, tables: Sequence[Table], test: float, seed: int, name: str) -> Dataset:
    """Return tables as one data set; the natural owners of its rows are the tables."""
    encoded = [encode_for_training(schema, table, test=test, seed=seed) for table in tables]
    sizes = [table.rows for table in tables]
    is_test = torch.from_numpy(np.concatenate([each.is_test for each in encoded]))
    owners = torch.from_numpy(np.repeat(np.arange(len(tables)), sizes))
    x = torch.from_numpy(np.concatenate([each.inputs for each in encoded]))
    y = torch.from_numpy(np.concatenate([each.targets for each in encoded if each.targets is not None]))
    has_test = bool(is_test.any())
    target = schema.target
    return Dataset(
        name=name,
        inputs=x[~is_test],
        targets=y[~is_test],
        test_inputs=x[is_test] if has_test else None,
        test_targets=y[is_test] if has_test else None,
        classes=schema.classes,
        groups=owners[~is_test],
        test_groups=owners[is_test] if has_test else None,
        group_names=tuple(table.name for table in tables),
        class_names=() if target is None or target.categories is None else target.categories,
        encoding=TableEncoding(schema, {table.name: each.statistics for table, each in zip(tables, encoded, strict=True)
                                        if each.statistics}),
    )  # fmt: skip


def schema_template(schema: Schema, name: str = "tables") -> FederatedData:
    """Return data of one row of zeros with the shape and classes of a schema, for a party without any table."""
    target = schema.target
    if target is None or schema.is_open:
        missing_part = "has no target" if target is None else "is not agreed yet"
        raise DataError(f"schema: {missing_part}: no model can be built for it.")
    targets = torch.zeros(1) if schema.classes is None else torch.zeros(1, dtype=torch.int64)
    zeros = torch.zeros(1, len(schema.inputs))
    data = Dataset(name, zeros, targets, classes=schema.classes, groups=torch.zeros(1, dtype=torch.int64),
                   encoding=TableEncoding(schema))  # fmt: skip
    return partition_dataset(data, natural(), None, 0)


def fraction_of_test_rows(schema: Schema, test: float | None) -> float:
    """Return the fraction of test rows: none with a split column, otherwise 0.2 by default."""
    if schema.split is not None:
        if test is not None:
            column = schema.split.column
            raise invalid_argument("from_csv_folder", "test", test, f"none: the column {column!r} divides the rows")
        return 0.0
    if test is None:
        return TEST
    if not isinstance(test, (int, float)) or isinstance(test, bool) or not 0 <= test < 1:
        raise invalid_argument(
            "from_csv_folder", "test", test, "0 <= test < 1", "0.2 is a fifth of each client's rows."
        )
    return float(test)


def _scale(standardize: object) -> Scale:
    if standardize is False:
        return "none"
    if standardize is True or standardize == "pooled":
        return "pooled"
    if standardize == "site":
        return "site"
    raise invalid_argument("from_csv_folder", "standardize", standardize, "True, False, 'pooled' or 'site'")
