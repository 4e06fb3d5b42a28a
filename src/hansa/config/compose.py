"""The algorithm that a file describes: a preset with its arguments, the components that replace the preset's, and both
as Python source."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hansa import aggregate, compress, data, gossip, local, pace, presets, sample, server
from hansa.algorithm import Algorithm, Channel, LocalPhase, Mixing
from hansa.config.registry import (
    KINDS,
    Argument,
    ConfigValueError,
    Keys,
    field_for_argument,
    normalize_name,
    signature_of,
)
from hansa.config.sections import Config
from hansa.core.errors import HansaError, suggestion
from hansa.core.types import MODEL
from hansa.gossip import Activity, as_activity, ring
from hansa.local import epochs, fixed
from hansa.pace import Pace
from hansa.sample import Sampler, per_cluster
from hansa.server import chain
from hansa.training import augment, losses

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


PACKAGES = (server, aggregate, compress, local, gossip, sample, pace, data, augment, losses, presets)
TOP_LEVEL = (Algorithm, Channel, LocalPhase, Mixing)


class PythonExpression(NamedTuple):
    """Python source and the imports that it needs."""

    text: str
    imports: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*self.imports, self.text])


class PythonWriter:
    """Writes values as Python source and collects the imports they need."""

    def __init__(self) -> None:
        self.public: set[str] = set()
        self.modules: set[str] = set()

    @property
    def imports(self) -> tuple[str, ...]:
        """The import lines, those of Hansa first."""
        ours = [f"from hansa import {', '.join(sorted(self.public))}"] if self.public else []
        return (*ours, *(f"import {module}" for module in sorted(self.modules)))

    def write_value(self, value: Any) -> str:
        """Return a value as the call that makes it, without arguments that equal their defaults."""
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        if isinstance(value, tuple) and type(value) is tuple:
            return f"({', '.join(map(self.write_value, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.write_value, value))}]"
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{key!r}: {self.write_value(inner)}' for key, inner in value.items())}}}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self.write_call(type(value), self._changed_fields(value))
        return repr(value)

    def write_call(self, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
        """Return a call with keyword arguments; those of a ``*name`` parameter are positional."""
        starred = [name for name, parameter in inspect.signature(factory).parameters.items()
                   if parameter.kind is inspect.Parameter.VAR_POSITIONAL]  # fmt: skip
        positional = [self.write_value(each) for name in starred for each in arguments.get(name, ())]
        named = self.write_arguments({name: value for name, value in arguments.items() if name not in starred})
        return f"{self.write_name(factory)}({', '.join([*positional, *([named] if named else [])])})"

    def write_arguments(self, arguments: Mapping[str, Any]) -> str:
        """Return keyword arguments as written in a call."""
        return ", ".join(f"{name}={self.write_value(value)}" for name, value in arguments.items())

    def write_name(self, factory: Callable[..., Any]) -> str:
        """Return the name of a class or function: ``compress.sign`` in Hansa, else ``module.attr``."""
        if factory in TOP_LEVEL:
            self.public.add(factory.__name__)
            return factory.__name__
        for package in PACKAGES:
            if getattr(package, factory.__name__, None) is factory:
                name = package.__name__.rpartition(".")[2]  # hansa.training.losses is hansa.losses
                self.public.add(name)
                return f"{name}.{factory.__name__}"
        self.modules.add(factory.__module__)
        return f"{factory.__module__}.{factory.__qualname__}"

    def _changed_fields(self, component: Any) -> dict[str, Any]:
        """Return the fields of a dataclass that differ from their defaults."""
        changed = {}
        parameters = inspect.signature(type(component)).parameters
        for field in dataclasses.fields(component):
            value = getattr(component, field.name)
            default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            if default is dataclasses.MISSING and field.name in parameters:
                default = parameters[field.name].default
            if type(value) is not type(default) or value != default:
                changed[field.name] = value
        return changed


def to_python(value: Any) -> PythonExpression:
    """Return a component or an algorithm as Python that makes an equal one.

    >>> from hansa import server
    >>> print(to_python(server.chain(server.adam(), server.scale(0.1))))
    from hansa import server
    server.chain(server.adam(), server.scale(lr=0.1))
    """
    writer = PythonWriter()
    text = writer.write_value(value)
    return PythonExpression(text, writer.imports)


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
