"""What a module has beside the vectors that are sent: state that belongs to it, and weights that trainers share.

Before each client a module is as after construction, with the parameters and buffers that the client received: other
buffers, attributes, containers, plain objects and hooks are put back in place (`ModuleState`), and generators are
seeded from the client's key. A module whose results still depend on who trained before is refused (`check_repeatable`).

Frozen weights are parameters with ``requires_grad=False`` and buffers that training does not change. They keep their
dtype if that is narrow, and the trainers of a process and device share one copy: a base model in bfloat16 with a
trained float32 part (LoRA, a new head) so takes the memory that it takes in PyTorch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.object_state import GENERATOR_TYPES, ObjectState, bitwise_equal
from hansa.core.types import BUFFERS, MODEL, Vectors
from hansa.core.vectors.layout import Layout, convert_module
from hansa.local.step import LocalStep
from hansa.local.trainer import take_steps
from hansa.local.work import Work
from hansa.training import random_state
from hansa.training.batch_sources import Batch, convert_batch
from hansa.training.losses import LossFunction
from hansa.training.mixed_precision import autocast_caller
from hansa.training.model_probe import model_caller

if TYPE_CHECKING:
    from hansa.training.task import Task
    from hansa.training.trainer import ModuleTrainer

log = logging.getLogger("hansa")

SHARED_BYTES = 1 << 16
"""Constant buffers of at least this size are shared; smaller ones are copied for each trainer."""
_MOST_COUNTED = 1 << 24  # the largest whole numbers that float32 has without gaps

_trainers: WeakKeyDictionary[Any, dict[Any, ref[ModuleTrainer]]] = WeakKeyDictionary()


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
        buffers = dict(module.named_buffers())
        others = [buffer for name, buffer in buffers.items() if name in {*sent, *shared}]
        self._state = ObjectState(module, map(id, [*module.parameters(), *others]))
        self._module = module
        self._constant = {name: buffers[name].detach().clone() for name in constant if name in buffers}
        self._constant = {name: saved for name, saved in self._constant.items() if name not in shared}
        attributes = [value for part in module.modules() for value in vars(part).values()]
        own = [value for value in attributes if isinstance(value, GENERATOR_TYPES)]
        known = set(map(id, own))
        self.generators = [*own, *(value for value in self._state.generators if id(value) not in known)]
        self.unrestorable = self._state.unrestorable

    def restore(self) -> None:
        """Put back the state of the snapshot."""
        self._state.restore()

    def check_constant_buffers(self) -> None:
        """Raise if a buffer that the first batch did not change has changed, as the change would be lost."""
        if not self._constant:
            return
        buffers = dict(self._module.named_buffers())
        for name, saved in self._constant.items():
            if not bitwise_equal(saved, buffers.get(name)):
                raise HansaError(
                    f"buffer {name} was left unchanged by the first batch and changed by a later one, so it is not "
                    "averaged. Write to it in every training step, or register it with persistent=False if it belongs "
                    "to the client."
                )

    def seed(self, key: Key) -> None:
        """Seed the generators that belong to the module."""
        for position, generator in enumerate(self.generators):
            random_state.seed_generator(generator, key.child("own", position))


def check_repeatable(task: Task, used: ModuleTrainer, unused: ModuleTrainer) -> None:
    """Raise if a client's result depends on which clients were trained before it.

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
    shown = ", ".join(different[:3]) + (", ..." if len(different) > 3 else "") if different else "losses or buffers"
    places = ", ".join(used.module_state.unrestorable[:5]) or "a global object"
    raise HansaError(
        f"{task.name}: a client's result depends on who trained before it (its {shown} differ): the model has state or "
        f"draws that cannot be restored, perhaps in {places}. Results would depend on the number of workers and on "
        "resumes. Keep such state in buffers or attributes of the module, and draw from torch's, NumPy's or Python's "
        "generators."
    )


