"""An empty torchvision for FedLab and fluke, which import it for data sets and models that are not used here.

A real one is tied to one build of torch, and these contenders shall run on the same build as all others.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Empty(ModuleType):
    """Whatever is asked of it is an empty class of that name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for _name in ("", ".datasets", ".datasets.utils", ".models", ".transforms"):
    _module = _Empty(f"torchvision{_name}")
    _module.__spec__ = ModuleSpec(_module.__name__, None, is_package=True)
    _module.__path__ = []
    sys.modules[_module.__name__] = _module
    _parent, _, _child = _module.__name__.rpartition(".")
    if _parent:
        setattr(sys.modules[_parent], _child, _module)
