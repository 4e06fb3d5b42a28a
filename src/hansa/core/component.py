"""The decorator that declares a user-defined function as a component for configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

DECLARED = "__hansa_component__"
"""The attribute that `component` sets."""

F = TypeVar("F", bound=Callable[..., Any])


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
