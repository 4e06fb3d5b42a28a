"""Agreement on the schema of the sites' tables, before the enrollment.

The server sends a draft with open columns. Each site answers with a summary that its policy allows: names of categories
on its list, keyed hashes of others, and exact sums. The server then asks once more, for the names whose hashes enough
sites sent. The schema follows from the summaries and does not depend on their order.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from hansa.config import Config
from hansa.core.errors import HansaError
from hansa.data import DataError, Schema, SchemaMisfitError
from hansa.data.csv_folder import fraction_of_test_rows
from hansa.data.schema.agreement import (
    SharingRules,
    TableSummary,
    complete,
    merge_client_summaries,
    shared_hashes,
    summarize,
)
from hansa.data.schema.table_schema import as_schema
from hansa.data.schema.tables import Table
from hansa.federation.enrollment import REFUSAL, Refusal
from hansa.federation.messages import Message, ProtocolError
from hansa.federation.transport import EnrollingTransport, SiteConnections
from hansa.rounds import wire_format
from hansa.rounds.wire_format import Blobs, Frame

log = logging.getLogger("hansa")

SCHEMA, SCHEMA_REPLY = "schema", "summary"
CSV = "csv-folder"


@dataclass(frozen=True, slots=True, eq=False)
class SchemaRequest(Message):
    """Asks a site for a summary of its tables: the draft, the key of the hashes, the hashes whose names are wanted, and
    which rows are for testing."""

    kind = SCHEMA
    site: str
    schema: str
    salt: bytes
    reveal: Mapping[str, Sequence[str]] = field(default_factory=dict)
    test: float = 0.0
    seed: int = 0

    def _head(self, blobs: Blobs) -> dict[str, Any]:
        return {
            "site": self.site,
            "schema": self.schema,
            "salt": self.salt.hex(),
            "reveal": {column: list(hashes) for column, hashes in self.reveal.items()},
            "test": self.test,
            "seed": self.seed,
        }

    @classmethod
    def _read(cls, head: Any, frame: Frame) -> Self:
        test = float(head["test"])
        return cls(
            str(head["site"]),
            str(head["schema"]),
            bytes.fromhex(head["salt"]),
            {str(column): tuple(map(str, hashes)) for column, hashes in head["reveal"].items()},
            test if 0 <= test < 1 else 0.0,
            int(head["seed"]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class SchemaReply(Message):
    """A site's summary of its tables."""

    kind = SCHEMA_REPLY
    summary: str

    def _head(self, blobs: Blobs) -> dict[str, Any]:
        return {"summary": self.summary}

    @classmethod
    def _read(cls, head: Any, frame: Frame) -> Self:
        return cls(str(head["summary"]))


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
    names += [] if agreed is None or agreed.split is None else [agreed.split.column]
    column = error.column if error.column in names else ""
    return ProtocolError("schema", f"column {column!r}: {error.code}" if column else error.code, error.code, column)


def answer_request(request: SchemaRequest, tables: Sequence[Table], rules: SharingRules) -> SchemaReply:
    """Return a site's summary of its tables, within its rules."""
    try:
        draft = Schema.from_json(request.schema)
    except DataError as error:
        raise ProtocolError("schema", "the draft is not a schema") from error
    try:
        summaries = [
            summarize(
                draft, table, rules, salt=request.salt, reveal=request.reveal, test=request.test, seed=request.seed
            )
            for table in tables
        ]
    except SchemaMisfitError as error:
        raise misfit(error, request.schema) from None
    return SchemaReply(json.dumps(merge_client_summaries(summaries).to_json()))


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
    """Ask all sites for summaries and return the complete schema."""
    salt = secrets.token_bytes(32)
    summaries = _ask(connections, sites, draft, config, salt, {})
    reveal = {column: hashes for column, hashes in shared_hashes(list(summaries.values())).items() if hashes}
    if reveal:
        summaries = _ask(connections, sites, draft, config, salt, reveal)
    schema = complete(draft, [summaries[site] for site in sites])
    log.info("the sites agreed on the schema %s", schema.sha256)
    return schema


def _ask(
    connections: SiteConnections,
    sites: Sequence[str],
    draft: Schema,
    config: Config,
    salt: bytes,
    reveal: Mapping[str, Sequence[str]],
) -> dict[str, TableSummary]:
    test, seed = row_choice(config, draft)
    transport = EnrollingTransport(connections, dict.fromkeys(sites, b""), lambda site, reply: None, deadline=math.inf)
    transport._enrolled.update(sites)  # the enrollment needs the schema and comes after it
    for site in sites:
        transport.send(site, SchemaRequest(site, draft.to_json(), salt, reveal, test, seed).to_bytes())
    summaries: dict[str, TableSummary] = {}
    while len(summaries) < len(sites):
        for site, answer in transport.receive():
            if wire_format.kind_of(answer) == REFUSAL:
                refusal = Refusal.from_bytes(answer)
                raise HansaError(f"site {site} does not take part: {refusal.reason}: {refusal.detail}")
            summaries[site] = _read_summary(site, answer, draft)
    return summaries


def _read_summary(site: str, answer: bytes, draft: Schema) -> TableSummary:
    try:
        summary = TableSummary.from_json(json.loads(SchemaReply.from_bytes(answer).summary))
    except (ValueError, RecursionError) as error:  # also FrameError and DataError
        raise HansaError(f"site {site}: its summary of a table cannot be read.") from error
    open_columns = {column.name for column in draft if column.is_open}
    if not {*summary.names, *summary.hashes, *summary.moments} <= open_columns:
        raise HansaError(f"site {site}: its summary has columns that the schema does not leave open.")
    return summary
