"""Metrics over the history of a run: best, mean of the last measurements, rounds and bits to a target, and cost."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hansa.core.errors import HansaError, check_integer, short_repr, suggestion
from hansa.runs.columns import (
    ACCURACY,
    BITS,
    OUTCOMES,
    TOTALS,
    WINDOW,
    direction_of,
    evaluated_metrics,
    lower_is_better,
    plain_name,
    split_metric,
)
from hansa.runs.metric_facts import MetricFacts, RunHistory, facts_of, main_metric, read_facts
from hansa.runs.metrics_log import HistoryColumns, from_line, read_history, to_line, to_plain_json

if TYPE_CHECKING:
    import pandas

    from hansa.rounds.messages import DroppedClient
    from hansa.training.metric_direction import Direction

__all__ = [
    "ACCURACY",
    "best",
    "cost_to",
    "from_line",
    "last",
    "load_run",
    "lower_is_better",
    "read_history",
    "rounds_to",
    "series",
    "summarize",
    "to_line",
    "to_plain_json",
    "with_totals",
]

Record: TypeAlias = Mapping[str, Any]
History: TypeAlias = "Iterable[Record] | pandas.DataFrame"

log = logging.getLogger("hansa")

NO_UPDATE = {"lost", "silent", "quorum"}
"""Drop reasons without a refused update: the client sent nothing, or there were too few clients."""
_SECONDS = ("seconds", "simulated_seconds")
_TABLE = ("round", "train_loss", "test_loss", "test_accuracy", "up_bytes")


def series(history: History, metric: str | None = None) -> list[tuple[int, float]]:
    """Return (round, value) of the rounds in which a metric was measured and finite.

    Args:
        history: The records of a run, or a pandas frame of them.
        metric: A column; by default the main metric of the run.

    >>> series([{"round": 1, "test_accuracy": 0.5}, {"round": 2}, {"round": 3, "test_accuracy": 0.7}])
    [(1, 0.5), (3, 0.7)]
    """
    return list(_pairs(history, _choose(history, metric)[0]))


def _choose(history: History, metric: str | None) -> tuple[str, bool | None]:
    """Return the requested column, or the main one, and whether it falls; None if that is not known."""
    facts = facts_of(history)
    if metric is None:
        metric = main_metric(column_names(_records(history)), facts)
    name, better = split_metric(metric, facts.better)
    direction = direction_of(name, better)
    return name, direction == "lower" if direction else None


def _choose_directed(history: History, metric: str | None) -> tuple[str, bool]:
    """Return the column and whether it falls, or raise if that is not known."""
    name, falls = _choose(history, metric)
    if falls is None:
        _refuse_unknown(name, column_names(_records(history)))
    return name, lower_is_better(name) if falls is None else falls


def _refuse_unknown(metric: str, known: Collection[str]) -> None:
    if known and metric not in known:
        raise HansaError(f"the history has no metric {metric!r}. {suggestion(metric, known)}")


def column_names(history: Sequence[Record]) -> list[str]:
    """Return the names of all columns of a history."""
    if isinstance(history, HistoryColumns):
        return history.names
    return list(dict.fromkeys(name for record in history for name in record))


def _pairs(history: History, metric: str) -> Iterator[tuple[int, float]]:
    """Yield the pairs of `series`."""
    records = _records(history)
    if isinstance(records, HistoryColumns) and metric in records.names:
        for round, value in zip(records.floats("round"), records.floats(metric), strict=True):
            if math.isfinite(value):
                yield int(round), value
        return
    known: set[str] = set()
    for record in records:
        known.update(record)
        if _measured(record.get(metric)):
            yield int(record["round"]), float(record[metric])
    _refuse_unknown(metric, known)


def best(history: History, metric: str | None = None) -> float | None:
    """Return the best value of a metric; None where it was never measured.

    Args:
        history: The records of a run, or a pandas frame of them.
        metric: A column, or COLUMN:lower where its direction is not known; by default the main metric of the run.

    >>> best([{"round": 1, "test_loss": 0.5}, {"round": 2, "test_loss": 0.7}], "test_loss")
    0.5
    """
    name, falls = _choose_directed(history, metric)
    values = (value for _, value in _pairs(history, name))
    return min(values, default=None) if falls else max(values, default=None)


def last(history: History, metric: str | None = None, count: int = WINDOW) -> float | None:
    """Return the mean of the last ``count`` measurements: less noisy than the last, without the best's selection bias.

    Args:
        history: The records of a run, or a pandas frame of them.
        metric: A column; by default the main metric of the run.
        count: How many measurements to average; 1 is the final value.

    >>> last([{"round": r, "test_accuracy": r / 10} for r in range(10)])
    0.7
    """
    check_integer("last", "count", count)
    values = deque((value for _, value in _pairs(history, _choose(history, metric)[0])), maxlen=count)
    return math.fsum(values) / len(values) if values else None


def score(history: History, metric: str | None = None, window: int = WINDOW) -> float | None:
    """Return what runs are ranked by: the mean of the last ``window`` measurements, or the final one if there are no
    more than ``window``.

    >>> score([{"round": r, "test_accuracy": r / 10} for r in range(5)])
    0.4
    """
    check_integer("score", "window", window)
    values = [value for _, value in _pairs(history, _choose(history, metric)[0])]
    if not values:
        return None
    return values[-1] if len(values) <= window else math.fsum(values[-window:]) / window


def rounds_to(history: History, target: float, metric: str | None = None) -> int | None:
    """Return the first round in which a metric reached the target; None if it never did.

    Args:
        history: The records of a run, or a pandas frame of them.
        target: The value to reach: from below, or from above for a metric that falls.
        metric: A column, or COLUMN:lower where its direction is not known; by default the main metric of the run.

    >>> rounds_to([{"round": r, "test_accuracy": r / 10} for r in range(1, 10)], 0.7)
    7
    """
    name, falls = _choose_directed(history, metric)
    reached = (round for round, value in _pairs(history, name) if (value <= target if falls else value >= target))
    return next(reached, None)


def cost_to(history: History, target: float, metric: str | None = None) -> dict[str, Any] | None:
    """Return the record, with running totals, of the round in which a metric reached the target; None if it never did.

    ``cost_to(run.history, 0.8)["bits"]`` are the bits sent until then, by all links; ``up_bits``, ``server_bits`` and
    ``wall_seconds`` are other costs.

    Args:
        history: The records of a run, or a pandas frame of them.
        target: The value to reach.
        metric: As in `rounds_to`.

    >>> records = [{"round": r, "test_accuracy": r / 10, "up_bytes": 2, "peer_bytes": 1} for r in range(1, 10)]
    >>> cost_to(records, 0.3)["bits"]
    72
    """
    round = rounds_to(history, target, metric)
    if round is None:
        return None
    return next(record for record in running_totals(history) if record["round"] == round)


def with_totals(history: History) -> list[dict[str, Any]]:
    """Return the records with running totals of bits by link, simulated seconds and wall seconds.

    >>> [r["up_bits"] for r in with_totals([{"round": 1, "up_bytes": 2}, {"round": 2, "up_bytes": 3}])]
    [16, 40]
    """
    return list(running_totals(history))


def running_totals(history: History) -> Iterator[dict[str, Any]]:
    """Yield the records of `with_totals`."""
    totals = dict.fromkeys(BITS, 0)
    wall = simulated = 0.0
    for record in _records(history):
        for total, part in BITS.items():
            totals[total] += 8 * int(record.get(part) or 0)
        wall += float(record.get("seconds") or 0.0)
        sums = {"server_bits": totals["up_bits"] + totals["down_bits"], "bits": sum(totals.values())}
        entry = {**record, **totals, **sums, "wall_seconds": wall}
        if _measured(record.get("simulated_seconds")):
            simulated += float(record["simulated_seconds"])
            entry["simulated_total_seconds"] = simulated
        yield entry


class _MetricSummary:
    """The best and the newest values of one metric."""

    def __init__(self, falls: bool | None, window: int) -> None:
        self.falls, self.best, self.count = falls, math.nan, 0
        self.newest: deque[float] = deque(maxlen=window)

    def add(self, value: float) -> None:
        if self.falls is not None and not (self.best < value if self.falls else self.best > value):
            self.best = value
        self.newest.append(value)
        self.count += 1


def summarize(
    history: History, target: float | None = None, *, metric: str | None = None, window: int = WINDOW
) -> dict[str, Any]:
    """Return the summary of a run as plain numbers.

    For every evaluated metric NAME: ``NAME``, the final value; ``best_NAME``, where the direction is known; and
    ``last5_NAME``, the mean of the last five, if there are more than five. Then total costs, and with a target
    ``rounds_to_target`` and ``bits_to_target``, all links included.

    Args:
        history: The records of a run, or a pandas frame of them.
        target: The value that the metric is to reach.
        metric: The metric of the target, which is summarized even if it is no evaluated one; by default the main one.
        window: How many of the last measurements are averaged.
    """
    check_integer("summarize", "window", window)
    records = _records(history)
    name, better = split_metric(metric, facts_of(history).better) if metric is not None else (None, None)
    if not isinstance(records, HistoryColumns):
        summary = _summarize_records(records, facts_of(history), name, better, window)
    else:
        cached = f"summary {metric} {window}"
        if cached not in records.cache:
            records.cache[cached] = _summarize_records(records, facts_of(history), name, better, window)
        summary = dict(records.cache[cached])
    if target is not None:
        measured = _choose(history, metric)[0] in column_names(records)
        spent = cost_to(history, target, metric) if measured else None
        summary["target"] = target
        summary["rounds_to_target"] = None if spent is None else int(spent["round"])
        summary["bits_to_target"] = None if spent is None else spent["bits"]
    return summary


def _summarize_records(
    history: Sequence[Record], facts: MetricFacts, metric: str | None, better: Mapping[str, Direction] | None,
    window: int,
) -> dict[str, Any]:  # fmt: skip
    chosen = [*OUTCOMES, *evaluated_metrics(column_names(history))]
    metrics: dict[str, _MetricSummary] = {}
    for name in (*chosen, *(each for each in (facts.main, metric) if each)):
        direction = direction_of(name, facts.better if better is None else better)
        metrics[name] = _MetricSummary(direction == "lower" if direction else None, window)
    if isinstance(history, HistoryColumns):
        history = history.select({"round", "lost", "moved", *metrics, *BITS.values(), *_SECONDS})
    dropped = unapplied = 0
    final: dict[str, Any] = {}
    for final in running_totals(history):
        for name, metric_summary in metrics.items():
            value: Any = final.get(name)
            if value is not None and _measured(value):
                metric_summary.add(float(value))
        dropped += int(final.get("lost") or 0)
        unapplied += final.get("moved") is False
    summary: dict[str, Any] = {"rounds": int(final.get("round", 0))}
    for name, metric_summary in metrics.items():
        if metric_summary.count:
            summary[name] = metric_summary.newest[-1]
            if metric_summary.falls is not None:
                summary[f"best_{name}"] = metric_summary.best
            if metric_summary.count > window:
                summary[f"last{window}_{name}"] = math.fsum(metric_summary.newest) / window
    summary |= {total: final[total] for total in TOTALS if total in final}
    summary["lost"] = dropped
    summary["unmoved_rounds"] = unapplied
    return summary


def score_key(summaries: Iterable[Mapping[str, Any]], metric: str, window: int = WINDOW) -> str:
    """Return the number of some summaries that they are ranked by: ``last5_METRIC`` if all that measured the metric
    have it, else ``METRIC``, the final value.

    >>> score_key([{"loss": 1.0, "last5_loss": 2.0}, {"loss": 3.0}], "loss")
    'loss'
    """
    key = f"last{window}_{metric}"
    measured = [summary for summary in summaries if summary.get(metric) is not None]
    return key if measured and all(summary.get(key) is not None for summary in measured) else metric


def describe_score(key: str) -> str:
    """Return what a number of a summary is: "final", "best" or "mean of last 5".

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
    try:
        import pandas
    except ImportError as error:
        raise HansaError("load_run needs pandas: pip install 'hansa[report]'.") from error
    folder = Path(folder)
    frame = pandas.DataFrame(with_totals(read_history(folder / "metrics.jsonl")))
    frame.attrs["folder"] = str(folder)
    frame.attrs["facts"] = read_facts(folder)
    return frame


