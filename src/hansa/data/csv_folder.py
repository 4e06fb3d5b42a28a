"""A folder of CSV files, one a client: the csv module and NumPy, no pandas."""

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
from hansa.data.errors import DataError, MissingError
from hansa.data.federated import Dataset, FederatedData, partition
from hansa.data.partitions import natural

CATEGORIES = 100
"""A column of words with more different ones than this is taken for a name or a text."""
CLASSES = 10_000
"""Whole numbers as targets count as classes below this."""
_MOST = 2 << 30  # bytes of one file


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
    """Federated data from ``folder/*.csv``: every file is a client, called as the file, with a header and the same
    columns in any order.

    Columns of numbers are inputs as they are, columns of words become one 0/1 input a word (of all files, sorted). The
    column ``target`` is what is learnt: words and whole numbers from 0 are classes, other numbers are numbers; ``kind``
    says otherwise, "number" for a loss such as BCE. ``drop`` leaves columns out. Of each client a share of ``test``
    rows, chosen by ``seed``, is for testing and stays its own. ``standardize`` brings columns of numbers to mean 0 and
    deviation 1, by the training rows of all clients.

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
            "from_csv_folder", "test", test, "a share from 0 to below 1", "0.2 is a fifth of each client."
        )
    if kind not in (None, "class", "number"):
        raise invalid_argument("from_csv_folder", "kind", kind, "'class', 'number' or None")
    paths = sorted(folder.glob("*.csv")) if folder.is_dir() else []
    if not paths:
        raise MissingError(f"{folder}: no .csv files here; one for each client is expected.")
    files = [_read(path) for path in paths]
    header = _header(files, target, drop)
    targets, classes = _targets(files, target, kind)
    inputs = np.concatenate([_numbers(files, column) for column in header], axis=1)
    sizes = [len(file.lines) for file in files]
    held = _held(paths, sizes, test, seed)
    owners = np.repeat(np.arange(len(files)), sizes)
    if standardize:
        inputs = _standard(inputs, ~held)
    x, y = torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(targets)
    tested = bool(held.any())
    made = Dataset(
        name=folder.name if name is None else name,
        inputs=x[torch.from_numpy(~held)],
        targets=y[torch.from_numpy(~held)],
        test_inputs=x[torch.from_numpy(held)] if tested else None,
        test_targets=y[torch.from_numpy(held)] if tested else None,
        classes=None if classes is None else max(len(classes), 1),
        groups=torch.from_numpy(owners[~held]),
        test_groups=torch.from_numpy(owners[held]) if tested else None,
        group_names=tuple(path.stem for path in paths),
        class_names=classes or (),
    )
    return partition(made, natural(), None, seed)


def _read(path: Path) -> _File:
    try:
        if path.stat().st_size > _MOST:
            raise DataError(f"{path}: larger than {_MOST >> 30} GiB.")
        text = path.read_text(encoding="utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        rows = [(reader.line_num, row) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as CSV ({error}).") from error
    if len(rows) < 2:
        raise DataError(f"{path}: expected a header and at least one row; found {len(rows)} lines.")
    (_, head), body = rows[0], rows[1:]
    header = [word.strip() for word in head]
    twice = next((word for word in header if header.count(word) > 1), None)
    if twice is not None or "" in header:
        raise DataError(
            f"{path}: the header {short_repr(header)} has a column {'twice' if twice else 'without a name'}."
        )
    for line, row in body:
        if len(row) != len(header):
            raise DataError(f"{path}, line {line}: {len(row)} values under {len(header)} columns.")
        for column, value in zip(header, row, strict=True):
            if not value.strip():
                raise DataError(f"{path}, line {line}: {column!r} is empty. Fill it in, or drop the row or the column.")
    columns = {column: [row[at].strip() for _, row in body] for at, column in enumerate(header)}
    return _File(path, columns, [line for line, _ in body])


def _header(files: Sequence[_File], target: str, drop: Sequence[str]) -> list[str]:
    """The columns of inputs, in the first file's order."""
    first = list(files[0].columns)
    for word in (target, *drop):
        if word not in first:
            raise DataError(f"{files[0].path}: no column {word!r}. {suggestion(word, first)}")
    for file in files[1:]:
        if odd := sorted(set(first) ^ set(file.columns)):
            raise DataError(
                f"{file.path}: other columns than {files[0].path.name}: {', '.join(map(short_repr, odd[:5]))}."
            )
    found = [column for column in first if column != target and column not in drop]
    if not found:
        raise DataError(f"{files[0].path}: no column is left for inputs beside {target!r}.")
    return found


