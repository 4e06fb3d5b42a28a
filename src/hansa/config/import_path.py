"""Components outside this package: user code, named in a file or on the command line as MODULE:NAME, and plug-ins.

Importing a module runs it, so nothing is imported by default: reading files and run folders never runs code that they
name. Only commands that need the code, such as a run, enter `allow_code`. Even then only components are used: see
`import_object`.

Installed packages declare components in pyproject.toml as entry points KIND.NAME of the group ``hansa.parts``::

    [project.entry-points."hansa.parts"]
    "compressor.ternary" = "hansa_ternary:ternary"

Only names are read until a component is used. A broken package causes a warning and does not affect others.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import isclass, isfunction
from typing import TYPE_CHECKING, Any

from hansa.core.errors import HansaError, suggestion
from hansa.core.protocols import is_declared

if TYPE_CHECKING:
    from hansa.config.components import Kind

NOT_LOADED = "own component, not loaded"
GROUP = "hansa.parts"
log = logging.getLogger("hansa")

_ALLOWED: ContextVar[frozenset[str]] = ContextVar("hansa_code", default=frozenset())
"""The subset of "code" and "trust" that is allowed in this context."""
_IMPORT_PATH = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)")


@contextmanager
def allow_code(*, trust: bool = False) -> Iterator[None]:
    """Within this context, code that configurations name is imported.

    Args:
        trust: Also import code named by run folders that are not on the list of this user's runs.

    >>> with allow_code():
    ...     may_import()
    True
    """
    token = _ALLOWED.set(_ALLOWED.get() | ({"code", "trust"} if trust else {"code"}))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


@contextmanager
def only_look() -> Iterator[None]:
    """Within this context, no code is imported, even inside `allow_code`."""
    token = _ALLOWED.set(frozenset())
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def may_import() -> bool:
    """Return whether code may be imported in this context."""
    return "code" in _ALLOWED.get()


def is_trusted() -> bool:
    """Return whether code named by foreign run folders may be imported in this context."""
    return "trust" in _ALLOWED.get()


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
    if isinstance(value, (Mapping, list, tuple)):
        children = value.values() if isinstance(value, Mapping) else value
        return [path for child in children for path in named_code(child)]
    return [value] if isinstance(value, str) and _IMPORT_PATH.fullmatch(value) else []


def import_object(path: str, kind: Kind | None = None) -> Any:
    """Import the component MODULE:NAME; NAME may have dots.

    It must be defined in that module and be a component: a class with the base class or the methods of a component, an
    ``nn.Module``, a function declared with `hansa.component`, or a finished component. Modules of Python's standard
    library are refused.

    Args:
        path: The import path.
        kind: The expected kind of component, for error messages.

    >>> with allow_code():
    ...     import_object("os:system")
    Traceback (most recent call last):
    hansa.core.errors.HansaError: 'os:system': os is a module of Python itself, which has no components. Name your own.
    >>> import_object("mine:lion")
    Traceback (most recent call last):
    hansa.core.errors.HansaError: 'mine:lion': own component, not loaded. ...
    """
    match = _IMPORT_PATH.fullmatch(path)
    if match is None:
        raise HansaError(f"{path!r}: expected MODULE:NAME, such as mine:make.")
    module, name = match.groups()
    if module.partition(".")[0] in sys.stdlib_module_names or module.endswith(".__main__"):
        raise HansaError(f"{path!r}: {module} is a module of Python itself, which has no components. Name your own.")
    if not may_import():
        remedy = "Reading does not run code; in Python: with hansa.config.allow_code()."
        raise HansaError(f"{path!r}: {NOT_LOADED}. {remedy}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module)
    except Exception as error:  # importing runs the user's code
        raise HansaError(f"{path!r}: the module cannot be imported ({type(error).__name__}: {error}).") from error
    for part in name.split("."):
        if not hasattr(target, part):
            attributes = [attribute for attribute in dir(target) if not attribute.startswith("_")]
            owner = getattr(target, "__name__", module)
            raise HansaError(f"{path!r}: {owner} has no {part!r}. {suggestion(part, attributes)}")
        target = getattr(target, part)
    if reason := _refusal(target, module, kind):
        raise HansaError(f"{path!r}: {reason}")
    return target


def _refusal(target: Any, module: str, expected: Kind | None) -> str:
    """Return why an imported object is no component of its module, with the remedy; "" if it is one."""
    from hansa.config.components import KINDS

    function = isfunction(target) or isfunction(getattr(target, "__wrapped__", None))  # such as a metric of hansa.lower
    if (isclass(target) or function) and target.__module__ != module:
        return f"is defined in {target.__module__}, not in {module}. Name it there."
    if function:
        return "" if is_declared(target) else "is a function, but not declared. Write @hansa.component above it."
    if isclass(target):
        of_torch = any(base.__name__ == "Module" and base.__module__.startswith("torch.nn.") for base in target.__mro__)
        kinds = (kind for kind in KINDS.values() if kind.protocol in target.__mro__ or kind.is_factory(target))
        if of_torch or is_declared(target) or next(kinds, None) is not None:
            return ""
        mismatch = f"no {expected.title}: {expected.mismatch(target)}" if expected else "it has no component's methods"
        return f"is a class, but not a component ({mismatch}). Correct it, or write @hansa.component above it."
    defined = getattr(type(target), "__module__", "")
    own_instance = defined == module or defined.startswith("hansa.")
    if own_instance and any(not kind.mismatch(target) for kind in KINDS.values()):
        return ""
    expectation = "a class, a function with @hansa.component, or a finished component"
    return f"expected a component: {expectation}, found {target!r:.60}."


@dataclass(frozen=True, slots=True)
class Plugin:
    """A component of an installed package, not imported yet."""

    kind: str
    name: str
    package: str
    entry: EntryPoint

    def load(self) -> Any:
        """Import the class or function; this runs the package's code."""
        try:
            return self.entry.load()
        except (Exception, SystemExit) as error:  # importing runs foreign code
            problem = f"cannot be loaded ({type(error).__name__}: {error})"
            raise HansaError(f"{self}: {problem}. Fix or uninstall that package.") from error

    def __str__(self) -> str:
        return f"{self.kind}.{self.name} of the package {self.package}"


@cache
def installed_plugins() -> tuple[Plugin, ...]:
    """Return all plug-ins, sorted by kind, name and package."""
    plugins = []
    for entry in entry_points(group=GROUP):
        kind, _, name = entry.name.partition(".")
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
        plugins.append(Plugin(kind, normalize_name(name), package, entry))
    return tuple(sorted(plugins, key=lambda plugin: (plugin.kind, plugin.name, plugin.package)))


def normalize_name(name: str) -> str:
    """Return the lookup form of a name: without capitals, dashes, spaces and the plus of FedMGDA+.

    >>> normalize_name("Erdos-Renyi"), normalize_name("FedMGDA+")
    ('erdos_renyi', 'fedmgda')
    """
    return name.strip().lower().replace("+", "").replace("-", "_").replace(" ", "_")


@cache
def warn_once(message: str) -> None:
    """Warn about an installed package, once per process."""
    log.warning("plug-in %s", message)
