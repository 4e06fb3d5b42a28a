"""What a report is made of: methods, each with the history of a run or of several seeds, and the order they rank in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from hansa.config import Config, from_text, to_text
from hansa.core.errors import HansaError
from hansa.runs import metrics, seed_group
from hansa.runs.client_columns import ClientColumns
from hansa.runs.folder import CONFIG, RunFolder
from hansa.runs.metrics_log import Columns
from hansa.runs.seed_statistics import Spread, combined

COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#b8569a", "#c98a00", "#45a5db", "#7a4fbf", "#8a5a2b", "#767d86", "#93a01a",
)  # fmt: skip
"""Told apart by people who do not see red or green, on white and on dark: after Okabe and Ito."""
POINTS = 1500
"""More rounds than this are thinned out for drawing; tables use them all."""

DRAWN = (
    "round", "up_bits", "server_bits", "bits", "simulated_total_seconds", "wall_seconds", "test_accuracy", "test_loss",
    "global_loss", "local_mean_loss", "loss", "train_loss", "diversity", "surrogate_diversity", "gamma", "q",
    "consensus", "update_norm", "aggregate_norm", "sigma_g", "lost",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One run in a report; or several seeds of a method, its ``members``, shown as their mean and deviation.

    ``made`` is the composition of a run that no configuration describes, ``folder`` where a run lies, ``planned`` how
    many rounds it is to have.

    >>> Entry("a", [{"round": 1, "test_accuracy": 0.5}]).series()["test_accuracy"]
    [0.5]
    """

    name: str
    history: Sequence[Mapping[str, Any]]
    config: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    members: tuple[Entry, ...] = ()
    made: str = ""
    folder: str = ""
    planned: int | None = None
    clients: ClientColumns | None = field(default=None, compare=False, repr=False)
    """What each client did, one row each; of a run that lies in a folder it is read there."""
    holds: Sequence[Sequence[int]] = field(default=(), compare=False, repr=False)
    """How many samples of each label each client holds."""
    labels: Sequence[str] = ()

    @classmethod
    def of_folder(cls, folder: Path | str, name: str | None = None) -> Entry:
        """A run from its folder."""
        found = RunFolder.holding(folder)
        config = found.config
        title = name if name is not None else config.title
        text = (found / CONFIG).read_text(encoding="utf-8")
        history = found.numbers
        summary = found.summary_of(history)
        place, planned = str(found.path), config.rounds
        return cls(title, history, text, found.environment, summary, config.seed, folder=place, planned=planned)

    @classmethod
    def of_group(cls, folder: Path | str, name: str | None = None) -> Entry:
        """The seeds of a method from their folder."""
        found = seed_group.GroupFolder(folder)
        members = [cls.of_folder(run.path) for run in found.runs]
        return cls.of_seeds(name if name is not None else found.config.title, members)

    @classmethod
    def of_seeds(cls, name: str, members: Sequence[Entry]) -> Entry:
        """Several runs that differ in their seeds, as one entry; of a single run, that run."""
        if not members:
            raise HansaError(f"{name}: a group needs at least one run.")
        if len(members) == 1:
            return replace(members[0], name=name)
        ordered = tuple(sorted(members, key=lambda member: -1 if member.seed is None else member.seed))
        return cls(name, (), _of_all_seeds(ordered), ordered[0].environment, members=ordered, made=ordered[0].made)

    @property
    def runs(self) -> tuple[Entry, ...]:
        """Its seeds, or itself."""
        return self.members or (self,)

    @property
    def histories(self) -> list[Sequence[Mapping[str, Any]]]:
        """The history of every seed."""
        return [run.history for run in self.runs]

    @property
    def standing(self) -> str:
        """How far it is, if it has not finished: unfinished, 12 of 40 rounds."""
        told = dict.fromkeys(str(run.summary.get("status", "")) for run in self.runs)
        words = ", ".join(word for word in told if word not in ("", "finished"))
        done, planned = min(map(len, self.histories)), max((run.planned or 0 for run in self.runs), default=0)
        return f"{words}, {done} of {planned} rounds" if words and planned > done else words

    def curves(self, most: int = POINTS) -> list[dict[str, list[float | None]]]:
        """The columns that curves are drawn from, a table a seed, of the rounds that all seeds have, at most ``most``
        long; what was not measured is None."""
        common = min(len(history) for history in self.histories)
        stride = max(1, math.ceil(common / most))
        return [_columns(history, common, stride) for history in self.histories]

    def series(self) -> dict[str, list[float | None]]:
        """The curves' columns, over seeds their means; what a seed did not measure is None."""
        tables = self.curves()
        if len(tables) == 1:
            return tables[0]
        names = [name for name in tables[0] if all(name in table for table in tables)]
        return {name: [_mean(values) for values in zip(*(t[name] for t in tables), strict=True)] for name in names}


