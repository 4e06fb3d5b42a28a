"""The kinds of components, and the methods that each kind requires.

A component is found in one of three ways: by its name in Hansa, by its name in an installed package
(`hansa.config.registry.plugins`), or as MODULE:NAME in user code (`hansa.config.registry.import_path`).
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

from hansa import aggregate, compress, data, gossip, local, pace, presets, sample, server
from hansa.algorithm import Algorithm
from hansa.config.registry import import_path, plugins
from hansa.config.registry.plugins import Plugin, normalize_name
from hansa.core import schedule
from hansa.core.errors import HansaError, short_repr, suggestion
from hansa.core.lazy_imports import exports
from hansa.gossip.by_cluster import cluster_topologies
from hansa.rounds import ledger
from hansa.rounds.faults import faults
from hansa.training import augment, losses

EMPTY: Any = inspect.Parameter.empty
PROTOCOLS: dict[str, Any] = {}
"""Protocols of components, which an annotation may name even if they were imported for type checkers only."""


class Argument(NamedTuple):
    """One argument: its type (`EMPTY` without annotation) and default; ``starred`` takes a list as ``*name``."""

    name: str
    hint: Any = EMPTY
    default: Any = EMPTY
    starred: bool = False
    optional: bool = False

    @property
    def required(self) -> bool:
        """Whether a value must be passed."""
        return self.default is EMPTY and not self.optional


class Signature(NamedTuple):
    """The arguments by name; ``accepts_any`` if it also takes arguments of other names."""

    arguments: dict[str, Argument]
    accepts_any: bool = False


@lru_cache(maxsize=1024)
def signature_of(factory: Callable[..., Any]) -> Signature:
    """Return the arguments of a class or function; ``**options: Unpack[Options]`` expands to the keys of `Options`.

    >>> def mine(lr: float, *, b1=0.9): ...
    >>> [(one.name, one.required) for one in signature_of(mine).arguments.values()]
    [('lr', True), ('b1', False)]
    """
    arguments: dict[str, Argument] = {}
    hints, accepts_any = type_hints(factory), False
    for name, parameter in inspect.signature(factory).parameters.items():
        hint = hints.get(name, EMPTY if isinstance(parameter.annotation, str) else parameter.annotation)
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            typed_dicts = [option for option in typing.get_args(hint) if typing.is_typeddict(option)]
            for typed_dict in typed_dicts:
                keys = typing.get_type_hints(typed_dict)
                arguments.update({key: Argument(key, key_hint, optional=True) for key, key_hint in keys.items()})
            accepts_any = not typed_dicts
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            arguments[name] = Argument(name, hint, starred=True, optional=True)
        else:
            arguments[name] = Argument(name, hint, parameter.default)
    return Signature(arguments, accepts_any)


def type_hints(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the type hints that can be evaluated, for a class with those of its ``__init__``."""
    if isinstance(factory, type):
        return {**_hints(factory), **_hints(factory.__init__)}  # type: ignore[misc]
    return _hints(factory)


def return_type(function: Callable[..., Any]) -> Any:
    """Return the evaluated return annotation, or None; torch is not imported for it."""
    annotation = getattr(function, "__annotations__", {}).get("return")
    try:
        return (
            eval(annotation, {**PROTOCOLS, **function.__globals__, "torch": None})
            if isinstance(annotation, str)
            else annotation
        )
    except Exception:
        return None


def _hints(owner: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(owner)
    except (NameError, TypeError, AttributeError, SyntaxError):
        namespace = {**PROTOCOLS, **vars(sys.modules.get(getattr(owner, "__module__", ""), typing))}
        hints = {}
        for name, text in _annotations(owner).items():
            try:
                hints[name] = eval(text, namespace) if isinstance(text, str) else text
            except Exception:
                continue
        return hints


def _annotations(owner: Any) -> dict[str, Any]:
    annotations: dict[str, Any] = {}
    for each in reversed(owner.__mro__) if isinstance(owner, type) else [owner]:
        annotations.update(getattr(each, "__annotations__", {}))
    return annotations


def summary_line(documented: Any) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())


Factory: TypeAlias = Callable[..., Any]
Keys: TypeAlias = tuple[str | int, ...]


