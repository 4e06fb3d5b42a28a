"""Losses as values: class weights, sample weights and ignored labels, as a weighted mean that adds up over batches.

Each is L = sum_i w_i l_i / sum_i w_i over the entries of a batch, w_i being the weight of entry i's class times that of
its row, and 0 where it is ignored. The test loss is that quotient over all test rows, not a mean of batches' means.

>>> loss = cross_entropy(class_weights=[1.0, 3.0])
>>> float(loss(torch.zeros(2, 2), torch.tensor([0, 1])))  # log 2, whatever the weights
0.6931471824645996
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch

from hansa.core.errors import HansaError, check_decay, check_non_negative, check_positive, invalid_argument

IGNORED = -100
"""The label that does not count, as torch has it."""

__all__ = ["Loss", "Weighted", "bce", "cross_entropy", "huber", "l1", "mse", "nll"]


class Weighted(NamedTuple):
    """Targets, and how much each row counts in the loss."""

    target: Any
    weight: torch.Tensor


def unweighted(targets: Any) -> Any:
    """The targets without the weights of their rows."""
    return targets.target if isinstance(targets, Weighted) else targets


class Loss(Protocol):
    """A loss that says which terms it is a weighted mean of."""

    @abstractmethod
    def terms(self, output: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of every entry, rows first, and its weight, of the same shape."""
        ...

    def sums(self, output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """sum w_i l_i and sum w_i over a batch, the rows weighted where targets are `Weighted`."""
        losses, weights = self.terms(output, unweighted(target))
        if isinstance(target, Weighted):
            weights = weights * target.weight.to(weights).view(-1, *(1,) * (weights.ndim - 1))
        return (losses * weights).sum(), weights.sum()

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        total, weight = self.sums(output, target)
        return total / weight.clamp(min=torch.finfo(weight.dtype).tiny)  # all ignored: no loss


class _Plain(Loss, Protocol):
    """A loss of numbers, entry by entry."""

    def terms(self, output: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = _logits(output)
        if output.shape != target.shape and output.numel() == target.numel():
            output = output.reshape(target.shape)  # a column against a vector: one output a row
        losses = self.each(output, target.to(output.dtype))
        return losses, torch.ones_like(losses)

    @abstractmethod
    def each(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class mse(_Plain):
    """(output - target)^2."""

    def each(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target) ** 2


@dataclass(frozen=True, slots=True)
class l1(_Plain):
    """|output - target|."""

    def each(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).abs()


@dataclass(frozen=True, slots=True)
class huber(_Plain):
    """d^2 / 2 for |d| <= delta, delta (|d| - delta / 2) beyond."""

    delta: float = 1.0

    def __post_init__(self) -> None:
        check_positive("huber", "delta", self.delta)

    def each(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.huber_loss(output, target, reduction="none", delta=self.delta)


@dataclass(frozen=True, slots=True)
class bce(_Plain):
    """Binary cross-entropy of logits; ``positive_weight`` multiplies the loss of targets that are 1, as in torch."""

    positive_weight: float = 1.0

    def __post_init__(self) -> None:
        check_positive("bce", "positive_weight", self.positive_weight)

    def each(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weight = torch.tensor(self.positive_weight, dtype=output.dtype, device=output.device)
        return torch.nn.functional.binary_cross_entropy_with_logits(output, target, reduction="none", pos_weight=weight)


@dataclass(frozen=True, slots=True)
class cross_entropy(Loss):
    """-log softmax(output)[target], weighted by class; labels equal to ``ignore`` do not count.

    Outputs are [B, C, ...] with targets [B, ...], as torch has them, or [B, ..., C] as language models give them; where
    both fit, ``classes="last"`` says that it is the latter. An output with ``logits`` stands for these.
    """

    class_weights: Sequence[float] | None = None
    ignore: int = IGNORED
    label_smoothing: float = 0.0
    classes: Literal["auto", "second", "last"] = "auto"

    def __post_init__(self) -> None:
        _check_weights("cross_entropy", self)
        check_decay("cross_entropy", "label_smoothing", self.label_smoothing)
        if self.classes not in ("auto", "second", "last"):
            raise invalid_argument("cross_entropy", "classes", self.classes, "'auto', 'second' or 'last'")

    def terms(self, output: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = _classes_second(_logits(output), target, self.classes)
        losses = torch.nn.functional.cross_entropy(
            scores, target, reduction="none", ignore_index=self.ignore, label_smoothing=self.label_smoothing
        )
        return losses, _class_weights(self.class_weights, target, self.ignore, losses)


@dataclass(frozen=True, slots=True)
class nll(Loss):
    """-output[target] of log-probabilities, weighted by class; otherwise as `cross_entropy`."""

    class_weights: Sequence[float] | None = None
    ignore: int = IGNORED
    classes: Literal["auto", "second", "last"] = "auto"

    def __post_init__(self) -> None:
        _check_weights("nll", self)

    def terms(self, output: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = _classes_second(_logits(output), target, self.classes)
        losses = torch.nn.functional.nll_loss(scores, target, reduction="none", ignore_index=self.ignore)
        return losses, _class_weights(self.class_weights, target, self.ignore, losses)


@dataclass(frozen=True, slots=True)
class by_row(Loss):
    """A loss of the user's own that gives one value a row."""

    function: Callable[[Any, Any], torch.Tensor]

    def terms(self, output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        losses = self.function(output, target)
        leaf = next(iter(target.values())) if isinstance(target, dict) else target
        if losses.ndim < 1 or len(losses) != len(leaf):
            name = getattr(self.function, "__name__", "the loss")
            raise HansaError(
                f"{name} gave {list(losses.shape)} for {len(leaf)} rows that have weights: expected one value a row "
                "(reduction='none'), which Hansa weighs."
            )
        return losses, torch.ones_like(losses)


def weighing(loss: Any) -> Loss:
    """The form of a loss that can weigh rows: ours as it is, torch's in our form, any other must give one value a row.

    >>> weighing(torch.nn.functional.mse_loss), weighing(torch.nn.CrossEntropyLoss(label_smoothing=0.1)).label_smoothing
    (mse(), 0.1)
    """
    if hasattr(loss, "sums"):
        ours: Loss = loss
        return ours
    functional, nn = torch.nn.functional, torch.nn
    settings: dict[str, Any] = dict(loss.keywords) if isinstance(loss, partial) and not loss.args else {}
    function: Any = loss.func if isinstance(loss, partial) and not loss.args else loss
    if isinstance(loss, nn.CrossEntropyLoss):
        function = functional.cross_entropy
        settings = {name: getattr(loss, name) for name in ("weight", "ignore_index", "label_smoothing", "reduction")}
    elif type(loss) in (nn.MSELoss, nn.L1Loss, nn.BCEWithLogitsLoss):
        function = {
            nn.MSELoss: functional.mse_loss,
            nn.L1Loss: functional.l1_loss,
            nn.BCEWithLogitsLoss: functional.binary_cross_entropy_with_logits,
        }[type(loss)]
    if settings.pop("reduction", "mean") != "mean":
        return by_row(loss)
    if function is functional.cross_entropy:
        weight = settings.get("weight")
        return cross_entropy(
            None if weight is None else weight.tolist(),
            settings.get("ignore_index", IGNORED),
            settings.get("label_smoothing", 0.0),
            "second",
        )
    plain: dict[Any, Callable[[], Loss]] = {
        functional.mse_loss: mse,
        functional.l1_loss: l1,
        functional.huber_loss: huber,
        functional.binary_cross_entropy_with_logits: bce,
        functional.nll_loss: nll,
    }
    return plain[function]() if function in plain and not settings else by_row(loss)


def _logits(output: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(output, "logits", output)
    return found


def _classes_second(output: torch.Tensor, target: torch.Tensor, classes: str) -> torch.Tensor:
    second = output.ndim == target.ndim + 1 and output.shape[:1] + output.shape[2:] == target.shape
    last = output.ndim == target.ndim + 1 and output.shape[:-1] == target.shape
    if last and (classes == "last" or (classes == "auto" and not second)):
        return output.movedim(-1, 1)
    return output


def _check_weights(part: str, loss: Any) -> None:
    if loss.class_weights is None:
        return
    if isinstance(loss.class_weights, str) or not len(loss.class_weights):
        raise invalid_argument(part, "class_weights", loss.class_weights, "one number a class")
    for weight in loss.class_weights:
        check_non_negative(part, "class_weights", weight)
    object.__setattr__(loss, "class_weights", tuple(map(float, loss.class_weights)))


def _class_weights(
    weights: Sequence[float] | None, target: torch.Tensor, ignore: int, losses: torch.Tensor
) -> torch.Tensor:
    counted = target != ignore
    if weights is None:
        return counted.to(losses.dtype)
    table = torch.tensor(weights, dtype=losses.dtype, device=losses.device)
    if bool((target[counted] >= len(table)).any()):
        raise HansaError(f"class_weights are of {len(table)} classes, there is a target {int(target.max())}.")
    return table[target.clamp(min=0)] * counted
