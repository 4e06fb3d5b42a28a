"""From the sections of a file to the words of a preset: one table a section, and what each preset understands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hansa import presets
from hansa.algorithm import Algorithm
from hansa.config.registry import KINDS, Argument, Misfit, plain, signature_of
from hansa.config.sections import Config
from hansa.core.errors import suggestion

TABLES: Mapping[str, Mapping[str, str]] = {
    "local": {
        "lr": "local_lr",
        "steps": "steps",
        "epochs": "epochs",
        "batch_size": "batch_size",
        "momentum": "local_momentum",
        "weight_decay": "weight_decay",
        "max_grad_norm": "max_grad_norm",
        "solver": "solver",
        "optimizer": "optimizer",
        "optimizer_state": "optimizer_state",
        "decoupled_weight_decay": "decoupled_weight_decay",
        "private_blocks": "private_blocks",
        "frozen_blocks": "frozen_blocks",
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
        "gossip_every": "gossip_every",
        "reporters_only": "reporters_only",
        "keep_local_models": "keep_local_models",
        "average_every": "average_every",
        "order": "order",
        "compressor": "gossip_compressor",
        "consensus_rate": "consensus_rate",
    },
    "compress": {"compressor": "compressor", "two_way": "two_way"},
}
"""Key in a section -> word of the presets."""

SAMPLING = ("participation", "sampler")
SHORT_FORMS = ("uplink", "downlink", "aggregate")
"""Keys that are short for those of channels.model; server.chain is short for its server."""
COMPOSED = ("local", "gossip")
"""Sections whose keys, where they are no words of a preset, exchange parts of what it composes."""

Preset = Callable[..., Algorithm]


class Given(NamedTuple):
    """Something said in a section: its key, the word that presets have for it, and its value."""

    section: str
    key: str
    word: str
    value: Any


def words(preset: Preset) -> dict[str, Argument]:
    """Everything a preset may be told; ``**common`` without a type is the vocabulary that all presets share.

    >>> sorted(set(words(presets.fedprox)) - set(words(presets.fedavg)))
    ['mu']
    """
    found = signature_of(preset)
    common = signature_of(presets.fedavg).arguments if found.open else {}
    return {**common, **found.arguments}


def own_words(preset: Preset) -> dict[str, Argument]:
    """The words that stand in the section ``algorithm``: those that no other section has.

    >>> own_words(presets.fedprox)["mu"].default
    0.01
    """
    shared = {word for table in TABLES.values() for word in table.values()} | set(SAMPLING)
    return {name: word for name, word in words(preset).items() if name not in shared}


def find_preset(name: str) -> Preset:
    """A preset by its name, Hansa's or a plug-in's, or a function of one's own as MODULE:FUNCTION."""
    try:
        return KINDS["preset"].find(name)
    except Misfit as misfit:
        raise misfit.under("algorithm", "preset") from misfit


def given(config: Config) -> Iterator[Given]:
    """Everything that was said in the sections that have tables."""
    for section, table in TABLES.items():
        held = getattr(config, section)
        for key, word in table.items():
            value = getattr(held, key)
            if value is not None:
                yield Given(section, key, word, value)


def misfits(config: Config) -> Iterator[Misfit]:
    """What a file says that its preset does not understand."""
    preset = find_preset(config.algorithm.preset)
    name, known, own = title(preset), words(preset), own_words(preset)
    for section, key, word, _ in given(config):
        if section == "server" and config.server.chain is not None:
            if key not in ("lr", "weights"):
                yield Misfit((section, key), f"server.chain takes the server's place: say {key} inside it.")
        elif word not in known and section not in COMPOSED:
            having = [other for other, made in KINDS["preset"].items() if word in words(made)]
            who = f" It is a word of {', '.join(having)}." if having else ""
            yield Misfit((section, key), f"{name} has no such word.{who}")
    for word in config.algorithm.own:
        if word not in own:
            yield Misfit(("algorithm", word), _elsewhere(name, word, own))
    for part in SHORT_FORMS:
        if getattr(config, part) is not None and getattr(config.channels.get("model"), part, None) is not None:
            yield Misfit(("channels", "model", part), f"stands twice: {part} is short for channels.model.{part}.")
    if config.gossip.reporters is not None and config.sample is not None and "reporters" not in known:
        yield Misfit(("gossip", "reporters"), "sample says who takes part: expected one of the two.")
    if config.server.chain is not None and getattr(config.channels.get("model"), "server", None) is not None:
        yield Misfit(("channels", "model", "server"), "stands twice: server.chain is short for channels.model.server.")


def title(preset: Preset) -> str:
    """What messages call a preset."""
    return getattr(preset, "__name__", repr(preset))


def _elsewhere(preset: str, word: str, own: Mapping[str, Argument]) -> str:
    places = [f"{section}.{key}" for section, table in TABLES.items() for key, w in table.items() if word in (key, w)]
    if word in SAMPLING:
        places.append("sample")
    if places:
        return f"it stands elsewhere: {' or '.join(places)}."
    return f"{preset} has no such word. {suggestion(plain(word), own) if own else 'It has none of its own.'}"
