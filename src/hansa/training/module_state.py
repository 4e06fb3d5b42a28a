"""What a module remembers beside its parameters and the buffers that travel: put back before each client's turn.

Buffers that do not travel, and of the modules that users write, attributes that are numbers, words, tensors, or lists,
dicts and sets of such. What was added since is removed. Generators are seeded from the client's key. What an attribute
of any other kind remembers cannot be put back: `hansa.training.statefulness_check` finds it.
"""

from __future__ import annotations

import copy
import numbers
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.training import random_state
from hansa.training.model_probe import same_bits

_INTERNAL = frozenset(vars(nn.Module()))
_MOST = 10_000  # values of a list or dict that is still put back


class Private:
    """The state of a module as it is now, apart from its parameters and the buffers named in ``travelling``.

    ``still`` names those that do not travel because training was seen to leave them alone.
    """

    def __init__(self, module: nn.Module, travelling: Collection[str], still: Collection[str] = ()) -> None:
        self._undo: list[Callable[[], None]] = []
        self._still: dict[str, _Tensor] = {}
        self.generators: list[Any] = []
        self.strange: list[str] = []
        for prefix, part in module.named_modules():
            for name, buffer in part._buffers.items():
                path = _path(prefix, name)
                if buffer is not None and path not in travelling:
                    saved = _Tensor(part._buffers, name, buffer)
                    self._undo.append(saved)
                    if path in still:
                        self._still[path] = saved
            if not type(part).__module__.startswith("torch.nn."):
                self._remember(prefix, part)

    def _remember(self, prefix: str, part: nn.Module) -> None:
        attributes = vars(part)
        for name, value in _attributes(attributes):
            if isinstance(value, random_state.KINDS):
                self.generators.append(value)
            elif isinstance(value, torch.Tensor):
                self._undo.append(_Tensor(attributes, name, value))
            elif isinstance(value, (list, dict, set)) and _copyable(value):
                self._undo.append(_Container(attributes, name, value))
            else:
                self._undo.append(_Reference(attributes, name, value))
                if not _fixed(value):
                    self.strange.append(f"{_path(prefix, name)} ({type(value).__name__})")
        self._undo.append(_Names(attributes))

    def restore(self) -> None:
        """Make the module remember what it did at first, and nothing else."""
        for undo in self._undo:
            undo()

    def refuse_change(self) -> None:
        """Refuse a buffer that was left alone at first and has changed: what it was to become would be lost."""
        for path, saved in self._still.items():
            if saved.changed():
                raise HansaError(
                    f"buffer {path} was left alone by the first batch and changed by a later one, so it is not "
                    "averaged. Write to it in every training step, or register it with persistent=False where it is a "
                    "client's own."
                )

    def seed(self, key: Key) -> None:
        """Seed the module's own generators."""
        for place, generator in enumerate(self.generators):
            random_state.seed_own(generator, key.child("own", place))


class _Tensor:
    """A tensor put back, where it was exchanged or written to."""

    def __init__(self, holder: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
        self.holder, self.name, self.tensor = holder, name, tensor
        self.saved, self.version = tensor.detach().clone(), tensor._version

    def changed(self) -> bool:
        """Whether it has other bits than at first."""
        now = self.holder[self.name]
        return (now is not self.tensor or now._version != self.version) and not same_bits(now, self.saved)

    def __call__(self) -> None:
        if self.tensor._version != self.version:
            with torch.no_grad():
                self.tensor.copy_(self.saved)
            self.version = self.tensor._version
        self.holder[self.name] = self.tensor


class _Container:
    """A list, dict or set with the values that it had."""

    def __init__(self, holder: dict[str, Any], name: str, value: Any) -> None:
        self.holder, self.name, self.value, self.saved = holder, name, value, copy.deepcopy(value)

    def __call__(self) -> None:
        again = copy.deepcopy(self.saved)
        self.value.clear()
        self.value.extend(again) if isinstance(self.value, list) else self.value.update(again)
        self.holder[self.name] = self.value


class _Reference:
    """The very thing that an attribute was."""

    def __init__(self, holder: dict[str, Any], name: str, value: Any) -> None:
        self.holder, self.name, self.value = holder, name, value

    def __call__(self) -> None:
        self.holder[self.name] = self.value


class _Names:
    """No attributes but those that there were."""

    def __init__(self, holder: dict[str, Any]) -> None:
        self.holder, self.names = holder, frozenset(holder)

    def __call__(self) -> None:
        if len(self.holder) > len(self.names):
            for name in [name for name in self.holder if name not in self.names]:
                del self.holder[name]


def _attributes(attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in list(attributes.items()) if name not in _INTERNAL)


def _path(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _copyable(value: Any) -> bool:
    """Whether a value is made of plain values and tensors alone, and not of very many."""
    waiting, seen = [value], 0
    while waiting and seen < _MOST:
        item = waiting.pop()
        seen += 1
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, set, tuple)):
            waiting += item
        elif not _fixed(item) and not (isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter)):
            return False
    return not waiting


def _fixed(value: Any) -> bool:
    """Whether a value cannot change: a number, a word, a function, or a tuple of such."""
    if isinstance(value, tuple):
        return all(map(_fixed, value))
    plain = (numbers.Number, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice, type)
    return isinstance(value, plain) or value is Ellipsis or _is_function(value)


def _is_function(value: Any) -> bool:
    if isinstance(value, types.BuiltinFunctionType):
        return True
    return isinstance(value, types.FunctionType) and value.__closure__ is None  # no variables that it could change
