"""Component protocols: required methods, optional traits with defaults, and validation errors.

A protocol has only the methods that a component must have. Optional traits are declared by a base class that gives each
its default. A component may inherit from the base class, or just define the traits that differ.

Citations of the components in use: keys of Hansa's bibliography, or whole BibTeX entries.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar, cast

from hansa.core.errors import HansaError, printable, suggestion

Base = TypeVar("Base")
F = TypeVar("F", bound=Callable[..., Any])


def with_defaults(component: object, base: type[Base]) -> Base:
    """Return a view of the component with every trait of ``base``: its own, or the default.

    >>> from hansa.aggregate import BaseAggregator, krum
    >>> class duck_typed: ...
    >>> with_defaults(krum(2), BaseAggregator).min_updates, with_defaults(duck_typed(), BaseAggregator).min_updates
    (5, 1)
    """
    return cast("Base", component if base in type(component).__mro__ else _WithDefaults(component, base))


class _WithDefaults:
    __slots__ = ("_base", "_component")

    def __init__(self, component: object, base: type) -> None:
        self._component, self._base = component, base

    def __getattr__(self, name: str) -> Any:
        trait = getattr(self._component, name, _ABSENT)
        if trait is not _ABSENT:
            return trait
        default = _default(self._base, name)
        return default.__get__(self._component, type(self._component)) if hasattr(default, "__get__") else default


_ABSENT = object()


@cache
def _default(base: type, name: str) -> Any:
    return inspect.getattr_static(base, name)


def missing_methods(component: object, protocol: type) -> list[str]:
    """Return the required methods that an object lacks."""
    required = sorted(getattr(protocol, "__abstractmethods__", ()))
    return [name for name in required if not callable(getattr(component, name, None))]


def check_component(owner: str, argument: str, value: object, protocol: type, noun: str, example: str) -> None:
    """Raise unless the value implements a protocol; ``example`` names a valid component.

    >>> from hansa.sample import Sampler
    >>> check_component("Algorithm", "sampler", 5, Sampler, "a sampler", "uniform(0.1) is one.")
    Traceback (most recent call last):
    ...
    hansa.core.errors.HansaError: Algorithm(sampler=5): expected a sampler, with select. uniform(0.1) is one.
    """
    if isinstance(value, type) or missing_methods(value, protocol):
        raise not_a_component(owner, argument, value, protocol, noun, example)
    for field in fields(value) if is_dataclass(value) else ():
        if isinstance(getattr(value, field.name), property):  # the dataclass took a trait of its base as a default
            name = type(value).__name__
            raise HansaError(f"{name}: its field {field.name!r} has no value. Give the field a default.")


def not_a_component(owner: str, argument: str, value: object, protocol: type, noun: str, example: str) -> HansaError:
    """Return the error for a value that does not implement a protocol."""
    name = value.__name__ if isinstance(value, type) else repr(value)
    *first, last = sorted(getattr(protocol, "__abstractmethods__", ()))
    methods = f"{', '.join(first)} and {last}" if first else last
    message = f"{owner}({argument}={name}): expected {noun}, with {methods}. {example}"
    return HansaError(message, component=owner, argument=argument, value=value)


def walk_components(value: Any) -> Iterator[Any]:
    """Yield every component in a value, outermost first."""
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
    elif hasattr(value, "cites"):  # a component that is not a dataclass
        yield value


DECLARED = "__hansa_component__"
"""The attribute that `component` sets."""


def component(function: F) -> F:
    """Declare a function as a component that a configuration may name as MODULE:NAME.

    Functions need it, so that a file cannot call arbitrary functions: losses, metrics, data, augmentations, presets and
    functions that return models or other components. Classes need it only if they have no base class of Hansa or
    PyTorch and lack the methods of a component.

    Args:
        function: A function, or a class, of your module. It is returned unchanged.

    >>> @component
    ... def hinge(output, target):
    ...     return (1 - output * target).clamp(min=0).mean()
    """
    setattr(function, DECLARED, True)
    return function


def is_declared(value: object) -> bool:
    """Return whether a function or class itself, not only a base class of it, was declared with `component`."""
    return vars(value).get(DECLARED) is True if hasattr(value, "__dict__") else False


_ENTRY = re.compile(r"\s*@\w+\s*\{\s*[^\s,{}]+\s*,.*\}\s*", re.DOTALL)


@cache
def bibliography() -> dict[str, str]:
    """Return Hansa's BibTeX entries by key."""
    text = files("hansa.core").joinpath("citations.bib").read_text(encoding="utf-8")
    entries = re.finditer(r"^@\w+\{(\w+),.*?^\}$", text, flags=re.MULTILINE | re.DOTALL)
    return {entry[1]: entry[0] for entry in entries}


def citations_of(component: object) -> tuple[str, ...]:
    """Return the citations of a component: keys, or BibTeX entries, which begin with @. ``cites`` may be one string."""
    cites = getattr(component, "cites", ())
    return (cites,) if isinstance(cites, str) else tuple(cites)


def check_citations(parts: Iterable[object]) -> None:
    """Raise for a citation that is neither a known key nor a BibTeX entry."""
    for part in parts:
        for citation in citations_of(part):
            if not isinstance(citation, str) or not (citation in bibliography() or _ENTRY.fullmatch(citation)):
                raise HansaError(
                    f"{type(part).__name__} cites {citation!r}: expected a key of hansa.core.protocols.bibliography() "
                    f"or a BibTeX entry, '@article{{key, ...}}'. {suggestion(str(citation), bibliography())}"
                )


def citations(algorithm: Any) -> list[str]:
    """Return the distinct citations (keys or BibTeX entries) of the components in use, outermost component first."""
    return list(dict.fromkeys(citation.strip() for part in algorithm.components() for citation in citations_of(part)))


def bibtex_entries(citations: Iterable[str]) -> str:
    """Return the BibTeX of some citations, each once."""
    return "\n\n".join(bibliography().get(citation, citation) for citation in dict.fromkeys(citations))


def cite(algorithm: Any) -> str:
    """Print and return the BibTeX of the components that an algorithm uses.

    Args:
        algorithm: The algorithm whose components are cited.

    >>> import contextlib, io
    >>> from hansa import presets
    >>> with contextlib.redirect_stdout(io.StringIO()):
    ...     text = cite(presets.fedavg())
    >>> text.splitlines()[0]
    '@inproceedings{mcmahan2017,'
    """
    text = bibtex_entries(citations(algorithm))
    print(printable(text))
    return text
