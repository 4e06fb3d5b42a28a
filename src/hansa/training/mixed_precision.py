"""Training in lower precision: autocast with float32 parameters, or bfloat16 parameters with float32 master weights.

Both leave everything outside of the model in float32: steps, updates, packets, client memory, the server. So messages
and checkpoints of a run have the same form in every precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as trees

from hansa.core.errors import HansaError, invalid_argument
from hansa.core.types import Vector
from hansa.core.vectors.layout import Layout

DTYPES = {"bfloat16": torch.bfloat16}
"""The dtypes of ``Task(autocast=...)`` and ``Task(param_dtype=...)``."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision in which a task's model computes.

    Args:
        autocast: The dtype of `torch.autocast`, or None.
        param_dtype: The dtype of the model's parameters, or None for that of the run.

    >>> Precision(autocast="bfloat16").reason
    "autocast='bfloat16'"
    """

    autocast: str | None = None
    param_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("autocast", "param_dtype"):
            if (value := getattr(self, name)) is not None and value not in DTYPES:
                raise invalid_argument("Task", name, value, f"{', '.join(map(repr, DTYPES))} or None")
        if self.autocast is not None and self.param_dtype is not None:
            raise HansaError(
                f"Task(autocast={self.autocast!r}, param_dtype={self.param_dtype!r}): a model with {self.param_dtype} "
                "parameters needs no autocast. Pass one of them."
            )

    @property
    def reason(self) -> str | None:
        """What keeps a model from native code and batches of clients; None in the precision of the run."""
        if self.autocast is not None:
            return f"autocast={self.autocast!r}"
        return None if self.param_dtype is None else f"param_dtype={self.param_dtype!r}"


class ModelPrecision:
    """A trainer's model in the precision of its task: calls of the model, and gradients in the dtype of the run.

    With ``param_dtype`` the model's parameters and buffers have that dtype, except those of BatchNorm and InstanceNorm
    layers, whose running statistics would not move in it. Their master weights are the vector ``y``, which local steps
    change; it is rounded to the parameters before every call of the model. A step in bfloat16 itself would be lost
    where it is smaller than 2^-9 of a weight.

    Args:
        precision: The precision of the task.
        module: The model, in the dtype and on the device of ``y``. It is converted in place.
        layout: The positions of its parameters in the vector.
        y: The vector of the trainer.
    """

    def __init__(self, precision: Precision, module: nn.Module, layout: Layout, y: Vector) -> None:
        self._y = y
        if precision.reason is not None and y.dtype != torch.float32:
            raise HansaError(f"Task({precision.reason}): the run is in {y.dtype}. This needs torch.float32.")
        self._autocast = precision.autocast
        self._rounded: Vector | None = None
        self._leaves: list[torch.Tensor] = [*layout.bind(module, y)]
        self.parameters: list[torch.Tensor] = self._leaves
        if precision.param_dtype is not None:
            self._rounded = torch.zeros_like(y, dtype=DTYPES[precision.param_dtype])
            self.parameters = [entry.view(y) for entry in layout.parameters]
            wide_ids = _round_module(module, self._rounded.dtype)
            for leaf, entry in zip(self._leaves, layout.parameters, strict=True):
                leaf.data = entry.view(y if id(leaf) in wide_ids else self._rounded)

    def wrap(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that calls the model in its precision and returns outputs in the dtype of the run.

        Args:
            call: Calls the model with a batch.
        """
        if self._rounded is not None:
            return lambda batch: _convert(call(self._round(batch)), self._y.dtype)
        return autocast_caller(call, self._autocast, self._y.dtype, self._y.device)

    def _round(self, batch: Any) -> Any:
        """Round the master weights to the parameters, and a batch to their dtype."""
        assert self._rounded is not None
        with torch.no_grad():
            self._rounded.copy_(self._y)
        return _convert(batch, self._rounded.dtype)

    def gradients(self, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradients of a loss in the dtype of the run, in the order of the vector."""
        gradients = torch.autograd.grad(loss, self._leaves, allow_unused=True, materialize_grads=True)
        return gradients if self._rounded is None else tuple(each.to(self._y.dtype) for each in gradients)


def autocast_caller(
    call: Callable[[Any], Any], autocast: str | None, dtype: torch.dtype, device: torch.device
) -> Callable[[Any], Any]:
    """Return a function that calls a model under ``torch.autocast`` and returns its outputs in the dtype of the run.

    So the loss is computed in float32. Parameters are float32; their gradients are converted to it by autograd. Torch's
    cache of converted weights is off: another thread may clear it between two uses of a weight, and the gradients of
    both would then be added in float32 and not in the lower precision.

    Args:
        call: Calls the model with a batch.
        autocast: The name of the dtype; None returns ``call`` itself.
        dtype: The dtype of the run.
        device: The device of the model.

    >>> autocast_caller(torch.nn.Linear(2, 1), "bfloat16", torch.float32, torch.device("cpu"))(torch.ones(1, 2)).dtype
    torch.float32
    """
    if autocast is None:
        return call

    def call_under_autocast(batch: Any) -> Any:
        with torch.autocast(device.type, DTYPES[autocast], cache_enabled=False):
            output = call(batch)
        return _convert(output, dtype)

    return call_under_autocast


def _convert(tree: Any, dtype: torch.dtype) -> Any:
    """Return a tree with its real tensors in a dtype."""
    return trees.tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, tree
    )


def _round_module(module: nn.Module, dtype: torch.dtype) -> set[int]:
    """Convert a module's real parameters and buffers to a dtype; return the ids of parameters that keep theirs."""
    normalizations = [part for part in module.modules() if isinstance(part, _NormBase)]
    wide_ids = {id(each) for part in normalizations for each in part.parameters(recurse=False)}
    for part in module.modules():
        if isinstance(part, _NormBase):
            continue
        for parameter in part.parameters(recurse=False):
            if parameter.is_floating_point() and id(parameter) not in wide_ids:
                parameter.data = parameter.data.to(dtype)
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)
    return wide_ids
