"""Scores of test rows: losses and metrics that do not depend on how the rows are divided into batches."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils import _pytree as trees

from hansa.core.errors import HansaError, short_repr
from hansa.training.batch_sources import count_rows, describe_shapes
from hansa.training.losses import LossFunction, strip_weights
from hansa.training.metrics import GroupedMetric, MergeableMetric, Sketch
from hansa.training.model_probe import ProbeResult, has_rows, select_output_rows

log = logging.getLogger("hansa")

Metric: TypeAlias = Callable[[Any, torch.Tensor], Any]


class UserMetricSums(NamedTuple):
    """Sums of a user's metric over batches: of its values, and of values times rows; and which of the two applies."""

    value_sum: float
    weighted_sum: float
    is_sum: bool
    is_mean: bool


class PartialScore(NamedTuple):
    """Sums over a range of test rows: the loss and its weight, and the ``correct`` among the ``labels`` not ignored.

    ``outputs`` are stored if the loss or a metric needs all rows at once.
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


def total_score(scores: Sequence[PartialScore], rows: int, loss: LossFunction | None) -> PartialScore:
    """Add the scores of all chunks. ``loss`` is the loss if it needs all rows at once: it is computed here."""
    score = merge_scores(scores)
    if loss is None:
        return score
    with torch.no_grad():
        value = float(loss(*_all_rows(score)))
    return score._replace(loss_sum=value * rows, weight=float(rows))


def compute_metrics(
    scores: Sequence[PartialScore],
    rows: int,
    metric: Metric | None,
    metrics: Mapping[str, Metric],
    loss: LossFunction | None = None,
) -> dict[str, float]:
    """Return loss, accuracy and further metrics of all test rows from one score per chunk, in order.

    ``loss`` is the task's loss if it needs all rows at once.
    """
    score = total_score(scores, rows, loss)
    results = {"test_loss": score.loss_sum / score.weight if score.weight else math.nan}
    hits, user = summed_hits(score, rows), score.user_metric
    if hits is not None:
        results["test_accuracy"] = hits[0] / max(1.0, hits[1])
    elif user is not None:
        name = getattr(metric, "__name__", "metric")
        raise HansaError(
            f"Task(metric={name}): its value for a batch is neither the sum nor the mean of its values for halves of "
            f"it. Use Task(metrics={{{name.strip('<>')!r}: ...}}), which is computed from all test rows at once."
        )
    return {**results, **_compute_on_all_rows(score, metrics)}


def compute_client_metrics(
    score: PartialScore,
    rows: int,
    metric: Metric | None,
    metrics: Mapping[str, Metric],
    loss: LossFunction | None = None,
) -> dict[str, float]:
    """Return loss, accuracy and further metrics of one client's test rows.

    A metric that raises ValueError for these rows, such as an AUC of a single class, is NaN.
    """
    overall = compute_metrics([score], rows, metric, {}, loss)
    results = {name.removeprefix("test_"): value for name, value in overall.items()}
    for name, function in metrics.items():
        try:
            results[name] = _compute_on_all_rows(score, {name: function})[f"test_{name}"]
        except HansaError:
            raise
        except ValueError:
            results[name] = math.nan
    return results


class SiteMetrics(NamedTuple):
    """What a site of a federation may send about its test rows: metrics by name, and sketches of some of them; and why
    it keeps others back, which is for the site only."""

    values: dict[str, float]
    sketches: dict[str, Sketch]
    kept_back: dict[str, str]


def compute_site_metrics(score: PartialScore, metrics: Mapping[str, Metric], fewest: int, sketch: bool) -> SiteMetrics:
    """Return the metrics of a site's test rows, each computed by the site.

    A metric that says something about fewer than ``fewest`` rows, such as an AUC with a rare class, or that fails, is
    left out, and ``kept_back`` says why.
    """
    results = SiteMetrics({}, {}, {})
    if not metrics:
        return results
    output, target = _all_rows(score)
    target = strip_weights(target)
    for name, metric in metrics.items():
        function = getattr(metric, "function", metric)  # of hansa.lower and hansa.higher
        try:
            group = function.smallest_group(target) if isinstance(function, GroupedMetric) else count_rows(target)
            if group < fewest:
                results.kept_back[name] = f"{group} rows in its smallest group, the policy has {fewest}"
                continue
            value = metric_number(name, metric(output, target))
            if math.isfinite(value):
                results.values[name] = value
            part = function.sketch(output, target, fewest) if sketch and isinstance(function, MergeableMetric) else None
            if part is not None:
                results.sketches[name] = part
        except Exception as error:
            results.kept_back[name] = f"{type(error).__name__}: {error}"
            log.warning("metric %s is left out: %s", name, results.kept_back[name])
    return results


def summed_hits(score: PartialScore, rows: int) -> tuple[float, float] | None:
    """Return the hits and their number of labels or rows, for accuracy; None if there is none that is a sum."""
    user = score.user_metric
    if score.correct is not None:
        return score.correct, score.labels
    if user is not None and (user.is_sum or user.is_mean):
        return user.value_sum if user.is_sum else user.weighted_sum, float(rows)
    return None


def _compute_on_all_rows(score: PartialScore, metrics: Mapping[str, Metric]) -> dict[str, float]:
    if not metrics:
        return {}
    output, target = _all_rows(score)
    return {f"test_{name}": metric_number(name, function(output, target)) for name, function in metrics.items()}


def metric_number(name: str, value: Any) -> float:
    """Return the value of one of a task's ``metrics`` as a number; raise if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise HansaError(
            f"Task(metrics): {name} returned {_describe(value)}: expected one number for all rows, such as their mean."
        ) from error


