"""Metrics of a run's history: best, final, rounds and bits to a target, summaries over seeds, sites, intervals.

A history is a sequence of records, one for each round. A ``metric`` is a column, or COLUMN:lower if its direction is
unknown; by default it is the main metric of the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from hansa.core.errors import HansaError, check_integer, short_repr, suggestion
from hansa.runs.columns import (
    BITS,
    OUTCOMES,
    TOTALS,
    WINDOW,
    column_of,
    evaluated_metrics,
    facts_of,
    is_number,
    lower_is_better,
    main_metric,
    plain_name,
    split_metric,
)
from hansa.training.metric_direction import Direction

if TYPE_CHECKING:
    import pandas

    from hansa.runs.driver import Run

Record: TypeAlias = Mapping[str, Any]
History: TypeAlias = Sequence[Record]

MIN_SEEDS = 3
"""The minimum number of seeds for a confidence interval."""
_TABLE = ("round", "train_loss", "test_loss", "test_accuracy", "up_bytes")
_ROWS = "/test_rows"
PARTS = ("work_seconds", "transport_seconds")
"""The parts of a round's seconds spent on its slowest site; the remaining seconds are the server's."""


def column_names(history: Iterable[Record]) -> list[str]:
    """Return the names of all columns of a history."""
    return list(dict.fromkeys(name for record in history for name in record))


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number; booleans are not."""
    return is_number(value) and math.isfinite(value)


def series(history: History, metric: str | None = None) -> list[tuple[int, float]]:
    """Return (round, value) of the rounds in which a metric was measured and finite.

    >>> series([{"round": 1, "test_accuracy": 0.5}, {"round": 2}, {"round": 3, "test_accuracy": 0.7}])
    [(1, 0.5), (3, 0.7)]
    """
    return _measured(history, metric)[0]


def _measured(history: History, metric: str | None) -> tuple[list[tuple[int, float]], str, dict[str, Direction]]:
    """Return the finite measurements of a metric, by default the main one, with its column and all directions."""
    facts = facts_of(history)
    name, better = split_metric(main_metric(column_names(history), facts) if metric is None else metric, facts.better)
    points = [(int(record["round"]), float(record[name])) for record in history if is_finite(record.get(name))]
    if not points and history and name not in (names := column_names(history)):
        raise HansaError(f"the history has no metric {name!r}. {suggestion(name, names)}")
    return points, name, better


def diverged_at(history: Iterable[Record], metric: str) -> int | None:
    """Return the round since which a metric has not been finite; None if its last measurement is finite.

    Rounds without a measurement are skipped; for ``train_loss`` also rounds without participants.

    >>> diverged_at([{"round": 1, "loss": 0.5}, {"round": 2, "loss": math.nan}, {"round": 3}], "loss")
    2
    """
    start = None
    for record in history:
        value = record.get(metric)
        if not isinstance(value, (int, float)) or (metric == "train_loss" and record.get("participants") == 0):
            continue
        start = None if is_finite(value) else int(record["round"]) if start is None else start
    return start


def best(history: History, metric: str | None = None) -> float | None:
    """Return the best finite value of a metric; None if it was never measured.

    >>> best([{"round": 1, "test_loss": 0.5}, {"round": 2, "test_loss": 0.7}], "test_loss")
    0.5
    """
    points, name, better = _measured(history, metric)
    choose = min if lower_is_better(name, better) else max
    return choose((value for _, value in points), default=None)


def last(
    history: History, metric: str | None = None, count: int = WINDOW, *, few_as_final: bool = False
) -> float | None:
    """Return the mean of the last ``count`` measurements: less noisy than the last, without the best's selection bias.

    NaN if the last measurement is not finite: the run diverged. With ``few_as_final``, as for scores of runs, it is the
    final value if there are no more than ``count``.

    >>> records = [{"round": r, "test_accuracy": r / 10} for r in range(5)]
    >>> last(records), last(records, few_as_final=True)
    (0.2, 0.4)
    """
    check_integer("score", "window", count)
    points, name, _ = _measured(history, metric)
    if diverged_at(history, name) is not None:
        return math.nan
    values = [value for _, value in points]
    values = values[-1:] if few_as_final and len(values) <= count else values[-count:]
    return math.fsum(values) / len(values) if values else None


