"""The entries of a report: methods, each with the history of one run or of several seeds, and their ranking."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from hansa.config import Config, from_yaml, to_yaml
from hansa.core.errors import HansaError
from hansa.runs import metrics, seed_group
from hansa.runs.client_columns import ClientColumns
from hansa.runs.columns import ACCURACY, BITS, CHARTED, OUTCOMES, lower_is_better
from hansa.runs.folder import RunFolder
from hansa.runs.folder_lock import CONFIG
from hansa.runs.metrics_log import HistoryColumns
from hansa.runs.seed_statistics import SeedStatistics, summarize_seeds

PALETTE = (
    "#0072b2", "#d55e00", "#009e73", "#b8569a", "#c98a00", "#45a5db", "#7a4fbf", "#8a5a2b", "#767d86", "#93a01a",
)  # fmt: skip
"""Colours that colour-blind readers can tell apart on white and on dark, after Okabe and Ito."""
MAX_POINTS = 1500
"""Curves with more rounds are thinned for drawing; tables use all rounds."""
COST_COLUMNS = frozenset({*BITS.values(), "seconds", "simulated_seconds"})
"""The columns of a history that running totals are computed from."""


@dataclass(frozen=True, slots=True)
class ReportEntry:
    """One run in a report, or several seeds of one method, shown as mean and deviation.

    Args:
        name: The method's name in tables and legends.
        history: One record for each round; empty if there are ``members``.
        config: The YAML text of the configuration.
        environment: Machine and package versions of the run.
        summary: The contents of ``summary.json``.
        seed: The seed of the run.
        members: The runs of each seed, if there are several.
        composition: The algorithm in Python, for runs without a configuration.
        folder: The run folder.
        planned_rounds: How many rounds the run is to have.
        clients: The totals of each client. Read from ``folder`` if not given.
        label_counts: The number of samples of each label that each client holds.
        label_names: The names of these labels.

    >>> ReportEntry("a", [{"round": 1, "test_accuracy": 0.5}]).series()["test_accuracy"]
    [0.5]
    """

    name: str
    history: Sequence[Mapping[str, Any]]
    config: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    members: tuple[ReportEntry, ...] = ()
    composition: str = ""
    folder: str = ""
    planned_rounds: int | None = None
    clients: ClientColumns | None = field(default=None, compare=False, repr=False)
    label_counts: Sequence[Sequence[int]] = field(default=(), compare=False, repr=False)
    label_names: Sequence[str] = ()

    @classmethod
    def from_folder(cls, folder: Path | str, name: str | None = None) -> ReportEntry:
        """Read a run folder."""
        run = RunFolder.containing(folder)
        config, history = run.config, run.metrics
        return cls(
            config.title if name is None else name,
            history,
            (run / CONFIG).read_text(encoding="utf-8"),
            run.environment,
            run.summary_of(history),
            config.seed,
            folder=str(run.path),
            planned_rounds=config.rounds,
        )

    @classmethod
    def from_group(cls, folder: Path | str, name: str | None = None) -> ReportEntry:
        """Read the folder of several seeds of one method."""
        group = seed_group.SeedGroupFolder(folder)
        members = [cls.from_folder(run.path) for run in group.runs]
        return cls.from_seeds(group.config.title if name is None else name, members)

    @classmethod
    def from_seeds(cls, name: str, members: Sequence[ReportEntry]) -> ReportEntry:
        """Combine runs that differ only in their seeds; a single run stays as it is."""
        if not members:
            raise HansaError(f"{name}: a group needs at least one run.")
        if len(members) == 1:
            return replace(members[0], name=name)
        ordered = tuple(sorted(members, key=lambda member: -1 if member.seed is None else member.seed))
        first = ordered[0]
        config = _shared_config(ordered)
        return cls(name, (), config, first.environment, members=ordered, composition=first.composition)

    @property
    def runs(self) -> tuple[ReportEntry, ...]:
        """The run of every seed."""
        return self.members or (self,)

    @property
    def histories(self) -> list[Sequence[Mapping[str, Any]]]:
        """The history of every seed."""
        return [run.history for run in self.runs]

    @property
    def progress(self) -> str:
        """The status of an unfinished entry, such as "unfinished, 12 of 40 rounds"; "" if it has finished."""
        states = dict.fromkeys(str(run.summary.get("status", "")) for run in self.runs)
        status = ", ".join(state for state in states if state not in ("", "finished"))
        done, planned = min(map(len, self.histories)), max((run.planned_rounds or 0 for run in self.runs), default=0)
        return f"{status}, {done} of {planned} rounds" if status and planned > done else status

    def curves(self, most: int = MAX_POINTS) -> list[dict[str, list[float | None]]]:
        """The columns to draw, one table for each seed, of the rounds that all seeds have.

        Tables have at most ``most`` rows. Values that were not measured are None.
        """
        common = min(len(history) for history in self.histories)
        stride = max(1, math.ceil(common / most))
        return [_curve_columns(history, common, stride) for history in self.histories]

    def series(self) -> dict[str, list[float | None]]:
        """The columns to draw, averaged over seeds; None where a seed has no value."""
        tables = self.curves()
        if len(tables) == 1:
            return tables[0]
        names = [name for name in tables[0] if all(name in table for table in tables)]
        return {name: [_mean(values) for values in zip(*(t[name] for t in tables), strict=True)] for name in names}


@dataclass(frozen=True, slots=True)
class RankedEntry:
    """An entry with the numbers that it is ranked and shown by.

    Args:
        entry: The method.
        numbers: Its summary; means over seeds if there are several.
        colour: Its colour in charts.
        spreads: The spread over seeds of each number.

    >>> rank([ReportEntry("a", [{"round": 1, "test_accuracy": 0.5}])])[0].numbers["best_test_accuracy"]
    0.5
    """

    entry: ReportEntry
    numbers: Mapping[str, Any]
    colour: str
    spreads: Mapping[str, SeedStatistics] = field(default_factory=dict)


def rank(entries: Sequence[ReportEntry], target: float | None = None) -> list[RankedEntry]:
    """Rank entries from best to worst.

    The order is that of the mean of the last five accuracies, or of the losses if there is no accuracy; with several
    seeds, of its mean over them. Colours follow the given order, so a method keeps its colour from report to report.

    Args:
        entries: The entries, with distinct names.
        target: A target accuracy; adds ``rounds_to_target`` to the numbers.

    >>> entries = [
    ...     ReportEntry("a", [{"round": 1, "test_accuracy": 0.5}]),
    ...     ReportEntry("b", [{"round": 1, "test_accuracy": 0.7}]),
    ... ]
    >>> [ranked.entry.name for ranked in rank(entries)]
    ['b', 'a']
    """
    if not entries:
        raise HansaError("a report needs at least one run.")
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise HansaError(f"two runs are called {name!r}: give each run its own name.")
    ranking = []
    for place, entry in enumerate(entries):
        numbers, spreads = summarize_seeds(entry.histories, target)
        ranking.append(RankedEntry(entry, numbers, PALETTE[place % len(PALETTE)], spreads))
    metric = ranking_metric(ranking)
    sign = 1.0 if lower_is_better(metric) else -1.0

    def score(ranked: RankedEntry) -> float:
        value = ranked.numbers.get(f"last5_{metric}")
        return math.inf if value is None else sign * float(value)

    return sorted(ranking, key=score)


def ranking_metric(ranking: Sequence[RankedEntry]) -> str:
    """Return the metric that the entries are ranked by: the first outcome that one of them measured."""
    for metric in OUTCOMES:
        if any(ranked.numbers.get(f"last5_{metric}") is not None for ranked in ranking):
            return metric
    return ACCURACY


def common_target(entries: Sequence[ReportEntry]) -> float | None:
    """Return the highest multiple of 5% accuracy that at least half of the entries reached with every seed.

    >>> entries = [
    ...     ReportEntry("a", [{"round": 1, "test_accuracy": 0.5}]),
    ...     ReportEntry("b", [{"round": 1, "test_accuracy": 0.7}]),
    ... ]
    >>> common_target(entries)
    0.7
    """
    measured = [entry for entry in entries if all(map(_has_finite_accuracy, entry.histories))]
    best = sorted((min(metrics.best(h) or 0.0 for h in entry.histories) for entry in measured), reverse=True)
    if not best:
        return None
    target = math.floor(best[(len(best) - 1) // 2] * 20 + 1e-9) / 20
    return round(target, 2) if target > 0 else None


def group_by_seed(entries: Sequence[ReportEntry]) -> list[ReportEntry]:
    """Combine entries whose configurations differ only in the seed.

    >>> configs = [f"algorithm: fedavg\\nseed: {seed}" for seed in (0, 1)]
    >>> entries = [ReportEntry(f"run {seed}", (), config, seed=seed) for seed, config in enumerate(configs)]
    >>> [len(entry.members) for entry in group_by_seed(entries)]
    [2]
    """

    def config(entry: ReportEntry) -> Config | None:
        return from_yaml(entry.config, building=False) if entry.config and not entry.members else None

    groups = []
    for members in seed_group.group_by_config(entries, config):
        titles = {from_yaml(member.config, building=False).title for member in members if member.config}
        alone = len(members) == 1
        groups.append(members[0] if alone else ReportEntry.from_seeds(min(titles, key=len), members))
    return groups


def has_column(history: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether a column was ever measured."""
    return name in history.names if isinstance(history, HistoryColumns) else any(name in record for record in history)


def _shared_config(members: Sequence[ReportEntry]) -> str:
    """The configuration of a group, with the list of its seeds."""
    seeds = [member.seed for member in members]
    if not members[0].config or None in seeds:
        return ""
    return to_yaml(from_yaml(members[0].config, building=False).model_copy(update={"seed": 0, "seeds": seeds}))


def _curve_columns(history: Sequence[Mapping[str, Any]], count: int, stride: int) -> dict[str, list[float | None]]:
    """The charted columns of the first ``count`` rounds: every ``stride``-th of them, and always the last."""
    if isinstance(history, HistoryColumns):
        history = history.select({*CHARTED, *COST_COLUMNS})
    first = islice(metrics.running_totals(history), count)
    records = [record for place, record in enumerate(first) if (count - 1 - place) % stride == 0]
    columns = {name: [_number(record.get(name)) for record in records] for name in CHARTED}
    return {name: values for name, values in columns.items() if name == "round" or any(v is not None for v in values)}


def _has_finite_accuracy(history: Sequence[Mapping[str, Any]]) -> bool:
    return any(_number(record.get(ACCURACY)) is not None for record in history)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return known[0] if len(set(known)) == 1 else _number(math.fsum(known) / len(known))


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")
