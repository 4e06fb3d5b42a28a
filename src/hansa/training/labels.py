"""Default accuracy: which labels count, where predictions are, and which label each prediction is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn.functional import cross_entropy, nll_loss
from torch.utils import _pytree as trees

from hansa.core.errors import HansaError
from hansa.training.losses import LossFunction, strip_weights
from hansa.training.model_probe import LossSample, ProbeResult

_MAX_SCORES = 100_000  # above this, few labels are tried
_LOSS_MODULES = ("builtins", "functools", "torch.nn.modules.loss")  # of torch's losses, not of subclasses

CountCorrect: TypeAlias = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LabelRule:
    """Which labels count, and which output position predicts which label.

    Args:
        ignored: A label that the loss ignores; negative labels never count.
        shift: 1 if the loss compares the output at position t with the label at t + 1, as language models do that shift
            labels themselves.
        class_axis: The axis of the classes in the output, 1 or -1.

    >>> LabelRule(ignored=0).count(torch.tensor([0, 2, 1, -100]))
    2.0
    """

    ignored: int | None = None
    shift: int = 0
    class_axis: int = 1

    def counts(self, target: Any) -> bool:
        """Return whether targets are labels."""
        return isinstance(target, torch.Tensor) and not target.is_floating_point() and not target.is_complex()

    def mask(self, target: torch.Tensor) -> torch.Tensor:
        """Return which labels count."""
        counted = target >= 0
        return counted if self.ignored is None else counted & (target != self.ignored)

    def count(self, target: torch.Tensor) -> float:
        """Return the number of labels that count."""
        return float(self.mask(target[:, self.shift :] if self.shift else target).sum())

    def score(self, count_correct: CountCorrect, output: Any, target: torch.Tensor) -> tuple[float, float]:
        """Return the number of correct predictions and the number of labels."""
        if self.shift:
            output, target = self._align(getattr(output, "logits", output)), target[:, self.shift :]
        if self.ignored is not None:
            target = target.masked_fill(target == self.ignored, -1)
        return float(count_correct(output, target)), float((target >= 0).sum())

    def _align(self, output: torch.Tensor) -> torch.Tensor:
        axis = 1 if self.class_axis == -1 else 2
        return output.narrow(axis, 0, output.shape[axis] - self.shift)

    @property
    def is_plain(self) -> bool:
        """Whether all labels that are not negative count, each for its own position."""
        return self.ignored is None and not self.shift


def count_correct(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Count the targets that are the largest output, with classes on the second axis; ignored labels do not count."""
    return _count_equal(getattr(output, "logits", output).argmax(dim=1), target)


