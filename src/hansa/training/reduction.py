"""How a loss reduces over rows, and how its values for batches combine to its value for all test rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.functional import cross_entropy, nll_loss

from hansa.training.batch_sources import count_rows, take_rows
from hansa.training.labels import LabelRule
from hansa.training.losses import LossFunction
from hansa.training.model_probe import LossSample, ProbeResult

Reduction: TypeAlias = Literal["mean", "labels", "sum", "all rows"]
"""A mean over rows, a mean over labels that are not ignored, a sum, or none of these: it needs all rows at once."""

LossSums: TypeAlias = "Callable[[Any, Any], tuple[float, float]]"
"""A function of (output, target) that returns a sum of losses and the weight to divide it by."""


def find_reductions(loss: LossFunction, probe: ProbeResult | None, rule: LabelRule) -> list[Reduction]:
    """Return how a loss reduces over rows, from its values for several batches and for parts of them.

    There are several answers if they are equal for the probed rows. A loss that couples rows, or that is a weighted
    mean with unknown weights, needs all rows at once.
    """
    if probe is None:
        return ["mean"]
    if (class_loss := torch_class_loss(loss)) is not None:
        settings = class_loss[1]
        if settings.get("reduction", "mean") == "sum":
            return ["sum"]
        if settings.get("weight") is not None:
            return ["all rows"]
        all_count = rule.counts(probe.target) and rule.count(probe.target) == probe.target.numel()
        return ["labels", "mean"] if all_count and rule.ignored is None else ["labels"]
    if getattr(loss, "reduction", "") == "sum" and hasattr(loss, "sums"):
        return ["sum"]
    samples = [sample for sample in probe.samples if sample.divisions and math.isfinite(sample.loss)]
    if sum(_tells(sample) for sample in samples) < min(2, len(probe.samples)):
        return ["all rows"]
    candidates: dict[Reduction, Callable[[Any], float]] = {
        "labels": rule.count,
        "mean": count_rows,
        "sum": lambda target: 1.0,
    }
    if not all(rule.counts(sample.target) for sample in samples):
        del candidates["labels"]
    if hasattr(loss, "sums"):
        del candidates["sum"]
    fitting: list[Reduction] = [
        name
        for name, weight in candidates.items()
        if all(_combines(sample, weight, is_sum=name == "sum") for sample in samples)
    ]
    return fitting or ["all rows"]


def _tells(sample: LossSample) -> bool:
    """Return whether some division of a sample tells a mean from a sum: the losses of both parts are not 0."""
    return any(all(math.isfinite(value) and value != 0 for _, value in division) for division in sample.divisions)


def _combines(sample: LossSample, weight: Callable[[Any], float], is_sum: bool) -> bool:
    """Return whether the losses of parts, weighted, give the loss of the whole, for every division."""
    for division in sample.divisions:
        weights = [float(weight(take_rows(sample.target, rows))) for rows, _ in division]
        parts = [(share, value) for share, (_, value) in zip(weights, division, strict=True) if share]
        total = 1.0 if is_sum else math.fsum(weights)
        combined = math.fsum(share * value for share, value in parts) / total if total else math.nan
        scale = abs(sample.loss) + math.fsum(abs(value) for _, value in parts)
        if not abs(sample.loss - combined) <= sample.tolerance * scale:
            return False
    return True


def torch_class_loss(loss: LossFunction) -> tuple[Callable[..., torch.Tensor], dict[str, Any]] | None:
    """Return function and settings of a loss that is torch's cross-entropy or negative log-likelihood, or None."""
    if loss in (cross_entropy, nll_loss):
        return loss, {}
    if isinstance(loss, partial) and loss.func in (cross_entropy, nll_loss) and not loss.args:
        return loss.func, dict(loss.keywords)
    if type(loss) is nn.CrossEntropyLoss or type(loss) is nn.NLLLoss:
        names = [name for name in ("weight", "ignore_index", "label_smoothing", "reduction") if hasattr(loss, name)]
        function = cross_entropy if type(loss) is nn.CrossEntropyLoss else nll_loss
        return function, {name: getattr(loss, name) for name in names}
    return None


def loss_sums(loss: LossFunction, reduction: Reduction, rule: LabelRule) -> LossSums | None:
    """Return a function that computes, for one batch, a sum of losses and the weight to divide it by.

    The quotient of the sums over all batches is the loss of all test rows. A mean over n rows has weight n, and a mean
    over labels the number of labels that are not ignored. A sum is divided by the number of rows too, so that test
    losses are comparable. Cross-entropy with class weights is sum w_i l_i / sum w_i, as torch computes it for one
    batch, and so are the losses of `hansa.losses`. None for a loss that is given all rows at once.
    """
    if hasattr(loss, "sums"):
        return partial(_weighted_loss_sums, loss.sums)
    class_loss = torch_class_loss(loss)
    if class_loss is not None and class_loss[1].get("reduction", "mean") == "mean":
        function, settings = class_loss
        settings = {name: value for name, value in settings.items() if name != "reduction"}
        ignored = int(settings.get("ignore_index", -100))
        if settings.get("weight") is None:
            return partial(_label_sums, loss, function, settings, ignored)
        return partial(_class_weighted_sums, function, settings, ignored)
    if reduction == "all rows":
        return None
    if reduction == "labels":
        return partial(_counted_sums, loss, rule)
    return partial(_row_sums, loss, reduction == "sum")


def _weighted_loss_sums(sums: Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor]], output: Any, target: Any) -> Any:
    total, weight = sums(output, target)
    return float(total), float(weight)


def _row_sums(loss: LossFunction, is_sum: bool, output: Any, target: Any) -> tuple[float, float]:
    value, rows = float(loss(output, target)), count_rows(target)
    return (value if is_sum else value * rows), float(rows)


def _counted_sums(loss: LossFunction, rule: LabelRule, output: Any, target: Any) -> tuple[float, float]:
    labels = rule.count(target)
    return (float(loss(output, target)) * labels, labels) if labels else (0.0, 0.0)


def _label_sums(
    loss: LossFunction,
    function: Callable[..., torch.Tensor],
    settings: Mapping[str, Any],
    ignored: int,
    output: Any,
    target: torch.Tensor,
) -> tuple[float, float]:
    if target.is_floating_point():
        return _row_sums(loss, False, output, target)
    labels = int((target != ignored).sum())
    if labels == target.numel():
        return float(loss(output, target)) * labels, float(labels)
    return float(function(output, target, reduction="sum", **settings)), float(labels)


def _class_weighted_sums(
    function: Callable[..., torch.Tensor], settings: Mapping[str, Any], ignored: int, output: Any, target: torch.Tensor
) -> tuple[float, float]:
    if target.is_floating_point():  # class probabilities: torch divides by the rows
        return _row_sums(partial(function, **settings), False, output, target)
    weights = settings["weight"].to(output.device)
    labels = target[target != ignored]
    return float(function(output, target, reduction="sum", **settings)), float(weights[labels].double().sum())
