"""The schema of a table: how its columns become inputs and targets. It has a readable form and a SHA-256."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hansa.core.errors import short_repr, suggestion
from hansa.data.files import DataError
from hansa.data.schema.columns import SplitColumn, TableColumn

FORMAT = 1
MISSING_TEXTS = ("", "?", "NA", "N/A", "NaN", "nan", "null")
"""Cells with these texts are missing values, unless the schema lists others."""
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of a table in order, and how they become inputs and targets.

    Args:
        columns: The columns. Columns of a table that are not listed are ignored.
        split: The column that says which rows are for testing.
        missing_values: Texts of cells that are missing values, besides empty ones.
        name: Name for messages.

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        object.__setattr__(self, "missing_values", tuple(dict.fromkeys(("", *self.missing_values))))
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"schema: column {short_repr(twice)} is listed twice.")
        if len(targets := [column.name for column in self.columns if column.kind == "target"]) > 1:
            raise DataError(f"schema: {len(targets)} targets ({', '.join(targets)}): expected one.")
        if not any(column.kind not in ("id", "target") for column in self.columns):
            raise DataError("schema: no column of inputs: expected at least one besides the target.")
        if self.split is not None and self.split.column in names:
            raise DataError(f"schema: split: {short_repr(self.split.column)} is also in columns. List it once.")
        if not all(isinstance(text, str) and len(text) <= 100 for text in self.missing_values):
            raise DataError(f"schema: missing_values={short_repr(self.missing_values)}: expected texts.")

    def __iter__(self) -> Iterator[TableColumn]:
        return iter(self.columns)

    def __getitem__(self, name: str) -> TableColumn:
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)

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
        """Whether something is still to be agreed."""
        return any(column.is_open for column in self.columns)

    @property
    def sha256(self) -> str:
        """SHA-256 of the canonical JSON form, without the name."""
        content = {name: value for name, value in self.to_dict().items() if name != "name"}
        return hashlib.sha256(_canonical(content).encode()).hexdigest()

    def replace_columns(self, *columns: TableColumn) -> Schema:
        """Return the schema with these columns in place of those of the same names."""
        by_name = {column.name: column for column in columns}
        return replace(self, columns=tuple(by_name.get(column.name, column) for column in self.columns))

    def to_dict(self) -> dict[str, Any]:
        """Return the schema as plain data, without defaults."""
        content: dict[str, Any] = {"hansa_schema": FORMAT, "name": self.name}
        if self.missing_values != MISSING_TEXTS:
            content["missing_values"] = list(self.missing_values)
        if self.split is not None:
            split = {"column": self.split.column, "test": list(self.split.test)}
            content["split"] = split if self.split.train is None else {**split, "train": list(self.split.train)}
        return {**content, "columns": [column.to_dict() for column in self.columns]}

    def to_json(self) -> str:
        """Return the canonical JSON form."""
        return _canonical(self.to_dict())

    def to_yaml(self) -> str:
        """Return YAML with one line per column, for reading and editing."""
        import yaml  # here, because most tasks need none

        content = self.to_dict()
        columns = content.pop("columns")
        lines = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        flow = [_flow(column) for column in columns]
        return lines + "columns:\n" + "".join(f"  - {text}\n" for text in flow)

    @classmethod
    def from_dict(cls, content: object, source: str = "schema") -> Schema:
        """Return the schema of plain data, as read from JSON or YAML."""
        if not isinstance(content, Mapping) or content.get("hansa_schema") != FORMAT:
            raise DataError(f"{source}: not a schema: expected a mapping with hansa_schema: {FORMAT}.")
        known = ("hansa_schema", "name", "columns", "split", "missing_values")
        _check_keys(source, content, known)
        columns = content.get("columns")
        if not isinstance(columns, Sequence) or isinstance(columns, str) or not columns:
            raise DataError(f"{source}: columns: expected a list with one mapping per column.")
        try:
            return cls(
                tuple(_column(source, each) for each in columns),
                _split(source, content.get("split")),
                _texts(source, content.get("missing_values", MISSING_TEXTS)),
                str(content.get("name", "table")),
            )
        except DataError as error:
            text = str(error)
            raise DataError(text if text.startswith(f"{source}: ") else f"{source}: {text}") from error

    @classmethod
    def from_json(cls, text: str, source: str = "schema") -> Schema:
        """Return the schema of its JSON form."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{source}: not JSON ({str(error)[:200]}).") from error
        return cls.from_dict(content, source)

    @classmethod
    def from_yaml(cls, text: str, source: str = "schema") -> Schema:
        """Return the schema of its YAML form."""
        import yaml

        try:
            content = yaml.safe_load(text)
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            raise DataError(f"{source}: not YAML ({str(error)[:200]}).") from error
        return cls.from_dict(content, source)

    @classmethod
    def load(cls, path: Path | str) -> Schema:
        """Load a schema from a .json or .yaml file."""
        path = Path(path)
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise DataError(f"{path}: larger than {_MAX_BYTES >> 20} MiB: not a schema.")
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read as a schema ({str(error)[:200]}).") from error
        return cls.from_json(text, str(path)) if path.suffix == ".json" else cls.from_yaml(text, str(path))

    def save(self, path: Path | str) -> Path:
        """Write the schema to a .json or .yaml file."""
        path = Path(path)
        text = self.to_json() + "\n" if path.suffix == ".json" else self.to_yaml()
        path.write_text(text, encoding="utf-8")
        return path


def as_schema(value: object) -> Schema:
    """Return a schema that is given as such, as plain data or as the path of a file.

    >>> as_schema({"hansa_schema": 1, "columns": [{"name": "age", "kind": "number"}]}).inputs
    ('age',)
    """
    if isinstance(value, Schema):
        return value
    if isinstance(value, (str, Path)):
        return Schema.load(value)
    return Schema.from_dict(value)


def _canonical(content: object) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _flow(content: object) -> str:
    import yaml

    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=True, width=math.inf)
    return text.strip()


def _check_keys(source: str, content: Mapping[Any, Any], known: Sequence[str]) -> None:
    for key in content:
        if key not in known:
            raise DataError(f"{source}: unknown key {short_repr(key)}. {suggestion(str(key), known)}")


def _column(source: str, content: object) -> TableColumn:
    if not isinstance(content, Mapping) or not {"name", "kind"} <= set(content):
        raise DataError(f"{source}: columns: {short_repr(content)}: expected a mapping with name and kind.")
    _check_keys(source, content, [each.name for each in fields(TableColumn)])
    values = {str(key): value for key, value in content.items()}
    if isinstance(values.get("categories"), list):
        values["categories"] = tuple(values["categories"])
    return TableColumn(**values)


def _split(source: str, content: object) -> SplitColumn | None:
    if content is None or isinstance(content, str):
        return None if content is None else SplitColumn(content)
    if not isinstance(content, Mapping) or "column" not in content:
        raise DataError(f"{source}: split: {short_repr(content)}: expected the name of a column, or column and test.")
    _check_keys(source, content, ("column", "test", "train"))
    return SplitColumn(**{str(key): value for key, value in content.items()})


def _texts(source: str, content: object) -> tuple[str, ...]:
    if isinstance(content, str) or not isinstance(content, Sequence):
        raise DataError(f"{source}: missing_values: {short_repr(content)}: expected a list of texts.")
    return tuple("" if value is None else str(value) for value in content)
