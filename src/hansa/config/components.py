"""The kinds of components, the methods that each kind requires, and the values of a file that describe components.

A component is found in one of three ways: by its name in Hansa, by its name in an installed package, or as MODULE:NAME
in user code; `hansa.config.import_path` has the last two. What an argument takes follows from its annotation:
``compressor: Compressor`` takes a compressor, ``lr: Rate`` a number or a schedule, of Hansa or of a user.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeAlias, Union

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from hansa import aggregate, compress, data, gossip, local, pace, presets, sample, server
from hansa.algorithm import Algorithm
from hansa.config import import_path
from hansa.config.import_path import Plugin, is_import_path, normalize_name, warn_once
from hansa.config.yaml_text import Keys
from hansa.core import schedule
from hansa.core.errors import HansaError, quotes_hint, short_repr, suggestion
from hansa.core.lazy_imports import exports
from hansa.gossip.topology import cluster_topologies
from hansa.rounds import ledger
from hansa.rounds.faults import faults
from hansa.training import augment, losses

EMPTY: Any = inspect.Parameter.empty
Factory: TypeAlias = Callable[..., Any]


class Argument(NamedTuple):
    """One argument: its type and default (`EMPTY` without); ``starred`` takes a list as ``*name``."""

    name: str
    hint: Any = EMPTY
    default: Any = EMPTY
    starred: bool = False

    @property
    def required(self) -> bool:
        """Whether a value must be passed."""
        return self.default is EMPTY


class Signature(NamedTuple):
    """The arguments by name; ``accepts_any`` if it also takes arguments of other names."""

    arguments: dict[str, Argument]
    accepts_any: bool = False


@lru_cache(maxsize=1024)
def signature_of(factory: Factory) -> Signature:
    """Return the arguments of a class or function; ``**options: Unpack[Options]`` expands to the keys of `Options`.

    >>> def mine(lr: float, *, b1=0.9): ...
    >>> [(one.name, one.required) for one in signature_of(mine).arguments.values()]
    [('lr', True), ('b1', False)]
    """
    arguments: dict[str, Argument] = {}
    accepts_any = False
    for name, parameter in inspect.signature(factory).parameters.items():
        hint = evaluate(parameter.annotation, factory)
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            typed_dicts = [option for option in typing.get_args(hint) if typing.is_typeddict(option)]
            for typed_dict in typed_dicts:
                keys = typing.get_type_hints(typed_dict)
                arguments.update({key: Argument(key, key_hint, None) for key, key_hint in keys.items()})
            accepts_any = not typed_dicts
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            arguments[name] = Argument(name, hint, (), starred=True)
        else:
            arguments[name] = Argument(name, hint, parameter.default)
    return Signature(arguments, accepts_any)


def evaluate(annotation: Any, owner: Any, **names: Any) -> Any:
    """Return an annotation of a class or function; `EMPTY` if it cannot be evaluated."""
    if not isinstance(annotation, str):
        return annotation
    namespace = dict(PROTOCOLS)
    for each in reversed(getattr(owner, "__mro__", (owner,))):
        namespace.update(vars(sys.modules.get(getattr(each, "__module__", ""), typing)))
    try:
        return eval(annotation, {**namespace, **names})
    except Exception:
        return EMPTY


def summary_line(documented: Any) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())


class ConfigValueError(HansaError):
    """A value that cannot be used as written; ``keys`` lead to it, from the outermost."""

    def __init__(self, keys: Keys, message: str) -> None:
        super().__init__(f"{'.'.join(map(str, keys))}: {message}" if keys else message)
        self.keys, self.message = keys, message


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of component. An argument annotated with its protocol takes components of this kind.

    Args:
        name: The name in entry points and ``hansa parts``.
        protocol: The protocol or base class.
        package: The package that exports Hansa's own components of this kind, or these by name.
        required: The methods that a component must have; by default those that a protocol marks abstract. With none it
            must be an instance of the base class.
        modules: The modules of the package that have such components, so that others need not be imported; the name of
            the package stands for what it imports at once.
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
            names = tuple(each for each in vars(self.protocol) if each in self.protocol.__abstractmethods__)
        signatures = {name: inspect.signature(getattr(self.protocol, name)) for name in names}
        return {name: inspect.Signature([*each.parameters.values()][1:]) for name, each in signatures.items()}

    @cached_property
    def built_in(self) -> Mapping[str, Factory]:
        """Hansa's own components by name."""
        package = self.package
        return package if isinstance(package, Mapping) else {
            each: factory for each in package.__all__ if each.islower()
            if not self.modules or exports(package.__name__).get(each, package.__name__) in self.modules
            if self.is_factory(factory := getattr(package, each))
        }  # fmt: skip

    @property
    def title(self) -> str:
        """The name in messages."""
        return self.label or self.name

    @property
    def plugins(self) -> dict[str, Plugin]:
        """The components of installed packages by name: Hansa's are first, then packages in alphabetical order."""
        by_name: dict[str, Plugin] = {}
        for plugin in import_path.installed_plugins():
            if plugin.kind != self.name or not plugin.name:
                continue
            if plugin.name in self.built_in:
                warn_once(f"{plugin}: Hansa has a {self.title} of that name, which is used.")
            elif (first := by_name.setdefault(plugin.name, plugin)) is not plugin:
                warn_once(f"{plugin}: {first.package} has a component of that name, which is used.")
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
                warn_once(str(error))

    def knows(self, name: str) -> bool:
        """Return whether a word is the name of a component, or an import path."""
        return is_import_path(name) or normalize_name(name) in self.names

    def find(self, name: str, at: Keys = ()) -> Factory:
        """Return the factory of that name, or raise `ConfigValueError` at the keys ``at``."""
        plain = normalize_name(name)
        if plain in self.built_in:
            return self.built_in[plain]
        try:
            if is_import_path(name):
                return self._factory(import_path.import_object(name, self), repr(name))
            if plain in self.plugins:
                return self._factory(self.plugins[plain].load(), str(self.plugins[plain]))
        except HansaError as error:
            raise ConfigValueError(at, str(error)) from error
        raise ConfigValueError(at, f"no {self.title} {short_repr(name)}. {suggestion(plain, self.names)}")

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


