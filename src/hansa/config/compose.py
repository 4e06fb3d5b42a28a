"""The algorithm that a file describes: a preset with its arguments, and the components that replace the preset's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from inspect import Parameter
from typing import Any

from pydantic import BaseModel

from hansa import presets
from hansa.algorithm import Algorithm, Mixing
from hansa.config.components import KINDS, signature_of
from hansa.config.fields import ComponentField
from hansa.config.import_path import is_import_path, named_code, normalize_name
from hansa.config.sections import LOSS, CompressSection, Config, GossipSection, LocalSection, ServerSection
from hansa.config.yaml_text import ConfigError, Keys, Problem
from hansa.core.errors import HansaError, suggestion
from hansa.core.types import MODEL
from hansa.gossip import as_activity, ring
from hansa.local import epochs, fixed
from hansa.sample import per_cluster, uniform
from hansa.server import ServerTransform, chain

_SECTIONS: Mapping[str, type[BaseModel]] = {
    "local": LocalSection, "server": ServerSection, "gossip": GossipSection, "compress": CompressSection
}  # fmt: skip
_RENAMED = {"local.lr": "local_lr", "local.momentum": "local_momentum", "server.lr": "server_lr",
            "gossip.compressor": "gossip_compressor"}  # fmt: skip
SECTION_ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    name: {key: _RENAMED.get(f"{name}.{key}", key) for key in section.model_fields
           if f"{name}.{key}" != "server.optimizer"}
    for name, section in _SECTIONS.items()
}  # fmt: skip
"""For each section, its keys and the preset arguments that they set."""

SAMPLING_ARGUMENTS = ("participation", "sampler")
MODEL_CHANNEL_KEYS = ("uplink", "downlink", "aggregate")
"""Short forms of keys of channels.model; server.optimizer is that of its server."""
COMPOSED_SECTIONS = ("local", "gossip")
"""Sections whose keys replace components of the algorithm if the preset has no such argument."""

Preset = Callable[..., Algorithm]


def preset_arguments(preset: Preset) -> dict[str, Parameter]:
    """Return all arguments of a preset; ``**common`` without annotation stands for the shared ones.

    >>> sorted(set(preset_arguments(presets.fedprox)) - set(preset_arguments(presets.fedavg)))
    ['mu']
    """
    signature = signature_of(preset)
    common = signature_of(presets.fedavg).arguments if signature.accepts_any else {}
    return {**common, **signature.arguments}


def own_arguments(preset: Preset) -> dict[str, Parameter]:
    """Return the arguments of a preset that are in the section ``algorithm``, not in another one.

    >>> own_arguments(presets.fedprox)["mu"].default
    0.01
    """
    shared = {argument for table in SECTION_ARGUMENTS.values() for argument in table.values()} | set(SAMPLING_ARGUMENTS)
    return {name: argument for name, argument in preset_arguments(preset).items() if name not in shared}


_CODE: Any = {
    "data": {"factory", "partition", "augment"},
    "model": {"factory", "loss", "metric", "metrics"},
    **dict.fromkeys(("algorithm", *_SECTIONS, "sample", "uplink", "downlink", "aggregate", "channels"), True),
    **dict.fromkeys(("faults", "links", "pace", "profile"), True),
}
"""The keys that may name code."""


def code_names(config: Config) -> list[str]:
    """Return the user's code that a configuration names, as MODULE:NAME.

    >>> from hansa.config import from_yaml
    >>> code_names(from_yaml("sample: {kind: 'mine:often', count: 3}\\nmodel: {factory: 'mine:Net', loss: mse}"))
    ['mine:Net', 'mine:often']
    """
    return list(dict.fromkeys(named_code(config.model_dump(include=_CODE))))


def compose(config: Config, *, checking: bool = False) -> Algorithm | None:
    """Return the algorithm of a configuration, or raise `ConfigError` with the problems of all its components.

    Args:
        config: The configuration.
        checking: Skip components that name code; the algorithm is then None if there are any.
    """
    if config.python is not None:
        message = "started in Python, with an algorithm and a task that are not in the file: "
        resume = "hansa.resume(FOLDER, algorithm, task) resumes it."
        raise ConfigError([Problem("", ("python",), message + resume)])
    errors: list[Problem] = []
    built: dict[Keys, Any] = {}
    for keys, field, value in _components(config):
        if not (checking and named_code(value)):
            try:
                built[keys] = field.build(value, keys)
            except ConfigError as error:
                errors += error.problems
    if not (checking and is_import_path(config.algorithm.preset)):
        try:
            preset = KINDS["preset"].find(config.algorithm.preset)
            errors += _invalid_settings(config, preset)
        except HansaError as error:
            errors.append(Problem("", ("algorithm", "preset"), str(error)))
    if errors:
        raise ConfigError(errors)
    try:
        return None if checking and code_names(config) else _compose(config, preset, built)
    except ConfigError:
        raise
    except HansaError as error:
        raise ConfigError([Problem("", _keys_of(config, error), str(error))]) from error
    except TypeError as error:  # from a user-defined preset
        raise ConfigError([Problem("", ("algorithm",), f"{config.algorithm.preset}: {error}.")]) from error


def _components(section: BaseModel, above: Keys = ()) -> Iterator[tuple[Keys, ComponentField, Any]]:
    """Yield keys, field and value of each component that is set in a section or in sections inside it."""
    for name, info in type(section).model_fields.items():
        value, keys = getattr(section, name), (*above, name)
        field = next((marker for marker in info.metadata if isinstance(marker, ComponentField)), None)
        if keys == ("model", "loss") and isinstance(value, Mapping) and not named_code(value):
            field = LOSS
        if field is not None and value is not None:
            yield keys, field, value
        for key, inner in value.items() if isinstance(value, Mapping) else [(None, value)]:
            if isinstance(inner, BaseModel):
                yield from _components(inner, keys if key is None else (*keys, key))


def _settings(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield section, key and preset argument of each key that is set in `SECTION_ARGUMENTS`."""
    for section, table in SECTION_ARGUMENTS.items():
        for key, argument in table.items():
            if getattr(getattr(config, section), key) is not None:
                yield section, key, argument


