"""Places where parts stand: a slot is read off a type annotation, and makes what a file says there.

``compressor: Compressor`` takes a compressor, ``lr: Rate`` a number or a schedule, ``two_way: bool | Compressor |
Downlink`` what it says. So a part nests in another by the other's annotations alone, one's own parts included.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Union

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from hansa.config.registry.components import KINDS, Factory, Kind, Misfit
from hansa.config.registry.import_path import is_place
from hansa.config.registry.plugins import plain
from hansa.config.registry.signatures import EMPTY, Argument, Signature, signature
from hansa.core.errors import HansaError, quotes_hint, short_repr, suggestion

PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", list: "a list", dict: "keys"}
"""Values that a file has words for, and how messages call them."""
BUILDING = "building"
"""In the context of a validation: False where parts are not to be built, so that no code is run that a file names."""
FRACTION = re.compile("([0-9]{1,18})/([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class Slot:
    """What may stand in a place: parts of some kinds, plain values, given words.

    A part is ``{kind: NAME, ...}`` with its arguments, or the bare ``NAME``. ``items`` is the slot of each entry of a
    list, ``loose`` takes whatever else comes as it is.
    """

    kinds: tuple[Kind, ...] = ()
    plain: tuple[type, ...] = ()
    words: tuple[Any, ...] = ()
    items: Slot | None = None
    loose: bool = False
    frozen: bool = False

    def build(self, value: Any) -> Any:
        """What stands there, or `Misfit` naming the argument and the remedy."""
        value = self._number(value)
        if value is None or self._is_plain(value):
            return self._listed(value) if isinstance(value, list) else value
        listed = next((kind.listed for kind in self.kinds if kind.listed is not None), None)
        if isinstance(value, list) and listed is not None:
            return listed(*slot_of(next(iter(signature_of(listed).arguments.values()))).build(value))
        if self.kinds and isinstance(value, str):
            value = {"kind": value}
        if self.kinds and isinstance(value, Mapping):
            name, given = self._split(value)
            return self.make(name, given)
        if self.loose:
            if isinstance(value, Mapping) and "kind" in value:
                raise Misfit((), f"which kind of part is {short_repr(value['kind'])}? Annotate it, as in lr: Rate.")
            return value
        raise Misfit((), f"expected {self.expected}, found {short_repr(value)}.{quotes_hint(value)}")

    def make(self, name: str, given: Mapping[str, Any]) -> Any:
        """The part of that name with the given arguments, each of them built as its annotation says."""
        factory = self.find(name)
        known = signature_of(factory)
        arguments, starred = self._arguments(name, known, given)
        try:
            made = factory(*starred, **arguments)
        except HansaError as error:
            found = re.search(r"\((\w+)", str(error))
            at = found.group(1) if found else ""
            raise Misfit((at,) if at in given else (), str(error)) from error
        except (TypeError, ValueError) as error:
            raise Misfit((), f"{name}: {error}.") from error
        lacking = [kind.lacks(made) for kind in self.kinds]
        if all(lacking):
            raise Misfit(("kind",), f"{name} makes no {self.title}: {lacking[0]}. It made {made!r}.")
        return made

    def find(self, name: str) -> Factory:
        """What makes the part of that name."""
        for kind in self.kinds:
            if kind.knows(name):
                try:
                    return kind.find(name)
                except Misfit as misfit:
                    raise misfit.under("kind") from misfit
        known = [each for kind in self.kinds for each in kind.names]
        if quotes_hint(name) and {int, float} & set(self.plain):
            raise Misfit((), f"expected {self.expected}, found {short_repr(name)}.{quotes_hint(name)}")
        raise Misfit(
            ("kind",), f"no {self.title} {short_repr(name)}. {self._elsewhere(name) or suggestion(plain(name), known)}"
        )

    def _validated(self, value: Any, info: ValidationInfo) -> Any:
        if info.context is None or info.context.get(BUILDING, True):
            self.build(value)
        return self.normal(value)

    def normal(self, value: Any) -> Any:
        """The value as a saved file writes it: a bare word as ``{kind: word}``."""
        if self._is_plain(self._number(value)) or not self.kinds:
            return value
        if isinstance(value, str):
            return {"kind": value if is_place(value) else plain(value)}
        if isinstance(value, Mapping):
            name, given = self._split(value)
            return {"kind": name, **given}
        return value

    @property
    def title(self) -> str:
        """What messages call it."""
        return " or ".join(kind.title for kind in self.kinds)

    @property
    def expected(self) -> str:
        """What messages say may stand here."""
        said = [PLAIN[each] for each in self.plain] + [repr(word) for word in self.words]
        if self.kinds:
            known = [name for kind in self.kinds for name in kind.names]
            said.append(f"{article(self.title)} ({', '.join(known)})")
        return " or ".join(dict.fromkeys(said)) or "nothing"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self._validated)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        from hansa.config.registry.schema import slot_schema

        return slot_schema(self)

    def _is_plain(self, value: Any) -> bool:
        if isinstance(value, bool):
            return bool in self.plain or value in self.words
        if isinstance(value, int) and float in self.plain:
            return True
        return isinstance(value, self.plain) or (isinstance(value, (str, int)) and value in self.words)

    def _number(self, value: Any) -> Any:
        """A fraction as the number it is: the papers keep 1/64 of the entries, not 0.015625."""
        if not isinstance(value, str) or (float not in self.plain and not self.loose):
            return value
        found = FRACTION.fullmatch(value)
        return int(found[1]) / int(found[2]) if found and int(found[2]) else value

    def _split(self, value: Mapping[Any, Any]) -> tuple[str, dict[str, Any]]:
        given = {str(name): inner for name, inner in value.items()}
        name = given.pop("kind", next((kind.default for kind in self.kinds if kind.default), None))
        if name is None:
            known = [each for kind in self.kinds for each in kind.names]
            raise Misfit((), f"which {self.title}? Add kind: one of {', '.join(known)}, or MODULE:NAME of yours.")
        return (str(name) if is_place(name) else plain(str(name))), given

    def _arguments(self, part: str, known: Signature, given: Mapping[str, Any]) -> tuple[dict[str, Any], Sequence[Any]]:
        """What a part is called with."""
        built: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known.arguments and not known.open:
                takes = suggestion(name, known.arguments) if known.arguments else "It takes none."
                raise Misfit((name,), f"{part} has no {short_repr(name)}. {takes}")
            try:
                argument = known.arguments.get(name, Argument(name))
                built[name] = slot_of(argument).build(list(value) if argument.starred else value)
            except Misfit as misfit:
                raise misfit.under(name) from misfit
        for argument in known.arguments.values():
            if argument.required and argument.name not in given:
                raise Misfit((), f"{part} needs {argument.name}.")
        starred = next((name for name, argument in known.arguments.items() if argument.starred), "")
        return built, built.pop(starred, ())

    def _listed(self, value: list[Any]) -> Any:
        found = value if self.items is None else self._each(value, self.items)
        return tuple(found) if self.frozen else found

    @staticmethod
    def _each(values: Iterable[Any], slot: Slot) -> list[Any]:
        found = []
        for place, value in enumerate(values):
            try:
                found.append(slot.build(value))
            except Misfit as misfit:
                raise misfit.under(place) from misfit
        return found

    def _elsewhere(self, name: str) -> str:
        """Where a name of another kind belongs: ``sign`` is no uplink, but error_feedback takes it."""
        for other in KINDS.values():
            if other not in self.kinds and plain(name) in other.names:
                taking = [each for kind in self.kinds for each, part in kind.built_in.items()
                          for argument in signature_of(part).arguments.values()
                          if other in slot_of(argument).kinds]  # fmt: skip
                if taking:
                    return f"It is {article(other.title)}, which {' and '.join(taking)} take."
        return ""


def article(word: str) -> str:
    """A word with the article it takes."""
    return f"{'an' if word[0] in 'aeo' or word.startswith('up') else 'a'} {word}"


@lru_cache(maxsize=1024)
def signature_of(factory: Factory) -> Signature:
    """`signature`, remembered: files name the same parts again and again."""
    return signature(factory)


def slot_of(argument: Argument) -> Slot:
    """The slot of an argument. One without a type takes anything, and parts if it has the name of a kind."""
    if argument.hint is not EMPTY:
        found = slot(argument.hint)
        return Slot(plain=(list,), items=found, frozen=True) if argument.starred else found
    named = KINDS.get(argument.name)
    return Slot((named,) if named is not None else (), (bool, int, float), loose=True)


def slot(hint: Any) -> Slot:
    """The slot that a type stands for.

    >>> from hansa.schedule import Rate
    >>> slot(Rate).build({"kind": "cosine", "lr": 0.1, "rounds": 5})
    cosine(lr=0.1, rounds=5, floor=0.0)
    >>> slot(Rate).build("1/4")
    0.25
    """
    kinds: list[Kind] = []
    plain_types: list[type] = []
    words: list[Any] = []
    items: Slot | None = None
    loose = frozen = False
    for member in _members(hint):
        origin = typing.get_origin(member) or member
        if origin is Literal:
            words += typing.get_args(member)
        elif origin in (bool, int, float, str):
            plain_types.append(origin)
        elif isinstance(origin, type) and issubclass(origin, Mapping):
            plain_types.append(dict)
        elif isinstance(origin, type) and issubclass(origin, Iterable) and not _kind_of(origin):
            plain_types.append(list)
            frozen = frozen or issubclass(origin, tuple)
            inner = slot(typing.get_args(member)[0]) if typing.get_args(member) else Slot(loose=True)
            items = inner if inner.kinds else items
        elif (kind := _kind_of(origin)) is not None:
            kinds.append(kind)
        else:
            loose = True
    return Slot(tuple(kinds), tuple(dict.fromkeys(plain_types)), tuple(words), items, loose, frozen)


def _members(hint: Any) -> Iterator[Any]:
    """The members of a union, without None, whatever they are wrapped in."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        for member in typing.get_args(hint):
            yield from _members(member)
    elif origin in (typing.Annotated, typing.Required, typing.NotRequired):
        yield from _members(typing.get_args(hint)[0])
    elif hint is not type(None) and hint is not None:
        yield hint


def _kind_of(origin: Any) -> Kind | None:
    """The kind that a class asks for: its protocol, or a class that makes such parts."""
    for kind in KINDS.values():
        if origin is kind.protocol:
            return kind
    if not isinstance(origin, type):
        return None
    return next((kind for kind in KINDS.values() if kind.makes(origin)), None)
