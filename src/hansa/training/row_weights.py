"""Row weights in any loss: through Hansa's losses, or through ``reduction="none"`` of the user's own object."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hansa.core.errors import HansaError
from hansa.training.losses import (
    IGNORED,
    Loss,
    WeightedTargets,
    bce,
    cross_entropy,
    huber,
    l1,
    label_weights,
    mse,
    nll,
    row_weighted,
    strip_weights,
)


@dataclass(frozen=True, slots=True)
class row_loss(Loss):
    """A user-defined loss that returns one value per row."""

    function: Callable[[Any, Any], torch.Tensor]

    def terms(self, output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        losses = _values_per_row(self.function, output, target)
        return losses, torch.ones_like(losses)


@dataclass(frozen=True, slots=True)
class unreduced(Loss):
    """A loss of the user's with ``reduction="none"``: a weighted mean, or a weighted sum, of its entries.

    Args:
        function: The user's loss, which returns one value per row or per entry.
        reduction: Its reduction: "mean" over entries, "batchmean" over rows, or "sum".
        class_weights: The weight of each class in the divisor of the mean, as in torch's cross-entropy.
        ignore_index: The label that does not count in the divisor.
    """

    function: Callable[[Any, Any], torch.Tensor]
    reduction: str = "mean"
    class_weights: Sequence[float] | None = None
    ignore_index: int | None = None

    def terms(self, output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of every entry, which includes class weights, and its share of the divisor."""
        losses = _values_per_row(self.function, output, target)
        if self.reduction != "mean":
            losses = losses.flatten(1).sum(1) if losses.ndim > 1 else losses
        elif self.ignore_index is not None and _are_labels(target, losses):
            return losses, label_weights(self.class_weights, target, self.ignore_index, losses)
        return losses, torch.ones_like(losses)

    def sums(self, output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted sum of the losses and its divisor."""
        return row_weighted(*self.terms(output, strip_weights(target)), target)

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        total, weight = self.sums(output, target)
        return total if self.reduction == "sum" else total / weight.clamp(min=torch.finfo(weight.dtype).tiny)


def with_row_weights(loss: Any) -> Loss:
    """Return a loss that takes row weights: Hansa's unchanged, torch's plain losses as Hansa's, any other through its
    own ``reduction="none"``. A loss without that option must return one value per row.

    >>> with_row_weights(torch.nn.functional.mse_loss)
    mse()
    """
    if hasattr(loss, "sums"):
        ours: Loss = loss
        return ours
    functional, nn = torch.nn.functional, torch.nn
    settings: dict[str, Any] = dict(loss.keywords) if isinstance(loss, partial) and not loss.args else {}
    function: Any = loss.func if isinstance(loss, partial) and not loss.args else loss
    if type(loss) is nn.CrossEntropyLoss:
        function = functional.cross_entropy
        settings = {name: getattr(loss, name) for name in ("weight", "ignore_index", "label_smoothing", "reduction")}
    elif type(loss) in (nn.MSELoss, nn.L1Loss, nn.BCEWithLogitsLoss):
        function = {
            nn.MSELoss: functional.mse_loss,
            nn.L1Loss: functional.l1_loss,
            nn.BCEWithLogitsLoss: functional.binary_cross_entropy_with_logits,
        }[type(loss)]
        names = ("weight", "pos_weight", "reduction")
        settings = {name: value for name in names if (value := getattr(loss, name, None)) is not None}
    if settings.get("reduction", "mean") == "mean":
        options = {name: value for name, value in settings.items() if name != "reduction"}
        if function is functional.cross_entropy and set(options) <= {"weight", "ignore_index", "label_smoothing"}:
            weight = options.get("weight")
            return cross_entropy(
                None if weight is None else weight.tolist(),
                options.get("ignore_index", IGNORED),
                options.get("label_smoothing", 0.0),
                "second",
            )
        unweighted: dict[Any, Callable[[], Loss]] = {
            functional.mse_loss: mse,
            functional.l1_loss: l1,
            functional.huber_loss: huber,
            functional.binary_cross_entropy_with_logits: bce,
            functional.nll_loss: nll,
        }
        if not options and function in unweighted:
            return unweighted[function]()
    return _unreduced(loss)


def _unreduced(loss: Any) -> Loss:
    """Return a loss whose values come from the user's object with ``reduction="none"``."""
    functional, nn = torch.nn.functional, torch.nn
    by_class = isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss))
    if isinstance(loss, nn.Module):
        reduction, settings = getattr(loss, "reduction", None), vars(loss) | dict(loss.named_buffers())
        entries: Any = loss
        if reduction in ("mean", "sum", "batchmean"):
            entries = copy.copy(loss)
            entries.reduction = "none"
    else:
        options = _options(loss)
        settings, reduction = options, options.get("reduction")
        by_class = getattr(loss, "func", loss) in (functional.cross_entropy, functional.nll_loss)
        settings = {"ignore_index": IGNORED, **settings} if by_class else settings
        entries = partial(loss, reduction="none") if reduction in ("mean", "sum", "batchmean") else loss
    if reduction not in ("mean", "sum", "batchmean"):
        return row_loss(loss)
    ignored, weight = settings.get("ignore_index"), settings.get("weight") if by_class else None
    return unreduced(
        entries,
        reduction,
        None if weight is None else tuple(weight.tolist()),
        ignored if isinstance(ignored, int) else None,
    )


def _options(loss: Any) -> dict[str, Any]:
    """Return the options of a function with their values: defaults, and those that a partial sets."""
    try:
        parameters = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def check_row_weights(loss: Any, weighted: Any, output: Any, target: Any) -> None:
    """Raise if a loss with all row weights 1 is not the loss without weights."""
    if not isinstance(weighted, unreduced):
        return
    labels = strip_weights(target)
    rows = len(target.weight) if isinstance(target, WeightedTargets) else len(labels)
    ones = torch.ones(rows, dtype=target.weight.dtype if isinstance(target, WeightedTargets) else None)
    own, ours = float(loss(output, labels)), float(weighted(output, WeightedTargets(labels, ones)))
    if not abs(own - ours) <= 1e-4 * (abs(own) + abs(ours)) and own == own:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise HansaError(
            f"Task(loss={name}): its value is {own:.6g}, but its values with reduction='none' come to {ours:.6g} as a "
            f"{weighted.reduction}, so row weights cannot be applied. Write a loss that returns one value per row."
        )


def _values_per_row(function: Callable[[Any, Any], torch.Tensor], output: Any, target: Any) -> torch.Tensor:
    losses = function(output, target)
    leaf = next(iter(target.values())) if isinstance(target, dict) else target
    leaf = leaf[0] if isinstance(leaf, (tuple, list)) else leaf
    if losses.ndim < 1 or len(losses) != len(leaf):
        name = getattr(function, "__name__", getattr(getattr(function, "func", None), "__name__", "the loss"))
        name = type(function).__name__ if isinstance(function, torch.nn.Module) else name
        raise HansaError(
            f"{name} returned shape {list(losses.shape)} for {len(leaf)} weighted rows: expected one value per row "
            "(reduction='none'), which Hansa multiplies by the weights."
        )
    return losses


def _are_labels(target: Any, losses: torch.Tensor) -> bool:
    return isinstance(target, torch.Tensor) and not target.is_floating_point() and target.shape == losses.shape
