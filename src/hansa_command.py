"""What the command ``hansa`` starts. It stands outside the package, so that Ctrl-C is quiet from the first moment on,
and puts off what takes long to import and is seldom needed: torch takes seconds, and most commands end without it."""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec, module_from_spec
from threading import RLock, current_thread, main_thread
from types import ModuleType

DEFERRED = ("torch", "numpy", "scipy", "networkx")


class Deferred(ModuleType):
    """Stands in ``sys.modules`` for a module; its code runs, and it becomes that module, when something in it is first
    asked for. Ctrl-C meanwhile ends the process without a word."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name not in ("__path__", "__version__", "__all__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")  # looking around is no use
        with _lock:
            if type(self) is Deferred and self.__name__ not in _loading:
                _load(self)
        return ModuleType.__getattribute__(self, name)


_lock, _loading = RLock(), set[str]()


def defer(name: str) -> None:
    """Put a stand-in in the place of a module that has not been imported."""
    spec = None if name in sys.modules else find_spec(name)
    if spec is None or spec.loader is None:
        return
    made = module_from_spec(spec)
    if type(made) is ModuleType:
        made.__class__ = Deferred
        vars(made).pop("__path__", None)  # so that the modules inside it ask for it as well
        sys.modules[name] = made


def main() -> None:
    """Import the command line, and run it."""
    before = signal.signal(signal.SIGINT, _leave)
    for name in DEFERRED:
        defer(name)
    from hansa.cli import main as run
    from hansa.cli.app import app  # noqa: F401  (the rest that takes long)

    try:  # what a command does is guarded by itself; this is for the moments before and after
        signal.signal(signal.SIGINT, before)
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
    before = signal.signal(signal.SIGINT, _leave) if current_thread() is main_thread() else None
    try:
        spec.loader.exec_module(module)
        module.__class__ = ModuleType
    finally:
        _loading.discard(spec.name)
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _leave(number: int, frame: object) -> None:
    os._exit(130)
