"""The arguments of a class or function, with their types and defaults."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

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
