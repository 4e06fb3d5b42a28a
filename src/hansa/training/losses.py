"""Losses with class weights, row weights and ignored labels, and the sums of which a test loss is the quotient.

Each is a weighted mean L = sum_i w_i l_i / sum_i w_i over the entries of a batch. The weight w_i is the weight of the
entry's class times that of its row, and 0 for an ignored label. The test loss is this quotient over all test rows, not
a mean of the batches' means.

The sums of torch's losses for classes and for numbers are known too (`torch_form`), and those of a loss for which
``Task(reduction=...)`` says what it is. Any other loss is called once with the outputs of all test rows.

>>> loss = cross_entropy(class_weights=[1.0, 3.0])
>>> float(loss(torch.zeros(2, 2), torch.tensor([0, 1])))  # log 2 for any weights
0.6931471824645996
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch

from hansa.core.bounds import Checked, bound, one_of
from hansa.core.errors import HansaError, check_decay, check_non_negative, check_positive, invalid_argument
from hansa.training.batch_sources import count_rows

LossFunction: TypeAlias = "Callable[[Any, Any], torch.Tensor]"
"""A loss of (output, target), as users write it."""

IGNORED = -100
"""The label that torch ignores by default."""

ClassAxis: TypeAlias = Literal["auto", "second", "last"]
Reduction: TypeAlias = Literal["mean", "sum", "labels"]
"""What a loss of one batch is: a mean over its rows, a sum over its rows, or a mean over its labels that count."""

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


class _Elementwise(Loss):
    """A loss that compares outputs and targets entry by entry."""

    def terms(self, output: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = logits_of(output)
        if output.shape != target.shape and output.numel() == target.numel():
            output = output.reshape(target.shape)  # a column against a vector: one output per row
        losses = self.entry_losses(output, target.to(output.dtype))
        return losses, torch.ones_like(losses)

    @abstractmethod
    def entry_losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor: ...


def _class_weights(part: str, argument: str, value: Any) -> tuple[float, ...]:
    if isinstance(value, str) or not len(value):
        raise invalid_argument(part, argument, value, "one number per class")
    for weight in value:
        check_non_negative(part, argument, weight)
    return tuple(map(float, value))


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
class huber(Checked, _Elementwise):
    """Huber loss of d = output - target: d^2 / 2 for |d| <= delta, otherwise delta (|d| - delta / 2).

    Args:
        delta: Where the loss changes from quadratic to linear.
    """

    delta: float = field(default=1.0, metadata=bound(check_positive))

    def entry_losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.huber_loss(output, target, reduction="none", delta=self.delta)


@dataclass(frozen=True, slots=True)
class bce(Checked, _Elementwise):
    """Binary cross-entropy of logits.

    Args:
        pos_weight: Factor of the loss of targets that are 1, as in torch.
    """

    pos_weight: float = field(default=1.0, metadata=bound(check_positive))

    def entry_losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weight = torch.tensor(self.pos_weight, dtype=output.dtype, device=output.device)
        return torch.nn.functional.binary_cross_entropy_with_logits(output, target, reduction="none", pos_weight=weight)


@dataclass(frozen=True, slots=True)
class cross_entropy(Checked, Loss):
    """Cross-entropy -log softmax(output)[target], weighted by class.

    An output with an attribute ``logits`` is replaced by it.

    Args:
        class_weights: One weight per class; default 1.
        ignore_index: The label that is ignored.
        label_smoothing: Smoothing as in torch.
        class_axis: "second" for outputs [B, C, ...] as in torch, "last" for [B, ..., C] as of language models; "auto"
            decides by the shapes, "second" if both fit. Targets are [B, ...].
    """

    class_weights: Sequence[float] | None = field(default=None, metadata=bound(_class_weights))
    ignore_index: int = IGNORED
    label_smoothing: float = field(default=0.0, metadata=bound(check_decay))
    class_axis: ClassAxis = field(default="auto", metadata=bound(one_of, "auto", "second", "last"))

    def terms(self, output: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = _classes_second(logits_of(output), target, self.class_axis)
        losses = torch.nn.functional.cross_entropy(
            scores, target, reduction="none", ignore_index=self.ignore_index, label_smoothing=self.label_smoothing
        )
        return losses, label_weights(self.class_weights, target, self.ignore_index, losses)

    def sums(self, output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sum w_i l_i and sum w_i; smoothing spreads each label over the weighted classes, as in torch."""
        if self.class_weights is None or not self.label_smoothing:
            return Loss.sums(self, output, target)
        labels = strip_weights(target)
        scores = _classes_second(logits_of(output), labels, self.class_axis)
        weight = torch.tensor(self.class_weights, dtype=scores.dtype, device=scores.device)
        losses = torch.nn.functional.cross_entropy(
            scores, labels, weight, None, self.ignore_index, None, "none", self.label_smoothing
        )
        return row_weighted(losses, label_weights(self.class_weights, labels, self.ignore_index, losses), target)


