"""The algorithm that a file describes: a preset with its arguments, and the components that replace the preset's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hansa.algorithm import Algorithm, Channel, LocalPhase, Mixing
from hansa.config.arguments import (
    MODEL_CHANNEL_KEYS,
    Preset,
    find_preset,
    invalid_settings,
    preset_arguments,
    preset_name,
    settings,
)
from hansa.config.registry import (
    Argument,
    ConfigValueError,
    Keys,
    PythonExpression,
    PythonWriter,
    field_for_argument,
    signature_of,
)
from hansa.config.sections import Config
from hansa.core.errors import HansaError
from hansa.core.types import MODEL
from hansa.gossip import Activity, as_activity, ring
from hansa.local import epochs, fixed
from hansa.pace import Pace
from hansa.sample import Sampler, per_cluster
from hansa.server import chain


@dataclass(frozen=True, slots=True)
class Composition:
    """A preset with its arguments, the algorithm it makes, and the components that are replaced in it."""

    preset: Preset
    arguments: Mapping[str, Any]
    base: Algorithm
    sampler: Sampler | None
    local: Mapping[str, Any]
    channels: Mapping[str, Mapping[str, Any]]
    pace: Pace | None = None

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm itself."""
        return self.base.exchange(sampler=self.sampler, local=self.local, channels=self.channels, pace=self.pace)

    @property
    def comments(self) -> list[str]:
        """The composition and its Python, as comments above a resolved file."""
        python = [f"  {line}" for line in (*self.python.imports, self.python.text)]
        return [f"composition: {self.algorithm!r}", "python:", *python]

    @property
    def python(self) -> PythonExpression:
        """Python that makes an equal algorithm."""
        writer = PythonWriter()
        text = writer.write_call(self.preset, self.arguments)
        replacements = {"sampler": self.sampler, "local": self.local, "channels": self.channels, "pace": self.pace}
        replaced = {name: value for name, value in replacements.items() if value}
        if list(replaced) == ["local"]:
            text += f".with_local({writer.write_arguments(self.local)})"
        elif list(replaced) == ["pace"]:
            text += f".with_pace({writer.write_value(self.pace)})"
        elif list(replaced) == ["channels"] and self.channels.keys() <= self.base.channels.keys():
            text += "".join(
                f".on({name!r}, {writer.write_arguments(changes)})" for name, changes in self.channels.items()
            )
        elif replaced:
            text += f".exchange({writer.write_arguments(replaced)})"
        return PythonExpression(text, writer.imports)


def compose_algorithm(config: Config) -> Algorithm:
    """Return the algorithm that a configuration describes, or raise `ConfigValueError`."""
    composed = composition(config)
    with _located_errors(config):
        return composed.algorithm


def composition(config: Config) -> Composition:
    """Return the composition of a configuration, or raise `ConfigValueError`."""
    if config.python is not None:
        message = "started in Python, with an algorithm and a task that no file can hold: "
        raise ConfigValueError(("python",), f"{message}hansa.resume(FOLDER, algorithm, task) resumes it.")
    for error in invalid_settings(config):
        raise error
    preset = find_preset(config.algorithm.preset)
    composer = _Composer(preset_arguments(preset))
    with _located_errors(config):
        for section, key, argument, value in settings(config):
            if section != "server" or key != "lr" or config.server.optimizer is None:
                composer.add_setting(section, key, argument, value)
        for argument, value in config.algorithm.own.items():
            composer.set_argument(argument, value, ("algorithm", argument))
        if config.sample is not None:
            composer.set_sampler(config.sample)
        base = preset(**composer.arguments)
        if not isinstance(base, Algorithm):
            raise HansaError(f"{preset_name(preset)} makes no Algorithm: it made {base!r}.")
        local = composer.local_changes(base)
        pace = _build(Argument("pace", Pace), config.pace, ("pace",))
    return Composition(preset, composer.arguments, base, composer.sampler, local, _channels(config), pace)


