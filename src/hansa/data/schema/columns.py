"""The columns of a table: kinds, categories in order, missing values, scales, and the split column."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn, TypeAlias, get_args

from hansa.core.errors import short_repr, suggestion
from hansa.data.files import DataError

MAX_CATEGORIES = 10_000

Kind: TypeAlias = Literal["number", "category", "ordinal", "date", "text_length", "target", "id"]
Missing: TypeAlias = Literal["refuse", "indicator", "constant", "mean"]
Scale: TypeAlias = Literal["none", "site", "pooled"]
Unknown: TypeAlias = Literal["refuse", "zero"]
KINDS, MISSING, SCALES, UNKNOWN = get_args(Kind), get_args(Missing), get_args(Scale), get_args(Unknown)
NUMERIC = ("number", "ordinal", "date", "text_length")
"""Kinds that become one number, which can be scaled."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column of a table and its encoding.

    A number, the rank of an ordinal value, the days of a date since 1970 and the length of a text become one input,
    scaled as (x - mean) / std. A category becomes one 0/1 input per entry of ``categories``.

    Args:
        name: Name in the header.
        kind: "number", "category", "ordinal", "date", "text_length", "target", or "id" for a column that is not used.
        categories: The values of a category in the order of the inputs, of an ordinal column in increasing order, of a
            target the classes. None in a category or a target of classes: to be agreed.
        missing: What a missing value becomes: "refuse" raises an error; "constant" is ``fill``; "mean" is the mean;
            "indicator" is ``fill`` (by default the mean if the column is scaled, otherwise 0) and adds an input that is
            1 where the value is missing. A missing category has no 0/1 input set with "indicator".
        fill: The constant for missing values: a number, or a category.
        scale: "none"; "pooled" by mean and deviation of the training rows of all sites; "site" by those of each site.
        mean: Mean of the training rows of all sites, for "pooled" and for ``missing="mean"``. None: to be agreed.
        std: Their standard deviation.
        unknown: For a category that is not listed: "refuse" raises an error, "zero" sets no 0/1 input.
        target: "class" or "number", for the kind "target".
        format: Format of dates, as in ``datetime.strptime``; by default ISO 8601.

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

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or len(self.name) > 500:
            self._invalid("name", self.name, "a text of at most 500 characters")
        for argument, allowed in (("kind", KINDS), ("missing", MISSING), ("scale", SCALES), ("unknown", UNKNOWN)):
            value = getattr(self, argument)
            if value not in allowed:
                self._invalid(argument, value, f"one of {', '.join(allowed)}", suggestion(str(value), allowed))
        if self.kind == "target" and self.target is None:
            object.__setattr__(self, "target", "class")
        if self.target not in ((None,) if self.kind != "target" else ("class", "number")):
            self._invalid("target", self.target, "class or number for the kind target, and none for others")
        self._check_categories()
        self._check_missing()
        self._check_scale()
        if self.format is not None and (self.kind != "date" or not isinstance(self.format, str)):
            self._invalid("format", self.format, "a format of dates, for the kind date")

    def _check_categories(self) -> None:
        if self.categories is None:
            if self.kind == "ordinal":
                self._invalid("categories", None, "the values in increasing order")
            return
        if not self.lists_categories:
            self._invalid("categories", self.categories, f"none for the kind {self.kind}")
        if isinstance(self.categories, str) or not isinstance(self.categories, Sequence):
            self._invalid("categories", self.categories, "a list of texts")
        texts = tuple(self._category_text(value) for value in self.categories)
        if not 1 <= len(texts) <= MAX_CATEGORIES:
            self._invalid("categories", f"{len(texts)} values", f"1 to {MAX_CATEGORIES} values")
        if len(set(texts)) < len(texts):
            twice = next(text for text in texts if texts.count(text) > 1)
            self._invalid("categories", twice, "every value once")
        object.__setattr__(self, "categories", texts)

    def _category_text(self, value: object) -> str:
        if isinstance(value, bool) or value is None:
            self._invalid("categories", value, "texts", "Quote it: YAML reads yes, no, true, false and null otherwise.")
        return category_text(value)

    def _check_missing(self) -> None:
        if self.kind in ("id", "target") and self.missing != "refuse":
            self._invalid("missing", self.missing, f"refuse for the kind {self.kind}", "Leave out rows without target.")
        if self.kind == "category" and self.missing == "mean":
            self._invalid("missing", "mean", "refuse, indicator or constant for a category")
        if self.missing == "constant" and self.fill is None:
            self._invalid("fill", None, "the constant for missing values")
        if self.fill is None:
            return
        if self.missing not in ("constant", "indicator"):
            self._invalid("fill", self.fill, f"none with missing: {self.missing}")
        if self.kind == "category":
            fill = category_text(self.fill)
            if self.missing == "indicator" or (self.categories is not None and fill not in self.categories):
                self._invalid("fill", self.fill, "one of the categories, with missing: constant")
            object.__setattr__(self, "fill", fill)
        else:
            object.__setattr__(self, "fill", self._finite("fill", self.fill))

    def _check_scale(self) -> None:
        if self.scale != "none" and self.kind not in NUMERIC:
            self._invalid("scale", self.scale, f"none for the kind {self.kind}")
        for argument in ("mean", "std"):
            value = getattr(self, argument)
            if value is not None:
                if not self.uses_moments:
                    self._invalid(argument, value, "none: the column is neither scaled pooled nor filled with its mean")
                object.__setattr__(self, argument, self._finite(argument, value))
        if self.std is not None and (self.std <= 0 or self.scale != "pooled"):
            self._invalid("std", self.std, "a number above 0, with scale: pooled")

    def _finite(self, argument: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            self._invalid(argument, value, "a finite number")
        return float(value)

    def _invalid(self, argument: str, value: object, expected: str, remedy: str = "") -> NoReturn:
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
        """Whether its categories, its mean or its deviation are still to be agreed."""
        if self.lists_categories:
            return self.categories is None
        return self.uses_moments and (self.mean is None or (self.scale == "pooled" and self.std is None))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs that the column becomes."""
        if self.kind in ("id", "target"):
            return ()
        names = (self.name,) if self.kind != "category" else tuple(f"{self.name}={c}" for c in self.categories or ())
        return (*names, f"{self.name} is missing") if self.missing == "indicator" else names

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        default = {each.name: each.default for each in fields(self)}
        plain = {name: value for name, value in values.items() if name in ("name", "kind") or value != default[name]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


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
            value = getattr(self, argument)
            if value is not None:
                texts = (value,) if not isinstance(value, (list, tuple)) else value
                object.__setattr__(self, argument, tuple(map(category_text, texts)))
        if not isinstance(self.column, str) or not self.column or set(self.test) & set(self.train or ()):
            raise DataError(
                f"schema: split: column={short_repr(self.column)}, test={short_repr(self.test)}, "
                f"train={short_repr(self.train)}: expected the name of a column, and different values of both."
            )


def category_text(value: object) -> str:
    """Return the text of a category: stripped, and integers without ``.0``.

    >>> category_text(" icu "), category_text("2.0"), category_text(2.0), category_text("02")
    ('icu', '2', '2', '02')
    """
    text = str(value).strip()
    match = _WHOLE.fullmatch(text)
    return text if match is None else match.group(1)


_WHOLE = re.compile(r"(-?[0-9]{1,18})\.0*")
