"""What the protocols of all parts share: required methods, declarations with defaults, and words for what is no part.

A part needs the methods that its protocol marks abstract. All else in a protocol is a declaration with a default: who
inherits from the protocol has it, who does not need not mention it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from hansa.core.errors import HansaError, suggestion


def declared(part: object, protocol: type, name: str) -> Any:
    """What a part declares, or the default of its protocol.

    >>> from hansa.aggregate import Aggregator, median
    >>> declared(median(), Aggregator, "min_updates"), declared(object(), Aggregator, "min_updates")
    (1, 1)
    """
    found = getattr(part, name, _MISSING)
    if found is _MISSING:
        default = inspect.getattr_static(protocol, name)
        return default.__get__(part, type(part)) if hasattr(default, "__get__") else default
    if isinstance(found, property):  # a dataclass took the protocol's default for the field's
        raise HansaError(f"{type(part).__name__}: its field {name!r} has no value. Give the field a default.")
    return found


def missing_methods(part: object, protocol: type) -> list[str]:
    """The required methods that something has not."""
    required = sorted(getattr(protocol, "__abstractmethods__", ()))
    return [name for name in required if not callable(getattr(part, name, None))]


def check_component(
    owner: str, argument: str, value: object, protocol: type, noun: str, *, instead: str = "", example: str = ""
) -> None:
    """Refuse what is not a part of a protocol; ``instead`` is what was probably meant, ``example`` one that is.

    >>> from hansa.aggregate import Aggregator, mean
    >>> expect("Channel", "aggregate", mean, Aggregator, "an aggregator")
    Traceback (most recent call last):
    ...
    hansa.core.errors.HansaError: Channel(aggregate=mean): expected an aggregator: mean().
    """
    if isinstance(value, type) or missing_methods(value, protocol):
        raise not_a_component(owner, argument, value, protocol, noun, instead=instead, example=example)


def not_a_component(
    owner: str, argument: str, value: object, protocol: type, noun: str, *, instead: str = "", example: str = ""
) -> HansaError:
    """The error for something that is not a part of a protocol."""
    shown = value.__name__ if isinstance(value, type) else repr(value)
    missing = missing_methods(value, protocol)
    if isinstance(value, type) and not missing:
        instead = constructor_call(value)
    elif isinstance(value, str):
        room = _room(protocol)
        instead = constructor_call(room[value]) if value in room else ""
        example = example if instead else suggestion(value, room)
    end = f": {instead}." if instead else f", with {_listed(missing)}." if missing else "."
    rest = f" {example}" if example and not instead else ""
    return HansaError(f"{owner}({argument}={shown}): expected {noun}{end}{rest}")


def walk_components(value: Any) -> Iterator[Any]:
    """Every part that a value is made of, outermost first."""
    if is_dataclass(value) and not isinstance(value, type):
        yield value
        for item in fields(value):
            yield from walk_components(getattr(value, item.name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from walk_components(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            if is_dataclass(item) or hasattr(item, "cites"):
                yield from walk_components(item)
    elif hasattr(value, "cites"):  # a part that is no dataclass
        yield value


def constructor_call(kind: type) -> str:
    """The call that makes a part of a class, with dots where it needs arguments."""
    needed = [p for p in inspect.signature(kind).parameters.values() if p.default is p.empty]
    return f"{kind.__name__}({'...' if needed else ''})"


def _listed(names: list[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _room(protocol: type) -> dict[str, type]:
    """The parts of the protocol's own room, by name."""
    package = sys.modules[sys.modules[protocol.__module__].__package__ or protocol.__module__]
    public = ((name, getattr(package, name)) for name in package.__all__)
    return {name: item for name, item in public if isinstance(item, type) and not _open(item, protocol)}


def _open(item: type, protocol: type) -> bool:
    return item is protocol or inspect.isabstract(item) or bool(missing_methods(item, protocol))


_MISSING = object()