def _invalid_settings(config: Config, preset: Preset) -> Iterator[Problem]:
    """Yield a problem for each key that the preset does not accept or that is set twice."""
    name, accepted, own = config.algorithm.preset, preset_arguments(preset), own_arguments(preset)
    model_channel, optimizer = config.channels.get(MODEL), config.server.optimizer
    for section, key, argument in _settings(config):
        if section == "server" and optimizer is not None:
            if key not in ("lr", "weights"):
                message = f"server.optimizer replaces the preset's server: set {key} inside it."
                yield Problem("", (section, key), message)
        elif argument not in accepted and section not in COMPOSED_SECTIONS:
            yield Problem("", (section, key), f"{name} has no such argument.")
    for argument in (argument for argument in config.algorithm.own if argument not in own):
        homes = [f"{section}.{key}" for section, table in SECTION_ARGUMENTS.items()
                  for key, sets in table.items() if argument in (key, sets)]  # fmt: skip
        homes += ["sample"] * (argument in SAMPLING_ARGUMENTS)
        hint = suggestion(normalize_name(argument), own) if own else "It has none of its own."
        message = f"it belongs elsewhere: {' or '.join(homes)}." if homes else f"{name} has no such argument. {hint}"
        yield Problem("", ("algorithm", argument), message)
    for key in (*MODEL_CHANNEL_KEYS, "server"):
        short, value = ("server.optimizer", optimizer) if key == "server" else (key, getattr(config, key))
        if value is not None and getattr(model_channel, key, None) is not None:
            message = f"is set twice: {short} is short for channels.model.{key}."
            yield Problem("", ("channels", MODEL, key), message)
    if config.gossip.reporters is not None and config.sample is not None and "reporters" not in accepted:
        yield Problem("", ("gossip", "reporters"), "sample sets the participants too: expected one of the two.")