def _records(history: History) -> Sequence[Record]:
    if isinstance(history, (HistoryColumns, RunHistory)):
        return history
    if hasattr(history, "to_dict"):
        return list(history.to_dict("records"))
    return list(history)


def _measured(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def text_table(history: Sequence[Mapping[str, Any]], columns: Sequence[str] = (), last: int = 5) -> str:
    """Return the named columns of the last rounds as aligned text; without names the most common ones.

    >>> print(text_table([{"round": 1, "loss": 0.25}, {"round": 2, "loss": None}], ["round", "loss"]))
    round  loss
        1  0.25
        2     -
    """
    check_integer("table", "last", last)
    known = {name: None for record in history for name in record}
    for name in columns:
        if name not in known:
            raise HansaError(f"table({short_repr(name)}): no such column. {suggestion(str(name), known)}")
    main = main_metric(known, facts_of(history))
    names = list(columns) or [name for name in dict.fromkeys(["round", main, *_TABLE]) if name in known]
    cells = [names, *([_cell(record.get(name)) for name in names] for record in history[-last:])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def check_any_update_accepted(
    history: Sequence[Mapping[str, Any]], dropped: Sequence[tuple[int, DroppedClient]]
) -> None:
    """Raise if all updates of the run were refused for the same reason."""
    reasons = {reason for record in history for reason in record.get("reasons") or ()}
    if not dropped or len(reasons) != 1 or reasons <= NO_UPDATE or any(record["participants"] for record in history):
        return
    round, example = dropped[-1]
    raise HansaError(
        f"every update of all {len(history)} rounds was refused, so the model never changed ({reasons.pop()}; "
        f"client {example.client} in round {round}: {example.detail})."
    )


def warn_dropped_clients(history: Sequence[Mapping[str, Any]], dropped: Sequence[tuple[int, DroppedClient]]) -> None:
    """Warn about dropped clients: their number by reason, and the last of them in full."""
    if not dropped:
        return
    reasons: Counter[str] = Counter()
    for record in history:
        reasons.update(record.get("reasons") or {})
    round, example = dropped[-1]
    log.warning(
        "%d client updates were left out of %d rounds (%s); the last: client %d in round %d, %s",
        reasons.total(),
        sum(bool(record.get("lost")) for record in history),
        ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items())),
        example.client,
        round,
        example.detail,
    )
