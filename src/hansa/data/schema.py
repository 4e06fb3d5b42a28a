"""The schema of tables: how columns become inputs and targets, which rows are for testing, and how files are written.

One file says it all, written by hand or by ``hansa data schema``. Only means and deviations may be open in it: they
follow from exact sums over the training rows of all tables, whose order and division do not matter.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from fractions import Fraction
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch

from hansa.core.errors import short_repr, suggestion
from hansa.core.keys import Key
from hansa.data.sources import DataError

if TYPE_CHECKING:
    import numpy.typing as npt

log = logging.getLogger("hansa")

Kind: TypeAlias = Literal["number", "category", "ordinal", "date", "text_length", "target", "id"]
Missing: TypeAlias = Literal["refuse", "indicator", "constant", "mean"]
Scale: TypeAlias = Literal["none", "site", "pooled"]
Unknown: TypeAlias = Literal["refuse", "zero"]
CHOICES = {
    "kind": get_args(Kind), "missing": get_args(Missing), "scale": get_args(Scale), "unknown": get_args(Unknown),
    "target": (None, "class", "number"),
}  # fmt: skip
_NUMERIC = ("missing", "fill", "scale", "mean", "std")
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "number": _NUMERIC,
    "text_length": _NUMERIC,
    "date": (*_NUMERIC, "format"),
    "ordinal": (*_NUMERIC, "categories", "spellings"),
    "category": ("missing", "fill", "categories", "spellings", "unknown"),
    "target": ("target", "categories", "spellings"),
    "id": (),
}
"""The arguments of a column by its kind."""
FORMAT = 1
MISSING_TEXTS = ("", "?", "NA", "N/A", "NaN", "nan", "null")
"""Cells with these texts are missing values, unless the schema lists others."""
MAX_CATEGORIES, MAX_COLUMNS = 10_000, 100_000
_MAX_SCHEMA_BYTES, _MAX_TABLE_BYTES = 16 << 20, 2 << 30

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


# ---- what a schema says


def category_text(value: object) -> str:
    """Return the text of a category: stripped, and integers without ``.0``.

    >>> category_text(" icu "), category_text("2.0"), category_text(2.0), category_text("02")
    ('icu', '2', '2', '02')
    """
    text = str(value).strip()
    match = _WHOLE.fullmatch(text)
    return text if match is None else match.group(1)


_WHOLE = re.compile(r"(-?[0-9]{1,18})\.0*")


def _category_texts(values: Any) -> tuple[str, ...]:
    """Return a list of categories as texts."""
    valid = isinstance(values, (list, tuple))
    if not valid or any(value is None or isinstance(value, (bool, list, tuple, dict)) for value in values):
        expected = "a list of texts. Quote it: YAML reads yes, no, true, false and null otherwise"
        raise DataError(f"schema: {short_repr(values)}: expected {expected}.")
    return tuple(map(category_text, values))


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column of a table and its encoding.

    A number, the rank of an ordinal value, the days of a date since 1970 and the length of a text become one input,
    scaled as (x - mean) / std. A category becomes one 0/1 input per entry of ``categories``.

    Args:
        name: Name in the header.
        kind: "number", "category", "ordinal", "date", "text_length", "target", or "id" for a column that is not used.
        categories: The values of a category in the order of the inputs, of an ordinal column in increasing order, of a
            target the classes.
        missing: What a missing value becomes: "refuse" raises an error; "constant" is ``fill``; "mean" is the mean;
            "indicator" is ``fill`` (by default the mean if the column is scaled, otherwise 0) and adds an input that is
            1 where the value is missing. A missing category has no 0/1 input set with "indicator".
        fill: The constant for missing values: a number, or a category.
        scale: "none"; "pooled" by mean and deviation of the training rows of all sites; "site" by those of each site.
        mean: Mean of the training rows of all sites, for "pooled" and for ``missing="mean"``. None: from exact sums.
        std: Their standard deviation.
        unknown: For a category that is not listed: "refuse" raises an error, "zero" sets no 0/1 input and counts it.
        target: "class" or "number", for the kind "target".
        format: Format of dates, as in ``datetime.strptime``; by default ISO 8601.
        spellings: Other spellings of categories, such as ``{"M": ["m", "male"]}``.

    >>> TableColumn("ward", "category", ("icu", "surgery"), missing="indicator").inputs
    ('ward=icu', 'ward=surgery', 'ward is missing')
    """

    name: str
    kind: Kind
    categories: tuple[str, ...] | None = None
    missing: Missing = "refuse"
    fill: float | str | None = None
    scale: Scale = "none"
    mean: float | None = None
    std: float | None = None
    unknown: Unknown = "refuse"
    target: Literal["class", "number"] | None = None
    format: str | None = None
    spellings: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        kind, missing = self.kind, self.missing
        is_name = isinstance(self.name, str) and bool(self.name.strip()) and len(self.name) <= 500
        self._require(is_name, "name", "a text of at most 500 characters")
        for argument, choices in CHOICES.items():
            self._require(getattr(self, argument) in choices, argument, f"one of {', '.join(map(str, choices))}")
        for entry in fields(self)[2:]:
            is_default = getattr(self, entry.name) == entry.default
            self._require(is_default or entry.name in ARGUMENTS[kind], entry.name, f"its default for the kind {kind}")
        if kind == "target" and self.target is None:
            object.__setattr__(self, "target", "class")
        for argument in ("mean", "std") if kind == "category" else ("mean", "std", "fill"):
            if (value := getattr(self, argument)) is not None:
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
                self._require(is_number, argument, "a finite number")
                object.__setattr__(self, argument, float(value))
        if kind == "category" and self.fill is not None:
            object.__setattr__(self, "fill", category_text(self.fill))
        if self.lists_categories:
            self._read_categories()
        pooled = self.scale == "pooled"
        fills = missing == "constant" or (missing == "indicator" and kind != "category")
        for argument, is_valid, expected in (
            ("format", self.format is None or isinstance(self.format, str), "a format of dates"),
            ("categories", self.lists_categories or self.categories is None, "none for a number"),
            ("mean", self.mean is None or self.uses_moments, "none: it is neither scaled pooled nor filled with it"),
            ("std", self.std is None or (self.std > 0 and pooled), "a number above 0, with scale: pooled"),
            ("missing", missing != "mean" or kind != "category", "refuse, indicator or constant for a category"),
            ("fill", self.fill is not None or missing != "constant", "the constant for missing values"),
            ("fill", self.fill is None or fills, f"none with missing: {missing}"),
            ("fill", kind != "category" or self.fill in (None, *(self.categories or ())), "one of the categories"),
        ):
            self._require(is_valid, argument, expected)

    def _read_categories(self) -> None:
        """Check categories and their other spellings, and keep them as texts."""
        order = "in increasing order" if self.kind == "ordinal" else "which `hansa data schema` finds in a table"
        self._require(self.categories is not None, "categories", f"a list of the values, {order}")
        categories = _category_texts(self.categories)
        pairs = self.spellings.items() if isinstance(self.spellings, Mapping) else self.spellings
        spellings = tuple((category_text(value), _category_texts(alternatives)) for value, alternatives in pairs)
        texts = [*categories, *(text for _, alternatives in spellings for text in alternatives)]
        are_known = {value for value, _ in spellings} <= set(categories)
        is_valid = 1 <= len(categories) <= MAX_CATEGORIES and are_known and len(set(texts)) == len(texts)
        expected = f"1 to {MAX_CATEGORIES} values, and other spellings of them: every text once"
        self._require(is_valid, "categories", expected)
        object.__setattr__(self, "categories", categories)
        object.__setattr__(self, "spellings", spellings)

    def _require(self, is_valid: bool, argument: str, expected: str) -> None:
        if not is_valid:
            value = getattr(self, argument)
            text = f"schema: column {short_repr(self.name)}: {argument}={short_repr(value)}: expected {expected}."
            raise DataError(text, component="TableColumn", argument=argument, value=value)

    @property
    def lists_categories(self) -> bool:
        """Whether the column has a list of categories or classes."""
        return self.kind in ("category", "ordinal") or self.target == "class"

    @property
    def uses_moments(self) -> bool:
        """Whether the encoding needs the mean or deviation over all sites."""
        return self.scale == "pooled" or (self.missing == "mean" and self.scale == "none")

    @property
    def is_open(self) -> bool:
        """Whether its mean or its deviation is still to be computed."""
        return self.uses_moments and (self.mean is None or (self.scale == "pooled" and self.std is None))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs that the column becomes."""
        if self.kind in ("id", "target"):
            return ()
        names = (self.name,) if self.kind != "category" else tuple(f"{self.name}={c}" for c in self.categories or ())
        return (*names, f"{self.name} is missing") if self.missing == "indicator" else names


@dataclass(frozen=True, slots=True)
class SplitColumn:
    """The column that says which rows are for testing.

    Args:
        column: Its name.
        test: Values of test rows.
        train: Values of training rows; by default all others.

    >>> SplitColumn("fold", test=("test",)).train is None
    True
    """

    column: str
    test: tuple[str, ...] = ("test",)
    train: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for argument in ("test", "train"):
            if (value := getattr(self, argument)) is not None:
                texts = _category_texts(value if isinstance(value, (list, tuple)) else [value])
                object.__setattr__(self, argument, texts)
        if not isinstance(self.column, str) or not self.column or set(self.test) & set(self.train or ()):
            raise DataError(f"schema: {self}: expected the name of a column, and different values of train and test.")


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of a table in order, and how they become inputs and targets.

    Args:
        columns: The columns. Columns of a table that are not listed are ignored.
        split: The column that says which rows are for testing.
        missing_values: Texts of cells that are missing values, besides empty ones.
        name: Name for messages.
        delimiter: What separates the cells of a file.
        decimal: The decimal mark of numbers, "." or ",".
        encoding: The encoding of files.

    >>> schema = Schema((TableColumn("age", "number"), TableColumn("ward", "category", ("icu", "surgery")), TableColumn("y", "target", ("0", "1"))))
    >>> schema.inputs, schema.classes, schema.is_open
    (('age', 'ward=icu', 'ward=surgery'), 2, False)
    >>> Schema.from_json(schema.to_json()) == schema, len(schema.sha256)
    (True, 64)
    """  # fmt: skip # noqa: E501

    columns: tuple[TableColumn, ...]
    split: SplitColumn | None = None
    missing_values: tuple[str, ...] = MISSING_TEXTS
    name: str = field(default="table", compare=False)
    delimiter: str = ","
    decimal: Literal[".", ","] = "."
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        is_list = isinstance(self.missing_values, (list, tuple))
        texts = [str(text) if isinstance(text, (int, float)) else text for text in ("", *self.missing_values)]
        are_texts = is_list and all(text is None or (isinstance(text, str) and len(text) <= 100) for text in texts)
        if are_texts:
            object.__setattr__(self, "missing_values", tuple(dict.fromkeys(text or "" for text in texts)))
        names = [column.name for column in self.columns] + ([] if self.split is None else [self.split.column])
        name, times = Counter(names).most_common(1)[0] if names else ("", 0)
        targets = [column.name for column in self.columns if column.kind == "target"]
        for is_valid, problem in (
            (self.columns, "columns: expected at least one"),
            (times <= 1, f"column {short_repr(name)} is listed twice"),
            (len(targets) <= 1, f"{len(targets)} targets ({', '.join(targets[:5])}): expected one"),
            (self.inputs, "no column of inputs: expected at least one besides the target"),
            (are_texts, f"missing_values={short_repr(self.missing_values)}: expected a list of texts"),
            (self.decimal in (".", ","), f"decimal={short_repr(self.decimal)}: expected '.' or ','"),
        ):
            if not is_valid:
                raise DataError(f"schema: {problem}.")

    def __iter__(self) -> Iterator[TableColumn]:
        return iter(self.columns)

    def __getitem__(self, name: str) -> TableColumn:
        return {column.name: column for column in self.columns}[name]

    @property
    def target(self) -> TableColumn | None:
        """The column of targets."""
        return next((column for column in self.columns if column.kind == "target"), None)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs of a model, in order."""
        return tuple(name for column in self.columns for name in column.inputs)

    @property
    def classes(self) -> int | None:
        """Number of classes, if the targets are classes."""
        target = self.target
        return None if target is None or target.categories is None else len(target.categories)

    @property
    def is_open(self) -> bool:
        """Whether a mean or a deviation is still to be computed."""
        return any(column.is_open for column in self.columns)

    @property
    def sha256(self) -> str:
        """SHA-256 of the canonical JSON form, without the name."""
        content = self.to_dict()
        del content["name"]
        return hashlib.sha256(canonical_json(content).encode()).hexdigest()

    def provisional(self) -> Schema:
        """Return the schema with mean 0 and deviation 1 where they are open: of the same shape, to check tables by."""
        return complete(self, [{column.name: Moments(1, Fraction(0), Fraction(0)) for column in self}])

    def to_dict(self) -> dict[str, Any]:
        """Return the schema as plain data, without defaults."""
        content = {"hansa_schema": FORMAT, "name": self.name, **_non_default_fields(self)}
        return dict(json.loads(json.dumps(content, default=_non_default_fields)))

    def to_json(self) -> str:
        """Return the canonical JSON form."""
        return canonical_json(self.to_dict())

    def to_yaml(self) -> str:
        """Return YAML with one line per column, for reading and editing."""
        import yaml  # here, because most tasks need none

        content = self.to_dict()
        columns = content.pop("columns")
        dump: Any = partial(yaml.safe_dump, sort_keys=False, allow_unicode=True)
        lines = [f"  - {dump(column, default_flow_style=True, width=math.inf).strip()}\n" for column in columns]
        return f"{dump(content)}columns:\n{''.join(lines)}"

    @classmethod
    def from_dict(cls, content: object, source: str = "schema") -> Schema:
        """Return the schema of plain data, as read from JSON or YAML."""
        if not isinstance(content, Mapping) or content.get("hansa_schema") != FORMAT:
            raise DataError(f"{source}: not a schema: expected a mapping with hansa_schema: {FORMAT}.")
        arguments: dict[str, Any] = {name: value for name, value in content.items() if name != "hansa_schema"}
        try:
            arguments["columns"] = [TableColumn(**column) for column in arguments.get("columns", ())]
            if (split := arguments.get("split")) is not None:
                arguments["split"] = SplitColumn(split) if isinstance(split, str) else SplitColumn(**split)
            return cls(**arguments)
        except DataError as error:
            raise DataError(f"{source}: {error}" if source != "schema" else str(error)) from error
        except (TypeError, ValueError, OverflowError) as error:  # unknown and missing keys, values of other types
            keys = ", ".join(entry.name for entry in fields(TableColumn))
            raise DataError(f"{source}: not a schema: {str(error)[:200]}. Keys of a column: {keys}.") from error

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """Return the schema of its JSON form."""
        return cls.from_dict(_parse(json.loads, text, "schema"))

    @classmethod
    def from_yaml(cls, text: str, source: str = "schema") -> Schema:
        """Return the schema of its YAML form."""
        import yaml

        return cls.from_dict(_parse(yaml.safe_load, text, source), source)

    @classmethod
    def load(cls, path: Path | str) -> Schema:
        """Load a schema from a YAML (or JSON) file."""
        return cls.from_yaml(_read_text(Path(path), "utf-8", _MAX_SCHEMA_BYTES, "a schema"), str(path))

    def save(self, path: Path | str) -> Path:
        """Write the schema to a YAML file."""
        Path(path).write_text(self.to_yaml().rstrip() + "\n", encoding="utf-8")
        return Path(path)


def as_schema(value: Schema | Path | str | Mapping[str, Any]) -> Schema:
    """Return a schema that is given as itself, as its plain data, or as the path of its file."""
    if isinstance(value, Schema):
        return value
    return Schema.load(value) if isinstance(value, (str, Path)) else Schema.from_dict(value)


def _non_default_fields(record: Any) -> dict[str, Any]:
    """Return the fields of a part of a schema that differ from their defaults."""
    values = ((entry, getattr(record, entry.name)) for entry in fields(record))
    return {entry.name: value for entry, value in values if value != entry.default}


def canonical_json(content: object) -> str:
    """Return the one JSON text of plain data, for a hash."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _parse(parse: Callable[[str], object], text: str, source: str) -> object:
    try:
        return parse(text)
    except Exception as error:  # of the parser
        raise DataError(f"{source}: not the text of a schema ({str(error)[:200]}).") from error