def rounds_to(history: History, target: float, metric: str | None = None) -> int | None:
    """Return the first round in which a metric reached the target, from above if it falls; None if it never did.

    >>> rounds_to([{"round": r, "test_accuracy": r / 10} for r in range(1, 10)], 0.7)
    7
    """
    points, name, better = _measured(history, metric)
    falls = lower_is_better(name, better)
    return next((round for round, value in points if (value <= target if falls else value >= target)), None)


def cost_to(history: History, target: float, metric: str | None = None) -> dict[str, Any] | None:
    """Return the record, with running totals, of the round in which a metric reached the target; None if it never did.

    ``cost_to(run.history, 0.8)["bits"]`` are the bits sent until then, by all links; ``up_bits``, ``server_bits`` and
    ``wall_seconds`` are other costs.

    >>> records = [{"round": r, "test_accuracy": r / 10, "up_bytes": 2, "peer_bytes": 1} for r in range(1, 10)]
    >>> cost_to(records, 0.3)["bits"]
    72
    """
    round = rounds_to(history, target, metric)
    return None if round is None else with_totals(record for record in history if record["round"] <= round)[-1]


def with_totals(history: Iterable[Record]) -> list[dict[str, Any]]:
    """Return the records with running totals of bits by link, simulated seconds and wall seconds.

    >>> [r["up_bits"] for r in with_totals([{"round": 1, "up_bytes": 2}, {"round": 2, "up_bytes": 3}])]
    [16, 40]
    """
    records = []
    totals = dict.fromkeys(BITS, 0)
    wall = simulated = 0.0
    for record in history:
        for total, column in BITS.items():
            totals[total] += 8 * int(record.get(column) or 0)
        wall += float(record.get("seconds") or 0.0)
        sums = {"server_bits": totals["up_bits"] + totals["down_bits"], "bits": sum(totals.values())}
        records.append({**record, **totals, **sums, "wall_seconds": wall})
        if is_finite(record.get("simulated_seconds")):
            simulated += float(record["simulated_seconds"])
            records[-1]["simulated_total_seconds"] = simulated
    return records


def summarize(
    history: History, target: float | None = None, *, metric: str | None = None, window: int = WINDOW
) -> dict[str, Any]:
    """Return the summary of a run as plain numbers.

    For every evaluated metric NAME: ``NAME``, the final value; ``best_NAME``, where the direction is declared; and
    ``last5_NAME``, the mean of the last five, if there are more than five. The first and the third are NaN if the last
    measurement is not finite. Then total costs, and with a target ``rounds_to_target`` and ``bits_to_target``, all
    links included.

    Args:
        history: The records of a run.
        target: The value that the metric is to reach.
        metric: The metric of the target, always summarized.
        window: How many of the last measurements are averaged.
    """
    check_integer("summarize", "window", window)
    facts, names = facts_of(history), column_names(history)
    column, better = split_metric(main_metric(names, facts) if metric is None else metric, facts.better)
    requested = facts.main if metric is None else column
    summary: dict[str, Any] = {"rounds": int(history[-1]["round"]) if history else 0}
    for name in dict.fromkeys([*OUTCOMES, *evaluated_metrics(names), facts.main, requested]):
        values = [float(record[name]) for record in history if is_finite(record.get(name))]
        diverged = diverged_at(history, name) is not None
        if values or diverged:
            summary[name] = math.nan if diverged else values[-1]
        if values and (direction := column_of(name, better).better):
            summary[f"best_{name}"] = min(values) if direction == "lower" else max(values)
        if len(values) > window:
            summary[f"last{window}_{name}"] = math.nan if diverged else math.fsum(values[-window:]) / window
    final = with_totals(history)[-1] if history else {}
    summary |= {total: final[total] for total in TOTALS if total in final}
    summary["lost"] = sum(int(record.get("lost") or 0) for record in history)
    summary["unmoved_rounds"] = sum(record.get("moved") is False for record in history)
    if target is not None:
        cost = (cost_to(history, target, metric) if column in names else None) or {}
        summary |= {"target": target, "rounds_to_target": cost.get("round"), "bits_to_target": cost.get("bits")}
    return summary


def score_key(summaries: Iterable[Mapping[str, Any]], metric: str, window: int = WINDOW) -> str:
    """Return the key by which summaries are ranked: ``last5_METRIC`` if all that measured the metric have it, else
    ``METRIC``, the final value.

    >>> score_key([{"loss": 1.0, "last5_loss": 2.0}, {"loss": 3.0}], "loss")
    'loss'
    """
    key = f"last{window}_{metric}"
    measured = [summary for summary in summaries if is_finite(summary.get(metric))]
    return key if measured and all(summary.get(key) is not None for summary in measured) else metric