@torch.no_grad()
def _train_one_step(trainer: ModuleTrainer, client: int, samples: int, vectors: Vectors) -> tuple[torch.Tensor, ...]:
    x = vectors[MODEL]
    trainer.load(x, vectors.get(BUFFERS))
    losses = take_steps(trainer, client, Work(1, min(4, samples)), LocalStep(0.01, x), Key(0).child("purity", client))
    buffers = trainer.read_buffers()
    return (trainer.y.clone(), losses) if buffers is None else (trainer.y.clone(), losses, buffers.clone())


def find_counters(module: nn.Module, changed: Collection[str], after: dict[str, torch.Tensor]) -> set[str]:
    """Return the integer and boolean buffers that are sent: those that a training step raises, such as a counter, or a
    flag that the first batch sets. Their average is rounded to the nearest whole number.

    Not sent is what has no effect, BatchNorm's count of batches unless its momentum is None, and what float32 does not
    hold, numbers from 2^24. All other whole buffers keep their initial value.

    Args:
        module: The module before the step.
        changed: The buffers that the step changed.
        after: The buffers after the step.
    """
    unused = {
        f"{prefix}.num_batches_tracked".lstrip(".")
        for prefix, part in module.named_modules()
        if isinstance(part, _NormBase) and part.momentum is not None
    }
    persistent = set(module.state_dict(keep_vars=True))
    found = set()
    for name, buffer in module.named_buffers():
        whole = not buffer.is_floating_point() and not buffer.is_complex()
        if not whole or name not in persistent or name not in changed or name in unused:
            continue
        end = after[name].to(torch.int64)
        if end.shape == buffer.shape and int(end.abs().max()) < _MOST_COUNTED and bool((end >= buffer).all()):
            found.add(name)
    return found


def narrow_weights(module: nn.Module) -> dict[str, torch.dtype]:
    """Return the names and dtypes of frozen parameters and buffers with fewer bits than float32.

    >>> layer = nn.Linear(2, 1).requires_grad_(False).to(torch.bfloat16)
    >>> narrow_weights(layer)
    {'weight': torch.bfloat16, 'bias': torch.bfloat16}
    """
    frozen = {name: each for name, each in module.named_parameters() if not each.requires_grad}
    tensors = {**frozen, **dict(module.named_buffers())}
    return {
        name: each.dtype
        for name, each in tensors.items()
        if each.is_floating_point() and each.dtype.itemsize < torch.float32.itemsize
    }


def keep_narrow_weights(
    name: str,
    make: Callable[[], nn.Module],
    loss: LossFunction,
    layout: Layout,
    dtype: torch.dtype,
    batch: Batch,
    autocast: str | None,
) -> Layout:
    """Return the layout that keeps narrow frozen weights, if the model takes a step with them; else the layout itself.

    A model that does not convert its inputs to the dtype of such weights takes no step: it is converted as a whole.

    Args:
        name: Name of the task, for the log.
        make: Builds the model.
        loss: The loss.
        layout: The layout of the model.
        dtype: The dtype of the trained parameters in a run.
        batch: Example rows.
        autocast: As in `Task`.
    """
    module = make()
    narrow = narrow_weights(module)
    if not narrow:
        return layout
    candidate = replace(layout, own_dtypes=frozenset(narrow))
    try:
        with random_state.preserve_rng(), torch.enable_grad():
            random_state.seed_all(Key(0), torch.device("cpu"))
            convert_module(module, dtype, keep=candidate.own_dtypes)
            parameters = candidate.bind(module, candidate.pack(module, dtype)[0])
            inputs, targets = convert_batch(batch, dtype, torch.device("cpu"), layout.channels_last)
            call = autocast_caller(model_caller(module, inputs), autocast, dtype, torch.device("cpu"))
            value = loss(call(inputs), targets)
            if value.ndim == 0:
                torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
    except Exception as error:
        kinds = ", ".join(sorted({str(each).removeprefix("torch.") for each in narrow.values()}))
        wide = str(dtype).removeprefix("torch.")
        log.info(
            "%s: frozen weights in %s are converted to %s, because the model takes no step with them (%s). Convert "
            "their inputs in forward(), such as x.to(weight.dtype), or use autocast.",
            name,
            kinds,
            wide,
            str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
        )
        return layout
    return candidate


