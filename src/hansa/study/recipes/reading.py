"""The number that a recipe reads from a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from hansa.runs import metrics
from hansa.study.recipes.recipe import RecipeMeasure

History: TypeAlias = Sequence[Mapping[str, Any]]


def read_measure(history: History, measure: RecipeMeasure) -> float | None:
    """Return one run's number in the unit of the paper; None if not measured, or if the target was not reached.

    A curve that is not finite in the last round has no number, except its best: a run that diverges would otherwise be
    judged by what it was before.

    >>> rounds = [{"round": r, "test_accuracy": r / 10, "simulated_seconds": 1800.0} for r in (1, 2, 3)]
    >>> read_measure(rounds, RecipeMeasure())
    30.0
    >>> read_measure(rounds, RecipeMeasure(statistic="hours_to", target=0.2, factor=1))
    1.0
    """
    if measure.statistic in ("rounds_to", "hours_to"):
        assert measure.target is not None
        reached = metrics.rounds_to(history, measure.target, measure.metric)
        if reached is None or measure.statistic == "rounds_to":
            return None if reached is None else float(reached)
        for record in metrics.running_totals(history):
            if record["round"] == reached:
                seconds = record.get("simulated_total_seconds")
                return None if seconds is None else float(seconds) / 3600
        return None
    if measure.statistic == "per_round":
        # the last round: the first one may send less, since all clients have the initial model
        totals = [float(record.get(measure.metric, math.nan)) for record in metrics.running_totals(history)]
        added = totals[-1] - totals[-2] if len(totals) > 1 else sum(totals, 0.0)
        return None if not totals or math.isnan(added) else added * measure.factor
    points = metrics.series(history, measure.metric)
    values = [value for _, value in points]
    if not values:
        return None
    if measure.statistic == "best":
        return measure.factor * (min(values) if measure.smaller_is_better else max(values))
    if points[-1][0] != int(history[-1]["round"]):
        return None
    if measure.statistic == "max":
        return measure.factor * max(values)
    if measure.statistic in ("jitter", "growth"):
        return _of_curve(values, measure)
    count = {"last": 1, "last5": 5, "last10": 10, "mean": len(values)}[measure.statistic]
    return measure.factor * math.fsum(values[-count:]) / len(values[-count:])


def _of_curve(values: Sequence[float], measure: RecipeMeasure) -> float | None:
    """Return how unsteady a curve is in its second half, or how its second half compares with the first."""
    half = len(values) // 2
    first, second = values[:half], values[half:]
    if measure.statistic == "jitter":
        changes = [abs(later - earlier) for earlier, later in pairwise(second if len(second) > 1 else values)]
        return measure.factor * math.fsum(changes) / len(changes) if changes else None
    before = math.fsum(first) / len(first) if first else 0.0
    return measure.factor * (math.fsum(second) / len(second)) / before if before else None


class SeedValue(NamedTuple):
    """One run's number; with ``reached`` false a lower bound, what had passed when the run ended without its target."""

    value: float
    reached: bool = True


def seed_values(histories: Sequence[History], measure: RecipeMeasure) -> list[SeedValue] | None:
    """Return one number for each seed, in their order; None if some run does not have it.

    >>> runs = [[{"round": r, "test_accuracy": top * r / 10} for r in range(1, 11)] for top in (0.9, 0.5)]
    >>> seed_values(runs, RecipeMeasure(statistic="rounds_to", target=0.7, factor=1))
    [SeedValue(value=8.0, reached=True), SeedValue(value=10.0, reached=False)]
    """
    values = []
    for history in histories:
        value = read_measure(history, measure)
        reached = value is not None
        if value is None and measure.target is not None and len(history):
            value = _passed(history, measure)
        if value is None or not math.isfinite(value):
            return None
        values.append(SeedValue(value, reached))
    return values or None


def why_not_measured(histories: Sequence[History], measure: RecipeMeasure) -> str:
    """Return why `seed_values` has no numbers.

    >>> runs = [[{"round": 1, "loss": 0.5}, {"round": 2, "loss": last}] for last in (0.4, math.nan)]
    >>> why_not_measured(runs, RecipeMeasure(metric="loss", statistic="last"))
    'run 2 of 2 has no finite loss in its last round'
    """
    for place, history in enumerate(histories, 1):
        if seed_values([history], measure) is None:
            return f"run {place} of {len(histories)} has no finite {measure.metric} in its last round"
    return "no runs"


def _passed(history: History, measure: RecipeMeasure) -> float | None:
    """Return the rounds or hours that a run took which did not reach its target."""
    last: Mapping[str, Any] = {}
    for record in metrics.running_totals(history):
        last = record
    if measure.statistic == "rounds_to":
        return float(last["round"])
    seconds = last.get("simulated_total_seconds")
    return None if seconds is None else float(seconds) / 3600