def describe_score(key: str) -> str:
    """Describe a key of a summary: "final", "best" or "mean of last 5".

    >>> describe_score("last5_test_loss"), describe_score("test_loss"), describe_score("best_test_loss")
    ('mean of last 5', 'final', 'best')
    """
    kind = key.removesuffix(plain_name(key)).rstrip("_")
    return f"mean of last {kind.removeprefix('last')}" if kind.startswith("last") else kind or "final"


def load_run(folder: Path | str) -> pandas.DataFrame:
    """Return the history of a run folder as a pandas frame, one row per round, with running totals.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = hansa.run(hansa.presets.fedavg(steps=2), task, rounds=2, out=f"{folder}/run")
    ...     list(load_run(f"{folder}/run")["round"])
    [1, 2]
    """
    import pandas

    from hansa.runs.folder import RunFolder

    run = RunFolder.containing(folder)
    if not (history := run.history):
        raise HansaError(f"{run}: no completed round. The first is recorded when it ends.")
    return pandas.DataFrame(with_totals(history))


def text_table(history: Sequence[Record], columns: Sequence[str] = (), last: int = 5) -> str:
    """Return columns of the last rounds as aligned text, by default the most common ones.

    >>> print(text_table([{"round": 1, "loss": 0.25}, {"round": 2, "loss": None}], ["round", "loss"]))
    round loss
        1 0.25
        2    -
    """
    import pandas

    check_integer("table", "last", last)
    measured = column_names(history)
    if unknown := [name for name in columns if name not in measured]:
        raise HansaError(f"table({short_repr(unknown[0])}): no such column. {suggestion(unknown[0], measured)}")
    main = main_metric(measured, facts_of(history))
    names = list(columns) or [name for name in dict.fromkeys(["round", main, *_TABLE]) if name in measured]
    cells = [["-" if record.get(name) is None else record[name] for name in names] for record in history[-last:]]
    frame = pandas.DataFrame(cells, None, names, object)
    return frame.to_string(index=False, na_rep="nan", float_format="{:.4g}".format) if names else ""


def drop_reasons(history: Iterable[Record]) -> Counter[str]:
    """Return the number of dropped clients by reason."""
    reasons: Counter[str] = Counter()
    for record in history:
        reasons.update(record.get("reasons") or {})
    return reasons


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
    if any(map(math.isnan, values)):
        return SeedStatistics(*[math.nan] * 4)
    if (least := min(values)) == max(values):
        return SeedStatistics(least, 0.0, least, least)
    return SeedStatistics(fmean(values), stdev(values), least, max(values))


def over_seeds(records: Sequence[Record]) -> dict[str, SeedStatistics]:
    """Return the statistics of each number that all records have; NaN if one of them, of a run that diverged, is NaN.

    >>> over_seeds([{"a": 1.0, "b": 1.0}, {"a": 2.0}, {"a": 6.0}])
    {'a': SeedStatistics(mean=3.0, std=2.6457513110645907, min=1.0, max=6.0)}
    """
    columns: dict[str, list[Any]] = {n: [record.get(n) for record in records] for n in column_names(records)}
    diverged = {name for name, values in columns.items() if any(isinstance(v, float) and v != v for v in values)}
    return {
        name: seed_statistics([math.nan] if name in diverged else values)
        for name, values in columns.items()
        if name in diverged or all(map(is_finite, values))
    }


def curve_over_seeds(histories: Sequence[History], metric: str, x: str = "round") -> list[tuple[float, SeedStatistics]]:
    """Return (x, statistics of a metric) of the rounds in which all runs measured both; x is its mean over runs.

    >>> curve_over_seeds([[{"round": 1, "loss": 1.0}], [{"round": 1, "loss": 3.0}]], "loss")[0][1].mean
    2.0
    """
    points = []
    for records in zip(*map(with_totals, histories), strict=False):
        if len(rounds := {record["round"] for record in records}) > 1:
            raise HansaError(f"rounds {sorted(rounds)} do not match: the seeds have different rounds.")
        values = over_seeds([{name: record.get(name) for name in (x, metric)} for record in records])
        if len(values) == len({x, metric}) and not math.isnan(values[metric].mean + values[x].mean):
            points.append((values[x].mean, values[metric]))
    return points


