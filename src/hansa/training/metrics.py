"""Metrics: accuracy, which is summed over batches, and metrics of all test rows at once.

The latter are functions of the outputs and targets of all rows, functions of sklearn, or objects with ``update`` and
``compute`` as torchmetrics has them. Of outputs that are NaN or positive infinity every metric is NaN. A metric that
can also be computed from **sketches** of parts of the rows (`MergeableMetric`) is pooled over the sites of a federation
without their outputs.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

from hansa.core import trees
from hansa.core.errors import HansaError, check_function, invalid_argument, short_repr
from hansa.training.batch_sources import count_rows, describe_shapes
from hansa.training.losses import LossFunction, counted_labels, logits_of, torch_form
from hansa.training.metric_direction import DirectedMetric, is_metric_object, is_of_sklearn, unwrapped

Metric: TypeAlias = Callable[[Any, Any], Any]
"""A metric of (outputs, targets), as users write it."""

Sketch: TypeAlias = Mapping[str, Sequence[Sequence[float]]]
"""What a site sends in place of outputs: lists of rows of numbers, by name."""
_THRESHOLDS = {"bce": 0.0, "binary_cross_entropy_with_logits": 0.0, "binary_cross_entropy": 0.5}


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The share of labels that are predicted.

    Negative labels and ``ignored`` ones do not count. The prediction is the largest output on the axis of the classes;
    of one output per row it is whether that is above ``threshold``. NaN if an output is NaN or positive infinity.

    Args:
        axis: The axis of the classes, 1 or -1.
        threshold: The threshold of one output per row, 0 for a logit and 1/2 for a probability.
        ignored: A label that does not count.

    >>> Accuracy().score(torch.eye(3), torch.tensor([0, 2, -1]))
    (1.0, 2.0)
    """

    axis: int = 1
    threshold: float | None = None
    ignored: int | None = None

    def score(self, output: Any, target: torch.Tensor) -> tuple[float, float]:
        """Return the number of correct predictions and the number of labels."""
        scores = logits_of(output)
        mask = counted_labels(target, self.ignored)
        if self.threshold is None:
            hits = scores.argmax(dim=self.axis) == target
        else:
            hits = (scores.reshape(target.shape) > self.threshold) == (target > 0)
        labels = float(mask.sum())
        return (math.nan if has_no_order(scores) else float((hits & mask).double().sum())), labels


@dataclass(frozen=True, slots=True)
class RowMetric:
    """A user's metric that returns one value per row: accuracy is their mean.

    Args:
        function: The function of (output, target).
    """

    function: Metric

    def score(self, output: Any, target: Any) -> tuple[float, float]:
        """Return the sum of the values and the number of rows."""
        rows, value = count_rows(target), self.function(output, target)
        if getattr(value, "shape", None) not in ((rows,), (rows, 1)):
            name = getattr(self.function, "__name__", "metric")
            raise HansaError(
                f"Task(metric={name}): returned {_describe(value)} for {rows} rows: expected one value each."
            )
        return (math.nan if has_no_order(output) else float(value.double().sum())), float(rows)


def has_no_order(outputs: Any) -> bool:
    """Return whether an output is NaN or positive infinity. Negative infinity is what masks write.

    >>> has_no_order(torch.tensor([0.0, float("-inf")])), has_no_order({"a": torch.tensor([float("nan")])})
    (False, True)
    """
    leaves = [leaf for leaf in trees.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.numel()]
    return any(leaf.is_floating_point() and not float(leaf.detach().amax()) < math.inf for leaf in leaves)