def _function_factory(function: Factory, last: str) -> Factory:
    """Return a factory that fixes the arguments of a function that follow the one called ``last``."""
    parameters = list(inspect.signature(function).parameters.values())
    following = parameters[[each.name for each in parameters].index(last) + 1 :]
    following = [each.replace(annotation=evaluate(each.annotation, function)) for each in following]

    def make(**options: Any) -> Any:
        return partial(function, **options) if options else function

    make.__signature__ = inspect.Signature(following)  # type: ignore[attr-defined]
    return make


def unknown_plugins() -> list[str]:
    """Return a message for each entry point of an unknown kind, with the nearest known kinds."""
    return [f"{plugin}: no kind {plugin.kind!r}. {suggestion(plugin.kind, KINDS)}"
            for plugin in import_path.installed_plugins() if plugin.kind not in KINDS or not plugin.name]  # fmt: skip


def _accepts(method: Any, wanted: inspect.Signature, bound: bool) -> bool:
    """Return whether a method can be called with the arguments of its protocol."""
    keyword_only, needed = inspect.Parameter.KEYWORD_ONLY, wanted.parameters.values()
    positional = [None for each in needed if each.kind is not keyword_only and each.default is EMPTY]
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # compiled code has no signature
        return True
    try:
        signature.bind(
            *positional, *([] if bound else [None]), **{e.name: None for e in needed if e.kind is keyword_only}
        )
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
        Kind("blocks", local.blocks, {"blocks": local.blocks}, (), (), "choice of blocks", "blocks", local.blocks),
        Kind("batching", local.batching, {"batching": local.batching}, (), (), "division into batches", "batching"),
        Kind("pass_order", local.PassOrder, local, (), ("hansa.local",), "order of passes"),
        Kind("augment", augment.Augmentation, augment, label="augmentation", function_argument="generator"),
        Kind("loss", losses.Loss, losses, ("sums",)),
        Kind("partition", data.Partition, data, ("split",), ("hansa.data.partitions", "hansa.data.split")),
        Kind("link_model", ledger.LinkModel, _LINKS, ("seconds",), label="link model", default="custom"),
        Kind("fault_plan", faults, {"faults": faults}, _FAULTS, label="fault plan", default="faults"),
        Kind("pace", pace.Pace, _PACES, default="buffered"),
        Kind("profile", pace.Profile, pace, ("device",), label="device profile", default="devices"),
        Kind("discount", aggregate.Discount, aggregate, ("factor",), label="discount of staleness"),
        Kind("preset", Algorithm, presets.catalogue()),
    )
}
"""Every kind by name; entry points begin with these names."""
PROTOCOLS: dict[str, Any] = {kind.protocol.__name__: kind.protocol for kind in KINDS.values()}
"""Protocols of components, which an annotation may name even if they were imported for type checkers only."""

