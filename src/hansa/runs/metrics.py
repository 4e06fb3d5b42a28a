"""Metrics over the history of a run: best, mean of the last five, rounds to a target, and cost."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hansa.core.errors import HansaError, check_integer, short_repr, suggestion
from hansa.runs.columns import ACCURACY, BITS, EVALUATED, OUTCOMES, TOTALS, lower_is_better
from hansa.runs.metrics_log import HistoryColumns, from_line, read_history, to_line, to_plain_json

if TYPE_CHECKING:
    import pandas

    from hansa.rounds.messages import DroppedClient

__all__ = [
    "ACCURACY",
    "best",
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


def series(history: History, metric: str = ACCURACY) -> list[tuple[int, float]]:
    """Return (round, value) of the rounds in which a metric was measured and finite.

    >>> series([{"round": 1, "test_accuracy": 0.5}, {"round": 2}, {"round": 3, "test_accuracy": 0.7}])
    [(1, 0.5), (3, 0.7)]
    """
    return list(_pairs(history, metric))


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
    if records and metric not in known:
        raise HansaError(f"the history has no metric {metric!r}. {suggestion(metric, known)}")


def best(history: History, metric: str = ACCURACY) -> float | None:
    """Return the best value of a metric; None where it was never measured.

    >>> best([{"round": 1, "test_loss": 0.5}, {"round": 2, "test_loss": 0.7}], "test_loss")
    0.5
    """
    values = (value for _, value in _pairs(history, metric))
    return min(values, default=None) if lower_is_better(metric) else max(values, default=None)


def last(history: History, metric: str = ACCURACY, count: int = 5) -> float | None:
    """Return the mean of the last ``count`` measurements: less noisy than the last, without the best's selection bias.

    >>> last([{"round": r, "test_accuracy": r / 10} for r in range(10)])
    0.7
    """
    check_integer("last", "count", count)
    values = deque((value for _, value in _pairs(history, metric)), maxlen=count)
    return math.fsum(values) / len(values) if values else None


def rounds_to(history: History, target: float, metric: str = ACCURACY) -> int | None:
    """Return the first round in which a metric reached the target; None if it never did.

    >>> rounds_to([{"round": r, "test_accuracy": r / 10} for r in range(1, 10)], 0.7)
    7
    """
    falls = lower_is_better(metric)
    reached = (round for round, value in _pairs(history, metric) if (value <= target if falls else value >= target))
    return next(reached, None)


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

    def __init__(self, metric: str) -> None:
        self.falls = lower_is_better(metric)
        self.best = math.inf if self.falls else -math.inf
        self.newest: deque[float] = deque(maxlen=5)

    def add(self, value: float) -> None:
        self.best = min(self.best, value) if self.falls else max(self.best, value)
        self.newest.append(value)


def summarize(history: History, target: float | None = None) -> dict[str, Any]:
    """Return the summary of a run: for every evaluated metric the last value, the best, and the mean of the last five;
    total costs; and with a target accuracy the rounds to reach it."""
    if not isinstance(history, HistoryColumns):
        return _summarize_records(_records(history), target)
    if "summary" not in history.cache:
        history.cache["summary"] = _summarize_records(history, None)
    summary: dict[str, Any] = {}
    for name, value in history.cache["summary"].items():
        if target is not None and "target" not in summary and name in ("up_bits", "lost"):
            known = ACCURACY in history.names
            summary |= {"target": target, "rounds_to_target": rounds_to(history, target) if known else None}
        summary[name] = value
    return summary


def _summarize_records(history: Sequence[Record], target: float | None) -> dict[str, Any]:
    metrics = {metric: _MetricSummary(metric) for metric in (*OUTCOMES, *_evaluated(history))}
    if isinstance(history, HistoryColumns):
        history = history.select({"round", "lost", "moved", *metrics, *BITS.values(), *_SECONDS})
    target_round: int | None = None
    dropped = unapplied = 0
    final: dict[str, Any] = {}
    for final in running_totals(history):
        for metric, metric_summary in metrics.items():
            value: Any = final.get(metric)
            if value is not None and _measured(value):
                metric_summary.add(float(value))
                if metric == ACCURACY and target is not None and target_round is None and value >= target:
                    target_round = int(final["round"])
        dropped += int(final.get("lost") or 0)
        unapplied += final.get("moved") is False
    summary: dict[str, Any] = {"rounds": int(final.get("round", 0))}
    for metric, metric_summary in metrics.items():
        if metric_summary.newest:
            summary[metric] = metric_summary.newest[-1]
            summary[f"best_{metric}"] = metric_summary.best
            summary[f"last5_{metric}"] = math.fsum(metric_summary.newest) / len(metric_summary.newest)
    if target is not None:
        summary["target"] = target
        summary["rounds_to_target"] = target_round
    summary |= {total: final[total] for total in TOTALS if total in final}
    summary["lost"] = dropped
    summary["unmoved_rounds"] = unapplied
    return summary


def _evaluated(history: Sequence[Record]) -> list[str]:
    """Return the names of evaluated metrics besides loss and accuracy."""
    names = history.names if isinstance(history, HistoryColumns) else {name for record in history for name in record}
    return sorted({name for name in names if name.startswith(EVALUATED)} - {ACCURACY, "test_loss"})


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
    return frame


def _records(history: History) -> Sequence[Record]:
    if isinstance(history, HistoryColumns):
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
    names = list(columns) or [name for name in _TABLE if name in known]
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
