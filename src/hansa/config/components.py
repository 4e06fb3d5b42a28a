"""The kinds of components, and the methods that each kind requires.

Components are found by their name in Hansa or in an installed package, or as MODULE:NAME in user code;
`hansa.config.import_path` handles the last two.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

from hansa import aggregate, compress, data, gossip, local, pace, presets, sample, server
from hansa.algorithm import Algorithm
from hansa.config import import_path
from hansa.config.import_path import Plugin, is_import_path, normalize_name, warn_once
from hansa.core import schedule
from hansa.core.errors import HansaError, short_repr, suggestion
from hansa.core.lazy_imports import exports
from hansa.gossip.topology import cluster_topologies
from hansa.rounds import ledger
from hansa.rounds.faults import faults
from hansa.training import augment, losses

EMPTY: Any = inspect.Parameter.empty
Factory: TypeAlias = Callable[..., Any]


class Signature(NamedTuple):
    """The arguments by name; ``accepts_any`` if it also takes arguments of other names."""

    arguments: dict[str, inspect.Parameter]
    accepts_any: bool = False

    @property
    def required(self) -> list[str]:
        """The names of the arguments without a default."""
        parameters = self.arguments.values()
        return [p.name for p in parameters if p.default is EMPTY and p.kind is not p.VAR_POSITIONAL]


@lru_cache(maxsize=1024)
def signature_of(factory: Factory) -> Signature:
    """Return the arguments of a class or function; ``**options: Unpack[Options]`` expands to the keys of `Options`.

    Annotations are evaluated. That of ``*name`` is a tuple; an argument without any takes components of the kind of its
    name, and anything else.

    >>> def mine(lr: float, *, b1=0.9): ...
    >>> signature_of(mine).required, list(signature_of(mine).arguments)
    (['lr'], ['lr', 'b1'])
    """
    arguments: dict[str, inspect.Parameter] = {}
    accepts_any = False
    for name, parameter in inspect.signature(factory).parameters.items():
        hint = evaluate(parameter.annotation, factory)
        if parameter.kind is not parameter.VAR_KEYWORD:
            if hint is EMPTY:
                hint = typing.Union[KINDS[name].protocol, Any] if name in KINDS else Any  # noqa: UP007
            starred = parameter.kind is parameter.VAR_POSITIONAL
            arguments[name] = parameter.replace(annotation=types.GenericAlias(tuple, (hint, ...)) if starred else hint)
            continue
        typed_dicts = [option for option in typing.get_args(hint) if typing.is_typeddict(option)]
        accepts_any = not typed_dicts
        for key, annotation in (pair for keys in typed_dicts for pair in typing.get_type_hints(keys).items()):
            arguments[key] = inspect.Parameter(key, parameter.KEYWORD_ONLY, default=None, annotation=annotation)
    return Signature(arguments, accepts_any)


def evaluate(annotation: Any, owner: Any, **names: Any) -> Any:
    """Return an annotation of a class or function; `EMPTY` if it cannot be evaluated."""
    if not isinstance(annotation, str):
        return annotation
    namespace = dict(PROTOCOLS)
    for definition in reversed(getattr(owner, "__mro__", (owner,))):
        namespace.update(vars(sys.modules.get(getattr(definition, "__module__", ""), typing)))
    try:
        return eval(annotation, {**namespace, **names})
    except Exception:
        return EMPTY


def summary_line(documented: Any) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of component. An argument annotated with its protocol takes components of this kind.

    Args:
        name: The name in entry points and ``hansa parts``.
        protocol: The protocol or base class.
        package: The package that exports Hansa's own components of this kind, or a mapping of them by name.
        required: The methods that a component must have; by default the abstract ones of the protocol. Without any it
            must be an instance of the base class.
        modules: The modules of the package that have such components, so that others are not imported; the name of the
            package stands for its eager imports.
        label: The name in messages, if not ``name``.
        default: The component that is built if a file gives arguments without ``kind``.
        from_list: Builds a component from a list.
        function_argument: A function that has an argument of this name is itself a component, not a factory.
    """

    name: str
    protocol: Any
    package: types.ModuleType | Mapping[str, Factory]
    required: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    label: str = ""
    default: str | None = None
    from_list: Factory | None = None
    function_argument: str = ""

    @cached_property
    def methods(self) -> Mapping[str, inspect.Signature]:
        """The signatures of the required methods by name."""
        names = self.required
        if getattr(self.protocol, "_is_protocol", False) and not names:
            names = tuple(item for item in vars(self.protocol) if item in self.protocol.__abstractmethods__)
        signatures = {name: inspect.signature(getattr(self.protocol, name)) for name in names}
        return {name: inspect.Signature([*item.parameters.values()][1:]) for name, item in signatures.items()}

    @cached_property
    def built_in(self) -> Mapping[str, Factory]:
        """Hansa's own components by name."""
        package = self.package
        return package if isinstance(package, Mapping) else {
            name: factory for name in package.__all__ if name.islower()
            if not self.modules or exports(package.__name__).get(name, package.__name__) in self.modules
            if self.is_factory(factory := getattr(package, name))
        }  # fmt: skip

    @property
    def title(self) -> str:
        """The name in messages."""
        return self.label or self.name

    @property
    def plugins(self) -> dict[str, Plugin]:
        """The components of installed packages by name; of equal names Hansa's wins, then the alphabetically first."""
        by_name: dict[str, Plugin] = {}
        for plugin in import_path.installed_plugins():
            if plugin.kind != self.name or not plugin.name:
                continue
            if plugin.name in self.built_in:
                warn_once(f"{plugin}: Hansa has a {self.title} of that name, which is used.")
            elif (preferred := by_name.setdefault(plugin.name, plugin)) is not plugin:
                warn_once(f"{plugin}: {preferred.package} has a component of that name, which is used.")
        return by_name

    @property
    def names(self) -> list[str]:
        """All names, without importing plug-ins."""
        return [*self.built_in, *self.plugins]

    def items(self) -> Iterator[tuple[str, Factory]]:
        """Yield all names and factories; a plug-in that cannot be loaded is skipped with a warning."""
        for name in self.names:
            try:
                yield name, self.find(name)
            except HansaError as error:
                warn_once(str(error))

    def knows(self, name: str) -> bool:
        """Return whether a name is that of a component, or an import path."""
        return is_import_path(name) or normalize_name(name) in self.names

    def find(self, name: str) -> Factory:
        """Return the factory of that name; for a finished component a function that returns it."""
        plain = normalize_name(name)
        if plain in self.built_in:
            return self.built_in[plain]
        plugin = None if is_import_path(name) else self.plugins.get(plain)
        if plugin is None and not is_import_path(name):
            raise HansaError(f"no {self.title} {short_repr(name)}. {suggestion(plain, self.names)}")
        component = import_path.import_object(name, self) if plugin is None else plugin.load()
        if not isinstance(component, type) and not inspect.isroutine(component) and not self.mismatch(component):
            return lambda: component
        argument = self.function_argument
        if argument and inspect.isfunction(component) and argument in inspect.signature(component).parameters:
            return _function_factory(component, argument)
        if not callable(component):
            expected = f"expected a {self.title} or a function that returns one"
            raise HansaError(f"{plugin or repr(name)}: {expected}, found {component!r}.")
        return component  # type: ignore[no-any-return]

    def mismatch(self, component: Any) -> str:
        """Return why a value is no component of this kind, or a class makes none; "" if it is or does.

        >>> KINDS["server"].mismatch(server.scale()), KINDS["server"].mismatch(compress.sign())
        ('', 'it has no method init(x)')
        """
        bound = not isinstance(component, type)
        if not self.methods:
            matches = isinstance(component, self.protocol) if bound else self.protocol in component.__mro__
            return "" if matches else f"it is no {self.protocol.__name__}"
        for method, signature in self.methods.items():
            attribute = getattr(component, method, None)
            form = f"{method}({', '.join(signature.parameters)})"
            if not callable(attribute):
                return f"it has no method {form}"
            if not _accepts(attribute, signature, bound):
                return f"its method {method} cannot be called as {form}"
        return ""

    def is_factory(self, factory: Any) -> bool:
        """Return whether a class, or a function by its return annotation, makes components of this kind."""
        if inspect.isfunction(factory):  # torch is not imported for it
            factory = evaluate(factory.__annotations__.get("return"), factory, torch=None)
        if not isinstance(factory, type) or factory is self.protocol or getattr(factory, "_is_protocol", False):
            return False
        functions = all(inspect.isfunction(getattr(factory, method, None)) for method in self.methods)
        return functions and not self.mismatch(factory)  # any class has __call__