def default_accuracy(
    loss: LossFunction, output: Any, target: Any, targets: Any, ignored: int | None
) -> tuple[Accuracy | None, str]:
    """Return the accuracy of class numbers, if shapes and a known loss leave one choice; otherwise why there is none,
    "" where nobody would expect one. ``output`` and ``target`` are those of a few rows, ``targets`` all."""
    output, form = logits_of(output), torch_form(loss)
    if not isinstance(target, torch.Tensor) or target.is_floating_point() or target.is_complex():
        return None, ""
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        return None, f"the model returns {describe_shapes(output)}"
    if output.shape in (target.shape, (*target.shape, 1)):
        if target.ndim != 1 or bool((targets > 1).any()):
            return None, ""
        threshold = _THRESHOLDS.get(type(loss).__name__ if form is None else form.function.__name__)
        if threshold is None:
            return None, "one output per row may be a logit or a probability"
        return Accuracy(threshold=threshold, ignored=ignored), ""
    axis = "second" if form is not None and form.of_classes else getattr(loss, "class_axis", "")
    second_fits = output.ndim == target.ndim + 1 and output.shape[2:] == target.shape[1:]
    last_fits = output.ndim == target.ndim + 1 and output.shape[:-1] == target.shape
    unknown_order = target.ndim == 2 and not axis  # a language model may compare outputs with the next label
    if second_fits and (axis in ("auto", "second") or output.ndim == 2 or not (last_fits or unknown_order)):
        return Accuracy(1, ignored=ignored), ""
    if last_fits and axis in ("auto", "last"):
        return Accuracy(-1, ignored=ignored), ""
    reason = "its classes may be on two axes, or its loss may compare outputs with the next label"
    return None, reason if second_fits or last_fits else ""


def compute_metric(name: str, metric: Any, output: Any, target: Any) -> float:
    """Return a metric of the outputs and targets of all rows as a number; NaN if outputs have no order."""
    if has_no_order(output):
        return math.nan
    function: Any = metric.function if isinstance(metric, DirectedMetric) else metric
    if is_metric_object(function):
        function = copy.deepcopy(function)
        if hasattr(function, "reset"):
            function.reset()
        function.update(output, target)
        value = function.compute()
    elif is_of_sklearn(function):
        value = function(_as_array(target), _as_array(output))
    else:
        value = function(output, target)
    return _number(f"Task(metrics): {name}", value)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise HansaError(
            f"{name} returned {_describe(value)}: expected one number for all rows, such as their mean."
        ) from None


def _as_array(tree: Any) -> Any:
    """Return a tensor as NumPy array, a column as a vector."""
    if not isinstance(tree, torch.Tensor):
        return tree
    return (tree[:, 0] if tree.ndim == 2 and tree.shape[1] == 1 else tree).detach().numpy()


def is_row_metric(metric: Any, output: Any, target: Any) -> bool:
    """Return whether a user's accuracy gives one value per row; raise for what is no share of the rows."""
    if is_metric_object(metric) or is_of_sklearn(metric):
        return False
    rows, name = count_rows(target), f"Task(metric={getattr(metric, '__name__', type(metric).__name__)})"
    try:
        value = metric(output, target)
    except Exception:  # such as for one class among few rows; if it fails again, evaluation says so
        return False
    if getattr(value, "shape", None) in ((rows,), (rows, 1)):
        return True
    if _number(name, value) > 1 + 1e-6:
        raise HansaError(
            f"{name}: returned {_describe(value)} for {rows} rows: expected one value per row, or one number up to 1 "
            "such as their mean, not their sum. metrics={...} takes any metric."
        )
    return False


