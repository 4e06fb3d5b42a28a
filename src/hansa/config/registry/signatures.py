"""What a class or function may be told: its arguments, with types and defaults where its signature tells them."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

EMPTY: Any = inspect.Parameter.empty
WELL_KNOWN: dict[str, Any] = {}
"""Names that an annotation may use even where they were imported for type checkers only: the protocols of parts."""


class Argument(NamedTuple):
    """One argument: its type (`EMPTY` where nothing is said) and default; ``starred`` takes a list as ``*name``."""

    name: str
    hint: Any = EMPTY
    default: Any = EMPTY
    starred: bool = False
    optional: bool = False

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is EMPTY and not self.optional


class Signature(NamedTuple):
    """The arguments by name; ``open`` if it takes others besides."""

    arguments: dict[str, Argument]
    open: bool = False


def signature(factory: Callable[..., Any]) -> Signature:
    """The arguments of a class or function; those of ``**words: Unpack[Common]`` are the words of `Common`.

    >>> def mine(lr: float, *, b1=0.9): ...
    >>> [(one.name, one.required) for one in signature(mine).arguments.values()]
    [('lr', True), ('b1', False)]
    """
    found: dict[str, Argument] = {}
    known, further = hints(factory), False
    for name, parameter in inspect.signature(factory).parameters.items():
        hint = known.get(name, EMPTY)
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            vocabularies = [given for given in typing.get_args(hint) if typing.is_typeddict(given)]
            for vocabulary in vocabularies:
                words = typing.get_type_hints(vocabulary)
                found.update({word: Argument(word, said, optional=True) for word, said in words.items()})
            further = not vocabularies
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            found[name] = Argument(name, hint, starred=True, optional=True)
        else:
            found[name] = Argument(name, hint, parameter.default)
    return Signature(found, further)


def hints(factory: Callable[..., Any]) -> dict[str, Any]:
    """Its type hints, of a class with those of its ``__init__``; one that cannot be read is left out."""
    if isinstance(factory, type):
        return {**_hints(factory), **_hints(factory.__init__)}  # type: ignore[misc]
    return _hints(factory)


def returned(function: Callable[..., Any]) -> Any:
    """What a function says that it returns, or None; the rest of its hints is left alone, and torch with it."""
    said = getattr(function, "__annotations__", {}).get("return")
    try:
        return eval(said, {**WELL_KNOWN, **function.__globals__, "torch": None}) if isinstance(said, str) else said
    except Exception:
        return None


def _hints(owner: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(owner)
    except (NameError, TypeError, AttributeError, SyntaxError):
        space = {**WELL_KNOWN, **vars(sys.modules.get(getattr(owner, "__module__", ""), typing))}
        found = {}
        for name, text in _annotations(owner).items():
            try:
                found[name] = eval(text, space) if isinstance(text, str) else text
            except Exception:
                continue
        return found


def _annotations(owner: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in reversed(owner.__mro__) if isinstance(owner, type) else [owner]:
        found.update(getattr(each, "__annotations__", {}))
    return found


def first_line(made: Any) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(made) or "").split("\n\n")[0].split())
