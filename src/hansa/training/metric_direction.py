"""Whether a larger or a smaller value of a metric is better.

A metric states it: by `lower` or `higher`, or by ``higher_is_better`` as in torchmetrics. The names in `DIRECTIONS`
and the ends of the names of sklearn's functions state it too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from hansa.core.errors import HansaError, short_repr

Direction: TypeAlias = Literal["higher", "lower", ""]
DIRECTIONS: dict[str, Direction] = {
    "accuracy": "higher", "auc": "higher", "f1": "higher", "c_index": "higher",
    "rmse": "lower", "mae": "lower", "mse": "lower", "loss": "lower",
}  # fmt: skip
_OF_SKLEARN: dict[str, Direction] = {"score": "higher", "error": "lower", "loss": "lower", "deviance": "lower"}


class DirectedMetric:
    """A metric that states whether a larger value is better; made by `lower` and `higher`."""

    def __init__(self, function: Callable[..., Any], higher_is_better: bool) -> None:
        self.function, self.higher_is_better = function, higher_is_better
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __repr__(self) -> str:
        return f"{'higher' if self.higher_is_better else 'lower'}({getattr(self.function, '__name__', self.function)})"

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


def unwrapped(metric: Any) -> Any:
    """Return the function of a metric, without its direction and without arguments that are set."""
    while isinstance(metric, (functools.partial, DirectedMetric)):
        metric = metric.function if isinstance(metric, DirectedMetric) else metric.func
    return metric


def is_metric_object(metric: Any) -> bool:
    """Return whether a metric is an object with ``update`` and ``compute``, as those of torchmetrics."""
    return not isinstance(metric, type) and all(callable(getattr(metric, n, None)) for n in ("update", "compute"))


def is_of_sklearn(metric: Any) -> bool:
    """Return whether a metric is a function of ``sklearn.metrics``, which takes (y_true, y_pred)."""
    return str(getattr(unwrapped(metric), "__module__", "")).startswith("sklearn.")


def stated_direction(name: str, metric: Any) -> Direction:
    """Return the direction that a metric, or its name, states; "" if none.

    >>> stated_direction("rmse", max), stated_direction("spread", max)
    ('lower', '')
    """
    higher = getattr(metric, "higher_is_better", None)
    if isinstance(higher, bool):
        return "higher" if higher else "lower"
    function = getattr(unwrapped(metric), "__name__", "")
    if is_of_sklearn(metric):
        return _OF_SKLEARN.get(function.rpartition("_")[2], "")
    return DIRECTIONS.get(name, DIRECTIONS.get(function, ""))


def metric_directions(metrics: Mapping[str, Callable[..., Any]]) -> dict[str, Direction]:
    """Return the direction of every metric of a task, and refuse those without one.

    >>> metric_directions({"rmse": max, "margin": higher(max)})
    {'rmse': 'lower', 'margin': 'higher'}
    """
    directions = {name: stated_direction(name, metric) for name, metric in metrics.items()}
    for name in (name for name, direction in directions.items() if not direction):
        function = getattr(metrics[name], "__name__", "f").strip("<>")
        raise HansaError(
            f"Task(metrics={{{short_repr(name)}: ...}}): nothing says whether a larger value is better. Write "
            f"hansa.higher({function}) or hansa.lower({function}); in a file, metrics: "
            f"{{{name}: {{function: MODULE:{function}, better: lower}}}}."
        )
    return directions
