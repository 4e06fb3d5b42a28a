"""Numbers over the history of a run: best, average of the last few, rounds to a target, and what it cost."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hansa.errors import HansaError, near, whole

if TYPE_CHECKING:
    import pandas

Record: TypeAlias = Mapping[str, Any]
History: TypeAlias = "Iterable[Record] | pandas.DataFrame"

ACCURACY = "test_accuracy"
COSTS = {
    "up_bits": "up_bytes",
    "down_bits": "down_bytes",
    "peer_bits": "peer_bytes",
}
"""Running totals in bits, and the bytes of a round that they add up."""


def smaller_is_better(metric: str) -> bool:
    """Losses, costs and distances fall; the rest rises.

    >>> smaller_is_better("test_loss"), smaller_is_better("test_accuracy")
    (True, False)
    """
    return metric.endswith(("loss", "bits", "bytes", "seconds", "consensus", "lost"))


def series(history: History, metric: str = ACCURACY) -> list[tuple[int, float]]:
    """(round, value) of the rounds in which a metric was measured and finite.

    >>> series([{"round": 1, "test_accuracy": 0.5}, {"round": 2}, {"round": 3, "test_accuracy": 0.7}])
    [(1, 0.5), (3, 0.7)]
    """
    records = _records(history)
    found = [(int(record["round"]), float(record[metric])) for record in records if _measured(record.get(metric))]
    if not found and records:
        known = {name for record in records for name, value in record.items() if _measured(value)}
        if metric not in {name for record in records for name in record}:
            raise HansaError(f"the history has no metric {metric!r}. {near(metric, known)}")
    return found


def best(history: History, metric: str = ACCURACY) -> float | None:
    """The highest value of a metric, the lowest of a loss; None where it was never measured.

    >>> best([{"round": 1, "test_loss": 0.5}, {"round": 2, "test_loss": 0.7}], "test_loss")
    0.5
    """
    values = [value for _, value in series(history, metric)]
    if not values:
        return None
    return min(values) if smaller_is_better(metric) else max(values)


def last(history: History, metric: str = ACCURACY, count: int = 5) -> float | None:
    """The mean of the last ``count`` measurements: steadier than the last one alone, and not picked as the best is.

    >>> last([{"round": r, "test_accuracy": r / 10} for r in range(10)])
    0.7
    """
    whole("last", "count", count)
    values = [value for _, value in series(history, metric)][-count:]
    return math.fsum(values) / len(values) if values else None


def rounds_to(history: History, target: float, metric: str = ACCURACY) -> int | None:
    """The first round at whose end a metric had reached the target; None if it never did.

    >>> rounds_to([{"round": r, "test_accuracy": r / 10} for r in range(1, 10)], 0.7)
    7
    """
    falls = smaller_is_better(metric)
    reached = (round for round, value in series(history, metric) if (value <= target if falls else value >= target))
    return next(reached, None)


def with_totals(history: History) -> list[dict[str, Any]]:
    """The records with running totals beside them: bits by link, with the server, in all; simulated and wall seconds.

    >>> [r["up_bits"] for r in with_totals([{"round": 1, "up_bytes": 2}, {"round": 2, "up_bytes": 3}])]
    [16, 40]
    """
    totals = dict.fromkeys(COSTS, 0)
    wall = simulated = 0.0
    found = []
    for record in _records(history):
        for total, part in COSTS.items():
            totals[total] += 8 * int(record.get(part) or 0)
        wall += float(record.get("seconds") or 0.0)
        sums = {"server_bits": totals["up_bits"] + totals["down_bits"], "bits": sum(totals.values())}
        entry = {**record, **totals, **sums, "wall_seconds": wall}
        if _measured(record.get("simulated_seconds")):
            simulated += float(record["simulated_seconds"])
            entry["simulated_total_seconds"] = simulated
        found.append(entry)
    return found


def summarize(history: History, target: float | None = None) -> dict[str, Any]:
    """A run in a few numbers. Without a target accuracy there is no rounds-to-target."""
    records = with_totals(history)
    measured = {name for record in records for name, value in record.items() if _measured(value)}
    final = records[-1] if records else {}
    found: dict[str, Any] = {"rounds": int(final.get("round", 0))}
    for metric in (ACCURACY, "test_loss", "global_loss", "loss", "train_loss"):
        if metric in measured:
            found[metric] = series(records, metric)[-1][1]
            found[f"best_{metric}"] = best(records, metric)
            found[f"last5_{metric}"] = last(records, metric)
    if target is not None:
        found["target"] = target
        found["rounds_to_target"] = rounds_to(records, target) if ACCURACY in measured else None
    for total in (*COSTS, "server_bits", "bits", "wall_seconds", "simulated_total_seconds"):
        if total in final:
            found[total] = final[total]
    found["lost"] = sum(int(record.get("lost") or 0) for record in records)
    found["unmoved_rounds"] = sum(record.get("moved") is False for record in records)
    return found


def to_line(record: Record) -> str:
    """A record as one line of strict JSON: NaN is null, infinities are the words "inf" and "-inf".

    >>> to_line({"round": 1, "loss": float("nan"), "diversity": float("inf")})
    '{"round": 1, "loss": null, "diversity": "inf"}'
    """
    return json.dumps(plain(record), allow_nan=False)


def from_line(line: str) -> dict[str, Any]:
    """The record that `to_line` wrote, its nulls read as NaN.

    >>> from_line('{"round": 1, "loss": null, "diversity": "inf"}')
    {'round': 1, 'loss': nan, 'diversity': inf}
    """
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get("round"), int):
        raise HansaError(f"expected a record with its round, found {line[:60]!r}.")
    words = {"inf": math.inf, "-inf": -math.inf}
    return {
        name: math.nan if value is None else words.get(value, value) if isinstance(value, str) else value
        for name, value in record.items()
    }


def read_history(path: Path | str) -> list[dict[str, Any]]:
    """All records of a metrics file. A last line that a crash cut short is left out; any other damage is an error."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise HansaError(f"{path}: no such file. A run writes it after its first round.") from None
    records = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            records.append(from_line(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise HansaError(f"{path}:{number}: not a record of a round ({error}).") from error
    return records


def load_run(folder: Path | str) -> pandas.DataFrame:
    """The history of a run folder as a pandas frame, one row a round, running totals included."""
    try:
        import pandas
    except ImportError as error:
        raise HansaError("load_run needs pandas: pip install 'hansa[report]'.") from error
    folder = Path(folder)
    frame = pandas.DataFrame(with_totals(read_history(folder / "metrics.jsonl")))
    frame.attrs["folder"] = str(folder)
    return frame


def _records(history: History) -> Sequence[Record]:
    if hasattr(history, "to_dict"):
        return list(history.to_dict("records"))
    return list(history)


def _measured(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def plain(value: Any) -> Any:
    """Any tree of numbers as strict JSON has them."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value.item() if hasattr(value, "item") else value
