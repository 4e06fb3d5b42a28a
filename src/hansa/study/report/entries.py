"""The entries of a report: methods, each with the history of one run or of several seeds, and their ranking."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from hansa.config import Config, from_yaml, to_yaml
from hansa.core.errors import HansaError, suggestion
from hansa.runs import metrics, seed_group
from hansa.runs.client_columns import ClientColumns
from hansa.runs.columns import (
    ACCURACY,
    CHARTED,
    SITE_PREFIX,
    TOTALS,
    WINDOW,
    MetricFacts,
    column_of,
    direction_of,
    evaluated_metrics,
    lower_is_better,
    main_metric,
    split_metric,
)
from hansa.runs.folder import RunFolder
from hansa.runs.folder_lock import CONFIG
from hansa.runs.metrics import SeedStatistics, facts_of, summarize_seeds
from hansa.training.metric_direction import Direction

log = logging.getLogger("hansa")

PALETTE = (
    "#0072b2", "#d55e00", "#009e73", "#b8569a", "#c98a00", "#45a5db", "#7a4fbf", "#8a5a2b", "#767d86", "#93a01a",
)  # fmt: skip
"""Colours that colour-blind readers can tell apart on white and on dark, after Okabe and Ito."""
MAX_POINTS = 1500
"""Curves with more rounds are thinned for drawing; tables use all rounds."""


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
        client_names: The names of the clients by number, if they have any.
        data: The name of the data, and digests of its rows (``data``) and of its ``partition``.
        jobs: The client record with the times of jobs, for the timeline. Read from ``folder`` if not given.
        notes: What is damaged or missing in the folder, for the top of the page.

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
    client_names: Sequence[str] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    jobs: ClientColumns | None = field(default=None, compare=False, repr=False)
    notes: tuple[str, ...] = ()

    @classmethod
    def from_folder(cls, folder: Path | str, name: str | None = None) -> ReportEntry:
        """Read a run folder."""
        run = RunFolder.containing(folder)
        with _collected_warnings() as notes:
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
                client_names=run.client_names,
                data=run.data_facts,
                notes=tuple(notes),
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

    def curves(self, most: int = MAX_POINTS, also: str = "") -> list[dict[str, list[float | None]]]:
        """The columns to draw, one table for each seed, of the rounds that all seeds have.

        Tables have at most ``most`` rows, and the column ``also`` if it was measured. Values that were not measured are
        None.
        """
        common = min(len(history) for history in self.histories)
        stride = max(1, math.ceil(common / most))
        return [_curve_columns(history, common, stride, also) for history in self.histories]

    def series(self) -> dict[str, list[float | None]]:
        """The columns to draw, averaged over seeds; None where a seed has no value."""
        tables = self.curves()
        if len(tables) == 1:
            return tables[0]
        names = [name for name in tables[0] if all(name in table for table in tables)]
        return {name: [_mean(values) for values in zip(*(t[name] for t in tables), strict=True)] for name in names}


@contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """Collect what this thread warns about, such as files that do not agree."""
    messages: list[str] = []
    handler, thread = logging.Handler(logging.WARNING), threading.get_ident()
    handler.emit = lambda record: messages.append(record.getMessage()) if record.thread == thread else None  # type: ignore
    log.addHandler(handler)
    try:
        yield messages
    finally:
        log.removeHandler(handler)


@dataclass(frozen=True, slots=True)
class RankedEntry:
    """An entry with the numbers that it is ranked and shown by.

    Args:
        entry: The method.
        numbers: Its summary; means over seeds if there are several.
        colour: Its colour in charts.
        spreads: The spread over seeds of each number.
        metric: The column that all entries are ranked by.
        score: The number that they are ranked by, such as ``last5_test_accuracy``; the final value has no prefix.
        better: The directions of the task's own metrics.
        window: How many of the last measurements a score averages.

    >>> ranked = rank([ReportEntry("a", [{"round": 1, "test_rmse": 0.5}])])[0]
    >>> ranked.metric, ranked.numbers[ranked.score], ranked.falls
    ('test_rmse', 0.5, True)
    """

    entry: ReportEntry
    numbers: Mapping[str, Any]
    colour: str
    spreads: Mapping[str, SeedStatistics] = field(default_factory=dict)
    metric: str = ACCURACY
    score: str = ACCURACY
    better: Mapping[str, Direction] = field(default_factory=dict)
    window: int = WINDOW

    @property
    def falls(self) -> bool:
        """Whether a smaller value of the ranking metric is better."""
        return lower_is_better(self.metric, self.better)

    @property
    def diverged(self) -> dict[int | None, int]:
        """The seeds whose ranking metric is not finite at its last measurement, and the round from which on."""
        rounds = ((run.seed, metrics.diverged_at(run.history, self.metric)) for run in self.entry.runs)
        return {seed: round for seed, round in rounds if round is not None}

    def shows(self, value: Any) -> bool:
        """Return whether a number of this entry may be marked as the best: of a run that diverged none is."""
        return value is not None and not self.diverged


def rank(
    entries: Sequence[ReportEntry],
    target: float | None = None,
    *,
    metric: str | None = None,
    window: int = WINDOW,
) -> list[RankedEntry]:
    """Rank entries from best to worst; those that diverged come last, after those that did not measure the metric.

    The order is that of the mean of the last ``window`` measurements, or of the final ones if a run has no more than
    these; with several seeds, of its mean over them. Colours follow the given order, so a method keeps its colour from
    report to report.

    Args:
        entries: The entries, with distinct names.
        target: A value for the metric to reach; adds ``rounds_to_target`` and ``bits_to_target`` to the numbers.
        metric: Any column of the histories, or COLUMN:lower where its direction is not known; by default the main
            metric of the tasks.
        window: How many of the last measurements are averaged.

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
    name, better = choose_metric(entries, metric)
    stated = f"{name}:{direction_of(name, better)}"
    summaries = [summarize_seeds(entry.histories, target, metric=stated, window=window) for entry in entries]
    score = metrics.score_key([numbers for numbers, _ in summaries], name, window)
    ranking = [
        RankedEntry(entry, numbers, PALETTE[place % len(PALETTE)], spreads, name, score, better, window)
        for place, (entry, (numbers, spreads)) in enumerate(zip(entries, summaries, strict=True))
    ]
    sign = 1.0 if lower_is_better(name, better) else -1.0

    def order(ranked: RankedEntry) -> tuple[int, float]:
        value = ranked.numbers.get(score)
        if ranked.diverged:
            return 2, 0.0
        return (1, 0.0) if value is None else (0, sign * float(value))

    return sorted(ranking, key=order)


