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

from hansa.keys import Key
from hansa.tasks import generators
from hansa.vectors.layout import Layout, converted

log = logging.getLogger("hansa")

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
_ROWS = 12


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What a batch of rows from all over the data showed."""

    output: Any
    target: torch.Tensor
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
    make: Callable[[], nn.Module],
    loss: Loss,
    layout: Layout,
    dtype: torch.dtype,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> Seen | None:
    """A training step without its step, then an evaluation; None for a model that fails, as its training will tell."""
    rows = torch.linspace(0, len(targets) - 1, min(_ROWS, len(targets))).long()
    x, target = inputs[rows], targets[rows]
    x = x.to(dtype) if x.is_floating_point() else x
    if x.ndim == 4 and layout.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    target = target.to(dtype) if target.is_floating_point() else target
    with generators.kept():
        try:
            generators.seed_all(Key(0), torch.device("cpu"))
            module = converted(make(), dtype)
            parameters = layout.bind(module, layout.pack(module, dtype)[0])
            before = {name: buffer.clone() for name, buffer in module.named_buffers()}
            with torch.enable_grad():
                value = loss(module(x), target)
                if value.ndim == 0:
                    torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
            changed = {name for name, buffer in module.named_buffers() if not same_bits(buffer, before.get(name))}
            module.eval()
            return _evaluated(partial(_answer, module), loss, x, target, frozenset(changed))
        except Exception as problem:
            log.debug("%s cannot be looked at: %s", type(problem).__name__, problem)
            return None


@torch.no_grad()
def _evaluated(
    answer: Callable[[torch.Tensor], Any], loss: Loss, x: torch.Tensor, target: torch.Tensor, changed: frozenset[str]
) -> Seen:
    output = answer(x)
    value = loss(output, target)
    thirds: list[tuple[int, float]] = []
    if value.ndim == 0 and len(target) > 2:
        number = torch.arange(len(target))
        for rows in ((number % 3 != 2).nonzero()[:, 0], (number % 3 == 2).nonzero()[:, 0]):
            part = loss(of_rows(output, rows, len(target), partial(answer, x[rows])), target[rows])
            thirds.append((len(rows), float(part)))
    return Seen(output, target, value, tuple(thirds), changed)


def _answer(module: nn.Module, x: torch.Tensor) -> Any:
    return module(x)


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