PLAIN_VALUES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word",
    list: "a list",
    dict: "keys",
}
"""Types of plain values, and their names in messages."""
FRACTION = re.compile("([0-9]{1,18})/([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class ComponentField:
    """The values that a key of a file accepts: components of some kinds, plain values, literals.

    A component is ``{kind: NAME, ...}`` with its arguments, or the bare ``NAME``.

    Args:
        kinds: The kinds of components.
        plain_types: The types of plain values.
        literals: Single values.
        items: The field of each entry of a list.
        accepts_any: Whether any other value is accepted unchanged.
        as_tuple: Whether a list is built as a tuple.
    """

    kinds: tuple[Kind, ...] = ()
    plain_types: tuple[type, ...] = ()
    literals: tuple[Any, ...] = ()
    items: ComponentField | None = None
    accepts_any: bool = False
    as_tuple: bool = False

    def build(self, value: Any, at: Keys = ()) -> Any:
        """Build the object that the value describes, or raise `ConfigValueError`.

        Args:
            value: A value of a file.
            at: The keys that lead to it, for errors.
        """
        value = self._parse_fraction(value)
        if value is None or self._is_plain(value):
            if not isinstance(value, list):
                return value
            items = value if self.items is None else [self.items.build(x, (*at, i)) for i, x in enumerate(value)]
            return tuple(items) if self.as_tuple else list(items)
        from_list = next((kind.from_list for kind in self.kinds if kind.from_list is not None), None)
        if isinstance(value, list) and from_list is not None:
            return from_list(*field_of_list(from_list).build(value, at))
        described = self.normalize(value)
        if self.kinds and isinstance(described, Mapping):
            if "kind" not in described:
                message = f"which {self.title}? Add kind: one of {', '.join(self.names)}, or MODULE:NAME of yours."
                raise ConfigValueError(at, message)
            return self._build_component(described["kind"], {k: x for k, x in described.items() if k != "kind"}, at)
        if self.accepts_any:
            return value
        raise ConfigValueError(at, f"expected {self.expected}, found {short_repr(value)}.{self._quotes_hint(value)}")

    def _build_component(self, name: str, arguments: Mapping[str, Any], at: Keys) -> Any:
        """Build the component of that name; each argument is built according to its annotation."""
        kind = next((kind for kind in self.kinds if kind.knows(name)), self.kinds[0])
        factory = kind.find(name, (*at, "kind"))
        signature, built, starred = signature_of(factory), {}, ()
        for key, value in arguments.items():
            if key not in signature.arguments and not signature.accepts_any:
                takes = suggestion(key, signature.arguments) if signature.arguments else "It takes none."
                raise ConfigValueError((*at, key), f"{name} has no {short_repr(key)}. {takes}")
            argument = signature.arguments.get(key, Argument(key))
            made = field_for_argument(argument).build(list(value) if argument.starred else value, (*at, key))
            if argument.starred:
                starred = made
            else:
                built[key] = made
        for argument in signature.arguments.values():
            if argument.required and argument.name not in arguments:
                raise ConfigValueError(at, f"{name} needs {argument.name}.")
        try:
            component = factory(*starred, **built)
        except HansaError as error:
            raise ConfigValueError((*at, error.argument) if error.argument in arguments else at, str(error)) from error
        except (TypeError, ValueError) as error:
            raise ConfigValueError(at, f"{name}: {error}.") from error
        mismatches = [kind.mismatch(component) for kind in self.kinds]
        if all(mismatches):
            message = f"{name} makes no {self.title}: {mismatches[0]}. It made {component!r}."
            raise ConfigValueError((*at, "kind"), message)
        return component

    def normalize(self, value: Any) -> Any:
        """Return the value as a saved file has it: a bare name as ``{kind: name}``."""
        if not self.kinds or self._is_plain(self._parse_fraction(value)):
            return value
        if isinstance(value, str) and not self._quotes_hint(value):
            value = {"kind": value}
        default = next((kind.default for kind in self.kinds if kind.default), None)
        if not isinstance(value, Mapping) or (name := value.get("kind", default)) is None:
            return value
        named = name if is_import_path(name) else normalize_name(str(name))
        return {"kind": named, **{str(key): inner for key, inner in value.items() if key != "kind"}}

    @property
    def title(self) -> str:
        """The name in messages."""
        return " or ".join(kind.title for kind in self.kinds)

    @property
    def names(self) -> list[str]:
        """The names of all components that it takes."""
        return [name for kind in self.kinds for name in kind.names]

    @property
    def expected(self) -> str:
        """The expected values, for messages."""
        expected = [PLAIN_VALUES[each] for each in self.plain_types] + [repr(literal) for literal in self.literals]
        if self.kinds:
            expected.append(f"{'an' if self.title[0] in 'aeu' else 'a'} {self.title} ({', '.join(self.names)})")
        return " or ".join(dict.fromkeys(expected)) or "nothing"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.normalize)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        from hansa.config.schema import field_schema

        return field_schema(self)

    def _quotes_hint(self, value: Any) -> str:
        return quotes_hint(value) if {int, float} & set(self.plain_types) else ""

    def _is_plain(self, value: Any) -> bool:
        if isinstance(value, bool):
            return bool in self.plain_types or value in self.literals
        if isinstance(value, int) and float in self.plain_types:
            return True
        return isinstance(value, self.plain_types) or (isinstance(value, (str, int)) and value in self.literals)

    def _parse_fraction(self, value: Any) -> Any:
        """Return a fraction such as "1/64" as a number; other values as they are."""
        if not isinstance(value, str) or (float not in self.plain_types and not self.accepts_any):
            return value
        match = FRACTION.fullmatch(value)
        return int(match[1]) / int(match[2]) if match and int(match[2]) else value