class _Composer:
    """Sorts settings into arguments of the preset and components that replace the preset's."""

    def __init__(self, known: Mapping[str, Argument]) -> None:
        self.known = known
        self.arguments: dict[str, Any] = {}
        self.sampler: Sampler | None = None
        self._local: dict[str, Any] = {}
        self._mixing: dict[str, Any] = {}

    def add_setting(self, section: str, key: str, argument: str, value: Any) -> None:
        """Add a key of a section."""
        at = (section, key)
        if argument in self.known:
            self.set_argument(argument, None if (key, value) == ("batch_size", "all") else value, at)
        elif at == ("gossip", "reporters"):
            reporters = _build(Argument(key, int | float | Sampler), value, at)
            self.sampler = per_cluster(reporters) if isinstance(reporters, (int, float)) else reporters
        elif section == "gossip":
            hint = float | Activity if key == "active" else signature_of(Mixing).arguments[key].hint
            built = _build(Argument(key, hint), value, at)
            self._mixing[key] = as_activity(built) if key == "active" else built
        elif key == "epochs":
            self._local["steps"] = epochs(value)
        elif key == "batch_size":
            self._local[key] = None if value == "all" else value
        elif section == "local":
            hint = signature_of(LocalPhase).arguments[key].hint
            built = _build(Argument(key, int | Sequence[int] | hint if key == "steps" else hint), value, at)
            self._local[key] = fixed(built) if isinstance(built, (int, list)) and key == "steps" else built

    def set_argument(self, name: str, value: Any, at: Keys) -> None:
        """Set an argument of the preset."""
        self.arguments[name] = _build(self.known[name], value, at)

    def set_sampler(self, value: Mapping[str, Any]) -> None:
        """Set the sampler of participants."""
        sampler = _build(Argument("sample", Sampler), value, ("sample",))
        if value == {"kind": "uniform", "participation": value.get("participation")} and "participation" in self.known:
            self.arguments["participation"] = sampler.participation
        elif "sampler" in self.known:
            self.arguments["sampler"] = sampler
        elif "participation" in self.known:
            raise ConfigValueError(("sample",), "this preset takes a participation only, such as {participation: 0.1}.")
        else:
            self.sampler = sampler

    def local_changes(self, base: Algorithm) -> dict[str, Any]:
        """Return replacements for fields of the local phase; gossip missing from the preset defaults to a ring."""
        if not self._mixing:
            return self._local
        mixing = Mixing(ring()) if base.local.mixing is None else base.local.mixing
        return {**self._local, "mixing": replace(mixing, **self._mixing)}


def _channels(config: Config) -> dict[str, dict[str, Any]]:
    """Return the replaced components of each channel, with the short forms for the model's."""
    channels: dict[str, dict[str, Any]] = {}

    def exchange(channel: str, name: str, value: Any, at: Keys) -> None:
        if value is not None:
            channels.setdefault(channel, {})[name] = _build(signature_of(Channel).arguments[name], value, at)

    for channel, section in config.channels.items():
        for name in signature_of(Channel).arguments:
            exchange(channel, name, getattr(section, name, None), ("channels", channel, name))
    for name in MODEL_CHANNEL_KEYS:
        exchange(MODEL, name, getattr(config, name), (name,))
    exchange(MODEL, "server", config.server.optimizer, ("server", "optimizer"))
    if config.server.optimizer is not None and config.server.lr is not None:
        optimizer = channels[MODEL]["server"]
        exchange(MODEL, "server", {"kind": "scale", "lr": config.server.lr}, ("server",))
        parts = optimizer.transforms if isinstance(optimizer, chain) else (optimizer,)
        channels[MODEL]["server"] = chain(*parts, channels[MODEL]["server"])
    return channels


def _build(argument: Argument, value: Any, at: Keys) -> Any:
    try:
        return field_for_argument(argument).build(value)
    except ConfigValueError as error:
        raise error.with_prefix(*at) from error


@contextmanager
def _located_errors(config: Config) -> Iterator[None]:
    """Convert errors of the composition to errors at the key that caused them."""
    try:
        yield
    except ConfigValueError:
        raise
    except HansaError as error:
        raise ConfigValueError(_keys_of(config, error), str(error)) from error
    except TypeError as error:  # from a user-defined preset
        raise ConfigValueError(("algorithm",), f"{config.algorithm.preset}: {error}.") from error


_SECTION_OF = {"LocalPhase": "local", "Mixing": "gossip"}


def _keys_of(config: Config, error: HansaError) -> Keys:
    """Return the key whose value caused an error, by the error's component and argument."""
    for section, key, argument, _ in settings(config):
        if error.argument and error.argument in (argument, key):
            return section, key
    if error.argument in config.algorithm.own:
        return "algorithm", error.argument
    if error.argument == "pace" and config.pace is not None:
        return ("pace",)
    if error.component in _SECTION_OF:
        return _SECTION_OF[error.component], error.argument
    if error.component == "channels" and error.argument in config.channels:
        return "channels", error.argument
    if error.component == "solver" and config.local.solver is not None:
        return "local", "solver"
    return ("algorithm",)
