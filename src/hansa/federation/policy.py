"""A site's own rules: what of a server's charge it takes part in. The site writes them; they are never sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from hansa.config.sections import Count, Section
from hansa.config.yaml_text import ConfigError, parse, read
from hansa.federation.messages import NotOurs


class Policy(Section):
    """Everything has a default: no code of others, no label counts, frames of at most a gigabyte."""

    factories: tuple[str, ...] = Field(default=(), strict=False)
    """MODULE:NAME that a configuration may name: your own code, installed at the site. Nothing else is imported."""
    data: tuple[str, ...] | None = Field(default=None, strict=False)
    """Data sets that a configuration may name, where the site takes its data from there, on trials; by default all that
    Hansa knows."""
    rounds: Count = 10_000
    """A charge of more rounds, or an order of a later one, is refused."""
    steps: Count = 100_000
    """An order of more local steps is refused."""
    message: Annotated[int, Field(ge=1000)] = 1_000_000_000
    """Bytes of the largest frame that is taken."""
    label_counts: bool = False
    """Whether the numbers of samples by label may leave the site; how many samples there are always does."""

    @classmethod
    def load(cls, path: Path | str) -> Policy:
        """The policy in a YAML file."""
        document = read(path)
        try:
            return cls.model_validate(document.data)
        except ValidationError as error:
            raise ConfigError(
                [
                    document.problem(tuple(item["loc"]), f"{item['msg']}. Known: {', '.join(cls.model_fields)}.")
                    for item in error.errors()
                ]
            ) from error

    def check(self, config: str, *, of_config: bool) -> None:
        """Refuse a configuration that names code or data, or asks for rounds, which this site does not allow. Nothing
        that it names is looked at before."""
        try:
            said = parse(config, "charge").data
        except ConfigError as error:
            raise NotOurs("config", str(error)) from error
        for key, word in _words({name: value for name, value in said.items() if name != "name"}):
            if ":" in word and word not in self.factories:
                raise NotOurs("code", f"{key} names {word!r}, which this site's policy does not list under factories")
        if "python" in said:
            raise NotOurs("config", "the run was made in Python, and no configuration says of what")
        rounds = said.get("rounds", 0)
        if not isinstance(rounds, int) or rounds > self.rounds:
            raise NotOurs("rounds", f"a run of {rounds!r} rounds, this site's policy allows {self.rounds}")
        asked = said.get("data") or {}
        name = asked if isinstance(asked, str) else asked.get("name") or asked.get("factory")
        if of_config and self.data is not None and name not in (*self.data, *self.factories):
            raise NotOurs("data", f"the configuration names data {name!r}, which this site's policy does not list")


def _words(said: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(said, dict):
        for name, inner in said.items():
            yield from _words(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(said, list):
        for inner in said:
            yield from _words(inner, key)
    elif isinstance(said, str):
        yield key, said
