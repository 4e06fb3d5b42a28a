"""The composition that a file describes: a preset with its words, and the parts that were exchanged in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hansa.algorithm import Algorithm, Channel, LocalPhase, Mixing
from hansa.config.arguments import SHORT_FORMS, Preset, find_preset, given, misfits, title, words
from hansa.config.registry import Argument, Expression, Keys, Misfit, Writer, signature_of, slot_of
from hansa.config.sections import Config
from hansa.core.errors import HansaError
from hansa.core.types import MODEL
from hansa.gossip import Activity, as_activity, ring
from hansa.local import epochs, fixed
from hansa.sample import Sampler, per_cluster
from hansa.server import chain


@dataclass(frozen=True, slots=True)
class Composition:
    """What a preset makes of the words it is told, and the parts that are exchanged in that."""

    preset: Preset
    told: Mapping[str, Any]
    made: Algorithm
    sampler: Sampler | None
    local: Mapping[str, Any]
    channels: Mapping[str, Mapping[str, Any]]

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm itself."""
        return self.made.exchange(sampler=self.sampler, local=self.local, channels=self.channels)

    @property
    def remarks(self) -> list[str]:
        """The composition and its Python, as lines that stand above a resolved file."""
        python = [f"  {line}" for line in (*self.python.imports, self.python.text)]
        return [f"composition: {self.algorithm!r}", "python:", *python]

    @property
    def python(self) -> Expression:
        """Python that makes an equal algorithm."""
        writer = Writer()
        text = writer.call(self.preset, self.told)
        parts = {"sampler": self.sampler, "local": self.local, "channels": self.channels}
        exchanged = {word: value for word, value in parts.items() if value}
        if list(exchanged) == ["local"]:
            text += f".with_local({writer.words(self.local)})"
        elif list(exchanged) == ["channels"] and self.channels.keys() <= self.made.channels.keys():
            text += "".join(f".on({name!r}, {writer.words(changes)})" for name, changes in self.channels.items())
        elif exchanged:
            text += f".exchange({writer.words(exchanged)})"
        return Expression(text, writer.imports)


def algorithm(config: Config) -> Algorithm:
    """The algorithm that a configuration describes."""
    found = composition(config)
    with _blamed(config):
        return found.algorithm


def composition(config: Config) -> Composition:
    """What a configuration composes, or `Misfit` where it says what cannot be."""
    if config.python is not None:
        told = (
            "begun in Python, with an algorithm and a task that no file can hold: hansa.resume(FOLDER, algorithm, task)"
        )
        raise Misfit(("python",), f"{told} goes on with it.")
    for misfit in misfits(config):
        raise misfit
    preset = find_preset(config.algorithm.preset)
    composer = _Composer(words(preset))
    with _blamed(config):
        for section, key, word, value in given(config):
            if section != "server" or key != "lr" or config.server.chain is None:
                composer.say(section, key, word, value)
        for word, value in config.algorithm.own.items():
            composer.tell(word, value, ("algorithm", word))
        if config.sample is not None:
            composer.sample(config.sample)
        made = preset(**composer.told)
        if not isinstance(made, Algorithm):
            raise HansaError(f"{title(preset)} makes no Algorithm: it made {made!r}.")
        local = composer.changes(made)
    return Composition(preset, composer.told, made, composer.sampler, local, _channels(config))