def _read_text(path: Path, encoding: str, limit: int, content: str) -> str:
    try:
        if path.stat().st_size > limit:
            raise ValueError(f"it is larger than {limit >> 20} MiB")
        return path.read_text(encoding=encoding)
    except (OSError, ValueError, LookupError, TypeError) as error:  # also an unknown encoding
        raise DataError(f"{path}: cannot be read as {content} ({str(error)[:200]}).") from error


# ---- tables of texts


@dataclass(frozen=True, slots=True)
class Table:
    """The cells of a table as stripped texts by column, and the line of every row in the file.

    The name is that of the client, which is the file's without its ending; the source is for messages.

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

    def cells(self, column: str) -> Sequence[str]:
        """Return the cells of a column, or raise."""
        if column not in self.columns:
            text = f"{self.source}: no column {column!r}. {suggestion(column, self.columns)}"
            raise SchemaMisfitError(text, "column-missing", column)
        return self.columns[column]

    def misfit(self, column: str, row: int, problem: str, code: str) -> SchemaMisfitError:
        """Return the error for a cell, with its line and value, which stay with the owner of the table."""
        cell = self.columns[column][row]
        value = short_repr(cell) if cell else "empty"
        text = f"{self.source}, line {self.lines[row]}: {column!r} is {value}: {problem}."
        return SchemaMisfitError(text, code, column)


def read_csv(path: Path | str, schema: Schema | None = None, text: str | None = None) -> Table:
    """Read a CSV file with a header, or its text. Lines without any cell are left out, and lines of another length
    refused. The schema states the delimiter and the encoding; by default a comma and UTF-8.

    >>> read_csv("north.csv", text=chr(10).join(["age,ward", "40, icu", "50,"])).columns
    {'age': ['40', '50'], 'ward': ['icu', '']}
    """
    path = Path(path)
    delimiter, encoding = (",", "utf-8") if schema is None else (schema.delimiter, schema.encoding)
    if text is None:
        text = _read_text(path, "utf-8-sig" if encoding == "utf-8" else encoding, _MAX_TABLE_BYTES, "CSV")
    try:  # pandas would fill up short lines without a word
        reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
        rows = [(reader.line_num, row) for row in reader if row]
    except (csv.Error, TypeError, ValueError) as error:  # also a delimiter of several characters
        raise DataError(f"{path}: cannot be read as CSV ({error}).") from error
    if len(rows) < 2:
        raise DataError(f"{path}: expected a header and at least one row; found {len(rows)} lines.")
    header, body = [column.strip() for column in rows[0][1]], rows[1:]
    if len(header) > MAX_COLUMNS:
        raise DataError(f"{path}: {len(header)} columns: expected at most {MAX_COLUMNS}.")
    if len(set(header)) < len(header) or "" in header:
        problem = "without a name" if "" in header else f"twice: {short_repr(Counter(header).most_common(1)[0][0])}"
        raise DataError(f"{path}: the header has a column {problem}.")
    for line, row in body:
        if len(row) != len(header):
            raise DataError(f"{path}, line {line}: {len(row)} values for {len(header)} columns.")
    columns = zip(header, zip(*(row for _, row in body), strict=True), strict=True)
    cells = {column: [cell.strip() for cell in texts] for column, texts in columns}
    return Table(path.stem, str(path), cells, [line for line, _ in body])


def as_table(frame: Any, schema: Schema | None = None, name: str = "frame") -> Table:
    """Return a table from the path of a CSV file, a pandas or polars data frame, a dict of columns or a list of dicts.

    None and NaN are missing values.

    >>> as_table([{"age": 40, "ward": "icu"}, {"age": None, "ward": "surgery"}]).columns
    {'age': ['40', ''], 'ward': ['icu', 'surgery']}
    """
    if isinstance(frame, Table):
        return frame
    if isinstance(frame, (str, Path)):
        return read_csv(frame, schema)
    if isinstance(frame, Sequence) and frame and all(isinstance(row, Mapping) for row in frame):
        names = dict.fromkeys(column for row in frame for column in row)
        frame = {column: [row.get(column) for row in frame] for column in names}
    columns = list(frame) if isinstance(frame, Mapping) else getattr(frame, "columns", ())
    decimal = "." if schema is None else schema.decimal
    cells = {str(column): [_text(value, decimal) for value in frame[column]] for column in columns}
    sizes = {len(texts) for texts in cells.values()}
    if len(sizes) != 1 or sizes == {0}:
        expected = "a CSV file, a data frame, or dicts of columns or rows, with the same number of rows, at least 1"
        raise DataError(f"{name}: {short_repr(frame)}: expected {expected}.")
    return Table(name, name, cells, range(1, sizes.pop() + 1))


def _text(value: Any, decimal: str) -> str:
    import pandas  # here, because files need none

    if pandas.isna(value) is True:
        return ""
    if isinstance(value, float):
        return repr(float(value)).replace(".", decimal)  # numpy's float64 is a float with another repr
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value).strip()


# ---- exact moments


@dataclass(frozen=True, slots=True)
class Moments:
    """Number, sum and sum of squares of float64 values, exact.

    A float is an integer times a power of two, so sums are fractions without rounding: the merged moments of sites are
    those of all rows, bit for bit, in any order.

    >>> whole = Moments.of(np.array([0.1, 0.2, 0.3]))
    >>> Moments.of(np.array([0.3])).merge(Moments.of(np.array([0.2, 0.1]))) == whole
    True
    >>> Moments.of(np.array([1.0, 3.0])).mean_and_std()
    (2.0, 1.0)
    """

    count: int
    total: Fraction
    squares: Fraction

    @classmethod
    def of(cls, values: npt.NDArray[np.float64]) -> Moments:
        """Return the moments of finite values."""
        mantissas, exponents = np.frexp(np.asarray(values, np.float64))
        integers = np.ldexp(mantissas, 53).astype(np.int64)  # values = whole * 2**(exponents - 53)
        total = squares = Fraction(0)
        for exponent in np.unique(exponents):
            group = integers[exponents == exponent].tolist()
            unit = Fraction(2) ** (int(exponent) - 53)
            total += sum(group) * unit
            squares += sum(value * value for value in group) * unit * unit
        return cls(len(values), total, squares)

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the values of both."""
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    def mean_and_std(self) -> tuple[float, float]:
        """Return the mean and the standard deviation over n, correctly rounded; a deviation of 0 is returned as 1."""
        mean = self.total / self.count
        try:
            return float(mean), math.sqrt(float(self.squares / self.count - mean * mean)) or 1.0
        except OverflowError:
            raise DataError("moments: the variance is too large for float64: rescale the column.") from None

    def to_json(self) -> list[Any]:
        """Return the moments as plain data: the count, and each sum as ``HEX/EXPONENT``, numerator / 2**exponent."""
        sums = (f"{value.numerator:x}/{value.denominator.bit_length() - 1}" for value in (self.total, self.squares))
        return [self.count, *sums]

    @classmethod
    def from_json(cls, content: Any) -> Moments:
        """Return the moments of plain data; impossible ones are refused."""
        try:
            count, *texts = content
            matches = [match for text in texts if (match := _DYADIC.fullmatch(text))]
            total, squares = (Fraction(int(match[1], 16), 1 << int(match[2])) for match in matches)
            is_possible = type(count) is int and 1 <= count < 1 << 48 and squares * count >= total * total
        except (TypeError, ValueError):
            is_possible = False
        if not is_possible:
            raise DataError("moments: expected the count, sum and sum of squares of some floats.")
        return cls(count, total, squares)


