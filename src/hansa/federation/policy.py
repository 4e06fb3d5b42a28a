"""A site's policy: what it permits a server to do. The site writes it; it is never sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, ValidationError

from hansa.config.sections import ConfigSection, Positive
from hansa.config.yaml_text import ConfigError, parse_document, read_document
from hansa.data.schema.agreement import SharingRules
from hansa.federation.messages import ProtocolError

MetricDisclosure: TypeAlias = Literal["none", "value", "sketch"]


class TablePolicy(ConfigSection):
    """What a site sends about its tables while the federation agrees on a schema. By default: nothing."""

    categories: Literal["none", "shared", "all"] = "none"
    """Names of categories besides those of ``allow``: none; those that other sites have too; or all."""
    allow: dict[str, list[str]] = Field(default_factory=dict)
    """Names of categories that may leave the site, by column."""
    sites: Annotated[int, Field(ge=2)] = 2
    """How many sites, this one included, must have a name in common before it is sent. Before that, a keyed hash is."""
    moments: bool = False
    """Whether number, sum and sum of squares of a column may leave the site, for scale: pooled and missing: mean."""
    rows: Positive = 10
    """The fewest training rows of a column whose sums are sent."""

    @property
    def rules(self) -> SharingRules:
        """The rules of the agreement."""
        return SharingRules(self.categories, self.allow, self.sites, self.moments, self.rows)


class Policy(ConfigSection):
    """The settings of a site. By default: no custom code, no label counts, frames of at most a gigabyte."""

    factories: tuple[str, ...] = Field(default=(), strict=False)
    """MODULE:NAME of your own installed code that a configuration may name. Nothing else is imported."""
    data: tuple[str, ...] | None = Field(default=None, strict=False)
    """Data sets that a configuration may name, for sites that take their data from it; by default all known ones."""
    rounds: Positive = 10_000
    """The most rounds of a run."""
    steps: Positive = 100_000
    """The most local steps of an order."""
    message: Annotated[int, Field(ge=1000)] = 1_000_000_000
    """The size of the largest accepted frame, in bytes."""
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
            raise ConfigError(
                [
                    document.problem(tuple(item["loc"]), f"{item['msg']}. Known: {', '.join(cls.model_fields)}.")
                    for item in error.errors()
                ]
            ) from error

    def check(self, config: str, *, data_from_config: bool) -> None:
        """Raise if a configuration names code or data, or has more rounds, than the policy permits. Nothing that it
        names is imported or read before."""
        try:
            settings = parse_document(config, "enrollment").data
        except ConfigError as error:
            raise ProtocolError("config", str(error)) from error
        for key, text in _strings({name: value for name, value in settings.items() if name != "name"}):
            if ":" in text and text not in self.factories:
                raise ProtocolError(
                    "code", f"{key} names {text!r}, which the site's policy does not list under factories"
                )
        if "python" in settings:
            raise ProtocolError("config", "the run was made in Python and has no complete configuration")
        rounds = settings.get("rounds", 0)
        if not isinstance(rounds, int) or rounds > self.rounds:
            raise ProtocolError("rounds", f"a run of {rounds!r} rounds, the site's policy permits {self.rounds}")
        data = settings.get("data") or {}
        name = data if isinstance(data, str) else data.get("name") or data.get("factory")
        if data_from_config and self.data is not None and name not in (*self.data, *self.factories):
            raise ProtocolError("data", f"the configuration names data {name!r}, which the site's policy does not list")


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _strings(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner, key)
    elif isinstance(value, str):
        yield key, value
