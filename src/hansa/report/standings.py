"""What a report is made of: runs, each with its history, and the order in which they rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hansa.errors import HansaError
from hansa.runs import metrics
from hansa.runs.journal import Columns

COLOURS = (
    "#2f6fd0", "#e06c1b", "#12936f", "#9b4fc4", "#c9930a", "#d64550", "#1797ad", "#7a8390", "#8a5a2b", "#5c9e1f",
)  # fmt: skip
POINTS = 1500
"""More rounds than this are thinned out for drawing; tables use them all."""

DRAWN = (
    "round", "server_bits", "bits", "simulated_total_seconds", "wall_seconds", "test_accuracy", "test_loss",
    "global_loss", "loss", "train_loss", "diversity", "update_norm", "consensus", "lost",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One run in a report."""

    name: str
    history: Sequence[Mapping[str, Any]]
    config: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_folder(cls, folder: Path | str, name: str | None = None) -> Entry:
        """A run from its folder."""
        from hansa.runs.folder import CONFIG, RunFolder

        found = RunFolder.holding(folder)
        title = name if name is not None else found.config.title
        text = (found / CONFIG).read_text(encoding="utf-8")
        history = found.numbers
        return cls(title, history, text, found.environment, found.summary_of(history))

    def series(self) -> dict[str, list[float | None]]:
        """The columns that curves are drawn from, at most `POINTS` long; what was not measured is None."""
        final = len(self.history) - 1
        stride = max(1, math.ceil(len(self.history) / POINTS))
        history = self.history
        if isinstance(history, Columns):
            history = history.only({*DRAWN, *metrics.COSTS.values(), "seconds", "simulated_seconds"})
        # the last round is always among them
        kept = [r for place, r in enumerate(metrics.running_totals(history)) if (final - place) % stride == 0]
        columns = {name: [_number(record.get(name)) for record in kept] for name in DRAWN}
        return {
            name: values for name, values in columns.items() if name == "round" or any(v is not None for v in values)
        }


@dataclass(frozen=True, slots=True)
class Standing:
    """A run with the numbers it is ranked and shown by."""

    entry: Entry
    numbers: Mapping[str, Any]
    colour: str


def rank(entries: Sequence[Entry], target: float | None = None) -> list[Standing]:
    """Runs from best to worst: by the mean of the last five accuracies, or of the losses where there is no accuracy.

    Colours follow the order given, so that a method keeps its own from report to report.
    """
    if not entries:
        raise HansaError("a report needs at least one run.")
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise HansaError(f"two runs are called {name!r}: give each a name of its own.")
    found = [
        Standing(entry, metrics.summarize(entry.history, target), COLOURS[place % len(COLOURS)])
        for place, entry in enumerate(entries)
    ]
    metric = ranking_metric(found)
    sign = 1.0 if metrics.smaller_is_better(metric) else -1.0

    def score(standing: Standing) -> float:
        value = standing.numbers.get(f"last5_{metric}")
        return math.inf if value is None else sign * float(value)

    return sorted(found, key=score)


def ranking_metric(standings: Sequence[Standing]) -> str:
    """The metric that all can be compared by."""
    for metric in (metrics.ACCURACY, "test_loss", "global_loss", "loss", "train_loss"):
        if any(standing.numbers.get(f"last5_{metric}") is not None for standing in standings):
            return metric
    return metrics.ACCURACY


def common_target(entries: Sequence[Entry]) -> float | None:
    """A target accuracy that tells the runs apart: the highest multiple of 5% that at least half of them reached."""
    found = sorted((metrics.best(entry.history) or 0.0 for entry in entries if _has_accuracy(entry)), reverse=True)
    if not found:
        return None
    middle = found[(len(found) - 1) // 2]
    target = math.floor(middle * 20 + 1e-9) / 20
    return round(target, 2) if target > 0 else None


def _has_accuracy(entry: Entry) -> bool:
    return any(_number(record.get(metrics.ACCURACY)) is not None for record in entry.history)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")
