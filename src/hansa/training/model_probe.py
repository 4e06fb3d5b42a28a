"""Probe a model before training: what it returns, which buffers it changes, and how its loss reduces over rows."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as trees

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.vectors.layout import Layout, convert_module
from hansa.training import random_state
from hansa.training.batch_sources import count_rows, describe_shapes, take_rows
from hansa.training.losses import LossFunction

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
    """Output, target, loss, losses of parts of the rows, and changed buffers of one batch."""

    output: Any
    target: Any
    loss: torch.Tensor
    part_losses: tuple[tuple[int, float], ...]
    changed_buffers: frozenset[str]

    @property
    def reduction(self) -> str:
        """``mean`` or ``sum`` if the loss of all rows is that of the losses of the parts, otherwise ``other``."""
        if len(self.part_losses) < 2:
            return "mean"
        loss, rows = float(self.loss), sum(count for count, _ in self.part_losses)
        tolerance = 1e-5 * (abs(loss) + sum(abs(value) for _, value in self.part_losses))
        if abs(loss - sum(count * value for count, value in self.part_losses) / rows) <= tolerance:
            return "mean"
        return "sum" if abs(loss - sum(value for _, value in self.part_losses)) <= tolerance else "other"


def probe_model(
    make: Callable[[], nn.Module], loss: LossFunction, layout: Layout, dtype: torch.dtype, inputs: Any, targets: Any
) -> ProbeResult | None:
    """Compute the gradient of one batch, then evaluate it.

    Raises if the model or the loss cannot take the batch. Returns None for a model that fails only in evaluation: its
    evaluation will report that.
    """
    rows = torch.linspace(0, count_rows(targets) - 1, min(_ROWS, count_rows(targets))).long()
    x = trees.tree_map(partial(_convert_leaf, dtype, layout.channels_last), take_rows(inputs, rows))
    target = trees.tree_map(partial(_convert_leaf, dtype, False), take_rows(targets, rows))
    with random_state.preserve_rng():
        random_state.seed_all(Key(0), torch.device("cpu"))
        module = convert_module(make(), dtype)
        parameters = layout.bind(module, layout.pack(module, dtype)[0])
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        call = model_caller(module, x)
        with torch.enable_grad():
            value = _compute_loss(loss, _compute_output(call, x, module), x, target)
            if value.ndim == 0:
                torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        changed = {name for name, buffer in module.named_buffers() if not bitwise_equal(buffer, before.get(name))}
        module.eval()
        try:
            return _evaluate(call, loss, x, target, frozenset(changed))
        except Exception as error:
            log.debug("%s cannot be evaluated: %s", type(module).__name__, error)
            return None


def _convert_leaf(dtype: torch.dtype, channels_last: bool, leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.to(dtype) if leaf.is_floating_point() else leaf
    return leaf.contiguous(memory_format=torch.channels_last) if leaf.ndim == 4 and channels_last else leaf


def _compute_output(call: Callable[[Any], Any], x: Any, module: nn.Module) -> Any:
    try:
        return call(x)
    except Exception as error:
        raise HansaError(
            f"{type(module).__name__} cannot take a batch of the data, inputs {describe_shapes(x)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _compute_loss(loss: LossFunction, output: Any, x: Any, target: Any) -> torch.Tensor:
    try:
        return loss(output, target)
    except Exception as error:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise HansaError(
            f"the loss {name} cannot take outputs {describe_shapes(output)} and targets {describe_shapes(target)} (of "
            f"inputs {describe_shapes(x)}): {type(error).__name__}: {error}"
        ) from error


@torch.no_grad()
def _evaluate(
    call: Callable[[Any], Any], loss: LossFunction, x: Any, target: Any, changed: frozenset[str]
) -> ProbeResult:
    output = call(x)
    value, count = loss(output, target), count_rows(target)
    part_losses: list[tuple[int, float]] = []
    if value.ndim == 0 and count > 2:
        numbers = torch.arange(count)
        for rows in ((numbers % 3 != 2).nonzero()[:, 0], (numbers % 3 == 2).nonzero()[:, 0]):
            recompute = partial(call, take_rows(x, rows))
            part = loss(select_output_rows(output, rows, count, recompute), take_rows(target, rows))
            part_losses.append((len(rows), float(part)))
    return ProbeResult(output, target, value, tuple(part_losses), changed)


def select_output_rows(output: Any, rows: torch.Tensor, count: int, recompute: Callable[[], Any]) -> Any:
    """Return the output of some of a batch's ``count`` rows; an output without rows is recomputed."""
    leaves, structure = trees.tree_flatten(output)
    if not all(isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == count for leaf in leaves):
        return recompute()
    return trees.tree_unflatten([leaf[rows] for leaf in leaves], structure)


def bitwise_equal(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    """Return whether two tensors have equal bits: equal NaNs are equal, -0 and 0 are not."""
    if b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(_as_bytes(a), _as_bytes(b)))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.detach()