_DYADIC = re.compile("(-?[0-9a-f]{1,2400})/([0-4]?[0-9]{1,3})")


def table_moments(schema: Schema, table: Table, test: float = 0.0, seed: int = 0) -> dict[str, Moments]:
    """Return the exact moments of the columns that are open in a schema, over the training rows of a table."""
    is_test = choose_test_rows(schema, table, test, seed)
    return {column.name: column_moments(schema, column, table, ~is_test) for column in schema if column.is_open}


def column_moments(schema: Schema, column: TableColumn, table: Table, rows: Mask) -> Moments:
    """Return the exact moments of a numeric column over some rows, without missing values."""
    numbers, missing = read_column(schema, column, table)
    values = numbers[rows & ~missing]
    if not len(values):
        text = f"{table.source}: {column.name!r} has no value in a training row: its mean is unknown."
        raise SchemaMisfitError(text, "too-few-rows", column.name)
    return Moments.of(values)


def complete(schema: Schema, moments: Sequence[Mapping[str, Moments]]) -> Schema:
    """Return the schema with open means and deviations from the moments of all tables. Their order does not matter.

    >>> draft = Schema((TableColumn("age", "number", scale="pooled"),))
    >>> north, south = as_table({"age": [40, 50]}), as_table({"age": [60]})
    >>> complete(draft, [table_moments(draft, table) for table in (north, south)])["age"].mean
    50.0
    """

    def close(column: TableColumn) -> TableColumn:
        mean, std = reduce(Moments.merge, (sums[column.name] for sums in moments)).mean_and_std()
        return replace(column, mean=mean, std=std if column.scale == "pooled" else None)

    return replace(schema, columns=tuple(close(column) if column.is_open else column for column in schema))


