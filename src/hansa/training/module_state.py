"""State of a module beside its parameters and the buffers that are sent; it is restored before each client.

This covers buffers that are not sent, and in user-defined modules the attributes that are numbers, strings, tensors, or
lists, dicts and sets of these. Attributes added later are removed. Generators are seeded from the client's key. Other
attributes cannot be restored: `warn_if_stateful` detects them.
"""

from __future__ import annotations

import copy
import logging
import numbers
import types
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.types import BUFFERS, MODEL, Vectors
from hansa.local.step import LocalStep
from hansa.local.trainer import take_steps
from hansa.local.work import Work
from hansa.training import random_state
from hansa.training.model_probe import bitwise_equal

if TYPE_CHECKING:
    from hansa.training.task import Task
    from hansa.training.trainer import ModuleTrainer

log = logging.getLogger("hansa")

_INTERNAL = frozenset(vars(nn.Module()))
_MAX_VALUES = 10_000  # a larger list or dict is not restored


class ModuleState:
    """A snapshot of a module's state, apart from its parameters and the buffers that are sent.

    Args:
        module: The module.
        sent: Names of the buffers that are sent.
        constant: Names of the buffers that are not sent because training did not change them.
        shared: Names of the buffers that trainers share. No copy of them is made, since nothing may write to them.
    """

    def __init__(
        self,
        module: nn.Module,
        sent: Collection[str],
        constant: Collection[str] = (),
        shared: Collection[str] = (),
    ) -> None:
        self._undo: list[Callable[[], None]] = []
        self._constant: dict[str, _TensorSnapshot] = {}
        self.generators: list[Any] = []
        self.unrestorable: list[str] = []
        for prefix, part in module.named_modules():
            for name, buffer in part._buffers.items():
                path = _path(prefix, name)
                if buffer is not None and path in shared:
                    self._undo.append(_ReferenceSnapshot(part._buffers, name, buffer))
                elif buffer is not None and path not in sent:
                    snapshot = _TensorSnapshot(part._buffers, name, buffer)
                    self._undo.append(snapshot)
                    if path in constant:
                        self._constant[path] = snapshot
            if not type(part).__module__.startswith("torch.nn."):
                self._snapshot_attributes(prefix, part)

    def _snapshot_attributes(self, prefix: str, part: nn.Module) -> None:
        attributes = vars(part)
        for name, value in _user_attributes(attributes):
            if isinstance(value, random_state.GENERATOR_TYPES):
                self.generators.append(value)
            elif isinstance(value, torch.Tensor):
                self._undo.append(_TensorSnapshot(attributes, name, value))
            elif isinstance(value, (list, dict, set)) and _is_copyable(value):
                self._undo.append(_ContainerSnapshot(attributes, name, value))
            else:
                self._undo.append(_ReferenceSnapshot(attributes, name, value))
                if not _is_immutable(value):
                    self.unrestorable.append(f"{_path(prefix, name)} ({type(value).__name__})")
        self._undo.append(_NamesSnapshot(attributes))

    def restore(self) -> None:
        """Restore the state of the snapshot."""
        for undo in self._undo:
            undo()

    def check_constant_buffers(self) -> None:
        """Raise if a buffer that the first batch did not change has changed, as the change would be lost."""
        for path, snapshot in self._constant.items():
            if snapshot.changed():
                raise HansaError(
                    f"buffer {path} was left unchanged by the first batch and changed by a later one, so it is not "
                    "averaged. Write to it in every training step, or register it with persistent=False if it belongs "
                    "to the client."
                )

    def seed(self, key: Key) -> None:
        """Seed the generators that are attributes of the module."""
        for position, generator in enumerate(self.generators):
            random_state.seed_generator(generator, key.child("own", position))