class _Composer:
    """Sorts what a file says: a word of the preset, where it has that word, or else a part to exchange."""

    def __init__(self, known: Mapping[str, Argument]) -> None:
        self.known = known
        self.told: dict[str, Any] = {}
        self.sampler: Sampler | None = None
        self._local: dict[str, Any] = {}
        self._mixing: dict[str, Any] = {}

    def say(self, section: str, key: str, word: str, value: Any) -> None:
        """Take in a key of a section."""
        at = (section, key)
        if word in self.known:
            self.tell(word, None if (key, value) == ("batch_size", "all") else value, at)
        elif at == ("gossip", "reporters"):
            asked = _built(Argument(key, int | float | Sampler), value, at)
            self.sampler = per_cluster(asked) if isinstance(asked, (int, float)) else asked
        elif section == "gossip":
            hint = float | Activity if key == "active" else signature_of(Mixing).arguments[key].hint
            asked = _built(Argument(key, hint), value, at)
            self._mixing[key] = as_activity(asked) if key == "active" else asked
        elif key == "epochs":
            self._local["steps"] = epochs(value)
        elif key == "batch_size":
            self._local[key] = None if value == "all" else value
        elif section == "local":
            hint = signature_of(LocalPhase).arguments[key].hint
            asked = _built(Argument(key, int | Sequence[int] | hint if key == "steps" else hint), value, at)
            self._local[key] = fixed(asked) if isinstance(asked, (int, list)) and key == "steps" else asked

    def tell(self, word: str, value: Any, at: Keys) -> None:
        """Take in a word of the preset."""
        self.told[word] = _built(self.known[word], value, at)

    def sample(self, value: Mapping[str, Any]) -> None:
        """Take in who takes part."""
        asked = _built(Argument("sample", Sampler), value, ("sample",))
        if value == {"kind": "uniform", "participation": value.get("participation")} and "participation" in self.known:
            self.told["participation"] = asked.participation
        elif "sampler" in self.known:
            self.told["sampler"] = asked
        elif "participation" in self.known:
            raise Misfit(("sample",), "this preset takes a participation only, such as {participation: 0.1}.")
        else:
            self.sampler = asked

    def changes(self, made: Algorithm) -> dict[str, Any]:
        """What is exchanged in the local phase that the preset made; gossip that it has not is a ring, if not said."""
        if not self._mixing:
            return self._local
        mixing = Mixing(ring()) if made.local.mixing is None else made.local.mixing
        return {**self._local, "mixing": replace(mixing, **self._mixing)}


def _channels(config: Config) -> dict[str, dict[str, Any]]:
    """The parts exchanged on each channel, the short forms for the model's among them."""
    found: dict[str, dict[str, Any]] = {}

    def exchange(channel: str, part: str, value: Any, at: Keys) -> None:
        if value is not None:
            found.setdefault(channel, {})[part] = _built(signature_of(Channel).arguments[part], value, at)

    for name, section in config.channels.items():
        for part in signature_of(Channel).arguments:
            exchange(name, part, getattr(section, part, None), ("channels", name, part))
    for part in SHORT_FORMS:
        exchange(MODEL, part, getattr(config, part), (part,))
    exchange(MODEL, "server", config.server.chain, ("server", "chain"))
    if config.server.chain is not None and config.server.lr is not None:
        said = found[MODEL]["server"]
        exchange(MODEL, "server", {"kind": "scale", "lr": config.server.lr}, ("server",))
        found[MODEL]["server"] = chain(*(said.parts if isinstance(said, chain) else (said,)), found[MODEL]["server"])
    return found


def _built(argument: Argument, value: Any, at: Keys) -> Any:
    try:
        return slot_of(argument).build(value)
    except Misfit as misfit:
        raise misfit.under(*at) from misfit


@contextmanager
def _blamed(config: Config) -> Iterator[None]:
    """Errors of the composition, placed at the key that they are about."""
    try:
        yield
    except Misfit:
        raise
    except HansaError as error:
        raise Misfit(_blame(config, str(error)), str(error)) from error
    except TypeError as error:  # of a preset of one's own
        raise Misfit(("algorithm",), f"{config.algorithm.preset}: {error}.") from error


def _blame(config: Config, message: str) -> Keys:
    """The key whose word an error names, as ``fedams(b1=2)`` names b1; the algorithm where it names none."""
    part, named = (re.match(r"(\w*)\((\w+)=", message) or re.match("()()", message)).groups()  # type: ignore[union-attr]
    for section, key, word, _ in given(config):
        if named and named in (word, key):
            return section, key
    if named in config.algorithm.own:
        return "algorithm", named
    if part in ("LocalPhase", "Mixing"):
        return "local" if part == "LocalPhase" else "gossip", named
    channel = re.search(r"channel '(\w+)'", message)
    if channel and channel.group(1) in config.channels:
        return "channels", channel.group(1)
    return ("local", "solver") if "solver" in message and config.local.solver is not None else ("algorithm",)
