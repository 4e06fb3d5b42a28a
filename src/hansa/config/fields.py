"""Configuration fields that take components. A field is derived from a type annotation and builds values of a file.

``compressor: Compressor`` takes a compressor, ``lr: Rate`` a number or a schedule. Components nest by their
annotations, including user-defined ones.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from hansa.config.components import EMPTY, KINDS, Argument, ConfigValueError, Kind, signature_of
from hansa.config.import_path import is_import_path, normalize_name
from hansa.core.errors import HansaError, quotes_hint, short_repr, suggestion

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

    def build(self, value: Any) -> Any:
        """Build the object that the value describes, or raise `ConfigValueError`."""
        value = self._parse_fraction(value)
        if value is None or self._is_plain(value):
            return self._build_list(value) if isinstance(value, list) else value
        from_list = next((kind.from_list for kind in self.kinds if kind.from_list is not None), None)
        if isinstance(value, list) and from_list is not None:
            return from_list(*field_for_argument(next(iter(signature_of(from_list).arguments.values()))).build(value))
        described = self.normalize(value)
        if self.kinds and isinstance(described, Mapping):
            if "kind" not in described:
                raise ConfigValueError(
                    (), f"which {self.title}? Add kind: one of {', '.join(self.names)}, or MODULE:NAME of yours."
                )
            arguments = {name: inner for name, inner in described.items() if name != "kind"}
            return self.build_component(described["kind"], arguments)
        if self.accepts_any and not (isinstance(value, Mapping) and "kind" in value):
            return value
        if self.accepts_any:
            what = short_repr(value["kind"])
            raise ConfigValueError((), f"which kind of component is {what}? Annotate the argument, as in lr: Rate.")
        raise ConfigValueError((), f"expected {self.expected}, found {short_repr(value)}.{self._quotes_hint(value)}")

    def build_component(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Build the component of that name; each argument is built according to its annotation."""
        kind = next((kind for kind in self.kinds if kind.knows(name)), None)
        if kind is None:
            known = suggestion(normalize_name(name), self.names)
            raise ConfigValueError(("kind",), f"no {self.title} {short_repr(name)}. {known}")
        try:
            factory = kind.find(name)
        except ConfigValueError as error:
            raise error.with_prefix("kind") from error
        signature, built, starred = signature_of(factory), {}, ()
        for key, value in arguments.items():
            if key not in signature.arguments and not signature.accepts_any:
                takes = suggestion(key, signature.arguments) if signature.arguments else "It takes none."
                raise ConfigValueError((key,), f"{name} has no {short_repr(key)}. {takes}")
            argument = signature.arguments.get(key, Argument(key))
            try:
                built[key] = field_for_argument(argument).build(list(value) if argument.starred else value)
            except ConfigValueError as error:
                raise error.with_prefix(key) from error
            if argument.starred:
                starred = built.pop(key)
        for argument in signature.arguments.values():
            if argument.required and argument.name not in arguments:
                raise ConfigValueError((), f"{name} needs {argument.name}.")
        try:
            component = factory(*starred, **built)
        except HansaError as error:
            raise ConfigValueError((error.argument,) if error.argument in arguments else (), str(error)) from error
        except (TypeError, ValueError) as error:
            raise ConfigValueError((), f"{name}: {error}.") from error
        mismatches = [kind.mismatch(component) for kind in self.kinds]
        if all(mismatches):
            raise ConfigValueError(("kind",), f"{name} makes no {self.title}: {mismatches[0]}. It made {component!r}.")
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

    def _build_list(self, values: list[Any]) -> Any:
        items = list(values)
        for place, value in enumerate(values):
            try:
                items[place] = value if self.items is None else self.items.build(value)
            except ConfigValueError as error:
                raise error.with_prefix(place) from error
        return tuple(items) if self.as_tuple else items


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
