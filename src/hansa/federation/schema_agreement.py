"""Means and deviations of the sites' tables, before the enrollment.

The server sends a schema in which means and deviations are open. Each site answers with exact sums over its training
rows, if its policy lets them leave. The schema follows from the sums and does not depend on their order.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from hansa.config import Config
from hansa.core.errors import HansaError
from hansa.data import DataError, Schema, SchemaMisfitError
from hansa.data.csv_folder import fraction_of_test_rows
from hansa.data.schema import Moments, Table, as_schema, complete, table_moments
from hansa.federation.messages import EnrollingTransport, ProtocolError, SiteConnections
from hansa.rounds.wire_format import Message, mapping_field, value_field

if TYPE_CHECKING:
    from hansa.federation.policy import TablePolicy

log = logging.getLogger("hansa")

SCHEMA, SCHEMA_REPLY = "schema", "summary"
CSV = "csv-folder"


@dataclass(frozen=True, slots=True, eq=False)
class SchemaRequest(Message):
    """Asks a site for the sums of the open columns of a schema, over its training rows."""

    kind = SCHEMA
    site: str = value_field(str)
    schema: str = value_field(str)
    test: float = value_field(lambda value: float(value) if 0 <= value < 1 else 0.0, default=0.0)
    seed: int = value_field(int, default=0)


@dataclass(frozen=True, slots=True, eq=False)
class SchemaReply(Message):
    """A site's sums: the moments of each open column, over all its tables."""

    kind = SCHEMA_REPLY
    moments: Mapping[str, Moments] = mapping_field(str, Moments.from_json, Moments.to_json)


def misfit(error: SchemaMisfitError, schema: str) -> ProtocolError:
    """Return what a site says of a table that does not fit: a code and a column of the server's schema. The rest is
    logged here.

    >>> schema = Schema.from_dict({"hansa_schema": 1, "columns": [{"name": "age", "kind": "number"}]}).to_json()
    >>> misfit(SchemaMisfitError("north.csv, line 3: 'age' is 'old'.", "not-a-number", "age"), schema).detail
    "column 'age': not-a-number"
    >>> misfit(SchemaMisfitError("north.csv, line 3: 'own' is 'old'.", "not-a-number", "own"), schema).detail
    'not-a-number'
    """
    log.error("the table does not fit the schema: %s", error)
    agreed = Schema.from_json(schema) if schema else None
    names = [] if agreed is None else [column.name for column in agreed]
    split = agreed.split.column if agreed is not None and agreed.split is not None else ""
    column = error.column if error.column in (*names, split) else ""
    return ProtocolError("schema", f"column {column!r}: {error.code}" if column else error.code, error.code, column)


def answer_request(
    request: SchemaRequest, tables: Callable[[Schema], Sequence[Table]], policy: TablePolicy
) -> SchemaReply:
    """Return a site's sums over its tables, within its policy."""
    try:
        schema = Schema.from_json(request.schema)
    except DataError as error:
        raise ProtocolError("schema", "the server's schema cannot be read") from error
    try:
        sums = [table_moments(schema, table, request.test, request.seed) for table in tables(schema)]
        moments = {name: reduce(Moments.merge, (part[name] for part in sums)) for name in sums[0]}
        for name, total in moments.items():
            if not policy.moments:
                text = f"the policy lets no sum of {name!r} leave the site. Set table.moments, or list mean and std."
                raise SchemaMisfitError(text, "not-agreed", name)
            if total.count < policy.rows:
                text = f"{name!r}: the policy lets no sum of {total.count} rows leave the site, only of {policy.rows}."
                raise SchemaMisfitError(text, "too-few-rows", name)
    except SchemaMisfitError as error:
        raise misfit(error, request.schema) from None
    return SchemaReply(moments)


def draft_schema(config: Config) -> Schema | None:
    """Return the schema of a configuration, if its data are tables with one."""
    section = config.data
    value = section.options.get("schema") if section.factory is None and section.name == CSV else None
    return None if value is None else as_schema(value)


def row_choice(config: Config, schema: Schema) -> tuple[float, int]:
    """Return the fraction of test rows and the seed of their choice, as a simulation takes them."""
    seed = 0 if config.data.seed is None else config.data.seed
    return fraction_of_test_rows(schema, config.data.options.get("test")), seed


def agree_schema(connections: SiteConnections, sites: Sequence[str], draft: Schema, config: Config) -> Schema:
    """Ask all sites for their sums and return the complete schema."""
    test, seed = row_choice(config, draft)
    transport = EnrollingTransport(connections, dict.fromkeys(sites, b""), deadline=math.inf)
    requests = {site: SchemaRequest(site, draft.to_json(), test, seed).to_bytes() for site in sites}
    open_columns = {column.name for column in draft if column.is_open}
    moments: dict[str, Mapping[str, Moments]] = {}
    for site, answer in transport.ask_all(requests).items():
        try:
            moments[site] = SchemaReply.from_bytes(answer).moments
        except (ValueError, RecursionError) as error:  # also FrameError and DataError
            raise HansaError(f"site {site}: its sums of a table cannot be read.") from error
        if set(moments[site]) != open_columns:
            raise HansaError(f"site {site}: its sums are not of the columns that are open in the schema.")
    schema = complete(draft, [moments[site] for site in sites])
    log.info("the sites agreed on the schema %s", schema.sha256)
    return schema
