"""Lazy imports of the public names of packages, to keep start-up fast.

The names are declared once, as imports under ``if TYPE_CHECKING:`` in the ``__init__`` of the package, where type
checkers and `lazy_exports` read them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TypeAlias

Getter: TypeAlias = Callable[[str], object]
Lister: TypeAlias = Callable[[], list[str]]
_BLOCK = re.compile(r"^if TYPE_CHECKING:.*\n((?:(?:[ \t].*)?\n)*)", re.MULTILINE)
_IMPORT = re.compile(r"^ +from ([\w.]+) import (?:\(([^)]*)\)|([^(\n]*))", re.MULTILINE)


@cache
def exports(package: str) -> dict[str, str]:
    """Return the module of each public name that a package imports on first use.

    >>> exports("hansa.study")["run"]
    'hansa.study.api'
    """
    spec = sys.modules[package].__spec__
    source = spec.loader.get_source(package) if spec is not None else ""  # type: ignore[union-attr]
    block = _BLOCK.search(source or "")
    return {
        name.split(" as ")[0].strip(): module
        for module, in_parentheses, on_the_line in _IMPORT.findall(block[1] if block is not None else "")
        for name in (in_parentheses or on_the_line).split(",")
        if name.strip()
    }


def lazy_exports(package: str) -> tuple[Getter, Lister]:
    """Return ``__getattr__`` and ``__dir__`` of a package, from its imports for type checkers.

    Its modules are attributes as well, imported on first use.

    >>> __getattr__, __dir__ = lazy_exports("hansa.study")
    >>> __getattr__("run").__module__, __getattr__("recipes").__name__
    ('hansa.study.api', 'hansa.study.recipes')
    """
    modules = exports(package)

    def get(name: str) -> object:
        module_name = modules.get(name, package)
        if module_name != package:
            module = import_module(module_name)
            if not hasattr(module, name) and hasattr(module, "__path__"):
                import_module(f"{module_name}.{name}")
            value = getattr(module, name)
            setattr(sys.modules[package], name, value)
            return value
        submodule = f"{package}.{name}"
        if not name.startswith("_") and find_spec(submodule) is not None:
            return import_module(submodule)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted({*vars(sys.modules[package]), *modules})