# ---- rows become inputs and targets


class CellCounts(NamedTuple):
    """How many cells of a column are missing, are spelled otherwise than the schema's categories, or are unknown."""

    missing: int = 0
    spelled: int = 0
    unknown: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in zip(self._fields, self, strict=True) if count)


@dataclass(frozen=True, slots=True, eq=False)
class EncodedTable:
    """Inputs [rows, inputs] in float32, targets, which rows are for testing, the statistics of the site, and the counts
    of the columns with cells that are missing, spelled otherwise or unknown."""

    inputs: npt.NDArray[np.float32]
    targets: npt.NDArray[Any] | None
    is_test: Mask
    statistics: Statistics
    counts: Mapping[str, CellCounts]


@dataclass(frozen=True, slots=True, eq=False)
class TableEncoding:
    """How tables became inputs: a schema, and the statistics of each client where columns are scaled by site.

    Args:
        schema: The schema.
        statistics: By client name, the mean and deviation of each column that is scaled by site.
        counts: By client name, the counts of missing, otherwise spelled and unknown cells of its columns.

    >>> encoding = TableEncoding(Schema((TableColumn("age", "number", scale="pooled", mean=50.0, std=10.0),)))
    >>> encoding.inputs({"age": [40, 65]}).tolist()
    [[-1.0], [1.5]]
    """

    schema: Schema
    statistics: Mapping[str, Statistics] = field(default_factory=dict)
    counts: Mapping[str, Mapping[str, CellCounts]] = field(default_factory=dict)

    def inputs(self, frame: Any, client: str | None = None) -> torch.Tensor:
        """Return the inputs of a model for the rows of a frame or CSV file; targets are not needed.

        Args:
            frame: A data frame, a dict of columns, a list of dicts, or the path of a CSV file.
            client: The client whose statistics scale the columns with ``scale: site``.
        """
        scaled = [column.name for column in self.schema if column.scale == "site"]
        if scaled and client not in self.statistics:
            names = ", ".join(sorted(self.statistics))
            where = f"Known: {names}." if names else "They stay at the sites: predict there."
            expected = f"expected the client whose statistics are used, got {client!r}. {where}"
            raise SchemaMisfitError(f"{scaled[0]!r} is scaled by site: {expected}", "scale-unknown", scaled[0])
        statistics = self.statistics.get(client, {}) if client is not None else {}
        return torch.from_numpy(encode(self.schema, as_table(frame, self.schema), statistics).inputs)

    def targets(self, frame: Any) -> torch.Tensor | None:
        """Return the targets of a frame, or None if it has no column of targets."""
        targets = _read_targets(self.schema, as_table(frame, self.schema))
        return None if targets is None else torch.from_numpy(targets)


