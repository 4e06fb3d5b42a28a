"""A site's policy: what it permits a server to do. The site writes it; it is never sent.

`Usage` counts the work that servers request, over all runs, against the budgets of the policy.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, ValidationError

from hansa.config.sections import ConfigSection, Positive
from hansa.config.yaml_text import ConfigError, parse_document, read_document
from hansa.core.errors import HansaError
from hansa.federation.messages import ProtocolError, refuse

MetricDisclosure: TypeAlias = Literal["none", "value", "sketch"]


class TablePolicy(ConfigSection):
    """What a site discloses about its tables before the enrollment, for open means and deviations. Default: nothing."""

    moments: bool = False
    """Whether number, sum and sum of squares of a column may leave the site, for scale: pooled and missing: mean."""
    rows: Positive = 10
    """The fewest training rows of a column whose sums are sent."""
    answers: Positive = 1
    """The most different questions for sums that are answered, over all runs. A question chooses the test rows, so two
    answers may differ by one row; a repeated one costs nothing."""


class Policy(ConfigSection):
    """The settings of a site. By default: no custom code, no label counts, frames of at most a gigabyte."""

    factories: tuple[str, ...] = Field(default=(), strict=False)
    """MODULE:NAME of your own installed code that a configuration may name. Nothing else is imported."""
    data: tuple[str, ...] | None = Field(default=None, strict=False)
    """Data sets that a configuration may name, for sites that take their data from it; by default all known ones. Also
    the folders and files that it may name: by default none."""
    rounds: Positive = 10_000
    """The most rounds of a run, which also bounds the trainings of a client and the evaluations in a run."""
    trainings: Positive = 10_000
    """The most trainings of a client, over all runs. A repeated message counts once."""
    evaluations: Positive = 10_000
    """The most models that are evaluated on the site's test rows, over all runs."""
    steps: Positive = 100_000
    """The most local steps of an order."""
    min_rows: Positive = 10
    """The fewest rows that an update is computed from: a client with fewer, or with less work, never takes part."""
    message: Annotated[int, Field(ge=1000)] = 1_000_000_000
    """The size of the largest accepted frame, in bytes."""
    parameters: Positive = 1_000_000_000
    """The most parameters and buffer entries of a model; they are counted before memory is allocated."""
    test_rows: Positive = 10
    """The fewest test rows whose loss, accuracy and metrics may leave the site; with fewer, nothing is said of them.
    Also the fewest rows of each class for an AUC, the fewest events for a C-index, and the smallest count in a
    sketch."""
    metrics: MetricDisclosure = "value"
    """What may leave the site of metrics that are not sums over rows, such as an AUC: none, their value over its test
    rows, or also a sketch: for the AUC, a histogram of the scores of each class."""
    label_counts: bool = False
    """Whether label counts may leave the site. The number of samples of each client always does."""
    table: TablePolicy = TablePolicy()

    @classmethod
    def load(cls, path: Path | str) -> Policy:
        """Load a policy from a YAML file."""
        document = read_document(path)
        try:
            return cls.model_validate(document.data)
        except ValidationError as error:
            hint = f"Known: {', '.join(cls.model_fields)}."
            problems = [document.problem(tuple(item["loc"]), f"{item['msg']}. {hint}") for item in error.errors()]
            raise ConfigError(problems) from error

    def check(self, config: str, *, data_from_config: bool) -> None:
        """Raise if a configuration names code, data or files, or has more rounds, than the policy permits. Nothing is
        imported or read before this check."""
        if len(config) > _MAX_CONFIG:
            raise ProtocolError("config", f"a configuration of {len(config)} characters, expected {_MAX_CONFIG}")
        try:
            settings = parse_document(config, "enrollment").data
        except ConfigError as error:
            raise ProtocolError("config", str(error)) from error
        for key, text in _strings({name: value for name, value in settings.items() if name != "name"}):
            if ":" in text and text not in self.factories:
                raise ProtocolError("code", f"{key} names {text!r}, which the policy does not list under factories")
        if "python" in settings:
            raise ProtocolError("config", "the run was made in Python and has no complete configuration")
        for name in _SERVER_SECTIONS:
            if settings.get(name) is not None:
                raise ProtocolError("config", f"{name}: is of simulations only, or of the server")
        rounds = settings.get("rounds", 0)
        if not isinstance(rounds, int) or rounds > self.rounds:
            raise ProtocolError("rounds", f"a run of {rounds!r} rounds, the site's policy permits {self.rounds}")
        if data_from_config:
            self._check_data(settings.get("data") or {})

    def _check_data(self, data: Any) -> None:
        """Raise if the data section names a data set or a file that the policy does not list."""
        name = data if isinstance(data, str) else data.get("name") or data.get("factory")
        if self.data is not None and name not in (*self.data, *self.factories):
            raise ProtocolError("data", f"the configuration names data {name!r}, which the site's policy does not list")
        for key, text in _strings(data):
            names = key.split(".")
            names_file = names[-1] in _FILE_KEYS or any(letter in text for letter in "/\\~")
            if names_file and text not in (self.data or ()) and text not in self.factories:
                raise ProtocolError("paths", f"data.{key} names {text!r}, which the policy does not list under data")


