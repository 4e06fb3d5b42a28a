"""Scores of test rows: losses and metrics that do not depend on how the rows are divided into batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.functional import cross_entropy, nll_loss
from torch.utils import _pytree as trees

from hansa.core.errors import HansaError, short_repr
from hansa.training.batch_sources import count_rows
from hansa.training.losses import LossFunction, strip_weights
from hansa.training.model_probe import ProbeResult, select_output_rows

Metric: TypeAlias = Callable[[Any, torch.Tensor], Any]


class UserMetricSums(NamedTuple):
    """Sums of a user's metric over batches: of its values, and of values times rows; and which of the two applies."""

    value_sum: float
    weighted_sum: float
    is_sum: bool
    is_mean: bool


class PartialScore(NamedTuple):
    """Sums over a range of test rows: the loss and its weight, and the ``correct`` among the ``labels`` not ignored.

    ``outputs`` are kept if there are metrics that need all rows at once.
    """

    loss_sum: float
    weight: float
    correct: float | None = None
    user_metric: UserMetricSums | None = None
    labels: float = 0.0
    outputs: tuple[tuple[Any, torch.Tensor], ...] = ()


def merge_scores(scores: Sequence[PartialScore]) -> PartialScore:
    """Add the scores of several batches."""
    user = [score.user_metric for score in scores if score.user_metric is not None]
    correct = [score.correct for score in scores if score.correct is not None]
    return PartialScore(
        math.fsum(score.loss_sum for score in scores),
        math.fsum(score.weight for score in scores),
        math.fsum(correct) if correct else None,
        UserMetricSums(
            math.fsum(sums.value_sum for sums in user),
            math.fsum(sums.weighted_sum for sums in user),
            all(sums.is_sum for sums in user),
            all(sums.is_mean for sums in user),
        )
        if user
        else None,
        math.fsum(score.labels for score in scores),
        tuple(outputs for score in scores for outputs in score.outputs),
    )


def compute_metrics(
    scores: Sequence[PartialScore], rows: int, metric: Metric | None, metrics: Mapping[str, Metric]
) -> dict[str, float]:
    """Return loss, accuracy and further metrics of all test rows from one score per chunk, in order."""
    score = merge_scores(scores)
    results = {"test_loss": score.loss_sum / score.weight if score.weight else math.nan}
    user = score.user_metric
    if score.correct is not None:
        results["test_accuracy"] = score.correct / max(1.0, score.labels)
    elif user is not None and user.is_sum:
        results["test_accuracy"] = user.value_sum / rows
    elif user is not None and user.is_mean:
        results["test_accuracy"] = user.weighted_sum / rows
    elif user is not None:
        name = getattr(metric, "__name__", "metric")
        raise HansaError(
            f"Task(metric={name}): its value for a batch is neither the sum nor the mean of its values for halves of "
            f"it. Use Task(metrics={{{name.strip('<>')!r}: ...}}), which is computed from all test rows at once."
        )
    return {**results, **_compute_on_all_rows(score, metrics)}


def compute_client_metrics(
    score: PartialScore, rows: int, metric: Metric | None, metrics: Mapping[str, Metric]
) -> dict[str, float]:
    """Return loss, accuracy and further metrics of one client's test rows.

    A metric that raises ValueError for these rows, such as an AUC of a single class, is NaN.
    """
    results = {name.removeprefix("test_"): value for name, value in compute_metrics([score], rows, metric, {}).items()}
    for name, function in metrics.items():
        try:
            results[name] = _compute_on_all_rows(score, {name: function})[f"test_{name}"]
        except HansaError:
            raise
        except ValueError:
            results[name] = math.nan
    return results


def _compute_on_all_rows(score: PartialScore, metrics: Mapping[str, Metric]) -> dict[str, float]:
    if not metrics:
        return {}
    output = concatenate_outputs([output for output, _ in score.outputs])
    target = torch.cat([target for _, target in score.outputs])
    results = {}
    for name, function in metrics.items():
        value = function(output, target)
        try:
            results[f"test_{name}"] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise HansaError(f"Task(metrics): {name} returned {short_repr(value)}: expected one number.") from error
    return results