def check_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a task; raise if one is no metric or its name is taken."""
    if not isinstance(metrics, Mapping):
        raise invalid_argument("Task", "metrics", metrics, "metrics by name", "{'auc': hansa.metrics.roc_auc()}.")
    for name, metric in metrics.items():
        valid, function = isinstance(name, str) and name.isidentifier() and name != "loss", unwrapped(metric)
        if not valid or isinstance(function, type) or not (callable(function) or is_metric_object(function)):
            raise HansaError(
                f"Task(metrics={{{short_repr(name)}: {short_repr(metric)}}}): expected an identifier other than loss, "
                "and a function of (outputs, targets) or an object with update() and compute()."
            )
        if not is_metric_object(function):
            check_function("Task", f"metrics[{name!r}]", function, "outputs", "targets")
    return dict(metrics)


def _describe(value: Any) -> str:
    return describe_shapes(value) if isinstance(value, torch.Tensor) else short_repr(value)


class Bounded(NamedTuple):
    """A metric that was computed from sketches: its value, and the least and the largest that it can be."""

    value: float
    at_least: float
    at_most: float


@runtime_checkable
class GroupedMetric(Protocol):
    """A metric whose value says something about a group of rows, such as those of one class."""

    def smallest_group(self, target: Any) -> int:
        """Return the number of rows of the smallest group."""
        ...


@runtime_checkable
class MergeableMetric(Protocol):
    """A metric that can be computed from sketches."""

    def sketch(self, output: Any, target: Any, fewest: int) -> Sketch | None:
        """Return a sketch whose counts are all 0 or at least ``fewest``; None if there are too few rows for one."""
        ...

    def combine(self, sketches: Sequence[Sketch]) -> Bounded:
        """Return the metric of all rows. The sketches come from other parties: raise ValueError for impossible ones."""
        ...


@dataclass(frozen=True, slots=True)
class RocAuc:
    """The area under the ROC curve of two classes: the share of pairs of a positive and a negative row in which the
    positive one has the higher score; equal scores count one half. NaN if there is only one class.

    A sketch is a microaggregation of the scores (Domingo-Ferrer and Mateo-Sanz 2002): the logistic function maps them
    to (0, 1), and for each class groups of at least ``fewest`` consecutive scores are replaced by their number and
    mean. The area of all rows is computed as if the scores of a group were uniform between its neighbours. They lie
    between the means of the groups before and after, which bounds the value.

    >>> roc_auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    0.75
    """

    higher_is_better = True
    __name__ = "roc_auc"

    def __call__(self, output: Any, target: torch.Tensor) -> float:
        positive, negative = _scores_by_class(output, target)
        if not len(positive) or not len(negative) or not bool(torch.isfinite(torch.cat([positive, negative])).all()):
            return math.nan
        ordered = negative.sort().values
        below = torch.searchsorted(ordered, positive)
        level = torch.searchsorted(ordered, positive, right=True) - below
        return int((2 * below + level).sum()) / (2 * len(positive) * len(negative))

    def smallest_group(self, target: torch.Tensor) -> int:
        """Return the number of rows of the smaller class."""
        positive = int((target.reshape(-1) > 0).sum())
        return min(positive, target.numel() - positive)

    def sketch(self, output: Any, target: torch.Tensor, fewest: int) -> Sketch | None:
        """Return rows and mean of the groups of each class; None if a class has fewer rows than ``fewest``.

        >>> roc_auc.sketch(torch.tensor([-2.0, -1.0, 1.0, 2.0]), torch.tensor([0, 0, 1, 1]), fewest=2)
        {'negative': [[2, 0.194072]], 'positive': [[2, 0.805928]]}
        """
        positive, negative = _scores_by_class(output, target)
        finite = bool(torch.isfinite(torch.cat([positive, negative])).all())
        if self.smallest_group(target) < max(1, fewest) or not finite:
            return None
        return {"negative": _group_means(negative, fewest), "positive": _group_means(positive, fewest)}

    def combine(self, sketches: Sequence[Sketch]) -> Bounded:
        """Return the area of all rows from the sites' groups.

        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> scores = [torch.tensor([-3.0, -2.0, 0.5, 1.0]), torch.tensor([-4.0, -1.0, 2.0, 3.0])]
        >>> roc_auc.combine([roc_auc.sketch(each, labels, fewest=1) for each in scores])
        Bounded(value=1.0, at_least=0.25, at_most=1.0)
        """
        positive, negative = ([_read_groups(sketch, name) for sketch in sketches] for name in ("positive", "negative"))
        above, below = torch.cat([torch.empty(5, 0), *positive], 1), torch.cat([torch.empty(5, 0), *negative], 1)
        pairs = float(above[0].sum() * below[0].sum())
        if not pairs:
            return Bounded(math.nan, math.nan, math.nan)
        value = float(_area_below(above, below).sum()) / pairs
        lower = float((above[0] * _rows_below(below, above)).sum()) / pairs
        upper = 1 - float((below[0] * _rows_below(above, below)).sum()) / pairs
        return Bounded(min(max(value, lower), upper), lower, upper)


@dataclass(frozen=True, slots=True)
class ConcordanceIndex:
    """Harrell's C-index: the share of comparable pairs in which the higher output (the risk) has the event first.

    A target has two columns: 1 for an event and 0 for a censored row, and the time. A pair is comparable if the earlier
    time is an event, or both times are equal and one of them is an event. Equal risks count one half; so do pairs of
    two events at the same time, unless their risks are equal, which counts one. NaN if no pair is comparable. It has no
    sketch: in a federation it is computed by site.

    >>> c_index(torch.tensor([[2.0], [1.0], [0.0]]), torch.tensor([[1.0, 1.0], [1.0, 2.0], [0.0, 3.0]]))
    1.0
    """

    higher_is_better = True
    __name__ = "c_index"

    def __call__(self, output: Any, target: torch.Tensor) -> float:
        risk, (event, time) = _single_output("c_index", output), _events_and_times(target)
        if not bool(torch.isfinite(risk).all()):
            return math.nan
        index = torch.arange(len(time))
        halves = count = 0
        for start in range(0, len(time), _BLOCK):
            rows = slice(start, start + _BLOCK)
            row_event, row_time, row_risk = event[rows, None], time[rows, None], risk[rows, None]
            same_time = row_time == time
            pairs = row_event & ((row_time < time) | (same_time & ~event)) & (index[rows, None] != index)
            event_pairs = row_event & event & same_time & (index[rows, None] < index)
            same_risk = row_risk == risk
            halves += int(2 * (pairs & (row_risk > risk)).sum() + (pairs & same_risk).sum())
            halves += int((event_pairs & ~same_risk).sum() + 2 * (event_pairs & same_risk).sum())
            count += int(pairs.sum() + event_pairs.sum())
        return halves / (2 * count) if count else math.nan

    def smallest_group(self, target: torch.Tensor) -> int:
        """Return the number of events."""
        return int(_events_and_times(target)[0].sum())


roc_auc = RocAuc()
c_index = ConcordanceIndex()
METRICS: dict[str, Callable[[Any, torch.Tensor], float]] = {"roc_auc": roc_auc, "c_index": c_index}
"""The metrics that a configuration can name without a module."""

_BLOCK = 512  # rows compared with all others at once
_HALF = 1e-6  # the half width of the narrowest group: means are rounded
_DIGITS = 6
_MAX_GROUPS = 200  # of a class at a site
_MAX_COUNT = 1 << 40


def _single_output(name: str, output: Any) -> torch.Tensor:
    scores = logits_of(output)
    if scores.ndim > 1 and scores.shape[1:].numel() != 1:
        raise HansaError(f"{name}: outputs of shape {tuple(scores.shape)}, expected one per row.")
    return scores.reshape(-1).double()


def _scores_by_class(output: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of the positive and of the negative rows; of two outputs, the score is their difference."""
    scores = logits_of(output)
    if scores.ndim == 2 and scores.shape[1] == 2:
        scores = scores[:, 1].double() - scores[:, 0].double()
    elif scores.ndim > 1 and scores.shape[1:].numel() != 1:
        raise HansaError(f"roc_auc: outputs of shape {tuple(scores.shape)}, expected one or two per row: two classes.")
    scores, labels = scores.reshape(-1).double(), target.reshape(-1)
    if labels.numel() != scores.numel() or bool(((labels != 0) & (labels != 1)).any()):
        raise HansaError(f"roc_auc: targets of shape {tuple(target.shape)}, expected 0 or 1 for each row.")
    return scores[labels == 1], scores[labels == 0]