def encode(
    schema: Schema, table: Table, statistics: Statistics | None = None, *,
    training: bool = False, test: float = 0.0, seed: int = 0,
) -> EncodedTable:  # fmt: skip
    """Encode a table: new rows with known statistics, with targets if they are there, or a client's rows to train on.

    Arithmetic is in float64, column by column and row by row. In training the statistics of columns with ``scale:
    site`` are those of the training rows, and targets are needed. Without a split column, a fraction of the rows
    (``test``) is for testing, by the seed.
    """
    targets = _read_targets(schema, table, required=training)
    is_test = choose_test_rows(schema, table, test, seed) if training else np.zeros(table.rows, bool)
    statistics = dict(statistics or {})
    blocks, counts = [], {}
    for column in schema:
        if column.is_open:
            text = f"schema: the mean or deviation of {column.name!r} is still open."
            raise SchemaMisfitError(text, "not-agreed", column.name)
        if training and column.scale == "site":
            statistics[column.name] = column_moments(schema, column, table, ~is_test).mean_and_std()
        if column.inputs:
            block, cell_counts = _encode_column(schema, column, table, statistics)
            blocks.append(block)
            if any(cell_counts):
                counts[column.name] = cell_counts
    return EncodedTable(np.concatenate(blocks, axis=1), targets, is_test, statistics, counts)