def choose_metric(entries: Sequence[ReportEntry], metric: str | None = None) -> tuple[str, dict[str, Direction]]:
    """Return the column that entries are ranked by, and the directions of their metrics.

    It is the requested one; else the main metric of the first task whose main metric all entries measured, else the
    main metric of the first task.

    >>> choose_metric([ReportEntry("a", [{"round": 1, "test_c_index": 0.5, "test_loss": 1.0}])])
    ('test_c_index', {})
    """
    all_facts = [facts_of(history) for entry in entries for history in entry.histories]
    better: dict[str, Direction] = {}
    for facts in reversed(all_facts):
        better |= facts.better
    columns = [{*metrics.column_names(history)} for entry in entries for history in entry.histories]
    known = set().union(*columns)
    if metric is not None:
        name, better = split_metric(metric, better)
        if known and name not in known and name not in TOTALS:
            raise HansaError(f"metric {name!r}: no run has it. {suggestion(name, known)}")
        lower_is_better(name, better)  # raises where its direction is not known
        return name, better
    stated = [name for facts in all_facts for name in (facts.main, SITE_PREFIX + facts.main)]
    mains = [name for name in stated if name in known]
    shared = [main for main in mains if all(main in each for each in columns)]
    chosen = (shared or mains or [""])[0]
    return main_metric(known, MetricFacts(chosen, better)), better


def common_target(entries: Sequence[ReportEntry], metric: str | None = None) -> float | None:
    """Return the highest multiple of 5% accuracy that at least half of the entries reached with every seed.

    There is none for metrics other than an accuracy, nor below the accuracy of always predicting the most frequent
    label.

    >>> entries = [
    ...     ReportEntry("a", [{"round": 1, "test_accuracy": 0.5}]),
    ...     ReportEntry("b", [{"round": 1, "test_accuracy": 0.7}]),
    ... ]
    >>> common_target(entries)
    0.7
    """
    name, better = choose_metric(entries, metric)
    if column_of(name).unit != "fraction" or direction_of(name, better) != "higher":
        return None
    measured = [entry for entry in entries if all(_is_measured(history, name) for history in entry.histories)]
    best = sorted((min(metrics.best(h, name) or 0.0 for h in entry.histories) for entry in measured), reverse=True)
    if not best:
        return None
    target = math.floor(best[(len(best) - 1) // 2] * 20 + 1e-9) / 20
    return round(target, 2) if target > chance_level(entries) else None


def chance_level(entries: Sequence[ReportEntry]) -> float:
    """Return the accuracy of always predicting the most frequent label, the highest of all entries; 0 if not known."""
    shares = [facts_of(history).chance for entry in entries for history in entry.histories]
    return max((share for share in shares if share is not None), default=0.0)


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
    return any(name in record for record in history)


def _shared_config(members: Sequence[ReportEntry]) -> str:
    """The configuration of a group, with the list of its seeds."""
    seeds = [member.seed for member in members]
    if not members[0].config or None in seeds:
        return ""
    return to_yaml(from_yaml(members[0].config, building=False).model_copy(update={"seed": 0, "seeds": seeds}))


def _curve_columns(
    history: Sequence[Mapping[str, Any]], count: int, stride: int, also: str = ""
) -> dict[str, list[float | None]]:
    """The charted columns of the first ``count`` rounds: every ``stride``-th of them, and always the last."""
    names = metrics.column_names(history)
    drawn = list(dict.fromkeys([*charted_columns(names), *([also] if also in names else [])]))
    first = islice(metrics.running_totals(history), count)
    records = [record for place, record in enumerate(first) if (count - 1 - place) % stride == 0]
    columns = {name: [_number(record.get(name)) for record in records] for name in drawn}
    return {name: values for name, values in columns.items() if name == "round" or any(v is not None for v in values)}


def charted_columns(names: Iterable[str]) -> list[str]:
    """Return the columns to draw: those declared as charts, and after the test loss the evaluated metrics among some
    names.

    >>> columns = charted_columns(["round", "test_auc"])
    >>> columns[columns.index("test_loss") + 1]
    'test_auc'
    """
    own = [name for name in evaluated_metrics(names) if name not in CHARTED and not name.endswith("_std")]
    place = CHARTED.index("test_loss") + 1
    return [*CHARTED[:place], *sorted(own, key=lambda name: not name.startswith("test_")), *CHARTED[place:]]


def _is_measured(history: Sequence[Mapping[str, Any]], name: str) -> bool:
    return any(_number(record.get(name)) is not None for record in history)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return known[0] if len(set(known)) == 1 else _number(math.fsum(known) / len(known))


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")
