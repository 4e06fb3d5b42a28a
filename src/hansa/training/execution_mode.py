"""How a task's model is executed: its memory layout, and native code if that computes the same.

Both are chosen once, when the task is created, so that every worker does the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from hansa.core import native
from hansa.core.errors import invalid_argument
from hansa.core.keys import Key
from hansa.core.native import abi
from hansa.core.native.layer_stage import LayerStage
from hansa.core.native.network import AffineStep, Network
from hansa.core.native.tracing import NotEligible, stages_of
from hansa.core.vectors.layout import Layout, convert_module
from hansa.training import random_state
from hansa.training.losses import LossFunction

log = logging.getLogger("hansa")

Execution: TypeAlias = Literal["auto", "native", "vmap", "compiled", "eager"]
"""How clients are trained, as `hansa.Task` describes it."""

_ROWS = 8  # of a batch for the comparison of native code with eager
_LR = 0.05
_WIDE = 1 << 19  # weights of one convolution


def check_execution(execution: Any) -> Execution:
    """Return the execution of a task; raise for another word."""
    if execution not in get_args(Execution):
        raise invalid_argument("Task", "execution", execution, " or ".join(map(repr, get_args(Execution))))
    return execution  # type: ignore[no-any-return]


def choose_layout(
    name: str, make: Callable[[], nn.Module], loss: LossFunction, inputs: torch.Tensor, targets: torch.Tensor
) -> Layout:
    """Return a channels-last layout, which is faster, if the model works with it; otherwise torch's default order.

    ``x.view(...)`` after a convolution works in the default order only, and group normalisation is up to four times as
    fast in it. A model that works in neither gets channels-last: training will report the error.
    """
    module = make()
    layout = Layout.of(module)
    if inputs.ndim != 4 and all(len(entry.shape) < 4 for entry in layout.parameters):
        return layout
    channels_first = Layout.of(module, channels_last=False)
    if any(isinstance(part, nn.GroupNorm) for part in module.modules()):
        return channels_first
    try:
        eager_gradient(module, loss, layout, layout.pack(module, torch.float32)[0], inputs[:2], targets[:2])
    except Exception as error:
        module = make()
        try:
            eager_gradient(
                module, loss, channels_first, channels_first.pack(module, torch.float32)[0], inputs[:2], targets[:2]
            )
        except Exception:
            return layout
        log.info("%s: images and weights stay channels-first (%s)", name, str(error).split(". ")[0])
        return channels_first
    return layout


def find_native_form(
    make: Callable[[], nn.Module],
    loss: LossFunction,
    layout: Layout,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    required: bool = False,
) -> Network:
    """Return the native form of a model and its loss after a comparison on three batches; raise `NotEligible`
    otherwise, or if PyTorch is faster and native code is not ``required``."""
    if (reason := native.unavailable_reason()) is not None:
        raise NotEligible(reason)
    tokens = inputs.dtype == torch.int64
    if not (inputs.is_floating_point() or tokens) or targets.dtype != torch.int64 or targets.ndim != 1:
        raise NotEligible(f"its inputs are {inputs.dtype} and its targets {targets.dtype} with {targets.ndim} axes")
    if int(targets.min()) < 0:
        raise NotEligible("there are negative targets, which cross-entropy ignores")
    with random_state.preserve_rng():
        module = make()
        stages = stages_of(module, inputs.shape[1:], loss, layout.channels_last, tokens)
        if not required and _is_wide(stages):
            raise NotEligible(f"PyTorch is faster for residual networks with {_WIDE:,} weights in a convolution")
        network = Network(stages, tuple(inputs.shape[1:]))
        _compare_with_eager(network, module, loss, layout, inputs, targets)
    return network


def _is_wide(stages: Sequence[LayerStage]) -> bool:
    """Return whether a network of more than a chain of convolutions is so wide that PyTorch is as fast, as measured on
    residual networks with group normalisation (docs/limits.md)."""
    graph = any(stage.kind in (abi.GROUP_NORM, abi.IMAGE_ADD) for stage in stages)
    return graph and any(stage.kind == abi.CONV and stage.dim > _WIDE for stage in stages)


def native_inputs(inputs: torch.Tensor) -> torch.Tensor:
    """Return examples as native code reads them: contiguous, float32 or int64 tokens."""
    return (inputs.float() if inputs.is_floating_point() else inputs).contiguous()


def describe_kernels(task: object) -> str:
    """Return one line: which native kernels a run of a task uses, and whether they train its model.

    >>> describe_kernels(None).startswith("kernels: ")
    True
    """
    used, reason = native.describe(), getattr(task, "eager_reason", None)
    if native.unavailable_reason() is not None:
        return f"kernels: {used}. PyTorch does all the work, several times slower for small models. {native.remedy()}"
    if getattr(task, "network", None) is not None:
        return f"kernels: {used}, for training, the server and compression"
    why = "" if reason is None else f": {reason}"
    return f"kernels: {used}, for the server and compression. PyTorch trains the model{why}"


def eager_gradient(
    module: nn.Module,
    loss: LossFunction,
    layout: Layout,
    y: torch.Tensor,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    key: Key = Key(0),  # noqa: B008 - a value
) -> tuple[float, torch.Tensor]:
    """Return loss and flat gradient at y by eager PyTorch, as in a worker; ``key`` seeds the model's draws."""
    if inputs.is_floating_point():
        inputs = inputs.to(y.dtype)
    if targets.is_floating_point():
        targets = targets.to(y.dtype)
    convert_module(module, y.dtype)
    parameters = layout.bind(module, y)
    batch = inputs.contiguous()
    if batch.ndim == 4 and layout.channels_last:
        batch = batch.contiguous(memory_format=torch.channels_last)
    with random_state.preserve_rng(), torch.enable_grad():
        random_state.seed_all(key, torch.device("cpu"))
        value = loss(module(batch), targets)
        gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
    flat = torch.empty_like(y)
    for entry, part in zip(layout.parameters, gradients, strict=True):
        entry.view(flat).copy_(part)
    return float(value.detach()), flat