class _TensorSnapshot:
    """Restores a tensor that was replaced or written to."""

    def __init__(self, owner: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
        self.owner, self.name, self.tensor = owner, name, tensor
        self.saved, self.version = tensor.detach().clone(), tensor._version

    def changed(self) -> bool:
        current = self.owner[self.name]
        return (current is not self.tensor or current._version != self.version) and not bitwise_equal(
            current, self.saved
        )

    def __call__(self) -> None:
        if self.tensor._version != self.version:
            with torch.no_grad():
                self.tensor.copy_(self.saved)
            self.version = self.tensor._version
        self.owner[self.name] = self.tensor


class _ContainerSnapshot:
    """Restores a list, dict or set and its values."""

    def __init__(self, owner: dict[str, Any], name: str, value: Any) -> None:
        self.owner, self.name, self.value, self.saved = owner, name, value, copy.deepcopy(value)

    def __call__(self) -> None:
        values = copy.deepcopy(self.saved)
        self.value.clear()
        self.value.extend(values) if isinstance(self.value, list) else self.value.update(values)
        self.owner[self.name] = self.value


class _ReferenceSnapshot:
    """Restores the object that an attribute referred to."""

    def __init__(self, owner: dict[str, Any], name: str, value: Any) -> None:
        self.owner, self.name, self.value = owner, name, value

    def __call__(self) -> None:
        self.owner[self.name] = self.value


class _NamesSnapshot:
    """Removes attributes that were added later."""

    def __init__(self, owner: dict[str, Any]) -> None:
        self.owner, self.names = owner, frozenset(owner)

    def __call__(self) -> None:
        if len(self.owner) > len(self.names):
            for name in [name for name in self.owner if name not in self.names]:
                del self.owner[name]


def _user_attributes(attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in list(attributes.items()) if name not in _INTERNAL)


def _path(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _is_copyable(value: Any) -> bool:
    """Return whether a value consists of plain values and tensors only, and not of very many."""
    pending, count = [value], 0
    while pending and count < _MAX_VALUES:
        item = pending.pop()
        count += 1
        if isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, (list, set, tuple)):
            pending += item
        elif not _is_immutable(item) and not (isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter)):
            return False
    return not pending


def _is_immutable(value: Any) -> bool:
    """Return whether a value cannot change: a number, a string, a function, or a tuple of these."""
    if isinstance(value, tuple):
        return all(map(_is_immutable, value))
    plain = (numbers.Number, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice, type)
    return isinstance(value, plain) or value is Ellipsis or _is_stateless_function(value)


def _is_stateless_function(value: Any) -> bool:
    if isinstance(value, types.BuiltinFunctionType):
        return True
    return isinstance(value, types.FunctionType) and value.__closure__ is None


def warn_if_stateful(task: Task, used: ModuleTrainer, unused: ModuleTrainer) -> None:
    """Warn if a client's result depends on which clients were trained before it.

    Client B is trained after client A on one trainer, and alone on another, from the same vectors with the same key.
    Both results must have equal bits. Otherwise results depend on the number of workers and on resumes.
    """
    samples = task.population.samples
    first, second = 0, len(samples) - 1
    vectors = task.start(Key(0), used.dtype)
    try:
        with random_state.preserve_rng():
            _train_one_step(used, first, samples[first], vectors)
            after = _train_one_step(used, second, samples[second], vectors)
            alone = _train_one_step(unused, second, samples[second], vectors)
    except Exception as error:  # the first round reports it better
        log.debug("%s: not compared on two trainers: %s", task.name, error)
        return
    if all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(after, alone, strict=True)):
        return
    parameters = [(entry.name, entry.view(after[0]), entry.view(alone[0])) for entry in task.layout.parameters]
    different = [name for name, a, b in parameters if not torch.equal(a, b)]
    log.warning(
        "%s: a client's result depends on who trained before it (its %s differ): the model has state or draws that "
        "cannot be restored, perhaps in %s. Results will depend on the number of workers and on resumes. Keep such "
        "state in buffers, and draw from torch's, NumPy's or Python's generators.",
        task.name,
        ", ".join(different[:3]) + (", ..." if len(different) > 3 else "") if different else "losses or buffers",
        ", ".join(used.module_state.unrestorable[:5]) or "something outside the module",
    )


@torch.no_grad()
def _train_one_step(trainer: ModuleTrainer, client: int, samples: int, vectors: Vectors) -> tuple[torch.Tensor, ...]:
    x = vectors[MODEL]
    trainer.load(x, vectors.get(BUFFERS))
    losses = take_steps(trainer, client, Work(1, min(4, samples)), LocalStep(0.01, x), Key(0).child("purity", client))
    buffers = trainer.read_buffers()
    return (trainer.y.clone(), losses) if buffers is None else (trainer.y.clone(), losses, buffers.clone())