def _function_factory(function: Factory, argument: str) -> Factory:
    """Return a factory that binds the arguments of a function after ``argument``."""
    parameters = list(inspect.signature(function).parameters.values())
    following = parameters[[parameter.name for parameter in parameters].index(argument) + 1 :]
    following = [parameter.replace(annotation=evaluate(parameter.annotation, function)) for parameter in following]

    def make(**options: Any) -> Any:
        return partial(function, **options) if options else function

    make.__signature__ = inspect.Signature(following)  # type: ignore[attr-defined]
    return make


def unknown_plugins() -> list[str]:
    """Return a message for each entry point of an unknown kind, with the nearest kinds."""
    return [f"{plugin}: no kind {plugin.kind!r}. {suggestion(plugin.kind, KINDS)}"
            for plugin in import_path.installed_plugins() if plugin.kind not in KINDS or not plugin.name]  # fmt: skip


def _accepts(method: Any, protocol: inspect.Signature, bound: bool) -> bool:
    """Return whether a method can be called with the arguments of its protocol."""
    parameters = protocol.parameters.values()
    keywords = {parameter.name: None for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    positional = [None for parameter in parameters if parameter.name not in keywords and parameter.default is EMPTY]
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # compiled code has no signature
        return True
    try:
        signature.bind(*positional, *([] if bound else [None]), **keywords)
    except TypeError:
        return False
    return True


_PACES = {name: getattr(pace, name) for name in ("synchronous", "deadline", "overselect", "buffered")}
_LINKS: dict[str, Factory] = {"custom": ledger.LinkModel, "afga": ledger.afga}
_FAULTS = ("apply_to_orders", "apply_to_reports")

KINDS = {
    kind.name: kind
    for kind in (
        Kind("compressor", compress.Compressor, compress),
        Kind("uplink", compress.Uplink, compress),
        Kind("downlink", compress.Downlink, compress),
        Kind("aggregate", aggregate.Aggregator, aggregate),
        Kind("server", server.ServerTransform, server, label="server transform", from_list=server.chain),
        Kind("sampler", sample.Sampler, sample, default="uniform"),
        Kind("topology", gossip.Topology, gossip, from_list=cluster_topologies),
        Kind("clustering", gossip.Clustering, gossip),
        Kind("activity", gossip.Activity, gossip),
        Kind("mixing_rule", gossip.MixingRule, gossip, label="mixing rule"),
        Kind("schedule", schedule.Schedule, local, ("at",), ("hansa.local",)),
        Kind("work", local.LocalWork, local, (), ("hansa.local",), "kind of local work"),
        Kind("distribution", local.Distribution, local, ("draw",), ("hansa.local",)),
        Kind("solver", local.Solver, local, (), ("hansa.local",), "local solver"),
        Kind("loop", local.ClientLoop, local, (), ("hansa.local",), "client loop"),
        Kind("blocks", local.blocks, {"blocks": local.blocks}, (), (), "choice of blocks", "blocks", local.blocks),
        Kind("batching", local.batching, {"batching": local.batching}, (), (), "division into batches", "batching"),
        Kind("pass_order", local.PassOrder, local, (), ("hansa.local",), "order of passes"),
        Kind("augment", augment.Augmentation, augment, label="augmentation", function_argument="generator"),
        Kind("loss", losses.Loss, losses, ("sums",)),
        Kind("partition", data.Partition, data, ("split",), ("hansa.data.partitions", "hansa.data.partitions")),
        Kind("link_model", ledger.LinkModel, _LINKS, ("seconds",), label="link model", default="custom"),
        Kind("fault_plan", faults, {"faults": faults}, _FAULTS, label="fault plan", default="faults"),
        Kind("pace", pace.Pace, _PACES, default="buffered"),
        Kind("profile", pace.Profile, pace, ("device",), label="device profile", default="devices"),
        Kind("discount", aggregate.Discount, aggregate, ("factor",), label="discount of staleness"),
        Kind("preset", Algorithm, presets.catalogue()),
    )
}
"""All kinds by name; names of entry points start with these."""
PROTOCOLS: dict[str, Any] = {kind.protocol.__name__: kind.protocol for kind in KINDS.values()}
"""Protocols of components, for annotations that import them for type checkers only."""
