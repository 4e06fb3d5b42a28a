"""From the sections of a file to the words of a preset: one table a section, and what each preset understands."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hansa import presets
from hansa.algorithm import Algorithm
from hansa.config import parts
from hansa.config.parts import Misfit
from hansa.config.sections import Config
from hansa.config.text import Keys
from hansa.errors import HansaError, near

TABLES: Mapping[str, Mapping[str, str]] = {
    "local": {
        "lr": "local_lr",
        "steps": "steps",
        "epochs": "epochs",
        "batch_size": "batch_size",
        "momentum": "local_momentum",
        "weight_decay": "weight_decay",
        "clip": "clip",
    },
    "server": {
        "lr": "server_lr",
        "weights": "weights",
        "momentum": "momentum",
        "b1": "b1",
        "b2": "b2",
        "eps": "eps",
        "v0": "v0",
        "bias_correction": "bias_correction",
        "eps_inside": "eps_inside",
    },
    "gossip": {
        "topology": "topology",
        "clusters": "clusters",
        "reporters": "reporters",
        "active": "active",
        "every": "every",
        "adapted": "adapted",
        "compressor": "gossip_compressor",
    },
    "compress": {"compressor": "compressor", "two_way": "two_way"},
}
"""Key in a section -> word of the presets."""

SAMPLING = ("participation", "sampler")
PARTS: Mapping[str, parts.Slot] = {"lr": parts.RATE, "steps": parts.WORK, **parts.WORDS}


class Word(NamedTuple):
    """A word that a preset understands, with its type and default where its signature tells them."""

    name: str
    hint: Any = Any
    default: Any = inspect.Parameter.empty


def words(preset: Callable[..., Algorithm]) -> dict[str, Word]:
    """Everything a preset may be told.

    >>> sorted(set(words(presets.fedprox)) - set(words(presets.fedavg)))
    ['mu']
    """
    found: dict[str, Word] = {}
    hints = typing.get_type_hints(preset)
    for name, parameter in inspect.signature(preset).parameters.items():
        hint = hints.get(name, Any)
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            for vocabulary in typing.get_args(hint) or (presets.Common,):
                found.update({word: Word(word, said) for word, said in typing.get_type_hints(vocabulary).items()})
        else:
            found[name] = Word(name, hint, parameter.default)
    return found


def own_words(preset: Callable[..., Algorithm]) -> dict[str, Word]:
    """The words that stand in the section ``algorithm``: those that no other section has.

    >>> own_words(presets.fedprox)["mu"].default
    0.01
    """
    shared = {word for table in TABLES.values() for word in table.values()} | set(SAMPLING)
    return {name: word for name, word in words(preset).items() if name not in shared}


def find_preset(name: str) -> Callable[..., Algorithm]:
    """A preset by its name, as `hansa.presets.named` finds it."""
    known = presets.catalogue()
    plain = name.lower().replace("+", "").replace("-", "_")
    if plain not in known:
        raise Misfit(("algorithm", "preset"), f"no preset {name!r}. {near(plain, known)}")
    return known[plain]


def misfits(config: Config) -> Iterator[Misfit]:
    """What a file says that its preset does not understand."""
    preset = find_preset(config.algorithm.preset)
    name, known, own = preset.__name__, words(preset), own_words(preset)
    for section, key, word, _ in _given(config):
        if word not in known:
            having = [other for other, made in presets.catalogue().items() if word in words(made)]
            who = f" It is a word of {', '.join(having)}." if having else ""
            yield Misfit((section, key), f"{name} has no such word.{who}")
    for word in config.algorithm.own:
        if word not in own:
            yield Misfit(("algorithm", word), _elsewhere(name, word, own))
    if config.sample is not None and not known.keys() & set(SAMPLING):
        yield Misfit(("sample",), f"{name} chooses its participants itself.")


def algorithm(config: Config) -> Algorithm:
    """The algorithm that a configuration describes."""
    for misfit in misfits(config):
        raise misfit
    preset = find_preset(config.algorithm.preset)
    told: dict[str, Any] = {}
    for section, key, word, value in _given(config):
        told[word] = _part(PARTS.get(key), value, (section, key))
    for word, value in config.algorithm.own.items():
        told[word] = _part(parts.WORDS.get(word), value, ("algorithm", word))
    if told.get("batch_size") == "all":
        told["batch_size"] = None
    if config.sample is not None:
        told.update(_sampling(preset, config.sample))
    try:
        made = preset(**told)
        changes = {name: getattr(config, name) for name in ("uplink", "downlink", "aggregate")}
        exchanged = {name: CHANNEL[name].build(value) for name, value in changes.items() if value is not None}
        return made.on("model", **exchanged) if exchanged else made
    except HansaError as error:
        raise Misfit(_blame(config, str(error)), str(error)) from error


CHANNEL = {"uplink": parts.UPLINK, "downlink": parts.DOWNLINK, "aggregate": parts.AGGREGATE}


def _given(config: Config) -> Iterator[tuple[str, str, str, Any]]:
    """Section, key, word and value of everything that was said in the sections."""
    for section, table in TABLES.items():
        held = getattr(config, section)
        for key, word in table.items():
            value = getattr(held, key)
            if value is not None:
                yield section, key, word, value


def _sampling(preset: Callable[..., Algorithm], value: Mapping[str, Any]) -> dict[str, Any]:
    known = words(preset)
    if value["kind"] == "uniform" and set(value) == {"kind", "participation"} and "participation" in known:
        return {"participation": value["participation"]}
    if "sampler" not in known:
        raise Misfit(("sample",), f"{preset.__name__} takes a participation only, such as {{participation: 0.1}}.")
    return {"sampler": parts.SAMPLER.build(value)}


def _part(slot: parts.Slot | None, value: Any, keys: Keys) -> Any:
    if slot is None:
        return tuple(value) if isinstance(value, list) else value
    try:
        return slot.build(value)
    except Misfit as misfit:
        raise Misfit((*keys, *misfit.keys), misfit.message) from misfit


def _elsewhere(preset: str, word: str, own: Mapping[str, Word]) -> str:
    places = [f"{section}.{key}" for section, table in TABLES.items() for key, w in table.items() if word in (key, w)]
    if word in SAMPLING:
        places.append("sample")
    if places:
        return f"it stands elsewhere: {' or '.join(places)}."
    return f"{preset} has no such word. {near(word, own) if own else 'It has none of its own.'}"


def _blame(config: Config, message: str) -> Keys:
    """The key whose word an error names, as ``fedams(b1=2)`` names b1; the algorithm where it names none."""
    start = message.find("(") + 1
    named = message[start:].split("=")[0] if start else ""
    for section, key, word, _ in _given(config):
        if named and named in (word, key):
            return section, key
    return ("algorithm", named) if named in config.algorithm.own else ("algorithm",)
