"""The direction of metrics: whether a larger or a smaller value is better.

A metric states it itself: by `lower` or `higher`, or by ``higher_is_better`` as torchmetrics has it. A few names state
it too (`DIRECTIONS`), and so do the names of sklearn's functions.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from hansa.core.errors import HansaError, invalid_argument, short_repr

Direction: TypeAlias = Literal["higher", "lower", ""]
DIRECTIONS: dict[str, Direction] = {
    "accuracy": "higher", "auc": "higher", "f1": "higher", "c_index": "higher",
    "rmse": "lower", "mae": "lower", "mse": "lower", "loss": "lower",
}  # fmt: skip
"""The metrics whose direction their name states."""


class DirectedMetric:
    """A metric that states whether a larger value is better; made by `lower` and `higher`."""

    def __init__(self, function: Callable[..., Any], higher_is_better: bool) -> None:
        self.function, self.higher_is_better = function, higher_is_better
        if not callable(function) and not is_metric_object(function):
            raise invalid_argument(self.direction, "metric", function, "a function of (outputs, targets)")
        updated = ("__dict__",) if isinstance(function, types.FunctionType) else ()
        functools.update_wrapper(self, function, updated=updated)

    @property
    def direction(self) -> Direction:
        """The better direction."""
        return "higher" if self.higher_is_better else "lower"

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __repr__(self) -> str:
        return f"{self.direction}({getattr(self.function, '__name__', self.function)})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        name = getattr(self, "__qualname__", "")
        if getattr(sys.modules.get(getattr(self, "__module__", "")), name, None) is self:  # a decorated function
            return str(name)
        return type(self), (self.function, self.higher_is_better)


def lower(metric: Callable[..., Any]) -> DirectedMetric:
    """State that a smaller value of a metric is better: ``metrics={"delay": hansa.lower(delay)}``, or as a decorator.

    Args:
        metric: A function of (outputs, targets), or an object with ``update`` and ``compute``.

    >>> lower(max)
    lower(max)
    """
    return DirectedMetric(metric, False)


def higher(metric: Callable[..., Any]) -> DirectedMetric:
    """State that a larger value of a metric is better: ``metrics={"margin": hansa.higher(margin)}``.

    Args:
        metric: A function of (outputs, targets), or an object with ``update`` and ``compute``.

    >>> higher(max)(2, 3)
    3
    """
    return DirectedMetric(metric, True)


def is_metric_object(metric: Any) -> bool:
    """Return whether a metric is an object with ``update`` and ``compute``, as those of torchmetrics."""
    return not isinstance(metric, type) and all(callable(getattr(metric, n, None)) for n in ("update", "compute"))


def is_of_sklearn(metric: Any) -> bool:
    """Return whether a metric is a function of ``sklearn.metrics``, which takes (y_true, y_pred)."""
    return str(getattr(unwrapped(metric), "__module__", "")).startswith("sklearn.")


def unwrapped(metric: Any) -> Any:
    """Return the function of a metric, without its direction and without arguments that are set."""
    while isinstance(metric, (functools.partial, DirectedMetric)):
        metric = metric.function if isinstance(metric, DirectedMetric) else metric.func
    return metric


def stated_direction(name: str, metric: Any) -> Direction:
    """Return the direction that a metric states with ``higher_is_better``, or by its name, or as sklearn's functions do
    by the ends of theirs; "" if it states none.

    >>> stated_direction("rmse", max), stated_direction("spread", max)
    ('lower', '')
    """
    own = getattr(metric, "higher_is_better", None)
    if isinstance(own, bool):
        return "higher" if own else "lower"
    function = getattr(unwrapped(metric), "__name__", "")
    if is_of_sklearn(metric):
        if function.endswith("_score") and function != "brier_score":
            return "higher"
        return "lower" if function.endswith(("_error", "_loss", "_deviance")) else ""
    return DIRECTIONS.get(name, DIRECTIONS.get(function, ""))


def metric_directions(metrics: Mapping[str, Callable[..., Any]]) -> dict[str, Direction]:
    """Return the direction of every metric of a task, and refuse those without one.

    Args:
        metrics: Functions of (outputs, targets) by name.

    >>> metric_directions({"rmse": max, "margin": higher(max)})
    {'rmse': 'lower', 'margin': 'higher'}
    >>> metric_directions({"margin": max})
    Traceback (most recent call last):
    hansa.core.errors.HansaError: Task(metrics={'margin': ...}): nothing says whether a larger value is better. ...
    """
    directions: dict[str, Direction] = {}
    for name, metric in metrics.items():
        directions[name] = stated_direction(name, metric)
        if not directions[name]:
            shown = getattr(metric, "__name__", "f").strip("<>")
            raise HansaError(
                f"Task(metrics={{{short_repr(name)}: ...}}): nothing says whether a larger value is better. "
                f"Write hansa.higher({shown}) or hansa.lower({shown}); in a file, "
                f"metrics: {{{name}: {{function: MODULE:{shown}, better: lower}}}}."
            )
    return directions


def check_rises(metric: Any) -> None:
    """Refuse a falling metric as accuracy."""
    if metric is not None and stated_direction("", metric) == "lower":
        name = getattr(metric, "__name__", "f").strip("<>")
        raise invalid_argument(
            "Task", "metric", metric, "an accuracy, which rises", f"metrics={{{name!r}: ...}} takes any metric."
        )


def main_column(metrics: Mapping[str, Any], accuracy: bool, requested: str | None = None) -> str:
    """Return the column that runs of a task are ranked by: the requested one, else accuracy, the first metric, or loss.

    Args:
        metrics: The metrics of the task by name.
        accuracy: Whether the task has an accuracy.
        requested: The name of a metric, "accuracy" or "loss".

    >>> main_column({"c_index": max}, accuracy=False), main_column({"auc": max}, accuracy=True)
    ('test_c_index', 'test_accuracy')
    """
    known = [*(["accuracy"] if accuracy or "accuracy" in metrics else []), *metrics, "loss"]
    name = known[0] if requested is None else requested.removeprefix("test_")
    if name not in known:
        raise invalid_argument("Task", "main_metric", requested, f"one of {', '.join(known)}")
    return f"test_{name}"