def _compare_with_eager(
    network: Network, module: nn.Module, loss: LossFunction, layout: Layout, inputs: torch.Tensor, targets: torch.Tensor
) -> None:
    """Compare loss, gradient and a step on each of three batches; raise `Unfit` if they differ.

    Rounding may occasionally select another maximum, so the tolerance for one of the three is larger.
    """
    start = layout.pack(module, torch.float32)[0]
    native_y, eager_y = start.clone(), start.clone()
    rows = torch.linspace(0, len(inputs) - 1, 3 * _ROWS).long().view(_ROWS, 3).T
    distances = []
    for step, batch in enumerate(rows):
        x, labels = native_inputs(inputs[batch]), targets[batch].contiguous()
        eager_loss, expected = eager_gradient(module, loss, layout, eager_y, x, labels, Key(step))
        keep = _dropout_mask(network, Key(step))
        native_loss, gradient = network.gradient(eager_y, x, labels, torch.arange(_ROWS), keep=keep)
        if not abs(native_loss - eager_loss) <= 1e-4 * (1 + abs(eager_loss)):
            raise NotEligible(f"its native loss is {native_loss:.6g}, its eager loss {eager_loss:.6g}")
        distances.append(_distance(gradient, expected))
        keep = None if keep is None else keep[None]
        network.train(native_y, x, labels, torch.arange(_ROWS)[None], AffineStep(_LR), keep=keep)
        eager_y = eager_y - _LR * expected
    change = _distance(native_y - start, eager_y - start)
    if not (sorted(distances)[1] < 1e-4 and max(*distances, change) < 2e-2):
        raise NotEligible(f"its native gradient differs by {max(distances):.2g}, three steps by {change:.2g}")


def _dropout_mask(network: Network, key: Key) -> torch.Tensor | None:
    """Return the factors that eager dropout draws for a batch."""
    if not network.dropout_numbers:
        return None
    generator, keep = torch.Generator(), torch.empty(_ROWS * network.dropout_numbers)
    random_state.seed_generator(generator, key)
    network.draw(_ROWS, generator, keep)
    return keep


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
