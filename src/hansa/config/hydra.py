"""Configurations composed by Hydra: the sections of a file as a structured config, and every preset as an option.

``register()`` before ``@hydra.main(version_base=None, config_name="hansa")``; then ``preset=fedams server.lr=0.3`` on
the command line composes, and `read` returns a validated configuration. Needs the extra ``hydra``.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from copy import deepcopy
from functools import cache, partial
from typing import Any

from pydantic import BaseModel

from hansa.config.arguments import own_arguments
from hansa.config.loader import validate
from hansa.config.registry import KINDS, ConfigValueError
from hansa.config.sections import AlgorithmSection, Config
from hansa.config.yaml_text import Document
from hansa.core.errors import HansaError

_PLAIN = (bool, int, float, str)


def structured() -> type[Any]:
    """Return the sections and keys of a configuration as a dataclass with defaults, for ``OmegaConf.structured``.

    Plain keys have types that OmegaConf checks; components are ``Any``. The keys of ``algorithm`` depend on its preset.

    >>> default = structured()()
    >>> default.rounds, default.data.name, default.algorithm, default.server.lr
    (30, 'fashion-mini', {'preset': 'fedavg'}, None)
    """
    return _dataclass(Config)


def register(name: str = "hansa") -> None:
    """Store the structured config in Hydra's ConfigStore, and the group ``preset`` with an option for every preset.

    An option sets ``algorithm``: the preset and those of its own arguments that have plain defaults.

    Args:
        name: The name of the config, for ``config_name`` or for the defaults list of a config of yours.
    """
    try:
        from hydra.core.config_store import ConfigStore
    except ImportError as error:
        raise HansaError("hansa.config.hydra needs Hydra: pip install 'hansa[hydra]'.") from error
    store = ConfigStore.instance()
    for preset, _ in KINDS["preset"].items():
        store.store(group="preset", name=preset, package="_global_",
                    node={"algorithm": {"preset": preset, **_plain_arguments(preset)}})  # fmt: skip
    defaults = dataclasses.field(default_factory=lambda: ["_self_", {"preset": "fedavg"}])
    primary = dataclasses.make_dataclass("Hansa", [("defaults", list[Any], defaults)], bases=(structured(),))
    store.store(name=name, node=primary)


def read(settings: Any) -> Config:
    """Return the configuration that Hydra composed, or raise `hansa.config.ConfigError` with all its problems.

    Keys that have their default are left out, so the result equals that of a file which sets the other keys.

    Args:
        settings: A config of OmegaConf, with interpolations resolved here, or a dict.

    >>> read({"rounds": 30, "seed": 3, "algorithm": {"preset": "fedprox", "mu": 0.01}, "local": {"lr": 0.1}}).seed
    3
    """
    if not isinstance(settings, dict):
        from omegaconf import OmegaConf

        settings = OmegaConf.to_container(settings, resolve=True, throw_on_missing=True)
    data = _without_defaults(settings, Config().model_dump())
    algorithm = settings.get("algorithm")
    if isinstance(algorithm, dict) and isinstance(algorithm.get("preset"), str):
        own = _without_defaults(algorithm, _plain_arguments(algorithm["preset"]))
        data["algorithm"] = {**own, "preset": algorithm["preset"]}
    return validate(Document(data, "hydra"))


@cache
def _dataclass(section: type[BaseModel]) -> type[Any]:
    fields: list[tuple[str, Any, Any]] = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if section is Config and name == "python":  # written by runs that no file describes
            continue
        if kind is AlgorithmSection:
            default = dataclasses.field(default_factory=lambda: {"preset": AlgorithmSection().preset})
            fields.append((name, dict[str, Any], default))
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            inner = _dataclass(kind)
            fields.append((name, inner, dataclasses.field(default_factory=inner)))
        else:
            value = None if field.is_required() else field.default
            fields.append((name, _plain_type(kind), dataclasses.field(default_factory=partial(deepcopy, value))))
    return dataclasses.make_dataclass(section.__name__, fields, namespace={"__doc__": section.__doc__})


def _plain_type(kind: Any) -> Any:
    """Return the type of a key as OmegaConf knows it; Any for components and for keys of several types."""
    if typing.get_origin(kind) is typing.Annotated:
        return _plain_type(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        members = [each for each in typing.get_args(kind) if each is not types.NoneType]
        inner = _plain_type(members[0]) if len(members) == 1 else Any
        return Any if inner is Any else typing.Optional[inner]  # noqa: UP045
    if typing.get_origin(kind) is typing.Literal and all(isinstance(each, str) for each in typing.get_args(kind)):
        return str
    if typing.get_origin(kind) is dict:
        return dict[str, Any]
    if typing.get_origin(kind) is list:
        return list[Any]
    return kind if kind in _PLAIN else Any


def _plain_arguments(preset: str) -> dict[str, Any]:
    """Return the own arguments of a preset whose defaults are plain values; none for a preset that is not known."""
    try:
        own = own_arguments(KINDS["preset"].find(preset)) if ":" not in preset else {}
    except ConfigValueError:
        return {}
    return {name: each.default for name, each in own.items() if isinstance(each.default, _PLAIN)}


def _without_defaults(data: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    changed = {}
    for key, value in data.items():
        default = defaults.get(key, ...)
        if isinstance(value, dict) and isinstance(default, dict):
            if inner := _without_defaults(value, default):
                changed[key] = inner
        elif value != default or isinstance(value, bool) != isinstance(default, bool):
            changed[key] = value
    return changed