def field_of_list(factory: Factory) -> ComponentField:
    """Return the field of the list that a factory takes as its first argument."""
    return field_for_argument(next(iter(signature_of(factory).arguments.values())))


def field_for_argument(argument: Argument) -> ComponentField:
    """Return the field of an argument. Without annotation it takes anything, also components if named as a kind."""
    if argument.hint is not EMPTY:
        field = component_field(argument.hint)
        return ComponentField(plain_types=(list,), items=field, as_tuple=True) if argument.starred else field
    kind = KINDS.get(argument.name)
    return ComponentField((kind,) if kind is not None else (), (bool, int, float), accepts_any=True)


def component_field(hint: Any) -> ComponentField:
    """Return the field of a type annotation.

    >>> from hansa.core.schedule import Rate
    >>> component_field(Rate).build({"kind": "cosine", "lr": 0.1, "rounds": 5})
    cosine(lr=0.1, rounds=5, floor=0.0)
    >>> component_field(Rate).build("1/4")
    0.25
    """
    kinds: list[Kind] = []
    plain_types: list[type] = []
    literals: list[Any] = []
    items: ComponentField | None = None
    accepts_any = as_tuple = False
    for member in _union_members(hint):
        origin = typing.get_origin(member) or member
        if origin is Literal:
            literals += typing.get_args(member)
        elif origin in (bool, int, float, str):
            plain_types.append(origin)
        elif isinstance(origin, type) and issubclass(origin, Mapping):
            plain_types.append(dict)
        elif isinstance(origin, type) and issubclass(origin, Iterable) and not _kind_of_class(origin):
            plain_types.append(list)
            as_tuple = as_tuple or issubclass(origin, tuple)
            inner = component_field(typing.get_args(member)[0]) if typing.get_args(member) else ComponentField()
            items = inner if inner.kinds else items
        elif (kind := _kind_of_class(origin)) is not None:
            kinds.append(kind)
        else:
            accepts_any = True
    return ComponentField(
        tuple(kinds), tuple(dict.fromkeys(plain_types)), tuple(literals), items, accepts_any, as_tuple
    )


def _union_members(hint: Any) -> Iterator[Any]:
    """Yield the members of a union without None, unwrapped."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        for member in typing.get_args(hint):
            yield from _union_members(member)
    elif origin in (typing.Annotated, typing.Required, typing.NotRequired):
        yield from _union_members(typing.get_args(hint)[0])
    elif hint is not type(None) and hint is not None:
        yield hint


def _kind_of_class(origin: Any) -> Kind | None:
    """Return the kind that a class belongs to: as its protocol, or as a class that makes such components."""
    exact = (kind for kind in KINDS.values() if origin is kind.protocol)
    return next(exact, None) or next((kind for kind in KINDS.values() if kind.is_factory(origin)), None)
