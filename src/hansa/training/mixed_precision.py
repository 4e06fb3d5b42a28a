"""Training in mixed precision: the model's forward and backward pass in bfloat16, parameters and updates in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as trees

from hansa.core.errors import HansaError, invalid_argument

AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16}
"""The dtypes of ``Task(autocast=...)``. float16 is not one: its gradients would need a loss scale."""


def check_autocast(autocast: str | None) -> str | None:
    """Return the value; raise unless it names a dtype for autocast, or is None."""
    if autocast is not None and autocast not in AUTOCAST_DTYPES:
        raise invalid_argument("Task", "autocast", autocast, "'bfloat16' or None")
    return autocast


def autocast_caller(
    call: Callable[[Any], Any], autocast: str | None, dtype: torch.dtype, device: torch.device
) -> Callable[[Any], Any]:
    """Return a function that calls a model under ``torch.autocast`` and returns its outputs in the dtype of the run.

    So the loss is computed in float32. Parameters are float32; their gradients are converted to it by autograd.

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
    if dtype != torch.float32:
        raise HansaError(f"Task(autocast={autocast!r}): the run is in {dtype}. Autocast needs torch.float32.")

    def widen(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    def call_under_autocast(batch: Any) -> Any:
        with torch.autocast(device.type, AUTOCAST_DTYPES[autocast]):
            output = call(batch)
        return trees.tree_map(widen, output)

    return call_under_autocast