@dataclass(frozen=True, slots=True)
class nll(Checked, Loss):
    """Negative log-likelihood -output[target] of log-probabilities, weighted by class.

    Args:
        class_weights: One weight per class; default 1.
        ignore_index: The label that is ignored.
        class_axis: As in `cross_entropy`.
    """

    class_weights: Sequence[float] | None = field(default=None, metadata=bound(_class_weights))
    ignore_index: int = IGNORED
    class_axis: ClassAxis = field(default="auto", metadata=bound(one_of, "auto", "second", "last"))

    def terms(self, output: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = _classes_second(logits_of(output), target, self.class_axis)
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


def logits_of(output: Any) -> torch.Tensor:
    """Return a model's output, or its ``logits`` if it has some."""
    logits: torch.Tensor = getattr(output, "logits", output)
    return logits


def _classes_second(output: torch.Tensor, target: torch.Tensor, class_axis: str) -> torch.Tensor:
    second_fits = output.ndim == target.ndim + 1 and output.shape[:1] + output.shape[2:] == target.shape
    last_fits = output.ndim == target.ndim + 1 and output.shape[:-1] == target.shape
    if last_fits and (class_axis == "last" or (class_axis == "auto" and not second_fits)):
        return output.movedim(-1, 1)
    return output


def label_weights(
    weights: Sequence[float] | torch.Tensor | None, target: torch.Tensor, ignored: int, losses: torch.Tensor
) -> torch.Tensor:
    mask = target != ignored
    if weights is None:
        return mask.to(losses.dtype)
    table = torch.as_tensor(weights, dtype=losses.dtype, device=losses.device)
    if bool((target[mask] >= len(table)).any()):
        raise HansaError(f"class_weights has {len(table)} classes, but there is a target {int(target.max())}.")
    return table[target.clamp(min=0)] * mask


@cache
def _torch_losses() -> dict[Any, Callable[..., torch.Tensor]]:
    """Return torch's losses of class numbers, which average over the labels that are not ignored, and those that
    average over rows of one size. Commands that only look load no torch."""
    nn, functional = torch.nn, torch.nn.functional
    return {
        nn.CrossEntropyLoss: functional.cross_entropy,
        nn.NLLLoss: functional.nll_loss,
        nn.MSELoss: functional.mse_loss,
        nn.L1Loss: functional.l1_loss,
        nn.SmoothL1Loss: functional.smooth_l1_loss,
        nn.HuberLoss: functional.huber_loss,
        nn.BCELoss: functional.binary_cross_entropy,
        nn.BCEWithLogitsLoss: functional.binary_cross_entropy_with_logits,
        nn.PoissonNLLLoss: functional.poisson_nll_loss,
        nn.KLDivLoss: functional.kl_div,
        nn.SoftMarginLoss: functional.soft_margin_loss,
        nn.HingeEmbeddingLoss: functional.hinge_embedding_loss,
        nn.MultiMarginLoss: functional.multi_margin_loss,
        nn.MultiLabelMarginLoss: functional.multilabel_margin_loss,
        nn.MultiLabelSoftMarginLoss: functional.multilabel_soft_margin_loss,
    }


@dataclass(frozen=True, slots=True, eq=False)
class FunctionLoss(Loss):
    """A loss that is a function: one of torch's, or a user's of which the task states the reduction.

    Args:
        function: The function. With row weights, a user's returns one value per row.
        settings: The settings of torch's function without the reduction; None for a user's.
        reduction: "mean", "sum" or "batchmean" as in torch, or "labels" for the mean over labels that count.
        ignored: The label that does not count.
    """

    function: Callable[..., torch.Tensor]
    settings: dict[str, Any] | None
    reduction: str
    ignored: int = IGNORED

    @property
    def of_classes(self) -> bool:
        """Whether it is one of torch's whose targets are class numbers."""
        return self.function in (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss)

    @property
    def class_weights(self) -> torch.Tensor | None:
        return None if self.settings is None else self.settings.get("weight")

    @property
    def by_labels(self) -> bool:
        """Whether it is a mean over labels that count."""
        return self.reduction == "labels" or (self.reduction == "mean" and self.of_classes)

    def terms(self, output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of every entry, class weights included, and its share of the divisor."""
        function, rows = self.function, count_rows(target)
        if self.settings is not None:
            function = partial(self.function, reduction="none", **self.settings)
            if getattr(output, "shape", None) == (rows, 1) and target.ndim == 1:
                output = output[:, 0]  # a column against a vector: one output per row
        losses = function(output, target)
        if not isinstance(losses, torch.Tensor) or losses.ndim < 1 or len(losses) != rows:
            name = getattr(self.function, "__name__", type(self.function).__name__)
            returned = f"shape {list(losses.shape)}" if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise HansaError(
                f"{name} returned {returned} for {rows} weighted rows: expected one value per row, as with "
                "functools.partial(loss, reduction='none'), which Hansa multiplies by the weights."
            )
        if self.reduction != "mean":
            losses = losses.flatten(1).sum(1) if losses.ndim > 1 else losses
        elif self.of_classes and not target.is_floating_point():
            return losses, label_weights(self.class_weights, target, self.ignored, losses)
        return losses, torch.ones_like(losses)

    def sums(self, output: Any, target: Any) -> tuple[Any, Any]:
        """Return a sum of losses and its divisor. Of a summed loss, the divisor is the number of rows."""
        if isinstance(target, WeightedTargets):
            return row_weighted(*self.terms(output, target.target), target)
        if not self.by_labels or (self.of_classes and target.is_floating_point()):  # class probabilities: by rows
            value, rows = float(self(output, target)), float(count_rows(target))
            return (value if self.reduction == "sum" else value * rows), rows
        mask, weights = counted_labels(target, self.ignored), self.class_weights
        labels = float(mask.sum())
        if self.settings is None or (weights is None and labels == target.numel()):
            return (float(self(output, target)) * labels, labels) if labels else (0.0, 0.0)
        divisor = labels if weights is None else float(weights.to(output.device)[target[mask]].double().sum())
        return float(self.function(output, target, reduction="sum", **self.settings)), divisor

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        if not isinstance(target, WeightedTargets):
            settings = {} if self.settings is None else {"reduction": self.reduction, **self.settings}
            return self.function(output, target, **settings)
        total, weight = row_weighted(*self.terms(output, target.target), target)
        return total if self.reduction == "sum" else total / weight.clamp(min=torch.finfo(weight.dtype).tiny)


def torch_form(loss: Any) -> FunctionLoss | None:
    """Return a loss that is torch's: a function, a partial of one with keywords, or an object of torch's class itself;
    None for any other.

    >>> torch_form(torch.nn.CrossEntropyLoss(label_smoothing=0.1)).settings["label_smoothing"]
    0.1
    """
    function, settings = loss, {}
    if isinstance(loss, FunctionLoss):
        return None if loss.settings is None else loss
    if isinstance(loss, partial) and not loss.args:
        function, settings = loss.func, dict(loss.keywords)
    elif type(loss) in _torch_losses():
        function = _torch_losses()[type(loss)]
        settings = {
            name: value for name, value in vars(loss).items() if not name.startswith("_") and name != "training"
        }
        settings |= dict(loss.named_buffers())
    reduction = settings.pop("reduction", "mean")
    if function not in _torch_losses().values() or settings.keys() & {"size_average", "reduce"} or reduction == "none":
        return None
    return FunctionLoss(function, settings, str(reduction), int(settings.get("ignore_index", IGNORED)))


def known_loss(loss: Any, reduction: Reduction | None, ignored: int | None) -> Loss | None:
    """Return a loss with its sums over a batch, of which the test loss is the quotient: Hansa's, torch's, and any other
    if the task states its reduction; None for a loss that is given all rows at once.

    >>> weighted = WeightedTargets(torch.ones(2), torch.ones(2))
    >>> float(known_loss(torch.nn.functional.l1_loss, None, None)(torch.zeros(2), weighted))
    1.0
    """
    if hasattr(loss, "sums"):
        return loss  # type: ignore[no-any-return]
    form = torch_form(loss)
    if form is not None or reduction is None:
        return form
    return FunctionLoss(loss, None, reduction, IGNORED if ignored is None else ignored)


def is_row_mean(loss: Loss | None, targets: Any, ignored: int | None) -> bool:
    """Return whether a loss is surely the mean or the sum of its rows, given all targets."""
    if isinstance(targets, WeightedTargets) or not isinstance(loss, (FunctionLoss, cross_entropy, nll)):
        return isinstance(loss, _Elementwise) and not isinstance(targets, WeightedTargets)
    if isinstance(loss, FunctionLoss) and not loss.by_labels:
        return True
    if loss.class_weights is not None or not isinstance(targets, torch.Tensor):
        return False
    return targets.is_floating_point() or bool(counted_labels(targets, ignored).all())


def ignored_label(loss: Any) -> int | None:
    """Return the label that a loss is set to ignore: its ``ignore_index``; None if it has none.

    >>> ignored_label(partial(torch.nn.functional.cross_entropy, ignore_index=0)), ignored_label(mse())
    (0, None)
    """
    bound = loss.keywords.get("ignore_index") if isinstance(loss, partial) else None
    ignored = getattr(loss, "ignore_index", bound)
    return ignored if isinstance(ignored, int) else None


def check_classes(loss: LossFunction, output: Any, targets: Any) -> None:
    """Raise if class numbers exceed the outputs of the model and the loss is torch's cross-entropy."""
    form, targets = torch_form(loss), strip_weights(targets)
    tensors = isinstance(targets, torch.Tensor) and isinstance(output, torch.Tensor) and output.ndim > 1
    if form is None or not form.of_classes or not tensors or targets.is_floating_point():
        return
    largest = int(targets[targets != form.ignored].amax()) if bool((targets != form.ignored).any()) else 0
    if largest >= output.shape[1]:
        raise HansaError(
            f"targets go up to {largest}, the model has {output.shape[1]} outputs: give it {largest + 1}, or number "
            "classes from 0."
        )


def counted_labels(target: Any, ignored: int | None) -> torch.Tensor:
    """Return which labels count: those that are neither negative nor ``ignored``.

    >>> counted_labels(torch.tensor([0, 2, 1, -100]), ignored=0).tolist()
    [False, True, True, False]
    """
    if not isinstance(target, torch.Tensor) or target.is_floating_point() or target.is_complex():
        raise HansaError("Task(reduction='labels'): targets are no labels. Use 'mean' for a mean over rows.")
    return target >= 0 if ignored is None else (target >= 0) & (target != ignored)
