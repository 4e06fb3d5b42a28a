"""Schemas from scikit-learn's transformers. scikit-learn is not imported: its objects are read by their attributes.

A schema stores what a transformer does as JSON, so no pickle travels. Transformers without a counterpart are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from hansa.core.errors import HansaError, short_repr
from hansa.data.schema.columns import SplitColumn, TableColumn, category_text
from hansa.data.schema.table_schema import MISSING_TEXTS, Schema

KNOWN = (
    "ColumnTransformer",
    "Pipeline",
    "StandardScaler",
    "MinMaxScaler",
    "OneHotEncoder",
    "OrdinalEncoder",
    "SimpleImputer",
)


def schema_from_sklearn(
    transformer: Any,
    target: str,
    *,
    classes: Sequence[str] | None = None,
    kind: Literal["class", "number"] = "class",
    scale: Literal["pooled", "site"] = "pooled",
    split: SplitColumn | None = None,
    missing_values: Sequence[str] = MISSING_TEXTS,
) -> Schema:
    """Return the schema of a scikit-learn ``ColumnTransformer``.

    A fitted one gives its means, deviations and categories. What one that is not fitted leaves open is agreed over all
    sites; deviations are then those of present values, while scikit-learn's are taken after imputation.

    Known are ``StandardScaler``, fitted ``MinMaxScaler``, ``OneHotEncoder``, ``OrdinalEncoder``, ``SimpleImputer``, a
    pipeline of an imputer and one of these, "passthrough" and "drop".

    Args:
        transformer: The ``ColumnTransformer``; its columns are given by name.
        target: Column of targets, which is not one of its columns.
        classes: The classes in order; by default they are agreed.
        kind: "class" or "number": the kind of target.
        scale: For ``StandardScaler``, over all sites or by each site's own rows.
        split: The column that says which rows are for testing.
        missing_values: Texts of missing values besides empty cells.

    >>> class ColumnTransformer:  # as scikit-learn's
    ...     transformers = [("keep", "passthrough", ["age", "height"])]
    ...     remainder = "drop"
    >>> schema_from_sklearn(ColumnTransformer(), "y").inputs
    ('age', 'height')
    """
    if type(transformer).__name__ != "ColumnTransformer":
        _refuse(transformer)
    fitted = getattr(transformer, "transformers_", None)
    columns: list[TableColumn] = []
    for name, part, names in fitted if fitted is not None else transformer.transformers:
        if isinstance(part, str) and part == "drop":
            continue
        if name == "remainder" and fitted is not None:
            names = [transformer.feature_names_in_[place] if isinstance(place, int) else place for place in names]
        listed = [names] if isinstance(names, str) else names
        if not isinstance(listed, (list, tuple)) or not all(isinstance(each, str) for each in listed):
            raise HansaError(f"ColumnTransformer: {name}: {short_repr(names)}: expected columns by name.")
        columns += _columns(part, list(listed), scale)
    if fitted is None and transformer.remainder != "drop":
        raise HansaError("ColumnTransformer: remainder: expected 'drop', or a fitted transformer. List all columns.")
    listed_target = None if classes is None else tuple(classes)
    columns.append(TableColumn(target, "target", listed_target, target=kind))
    return Schema(tuple(columns), split, tuple(missing_values))


@dataclass(frozen=True)
class _Step:
    """One transformer and the columns that it is applied to."""

    part: Any
    names: list[str]
    scale: Literal["pooled", "site"]

    @property
    def kind(self) -> str:
        return type(self.part).__name__

    def fitted(self, attribute: str) -> Any:
        return getattr(self.part, attribute, None)


def _columns(part: Any, names: list[str], scale: Literal["pooled", "site"]) -> list[TableColumn]:
    if isinstance(part, str) and part == "passthrough":
        return [TableColumn(name, "number") for name in names]
    steps = [step for _, step in part.steps if step != "passthrough"] if type(part).__name__ == "Pipeline" else [part]
    imputer = steps.pop(0) if steps and type(steps[0]).__name__ == "SimpleImputer" else None
    if len(steps) > 1:
        _refuse(steps[1], "after another transformer")
    columns = [TableColumn(name, "number") for name in names]
    if steps:
        reader = _READERS.get(type(steps[0]).__name__)
        if reader is None:
            _refuse(steps[0])
        columns = reader(_Step(steps[0], names, scale))
    return columns if imputer is None else _impute(_Step(imputer, names, scale), columns, bool(steps))


def _standard(step: _Step) -> list[TableColumn]:
    if not (step.part.with_mean and step.part.with_std):
        _refuse(step.part, "without mean or without deviation")
    means, deviations = step.fitted("mean_"), step.fitted("scale_")
    if means is None or step.scale == "site":
        return [TableColumn(name, "number", scale=step.scale) for name in step.names]
    return [
        TableColumn(name, "number", scale="pooled", mean=float(mean), std=float(std))
        for name, mean, std in zip(step.names, means, deviations, strict=True)
    ]


def _min_max(step: _Step) -> list[TableColumn]:
    lows, highs = step.fitted("data_min_"), step.fitted("data_max_")
    if lows is None or tuple(step.part.feature_range) != (0, 1) or step.part.clip:
        _refuse(step.part, "that is not fitted, clips, or has another range than (0, 1)")
    return [
        TableColumn(name, "number", scale="pooled", mean=float(low), std=float(high - low) or 1.0)
        for name, low, high in zip(step.names, lows, highs, strict=True)
    ]


def _one_hot(step: _Step) -> list[TableColumn]:
    part = step.part
    if part.drop is not None or part.min_frequency is not None or part.max_categories is not None:
        _refuse(part, "that drops or merges categories")
    if part.handle_unknown not in ("error", "ignore"):
        _refuse(part, f"with handle_unknown={part.handle_unknown!r}")
    lists = step.fitted("categories_")
    if lists is None:
        lists = [None] * len(step.names) if isinstance(part.categories, str) else part.categories
    return [
        TableColumn(name, "category", None if values is None else _texts(part, values),
               unknown="zero" if part.handle_unknown == "ignore" else "refuse")
        for name, values in zip(step.names, lists, strict=True)
    ]  # fmt: skip


def _ordinal(step: _Step) -> list[TableColumn]:
    part = step.part
    lists = step.fitted("categories_")
    if lists is None:
        lists = part.categories
    if isinstance(lists, str) or part.handle_unknown != "error":
        _refuse(part, "without a list of categories, or for unknown ones")
    return [TableColumn(name, "ordinal", _texts(part, values)) for name, values in zip(step.names, lists, strict=True)]


_READERS = {
    "StandardScaler": _standard,
    "MinMaxScaler": _min_max,
    "OneHotEncoder": _one_hot,
    "OrdinalEncoder": _ordinal,
}


def _impute(step: _Step, columns: list[TableColumn], transformed: bool) -> list[TableColumn]:
    part, values = step.part, step.fitted("statistics_")
    if part.add_indicator and (transformed or len(columns) > 1):
        _refuse(part, "with add_indicator, for several columns or before another transformer")
    imputed = []
    for place, column in enumerate(columns):
        if part.strategy == "constant":
            fill = 0 if part.fill_value is None else part.fill_value
        elif values is not None:
            fill = values[place]
        elif part.strategy == "mean" and column.kind == "number":
            imputed.append(replace(column, missing="mean"))
            continue
        else:
            _refuse(part, f"with strategy={part.strategy!r} that is not fitted")
        if column.kind == "ordinal":
            fill = (column.categories or ()).index(category_text(fill))
        text = category_text(fill) if column.kind == "category" else float(fill)
        imputed.append(replace(column, missing="indicator" if part.add_indicator else "constant", fill=text))
    return imputed


def _texts(part: Any, values: Any) -> tuple[str, ...]:
    if any(value is None or (isinstance(value, float) and math.isnan(value)) for value in values):
        _refuse(part, "with a missing value as a category: impute it first")
    return tuple(category_text(value) for value in values)


def _refuse(part: Any, why: str = "") -> NoReturn:
    raise HansaError(
        f"{type(part).__name__}{' ' + why if why else ''}: has no counterpart in a schema. Known: {', '.join(KNOWN)}. "
        "Write the columns into a schema by hand, or transform the files first."
    )
