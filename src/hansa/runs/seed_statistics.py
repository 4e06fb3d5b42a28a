"""Several seeds of one method as one result: means, deviations, and the rounds that all of them have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from hansa.core.errors import HansaError
from hansa.runs import metrics
from hansa.runs.metrics import History, Record


class Spread(NamedTuple):
    """One number over seeds: its mean, its sample standard deviation (n - 1 below), the least and the most."""

    mean: float
    deviation: float
    least: float
    most: float


def spread(values: Sequence[float]) -> Spread:
    """The mean of some numbers and how far they lie apart; the deviation of one number is 0.

    >>> spread([1.0, 2.0, 6.0])
    Spread(mean=3.0, deviation=2.6457513110645907, least=1.0, most=6.0)
    """
    return Spread(fmean(values), stdev(values) if len(values) > 1 else 0.0, min(values), max(values))


def combined(histories: Sequence[History], target: float | None = None) -> tuple[dict[str, Any], dict[str, Spread]]:
    """The summaries of several runs as one: the mean of every number, and its spread where there are several runs.

    Numbers that not all runs have are left out, but for the rounds to a target: None unless all reached it, and
    ``reached`` says how many did.

    >>> curves = [[{"round": r, "test_accuracy": a * r} for r in (1, 2)] for a in (0.2, 0.4)]
    >>> means, spreads = combined(curves, target=0.4)
    >>> round(means["test_accuracy"], 3), means["rounds_to_target"], spreads["rounds_to_target"].deviation
    (0.6, 1.5, 0.7071067811865476)
    """
    found = [metrics.summarize(history, target) for history in histories]
    if len(found) == 1:
        return found[0], {}
    means: dict[str, Any] = {}
    spreads: dict[str, Spread] = {}
    for name in found[0]:
        values = [summary.get(name) for summary in found]
        if all(_number(value) for value in values):
            spreads[name] = spread([float(value) for value in values])  # type: ignore[arg-type]
            means[name] = values[0] if len(set(values)) == 1 else spreads[name].mean
    if target is not None:
        means.setdefault("rounds_to_target", None)
        means["reached"] = sum(summary.get("rounds_to_target") is not None for summary in found)
    return means, spreads


def aligned(histories: Sequence[History]) -> Iterator[tuple[Record, ...]]:
    """The records of every round that all runs have, running totals included, a tuple a round."""
    for records in zip(*map(metrics.running_totals, histories), strict=False):
        if len({record["round"] for record in records}) > 1:
            raise HansaError(f"rounds {[record['round'] for record in records]} stand side by side: not of one group.")
        yield records


def over_seeds(histories: Sequence[History], metric: str) -> list[tuple[int, Spread]]:
    """(round, spread) of a metric where all runs measured it.

    >>> over_seeds([[{"round": 1, "loss": 1.0}], [{"round": 1, "loss": 3.0}]], "loss")[0][1].mean
    2.0
    """
    found = []
    for records in aligned(histories):
        values = [record.get(metric) for record in records]
        if all(_number(value) for value in values):
            found.append((int(records[0]["round"]), spread([float(value) for value in values])))  # type: ignore[arg-type]
    return found


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
