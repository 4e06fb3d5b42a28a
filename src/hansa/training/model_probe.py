"""Probe a model before training: what it returns, which buffers it changes, and how its loss reduces over rows."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from hansa.training.batch_sources import Batch, convert_batch, count_rows, describe_shapes, take_rows
from hansa.training.losses import LossFunction
from hansa.training.mixed_precision import autocast_caller

log = logging.getLogger("hansa")

_ROWS = 12
_SAMPLE_BYTES = 1 << 27  # of intermediate results of the rows on which losses are compared
_MAX_SEARCHED = 100_000  # rows whose targets are searched for special values


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
class LossSample:
    """A loss of some rows, and of the two parts of several divisions of them.

    Each part is its rows and its loss, NaN if the loss does not take it. ``tolerance`` is that of a comparison.
    """

    output: Any
    target: Any
    loss: float
    divisions: tuple[tuple[tuple[torch.Tensor, float], ...], ...]
    tolerance: float


@dataclass(frozen=True, slots=True, eq=False)
class ProbeResult:
    """Output, target and loss of one batch, losses of parts of batches, gradients of the loss with respect to the
    logits with the targets, changed buffers, and the bytes of the largest intermediate results of a row."""

    output: Any
    target: Any
    loss: torch.Tensor
    samples: tuple[LossSample, ...]
    logit_gradients: tuple[tuple[torch.Tensor, Any], ...]
    changed_buffers: frozenset[str]
    bytes_per_row: int


def probe_model(
    make: Callable[[], nn.Module],
    loss: LossFunction,
    layout: Layout,
    dtype: torch.dtype,
    batch: Batch,
    others: Sequence[Batch] | None = None,
    autocast: str | None = None,
) -> ProbeResult | None:
    """Compute the gradient of one batch, then evaluate it.

    With ``others``, the loss is sampled on that batch and on these, and differentiated with respect to the logits.
    With ``autocast`` the model is called in mixed precision.

    Raises if the model or the loss cannot take the batch. Returns None for a model that fails only in evaluation: its
    evaluation will report that.
    """
    convert = partial(convert_batch, dtype=dtype, device=torch.device("cpu"), channels_last=layout.channels_last)
    count = count_rows(batch.targets)
    x, target = convert(_take_batch(batch, torch.linspace(0, count - 1, min(_ROWS, count)).long()))
    with random_state.preserve_rng():
        random_state.seed_all(Key(0), torch.device("cpu"))
        module = convert_module(make(), dtype, keep=layout.own_dtypes)
        parameters = layout.bind(module, layout.pack(module, dtype)[0])
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        call = autocast_caller(model_caller(module, x), autocast, dtype, torch.device("cpu"))
        with torch.enable_grad():
            value = _compute_loss(loss, _compute_output(call, x, module), x, target)
            if value.ndim == 0:
                torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        changed = {name for name, buffer in module.named_buffers() if not bitwise_equal(buffer, before.get(name))}
        module.eval()
        try:
            with torch.no_grad(), _measure_memory(module) as largest:
                output = call(x)
                value = loss(output, target)
            size = max(largest[0], 4 * _byte_count(output))
            samples: list[LossSample] = []
            gradients: list[tuple[torch.Tensor, Any]] = []
            if value.ndim == 0 and others is not None:
                most = max(4, _SAMPLE_BYTES * count_rows(target) // max(1, size))
                batches = [_first_rows(batch, most) for batch in (Batch(x, target), *map(convert, others))]
                gradients = [pair for each in batches if (pair := _logit_gradient(call, loss, *each)) is not None]
                samples = _sample_loss(call, loss, batches)
                _perturb(parameters)
                samples += _sample_loss(call, loss, batches)
        except Exception as error:
            log.debug("%s cannot be evaluated: %s", type(module).__name__, error)
            return None
    return ProbeResult(
        output,
        target,
        value,
        tuple(samples),
        tuple(gradients),
        frozenset(changed),
        -(-size // max(1, count_rows(target))),
    )


def _take_batch(batch: Batch, rows: torch.Tensor) -> Batch:
    return Batch(take_rows(batch.inputs, rows), take_rows(batch.targets, rows))


def _first_rows(batch: Batch, most: int) -> Batch:
    return batch if count_rows(batch.targets) <= most else _take_batch(batch, torch.arange(most))


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


@torch.no_grad()
def _perturb(parameters: Iterable[torch.Tensor]) -> None:
    """Move parameters at random, so that no output is constant because a layer starts at zero."""
    for parameter in parameters:
        scale = float(parameter.double().std()) if parameter.numel() > 1 else 0.0
        parameter.add_(torch.randn_like(parameter), alpha=0.5 * scale if scale > 0 else 0.1)


@torch.no_grad()
def _sample_loss(call: Callable[[Any], Any], loss: LossFunction, batches: Sequence[Batch]) -> list[LossSample]:
    samples = []
    for x, target in batches:
        try:
            count, output = count_rows(target), call(x)
            value, scores, labels, tolerance = _precise_loss(loss, output, target, count)
        except Exception as error:
            log.debug("the loss does not take some rows: %s", error)
            continue
        numbers, order = torch.arange(count), torch.argsort(_row_values(target), stable=True)
        masks = (numbers % 3 == 2, numbers < 1, numbers < count // 2)
        divisions = []
        for place, mask in enumerate(masks):
            rows = [order[mask] if place else numbers[mask], order[~mask] if place else numbers[~mask]]
            if min(map(len, rows)):
                parts = [(some, _part_loss(call, loss, x, scores, labels, some)) for some in rows]
                divisions.append(tuple(parts))
        samples.append(LossSample(output, target, value, tuple(divisions), tolerance))
    return samples


def _precise_loss(loss: LossFunction, output: Any, target: Any, count: int) -> tuple[float, Any, Any, float]:
    """Return the loss of a batch, in float64 if it takes that, with output and target as it took them."""
    if has_rows(output, count):
        wide = trees.tree_map(_widen, output), trees.tree_map(_widen, target)
        try:
            value = loss(*wide)
            if value.dtype == torch.float64:
                return float(value), *wide, 1e-9
        except Exception as error:
            log.debug("the loss does not take float64: %s", error)
    return float(loss(output, target)), output, target, 1e-5


def _widen(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _part_loss(
    call: Callable[[Any], Any], loss: LossFunction, x: Any, output: Any, target: Any, rows: torch.Tensor
) -> float:
    selected = select_output_rows(output, rows, count_rows(target), lambda: call(take_rows(x, rows)))
    try:
        return float(loss(selected, take_rows(target, rows)))
    except Exception:  # a loss that needs more rows
        return math.nan


def _row_values(target: Any) -> torch.Tensor:
    """Return a number per row, such as its label, to divide rows by."""
    leaf: torch.Tensor = trees.tree_leaves(target)[0]
    return leaf.double().flatten(1).sum(1) if leaf.ndim > 1 else leaf.double()


def _logit_gradient(
    call: Callable[[Any], Any], loss: LossFunction, x: Any, target: Any
) -> tuple[torch.Tensor, Any] | None:
    """Return the gradient of the loss with respect to the output, or to its ``logits``, and the target; None if there
    is no gradient."""
    with torch.enable_grad():
        output = call(x)
        logits = getattr(output, "logits", output)
        if not isinstance(logits, torch.Tensor) or not logits.requires_grad:
            return None
        try:
            (gradient,) = torch.autograd.grad(loss(output, target), [logits], allow_unused=True)
        except Exception as error:
            log.debug("the loss has no gradient for some rows: %s", error)
            return None
    return None if gradient is None else (gradient.detach(), target)


def diverse_rows(targets: Any, max_rows: int) -> torch.Tensor | None:
    """Return rows with the smallest, the largest, the most common and the rarest targets; None if there are none.

    >>> diverse_rows(torch.tensor([5, 5, 5, 1, 5, 9]), 3).tolist()
    [3, 5, 0]
    """
    leaves = trees.tree_leaves(targets)
    if not leaves or not all(isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in leaves) or not len(leaves[0]):
        return None
    step = max(1, len(leaves[0]) // _MAX_SEARCHED)
    chosen: dict[int, None] = {}
    for leaf in leaves:
        searched = leaf[::step].flatten(1) if leaf.ndim > 1 else leaf[::step, None]
        if not searched.numel():
            continue
        values, counts = torch.unique(searched[:, 0], return_counts=True)
        order = torch.argsort(counts, stable=True)[: max_rows // 2].tolist()
        rows = [searched.amin(1).argmin(), searched.amax(1).argmax()]
        rows += [(searched[:, 0] == values[i]).nonzero()[0, 0] for i in (int(counts.argmax()), *order)]
        chosen.update(dict.fromkeys(int(row) * step for row in rows))
    spread = torch.linspace(0, len(leaves[0]) - 1, min(max_rows, len(leaves[0]))).long().tolist()
    chosen.update(dict.fromkeys(spread))
    return torch.tensor(list(chosen)[:max_rows])


def has_rows(output: Any, count: int) -> bool:
    """Return whether an output consists of tensors with one entry per row."""
    leaves = trees.tree_leaves(output)
    return all(isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == count for leaf in leaves)


def select_output_rows(output: Any, rows: torch.Tensor, count: int, recompute: Callable[[], Any]) -> Any:
    """Return the output of some of a batch's ``count`` rows; an output without rows is recomputed."""
    leaves, structure = trees.tree_flatten(output)
    if not has_rows(output, count):
        return recompute()
    return trees.tree_unflatten([leaf[rows] for leaf in leaves], structure)


def bitwise_equal(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    """Return whether two tensors have equal bits: equal NaNs are equal, -0 and 0 are not."""
    if b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(_as_bytes(a), _as_bytes(b)))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.detach()
