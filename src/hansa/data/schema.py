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
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias, get_args

import numpy as np
import torch

from hansa.core.errors import short_repr, suggestion
from hansa.core.keys import Key
from hansa.data.files import DataError

if TYPE_CHECKING:
    import numpy.typing as npt

log = logging.getLogger("hansa")

Kind: TypeAlias = Literal["number", "category", "ordinal", "date", "text_length", "target", "id"]
Missing: TypeAlias = Literal["refuse", "indicator", "constant", "mean"]
Scale: TypeAlias = Literal["none", "site", "pooled"]
Unknown: TypeAlias = Literal["refuse", "zero"]
CHOICES = {"kind": get_args(Kind), "missing": get_args(Missing), "scale": get_args(Scale), "unknown": get_args(Unknown)}
NUMERIC = ("number", "ordinal", "date", "text_length")
"""Kinds that become one number, which can be scaled."""
FORMAT = 1
MISSING_TEXTS = ("", "?", "NA", "N/A", "NaN", "nan", "null")
"""Cells with these texts are missing values, unless the schema lists others."""
MAX_CATEGORIES, MAX_COLUMNS = 10_000, 100_000
_MAX_SCHEMA_BYTES, _MAX_TABLE_BYTES = 16 << 20, 2 << 30
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

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
        for argument, allowed in CHOICES.items():
            if (value := getattr(self, argument)) not in allowed:
                self._invalid(argument, f"one of {', '.join(allowed)}", suggestion(str(value), allowed))
        if self.kind == "target" and self.target is None:
            object.__setattr__(self, "target", "class")
        for argument in ("mean", "std") if self.kind == "category" else ("mean", "std", "fill"):
            if (value := getattr(self, argument)) is not None:
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                    self._invalid(argument, "a finite number")
                object.__setattr__(self, argument, float(value))
        if self.lists_categories:
            self._read_categories()
        if self.kind == "category" and self.fill is not None:
            object.__setattr__(self, "fill", category_text(self.fill))
        is_text, kind = isinstance(self.name, str), self.kind
        rules = {
            ("name", "a text of at most 500 characters"): is_text and bool(self.name.strip()) and len(self.name) <= 500,
            ("target", "class or number for the kind target, and none for others"):
                self.target in (("class", "number") if kind == "target" else (None,)),
            ("format", "a format of dates, for the kind date"):
                self.format is None or (kind == "date" and isinstance(self.format, str)),
            ("scale", f"none for the kind {kind}"): self.scale == "none" or kind in NUMERIC,
            ("mean", "none: the column is neither scaled pooled nor filled with its mean"):
                self.mean is None or self.uses_moments,
            ("std", "a number above 0, with scale: pooled"):
                self.std is None or (self.std > 0 and self.scale == "pooled"),
            ("categories", f"none for the kind {kind}"):
                self.lists_categories or (self.categories is None and not self.spellings),
            ("missing", f"refuse for the kind {kind}. Leave out rows without target"):
                self.missing == "refuse" or kind not in ("id", "target"),
            ("missing", "refuse, indicator or constant for a category"): self.missing != "mean" or kind != "category",
            ("fill", "the constant for missing values"): self.missing != "constant" or self.fill is not None,
            ("fill", f"none with missing: {self.missing}"):
                self.fill is None or self.missing in ("constant", "indicator"),
            ("fill", "one of the categories, with missing: constant"):
                self.fill is None or kind != "category"
                or (self.missing == "constant" and self.fill in (self.categories or ())),
        }  # fmt: skip
        for (argument, expected), holds in rules.items():
            if not holds:
                self._invalid(argument, expected)

    def _read_categories(self) -> None:
        """Check categories and their other spellings, and keep them as texts."""
        if not isinstance(self.categories, (list, tuple)):
            order = "in increasing order" if self.kind == "ordinal" else "which `hansa data schema` finds in a table"
            self._invalid("categories", f"a list of the values, {order}")
        if any(isinstance(value, bool) or value is None for value in self.categories):
            self._invalid("categories", "texts", "Quote it: YAML reads yes, no, true, false and null otherwise.")
        categories = tuple(map(category_text, self.categories))
        pairs = self.spellings.items() if isinstance(self.spellings, Mapping) else self.spellings
        try:
            spellings = tuple((category_text(value), tuple(map(category_text, others))) for value, others in pairs)
        except (TypeError, ValueError):
            self._invalid("spellings", "lists of other spellings by category")
        texts = [*categories, *(text for _, others in spellings for text in others)]
        known = {value for value, _ in spellings} <= set(categories)
        if not (1 <= len(categories) <= MAX_CATEGORIES and known and len(set(texts)) == len(texts)):
            self._invalid("categories", f"1 to {MAX_CATEGORIES} values, and other spellings of them: every text once")
        object.__setattr__(self, "categories", categories)
        object.__setattr__(self, "spellings", spellings)

    def _invalid(self, argument: str, expected: str, remedy: str = "") -> NoReturn:
        value = getattr(self, argument)
        raise DataError(
            f"schema: column {short_repr(self.name)}: {argument}={short_repr(value)}: expected {expected}."
            f"{' ' + remedy if remedy else ''}",
            component="TableColumn", argument=argument, value=value,
        )  # fmt: skip

    @property
    def lists_categories(self) -> bool:
        """Whether the column has a list of categories or classes."""
        return self.kind in ("category", "ordinal") or (self.kind == "target" and self.target == "class")

    @property
    def uses_moments(self) -> bool:
        """Whether the encoding needs the mean or deviation over all sites."""
        return self.kind in NUMERIC and (self.scale == "pooled" or (self.missing == "mean" and self.scale == "none"))

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
                texts = value if isinstance(value, (list, tuple)) else (value,)
                object.__setattr__(self, argument, tuple(map(category_text, texts)))
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
        object.__setattr__(self, "missing_values", tuple(dict.fromkeys(("", *self.missing_values))))
        if not self.columns:
            raise DataError("schema: columns: expected at least one.")
        names = Counter(column.name for column in self.columns)
        targets = [column.name for column in self.columns if column.kind == "target"]
        problems = {
            f"column {short_repr(max(names, key=lambda name: names[name]))} is listed twice":
                len(names) < len(self.columns),
            f"{len(targets)} targets ({', '.join(targets[:5])}): expected one": len(targets) > 1,
            "no column of inputs: expected at least one besides the target":
                not any(column.kind not in ("id", "target") for column in self.columns),
            "split: its column is also in columns. List it once": self.split is not None and self.split.column in names,
            f"missing_values={short_repr(self.missing_values)}: expected texts":
                not all(isinstance(text, str) and len(text) <= 100 for text in self.missing_values),
            f"decimal={short_repr(self.decimal)}: expected '.' or ','": self.decimal not in (".", ","),
        }  # fmt: skip
        for problem, present in problems.items():
            if present:
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
        content = {name: value for name, value in self.to_dict().items() if name != "name"}
        return hashlib.sha256(canonical_json(content).encode()).hexdigest()

    def replace_columns(self, *columns: TableColumn) -> Schema:
        """Return the schema with these columns in place of those of the same names."""
        by_name = {column.name: column for column in columns}
        return replace(self, columns=tuple(by_name.get(column.name, column) for column in self.columns))

    def provisional(self) -> Schema:
        """Return the schema with mean 0 and deviation 1 where they are open: of the same shape, to check tables by."""
        return complete(self, [{column.name: Moments(1, Fraction(0), Fraction(0)) for column in self}])

    def to_dict(self) -> dict[str, Any]:
        """Return the schema as plain data, without defaults."""
        return {"hansa_schema": FORMAT, "name": self.name, **_plain(self)}

    def to_json(self) -> str:
        """Return the canonical JSON form."""
        return canonical_json(self.to_dict())

    def to_yaml(self) -> str:
        """Return YAML with one line per column, for reading and editing."""
        import yaml  # here, because most tasks need none

        content = self.to_dict()
        columns = content.pop("columns")
        flow: Any = partial(yaml.safe_dump, sort_keys=False, allow_unicode=True)
        lines = [f"  - {flow(column, default_flow_style=True, width=math.inf).strip()}\n" for column in columns]
        return f"{flow(content)}columns:\n{''.join(lines)}"

    @classmethod
    def from_dict(cls, content: object, source: str = "schema") -> Schema:
        """Return the schema of plain data, as read from JSON or YAML."""
        head = _keywords(source, content, ["hansa_schema", *(each.name for each in fields(cls))], "hansa_schema")
        if head.pop("hansa_schema") != FORMAT:
            raise DataError(f"{source}: not a schema: expected hansa_schema: {FORMAT}.")
        for name in ("columns", "missing_values"):
            if not isinstance(head.get(name, []), (list, tuple)):
                raise DataError(f"{source}: {name}: {short_repr(head[name])}: expected a list.")
        names = [each.name for each in fields(TableColumn)]
        columns = [_keywords(f"{source}: columns", each, names, "name", "kind") for each in head.pop("columns", ())]
        split = head.pop("split", None)
        if split is not None:
            entries = {"column": split} if isinstance(split, str) else split
            split = SplitColumn(**_keywords(f"{source}: split", entries, ("column", "test", "train"), "column"))
        texts = ["" if text is None else str(text) for text in head.pop("missing_values", MISSING_TEXTS)]
        try:
            return cls(tuple(TableColumn(**each) for each in columns), split, tuple(texts), **head)
        except DataError as error:
            raise DataError(f"{source}: {error}" if source != "schema" else str(error)) from error

    @classmethod
    def from_json(cls, text: str, source: str = "schema") -> Schema:
        """Return the schema of its JSON form."""
        return cls.from_dict(_parsed(text, source, json.loads), source)

    @classmethod
    def from_yaml(cls, text: str, source: str = "schema") -> Schema:
        """Return the schema of its YAML form."""
        import yaml

        return cls.from_dict(_parsed(text, source, yaml.safe_load), source)

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