def choose_test_rows(schema: Schema, table: Table, fraction: float, seed: int) -> Mask:
    """Return a mask of test rows: by the split column, or a fraction of the rows, rounded down, by the seed."""
    split = schema.split
    if split is None:
        is_test = np.zeros(table.rows, bool)
        draw = Key(seed).child("csv test", table.name).numpy()
        is_test[draw.permutation(table.rows)[: math.floor(Fraction(repr(float(fraction))) * table.rows)]] = True
    else:
        cells = [category_text(cell) for cell in table.cells(split.column)]
        for row, cell in enumerate(cells):
            is_train = cell not in schema.missing_values if split.train is None else cell in split.train
            if not is_train and cell not in split.test:
                train = ("any value",) if split.train is None else split.train
                expected = f"expected one of {', '.join((*train, *split.test))}"
                raise table.misfit(split.column, row, expected, "split-value")
        is_test = np.array([cell in split.test for cell in cells])
    if is_test.all():
        column = "" if split is None else split.column
        raise SchemaMisfitError(f"{table.source}: no training rows, only test rows.", "no-training-rows", column)
    return is_test


def parse_number(cell: str, decimal: str) -> float | None:
    """Return the number of a cell, or None if it is none."""
    try:
        return float(cell if decimal == "." else cell.replace(".", "?").replace(decimal, "."))
    except ValueError:
        return None