def _compose(config: Config, preset: Preset, built: Mapping[Keys, Any]) -> Algorithm:
    """Build the preset with its arguments, and replace its components by the other settings."""
    accepted = preset_arguments(preset)
    arguments: dict[str, Any] = {}
    local: dict[str, Any] = {}
    mixing: dict[str, Any] = {}
    sampler = None
    for argument, value in config.algorithm.own.items():
        arguments[argument] = ComponentField(accepted[argument].annotation).build(value, ("algorithm", argument))
    for section, key, argument in _settings(config):
        value = built.get((section, key), getattr(getattr(config, section), key))
        if key == "batch_size" and value == "all":
            value = None
        if section == "server" and key == "lr" and config.server.optimizer is not None:
            continue
        if argument in accepted:
            arguments[argument] = value
        elif key == "reporters":
            sampler = per_cluster(value) if isinstance(value, (int, float)) else value
        elif section == "gossip":
            mixing[key] = as_activity(value) if key == "active" else value
        elif key == "epochs":
            local["steps"] = epochs(value)
        else:
            local[key] = fixed(value) if key == "steps" and isinstance(value, (int, list)) else value
    component = built.get(("sample",))
    if isinstance(component, uniform) and component.count is None and "participation" in accepted:
        arguments["participation"] = component.participation
    elif component is not None and "sampler" in accepted:
        arguments["sampler"] = component
    elif component is not None and "participation" in accepted:
        message = "this preset takes a participation only, such as {participation: 0.1}."
        raise ConfigError([Problem("", ("sample",), message)])
    elif component is not None:
        sampler = component
    base = preset(**arguments)
    if not isinstance(base, Algorithm):
        raise HansaError(f"{config.algorithm.preset}: expected an Algorithm, got {base!r}.")
    if mixing:  # gossip missing from the preset defaults to a ring
        local["mixing"] = replace(base.local.mixing or Mixing(ring()), **mixing)
    channels = _channels(config, built)
    return base.exchange(sampler=sampler, local=local, channels=channels, pace=built.get(("pace",)))


def _channels(config: Config, built: Mapping[Keys, Any]) -> dict[str, dict[str, Any]]:
    """Return the replaced components of each channel, with the short forms for the model's."""
    channels = {
        name: changes
        for name, section in config.channels.items()
        if (changes := {key: built.get(("channels", name, key), part) for key, part in section if part is not None})
    }
    model = {key: built[key,] for key in MODEL_CHANNEL_KEYS if (key,) in built}
    optimizer = built.get(("server", "optimizer"))
    if optimizer is not None:
        model["server"] = optimizer
        if config.server.lr is not None:
            rate = ComponentField(ServerTransform).build({"kind": "scale", "lr": config.server.lr}, ("server",))
            parts = optimizer.transforms if isinstance(optimizer, chain) else (optimizer,)
            model["server"] = chain(*parts, rate)
    return channels | ({MODEL: channels.get(MODEL, {}) | model} if model else {})


def _keys_of(config: Config, error: HansaError) -> Keys:
    """Return the keys whose value caused an error, by the error's component and argument."""
    component, argument = error.component, error.argument
    for section, key, name in _settings(config):
        if argument and argument in (name, key):
            return section, key
    if argument in config.algorithm.own:
        return "algorithm", argument
    if argument == "pace" and config.pace is not None:
        return ("pace",)
    if component in ("LocalPhase", "Mixing"):
        return "local" if component == "LocalPhase" else "gossip", argument
    if component == "channels" and argument in config.channels:
        return "channels", argument
    if component in ("solver", "loop") and getattr(config.local, component) is not None:
        return "local", component
    return ("algorithm",)