def _plain(value: Any) -> Any:
    """Return a part of a schema as plain data: its fields that differ from their defaults."""
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if not is_dataclass(value):
        return value
    found = ((each, getattr(value, each.name)) for each in fields(value))
    return {each.name: _plain(part) for each, part in found if part != each.default}


def canonical_json(content: object) -> str:
    """Return the one JSON text of plain data, for a hash."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _parsed(text: str, source: str, parse: Callable[[str], object]) -> object:
    try:
        return parse(text)
    except Exception as error:  # of the parser
        raise DataError(f"{source}: not the text of a schema ({str(error)[:200]}).") from error


def _keywords(source: str, content: object, keys: Sequence[str], *required: str) -> dict[str, Any]:
    """Return a mapping as keyword arguments, after a check of its keys."""
    if not isinstance(content, Mapping) or not set(required) <= set(content):
        raise DataError(f"{source}: {short_repr(content)}: expected a mapping with {' and '.join(required)}.")
    for key in content:
        if key not in keys:
            raise DataError(f"{source}: unknown key {short_repr(key)}. {suggestion(str(key), keys)}")
    return dict(content)


def _read_text(path: Path, encoding: str, limit: int, what: str) -> str:
    try:
        size = path.stat().st_size
        text = path.read_text(encoding=encoding) if size <= limit else ""
    except (OSError, ValueError, LookupError, TypeError) as error:  # also an unknown encoding
        raise DataError(f"{path}: cannot be read as {what} ({str(error)[:200]}).") from error
    if size > limit:
        raise DataError(f"{path}: larger than {limit >> 20} MiB: not read as {what}.")
    return text


# ---- tables of texts


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

    def misfit(self, column: str, row: int, problem: str, code: str) -> SchemaMisfitError:
        """Return the error for a cell, with its place and value, which stay with the owner of the table."""
        value = short_repr(self.columns[column][row])
        text = f"{self.source}, line {self.lines[row]}: {column!r} is {value}: {problem}."
        return SchemaMisfitError(text.replace(" is '': ", " is empty: "), code, column)


def read_csv(path: Path | str, schema: Schema | None = None) -> Table:
    """Read a CSV file with a header. Lines without any cell are left out, and lines of another length refused.

    Args:
        path: The file.
        schema: Its schema, which states the delimiter and the encoding; by default a comma and UTF-8.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "north.csv")
    ...     _ = file.write_text(chr(10).join(["age,ward", "40, icu", "50,"]))
    ...     read_csv(file).columns
    {'age': ['40', '50'], 'ward': ['icu', '']}
    """
    encoding = "utf-8" if schema is None else schema.encoding
    encoding = "utf-8-sig" if encoding == "utf-8" else encoding
    text = _read_text(Path(path), encoding, _MAX_TABLE_BYTES, "CSV")
    return read_csv_text(text, path, "," if schema is None else schema.delimiter)


def read_csv_text(text: str, path: Path | str, delimiter: str = ",") -> Table:
    """Return the table of the text of a CSV file."""
    path = Path(path)
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
        wrong = "without a name" if "" in header else f"twice: {short_repr(Counter(header).most_common(1)[0][0])}"
        raise DataError(f"{path}: the header has a column {wrong}.")
    for line, row in body:
        if len(row) != len(header):
            raise DataError(f"{path}, line {line}: {len(row)} values for {len(header)} columns.")
    cells = zip(*(row for _, row in body), strict=True)
    columns = {column: [cell.strip() for cell in each] for column, each in zip(header, cells, strict=True)}
    return Table(path.stem, str(path), columns, [line for line, _ in body])


def as_table(frame: Any, schema: Schema | None = None, name: str = "frame") -> Table:
    """Return a table from the path of a CSV file, a pandas or polars data frame, a dict of columns or a list of dicts.

    Args:
        frame: The rows. None and NaN are missing values.
        schema: For a file, its schema.
        name: Name for messages.

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
    columns = list(frame) if isinstance(frame, Mapping) else getattr(frame, "columns", None)
    if columns is None or not len(columns):
        raise DataError(f"{name}: {short_repr(frame)}: expected a CSV file, a data frame, or dicts of columns or rows.")
    mark = "." if schema is None else schema.decimal
    texts = {str(column): [_text(value, mark) for value in frame[column]] for column in columns}
    sizes = {len(cells) for cells in texts.values()}
    if len(sizes) != 1 or sizes == {0}:
        raise DataError(f"{name}: columns of {sorted(sizes)} rows: expected the same number, at least 1.")
    return Table(name, name, texts, range(1, sizes.pop() + 1))


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

    Args:
        count: Number of values.
        total: Their sum.
        squares: The sum of their squares.

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
        whole = np.ldexp(mantissas, 53).astype(np.int64)  # values = whole * 2**(exponents - 53)
        total = squares = Fraction(0)
        for exponent in np.unique(exponents):
            part = whole[exponents == exponent].tolist()
            unit = Fraction(2) ** (int(exponent) - 53)
            total += sum(part) * unit
            squares += sum(value * value for value in part) * unit * unit
        return cls(len(values), total, squares)

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the values of both."""
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    def mean_and_std(self) -> tuple[float, float]:
        """Return the mean and the standard deviation over n, correctly rounded; a deviation of 0 is returned as 1."""
        mean = self.total / self.count
        try:
            deviation = math.sqrt(float(self.squares / self.count - mean * mean))
        except OverflowError:
            raise DataError("moments: the variance is too large for float64: rescale the column.") from None
        return float(mean), deviation if deviation > 0 else 1.0

    def to_json(self) -> list[Any]:
        """Return the moments as plain data: the count, and each sum as ``HEX/EXPONENT``, numerator / 2**exponent."""
        sums = (f"{value.numerator:x}/{value.denominator.bit_length() - 1}" for value in (self.total, self.squares))
        return [self.count, *sums]

    @classmethod
    def from_json(cls, content: Any) -> Moments:
        """Return the moments of plain data; impossible ones are refused."""
        if not isinstance(content, list) or len(content) != 3 or not all(isinstance(text, str) for text in content[1:]):
            raise DataError("moments: expected a count and two sums.")
        count, sums = content[0], [_DYADIC.fullmatch(text) for text in content[1:]]
        if not all(match is not None and int(match[2]) <= 5000 for match in sums):
            raise DataError("moments: not a sum of floats.")
        total, squares = (Fraction(int(match[1], 16), 1 << int(match[2])) for match in sums if match is not None)
        if type(count) is not int or not 1 <= count < 1 << 48 or squares * count < total * total:
            raise DataError("moments: no values have this count, sum and sum of squares.")
        return cls(count, total, squares)


_DYADIC = re.compile("(-?[0-9a-f]{1,2400})/([0-9]{1,4})")


def table_moments(schema: Schema, table: Table, test: float = 0.0, seed: int = 0) -> dict[str, Moments]:
    """Return the exact moments of the columns that are open in a schema, over the training rows of a table.

    Args:
        schema: The schema.
        table: The table of one client.
        test: Fraction of rows for testing, if the schema has no split column.
        seed: Seed of the choice of test rows.
    """
    is_test = choose_test_rows(schema, table, test, seed)
    return {column.name: column_moments(schema, column, table, ~is_test) for column in schema if column.is_open}


def complete(schema: Schema, moments: Sequence[Mapping[str, Moments]]) -> Schema:
    """Return the schema with means and deviations from the moments of all tables. Their order does not matter.

    Args:
        schema: The schema, in which means and deviations may be open.
        moments: The moments of the open columns, of each table or site.

    >>> draft = Schema((TableColumn("age", "number", scale="pooled"),))
    >>> north, south = as_table({"age": [40, 50]}), as_table({"age": [60]})
    >>> complete(draft, [table_moments(draft, table) for table in (north, south)])["age"].mean
    50.0
    """
    pooled = []
    for column in schema:
        if column.is_open:
            mean, std = reduce(Moments.merge, (each[column.name] for each in moments)).mean_and_std()
            pooled.append(replace(column, mean=mean, std=std if column.scale == "pooled" else None))
    return schema.replace_columns(*pooled)


def column_moments(schema: Schema, column: TableColumn, table: Table, rows: Mask) -> Moments:
    """Return the exact moments of a numeric column over some rows, without missing values."""
    values, missing = parse_numbers(schema, column, table)
    chosen = values[rows & ~missing]
    if not len(chosen):
        text = f"{table.source}: {column.name!r} has no value in a training row: its mean is unknown."
        raise SchemaMisfitError(text, "too-few-rows", column.name)
    return Moments.of(chosen)


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
        return torch.from_numpy(encode(self.schema, as_table(frame, self.schema), self._statistics(client)).inputs)

    def targets(self, frame: Any) -> torch.Tensor | None:
        """Return the targets of a frame, or None if it has no column of targets."""
        targets = _targets(self.schema, as_table(frame, self.schema), required=False)
        return None if targets is None else torch.from_numpy(targets)

    def _statistics(self, client: str | None) -> Statistics:
        by_site = [column.name for column in self.schema if column.scale == "site"]
        if not by_site or (client is not None and client in self.statistics):
            return {} if client is None else self.statistics.get(client, {})
        names = ", ".join(sorted(self.statistics))
        raise SchemaMisfitError(
            f"{by_site[0]!r} is scaled by site: expected the client whose statistics are used, got {client!r}. "
            + (f"Known: {names}." if names else "They stay at the sites: predict there."),
            "scale-unknown",
            by_site[0],
        )


def encode(
    schema: Schema,
    table: Table,
    statistics: Statistics | None = None,
    *,
    training: bool = False,
    test: float = 0.0,
    seed: int = 0,
) -> EncodedTable:
    """Encode a table: new rows with known statistics, with targets if they are there, or a client's rows to train on.

    Arithmetic is in float64, column by column and row by row.

    Args:
        schema: The schema, in which nothing is open.
        table: The table of one client.
        statistics: Mean and deviation of the columns with ``scale: site``; in training those of the training rows.
        training: Whether targets are needed and rows are chosen for testing.
        test: Fraction of rows for testing, if the schema has no split column.
        seed: Seed of the choice of test rows.
    """
    targets = _targets(schema, table, required=training)
    is_test = choose_test_rows(schema, table, test, seed) if training else np.zeros(table.rows, bool)
    if training:
        scaled = [column for column in schema if column.scale == "site"]
        statistics = {each.name: column_moments(schema, each, table, ~is_test).mean_and_std() for each in scaled}
    if schema.is_open:
        name = next(column.name for column in schema if column.is_open)
        raise SchemaMisfitError(f"schema: the mean or deviation of {name!r} is still open.", "not-agreed", name)
    blocks, counts = [], {}
    for column in schema:
        if column.inputs:
            block, count = _encode_column(schema, column, table, statistics or {})
            blocks.append(block)
            if any(count):
                counts[column.name] = count
            if count.unknown:
                log.warning("%s: %d of %d values of %r are not in the schema: no input says what they are",
                            table.source, count.unknown, table.rows, column.name)  # fmt: skip
    wide = np.concatenate(blocks, axis=1)
    with np.errstate(over="ignore"):
        inputs = wide.astype(np.float32)
    if not np.isfinite(inputs).all():
        row, place = np.argwhere(~np.isfinite(inputs))[0]
        name = next(column.name for column in schema if schema.inputs[place] in column.inputs)
        problem = f"{wide[row, place]:g} after scaling: too large for float32"
        raise table.misfit(name, int(row), problem, "not-finite")
    return EncodedTable(inputs, targets, is_test, statistics or {}, counts)


def choose_test_rows(schema: Schema, table: Table, fraction: float, seed: int) -> Mask:
    """Return a mask of test rows: by the split column, or a fraction of the rows, rounded down, by the seed."""
    split = schema.split
    if split is None:
        mask = np.zeros(table.rows, bool)
        draw = Key(seed).child("csv test", table.name).numpy()
        mask[draw.permutation(table.rows)[: math.floor(Fraction(repr(float(fraction))) * table.rows)]] = True
    else:
        cells = [category_text(cell) for cell in _cells(split.column, table)]
        for row, cell in enumerate(cells):
            if cell not in split.test and (
                cell in schema.missing_values if split.train is None else cell not in split.train
            ):
                values = f"one of {', '.join([*(split.train or ()), *split.test])}"
                expected = values if split.train else f"a value; {split.test} is for testing"
                raise table.misfit(split.column, row, f"expected {expected}", "split-value")
        mask = np.array([cell in split.test for cell in cells])
    if mask.all():
        column = "" if split is None else split.column
        raise SchemaMisfitError(f"{table.source}: no training rows, only test rows.", "no-training-rows", column)
    return mask


def parse_number(cell: str, decimal: str) -> float | None:
    """Return the number of a cell, or None if it is none."""
    try:
        return float(cell if decimal == "." else cell.replace(".", "?").replace(decimal, "."))
    except ValueError:
        return None


def parse_numbers(schema: Schema, column: TableColumn, table: Table) -> tuple[Floats, Mask]:
    """Return a numeric column as float64 and which values are missing (0 there)."""
    cells = _cells(column.name, table)
    missing = _missing(schema, column, table, cells)
    values, places = np.zeros(len(cells)), _places(column)
    for row in np.flatnonzero(~missing).tolist():
        value: float | None
        match column.kind:
            case "ordinal":
                value = places.get(category_text(cells[row]))
            case "date":
                value = _days(cells[row], column.format)
            case "text_length":
                value = len(cells[row])
            case _:
                value = parse_number(cells[row], schema.decimal)
        if value is None:
            raise table.misfit(column.name, row, *_NO_NUMBER.get(column.kind, ("not a number", "not-a-number")))
        if not math.isfinite(value):
            raise table.misfit(column.name, row, "not finite", "not-finite")
        values[row] = value
    return values, missing


_NO_NUMBER = {
    "ordinal": ("not one of the categories of the schema", "unknown-category"),
    "date": ("not a date of the format of the schema", "not-a-date"),
}


def _days(cell: str, form: str | None) -> float | None:
    try:
        day = datetime.fromisoformat(cell) if form is None else datetime.strptime(cell, form)
    except (ValueError, OverflowError):
        return None
    return ((day if day.tzinfo is not None else day.replace(tzinfo=UTC)) - _EPOCH).total_seconds() / 86400


def _places(column: TableColumn) -> dict[str, int]:
    """Return the position of every category, by all its spellings."""
    places = {text: place for place, text in enumerate(column.categories or ())}
    return places | {text: places[value] for value, others in column.spellings for text in others}


def _cells(name: str, table: Table) -> Sequence[str]:
    if name not in table.columns:
        hint = suggestion(name, table.columns)
        raise SchemaMisfitError(f"{table.source}: no column {name!r}. {hint}", "column-missing", name)
    return table.columns[name]


def _missing(schema: Schema, column: TableColumn, table: Table, cells: Sequence[str]) -> Mask:
    texts = set(schema.missing_values)
    missing = np.array([cell in texts for cell in cells])
    if column.missing == "refuse" and missing.any():
        remedy = "a missing value. Fill it in, or drop the row or the column"
        if column.kind != "target":
            remedy += ". Or let the schema fill it in, with missing: indicator, mean or constant"
        raise table.misfit(column.name, int(np.flatnonzero(missing)[0]), remedy, "value-missing")
    return missing


def _encode_column(
    schema: Schema, column: TableColumn, table: Table, statistics: Statistics
) -> tuple[Floats, CellCounts]:
    """Return the inputs of one column, [rows, inputs], and the counts of its cells."""
    if column.kind != "category":
        values, missing = parse_numbers(schema, column, table)
        mean, std = statistics[column.name] if column.scale == "site" else ((column.mean or 0.0), (column.std or 1.0))
        by_mean = column.missing == "mean" or column.scale != "none"
        fill = float(column.fill) if column.fill is not None else mean if by_mean else 0.0
        filled = np.where(missing, fill, values)
        scaled = filled if column.scale == "none" else (filled - mean) / std
        inputs = [scaled, missing.astype(np.float64)] if column.missing == "indicator" else [scaled]
        return np.stack(inputs, axis=1), CellCounts(missing=int(missing.sum()))
    places, listed = _places(column), set(column.categories or ())
    cells = _cells(column.name, table)
    missing = _missing(schema, column, table, cells)
    encoded = np.zeros((len(cells), len(column.inputs)))
    encoded[missing, -1 if column.missing == "indicator" else places.get(str(column.fill), 0)] = 1.0
    spelled = unknown = 0
    for row in np.flatnonzero(~missing).tolist():
        text = category_text(cells[row])
        place = places.get(text)
        if place is not None:
            encoded[row, place] = 1.0
            spelled += text not in listed
        elif column.unknown == "refuse":
            raise _unknown(column, table, row)
        else:
            unknown += 1
    return encoded, CellCounts(int(missing.sum()), spelled, unknown)


def _targets(schema: Schema, table: Table, *, required: bool) -> npt.NDArray[Any] | None:
    """Return class numbers or float32 numbers; None if the table has no targets and none are required."""
    column = schema.target
    if column is None:
        if required:
            raise DataError("schema: no column of the kind target, as training needs.")
        return None
    if not required and any(cell in schema.missing_values for cell in table.columns.get(column.name, ("",))):
        return None  # rows to predict, some of which have no target yet
    if column.target == "number":
        return parse_numbers(schema, column, table)[0].astype(np.float32)
    cells, places = _cells(column.name, table), _places(column)
    _missing(schema, column, table, cells)
    numbers = [places.get(category_text(cell), -1) for cell in cells]
    if -1 in numbers:
        raise _unknown(column, table, numbers.index(-1))
    return np.array(numbers, dtype=np.int64)


def _unknown(column: TableColumn, table: Table, row: int) -> SchemaMisfitError:
    what = "classes" if column.kind == "target" else "categories"
    remedy = "" if column.kind == "target" else ". Add it to the schema, or set unknown: zero"
    problem = f"the schema has the {what} {short_repr(column.categories)}{remedy}"
    return table.misfit(column.name, row, problem, "unknown-category")
