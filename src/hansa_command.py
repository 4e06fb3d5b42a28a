"""The entry point of the command ``hansa``.

It is outside the package, so that Ctrl-C is quiet from the start. It defers imports that are slow and that most
commands do not need: importing torch takes seconds.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec, module_from_spec
from threading import RLock, current_thread, main_thread
from types import ModuleType

DEFERRED = ("torch", "numpy", "scipy", "networkx")


class LazyModule(ModuleType):
    """A placeholder in ``sys.modules`` that loads the module when an attribute is first used.

    Ctrl-C during the import ends the process silently.
    """

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name not in ("__path__", "__version__", "__all__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")  # introspection does not load
        with _lock:
            if type(self) is LazyModule and self.__name__ not in _loading:
                _load(self)
        return ModuleType.__getattribute__(self, name)


_lock, _loading = RLock(), set[str]()


def defer_import(name: str) -> None:
    """Put a placeholder in the place of a module that has not been imported."""
    spec = None if name in sys.modules else find_spec(name)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    if type(module) is ModuleType:
        module.__class__ = LazyModule
        vars(module).pop("__path__", None)  # importing a submodule then loads it
        sys.modules[name] = module


def main() -> None:
    """Import the command line and run it."""
    previous = signal.signal(signal.SIGINT, _exit)
    for name in DEFERRED:
        defer_import(name)
    from hansa.cli import main as run
    from hansa.cli.app import app  # noqa: F401  (the slow part of the import)

    try:  # commands handle Ctrl-C themselves; this covers the moments before and after
        signal.signal(signal.SIGINT, previous)
        run()
    except KeyboardInterrupt:
        sys.exit(130)


def _load(module: ModuleType) -> None:
    spec = module.__spec__
    assert spec is not None
    assert spec.loader is not None
    if spec.submodule_search_locations is not None:
        module.__path__ = spec.submodule_search_locations
    _loading.add(spec.name)
    previous = signal.signal(signal.SIGINT, _exit) if current_thread() is main_thread() else None
    try:
        spec.loader.exec_module(module)
        module.__class__ = ModuleType
    finally:
        _loading.discard(spec.name)
        if previous is not None:
            signal.signal(signal.SIGINT, previous)


def _exit(number: int, frame: object) -> None:
    os._exit(130)
