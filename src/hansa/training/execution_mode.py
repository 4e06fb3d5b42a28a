"""In which form a task's model runs: how its images and weights lie in memory, and native code where that is the same.

Both are found once, when the task is made, and travel with it: every worker does the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hansa.core import native
from hansa.core.keys import Key
from hansa.core.native.eligibility import Unfit
from hansa.core.native.network import Stack
from hansa.core.native.tracing import stages_of
from hansa.core.vectors.layout import Layout, converted
from hansa.training import random_state

log = logging.getLogger("hansa")

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
_ROWS = 8  # of a batch that the two forms are compared on
_LR = 0.05


def fitting_layout(
    name: str, make: Callable[[], nn.Module], loss: Loss, inputs: torch.Tensor, targets: torch.Tensor
) -> Layout:
    """Channels-last where the model works with it, which is faster; otherwise the order that torch starts with.

    ``x.view(...)`` after a convolution works in torch's own order alone, and group normalisation is up to four times as
    fast in it. A model that works in neither keeps channels-last: training it will tell why.
    """
    module = make()
    layout = Layout.of(module)
    if inputs.ndim != 4 and all(len(entry.shape) < 4 for entry in layout.parameters):
        return layout
    plain = Layout.of(module, channels_last=False)
    if any(isinstance(part, nn.GroupNorm) for part in module.modules()):
        return plain
    try:
        gradient(module, loss, layout, layout.pack(module, torch.float32)[0], inputs[:2], targets[:2])
    except Exception as problem:
        module = make()
        try:
            gradient(module, loss, plain, plain.pack(module, torch.float32)[0], inputs[:2], targets[:2])
        except Exception:
            return layout
        log.info("%s: images and weights stay channels-first (%s)", name, str(problem).split(". ")[0])
        return plain
    return layout


def native_form(
    make: Callable[[], nn.Module], loss: Loss, layout: Layout, inputs: torch.Tensor, targets: torch.Tensor
) -> Stack:
    """The native form of a model and its loss, once three batches have shown that it is the same; or `Unfit`."""
    if (why := native.why_not()) is not None:
        raise Unfit(why)
    if not inputs.is_floating_point() or targets.dtype != torch.int64 or targets.ndim != 1:
        raise Unfit(f"its inputs are {inputs.dtype} and its targets {targets.dtype} of {targets.ndim} axes")
    if int(targets.min()) < 0:
        raise Unfit("there are targets below 0, which cross-entropy leaves out")
    with random_state.kept():
        module = make()
        stages = stages_of(module, inputs.shape[1:], loss, layout.channels_last)
        stack = Stack(stages, tuple(inputs.shape[1:]))
        _prove(stack, module, loss, layout, inputs, targets)
    return stack


def gradient(
    module: nn.Module,
    loss: Loss,
    layout: Layout,
    y: torch.Tensor,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    key: Key = Key(0),  # noqa: B008 - a value
) -> tuple[float, torch.Tensor]:
    """Loss and flat gradient at y by eager PyTorch, as a worker computes them; ``key`` is for what the model draws."""
    if inputs.is_floating_point():
        inputs = inputs.to(y.dtype)
    if targets.is_floating_point():
        targets = targets.to(y.dtype)
    converted(module, y.dtype)
    parameters = layout.bind(module, y)
    batch = inputs.contiguous()
    if batch.ndim == 4 and layout.channels_last:
        batch = batch.contiguous(memory_format=torch.channels_last)
    with random_state.kept(), torch.enable_grad():
        random_state.seed_all(key, torch.device("cpu"))
        value = loss(module(batch), targets)
        found = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
    flat = torch.empty_like(y)
    for entry, piece in zip(layout.parameters, found, strict=True):
        entry.view(flat).copy_(piece)
    return float(value.detach()), flat


def _prove(
    stack: Stack, module: nn.Module, loss: Loss, layout: Layout, inputs: torch.Tensor, targets: torch.Tensor
) -> None:
    """Compare loss, gradient and a step after each of three batches. A rounding may decide another maximum now and
    then, so one of the three may be a little further off."""
    y = layout.pack(module, torch.float32)[0]
    ours, theirs, start = y.clone(), y.clone(), y
    rows = torch.linspace(0, len(inputs) - 1, 3 * _ROWS).long().view(_ROWS, 3).T
    apart = []
    for step, batch in enumerate(rows):
        some, labels = inputs[batch].float().contiguous(), targets[batch].contiguous()
        wanted, true = gradient(module, loss, layout, theirs, some, labels, Key(step))
        keep = _drawn(stack, Key(step))
        found, mine = stack.gradient(theirs, some, labels, torch.arange(_ROWS), keep=keep)
        if not abs(found - wanted) <= 1e-4 * (1 + abs(wanted)):
            raise Unfit(f"its native loss is {found:.6g}, its own {wanted:.6g}")
        apart.append(_distance(mine, true))
        stack.train(ours, some, labels, torch.arange(_ROWS)[None], lr=_LR, keep=None if keep is None else keep[None])
        theirs = theirs - _LR * true
    moved = _distance(ours - start, theirs - start)
    if not (sorted(apart)[1] < 1e-4 and max(*apart, moved) < 2e-2):
        raise Unfit(f"its native gradient differs by {max(apart):.2g}, three steps by {moved:.2g}")


def _drawn(stack: Stack, key: Key) -> torch.Tensor | None:
    """What eager dropout multiplies a batch by."""
    if not stack.keeps:
        return None
    generator, keep = torch.Generator(), torch.empty(_ROWS * stack.keeps)
    random_state.seed_own(generator, key)
    stack.draw(_ROWS, generator, keep)
    return keep


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