def parse_date(cell: str, form: str | None = None) -> float | None:
    """Return the days since 1970 of a cell, or None if it is no date."""
    try:
        date = datetime.fromisoformat(cell) if form is None else datetime.strptime(cell, form)
    except (ValueError, OverflowError):
        return None
    date = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
    return (date - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() / 86400


def read_column(schema: Schema, column: TableColumn, table: Table) -> tuple[Floats, Mask]:
    """Return the cells of a column as numbers in float64, and which are missing (0 there). Categories are numbered in
    the order of the schema; an unknown one that is not refused is -1."""
    cells = table.cells(column.name)
    missing_texts = set(schema.missing_values)
    missing = np.array([cell in missing_texts for cell in cells])
    if column.missing == "refuse" and missing.any():
        problem = "a missing value. Fill it in, leave out the row, or let the schema say what it becomes (missing)"
        raise table.misfit(column.name, int(missing.argmax()), problem, "value-missing")
    parse: Callable[[str], float | None]
    if column.lists_categories:
        codes = {text: code for code, text in enumerate(column.categories or ())}
        codes |= {text: codes[value] for value, alternatives in column.spellings for text in alternatives}
        parse, code = lambda cell: codes.get(category_text(cell)), "unknown-category"
        problem = f"the schema has the categories {short_repr(column.categories)}. Add it there, or set unknown: zero"
    elif column.kind == "date":
        parse, code = partial(parse_date, form=column.format), "not-a-date"
        problem = "not a date of the format of the schema"
    else:
        parse = len if column.kind == "text_length" else partial(parse_number, decimal=schema.decimal)
        problem, code = "not a number", "not-a-number"
    numbers = np.zeros(len(cells))
    for row in np.flatnonzero(~missing).tolist():
        number = parse(cells[row])
        if number is None and column.unknown == "refuse":
            raise table.misfit(column.name, row, problem, code)
        numbers[row] = -1.0 if number is None else number
    if not np.isfinite(numbers).all():
        raise table.misfit(column.name, int(np.isfinite(numbers).argmin()), "not finite", "not-finite")
    return numbers, missing


def _encode_column(
    schema: Schema, column: TableColumn, table: Table, statistics: Statistics
) -> tuple[npt.NDArray[np.float32], CellCounts]:
    """Return the inputs of one column, [rows, inputs], and the counts of its cells."""
    numbers, missing = read_column(schema, column, table)
    cell_counts = CellCounts(missing=int(missing.sum()))
    if column.kind == "category":
        categories = column.categories or ()
        unknown = int((numbers < 0).sum())
        if unknown:
            log.warning("%s: %d of %d values of %r are not in the schema: no input says what they are",
                        table.source, unknown, table.rows, column.name)  # fmt: skip
        texts, canonical = map(category_text, table.cells(column.name)), set(categories)
        respelled = sum(text not in canonical for text, gap in zip(texts, missing, strict=True) if not gap)
        cell_counts = CellCounts(cell_counts.missing, respelled - unknown, unknown)
        fill = -1.0 if column.fill is None else categories.index(str(column.fill))
        numbers = np.where(missing, fill, numbers)
        block = (numbers[:, None] == np.arange(len(categories))).astype(np.float64)
    else:
        mean, std = statistics[column.name] if column.scale == "site" else ((column.mean or 0.0), (column.std or 1.0))
        by_mean = column.missing == "mean" or column.scale != "none"
        fill = float(column.fill) if column.fill is not None else mean if by_mean else 0.0
        numbers = np.where(missing, fill, numbers)
        block = (numbers if column.scale == "none" else (numbers - mean) / std)[:, None]
    if column.missing == "indicator":
        block = np.column_stack([block, missing])
    with np.errstate(over="ignore"):
        inputs = block.astype(np.float32)
    if not (finite := np.isfinite(inputs).all(axis=1)).all():
        raise table.misfit(column.name, int(finite.argmin()), "too large for float32 after scaling", "not-finite")
    return inputs, cell_counts


def _read_targets(schema: Schema, table: Table, *, required: bool = False) -> npt.NDArray[Any] | None:
    """Return class numbers or float32 numbers; None if the table has no targets and none are required."""
    column = schema.target
    if column is None:
        if required:
            raise DataError("schema: no column of the kind target, as training needs.")
        return None
    if not required and any(cell in schema.missing_values for cell in table.columns.get(column.name, ("",))):
        return None  # rows to predict, some of which have no target yet
    numbers, _ = read_column(schema, column, table)
    return numbers.astype(np.int64 if column.target == "class" else np.float32)
