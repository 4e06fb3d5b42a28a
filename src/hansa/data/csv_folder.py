"""Federated data from a folder of CSV files, one per client, without pandas."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hansa.core.errors import invalid_argument, short_repr, suggestion
from hansa.core.keys import Key
from hansa.data.federated import Dataset, FederatedData, partition_dataset
from hansa.data.files import DataError, MissingFileError
from hansa.data.partitions import natural

MAX_CATEGORIES = 100
"""A text column with more distinct values is taken for names or free text and refused."""
MAX_CLASSES = 10_000
"""Integer targets below this are class numbers."""
_MAX_BYTES = 2 << 30  # of one file


class _File(NamedTuple):
    path: Path
    columns: dict[str, list[str]]
    lines: list[int]


def from_csv_folder(
    folder: Path | str,
    target: str,
    *,
    test: float = 0.2,
    drop: Sequence[str] = (),
    kind: Literal["class", "number"] | None = None,
    standardize: bool = False,
    seed: int = 0,
    name: str | None = None,
) -> FederatedData:
    """Federated data from ``folder/*.csv``: every file is a client with the file's name.

    All files have a header and the same columns in any order. Numeric columns are inputs. A text column becomes one 0/1
    input per value, over the sorted values of all files.

    Args:
        folder: The folder.
        target: Column of targets: text and integers from 0 are classes, other numbers are floats.
        test: Fraction of each client's rows, chosen by ``seed``, that is its test rows.
        drop: Columns to leave out.
        kind: "class" or "number" to override the kind of target, such as "number" for BCE.
        standardize: Scale numeric columns to mean 0 and deviation 1 of the training rows of all clients.
        seed: Seed of the choice of test rows.
        name: Name of the data; by default that of the folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as sites:
    ...     for site in ("north", "south"):
    ...         _ = Path(sites, f"{site}.csv").write_text(chr(10).join(["age,sex,y", "40,f,1", "50,m,0", "60,f,1"]))
    ...     clients = from_csv_folder(sites, target="y", test=0)
    >>> clients.population, tuple(clients.inputs.shape)
    (2, (6, 3))
    """
    folder = Path(folder)
    if not isinstance(test, (int, float)) or isinstance(test, bool) or not 0 <= test < 1:
        raise invalid_argument(
            "from_csv_folder", "test", test, "0 <= test < 1", "0.2 is a fifth of each client's rows."
        )
    if kind not in (None, "class", "number"):
        raise invalid_argument("from_csv_folder", "kind", kind, "'class', 'number' or None")
    paths = sorted(folder.glob("*.csv")) if folder.is_dir() else []
    if not paths:
        raise MissingFileError(f"{folder}: no .csv files: expected one for each client.")
    files = [_read_csv(path) for path in paths]
    columns = _input_columns(files, target, drop)
    targets, classes = _targets(files, target, kind)
    inputs = np.concatenate([_encode_column(files, column) for column in columns], axis=1)
    sizes = [len(file.lines) for file in files]
    is_test = _choose_test_rows(paths, sizes, test, seed)
    owners = np.repeat(np.arange(len(files)), sizes)
    if standardize:
        inputs = _standardize(inputs, ~is_test)
    x, y = torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(targets)
    has_test = bool(is_test.any())
    data = Dataset(
        name=folder.name if name is None else name,
        inputs=x[torch.from_numpy(~is_test)],
        targets=y[torch.from_numpy(~is_test)],
        test_inputs=x[torch.from_numpy(is_test)] if has_test else None,
        test_targets=y[torch.from_numpy(is_test)] if has_test else None,
        classes=None if classes is None else max(len(classes), 1),
        groups=torch.from_numpy(owners[~is_test]),
        test_groups=torch.from_numpy(owners[is_test]) if has_test else None,
        group_names=tuple(path.stem for path in paths),
        class_names=classes or (),
    )
    return partition_dataset(data, natural(), None, seed)


def _read_csv(path: Path) -> _File:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(f"{path}: larger than {_MAX_BYTES >> 30} GiB.")
        text = path.read_text(encoding="utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        rows = [(reader.line_num, row) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as CSV ({error}).") from error
    if len(rows) < 2:
        raise DataError(f"{path}: expected a header and at least one row; found {len(rows)} lines.")
    (_, first), body = rows[0], rows[1:]
    header = [column.strip() for column in first]
    duplicate = next((column for column in header if header.count(column) > 1), None)
    if duplicate is not None or "" in header:
        raise DataError(
            f"{path}: the header {short_repr(header)} has a column {'twice' if duplicate else 'without a name'}."
        )
    for line, row in body:
        if len(row) != len(header):
            raise DataError(f"{path}, line {line}: {len(row)} values for {len(header)} columns.")
        for column, value in zip(header, row, strict=True):
            if not value.strip():
                raise DataError(f"{path}, line {line}: {column!r} is empty. Fill it in, or drop the row or the column.")
    columns = {column: [row[i].strip() for _, row in body] for i, column in enumerate(header)}
    return _File(path, columns, [line for line, _ in body])


def _input_columns(files: Sequence[_File], target: str, drop: Sequence[str]) -> list[str]:
    """Return the columns of inputs, in the first file's order."""
    first = list(files[0].columns)
    for column in (target, *drop):
        if column not in first:
            raise DataError(f"{files[0].path}: no column {column!r}. {suggestion(column, first)}")
    for file in files[1:]:
        if different := sorted(set(first) ^ set(file.columns)):
            raise DataError(
                f"{file.path}: other columns than {files[0].path.name}: {', '.join(map(short_repr, different[:5]))}."
            )
    inputs = [column for column in first if column != target and column not in drop]
    if not inputs:
        raise DataError(f"{files[0].path}: no column of inputs beside {target!r}.")
    return inputs


def _encode_column(files: Sequence[_File], column: str) -> npt.NDArray[np.float64]:
    """Return a column of all files as numbers [n, 1], or as one 0/1 column per value [n, values]."""
    values = [value for file in files for value in file.columns[column]]
    parsed = [_parse_number(value) for value in values]
    texts = [row for row, number in enumerate(parsed) if number is None]
    if not texts:
        numbers = np.array(parsed, dtype=np.float64)
        if not np.isfinite(numbers).all():
            raise _value_error(files, column, int(np.flatnonzero(~np.isfinite(numbers))[0]), "not finite")
        return numbers[:, None]
    if 2 * len(texts) < len(values):
        raise _value_error(files, column, texts[0], "not a number, in a numeric column")
    distinct = sorted(set(values))
    if len(distinct) > MAX_CATEGORIES:
        raise DataError(
            f"{files[0].path}: {column!r} has {len(distinct)} different texts, more than {MAX_CATEGORIES}: "
            f"drop=[{column!r}] leaves it out."
        )
    position = {text: i for i, text in enumerate(distinct)}
    return np.eye(len(distinct))[[position[value] for value in values]]


def _targets(files: Sequence[_File], target: str, kind: str | None) -> tuple[npt.NDArray[Any], tuple[str, ...] | None]:
    """Return class numbers with the names of the classes, or float32 numbers."""
    values = [value for file in files for value in file.columns[target]]
    parsed = [_parse_number(value) for value in values]
    texts = [row for row, number in enumerate(parsed) if number is None or not math.isfinite(number)]
    if kind == "number" or (kind is None and not texts):
        if texts:
            raise _value_error(files, target, texts[0], "not a number")
        numbers = np.array(parsed, dtype=np.float64)
        if kind == "number" or (numbers % 1).any() or numbers.min() < 0 or numbers.max() >= MAX_CLASSES:
            return numbers.astype(np.float32), None
        return numbers.astype(np.int64), tuple(map(str, range(int(numbers.max()) + 1)))
    if not texts and all(number is not None and number % 1 == 0 and 0 <= number < MAX_CLASSES for number in parsed):
        return _targets(files, target, None)
    distinct = sorted(set(values))
    position = {text: i for i, text in enumerate(distinct)}
    return np.array([position[value] for value in values], dtype=np.int64), tuple(distinct)


def _choose_test_rows(paths: Iterable[Path], sizes: Sequence[int], fraction: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return a mask of test rows: the fraction of each client's rows, rounded down."""
    parts = []
    for path, size in zip(paths, sizes, strict=True):
        mask = np.zeros(size, bool)
        draw = Key(seed).child("csv test", path.stem).numpy()
        mask[draw.permutation(size)[: int(fraction * size)]] = True
        parts.append(mask)
    return np.concatenate(parts)


def _standardize(inputs: npt.NDArray[np.float64], rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    numeric = np.array([len(np.unique(column)) > 2 for column in inputs.T])
    mean, std = inputs[rows].mean(0), inputs[rows].std(0)
    return np.where(numeric, (inputs - mean) / np.where(std > 0, std, 1.0), inputs)


def _parse_number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _value_error(files: Sequence[_File], column: str, row: int, problem: str) -> DataError:
    """Return the error for one value, with its file and line."""
    for file in files:
        if row < len(file.lines):
            value = file.columns[column][row]
            return DataError(f"{file.path}, line {file.lines[row]}: {column!r} is {short_repr(value)}: {problem}.")
        row -= len(file.lines)
    raise IndexError(row)
