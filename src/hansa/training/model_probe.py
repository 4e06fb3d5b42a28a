"""A step on a few rows before training: what a model returns, which buffers it changes, and the memory it needs."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as trees

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.object_state import bitwise_equal
from hansa.core.vectors.layout import Layout, convert_module
from hansa.training import random_state
from hansa.training.batch_sources import Batch, convert_batch, count_rows, describe_shapes, has_rows, take_rows
from hansa.training.losses import LossFunction
from hansa.training.mixed_precision import autocast_caller

log = logging.getLogger("hansa")

_ROWS = 12


def model_caller(module: nn.Module, inputs: Any) -> Callable[[Any], Any]:
    """Return a function that calls the module with a batch like ``inputs``.

    A dict is passed by keyword, ``module(**batch)``, if ``forward()`` has parameters of all its names; a tuple by
    position, ``module(*batch)``, if ``forward()`` takes that many. Otherwise the batch is one argument.

    >>> class Both(nn.Module):
    ...     def forward(self, a, b=0): return a + b
    >>> model_caller(Both(), {"a": 1, "b": 2})({"a": 1, "b": 2}), model_caller(Both(), (1, 2))((3, 4))
    (3, 7)
    """
    parameters = _forward_parameters(module)
    if isinstance(inputs, Mapping):
        names = {name for name, one in parameters.items() if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}
        if set(inputs) <= names:
            return lambda batch: module(**batch)
    elif isinstance(inputs, (tuple, list)):
        positional = [
            one for one in parameters.values() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        ]
        variadic = any(one.kind is one.VAR_POSITIONAL for one in parameters.values())
        if len(inputs) <= len(positional) or variadic:
            return lambda batch: module(*batch)
    return module


def _forward_parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return {}


@dataclass(frozen=True, slots=True, eq=False)
class ProbeResult:
    """Output and target of a few rows, the buffers that a step changed with their new values, and the bytes of a row:
    of the largest intermediate results, and of the output."""

    output: Any
    target: Any
    changed_buffers: dict[str, torch.Tensor]
    bytes_per_row: int
    output_bytes_per_row: int


def probe_model(
    make: Callable[[], nn.Module],
    loss: LossFunction,
    layout: Layout,
    dtype: torch.dtype,
    batch: Batch,
    autocast: str | None = None,
) -> ProbeResult | None:
    """Compute the gradient of one batch, then evaluate it. With ``autocast`` the model is called in mixed precision.

    Raises if the model or the loss cannot take the batch. Returns None for a model that fails only in evaluation: its
    evaluation will report that.
    """
    count = count_rows(batch.targets)
    if has_rows(tuple(batch), count):  # what a function collates may have no rows
        rows = torch.linspace(0, count - 1, min(_ROWS, count)).long()
        batch = Batch(take_rows(batch.inputs, rows), take_rows(batch.targets, rows))
    x, target = convert_batch(batch, dtype, torch.device("cpu"), layout.channels_last)
    with random_state.preserve_rng():
        random_state.seed_all(Key(0), torch.device("cpu"))
        module = convert_module(make(), dtype, keep=layout.own_dtypes)
        parameters = layout.bind(module, layout.pack(module, dtype)[0])
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        call = autocast_caller(model_caller(module, x), autocast, dtype, torch.device("cpu"))
        with torch.enable_grad():
            value = _compute_loss(loss, _compute_output(call, x, module), x, target)
            torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        changed = {
            name: buffer.detach().clone()
            for name, buffer in module.named_buffers()
            if not bitwise_equal(buffer, before.get(name))
        }
        module.eval()
        try:
            with torch.no_grad(), _measure_memory(module) as largest:
                output = call(x)
        except Exception as error:
            log.debug("%s cannot be evaluated: %s", type(module).__name__, error)
            return None
    count, size = max(1, count_rows(target)), _byte_count(output)
    largest_size = max(largest[0], 4 * size)
    return ProbeResult(output, target, changed, -(-largest_size // count), -(-size // count))


def _compute_output(call: Callable[[Any], Any], x: Any, module: nn.Module) -> Any:
    try:
        return call(x)
    except Exception as error:
        raise HansaError(
            f"{type(module).__name__} cannot take a batch of the data, inputs {describe_shapes(x)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _compute_loss(loss: LossFunction, output: Any, x: Any, target: Any) -> torch.Tensor:
    """Return the loss of a batch; raise if it is no number that depends on the parameters."""
    name = getattr(loss, "__name__", type(loss).__name__)
    try:
        value: Any = loss(output, target)
    except HansaError:
        raise
    except Exception as error:
        raise HansaError(
            f"the loss {name} cannot take outputs {describe_shapes(output)} and targets {describe_shapes(target)} (of "
            f"inputs {describe_shapes(x)}): {type(error).__name__}: {error}"
        ) from error
    if not isinstance(value, torch.Tensor) or value.ndim:
        shape = getattr(value, "shape", None)
        returned = type(value).__name__ if shape is None else f"a tensor of shape {tuple(shape)}"
        raise HansaError(
            f"Task(loss={name}): returned {returned}: expected one number for a batch as a tensor, such as the "
            "mean over its rows."
        )
    if not value.requires_grad:
        raise HansaError(
            f"Task(loss={name}): has no gradient: it does not depend on the parameters, or was computed under "
            "no_grad(), or from detach() or item()."
        )
    return value


@contextmanager
def _measure_memory(module: nn.Module) -> Iterator[list[int]]:
    """Yield a list whose entry becomes the bytes of the inputs and outputs of the largest part of a module."""
    largest = [0]

    def measure(part: nn.Module, inputs: Any, output: Any) -> None:
        largest[0] = max(largest[0], _byte_count(inputs) + _byte_count(output))

    handles = []
    with suppress(Exception):  # a part that takes no hooks is not measured
        handles += [part.register_forward_hook(measure) for part in module.modules()]
    try:
        yield largest
    finally:
        for handle in handles:
            handle.remove()


def _byte_count(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in trees.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