def _events_and_times(target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if target.ndim != 2 or target.shape[1] != 2:
        raise HansaError(f"c_index: targets of shape {tuple(target.shape)}, expected (rows, 2): event and time.")
    event, time = target[:, 0], target[:, 1]
    if bool(((event != 0) & (event != 1)).any()) or not bool(torch.isfinite(time).all()):
        raise HansaError("c_index: expected targets with two columns: 1 or 0 for an event or none, then a finite time.")
    return event > 0, time


def _group_means(scores: torch.Tensor, fewest: int) -> list[list[float]]:
    """Return [rows, mean] of groups of consecutive scores, each of at least ``fewest``.

    >>> _group_means(torch.zeros(7, dtype=torch.float64), 3)
    [[4, 0.5], [3, 0.5]]
    """
    ordered = torch.sigmoid(scores).sort().values
    groups = torch.tensor_split(ordered, min(_MAX_GROUPS, max(1, len(scores) // max(1, fewest))))
    return [[len(group), round(float(group.mean()), _DIGITS)] for group in groups]


def _read_groups(sketch: Sketch, name: str) -> torch.Tensor:
    """Return a column for each group of a class: its rows, the assumed range of its scores, and their certain range.
    Raise ValueError for anything but a list of groups."""
    if set(sketch) != {"negative", "positive"}:
        raise ValueError("a sketch without the two classes")
    groups = sketch[name]
    if not 0 < len(groups) <= _MAX_GROUPS or any(len(group) != 2 for group in groups):
        raise ValueError(f"not a list of 1 to {_MAX_GROUPS} groups")
    rows, means = [group[0] for group in groups], [float(group[1]) for group in groups]
    if not all(isinstance(count, int) and 0 < count < _MAX_COUNT for count in rows):
        raise ValueError("a group with an impossible number of rows")
    if means != sorted(means) or not 0 <= means[0] <= means[-1] <= 1:
        raise ValueError("means of groups that are not in order between 0 and 1")
    edges = [(a + b) / 2 for a, b in itertools.pairwise(means)]
    spread = min(means[0], 1 - means[0])  # a single group has no neighbours
    low = max(0.0, 2 * means[0] - edges[0]) if edges else means[0] - spread
    high = min(1.0, 2 * means[-1] - edges[-1]) if edges else means[0] + spread
    bounds = [[low, *edges], [*edges, high], [0.0, *means[:-1]], [*means[1:], 1.0]]
    return torch.tensor([rows, *bounds], dtype=torch.float64)


def _area_below(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """Return for each group of ``above`` its rows times the expected rows of ``below`` with a lower score."""
    start, stop = above[1] - _HALF, above[2] + _HALF
    low, high = below[1] - _HALF, below[2] + _HALF

    def integral(x: torch.Tensor) -> torch.Tensor:
        """The integral up to x of the number of rows below."""
        inside = x[:, None].clamp(low, high) - low
        beyond = (x[:, None] - high).clamp(min=0)
        return ((inside**2 / (2 * (high - low)) + beyond) * below[0]).sum(1)

    blocks = [slice(i, i + _BLOCK) for i in range(0, len(start), _BLOCK)]
    means = [(integral(stop[block]) - integral(start[block])) / (stop[block] - start[block]) for block in blocks]
    return above[0] * torch.cat(means)


def _rows_below(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return for each group of ``high`` the rows of ``low`` whose scores are certainly lower."""
    order = low[4].argsort()
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), low[0][order].cumsum(0)])
    return sums[torch.searchsorted(low[4][order] + 2 * _HALF, high[3])]