def count_correct_last_axis(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Count the targets that are the largest output, with classes on the last axis."""
    return _count_equal(getattr(output, "logits", output).argmax(dim=-1), target)


def count_correct_logits(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Count the rows whose single output is above 0 exactly if the target is 1."""
    return _count_above(0.0, output, target)


def count_correct_probabilities(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Count the rows whose single output is above 1/2 exactly if the target is 1."""
    return _count_above(0.5, output, target)


BUILT_IN_METRICS = (count_correct, count_correct_last_axis, count_correct_logits, count_correct_probabilities)


def _count_equal(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((prediction == target) & (target >= 0)).double().sum()


def _count_above(threshold: float, output: Any, target: torch.Tensor) -> torch.Tensor:
    positive: torch.Tensor = getattr(output, "logits", output).reshape(target.shape) > threshold
    return ((positive == (target > 0)) & (target >= 0)).double().sum()


def default_metric(loss: LossFunction, probe: ProbeResult | None, targets: Any) -> CountCorrect | None:
    """Return the accuracy for targets that are class numbers: by the largest output, or for one output by a threshold.

    None for other targets, and if the shape of the outputs does not determine the axis of the classes.
    """
    targets = strip_weights(targets)
    if not hasattr(targets, "is_floating_point") or targets.is_floating_point():
        return None
    if probe is None:
        return count_correct
    output, target = getattr(probe.output, "logits", probe.output), strip_weights(probe.target)
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        return None
    if output.shape in (target.shape, (*target.shape, 1)):
        return _threshold_metric(loss, probe, targets) if target.ndim == 1 else None
    axis = getattr(loss, "class_axis", "")
    shapes = [(output.shape, target.shape)]
    shapes += [(gradient.shape, strip_weights(each).shape) for gradient, each in probe.logit_gradients]
    second = all(len(o) == len(t) + 1 and o[2:] == t[1:] for o, t in shapes)
    last = all(len(o) == len(t) + 1 and o[:-1] == t for o, t in shapes)
    if second and (not last or output.ndim == 2 or is_torch_class_loss(loss) or axis in ("auto", "second")):
        return count_correct
    if last and (not second or axis == "last"):
        return count_correct_last_axis
    if not second:
        return None
    agreements = [max(_agreement(probe, axis, shift) for shift in (0, 1)) for axis in (1, -1)]
    if agreements[0] == agreements[1] or max(agreements) < 0.95:
        return None
    return count_correct if agreements[0] > agreements[1] else count_correct_last_axis


def is_torch_class_loss(loss: Any) -> bool:
    """Return whether a loss is torch's cross-entropy or negative log-likelihood, or a subclass of these."""
    function = loss.func if isinstance(loss, partial) else loss
    return function in (cross_entropy, nll_loss) or isinstance(loss, (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss))


def check_classes(probe: ProbeResult | None, loss: LossFunction, targets: Any) -> None:
    """Raise for class numbers without an output of the model, if the loss is torch's cross-entropy."""
    targets = strip_weights(targets)
    if probe is None or not is_torch_class_loss(loss) or type(loss).__module__ not in _LOSS_MODULES:
        return
    if not isinstance(targets, torch.Tensor) or targets.is_floating_point():
        return
    if not isinstance(probe.output, torch.Tensor) or probe.output.ndim < 2:
        return
    outputs, labels = probe.output.shape[1], targets
    if (ignored := _declared_ignored_label(loss)) is not None:
        labels = targets[targets != ignored]
    if labels.numel() and (largest := int(labels.max())) >= outputs:
        raise HansaError(
            f"targets go up to {largest}, the model has {outputs} outputs: give it {largest + 1}, or number classes "
            "from 0."
        )


def _threshold_metric(loss: LossFunction, probe: ProbeResult, targets: torch.Tensor) -> CountCorrect | None:
    """Return the accuracy of one output for targets 0 and 1; None for other targets.

    For a target of 0, the loss of a logit decreases below 0, and that of a probability or of a squared error does not,
    or becomes negative: the threshold is 0 or 1/2.
    """
    counted = targets[targets >= 0]
    if counted.numel() and int(counted.max()) > 1:
        return None
    output = getattr(probe.output, "logits", probe.output)
    zeros = torch.zeros_like(strip_weights(probe.target))

    def loss_at(value: float) -> float:
        try:
            return float(loss(_with_logits(probe.output, torch.full_like(output, value)), zeros))
        except Exception:  # a loss that takes no such output
            return math.nan

    at_zero, below = loss_at(0.0), loss_at(-1.0)
    within = bool(((output >= 0) & (output <= 1)).all())
    if math.isnan(at_zero) and math.isnan(below):
        probabilities = within
    else:
        probabilities = not below < at_zero or (within and below < 0)
    return count_correct_probabilities if probabilities else count_correct_logits


def _with_logits(output: Any, logits: torch.Tensor) -> Any:
    """Return an output whose logits are replaced."""
    if isinstance(output, torch.Tensor):
        return logits
    old = output.logits
    leaves, structure = trees.tree_flatten(output)
    if not any(leaf is old for leaf in leaves):
        raise ValueError("the logits are not a leaf of the output")
    return trees.tree_unflatten([logits if leaf is old else leaf for leaf in leaves], structure)


def find_label_rule(loss: LossFunction, probe: ProbeResult | None, metric: CountCorrect | None) -> LabelRule:
    """Return which labels count for the default accuracy, from the loss's settings or from its values."""
    rule = LabelRule(class_axis=-1 if metric is count_correct_last_axis else 1)
    declared = _declared_ignored_label(loss)
    if declared is not None or is_torch_class_loss(loss) or hasattr(loss, "sums"):
        return replace(rule, ignored=declared if declared is not None and declared >= 0 else None)
    if probe is None or metric not in (count_correct, count_correct_last_axis):
        return rule
    rule = replace(rule, shift=_label_shift(probe, rule.class_axis))
    for sample in probe.samples[-2:]:
        if rule.counts(sample.target) and (ignored := _ignored_label(loss, sample, rule)) is not None:
            return replace(rule, ignored=ignored)
    return rule


def _declared_ignored_label(loss: Any) -> int | None:
    """Return the label that a loss is set to ignore, if it has such a setting."""
    for part in (loss, getattr(loss, "function", None)):
        ignored = (
            part.keywords.get("ignore_index") if isinstance(part, partial) else getattr(part, "ignore_index", None)
        )
        if isinstance(ignored, int):
            return ignored
    return None


def _label_shift(probe: ProbeResult, class_axis: int) -> int:
    """Return 1 if the gradient of the logits points at the next position's labels and not at the own ones."""
    own, following = (_agreement(probe, class_axis, shift) for shift in (0, 1))
    return int(following > own)


def _agreement(probe: ProbeResult, class_axis: int, shift: int) -> float:
    """Return the share of positions at which the gradient of the logits points at the label, ``shift`` positions on.

    The gradient of a classification loss is smallest, and negative, for the class of the label. It is zero for labels
    that the loss ignores: positions without a gradient agree if their label has a gradient nowhere.
    """
    hits, positions = 0, 0
    for gradient, weighted in probe.logit_gradients:
        target = strip_weights(weighted)
        if gradient.ndim != target.ndim + 1 or (shift and (target.ndim < 2 or target.shape[1] <= shift)):
            return 0.0
        labels, used = gradient.argmin(class_axis), (gradient != 0).any(class_axis)
        if labels.shape != target.shape or (shift and bool(used[:, -shift:].any())):
            return 0.0
        if shift:
            labels, used, target = labels[:, :-shift], used[:, :-shift], target[:, shift:]
        agrees = torch.where(used, labels == target, ~torch.isin(target, target[used]))
        hits, positions = hits + int(agrees.sum()), positions + agrees.numel()
    return hits / positions if positions else 0.0


def _ignored_label(loss: LossFunction, sample: LossSample, rule: LabelRule) -> int | None:
    """Return a label whose predictions do not change the loss, if there is one.

    With many scores only the smallest, the largest and the most common label are tried.
    """
    output, target = sample.output, strip_weights(sample.target)
    scores = getattr(output, "logits", output).movedim(rule.class_axis, -1)
    labels = torch.full_like(target, -1)
    if rule.shift:
        labels[:, : -rule.shift] = target[:, rule.shift :]
    else:
        labels = target
    values, counts = torch.unique(labels[labels >= 0], return_counts=True)
    if scores.shape[:-1] != labels.shape or len(values) < 2:
        return None
    value = float(loss(output, sample.target))

    def changes(places: torch.Tensor) -> bool:
        replaced = (_replace(scores, places, factor, rule.class_axis) for factor in (-3.0, 2.0))
        return any(float(loss(_with_logits(output, logits), sample.target)) != value for logits in replaced)

    try:
        if not changes(labels >= 0):  # the loss does not look at these logits
            return None
        candidates = dict.fromkeys([int(values[0]), int(values[-1]), int(values[counts.argmax()])])
        if scores.numel() <= _MAX_SCORES:
            candidates |= dict.fromkeys(values.tolist())
        return next((label for label in candidates if not changes(labels == label)), None)
    except Exception:  # outputs that the loss does not take
        return None


def _replace(scores: torch.Tensor, places: torch.Tensor, factor: float, class_axis: int) -> torch.Tensor:
    """Return logits whose entries at some places are other ones, with the classes on their axis."""
    changed = scores.clone()
    changed[places] = factor * scores[places] + torch.linspace(-1, 1, scores.shape[-1], dtype=scores.dtype)
    return changed.movedim(-1, class_axis)


def has_ignored_labels(batch: Sequence[Any]) -> bool:
    """Return whether a batch of native code has negative labels, which cross-entropy ignores."""
    return int(batch[1].min()) < 0
