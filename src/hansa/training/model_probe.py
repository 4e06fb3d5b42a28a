"""One look at a model before it trains: what it answers, what it makes of its buffers, how its loss adds up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as trees

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.vectors.layout import Layout, converted
from hansa.training import random_state
from hansa.training.batch_sources import described, rows_of, take_rows
from hansa.training.model_call import caller

log = logging.getLogger("hansa")

Loss = Callable[[Any, Any], torch.Tensor]
_ROWS = 12


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What a batch of rows from all over the data showed."""

    output: Any
    target: Any
    value: torch.Tensor
    thirds: tuple[tuple[int, float], ...]
    changed: frozenset[str]

    @property
    def reduction(self) -> str:
        """``mean`` or ``sum`` where the loss of all rows is that of the losses of their parts, otherwise ``other``."""
        if len(self.thirds) < 2:
            return "mean"
        whole, rows = float(self.value), sum(count for count, _ in self.thirds)
        near = 1e-5 * (abs(whole) + sum(abs(value) for _, value in self.thirds))
        if abs(whole - sum(count * value for count, value in self.thirds) / rows) <= near:
            return "mean"
        return "sum" if abs(whole - sum(value for _, value in self.thirds)) <= near else "other"


def look(
    make: Callable[[], nn.Module], loss: Loss, layout: Layout, dtype: torch.dtype, inputs: Any, targets: Any
) -> Seen | None:
    """A training step without its step, then an evaluation. What the model or the loss cannot take is an error; None
    for a model that fails in evaluation alone, as its evaluation will tell."""
    rows = torch.linspace(0, rows_of(targets) - 1, min(_ROWS, rows_of(targets))).long()
    x = trees.tree_map(partial(_as_trained, dtype, layout.channels_last), take_rows(inputs, rows))
    target = trees.tree_map(partial(_as_trained, dtype, False), take_rows(targets, rows))
    with random_state.kept():
        random_state.seed_all(Key(0), torch.device("cpu"))
        module = converted(make(), dtype)
        parameters = layout.bind(module, layout.pack(module, dtype)[0])
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        ask = caller(module, x)
        with torch.enable_grad():
            value = _loss(loss, _output(ask, x, module), x, target)
            if value.ndim == 0:
                torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        changed = {name for name, buffer in module.named_buffers() if not same_bits(buffer, before.get(name))}
        module.eval()
        try:
            return _evaluated(ask, loss, x, target, frozenset(changed))
        except Exception as problem:
            log.debug("%s cannot be evaluated: %s", type(module).__name__, problem)
            return None


def _as_trained(dtype: torch.dtype, channels_last: bool, leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.to(dtype) if leaf.is_floating_point() else leaf
    return leaf.contiguous(memory_format=torch.channels_last) if leaf.ndim == 4 and channels_last else leaf


def _output(ask: Callable[[Any], Any], x: Any, module: nn.Module) -> Any:
    try:
        return ask(x)
    except Exception as problem:
        raise HansaError(
            f"{type(module).__name__} cannot take a batch of the data, inputs {described(x)}: "
            f"{type(problem).__name__}: {problem}"
        ) from problem


def _loss(loss: Loss, output: Any, x: Any, target: Any) -> torch.Tensor:
    try:
        return loss(output, target)
    except Exception as problem:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise HansaError(
            f"the loss {name} cannot take outputs {described(output)} and targets {described(target)} (of inputs "
            f"{described(x)}): {type(problem).__name__}: {problem}"
        ) from problem


@torch.no_grad()
def _evaluated(ask: Callable[[Any], Any], loss: Loss, x: Any, target: Any, changed: frozenset[str]) -> Seen:
    output = ask(x)
    value, count = loss(output, target), rows_of(target)
    thirds: list[tuple[int, float]] = []
    if value.ndim == 0 and count > 2:
        number = torch.arange(count)
        for rows in ((number % 3 != 2).nonzero()[:, 0], (number % 3 == 2).nonzero()[:, 0]):
            again = partial(ask, take_rows(x, rows))
            part = loss(of_rows(output, rows, count, again), take_rows(target, rows))
            thirds.append((len(rows), float(part)))
    return Seen(output, target, value, tuple(thirds), changed)


def of_rows(output: Any, rows: torch.Tensor, count: int, again: Callable[[], Any]) -> Any:
    """The output of some of a batch's ``count`` rows; an answer that cannot be taken apart is asked for once more."""
    leaves, form = trees.tree_flatten(output)
    if not all(isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == count for leaf in leaves):
        return again()
    return trees.tree_unflatten([leaf[rows] for leaf in leaves], form)


def same_bits(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    """Whether two tensors have the same bits: a NaN is what it is, and -0 is not 0."""
    if b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(_bytes(a), _bytes(b)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.detach()