USAGE = "usage.sqlite"
"""The file of the counts in the site's folder."""
_MAX_CONFIG = 1 << 20
_SERVER_SECTIONS = ("profile", "links", "faults")
_FILE_KEYS = ("folder", "path", "file", "files", "root", "schema", "source", "cache")
REDONE = 3
"""How often a round may be repeated with another model, by a server that resumes from an older checkpoint."""


class Usage:
    """Counts what was computed for servers, over all runs. An entry is durable when `charge` returns, so before the
    answer leaves the site. Equal work is counted once: a repeated message costs nothing.

    Args:
        policy: The limits.
        path: The SQLite file; None counts in memory.

    >>> usage = Usage(Policy(rounds=2))
    >>> for digest in (b"a", b"a", b"b"): usage.charge("training", [0], "run", 0, digest)
    >>> usage.charge("training", [0], "run", 0, b"c")
    Traceback (most recent call last):
    hansa.federation.messages.ProtocolError: budget: client 0: 2 trainings in this run, the site's policy has rounds: 2
    """

    def __init__(self, policy: Policy, path: Path | None = None) -> None:
        self.policy = policy
        try:
            self._db = sqlite3.connect(path or ":memory:", isolation_level=None)
            self._db.executescript(
                "PRAGMA synchronous=FULL;"
                "CREATE TABLE IF NOT EXISTS work (kind TEXT, owner INTEGER, run TEXT, round INTEGER, digest BLOB,"
                " PRIMARY KEY (kind, owner, run, round, digest)) WITHOUT ROWID;"
                "CREATE TABLE IF NOT EXISTS total (kind TEXT, owner INTEGER, count INTEGER, PRIMARY KEY (kind, owner));"
            )
        except sqlite3.Error as error:
            raise HansaError(
                f"{path}: the counts of the budgets are damaged ({error}). Restore them from a backup."
            ) from error

    def charge(
        self,
        kind: Literal["training", "evaluation", "question"],
        owners: Sequence[int],
        run: str,
        round: int,
        digest: bytes,
    ) -> None:
        """Count work for each owner, or raise and count nothing if that exceeds a limit.

        Args:
            kind: What was asked for.
            owners: The site's own numbers of the clients.
            run: The run; of a question its digest, since it belongs to none.
            round: The round.
            digest: Identifies the work in its round: equal digests have equal results.
        """
        work = "SELECT count(*) FROM work WHERE kind = ? AND owner = ? AND run = ?"
        totals = {"training": "trainings", "evaluation": "evaluations", "question": "table.answers"}
        total: int = attrgetter(totals[kind])(self.policy)
        with self._db:  # commits, or rolls back
            self._db.execute("BEGIN IMMEDIATE")
            for owner in owners:
                key = (kind, owner, run)
                if self._count(f"{work} AND round = ? AND digest = ?", *key, round, digest):
                    continue
                charged = self._count("SELECT count FROM total WHERE kind = ? AND owner = ?", kind, owner)
                for count, limit, name in (
                    (charged, total, f"over all runs, the site's policy has {totals[kind]}: {total}"),
                    (self._count(work, *key), self.policy.rounds,
                     f"in this run, the site's policy has rounds: {self.policy.rounds}"),
                    (self._count(f"{work} AND round = ?", *key, round), REDONE, f"of round {round + 1}"),
                ):  # fmt: skip
                    refuse(count >= limit, "budget", f"client {owner}: {count} {kind}s {name}")
                self._db.execute("INSERT INTO work VALUES (?, ?, ?, ?, ?)", (*key, round, digest))
                self._db.execute("INSERT OR REPLACE INTO total VALUES (?, ?, ?)", (kind, owner, charged + 1))

    def _count(self, query: str, *values: object) -> int:
        row = self._db.execute(query, values).fetchone()
        return int(row[0]) if row else 0


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, nested in value.items():
            yield from _strings(nested, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for nested in value:
            yield from _strings(nested, key)
    elif isinstance(value, str):
        yield key, value
