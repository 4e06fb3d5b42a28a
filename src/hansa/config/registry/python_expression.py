"""Parts as the Python that makes them: an expression, and the imports that it needs."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hansa import aggregate, compress, data, gossip, local, presets, sample, server
from hansa.algorithm import Algorithm, Channel, LocalPhase, Mixing
from hansa.training import augment, losses

ROOMS = (server, aggregate, compress, local, gossip, sample, data, augment, losses, presets)
TOP = (Algorithm, Channel, LocalPhase, Mixing)


class Expression(NamedTuple):
    """Python text, and the imports without which it means nothing."""

    text: str
    imports: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*self.imports, self.text])


class Writer:
    """Writes values as Python and remembers the imports they need."""

    def __init__(self) -> None:
        self.public: set[str] = set()
        self.modules: set[str] = set()

    @property
    def imports(self) -> tuple[str, ...]:
        """Import lines, those of Hansa first."""
        ours = [f"from hansa import {', '.join(sorted(self.public))}"] if self.public else []
        return (*ours, *(f"import {module}" for module in sorted(self.modules)))

    def value(self, value: Any) -> str:
        """A value as the call that makes it, arguments that are the defaults left out."""
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        if isinstance(value, tuple) and type(value) is tuple:
            return f"({', '.join(map(self.value, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.value, value))}]"
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{key!r}: {self.value(inner)}' for key, inner in value.items())}}}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self.call(type(value), self._told(value))
        return repr(value)

    def call(self, factory: Callable[..., Any], told: Mapping[str, Any]) -> str:
        """A call with arguments by name; those of ``*parts`` in their places."""
        starred = [name for name, parameter in inspect.signature(factory).parameters.items()
                   if parameter.kind is inspect.Parameter.VAR_POSITIONAL]  # fmt: skip
        places = [self.value(each) for name in starred for each in told.get(name, ())]
        named = self.words({name: value for name, value in told.items() if name not in starred})
        return f"{self.name(factory)}({', '.join([*places, *([named] if named else [])])})"

    def words(self, told: Mapping[str, Any]) -> str:
        """Arguments by name, as they stand in a call."""
        return ", ".join(f"{name}={self.value(value)}" for name, value in told.items())

    def name(self, factory: Callable[..., Any]) -> str:
        """What a class or function is called: ``compress.sign`` of Hansa's, ``module.attr`` of others."""
        if factory in TOP:
            self.public.add(factory.__name__)
            return factory.__name__
        for room in ROOMS:
            if getattr(room, factory.__name__, None) is factory:
                word = room.__name__.removeprefix("hansa.")
                self.public.add(word)
                return f"{word}.{factory.__name__}"
        self.modules.add(factory.__module__)
        return f"{factory.__module__}.{factory.__qualname__}"

    def _told(self, part: Any) -> dict[str, Any]:
        """The arguments of a dataclass that differ from the defaults."""
        told = {}
        known = inspect.signature(type(part)).parameters
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            if default is dataclasses.MISSING and field.name in known:
                default = known[field.name].default
            if type(value) is not type(default) or value != default:
                told[field.name] = value
        return told


def expression(value: Any) -> Expression:
    """A part, or a whole algorithm, as Python that makes an equal one.

    >>> from hansa import server
    >>> print(expression(server.chain(server.adam(), server.scale(0.1))))
    from hansa import server
    server.chain(server.adam(), server.scale(lr=0.1))
    """
    writer = Writer()
    text = writer.value(value)
    return Expression(text, writer.imports)