def concatenate_outputs(outputs: Sequence[Any]) -> Any:
    """Concatenate the outputs of batches: tensors, or tuples and dicts of tensors."""
    flat = [trees.tree_flatten(output) for output in outputs]
    for leaves, _ in flat:
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise HansaError(
                    f"Task(metrics): the model returns {short_repr(type(leaf))}, which has no rows. Return a tensor, "
                    "or tuples or dicts of tensors."
                )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return trees.tree_unflatten([torch.cat(column) for column in columns], flat[0][1])


def move_to_cpu(output: Any) -> Any:
    """Move an output to the CPU, so that workers can send it."""
    return trees.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, output)


def check_metric_names(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Raise if a metric is not callable or its name is taken."""
    for name, function in metrics.items():
        valid = isinstance(name, str) and name.isidentifier() and name not in ("loss", "accuracy")
        if not valid or not callable(function):
            raise HansaError(
                f"Task(metrics={{{short_repr(name)}: {short_repr(function)}}}): expected an identifier other than loss "
                "and accuracy, and a function of (outputs, targets)."
            )
    return dict(metrics)


def score_user_metric(
    metric: Metric, output: Any, target: torch.Tensor, recompute: Callable[[torch.Tensor], Any]
) -> UserMetricSums:
    """Return the value of a user's metric for a batch, and whether it is a sum or a mean over halves of the batch.

    One value per row is summed. ``recompute`` returns the model's output for some of the rows.
    """
    rows = len(target)
    value = _as_number(metric, metric(output, target), rows)
    if rows < 2:
        return UserMetricSums(value, value, True, True)
    parts = []
    for half in (torch.arange(0, rows, 2, device=target.device), torch.arange(1, rows, 2, device=target.device)):
        selected = select_output_rows(output, half, rows, partial(recompute, half))
        parts.append((len(half), _as_number(metric, metric(selected, target[half]), len(half))))
    tolerance = 1e-5 * (abs(value) + sum(abs(part) for _, part in parts))
    is_sum = abs(value - sum(part for _, part in parts)) <= tolerance
    is_mean = abs(value - sum(count * part for count, part in parts) / rows) <= tolerance
    return UserMetricSums(value, value * rows, is_sum, is_mean)


def _as_number(metric: Metric, value: Any, rows: int) -> float:
    if isinstance(value, torch.Tensor) and value.shape == (rows,) and rows > 1:
        value = value.double().sum()
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise HansaError(
            f"Task(metric={getattr(metric, '__name__', 'metric')}): returned {short_repr(value)}: expected the number "
            "of correct rows, or one value per row."
        ) from error


def default_metric(loss: LossFunction, probe: ProbeResult | None, targets: Any) -> Metric | None:
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
        return _threshold_metric(loss, output, targets) if target.ndim == 1 else None
    axis = getattr(loss, "class_axis", "")
    second = output.ndim == target.ndim + 1 and output.shape[2:] == target.shape[1:]
    last = output.ndim == target.ndim + 1 and output.shape[:-1] == target.shape
    if second and (not last or output.ndim == 2 or torch_class_loss(loss) is not None or axis in ("auto", "second")):
        return count_correct
    return count_correct_last_axis if last and (not second or axis == "last") else None


def check_classes(probe: ProbeResult | None, loss: LossFunction, targets: Any) -> None:
    """Raise for class numbers without an output of the model, if the loss is torch's cross-entropy."""
    targets = strip_weights(targets)
    if probe is None or torch_class_loss(loss) is None:
        return
    if not isinstance(targets, torch.Tensor) or targets.is_floating_point():
        return
    if not isinstance(probe.output, torch.Tensor) or probe.output.ndim < 2:
        return
    outputs, largest = probe.output.shape[1], int(targets.max())
    if largest >= outputs:
        raise HansaError(
            f"targets go up to {largest}, the model has {outputs} outputs: give it {largest + 1}, or number classes "
            "from 0."
        )


def _threshold_metric(loss: LossFunction, output: torch.Tensor, targets: torch.Tensor) -> Metric | None:
    """Return the accuracy of one output for targets 0 and 1; None for other targets.

    The threshold is 1/2 if the loss of 1/2 is equal for both classes (probabilities, squared error), otherwise 0
    (logits).
    """
    if int(targets.min()) < 0 or int(targets.max()) > 1:
        return None
    half, zeros = torch.full_like(output[:4], 0.5), torch.zeros_like(targets[:4])
    try:
        difference = abs(float(loss(half, zeros)) - float(loss(half, torch.ones_like(zeros))))
    except Exception:  # a loss that takes only real outputs
        difference = 1.0
    return count_correct_probabilities if difference < 1e-6 else count_correct_logits


def count_correct(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Count the targets that are the largest output, with classes on the second axis; ignored labels do not count."""
    return _count_equal(getattr(output, "logits", output).argmax(dim=1), target)


def count_correct_last_axis(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Count the targets that are the largest output, with classes on the last axis."""
    return _count_equal(getattr(output, "logits", output).argmax(dim=-1), target)


def count_correct_logits(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Count the rows whose single output is above 0 exactly if the target is 1."""
    correct: torch.Tensor = (output.reshape(target.shape) > 0) == (target > 0)
    return correct.double().sum()


def count_correct_probabilities(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Count the rows whose single output is above 1/2 exactly if the target is 1."""
    correct: torch.Tensor = (output.reshape(target.shape) > 0.5) == (target > 0)
    return correct.double().sum()


BUILT_IN_METRICS = (count_correct, count_correct_last_axis, count_correct_logits, count_correct_probabilities)


def count_labels(target: torch.Tensor) -> float:
    """Count the labels that are not ignored."""
    return float((target >= 0).sum())


def _count_equal(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((prediction == target) & (target >= 0)).double().sum()


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


def loss_sums(loss: LossFunction, reduction: str) -> Callable[[Any, torch.Tensor], tuple[float, float]]:
    """Return a function that computes, for one batch, a sum of losses and the weight to divide it by.

    A mean over n rows has weight n. A sum is divided by the number of rows too, so that test losses are comparable.
    Cross-entropy with class weights or ignored labels is sum w_i l_i / sum w_i over all test rows, as torch computes it
    for one batch, and so are the losses of `hansa.losses`. Any other loss is averaged over batches of 500 rows,
    weighted by their rows.
    """
    if hasattr(loss, "sums"):
        return partial(_weighted_loss_sums, loss.sums)
    class_loss = torch_class_loss(loss)
    if class_loss is None or class_loss[1].get("reduction", "mean") != "mean":
        return partial(_row_sums, loss, reduction == "sum")
    function, settings = class_loss
    settings = {name: value for name, value in settings.items() if name != "reduction"}
    if settings.get("weight") is None:
        return partial(_label_sums, loss, function, settings, int(settings.get("ignore_index", -100)))
    return partial(_class_weighted_sums, function, settings, int(settings.get("ignore_index", -100)))


def _weighted_loss_sums(sums: Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor]], output: Any, target: Any) -> Any:
    total, weight = sums(output, target)
    return float(total), float(weight)


def _row_sums(loss: LossFunction, is_sum: bool, output: Any, target: Any) -> tuple[float, float]:
    value, rows = float(loss(output, target)), count_rows(target)
    return (value if is_sum else value * rows), float(rows)


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
        return _row_sums(loss, False, output, target)
    labels_per_row = target.numel() / len(target)
    total = float(function(output, target, reduction="sum", **settings))
    return total / labels_per_row, labels / labels_per_row


def _class_weighted_sums(
    function: Callable[..., torch.Tensor], settings: Mapping[str, Any], ignored: int, output: Any, target: torch.Tensor
) -> tuple[float, float]:
    if target.is_floating_point():  # class probabilities: torch divides by the rows
        return _row_sums(partial(function, **settings), False, output, target)
    weights = settings["weight"].to(output.device)
    labels = target[target != ignored]
    return float(function(output, target, reduction="sum", **settings)), float(weights[labels].double().sum())