def check_metrics(probe: ProbeResult | None, metric: Metric | None, metrics: Mapping[str, Metric]) -> None:
    """Raise for metrics that do not return numbers for the probed rows.

    A metric that raises for so few rows, such as an AUC of a single class, is reported by the evaluation if it fails
    again.
    """
    if probe is None:
        return
    target = strip_weights(probe.target)
    for name, function in metrics.items():
        try:
            value = function(probe.output, target)
        except Exception as error:
            log.debug("the metric %s fails on a few rows: %s", name, error)
            continue
        metric_number(name, value)
    if metric is not None:
        try:
            value = metric(probe.output, target)
        except Exception as error:
            log.debug("the metric fails on a few rows: %s", error)
            return
        _as_number(metric, value, count_rows(target))


def check_outputs(probe: ProbeResult | None, loss_needs_them: bool) -> None:
    """Raise if the loss or a metric needs the outputs of all test rows, and outputs are no tensors with rows."""
    if probe is None or has_rows(probe.output, count_rows(probe.target)):
        return
    reason = "Task(loss): is neither a mean nor a sum over rows or labels, so it"
    what = reason if loss_needs_them else "Task(metrics)"
    raise HansaError(
        f"{what} needs the outputs of all test rows at once, but the model returns {short_repr(type(probe.output))} "
        "with something else than tensors of one entry per row. Return a tensor, or tuples or dicts of such tensors."
    )


def _describe(value: Any) -> str:
    return describe_shapes(value) if isinstance(value, torch.Tensor) else short_repr(value)


def _all_rows(score: PartialScore) -> tuple[Any, Any]:
    return (
        concatenate_outputs([output for output, _ in score.outputs]),
        concatenate_outputs([target for _, target in score.outputs]),
    )


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
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    for column in columns:
        shapes = {tuple(leaf.shape[1:]) for leaf in column}
        if len(shapes) > 1 or not all(leaf.ndim for leaf in column):
            raise HansaError(
                f"the loss or a metric needs all test rows at once, but batches have outputs or targets of different "
                f"shapes ({', '.join(map(str, sorted(shapes)))} a row). Pad them to one length, or use a loss of "
                "hansa.losses and metric= with one value per row."
            )
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
    if isinstance(value, torch.Tensor) and value.shape in ((rows,), (rows, 1)) and rows > 1:
        value = value.double().sum()
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise HansaError(
            f"Task(metric={getattr(metric, '__name__', 'metric')}): returned {_describe(value)}: expected the number "
            "of correct rows, or one value per row."
        ) from error
