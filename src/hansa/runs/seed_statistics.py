"""Statistics over several seeds of one method: means, standard deviations, and curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from hansa.core.errors import HansaError
from hansa.runs import metrics
from hansa.runs.columns import WINDOW
from hansa.runs.metrics import History, Record


class SeedStatistics(NamedTuple):
    """One number over seeds: mean, sample standard deviation (n - 1), minimum and maximum."""

    mean: float
    std: float
    min: float
    max: float


def seed_statistics(values: Sequence[float]) -> SeedStatistics:
    """Return the statistics of some numbers; the standard deviation of one number is 0. NaN makes all of them NaN.

    >>> seed_statistics([1.0, 2.0, 6.0])
    SeedStatistics(mean=3.0, std=2.6457513110645907, min=1.0, max=6.0)
    """
    if not all(map(math.isfinite, values)):
        if any(map(math.isnan, values)):
            return SeedStatistics(math.nan, math.nan, math.nan, math.nan)
        mean = sum(values) / len(values)  # infinite, or NaN of both infinities
        return SeedStatistics(mean, math.nan, min(values), max(values))
    return SeedStatistics(fmean(values), stdev(values) if len(values) > 1 else 0.0, min(values), max(values))


def summarize_seeds(
    histories: Sequence[History],
    target: float | None = None,
    *,
    metric: str | None = None,
    window: int = WINDOW,
) -> tuple[dict[str, Any], dict[str, SeedStatistics]]:
    """Summarize several runs as one: the mean of every number, and its statistics if there are several runs.

    Numbers that not all runs have are left out, except for the rounds and bits to a target: None unless all reached it,
    and ``reached`` is how many did.

    Args:
        histories: The history of each seed.
        target: The value that the metric is to reach.
        metric: The metric of the target; by default the main one.
        window: How many of the last measurements are averaged.

    >>> curves = [[{"round": r, "test_accuracy": a * r} for r in (1, 2)] for a in (0.2, 0.4)]
    >>> means, spreads = summarize_seeds(curves, target=0.4)
    >>> round(means["test_accuracy"], 3), means["rounds_to_target"], spreads["rounds_to_target"].std
    (0.6, 1.5, 0.7071067811865476)
    """
    summaries = [metrics.summarize(history, target, metric=metric, window=window) for history in histories]
    if len(summaries) == 1:
        return summaries[0], {}
    means: dict[str, Any] = {}
    spreads: dict[str, SeedStatistics] = {}
    for name in summaries[0]:
        values = [summary.get(name) for summary in summaries]
        if all(_number(value) for value in values):
            spreads[name] = seed_statistics([float(value) for value in values])  # type: ignore[arg-type]
            means[name] = values[0] if len(set(values)) == 1 else spreads[name].mean
    if target is not None:
        means.setdefault("rounds_to_target", None)
        means.setdefault("bits_to_target", None)
        means["reached"] = sum(summary.get("rounds_to_target") is not None for summary in summaries)
    return means, spreads


def aligned_rounds(histories: Sequence[History]) -> Iterator[tuple[Record, ...]]:
    """Yield the records of every round that all runs have, with running totals."""
    for records in zip(*map(metrics.running_totals, histories), strict=False):
        if len({record["round"] for record in records}) > 1:
            raise HansaError(
                f"rounds {[record['round'] for record in records]} do not match: the seeds have different rounds."
            )
        yield records


def metric_over_seeds(histories: Sequence[History], metric: str) -> list[tuple[int, SeedStatistics]]:
    """Return (round, statistics) of a metric for the rounds in which all runs measured it.

    >>> metric_over_seeds([[{"round": 1, "loss": 1.0}], [{"round": 1, "loss": 3.0}]], "loss")[0][1].mean
    2.0
    """
    points = []
    for records in aligned_rounds(histories):
        values = [record.get(metric) for record in records]
        if all(_number(value) for value in values):
            points.append((int(records[0]["round"]), seed_statistics([float(value) for value in values])))  # type: ignore[arg-type]
    return points


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