def find_constant_buffers(
    example: nn.Module, other: Callable[[], nn.Module], changed: frozenset[str] | None
) -> set[str]:
    """Return the persistent buffers that training does not change and that are equal for every seed.

    Args:
        example: The model.
        other: Builds the model with another seed.
        changed: The buffers that a training step changed; None if that is not known.
    """
    persistent = set(example.state_dict(keep_vars=True))
    names = [name for name, _ in example.named_buffers() if name in persistent]
    if changed is None or not names:
        return set()
    buffers, others = dict(example.named_buffers()), dict(other().named_buffers())
    return {name for name in names if name not in changed and bitwise_equal(buffers[name], others.get(name))}


def find_frozen(example: nn.Module, constant: set[str]) -> dict[str, torch.Tensor]:
    """Return the weights that trainers share: frozen parameters and large constant buffers.

    >>> sorted(find_frozen(nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1)), set()))
    ['0.bias', '0.weight']
    """
    frozen = {name: each.detach() for name, each in example.named_parameters() if not each.requires_grad}
    buffers = {name: each.detach() for name, each in example.named_buffers() if name in constant}
    return frozen | {name: buffer for name, buffer in buffers.items() if buffer.nbytes >= SHARED_BYTES}


class SharedWeights:
    """The frozen weights of a trainer's module: those of the task, or of another trainer, if dtype and device are
    equal.

    Args:
        task: The task.
        module: The module of a trainer, already converted.
        like: Another trainer of the task with the same dtype and device, if there is one.
    """

    def __init__(self, task: Task, module: nn.Module, like: ModuleTrainer | None) -> None:
        known: dict[str, Any] = {}
        if like is not None:
            known = {**dict(like.module.named_parameters()), **dict(like.module.named_buffers())}
        self._parameters: list[tuple[str, torch.Tensor, int, torch.Tensor | None]] = []
        self._buffers: list[tuple[str, dict[str, Any], torch.Tensor, int]] = []
        for name, parameter in module.named_parameters():
            if name in task.frozen:
                common = known[name].detach() if name in known else task.frozen[name]
                if common.dtype == parameter.dtype and common.device == parameter.device:
                    parameter.data = common
                small = parameter.nbytes < SHARED_BYTES  # writes through .data do not count as a version
                saved = parameter.detach().clone() if small else None
                self._parameters.append((name, parameter, parameter._version, saved))
        for prefix, part in module.named_modules():
            for own, buffer in part._buffers.items():
                name = f"{prefix}.{own}" if prefix else own
                if buffer is None or name not in task.frozen:
                    continue
                common = known.get(name, task.frozen[name])
                if common.dtype == buffer.dtype and common.device == buffer.device:
                    part._buffers[own] = buffer = common
                self._buffers.append((name, part._buffers, buffer, buffer._version))

    @property
    def buffers(self) -> frozenset[str]:
        """The names of the shared buffers."""
        return frozenset(name for name, *_ in self._buffers)

    def check(self) -> None:
        """Raise if the model has written to a shared weight."""
        for name, parameter, version, saved in self._parameters:
            if parameter._version != version or (saved is not None and not bitwise_equal(parameter, saved)):
                raise HansaError(
                    f"parameter {name} is frozen, and the model changed it in training: workers share such. Register "
                    "what a client changes as a buffer."
                )
        for name, owner, buffer, version in self._buffers:
            current = owner[name.rpartition(".")[2]]
            if buffer._version != version or (current is not buffer and not bitwise_equal(current, buffer)):
                raise HansaError(
                    f"buffer {name} was left unchanged by the first batch and written by a later one: workers share "
                    "such. Write to it in every training step, or register it with persistent=False if it belongs to "
                    "the client."
                )


def existing_trainer(task: Task, dtype: torch.dtype, device: torch.device) -> ModuleTrainer | None:
    """Return a trainer of the task in this process that is in use; None if there is none."""
    known = _trainers.get(task, {}).get((dtype, device))
    return None if known is None else known()


def remember_trainer(trainer: ModuleTrainer) -> None:
    """Let later trainers of the task share this one's data while it is in use."""
    _trainers.setdefault(trainer.task, {})[trainer.dtype, trainer.device] = ref(trainer)
