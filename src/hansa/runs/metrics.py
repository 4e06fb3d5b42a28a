"""Numbers over the history of a run: best, average of the last few, rounds to a target, and what it cost."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hansa.core.errors import HansaError, check_integer, suggestion
from hansa.runs.metrics_log import Columns, from_line, plain, read_history, to_line

if TYPE_CHECKING:
    import pandas

__all__ = [
    "best",
    "from_line",
    "last",
    "load_run",
    "plain",
    "read_history",
    "rounds_to",
    "series",
    "smaller_is_better",
    "summarize",
    "to_line",
    "with_totals",
]

Record: TypeAlias = Mapping[str, Any]
History: TypeAlias = "Iterable[Record] | pandas.DataFrame"

ACCURACY = "test_accuracy"
COSTS = {
    "up_bits": "up_bytes",
    "down_bits": "down_bytes",
    "peer_bits": "peer_bytes",
}
"""Running totals in bits, and the bytes of a round that they add up."""
_SECONDS = ("seconds", "simulated_seconds")
EVALUATED = ("test_", "client_", "personal_")
"""How the names of what evaluations measure begin: on all test rows, over clients, over clients after own steps."""


def smaller_is_better(metric: str) -> bool:
    """Losses, costs and distances fall, and how far apart clients are; the rest rises.

    >>> smaller_is_better("test_loss"), smaller_is_better("test_accuracy"), smaller_is_better("client_loss_worst")
    (True, False, True)
    """
    if metric.startswith(("client_", "personal_")):
        if metric.endswith("_std"):
            return True
        metric = metric.removesuffix("_worst")
    return metric.endswith(("loss", "bits", "bytes", "seconds", "consensus", "lost"))


def series(history: History, metric: str = ACCURACY) -> list[tuple[int, float]]:
    """(round, value) of the rounds in which a metric was measured and finite.

    >>> series([{"round": 1, "test_accuracy": 0.5}, {"round": 2}, {"round": 3, "test_accuracy": 0.7}])
    [(1, 0.5), (3, 0.7)]
    """
    return list(_pairs(history, metric))


def _pairs(history: History, metric: str) -> Iterator[tuple[int, float]]:
    """The pairs of `series`, one at a time."""
    records = _records(history)
    if isinstance(records, Columns) and metric in records.names:
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
    """The highest value of a metric, the lowest of a loss; None where it was never measured.

    >>> best([{"round": 1, "test_loss": 0.5}, {"round": 2, "test_loss": 0.7}], "test_loss")
    0.5
    """
    values = (value for _, value in _pairs(history, metric))
    return min(values, default=None) if smaller_is_better(metric) else max(values, default=None)


def last(history: History, metric: str = ACCURACY, count: int = 5) -> float | None:
    """The mean of the last ``count`` measurements: steadier than the last one alone, and not picked as the best is.

    >>> last([{"round": r, "test_accuracy": r / 10} for r in range(10)])
    0.7
    """
    check_integer("last", "count", count)
    values = deque((value for _, value in _pairs(history, metric)), maxlen=count)
    return math.fsum(values) / len(values) if values else None


def rounds_to(history: History, target: float, metric: str = ACCURACY) -> int | None:
    """The first round at whose end a metric had reached the target; None if it never did.

    >>> rounds_to([{"round": r, "test_accuracy": r / 10} for r in range(1, 10)], 0.7)
    7
    """
    falls = smaller_is_better(metric)
    reached = (round for round, value in _pairs(history, metric) if (value <= target if falls else value >= target))
    return next(reached, None)


def with_totals(history: History) -> list[dict[str, Any]]:
    """The records with running totals beside them: bits by link, with the server, in all; simulated and wall seconds.

    >>> [r["up_bits"] for r in with_totals([{"round": 1, "up_bytes": 2}, {"round": 2, "up_bytes": 3}])]
    [16, 40]
    """
    return list(running_totals(history))


def running_totals(history: History) -> Iterator[dict[str, Any]]:
    """The records of `with_totals`, one at a time."""
    totals = dict.fromkeys(COSTS, 0)
    wall = simulated = 0.0
    for record in _records(history):
        for total, part in COSTS.items():
            totals[total] += 8 * int(record.get(part) or 0)
        wall += float(record.get("seconds") or 0.0)
        sums = {"server_bits": totals["up_bits"] + totals["down_bits"], "bits": sum(totals.values())}
        entry = {**record, **totals, **sums, "wall_seconds": wall}
        if _measured(record.get("simulated_seconds")):
            simulated += float(record["simulated_seconds"])
            entry["simulated_total_seconds"] = simulated
        yield entry


class _Seen:
    """What a summary says of one metric."""

    def __init__(self, metric: str) -> None:
        self.falls = smaller_is_better(metric)
        self.best = math.inf if self.falls else -math.inf
        self.newest: deque[float] = deque(maxlen=5)

    def take(self, value: float) -> None:
        self.best = min(self.best, value) if self.falls else max(self.best, value)
        self.newest.append(value)


def summarize(history: History, target: float | None = None) -> dict[str, Any]:
    """A run in a few numbers, in one pass: of every evaluated metric the last, the best, the mean of the last five, of
    all test rows and over clients. Without a target accuracy there is no rounds-to-target."""
    if not isinstance(history, Columns):
        return _summarized(_records(history), target)
    if "summary" not in history.notes:
        history.notes["summary"] = _summarized(history, None)
    found: dict[str, Any] = {}
    for name, value in history.notes["summary"].items():
        if target is not None and "target" not in found and name in ("up_bits", "lost"):
            known = ACCURACY in history.names
            found |= {"target": target, "rounds_to_target": rounds_to(history, target) if known else None}
        found[name] = value
    return found


def _summarized(history: Sequence[Record], target: float | None) -> dict[str, Any]:
    losses = ("test_loss", "global_loss", "local_mean_loss", "loss", "train_loss")
    seen = {metric: _Seen(metric) for metric in (ACCURACY, *losses, *_evaluated(history))}
    if isinstance(history, Columns):
        history = history.only({"round", "lost", "moved", *seen, *COSTS.values(), *_SECONDS})
    reached: int | None = None
    lost = unmoved = 0
    final: dict[str, Any] = {}
    for final in running_totals(history):
        for metric, noted in seen.items():
            value: Any = final.get(metric)
            if value is not None and _measured(value):
                noted.take(float(value))
                if metric == ACCURACY and target is not None and reached is None and value >= target:
                    reached = int(final["round"])
        lost += int(final.get("lost") or 0)
        unmoved += final.get("moved") is False
    found: dict[str, Any] = {"rounds": int(final.get("round", 0))}
    for metric, noted in seen.items():
        if noted.newest:
            found[metric] = noted.newest[-1]
            found[f"best_{metric}"] = noted.best
            found[f"last5_{metric}"] = math.fsum(noted.newest) / len(noted.newest)
    if target is not None:
        found["target"] = target
        found["rounds_to_target"] = reached
    for total in (*COSTS, "server_bits", "bits", "wall_seconds", "simulated_total_seconds"):
        if total in final:
            found[total] = final[total]
    found["lost"] = lost
    found["unmoved_rounds"] = unmoved
    return found


def _evaluated(history: Sequence[Record]) -> list[str]:
    """What evaluations measured besides the loss and the accuracy."""
    names = history.names if isinstance(history, Columns) else {name for record in history for name in record}
    return sorted({name for name in names if name.startswith(EVALUATED)} - {ACCURACY, "test_loss"})


def load_run(folder: Path | str) -> pandas.DataFrame:
    """The history of a run folder as a pandas frame, one row a round, running totals included.

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
    if isinstance(history, Columns):
        return history
    if hasattr(history, "to_dict"):
        return list(history.to_dict("records"))
    return list(history)


def _measured(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
