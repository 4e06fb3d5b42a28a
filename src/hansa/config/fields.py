"""Values of a file that describe components, built by pydantic.

The annotation of a key or argument determines its values: ``compressor: Compressor`` takes a compressor, ``lr: Rate`` a
number or a schedule. Components nest by their annotations, including user-defined ones.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Annotated, Any, Literal, Optional, Union, cast

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

from hansa.config.components import KINDS, Factory, Kind, signature_of
from hansa.config.import_path import is_import_path, normalize_name
from hansa.config.yaml_text import ConfigError, Keys, Problem, has_key
from hansa.core.errors import HansaError, quotes_hint, short_repr, suggestion


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