class ConfigValueError(HansaError):
    """A value that cannot be used as written; ``keys`` lead to it, from the outermost."""

    def __init__(self, keys: Keys, message: str) -> None:
        super().__init__(f"{'.'.join(map(str, keys))}: {message}" if keys else message)
        self.keys, self.message = keys, message

    def with_prefix(self, *keys: str | int) -> ConfigValueError:
        """Return the same error with outer keys in front."""
        return ConfigValueError((*keys, *self.keys), self.message)


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A kind of component. An argument annotated with its protocol takes components of this kind.

    Args:
        name: The name in entry points and ``hansa parts``.
        protocol: The protocol or base class.
        built_in: Hansa's own components by name.
        methods: The methods that a component must have; with none, it must be an instance of the protocol.
        label: The name in messages, if not ``name``.
        default: The component that is built if a file gives arguments without ``kind``.
        from_list: Builds a component from a list.
        function_argument: A function that has an argument of this name is itself a component, not a factory.
    """

    name: str
    protocol: Any
    built_in: Mapping[str, Factory]
    methods: tuple[str, ...] = ()
    label: str = ""
    default: str | None = None
    from_list: Factory | None = None
    function_argument: str = ""

    @property
    def title(self) -> str:
        """The name in messages."""
        return self.label or self.name

    @property
    def plugins(self) -> dict[str, Plugin]:
        """The components of installed packages, except those with a name that Hansa has."""
        by_name = plugins.plugins_of_kind(self.name)
        for name in by_name.keys() & self.built_in.keys():
            plugins.warn_once(f"{by_name.pop(name)}: Hansa has a {self.title} of that name, which is used.")
        return by_name

    @property
    def names(self) -> list[str]:
        """All names, without importing plug-ins."""
        return [*self.built_in, *self.plugins]

    def items(self) -> Iterator[tuple[str, Factory]]:
        """Yield all names and factories; a plug-in that cannot be loaded is reported and left out."""
        yield from self.built_in.items()
        for name, plugin in self.plugins.items():
            try:
                yield name, self._factory(plugin.load(), str(plugin))
            except HansaError as error:
                plugins.warn_once(str(error))

    def knows(self, name: str) -> bool:
        """Return whether a word is the name of a component, or an import path."""
        return import_path.is_import_path(name) or normalize_name(name) in self.names

    def find(self, name: str) -> Factory:
        """Return the factory of that name, or raise `ConfigValueError`."""
        plain = normalize_name(name)
        if plain in self.built_in:
            return self.built_in[plain]
        try:
            if import_path.is_import_path(name):
                return self._factory(import_path.import_object(name, self), repr(name))
            if plain in self.plugins:
                return self._factory(self.plugins[plain].load(), str(self.plugins[plain]))
        except HansaError as error:
            raise ConfigValueError((), str(error)) from error
        raise ConfigValueError((), f"no {self.title} {short_repr(name)}. {suggestion(plain, self.names)}")

    def _factory(self, imported: Any, source: str) -> Factory:
        """Return the class or function itself, or for a finished component a function that returns it."""
        if not isinstance(imported, type) and not inspect.isroutine(imported) and not self.mismatch(imported):
            return lambda: imported
        argument = self.function_argument
        if argument and inspect.isfunction(imported) and argument in inspect.signature(imported).parameters:
            return _function_factory(imported, argument)
        if not callable(imported):
            raise HansaError(f"{source}: expected a {self.title} or a function that makes one, found {imported!r}.")
        return imported  # type: ignore[no-any-return]

    def mismatch(self, component: Any) -> str:
        """Return why a value is not a component of this kind, or a class does not make one; "" if it is or does.

        >>> KINDS["server"].mismatch(server.scale()), KINDS["server"].mismatch(compress.sign())
        ('', 'it has no method init(x)')
        """
        bound = not isinstance(component, type)
        if not self.methods:
            fits = isinstance(component, self.protocol) if bound else self.protocol in component.__mro__
            return "" if fits else f"it is no {self.protocol.__name__}"
        for method in self.methods:
            signature = _protocol_signature(self.protocol, method)
            attribute = getattr(component, method, None)
            if not callable(attribute):
                return f"it has no method {method}{_format_signature(signature)}"
            if not _accepts(attribute, signature, bound=bound):
                return f"its method {method} cannot be called as {method}{_format_signature(signature)}"
        return ""

    def is_component_class(self, cls: type) -> bool:
        """Return whether a class has this kind's protocol or base class among its bases, or all its methods."""
        return (isinstance(self.protocol, type) and self.protocol in cls.__mro__) or self.is_factory(cls)

    def is_factory(self, factory: Any) -> bool:
        """Return whether a class, or a function by its return annotation, makes components of this kind."""
        product = factory
        if inspect.isfunction(factory):
            product = return_type(factory)
        if not isinstance(product, type) or product is self.protocol or getattr(product, "_is_protocol", False):
            return False
        if not self.methods:
            return issubclass(product, self.protocol)
        return all(
            inspect.isfunction(attribute := getattr(product, method, None))
            and _accepts(attribute, _protocol_signature(self.protocol, method), bound=False)
            for method in self.methods
        )


KINDS: dict[str, Kind] = {}
"""Every kind by name; entry points begin with these names."""


def register_kind(
    name: str,
    protocol: Any,
    package: ModuleType | Mapping[str, Factory],
    methods: tuple[str, ...] = (),
    *,
    modules: tuple[str, ...] = (),
    label: str = "",
    default: str | None = None,
    from_list: Factory | None = None,
    function_argument: str = "",
) -> Kind:
    """Register a kind whose own components are those that a package exports, or those of a mapping.

    Args:
        name: As in `Kind`, like the arguments not listed here.
        package: The package, or components by name.
        methods: By default the methods that the protocol marks abstract.
        modules: The modules that have such components, so that others need not be imported; the name of the package
            stands for what it imports at once.
    """
    if getattr(protocol, "_is_protocol", False) and not methods:
        methods = tuple(each for each in vars(protocol) if each in protocol.__abstractmethods__)
    empty = Kind(name, protocol, {}, methods, label)
    built_in = package if isinstance(package, Mapping) else {
        each: factory for each in package.__all__ if each.islower()
        if not modules or exports(package.__name__).get(each, package.__name__) in modules
        if empty.is_factory(factory := getattr(package, each))
    }  # fmt: skip
    PROTOCOLS[protocol.__name__] = protocol
    KINDS[name] = Kind(name, protocol, built_in, methods, label, default, from_list, function_argument)
    return KINDS[name]


