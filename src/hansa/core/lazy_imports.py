"""Packages whose names are imported when they are first asked for, so that nobody waits for what is not used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TypeAlias

Getter: TypeAlias = Callable[[str], object]
Lister: TypeAlias = Callable[[], list[str]]


def lazy_attributes(
    package: str, homes: Mapping[str, str] | None = None, public: Sequence[str] = ()
) -> tuple[Getter, Lister]:
    """``__getattr__`` and ``__dir__`` of a package: its modules, and names from the modules in which they are at home.

    >>> __getattr__, __dir__ = lazy_attributes("hansa.runs.store", {"Damaged": "hansa.runs.store.io"})
    >>> __getattr__("Damaged").__module__, __getattr__("lock").__name__
    ('hansa.runs.store.io', 'hansa.runs.store.lock')
    """
    known = dict(homes or {})

    def get(name: str) -> object:
        if name in known:
            home = import_module(known[name])
            if not hasattr(home, name) and hasattr(home, "__path__"):
                import_module(f"{known[name]}.{name}")
            found = getattr(home, name)
            setattr(sys.modules[package], name, found)
            return found
        inside = f"{package}.{name}"
        if not name.startswith("_") and find_spec(inside) is not None:
            return import_module(inside)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted({*vars(sys.modules[package]), *known, *public})