def cost_over_seeds(
    histories: Sequence[History], target: float, metric: str | None = None
) -> tuple[int, dict[str, SeedStatistics]]:
    """Return the number of runs that reached a target, and if all did, the statistics of their totals at that round.

    >>> curves = [[{"round": r, "test_accuracy": a * r} for r in (1, 2)] for a in (0.2, 0.4)]
    >>> cost_over_seeds(curves, 0.5)[0], cost_over_seeds(curves, 0.4)[1]["round"].mean
    (1, 1.5)
    """
    main = main_metric(column_names(histories[0]), facts_of(histories[0]))
    name = main if metric is None else metric.partition(":")[0]
    measured = [history for history in histories if name in column_names(history)]
    costs = [cost for history in measured if (cost := cost_to(history, target, metric)) is not None]
    return len(costs), over_seeds(costs) if len(costs) == len(histories) else {}


class MeanInterval(NamedTuple):
    """A mean over seeds, half the width of its confidence interval, and the p-value of Student's t-test of the mean 0.

    With fewer than `MIN_SEEDS` seeds the width is infinite and the p-value 1.
    """

    mean: float
    half: float
    seeds: int
    p_value: float = 1.0

    @property
    def ends(self) -> tuple[float, float, float]:
        """The mean and the ends of the interval."""
        return self.mean, self.mean - self.half, self.mean + self.half

    @property
    def sign(self) -> int:
        """1 if the whole interval is above zero, -1 if it is below, 0 if it contains zero.

        >>> MeanInterval(0.5, 0.2, 3).sign, MeanInterval(-0.5, 0.2, 3).sign, MeanInterval(0.1, 0.2, 3).sign
        (1, -1, 0)
        """
        return (self.mean > self.half) - (-self.mean > self.half)


def excludes_zero(
    intervals: Sequence[MeanInterval], confidence: float, correction: Literal["holm"] | None = None
) -> list[bool]:
    """Return of each interval whether it excludes 0; with Holm's correction, as one of so many that were tested.

    Holm: with the p-values in ascending order, the k-th of n (from 0) is tested at (1 - confidence) / (n - k), and none
    after the first that fails.

    Args:
        intervals: Intervals of `paired_interval`.
        confidence: Their level.
        correction: None, or ``"holm"``.

    >>> intervals = [paired_interval(first, [0.0, 0.0, 0.0]) for first in ([1.0, 1.1, 1.2], [1.0, 1.5, 2.1])]
    >>> excludes_zero(intervals, 0.95), excludes_zero(intervals * 3, 0.95, "holm")
    ([True, True], [True, False, True, False, True, False])
    """
    if correction is None:
        return [each.sign != 0 for each in intervals]
    p_values = sorted(each.p_value for each in intervals)
    limits = [(1 - confidence) / (len(p_values) - rank) for rank in range(len(p_values))]
    passed = takewhile(lambda pair: pair[0] <= pair[1], zip(p_values, limits, strict=True))
    greatest = max((p_value for p_value, _ in passed), default=-1.0)
    return [each.p_value <= greatest for each in intervals]


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> MeanInterval:
    """Return mean ± t s / sqrt(n), with the quantile t of Student's distribution with n - 1 degrees of freedom.

    Args:
        values: One number for each seed.
        confidence: The confidence level, between 0 and 1.

    >>> interval = mean_interval([1.0, 2.0, 3.0])
    >>> interval.mean, round(interval.half, 3)
    (2.0, 2.484)
    >>> mean_interval([1.0, 2.0]).half
    inf
    """
    if not 0 < confidence < 1:
        raise HansaError(f"mean_interval(confidence={confidence}): expected a number between 0 and 1.")
    count = len(values)
    if count < MIN_SEEDS:
        return MeanInterval(fmean(values), math.inf, count)
    from scipy.special import stdtr, stdtrit  # scipy.stats takes a second to import

    mean, error = fmean(values), stdev(values) / math.sqrt(count)
    p_value = 2 * float(stdtr(count - 1, -abs(mean) / error)) if error else float(mean == 0)
    return MeanInterval(mean, float(stdtrit(count - 1, 0.5 + confidence / 2)) * error, count, p_value)