def _function_factory(function: Factory, last: str) -> Factory:
    """Return a factory that fixes the arguments of a function that follow the one called ``last``."""
    parameters = list(inspect.signature(function).parameters.values())
    following = parameters[[each.name for each in parameters].index(last) + 1 :]

    def make(**options: Any) -> Any:
        return partial(function, **options) if options else function

    make.__signature__ = inspect.Signature(following)  # type: ignore[attr-defined]
    make.__annotations__ = {each.name: type_hints(function).get(each.name, Any) for each in following}
    return make


def unknown_plugins() -> list[str]:
    """Return a message for each entry point of an unknown kind, with the nearest known kinds."""
    return [f"{plugin}: no kind {plugin.kind!r}. {suggestion(plugin.kind, KINDS)}"
            for plugin in plugins.installed_plugins() if plugin.kind not in KINDS or not plugin.name]  # fmt: skip


def _protocol_signature(protocol: Any, method: str) -> inspect.Signature:
    parameters = list(inspect.signature(getattr(protocol, method)).parameters.values())
    return inspect.Signature(parameters[1:])


def _accepts(method: Any, wanted: inspect.Signature, *, bound: bool = True) -> bool:
    """Return whether a method can be called with the arguments of its protocol."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # compiled code has no signature
        return True
    positional: list[object] = [] if bound else [None]
    keywords: dict[str, object] = {}
    for parameter in wanted.parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            keywords[parameter.name] = None
        elif parameter.default is inspect.Parameter.empty:
            positional.append(None)
    try:
        signature.bind(*positional, **keywords)
    except TypeError:
        return False
    return True


def _format_signature(signature: inspect.Signature) -> str:
    return f"({', '.join(signature.parameters)})"


COMPRESSOR = register_kind("compressor", compress.Compressor, compress)
UPLINK = register_kind("uplink", compress.Uplink, compress)
DOWNLINK = register_kind("downlink", compress.Downlink, compress)
AGGREGATE = register_kind("aggregate", aggregate.Aggregator, aggregate)
SERVER = register_kind("server", server.ServerTransform, server, label="server transform", from_list=server.chain)
SAMPLER = register_kind("sampler", sample.Sampler, sample, default="uniform")
TOPOLOGY = register_kind("topology", gossip.Topology, gossip, from_list=cluster_topologies)
CLUSTERING = register_kind("clustering", gossip.Clustering, gossip)
ACTIVITY = register_kind("activity", gossip.Activity, gossip)
MIXING_RULE = register_kind("mixing_rule", gossip.MixingRule, gossip, label="mixing rule")
SCHEDULE = register_kind("schedule", schedule.Schedule, local, ("at",), modules=("hansa.local",))
WORK = register_kind("work", local.LocalWork, local, modules=("hansa.local",), label="kind of local work")
DISTRIBUTION = register_kind("distribution", local.Distribution, local, ("draw",), modules=("hansa.local",))
SOLVER = register_kind("solver", local.Solver, local, modules=("hansa.local",), label="local solver")
BLOCKS = register_kind(
    "blocks", local.blocks, {"blocks": local.blocks}, label="choice of blocks", default="blocks", from_list=local.blocks
)
BATCHING = register_kind(
    "batching", local.batching, {"batching": local.batching}, label="division into batches", default="batching"
)
PASS_ORDER = register_kind("pass_order", local.PassOrder, local, modules=("hansa.local",), label="order of passes")
AUGMENT = register_kind("augment", augment.Augmentation, augment, label="augmentation", function_argument="generator")
LOSS = register_kind("loss", losses.Loss, losses, ("sums",))
PARTITION = register_kind(
    "partition", data.Partition, data, ("split",), modules=("hansa.data.partitions", "hansa.data.split")
)
LINK_MODEL = register_kind(
    "link_model",
    ledger.LinkModel,
    {"custom": ledger.LinkModel, "afga": ledger.afga},
    ("seconds",),
    label="link model",
    default="custom",
)
FAULTS = register_kind(
    "fault_plan",
    faults,
    {"faults": faults},
    ("apply_to_orders", "apply_to_reports"),
    label="fault plan",
    default="faults",
)
PACE = register_kind(
    "pace",
    pace.Pace,
    {name: getattr(pace, name) for name in ("synchronous", "deadline", "overselect", "buffered")},
    default="buffered",
)
PROFILE = register_kind("profile", pace.Profile, pace, ("device",), label="device profile", default="devices")
DISCOUNT = register_kind("discount", aggregate.Discount, aggregate, ("factor",), label="discount of staleness")
PRESET = register_kind("preset", Algorithm, presets.catalogue())
