"""The kinds of components, the methods that each requires, and components built from values of a file by pydantic.

Components are found by their name in Hansa or in an installed package, or as MODULE:NAME in user code;
`hansa.config.import_path` handles the last two. The annotation of a key or argument determines its values:
``compressor: Compressor`` takes a compressor, ``lr: Rate`` a number or a schedule. Components nest by their
annotations, including user-defined ones.
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
from typing import Annotated, Any, Literal, NamedTuple, Optional, TypeAlias, Union, cast

from pydantic import (
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import TypedDict

from hansa import aggregate, compress, data, gossip, local, pace, presets, sample, server
from hansa.algorithm import Algorithm
from hansa.config import import_path
from hansa.config.import_path import Plugin, is_import_path, normalize_name, warn_once
from hansa.config.yaml_text import ConfigError, Keys, Problem, has_key
from hansa.core import schedule
from hansa.core.errors import HansaError, quotes_hint, short_repr, suggestion
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
                hint = Union[KINDS[name].protocol, Any] if name in KINDS else Any  # noqa: UP007
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
        Kind("partition", data.Partition, data, ("split",), ("hansa.data.partitions", "hansa.data.split")),
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


# ---- values of a file


def _refused(keys: Keys, message: str, value: Any) -> ValidationError:
    """Return pydantic's error for a value inside a component."""
    reason = PydanticCustomError("component", "{message}", {"message": message})
    return ValidationError.from_exception_data("component", [{"type": reason, "loc": keys, "input": value}])


def _read_number(value: Any, read: Callable[[Any], Any]) -> Any:
    """Return a number, also of a fraction such as "1/64"; integers remain integers."""
    match = _FRACTION.fullmatch(value) if isinstance(value, str) else None
    value = int(match[1]) / int(match[2]) if match and int(match[2]) else value
    return value if type(value) is int else read(value)


_FRACTION = re.compile("([0-9]{1,18})/([0-9]{1,18})")
_NUMBER_OR_FRACTION = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^[0-9]+/[0-9]+$"}]}
_NUMBER = Annotated[float, Strict(), WrapValidator(_read_number), WithJsonSchema(_NUMBER_OR_FRACTION)]
_ANYTHING = Annotated[Any, WrapValidator(_read_number)]


def _normalize(kind: Kind, value: Any) -> Any:
    """Return a value in its saved form: a bare name as ``{kind: name}``, others unchanged."""
    if isinstance(value, str) and kind.knows(value):
        value = {"kind": value}
    if not isinstance(value, Mapping) or (name := value.get("kind", kind.default)) is None:
        return value
    normalized = name if is_import_path(name) else normalize_name(str(name))
    return {"kind": normalized, **{str(key): inner for key, inner in value.items() if key != "kind"}}


def _build(kind: Kind, value: Any) -> Any:
    """Build the component that a value describes; pydantic's errors have the keys inside it."""
    if isinstance(value, list) and kind.from_list is not None:
        return kind.from_list(*TypeAdapter(_plain_type(_list_type(kind))).validate_python(value))
    described = _normalize(kind, {"kind": value} if isinstance(value, str) and not quotes_hint(value) else value)
    if not isinstance(described, Mapping):
        article = "an" if kind.title[0] in "aeu" else "a"
        raise _refused((), f"expected {article} {kind.title} ({', '.join(kind.names)})", value)
    arguments = {key: inner for key, inner in described.items() if key != "kind"}
    if "kind" not in described:
        names = ", ".join(kind.names)
        raise _refused((), f"which {kind.title}? Add kind: one of {names}, or MODULE:NAME of yours.", value)
    name = described["kind"]
    try:
        factory = kind.find(name)
    except HansaError as error:
        raise _refused(("kind",), str(error), value) from error
    signature = signature_of(factory)
    for key in arguments.keys() - signature.arguments.keys() if not signature.accepts_any else ():
        hint = suggestion(key, signature.arguments) if signature.arguments else "It takes none."
        raise _refused((key,), f"{name} has no {short_repr(key)}. {hint}", value)
    for missing in (required for required in signature.required if required not in arguments):
        raise _refused((), f"{name} needs {missing}.", value)
    built = arguments_of(factory).validate_python(arguments)
    starred = [p.name for p in signature.arguments.values() if p.kind is p.VAR_POSITIONAL]
    several = [item for name in starred for item in built.pop(name, None) or ()]
    try:
        component = factory(*several, **built)
    except HansaError as error:
        keys = (error.argument,) if error.argument in arguments else ()
        raise _refused(keys, str(error), value) from error
    except (TypeError, ValueError) as error:
        raise _refused((), f"{name}: {error}.", value) from error
    if mismatch := kind.mismatch(component):
        raise _refused(("kind",), f"{name} makes no {kind.title}: {mismatch}. It made {component!r}.", value)
    return component


def _list_type(kind: Kind) -> Any:
    """Return the annotation of a list that describes a component."""
    assert kind.from_list is not None
    return next(iter(signature_of(kind.from_list).arguments.values())).annotation


@dataclass(frozen=True)
class _Component:
    """Pydantic's annotation for a component of a kind."""

    kind: Kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(partial(_build, self.kind))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        reference = {"$part": f"#/$defs/{self.kind.name}"}  # becomes a reference once all kinds are defined
        if self.kind.from_list is None:
            return reference
        array = {"type": "array", "items": reference}
        if self.kind.protocol not in typing.get_args(annotation := _list_type(self.kind)):
            array = TypeAdapter(_plain_type(annotation)).json_schema()
        return {"anyOf": [reference, array]}


