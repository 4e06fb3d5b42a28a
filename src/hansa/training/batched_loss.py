"""Loss and gradient of several clients' models in one program: ``torch.func.vmap`` over stacked parameters.

The bits of a client's result must not depend on the clients beside it, nor on their number. A single model may take
another kernel than several, so there are always at least two. Torch computes the last numbers of a tensor one by one,
with other functions (exp, tanh, ...) than whole vectors of numbers: so the number of models is a multiple of which no
tensor leaves a rest, see `client_batching`. Missing models are copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as trees

from hansa.core.devices import copy_to_device
from hansa.core.keys import Key
from hansa.core.vectors.layout import Layout
from hansa.training import random_state
from hansa.training.batch_sources import Batch
from hansa.training.losses import LossFunction

MIN_MODELS = 2
"""The fewest models in one program."""

_ALIGNMENT = 64  # numbers: rows of a matrix of models start at such multiples, so that all are computed alike


class DropoutShape(NamedTuple):
    """One call of dropout in a step: the shape and dtype of its input, and the probability of a zero."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    p: float

    def draw(self, generator: torch.Generator, out: torch.Tensor) -> None:
        """Draw the factors of one batch, the numbers that eager dropout draws from a generator in this state."""
        out.bernoulli_(1 - self.p, generator=generator)
        if self.p < 1:
            out.div_(1 - self.p)


class _LossModule(nn.Module):
    """A model and its loss as one module, so that its parameters can be replaced in a call."""

    def __init__(self, model: nn.Module, call: Callable[[Any], Any], loss: LossFunction) -> None:
        super().__init__()
        self.model = model
        self._functions = call, loss  # in a tuple, so that modules among them are not registered a second time

    def forward(self, inputs: Any, targets: Any) -> torch.Tensor:
        call, loss = self._functions
        return loss(call(inputs), targets)


class _RecordDropout(TorchFunctionMode):
    """Records the calls of dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[DropoutShape] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.dropout and (drop := _dropout_arguments(*args, **(kwargs or {}))) is not None:
            self.calls.append(DropoutShape(tuple(drop[0].shape), drop[0].dtype, drop[1]))
        return func(*args, **(kwargs or {}))


class _ReplaceDropout(TorchFunctionMode):
    """Multiplies by given factors where dropout would draw them."""

    def __init__(self, factors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._factors = iter(factors)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.dropout and (drop := _dropout_arguments(*args, **(kwargs or {}))) is not None:
            return drop[0] * next(self._factors)
        return func(*args, **(kwargs or {}))


def _dropout_arguments(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[torch.Tensor, float] | None:
    return (input, p) if training and p > 0 else None


class BatchedLoss:
    """Losses and gradients of several models on a batch each.

    Args:
        module: The module in training mode; its parameters are replaced in every call.
        call: Calls the module with a batch.
        loss: The loss.
        layout: The positions of its parameters in a flat vector.
        composed: Compute gradients model by model inside of the program (``vmap(grad(...))``). Torch then replaces
            fused operations that it cannot compute for several models, such as cells of a GRU, by elementary ones. It
            costs more for other models.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[[Any], Any],
        loss: LossFunction,
        layout: Layout,
        *,
        composed: bool = False,
    ) -> None:
        self._module = _LossModule(module, call, loss)
        self._names = [f"model.{entry.name}" for entry in layout.parameters]
        self.layout, self.composed = layout, composed
        function: Callable[..., Any] = grad_and_value(self._loss) if composed else self._loss
        self._program: Callable[..., Any] = vmap(function, randomness="error")

    def _loss(self, parameters: dict[str, torch.Tensor], inputs: Any, targets: Any, *factors: Any) -> torch.Tensor:
        with _ReplaceDropout(factors) if factors else nullcontext():
            loss: torch.Tensor = functional_call(self._module, parameters, (inputs, targets))
        return loss

    def gradients(
        self, parameters: Sequence[torch.Tensor], batch: Batch, factors: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the losses, [models], and the gradients, one [models, ...] per parameter.

        Args:
            parameters: The parameters of all models, [models, ...] each, as `stacked_views` returns them.
            batch: One batch per model: every tensor is [models, rows, ...].
            factors: The factors of each call of dropout, [models, ...]; see `DropoutShape`.
        """
        if self.composed:
            by_name = {name: each.detach() for name, each in zip(self._names, parameters, strict=True)}
            composed, values = self._program(by_name, *batch, *factors)
            return values.detach(), [composed[name].detach() for name in self._names]
        leaves = [parameter.detach().requires_grad_() for parameter in parameters]
        with torch.enable_grad():  # the gradient of a sum over models, whose terms share no parameter
            losses = self._program(dict(zip(self._names, leaves, strict=True)), *batch, *factors)
            gradients = torch.autograd.grad(
                losses, leaves, torch.ones_like(losses), allow_unused=True, materialize_grads=True
            )
        return losses.detach(), list(gradients)


def stacked_rows(count: int, dim: int, like: torch.Tensor) -> torch.Tensor:
    """Return zeros for ``count`` vectors of length ``dim``, a row each; rows may be longer than that.

    >>> stacked_rows(3, 70, torch.zeros(1)).shape
    torch.Size([3, 128])
    """
    return like.new_zeros(count, -(-dim // _ALIGNMENT) * _ALIGNMENT)


def stacked_views(layout: Layout, rows: torch.Tensor) -> list[torch.Tensor]:
    """Return the parameters in a matrix of models, one view [models, ...] each.

    >>> layout = Layout.of(nn.Linear(3, 2))
    >>> [tuple(view.shape) for view in stacked_views(layout, stacked_rows(5, layout.dim, torch.zeros(1)))]
    [(5, 2, 3), (5, 2)]
    """
    first = [entry.view(rows[0]) for entry in layout.parameters]
    return [
        rows.as_strided((len(rows), *view.shape), (rows.stride(0), *view.stride()), view.storage_offset())
        for view in first
    ]


def record_dropout(step: Callable[[], Any]) -> list[DropoutShape]:
    """Return the calls of dropout in a step."""
    record = _RecordDropout()
    with record:
        step()
    return record.calls


def draw_factors(
    calls: Sequence[DropoutShape], keys: Sequence[Key], generator: torch.Generator, device: torch.device
) -> list[torch.Tensor]:
    """Return the factors of each call of dropout, [models, ...], drawn with one key per model.

    A key gives the numbers that a step on that model alone would draw after `random_state.seed_all`.
    """
    factors = [torch.empty((len(keys), *call.shape), dtype=call.dtype) for call in calls]
    for place, key in enumerate(keys):
        random_state.seed_generator(generator, key)
        for call, out in zip(calls, factors, strict=True):
            call.draw(generator, out[place])
    return [copy_to_device(each, device) for each in factors]


def stack_batches(batches: Sequence[Batch]) -> Batch:
    """Return batches of equal shapes as one, each tensor with a new first axis."""
    return Batch(*(trees.tree_map(lambda *leaves: torch.stack(leaves), *part) for part in zip(*batches, strict=True)))
