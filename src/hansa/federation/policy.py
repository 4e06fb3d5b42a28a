"""A site's policy: what it permits a server to do. The site writes it; it is never sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from hansa.config.sections import ConfigSection, Positive
from hansa.config.yaml_text import ConfigError, parse_document, read_document
from hansa.federation.messages import ProtocolError


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
    label_counts: bool = False
    """Whether label counts may leave the site. The number of samples of each client always does."""

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