def paired_interval(first: Sequence[float], second: Sequence[float], confidence: float = 0.95) -> MeanInterval:
    """Return the interval of the mean of ``first[seed] - second[seed]``.

    The difference within a seed cancels the partition and the initial model, which both methods share. Numbers equal up
    to rounding have the difference 0.

    Args:
        first: The numbers of one method, by seed.
        second: Those of the other method, in the same order of seeds.
        confidence: The confidence level.

    >>> paired_interval([81.0, 85.0, 89.0], [80.0, 84.0, 88.0])
    MeanInterval(mean=1.0, half=0.0, seeds=3, p_value=0.0)
    """
    pairs = zip(first, second, strict=True)
    return mean_interval([0.0 if math.isclose(a, b, rel_tol=1e-12) else a - b for a, b in pairs], confidence)


def site_names(history: Sequence[Record]) -> list[str]:
    """Return the sites of a history that have metrics or were left out of an evaluation, sorted by name.

    >>> site_names([{"round": 1, "north/test_rows": 7, "validation/test_loss": 0.5, "left_out": {"east": "refused"}}])
    ['east', 'north']
    """
    measured = {name.removesuffix(_ROWS) for name in column_names(history) if name.endswith(_ROWS)}
    return sorted(measured.union(*(left for record in history if isinstance(left := record.get("left_out"), dict))))


def site_totals(history: Iterable[Record]) -> dict[str, Counter[str]]:
    """Return the bytes and seconds of each site, summed over rounds.

    >>> site_totals([{"round": number, "sites": {"north": {"up_bytes": number + 2}}} for number in (1, 2)])
    {'north': Counter({'up_bytes': 7})}
    """
    totals: dict[str, Counter[str]] = {}
    for record in history:
        for site, counts in (record.get("sites") or {}).items():
            totals.setdefault(site, Counter()).update(counts)
    return totals


def combined_by(history: Sequence[Record]) -> dict[str, str]:
    """Return how each metric over all sites was last computed."""
    return next((record["combined_by"] for record in reversed(history) if record.get("combined_by")), {})


def round_seconds(history: Iterable[Record]) -> dict[str, float]:
    """Return the median seconds of a round and of its parts: work of the slowest site, transport, and the server; empty
    if the history has no parts.

    The first round, which also enrolls the sites, is omitted if there are others.

    >>> first = {"round": 1, "seconds": 9.0, "work_seconds": 5.0, "transport_seconds": 2.0}
    >>> round_seconds([first, {**first, "seconds": 4.0, "work_seconds": 1.5}])
    {'seconds': 4.0, 'work_seconds': 1.5, 'transport_seconds': 2.0, 'server_seconds': 0.5}
    """
    names = ("seconds", *PARTS)
    rounds = [[float(record[name]) for name in names] for record in history if record.keys() >= {*names}]
    parts = [(*of, max(0.0, of[0] - sum(of[1:]))) for of in rounds[1:] or rounds]
    return {name: median(of) for name, of in zip((*names, "server_seconds"), zip(*parts, strict=True), strict=False)}


def describe_seconds(history: Iterable[Record]) -> str:
    """Return the parts of a round's seconds as a sentence; "" if the history has no parts.

    >>> describe_seconds([{"round": 1, "seconds": 4.0, "work_seconds": 1.5, "transport_seconds": 2.0}])
    'a round takes 4.0 s: 1.5 work at the slowest site, 2.0 transport, 0.5 server (median)'
    """
    text = (
        "a round takes {seconds:.1f} s: {work_seconds:.1f} work at the slowest site, {transport_seconds:.1f} "
        "transport, {server_seconds:.1f} server (median)"
    )
    return text.format(**parts) if (parts := round_seconds(history)) else ""


def federation_summary(run: Run, history: Sequence[Record]) -> dict[str, Any]:
    """Return the additional summary of a federation: requested updates that are not in the run, bytes and seconds by
    site, how metrics were combined over sites, and the seconds of a round by part."""
    lost = [
        {"site": run.site_of.get(dropped.client), "client": dropped.client, "round": round, "reason": dropped.reason}
        for round, dropped in run.dropped_clients
    ]
    return {
        "lost_updates": lost,
        "sites": {name: dict(counts) for name, counts in sorted(site_totals(history).items())},
        "combined_by": combined_by(history),
        "round_seconds": round_seconds(history),
    }