@dataclass(frozen=True, slots=True)
class Standing:
    """A run with the numbers it is ranked and shown by.

    >>> entries = [Entry("a", [{"round": 1, "test_accuracy": 0.5}]), Entry("b", [{"round": 1, "test_accuracy": 0.7}])]
    >>> rank(entries)[0].numbers["best_test_accuracy"]
    0.7
    """

    entry: Entry
    numbers: Mapping[str, Any]
    colour: str
    spreads: Mapping[str, Spread] = field(default_factory=dict)


def rank(entries: Sequence[Entry], target: float | None = None) -> list[Standing]:
    """Runs from best to worst: by the mean of the last five accuracies, or of the losses where there is no accuracy; of
    several seeds, by the mean over them.

    Colours follow the order given, so that a method keeps its own from report to report.

    >>> entries = [Entry("a", [{"round": 1, "test_accuracy": 0.5}]), Entry("b", [{"round": 1, "test_accuracy": 0.7}])]
    >>> [standing.entry.name for standing in rank(entries)]
    ['b', 'a']
    """
    if not entries:
        raise HansaError("a report needs at least one run.")
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise HansaError(f"two runs are called {name!r}: give each a name of its own.")
    found = []
    for place, entry in enumerate(entries):
        numbers, spreads = combined(entry.histories, target)
        found.append(Standing(entry, numbers, COLOURS[place % len(COLOURS)], spreads))
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
    """A target accuracy that tells the runs apart: the highest multiple of 5% that at least half of them reached,
    with every seed.

    >>> entries = [Entry("a", [{"round": 1, "test_accuracy": 0.5}]), Entry("b", [{"round": 1, "test_accuracy": 0.7}])]
    >>> common_target(entries)
    0.7
    """
    able = [entry for entry in entries if all(map(_has_accuracy, entry.histories))]
    found = sorted((min(metrics.best(h) or 0.0 for h in entry.histories) for entry in able), reverse=True)
    if not found:
        return None
    middle = found[(len(found) - 1) // 2]
    target = math.floor(middle * 20 + 1e-9) / 20
    return round(target, 2) if target > 0 else None


def by_seeds(entries: Sequence[Entry]) -> list[Entry]:
    """Entries whose configurations differ in the seed alone, put together: seeds are no methods of their own.

    >>> entries = [Entry("a", [{"round": 1, "test_accuracy": 0.5}]), Entry("b", [{"round": 1, "test_accuracy": 0.7}])]
    >>> [entry.name for entry in by_seeds(entries)]
    ['a', 'b']
    """

    def config(entry: Entry) -> Config | None:
        return from_text(entry.config, building=False) if entry.config and not entry.members else None

    found: list[Entry] = []
    for members in seed_group.grouped(entries, config):
        titles = {from_text(member.config, building=False).title for member in members if member.config}
        alone = len(members) == 1
        found.append(members[0] if alone else Entry.of_seeds(min(titles, key=len), members))
    return found


def _of_all_seeds(members: Sequence[Entry]) -> str:
    """The configuration that all of a group come from."""
    seeds = [member.seed for member in members]
    if not members[0].config or None in seeds:
        return ""
    return to_text(from_text(members[0].config, building=False).model_copy(update={"seed": 0, "seeds": seeds}))


def _columns(history: Sequence[Mapping[str, Any]], count: int, stride: int) -> dict[str, list[float | None]]:
    """What is drawn of the first ``count`` rounds, every so manieth of them, the last one always."""
    if isinstance(history, Columns):
        history = history.only({*DRAWN, *metrics.COSTS.values(), "seconds", "simulated_seconds"})
    first = islice(metrics.running_totals(history), count)
    kept = [record for place, record in enumerate(first) if (count - 1 - place) % stride == 0]
    columns = {name: [_number(record.get(name)) for record in kept] for name in DRAWN}
    return {name: values for name, values in columns.items() if name == "round" or any(v is not None for v in values)}


def _has_accuracy(history: Sequence[Mapping[str, Any]]) -> bool:
    return any(_number(record.get(metrics.ACCURACY)) is not None for record in history)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return known[0] if len(set(known)) == 1 else _number(math.fsum(known) / len(known))


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")
