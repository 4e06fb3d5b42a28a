"""Tables of texts, read from a CSV file or taken from a data frame, without pandas."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hansa.core.errors import short_repr
from hansa.data.files import DataError

_MAX_BYTES = 2 << 30  # of one file


@dataclass(frozen=True, slots=True)
class Table:
    """The cells of a table as stripped texts, by column.

    Args:
        name: Name of the client: that of the file without its ending.
        source: The path, for messages.
        columns: The cells of every column.
        lines: The line of every row in the file.

    >>> Table("north", "north.csv", {"age": ["40", "50"]}, [2, 3]).rows
    2
    """

    name: str
    source: str
    columns: Mapping[str, Sequence[str]]
    lines: Sequence[int]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.lines)

    def place(self, row: int) -> str:
        """Return where a row is, for messages that stay with the owner of the table."""
        return f"{self.source}, line {self.lines[row]}"


def read_csv(path: Path | str) -> Table:
    """Read a CSV file with a header. Lines without any cell are left out.

    Args:
        path: The file, in UTF-8.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "north.csv")
    ...     _ = file.write_text(chr(10).join(["age,ward", "40, icu", "50,"]))
    ...     read_csv(file).columns
    {'age': ['40', '50'], 'ward': ['icu', '']}
    """
    path = Path(path)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(f"{path}: larger than {_MAX_BYTES >> 30} GiB.")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as CSV ({error}).") from error
    return read_csv_text(text, path)


def read_csv_text(text: str, path: Path | str) -> Table:
    """Return the table of the text of a CSV file."""
    path = Path(path)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        rows = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
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
    columns = {column: [row[i].strip() for _, row in body] for i, column in enumerate(header)}
    return Table(path.stem, str(path), columns, [line for line, _ in body])


def as_table(frame: Any, name: str = "frame") -> Table:
    """Return a table from the path of a CSV file, a pandas or polars data frame, a dict of columns or a list of dicts.

    Args:
        frame: The rows. None and NaN are missing values.
        name: Name for messages.

    >>> as_table([{"age": 40, "ward": "icu"}, {"age": None, "ward": "surgery"}]).columns
    {'age': ['40', ''], 'ward': ['icu', 'surgery']}
    """
    if isinstance(frame, Table):
        return frame
    if isinstance(frame, (str, Path)):
        return read_csv(frame)
    if isinstance(frame, Sequence) and frame and all(isinstance(row, Mapping) for row in frame):
        frame = {
            column: [row.get(column) for row in frame] for column in dict.fromkeys(k for row in frame for k in row)
        }
    names = list(frame) if isinstance(frame, Mapping) else getattr(frame, "columns", None)
    if names is None or not len(names):
        raise DataError(
            f"{name}: {short_repr(frame)}: expected the path of a CSV file, a data frame, a dict of columns or a list "
            "of dicts."
        )
    columns = {str(column): [_text(value) for value in frame[column]] for column in names}
    sizes = {len(cells) for cells in columns.values()}
    if len(sizes) != 1 or sizes == {0}:
        raise DataError(f"{name}: columns of {sorted(sizes)} rows: expected the same number, at least 1.")
    return Table(name, name, columns, range(1, sizes.pop() + 1))


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)) or _is_missing(value):
        return ""
    if isinstance(value, float):
        return repr(float(value))  # numpy's float64 is a float with another repr
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    return str(value).strip()


def _is_missing(value: Any) -> bool:
    """Return whether a value is not equal to itself: NaN of NumPy, NaT and NA of pandas."""
    try:
        return bool(value != value)
    except (TypeError, ValueError):  # pandas.NA has no truth value
        return type(value).__name__ == "NAType"
