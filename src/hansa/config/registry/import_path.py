"""The user's own code, named in a file or on the command line as MODULE:NAME.

Importing a module runs it, so nothing is imported by default: what looks at files and run folders never runs code that
they name. Only what needs the code, such as a run, enters `allow_code`. Even then only components are used: see
`import_object`.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import isclass, isfunction
from typing import TYPE_CHECKING, Any, NamedTuple

from hansa.core.errors import HansaError, suggestion
from hansa.core.protocols import is_declared

if TYPE_CHECKING:
    from hansa.config.registry.components import Kind

NOT_LOADED = "own component, not loaded"


class CodeNotLoadedError(HansaError):
    """A file names code, and it was read without permission to import any."""


class _Permission(NamedTuple):
    code: bool = False
    trust: bool = False


_NONE = _Permission()
_PERMISSION: ContextVar[_Permission] = ContextVar("hansa_code", default=_NONE)


@contextmanager
def allow_code(*, trust: bool = False) -> Iterator[None]:
    """Within this context, code that configurations name is imported.

    Args:
        trust: Also import what a run folder names that is not on the list of this user's runs.

    >>> with allow_code():
    ...     may_import()
    True
    """
    token = _PERMISSION.set(_Permission(True, trust or _PERMISSION.get().trust))
    try:
        yield
    finally:
        _PERMISSION.reset(token)


@contextmanager
def only_look() -> Iterator[None]:
    """Within this context, no code is imported, even inside `allow_code`."""
    token = _PERMISSION.set(_NONE)
    try:
        yield
    finally:
        _PERMISSION.reset(token)


def may_import() -> bool:
    """Return whether code may be imported here."""
    return _PERMISSION.get().code


def is_trusted() -> bool:
    """Return whether code that foreign run folders name may be imported here."""
    return _PERMISSION.get().trust


def is_import_path(value: object) -> bool:
    """Return whether a value is MODULE:NAME.

    >>> is_import_path("mine:lion"), is_import_path("fedavg")
    (True, False)
    """
    return isinstance(value, str) and ":" in value


def named_code(value: Any) -> list[str]:
    """Return the import paths in a component, or in plain data of components.

    >>> named_code({"optimizer": ["adam", {"kind": "mine:lion"}], "loss": "mine:hinge"})
    ['mine:lion', 'mine:hinge']
    """
    if isinstance(value, Mapping):
        return [path for inner in value.values() for path in named_code(inner)]
    if isinstance(value, (list, tuple)):
        return [path for inner in value for path in named_code(inner)]
    return [value] if isinstance(value, str) and _IMPORT_PATH.fullmatch(value) else []


_IMPORT_PATH = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)")


def import_object(path: str, kind: Kind | None = None) -> Any:
    """Import the component that MODULE:NAME names; NAME may have dots.

    It must be defined in that module and be a component: a class with the base class or the methods of a component, an
    ``nn.Module``, a function declared with `hansa.component`, or a finished component. Modules of Python's standard
    library are refused.

    Args:
        path: The import path.
        kind: The kind of component that is expected, for error messages.

    >>> with allow_code():
    ...     import_object("os:system")
    Traceback (most recent call last):
    hansa.core.errors.HansaError: 'os:system': os is a module of Python itself, which has no components. Name your own.
    >>> import_object("mine:lion")
    Traceback (most recent call last):
    hansa.config.registry.import_path.CodeNotLoadedError: 'mine:lion': own component, not loaded. ...
    """
    match = _IMPORT_PATH.fullmatch(path)
    if match is None:
        raise HansaError(f"{path!r}: expected MODULE:NAME, such as mine:make.")
    module_name, name = match.groups()
    if module_name.partition(".")[0] in sys.stdlib_module_names or module_name.endswith(".__main__"):
        raise HansaError(
            f"{path!r}: {module_name} is a module of Python itself, which has no components. Name your own."
        )
    if not may_import():
        raise CodeNotLoadedError(
            f"{path!r}: {NOT_LOADED}. Reading does not run code; in Python: with hansa.config.allow_code()."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code
        raise HansaError(f"{path!r}: the module cannot be imported ({type(error).__name__}: {error}).") from error
    for part in name.split("."):
        if not hasattr(target, part):
            known = [attribute for attribute in dir(target) if not attribute.startswith("_")]
            where = getattr(target, "__name__", module_name)
            raise HansaError(f"{path!r}: {where} has no {part!r}. {suggestion(part, known)}")
        target = getattr(target, part)
    if reason := _refusal(target, module_name, kind):
        raise HansaError(f"{path!r}: {reason}")
    return target


def _refusal(target: Any, module: str, expected: Kind | None) -> str:
    """Return why an imported object is not a component of its module, with the remedy; "" if it is one."""
    from hansa.config.registry.components import KINDS

    if isclass(target):
        if target.__module__ != module:
            return f"is defined in {target.__module__}, not in {module}. Name it there."
        torch_module = any(base.__name__ == "Module" and base.__module__.startswith("torch.nn.")
                           for base in target.__mro__)  # fmt: skip
        if torch_module or is_declared(target) or any(kind.is_component_class(target) for kind in KINDS.values()):
            return ""
        why = (
            "it has no component's methods" if expected is None else f"no {expected.title}: {expected.mismatch(target)}"
        )
        return f"is a class, but not a component ({why}). Correct it, or write @hansa.component above it."
    if isfunction(target) or isfunction(getattr(target, "__wrapped__", None)):  # such as a metric of hansa.lower
        if target.__module__ != module:
            return f"is defined in {target.__module__}, not in {module}. Name it there."
        return "" if is_declared(target) else "is a function, but not declared. Write @hansa.component above it."
    defined = getattr(type(target), "__module__", "")
    finished = defined == module or defined.startswith("hansa.")
    if finished and any(not kind.mismatch(target) for kind in KINDS.values()):
        return ""
    shown = f"{target!r:.60}"
    return f"expected a component: a class, a function with @hansa.component, or a finished component, found {shown}."