def _numbers(files: Sequence[_File], column: str) -> npt.NDArray[np.float64]:
    """A column of all files as numbers [n, 1], or as one 0/1 column a word [n, words]."""
    values = [value for file in files for value in file.columns[column]]
    found = [_number(value) for value in values]
    words = [place for place, number in enumerate(found) if number is None]
    if not words:
        numbers = np.array(found, dtype=np.float64)
        if not np.isfinite(numbers).all():
            raise _at(files, column, int(np.flatnonzero(~np.isfinite(numbers))[0]), "not finite")
        return numbers[:, None]
    if 2 * len(words) < len(values):
        raise _at(files, column, words[0], "no number, in a column of numbers")
    known = sorted(set(values))
    if len(known) > CATEGORIES:
        raise DataError(
            f"{files[0].path}: {column!r} holds {len(known)} different words, more than {CATEGORIES}: "
            f"drop=[{column!r}] leaves it out."
        )
    place = {word: at for at, word in enumerate(known)}
    return np.eye(len(known))[[place[value] for value in values]]


def _targets(files: Sequence[_File], target: str, kind: str | None) -> tuple[npt.NDArray[Any], tuple[str, ...] | None]:
    """Class numbers with the classes' names, or float32 numbers."""
    values = [value for file in files for value in file.columns[target]]
    found = [_number(value) for value in values]
    words = [place for place, number in enumerate(found) if number is None or not math.isfinite(number)]
    if kind == "number" or (kind is None and not words):
        if words:
            raise _at(files, target, words[0], "no number")
        numbers = np.array(found, dtype=np.float64)
        if kind == "number" or (numbers % 1).any() or numbers.min() < 0 or numbers.max() >= CLASSES:
            return numbers.astype(np.float32), None
        return numbers.astype(np.int64), tuple(map(str, range(int(numbers.max()) + 1)))
    if not words and all(number is not None and number % 1 == 0 and 0 <= number < CLASSES for number in found):
        return _targets(files, target, None)
    known = sorted(set(values))
    place = {word: at for at, word in enumerate(known)}
    return np.array([place[value] for value in values], dtype=np.int64), tuple(known)


def _held(paths: Iterable[Path], sizes: Sequence[int], share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Which rows are for testing: of each client the share, rounded down, so that one with few rows keeps them."""
    parts = []
    for path, size in zip(paths, sizes, strict=True):
        mask = np.zeros(size, bool)
        chance = Key(seed).child("csv test", path.stem).numpy()
        mask[chance.permutation(size)[: int(share * size)]] = True
        parts.append(mask)
    return np.concatenate(parts)


def _standard(inputs: npt.NDArray[np.float64], rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    numbers = np.array([len(np.unique(column)) > 2 for column in inputs.T])
    mean, spread = inputs[rows].mean(0), inputs[rows].std(0)
    return np.where(numbers, (inputs - mean) / np.where(spread > 0, spread, 1.0), inputs)


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _at(files: Sequence[_File], column: str, place: int, what: str) -> DataError:
    """The error for one value, by the file and line that it stands in."""
    for file in files:
        if place < len(file.lines):
            value = file.columns[column][place]
            return DataError(f"{file.path}, line {file.lines[place]}: {column!r} is {short_repr(value)}: {what}.")
        place -= len(file.lines)
    raise IndexError(place)
