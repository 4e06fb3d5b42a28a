"""The mapping of file sections to preset arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hansa import presets
from hansa.algorithm import Algorithm
from hansa.config.registry import KINDS, Argument, ConfigValueError, normalize_name, signature_of
from hansa.config.sections import Config
from hansa.core.errors import suggestion

SECTION_ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "local": {
        "lr": "local_lr",
        "steps": "steps",
        "epochs": "epochs",
        "batch_size": "batch_size",
        "batches": "batches",
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
        "robust": "robust",
    },
    "compress": {"compressor": "compressor", "two_way": "two_way"},
}
"""For each section, its keys and the preset arguments that they set."""

SAMPLING_ARGUMENTS = ("participation", "sampler")
MODEL_CHANNEL_KEYS = ("uplink", "downlink", "aggregate")
"""Keys that are short for those of channels.model, as server.optimizer is for its server."""
COMPOSED_SECTIONS = ("local", "gossip")
"""Sections whose keys replace components of the algorithm where the preset has no such argument."""

Preset = Callable[..., Algorithm]


class Setting(NamedTuple):
    """A key that is set in a section, the preset argument that it sets, and its value."""

    section: str
    key: str
    argument: str
    value: Any


def preset_arguments(preset: Preset) -> dict[str, Argument]:
    """Return all arguments of a preset; ``**common`` without annotation stands for those that all presets share.

    >>> sorted(set(preset_arguments(presets.fedprox)) - set(preset_arguments(presets.fedavg)))
    ['mu']
    """
    signature = signature_of(preset)
    common = signature_of(presets.fedavg).arguments if signature.accepts_any else {}
    return {**common, **signature.arguments}


def own_arguments(preset: Preset) -> dict[str, Argument]:
    """Return the arguments that belong in the section ``algorithm``: those that no other section has.

    >>> own_arguments(presets.fedprox)["mu"].default
    0.01
    """
    shared = {argument for table in SECTION_ARGUMENTS.values() for argument in table.values()} | set(SAMPLING_ARGUMENTS)
    return {name: argument for name, argument in preset_arguments(preset).items() if name not in shared}


def find_preset(name: str) -> Preset:
    """Return a preset of Hansa or of a plug-in by name, or a user-defined one as MODULE:FUNCTION."""
    try:
        return KINDS["preset"].find(name)
    except ConfigValueError as error:
        raise error.with_prefix("algorithm", "preset") from error


def settings(config: Config) -> Iterator[Setting]:
    """Yield every key that is set in the sections that have tables."""
    for section, table in SECTION_ARGUMENTS.items():
        for key, argument in table.items():
            value = getattr(getattr(config, section), key)
            if value is not None:
                yield Setting(section, key, argument, value)


def invalid_settings(config: Config) -> Iterator[ConfigValueError]:
    """Yield an error for every key that the preset does not accept."""
    preset = find_preset(config.algorithm.preset)
    name, known, own = preset_name(preset), preset_arguments(preset), own_arguments(preset)
    model_channel, optimizer = config.channels.get("model"), config.server.optimizer
    for section, key, argument, _ in settings(config):
        if section == "server" and optimizer is not None:
            if key not in ("lr", "weights"):
                message = f"server.optimizer replaces the preset's server: set {key} inside it."
                yield ConfigValueError((section, key), message)
        elif argument not in known and section not in COMPOSED_SECTIONS:
            having = [other for other, factory in KINDS["preset"].items() if argument in preset_arguments(factory)]
            who = f" These have it: {', '.join(having)}." if having else ""
            yield ConfigValueError((section, key), f"{name} has no such argument.{who}")
    for argument in config.algorithm.own:
        if argument not in own:
            yield ConfigValueError(("algorithm", argument), _unknown_argument(name, argument, own))
    for key in MODEL_CHANNEL_KEYS:
        if getattr(config, key) is not None and getattr(model_channel, key, None) is not None:
            message = f"is set twice: {key} is short for channels.model.{key}."
            yield ConfigValueError(("channels", "model", key), message)
    if config.gossip.reporters is not None and config.sample is not None and "reporters" not in known:
        yield ConfigValueError(("gossip", "reporters"), "sample sets the participants too: expected one of the two.")
    if optimizer is not None and getattr(model_channel, "server", None) is not None:
        message = "is set twice: server.optimizer is short for channels.model.server."
        yield ConfigValueError(("channels", "model", "server"), message)


def preset_name(preset: Preset) -> str:
    """Return the name of a preset for messages."""
    return getattr(preset, "__name__", repr(preset))


def _unknown_argument(preset: str, name: str, own: Mapping[str, Argument]) -> str:
    places = [
        f"{section}.{key}"
        for section, table in SECTION_ARGUMENTS.items()
        for key, argument in table.items()
        if name in (key, argument)
    ]
    if name in SAMPLING_ARGUMENTS:
        places.append("sample")
    if places:
        return f"it belongs elsewhere: {' or '.join(places)}."
    hint = suggestion(normalize_name(name), own) if own else "It has none of its own."
    return f"{preset} has no such argument. {hint}"
