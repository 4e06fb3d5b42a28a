"""Snapshots of Python objects: what is reachable from them, to be compared and restored.

A snapshot follows attributes, dicts, lists, sets and tuples. It keeps their contents, and copies of tensors and arrays.
Modules, hooks, caches and plain user objects are restored in place. Objects of the standard library and closures are
not entered: `ObjectState.unrestorable` names them.
"""

from __future__ import annotations

import numbers
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

GENERATOR_TYPES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Generators that may be attributes of a model; they are seeded, not restored."""
_MAX_OBJECTS = 100_000
_MODE = "training"  # of a module: evaluation sets it
_IMMUTABLE = (
    numbers.Number, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
    np.dtype, np.generic, range, slice, type, frozenset, types.BuiltinFunctionType, types.ModuleType,
    types.EllipsisType, property, weakref.ref,
)  # fmt: skip


def bitwise_equal(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    """Return whether two tensors have equal bits: equal NaNs are equal, -0 and 0 are not."""
    if b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(_as_bytes(a), _as_bytes(b)))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.detach()


class ObjectState:
    """A snapshot of what is reachable from an object.

    Args:
        root: The object, such as a module.
        skip: Ids of tensors to leave out: parameters, and buffers that are sent.

    >>> class Cache:
    ...     def __init__(self): self.seen = {"a": [1]}
    >>> cache = Cache()
    >>> state = ObjectState(cache)
    >>> cache.seen["a"].append(2); cache.late = 3
    >>> list(state.changes())
    ['late', 'seen.a']
    >>> state.restore(); vars(cache)
    {'seen': {'a': [1]}}
    """

    def __init__(self, root: Any, skip: Iterable[int] = ()) -> None:
        self._containers: list[tuple[str, Any, Any]] = []
        self._tensors: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._arrays: list[tuple[str, Any, Any]] = []
        self.generators: list[Any] = []
        self.unrestorable: list[str] = []
        skipped, visited = frozenset(skip), {id(None)}
        pending: deque[tuple[str, Any]] = deque([("", root)])
        while pending:
            path, value = pending.popleft()
            if id(value) in visited or isinstance(value, _IMMUTABLE):
                continue
            visited.add(id(value))
            if len(visited) > _MAX_OBJECTS:
                self.unrestorable.append("more than 100,000 objects")
                break
            if isinstance(value, GENERATOR_TYPES):
                self.generators.append(value)
            elif isinstance(value, torch.Tensor):
                if id(value) not in skipped:
                    self._tensors.append((path, value, value.detach().clone()))
            elif isinstance(value, np.ndarray):
                self._arrays.append((path, value, value.copy()))
            else:
                pending.extend(self._enter(path, value))

    def _enter(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Keep the contents of a container or an object, and yield them with their paths."""
        if isinstance(value, dict):
            self._containers.append((path, value, dict(value)))
            yield from ((_join(path, str(name)), item) for name, item in value.items())
        elif isinstance(value, (list, deque, set)):
            self._containers.append((path, value, list(value)))
            yield from ((path, item) for item in value)
        elif isinstance(value, tuple):
            yield from ((path, item) for item in value)
        elif isinstance(value, types.FunctionType):
            if value.__closure__ is not None:
                self.unrestorable.append(f"{path} ({value.__name__})")
        elif isinstance(value, types.MethodType):
            yield path, value.__self__
        elif type(value).__module__.partition(".")[0] not in sys.stdlib_module_names and hasattr(value, "__dict__"):
            attributes = vars(value)
            self._containers.append((path, attributes, dict(attributes)))
            names = [name for name in attributes if name not in ("_parameters", "_buffers", "_modules")]
            yield from (
                (path, attributes[name]) for name in ("_parameters", "_buffers", "_modules") if name in attributes
            )
            yield from ((_join(path, name), attributes[name]) for name in names)
        else:
            self.unrestorable.append(f"{path} ({type(value).__name__})")

    def changes(self) -> Iterator[str]:
        """Yield the paths of what has changed."""
        for path, value, saved in self._containers:
            if _contents_changed(value, saved):
                names = [*saved, *(key for key in value if key not in saved)] if isinstance(value, dict) else []
                changed = [
                    name for name in names if name != _MODE and value.get(name, names) is not saved.get(name, names)
                ]
                yield _join(path, str(changed[0])) if changed else path
        yield from (path for path, tensor, saved in self._tensors if not bitwise_equal(tensor, saved))
        yield from (path for path, array, saved in self._arrays if array.tobytes() != saved.tobytes())

    def restore(self) -> None:
        """Restore everything in place."""
        for _, value, saved in self._containers:
            if not _contents_changed(value, saved):
                continue
            if isinstance(value, dict) and _MODE in value:
                saved = {**saved, _MODE: value[_MODE]}
            value.clear()
            add: Callable[[Any], None] = value.extend if isinstance(value, (list, deque)) else value.update
            add(saved)
        with torch.no_grad():
            for _, tensor, saved_tensor in self._tensors:
                if not tensor.is_cpu or not bitwise_equal(tensor, saved_tensor):  # no wait for a device
                    tensor.copy_(saved_tensor)
        for _, array, saved in self._arrays:
            array[...] = saved


def _contents_changed(value: Any, saved: Any) -> bool:
    """Return whether a container holds other objects than before."""
    if len(value) != len(saved):
        return True
    if isinstance(value, dict):
        missing: Any = object()
        return any(value.get(name, missing) is not item and name != _MODE for name, item in saved.items())
    if isinstance(value, set):
        return value != set(saved)
    return any(a is not b for a, b in zip(value, saved, strict=True))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
