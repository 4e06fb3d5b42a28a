"""Frozen weights: kept in their own dtype if that is narrow, and shared by the trainers of a process and device.

Frozen are parameters with ``requires_grad=False`` and buffers that training does not change. A base model in bfloat16
with a trained float32 part (LoRA, a new head) so takes the memory that it takes in PyTorch, once per device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.vectors.layout import Layout, convert_module
from hansa.training import random_state
from hansa.training.batch_sources import Batch, convert_batch
from hansa.training.losses import LossFunction
from hansa.training.mixed_precision import autocast_caller
from hansa.training.model_probe import bitwise_equal, model_caller

if TYPE_CHECKING:
    from hansa.training.task import Task
    from hansa.training.trainer import ModuleTrainer

log = logging.getLogger("hansa")

SHARED_BYTES = 1 << 16
"""Constant buffers of at least this size are shared; smaller ones are copied for each trainer."""


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
        self._parameters: list[tuple[str, torch.Tensor, int]] = []
        self._buffers: list[tuple[str, dict[str, Any], torch.Tensor, int]] = []
        for name, parameter in module.named_parameters():
            if name in task.frozen:
                common = known[name].detach() if name in known else task.frozen[name]
                if common.dtype == parameter.dtype and common.device == parameter.device:
                    parameter.data = common
                self._parameters.append((name, parameter, parameter._version))
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
        for name, parameter, version in self._parameters:
            if parameter._version != version:
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
