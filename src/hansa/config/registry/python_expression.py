"""Components as Python source: an expression, and the imports that it needs."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hansa import aggregate, compress, data, gossip, local, pace, presets, sample, server
from hansa.algorithm import Algorithm, Channel, LocalPhase, Mixing
from hansa.training import augment, losses

PACKAGES = (server, aggregate, compress, local, gossip, sample, pace, data, augment, losses, presets)
TOP_LEVEL = (Algorithm, Channel, LocalPhase, Mixing)


class PythonExpression(NamedTuple):
    """Python source and the imports that it needs."""

    text: str
    imports: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*self.imports, self.text])


class PythonWriter:
    """Writes values as Python source and collects the imports they need."""

    def __init__(self) -> None:
        self.public: set[str] = set()
        self.modules: set[str] = set()

    @property
    def imports(self) -> tuple[str, ...]:
        """The import lines, those of Hansa first."""
        ours = [f"from hansa import {', '.join(sorted(self.public))}"] if self.public else []
        return (*ours, *(f"import {module}" for module in sorted(self.modules)))

    def write_value(self, value: Any) -> str:
        """Return a value as the call that makes it, without arguments that equal their defaults."""
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        if isinstance(value, tuple) and type(value) is tuple:
            return f"({', '.join(map(self.write_value, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.write_value, value))}]"
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{key!r}: {self.write_value(inner)}' for key, inner in value.items())}}}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self.write_call(type(value), self._changed_fields(value))
        return repr(value)

    def write_call(self, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
        """Return a call with keyword arguments; those of a ``*name`` parameter are positional."""
        starred = [name for name, parameter in inspect.signature(factory).parameters.items()
                   if parameter.kind is inspect.Parameter.VAR_POSITIONAL]  # fmt: skip
        positional = [self.write_value(each) for name in starred for each in arguments.get(name, ())]
        named = self.write_arguments({name: value for name, value in arguments.items() if name not in starred})
        return f"{self.write_name(factory)}({', '.join([*positional, *([named] if named else [])])})"

    def write_arguments(self, arguments: Mapping[str, Any]) -> str:
        """Return keyword arguments as written in a call."""
        return ", ".join(f"{name}={self.write_value(value)}" for name, value in arguments.items())

    def write_name(self, factory: Callable[..., Any]) -> str:
        """Return the name of a class or function: ``compress.sign`` in Hansa, else ``module.attr``."""
        if factory in TOP_LEVEL:
            self.public.add(factory.__name__)
            return factory.__name__
        for package in PACKAGES:
            if getattr(package, factory.__name__, None) is factory:
                name = package.__name__.rpartition(".")[2]  # hansa.training.losses is hansa.losses
                self.public.add(name)
                return f"{name}.{factory.__name__}"
        self.modules.add(factory.__module__)
        return f"{factory.__module__}.{factory.__qualname__}"

    def _changed_fields(self, component: Any) -> dict[str, Any]:
        """Return the fields of a dataclass that differ from their defaults."""
        changed = {}
        parameters = inspect.signature(type(component)).parameters
        for field in dataclasses.fields(component):
            value = getattr(component, field.name)
            default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            if default is dataclasses.MISSING and field.name in parameters:
                default = parameters[field.name].default
            if type(value) is not type(default) or value != default:
                changed[field.name] = value
        return changed


def to_python(value: Any) -> PythonExpression:
    """Return a component or an algorithm as Python that makes an equal one.

    >>> from hansa import server
    >>> print(to_python(server.chain(server.adam(), server.scale(0.1))))
    from hansa import server
    server.chain(server.adam(), server.scale(lr=0.1))
    """
    writer = PythonWriter()
    text = writer.write_value(value)
    return PythonExpression(text, writer.imports)
