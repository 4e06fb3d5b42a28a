"""Agree on what is open in a schema: categories and moments, from summaries of the tables.

A simulation merges the summaries of its files, a federation those that its sites send; both call `complete`. A site
sends only what its rules allow:

- names of categories on its list; of others only keyed hashes, and then the names that enough sites have in common;
- exact sums (`Moments`) of columns with enough rows.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal, TypeAlias

from hansa.core.errors import short_repr
from hansa.data.files import DataError
from hansa.data.schema.columns import TableColumn, Unknown
from hansa.data.schema.encoding import (
    Mask,
    SchemaMisfitError,
    choose_test_rows,
    column_moments,
    encode_for_training,
    parse_categories,
    parse_numbers,
)
from hansa.data.schema.moments import Moments
from hansa.data.schema.table_schema import Schema
from hansa.data.schema.tables import Table

MAX_CLASSES = 10_000
"""Classes that are all integers below this are numbered by their value."""
_MAX_NAMES = 100_000

Reveal: TypeAlias = Literal["none", "shared", "all"]


@dataclass(frozen=True, slots=True)
class SharingRules:
    """What a site sends about its table to agree on a schema.

    Args:
        categories: Names of categories besides those of ``allow``: "none"; "shared", those that ``sites`` or more sites
            have, found by comparing keyed hashes; "all".
        allow: Names that may be sent, by column.
        sites: How many sites must have a name in common.
        moments: Whether number, sum and sum of squares of a column may be sent.
        rows: The fewest rows of a column whose moments are sent.

    >>> SharingRules(allow={"ward": ("icu",)}).allow["ward"]
    ('icu',)
    """

    categories: Reveal = "none"
    allow: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sites: int = 2
    moments: bool = False
    rows: int = 10


OPEN_RULES = SharingRules("all", moments=True, rows=1)
"""The rules of a simulation, which has all tables."""


@dataclass(frozen=True, slots=True)
class TableSummary:
    """What one site says about its table.

    Args:
        names: Names of categories that it reveals, by column.
        hashes: Keyed hashes of further names, by column.
        moments: Moments by column.
        sites: How many sites must have a name in common before this one reveals it.
    """

    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hashes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    moments: Mapping[str, Moments] = field(default_factory=dict)
    sites: int = 1

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "names": {column: list(values) for column, values in self.names.items()},
            "hashes": {column: list(values) for column, values in self.hashes.items()},
            "moments": {column: moments.to_json() for column, moments in self.moments.items()},
            "sites": self.sites,
        }

    @classmethod
    def from_json(cls, content: Any) -> TableSummary:
        """Return the summary of plain data."""
        if not isinstance(content, Mapping) or set(content) != {"names", "hashes", "moments", "sites"}:
            raise DataError("summary of a table: expected names, hashes, moments and sites.")
        if not all(isinstance(content[part], Mapping) for part in ("names", "hashes", "moments")):
            raise DataError("summary of a table: expected mappings by column.")
        if not isinstance(content["sites"], int) or content["sites"] < 1:
            raise DataError("summary of a table: expected the number of sites.")
        return cls(
            {str(column): _names(values) for column, values in content["names"].items()},
            {str(column): _names(values) for column, values in content["hashes"].items()},
            {str(column): Moments.from_json(values) for column, values in content["moments"].items()},
            content["sites"],
        )


def summarize(
    draft: Schema,
    table: Table,
    rules: SharingRules = OPEN_RULES,
    *,
    salt: bytes = b"",
    reveal: Mapping[str, Sequence[str]] | None = None,
    test: float = 0.0,
    seed: int = 0,
) -> TableSummary:
    """Return what a site may send for the open columns of a draft, from its training rows.

    Args:
        draft: The schema, in which columns are open.
        table: The table of one client.
        rules: What may be sent.
        salt: Key of the hashes of category names.
        reveal: Hashes, by column, of names that enough sites have in common: these names are sent.
        test: Fraction of rows for testing, if the schema has no split column.
        seed: Seed of the choice of test rows.
    """
    train = ~choose_test_rows(draft, table, test, seed)
    names: dict[str, tuple[str, ...]] = {}
    hashes: dict[str, tuple[str, ...]] = {}
    moments: dict[str, Moments] = {}
    for column in draft:
        if column.kind in ("category", "ordinal") or column.target == "class":
            texts = set(parse_categories(draft, column, table)) - {""}
            if column.categories is None:
                names[column.name], hashes[column.name] = _share_names(column, texts, rules, salt, reveal or {})
        elif column.kind not in ("id",):
            parse_numbers(draft, column, table)  # a table that does not fit is refused even if nothing is open
            if column.is_open:
                moments[column.name] = _share_moments(draft, column, table, train, rules)
    return TableSummary(names, hashes, moments, rules.sites if rules.categories == "shared" else 1)


def merge_client_summaries(summaries: Sequence[TableSummary]) -> TableSummary:
    """Return one summary of the tables of one site."""
    first = summaries[0]
    return TableSummary(
        {column: _union(each.names[column] for each in summaries) for column in first.names},
        {column: _union(each.hashes[column] for each in summaries) for column in first.hashes},
        {column: reduce(Moments.merge, (each.moments[column] for each in summaries)) for column in first.moments},
        first.sites,
    )


def shared_hashes(summaries: Sequence[TableSummary]) -> dict[str, tuple[str, ...]]:
    """Return the hashes that enough sites sent, by column: as many as the strictest site demands."""
    sites = max((summary.sites for summary in summaries), default=1)
    counts: dict[str, Counter[str]] = {}
    for summary in summaries:
        for column, hashes in summary.hashes.items():
            counts.setdefault(column, Counter()).update(set(hashes))
    return {
        column: tuple(sorted(each for each, count in counter.items() if count >= sites))
        for column, counter in counts.items()
    }


def complete(draft: Schema, summaries: Sequence[TableSummary]) -> Schema:
    """Return the schema with categories and moments from the summaries of all sites. Their order does not matter.

    Args:
        draft: The schema, in which columns are open.
        summaries: One summary per site.

    >>> draft = Schema((TableColumn("age", "number", scale="pooled"), TableColumn("ward", "category")))
    >>> north = Table("north", "north.csv", {"age": ["40", "50"], "ward": ["icu", "surgery"]}, [2, 3])
    >>> south = Table("south", "south.csv", {"age": ["60"], "ward": ["cardio"]}, [2])
    >>> schema = complete(draft, [summarize(draft, table) for table in (north, south)])
    >>> schema["ward"].categories, schema["age"].mean
    (('cardio', 'icu', 'surgery'), 50.0)
    """
    if not summaries:
        raise DataError("schema: no table to agree on.")
    agreed = []
    for column in draft:
        if not column.is_open:
            continue
        if column.lists_categories:
            names = _union(each.names.get(column.name, ()) for each in summaries)
            if not names:
                raise SchemaMisfitError(
                    f"schema: the sites have no value of {column.name!r} in common that they may name. List its "
                    "categories in the schema.", "not-agreed", column.name,
                )  # fmt: skip
            hidden = any(each.hashes.get(column.name) for each in summaries)
            unknown: Unknown = "zero" if hidden and column.kind == "category" else column.unknown
            agreed.append(replace(column, categories=_in_order(column, names), unknown=unknown))
        else:
            moments = [each.moments[column.name] for each in summaries if column.name in each.moments]
            if len(moments) < len(summaries):
                raise SchemaMisfitError(
                    f"schema: {len(summaries) - len(moments)} of {len(summaries)} sites send no moments of "
                    f"{column.name!r}.", "not-agreed", column.name,
                )  # fmt: skip
            mean, std = reduce(Moments.merge, moments).mean_and_std()
            agreed.append(replace(column, mean=mean, std=std if column.scale == "pooled" else None))
    return draft.replace_columns(*agreed)


def check_fit(schema: Schema, table: Table, *, test: float = 0.0, seed: int = 0) -> None:
    """Raise `SchemaMisfitError` unless the table fits the schema."""
    encode_for_training(schema, table, test=test, seed=seed)


def name_hash(salt: bytes, column: str, name: str) -> str:
    """Return the keyed hash of a category name: HMAC-SHA256 of column and name."""
    return hmac.new(salt, f"{len(column)}:{column}:{name}".encode(), hashlib.sha256).hexdigest()


def _share_names(
    column: TableColumn, texts: set[str], rules: SharingRules, salt: bytes, reveal: Mapping[str, Sequence[str]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    allowed = texts if rules.categories == "all" else texts & set(rules.allow.get(column.name, ()))
    others = sorted(texts - allowed)
    if rules.categories == "none":
        if others and column.unknown == "refuse":
            raise SchemaMisfitError(
                f"{column.name!r}: the policy keeps {len(others)} of {len(texts)} category names here. Add them to "
                "table.allow, set table.categories: shared, or set unknown: zero in the schema.",
                "not-agreed", column.name,
            )  # fmt: skip
        return tuple(sorted(allowed)), ()
    wanted = set(reveal.get(column.name, ()))
    hashes = {text: name_hash(salt, column.name, text) for text in others}
    named = allowed | {text for text, each in hashes.items() if each in wanted}
    return tuple(sorted(named)), tuple(sorted(each for text, each in hashes.items() if text not in named))


def _share_moments(draft: Schema, column: TableColumn, table: Table, train: Mask, rules: SharingRules) -> Moments:
    moments = column_moments(draft, column, table, train)
    if not rules.moments or moments.count < rules.rows:
        reason = "no moments" if not rules.moments else f"no moments of fewer than {rules.rows} rows"
        raise SchemaMisfitError(
            f"{column.name!r}: the policy lets {reason} leave the site. Set table.moments, or write mean and std into "
            "the schema.", "not-agreed" if not rules.moments else "too-few-rows", column.name,
        )  # fmt: skip
    return moments


def _in_order(column: TableColumn, names: Sequence[str]) -> tuple[str, ...]:
    """Return classes that are small integers by value, from 0 without gaps; other names sorted as texts."""
    if column.kind == "target" and all(name.isascii() and name.isdigit() and len(name) < 6 for name in names):
        numbers = [int(name) for name in names]
        if max(numbers) < MAX_CLASSES and all(str(int(name)) == name for name in names):
            return tuple(map(str, range(max(numbers) + 1)))
    return tuple(sorted(names))


def _union(parts: Any) -> tuple[str, ...]:
    return tuple(sorted(set(itertools.chain.from_iterable(parts))))


def _names(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or len(values) > _MAX_NAMES:
        raise DataError(f"summary of a table: {short_repr(values)}: expected a list of texts.")
    if not all(isinstance(value, str) and len(value) <= 1000 for value in values):
        raise DataError("summary of a table: expected texts of at most 1000 characters.")
    return tuple(values)