@dataclass(frozen=True)
class ComponentField:
    """The values that a key of a file or an argument accepts by its annotation: components, plain values, literals.

    A component is ``{kind: NAME, ...}`` with its arguments, or the bare ``NAME``.

    Args:
        hint: The annotation.

    >>> from hansa.core.schedule import Rate
    >>> ComponentField(Rate).build({"kind": "cosine", "lr": 0.1, "rounds": 5})
    cosine(lr=0.1, rounds=5, floor=0.0)
    >>> ComponentField(Rate).build("1/4")
    0.25
    """

    hint: Any

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of components that it accepts."""
        candidates = map(_kind_of_class, _union_members(self.hint))
        return tuple(kind for kind in candidates if kind is not None)

    @cached_property
    def type(self) -> Any:
        """The type with which pydantic builds the value, or None where it is not set."""
        return Optional[self.item_type]  # noqa: UP045

    @cached_property
    def item_type(self) -> Any:
        """The type of such a value in a list: plain values are tried first, then components."""
        plain = [_plain_type(member) for member in _union_members(self.hint) if _kind_of_class(member) is None]
        members = [*plain, *(Annotated[Any, _Component(kind)] for kind in self.kinds)]
        members.sort(key=lambda member: member is _ANYTHING)  # it comes last
        if len(members) == 1:
            return members[0]
        return Annotated[Union[tuple(members)], Field(union_mode="left_to_right")]  # noqa: UP007

    @cached_property
    def adapter(self) -> TypeAdapter[Any]:
        """Builds the value."""
        return TypeAdapter(self.type)

    def build(self, value: Any, prefix: Keys = ()) -> Any:
        """Build the object that the value describes, or raise `ConfigError`.

        Args:
            value: A value of a file.
            prefix: The keys that lead to it, for errors.
        """
        try:
            return self.adapter.validate_python(value)
        except ValidationError as error:
            problem = explain(value, error)[0]
            raise ConfigError([problem._replace(keys=(*prefix, *problem.keys))]) from error

    def normalize(self, value: Any) -> Any:
        """Return the value in its saved form: a bare name as ``{kind: name}``."""
        for kind in self.kinds:
            if (described := _normalize(kind, value)) is not value:
                return described
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.normalize)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return self.adapter.json_schema()


@lru_cache(maxsize=1024)
def arguments_of(factory: Factory) -> TypeAdapter[Any]:
    """Return the adapter that builds the arguments of a class or function from values of a file."""
    types = {key: ComponentField(p.annotation).type for key, p in signature_of(factory).arguments.items()}
    arguments = TypedDict("arguments", types, total=False)  # type: ignore[misc]
    arguments.__pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[attr-defined]
    return TypeAdapter(arguments)


_WORDS = {"Input should be": "expected", "a valid integer": "a whole number", "a valid boolean": "true or false",
          "a valid dictionary": "keys", "a valid ": "a "}  # fmt: skip


def describe_error(item: Mapping[str, Any], keys: Keys) -> str:
    """Return the message of one of pydantic's errors in the terms of a file."""
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    message = str(item["msg"])
    if item["type"] != "component":
        for original, replacement in _WORDS.items():
            message = message.replace(original, replacement)
    return message


def explain(
    data: Any, error: ValidationError, describe: Callable[[Mapping[str, Any], Keys], str] = describe_error
) -> list[Problem]:
    """Return the problems of a value by keys; the expectations of the members of a union are joined.

    Args:
        data: The value that was validated.
        error: Pydantic's errors.
        describe: Returns the message of an error at its keys.
    """
    values: dict[Keys, Any] = {}
    messages: dict[Keys, list[str]] = {}
    for item in error.errors():
        inner, keys = data, cast("Keys", ())
        for key in item["loc"]:  # skips names of union members
            if has_key(inner, key):
                inner, keys = inner[key], (*keys, key)
        values[keys] = inner
        messages.setdefault(keys, []).append(describe(item, keys))
    problems = []
    for keys, texts in messages.items():
        sentences = [text for text in dict.fromkeys(texts) if not text.startswith("expected ") or text.endswith(".")]
        expected = " or ".join(dict.fromkeys(text.removeprefix("expected ") for text in texts if text not in sentences))
        if not sentences and all(other_keys == keys or other_keys[: len(keys)] != keys for other_keys in messages):
            remedy = quotes_hint(values[keys]) if "number" in expected else ""
            sentences = [f"expected {expected}, found {short_repr(values[keys])}.{remedy}"]
        if sentences:
            problems.append(Problem("", keys, " ".join(sentences)))
    return problems


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


def _plain_type(member: Any) -> Any:
    """Return the type with which pydantic reads a member of a union that is no component."""
    origin = typing.get_origin(member) or member
    if origin is float:
        return _NUMBER
    if origin in (bool, int, str):
        return Annotated[origin, Strict()]
    if origin is Literal:
        return member
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return dict[str, Any]
    if isinstance(origin, type) and issubclass(origin, Iterable):
        inner: Any = ComponentField(next(iter(typing.get_args(member)), Any)).item_type
        return tuple[inner, ...] if issubclass(origin, tuple) else list[inner]
    return _ANYTHING


def _kind_of_class(member: Any) -> Kind | None:
    """Return the kind whose protocol a class is or whose components it makes."""
    origin = typing.get_origin(member) or member
    exact = (kind for kind in KINDS.values() if origin is kind.protocol)
    return next(exact, None) or next((kind for kind in KINDS.values() if kind.is_factory(origin)), None)
