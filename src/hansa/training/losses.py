"""Losses with class weights, row weights and ignored labels.

Each is a weighted mean L = sum_i w_i l_i / sum_i w_i over the entries of a batch. The weight w_i is the weight of the
entry's class times that of its row, and 0 for an ignored label. The test loss is this quotient over all test rows, not
a mean of the batches' means.

>>> loss = cross_entropy(class_weights=[1.0, 3.0])
>>> float(loss(torch.zeros(2, 2), torch.tensor([0, 1])))  # log 2 for any weights
0.6931471824645996
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch

from hansa.core.errors import HansaError, check_decay, check_non_negative, check_positive, invalid_argument

LossFunction: TypeAlias = "Callable[[Any, Any], torch.Tensor]"
"""A loss of (output, target), as users write it."""

IGNORED = -100
"""The label that torch ignores by default."""

__all__ = ["Loss", "WeightedTargets", "bce", "cross_entropy", "huber", "l1", "mse", "nll"]


class WeightedTargets(NamedTuple):
    """Targets with a weight per row.

    Args:
        target: The targets.
        weight: The weight of each row in the loss, [rows].
    """

    target: Any
    weight: torch.Tensor


def strip_weights(targets: Any) -> Any:
    """Return the targets without row weights."""
    return targets.target if isinstance(targets, WeightedTargets) else targets


class Loss(Protocol):
    """A loss that is a weighted mean of terms."""

    @abstractmethod
    def terms(self, output: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of every entry, rows first, and its weight, in the same shape."""
        ...

    def sums(self, output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sum w_i l_i and sum w_i over a batch, with row weights if targets are `WeightedTargets`."""
        losses, weights = self.terms(output, strip_weights(target))
        if isinstance(target, WeightedTargets):
            weights = weights * as_column(target.weight, weights)
        return (losses * weights).sum(), weights.sum()

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        total, weight = self.sums(output, target)
        return total / weight.clamp(min=torch.finfo(weight.dtype).tiny)  # 0 if all are ignored


class _Elementwise(Loss, Protocol):
    """A loss that compares outputs and targets entry by entry."""

    def terms(self, output: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = _logits(output)
        if output.shape != target.shape and output.numel() == target.numel():
            output = output.reshape(target.shape)  # a column against a vector: one output per row
        losses = self.entry_losses(output, target.to(output.dtype))
        return losses, torch.ones_like(losses)

    @abstractmethod
    def entry_losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class mse(_Elementwise):
    """Squared error, (output - target)^2."""

    def entry_losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target) ** 2


@dataclass(frozen=True, slots=True)
class l1(_Elementwise):
    """Absolute error, |output - target|."""

    def entry_losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).abs()


@dataclass(frozen=True, slots=True)
class huber(_Elementwise):
    """Huber loss of d = output - target: d^2 / 2 for |d| <= delta, otherwise delta (|d| - delta / 2).

    Args:
        delta: Where the loss changes from quadratic to linear.
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        check_positive("huber", "delta", self.delta)

    def entry_losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.huber_loss(output, target, reduction="none", delta=self.delta)


@dataclass(frozen=True, slots=True)
class bce(_Elementwise):
    """Binary cross-entropy of logits.

    Args:
        pos_weight: Factor of the loss of targets that are 1, as in torch.
    """

    pos_weight: float = 1.0

    def __post_init__(self) -> None:
        check_positive("bce", "pos_weight", self.pos_weight)

    def entry_losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weight = torch.tensor(self.pos_weight, dtype=output.dtype, device=output.device)
        return torch.nn.functional.binary_cross_entropy_with_logits(output, target, reduction="none", pos_weight=weight)


@dataclass(frozen=True, slots=True)
class cross_entropy(Loss):
    """Cross-entropy -log softmax(output)[target], weighted by class.

    An output with an attribute ``logits`` is replaced by it.

    Args:
        class_weights: One weight per class; default 1.
        ignore_index: The label that is ignored.
        label_smoothing: Smoothing as in torch.
        class_axis: "second" for outputs [B, C, ...] as in torch, "last" for [B, ..., C] as of language models; "auto"
            decides by the shapes, "second" if both fit. Targets are [B, ...].
    """

    class_weights: Sequence[float] | None = None
    ignore_index: int = IGNORED
    label_smoothing: float = 0.0
    class_axis: Literal["auto", "second", "last"] = "auto"

    def __post_init__(self) -> None:
        _check_weights("cross_entropy", self)
        check_decay("cross_entropy", "label_smoothing", self.label_smoothing)
        if self.class_axis not in ("auto", "second", "last"):
            raise invalid_argument("cross_entropy", "class_axis", self.class_axis, "'auto', 'second' or 'last'")

    def terms(self, output: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = _classes_second(_logits(output), target, self.class_axis)
        losses = torch.nn.functional.cross_entropy(
            scores, target, reduction="none", ignore_index=self.ignore_index, label_smoothing=self.label_smoothing
        )
        return losses, label_weights(self.class_weights, target, self.ignore_index, losses)

    def sums(self, output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sum w_i l_i and sum w_i; smoothing spreads each label over the weighted classes, as in torch."""
        if self.class_weights is None or not self.label_smoothing:
            return Loss.sums(self, output, target)
        labels = strip_weights(target)
        scores = _classes_second(_logits(output), labels, self.class_axis)
        weight = torch.tensor(self.class_weights, dtype=scores.dtype, device=scores.device)
        losses = torch.nn.functional.cross_entropy(
            scores, labels, weight, None, self.ignore_index, None, "none", self.label_smoothing
        )
        return row_weighted(losses, label_weights(self.class_weights, labels, self.ignore_index, losses), target)


@dataclass(frozen=True, slots=True)
class nll(Loss):
    """Negative log-likelihood -output[target] of log-probabilities, weighted by class.

    Args:
        class_weights: One weight per class; default 1.
        ignore_index: The label that is ignored.
        class_axis: As in `cross_entropy`.
    """

    class_weights: Sequence[float] | None = None
    ignore_index: int = IGNORED
    class_axis: Literal["auto", "second", "last"] = "auto"

    def __post_init__(self) -> None:
        _check_weights("nll", self)

    def terms(self, output: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = _classes_second(_logits(output), target, self.class_axis)
        losses = torch.nn.functional.nll_loss(scores, target, reduction="none", ignore_index=self.ignore_index)
        return losses, label_weights(self.class_weights, target, self.ignore_index, losses)


def row_weighted(losses: torch.Tensor, weights: torch.Tensor, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of losses and of weights, both times the rows' weights."""
    if not isinstance(target, WeightedTargets):
        return losses.sum(), weights.sum()
    rows = as_column(target.weight, losses)
    return (losses * rows).sum(), (weights * rows).sum()


def as_column(weight: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return weight.to(like).view(-1, *(1,) * (like.ndim - 1))


def _logits(output: Any) -> torch.Tensor:
    logits: torch.Tensor = getattr(output, "logits", output)
    return logits


def _classes_second(output: torch.Tensor, target: torch.Tensor, class_axis: str) -> torch.Tensor:
    second = output.ndim == target.ndim + 1 and output.shape[:1] + output.shape[2:] == target.shape
    last = output.ndim == target.ndim + 1 and output.shape[:-1] == target.shape
    if last and (class_axis == "last" or (class_axis == "auto" and not second)):
        return output.movedim(-1, 1)
    return output


def _check_weights(part: str, loss: Any) -> None:
    if loss.class_weights is None:
        return
    if isinstance(loss.class_weights, str) or not len(loss.class_weights):
        raise invalid_argument(part, "class_weights", loss.class_weights, "one number per class")
    for weight in loss.class_weights:
        check_non_negative(part, "class_weights", weight)
    object.__setattr__(loss, "class_weights", tuple(map(float, loss.class_weights)))


def label_weights(
    weights: Sequence[float] | None, target: torch.Tensor, ignore_index: int, losses: torch.Tensor
) -> torch.Tensor:
    counted = target != ignore_index
    if weights is None:
        return counted.to(losses.dtype)
    table = torch.tensor(weights, dtype=losses.dtype, device=losses.device)
    if bool((target[counted] >= len(table)).any()):
        raise HansaError(f"class_weights has {len(table)} classes, but there is a target {int(target.max())}.")
    return table[target.clamp(min=0)] * counted
