"""The entries of a report: methods, each with the history of one run or of several seeds, read from run folders."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from hansa.config import from_yaml, to_yaml
from hansa.core.errors import HansaError
from hansa.data.partitions import read_label_counts
from hansa.data.sources import DATASETS
from hansa.runs.client_columns import ClientColumns
from hansa.runs.folder import (
    CONFIG,
    GROUP,
    METRICS,
    PARTITION,
    RunFolder,
    SeedGroupFolder,
    check_readable,
    seedless_digest,
    subfolders,
)

log = logging.getLogger("hansa")

MAX_DEPTH = 4
"""Levels below a folder that are searched for runs."""
MAX_JOBS = 3_000_000
"""Client records with more jobs are not read for a timeline."""


@dataclass(frozen=True, slots=True)
class LabelCounts:
    """The number of samples of each label that each client holds.

    Args:
        counts: ``counts[client][label]``.
        labels: The names of the labels.
        population: The number of clients, if ``counts`` has only the first of them.

    >>> LabelCounts([[4, 0], [1, 3]], ["cat", "dog"]).population
    """

    counts: Sequence[Sequence[int]]
    labels: Sequence[str]
    population: int | None = None


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
        folder: The run folder, from which values not passed below are read.
        planned_rounds: The number of rounds that the run will have.
        clients: Reads the totals of each client.
        jobs: Reads the client record with the times of jobs, for the timeline.
        labels: Reads the samples of each label that each client holds.
        data: The name of the data, and digests of its rows (``data``) and of its ``partition``.
        cites: The citations of its components: keys, or BibTeX entries.
        notes: Warnings about damaged or missing files, for the top of the page.

    >>> ReportEntry("a", [{"round": 1, "test_accuracy": 0.5}]).histories
    [[{'round': 1, 'test_accuracy': 0.5}]]
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
    clients: Callable[[], ClientColumns] = field(default=ClientColumns, compare=False, repr=False)
    jobs: Callable[[], ClientColumns] = field(default=ClientColumns, compare=False, repr=False)
    labels: Callable[[], LabelCounts | None] = field(default=lambda: None, compare=False, repr=False)
    data: Mapping[str, str] = field(default_factory=dict)
    cites: Sequence[str] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def from_folder(cls, folder: Path | str) -> ReportEntry:
        """Read a run folder, or the folder of several seeds of one method."""
        if (group := SeedGroupFolder(folder)).exists:
            return cls.from_seeds(group.config.title, [cls.from_folder(run.path) for run in group.runs])
        run = RunFolder.containing(folder)
        with _collected_warnings() as notes:
            config, history, data = run.config, run.metrics, run.data_facts
            updates = sum(int(record.get("participants") or 0) + int(record.get("lost") or 0) for record in history)
            timed = bool(history) and "utilisation" in history[-1] and updates <= MAX_JOBS
            return cls(
                config.title,
                history,
                (run / CONFIG).read_text(encoding="utf-8"),
                run.environment,
                run.summary_of(history),
                config.seed,
                folder=str(run.path),
                planned_rounds=config.rounds,
                clients=partial(_read_clients, str(run.path), len(history), str(run.environment.get("started"))),
                jobs=run.clients if timed else ClientColumns,
                labels=partial(_read_labels, run / PARTITION, data.get("name", "")),
                data=data,
                cites=run.marker.cites,
                notes=tuple(notes),
            )

    @classmethod
    def from_seeds(cls, name: str, members: Sequence[ReportEntry]) -> ReportEntry:
        """Combine runs that differ only in their seeds; a single run is only renamed."""
        if not members:
            raise HansaError(f"{name}: a group needs at least one run.")
        if len(members) == 1:
            return replace(members[0], name=name)
        ordered = tuple(sorted(members, key=lambda member: -1 if member.seed is None else member.seed))
        leader, config, seeds = ordered[0], "", [member.seed for member in ordered]
        if leader.config and None not in seeds:
            shared = from_yaml(leader.config, building=False)
            config = to_yaml(shared.model_copy(update={"seed": 0, "seeds": seeds}))
        return cls(name, (), config, leader.environment, members=ordered, composition=leader.composition)

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
        rounds, planned = min(map(len, self.histories)), max((run.planned_rounds or 0 for run in self.runs), default=0)
        return f"{status}, {rounds} of {planned} rounds" if status and planned > rounds else status


@lru_cache(maxsize=64)
def _read_clients(folder: str, rounds: int, started: str) -> ClientColumns:
    """Read the clients of a folder once for each number of rounds."""
    return RunFolder(folder).by_client()


def _read_labels(partition: Path, data: str) -> LabelCounts | None:
    """Read the label counts of a partition, with the names of the labels of the data set."""
    if (stored := read_label_counts(partition)) is None:
        return None
    (clients, counts), names = stored, DATASETS[data].class_names if data in DATASETS else ()
    classes = len(counts[0]) if counts else 0
    return LabelCounts(counts, names if len(names) == classes else list(map(str, range(classes))), clients)


@contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """Collect the warnings of this thread, such as files that contradict each other."""
    messages: list[str] = []
    handler, thread = logging.Handler(logging.WARNING), threading.get_ident()
    handler.emit = lambda record: messages.append(record.getMessage()) if record.thread == thread else None  # type: ignore
    log.addHandler(handler)
    try:
        yield messages
    finally:
        log.removeHandler(handler)


def read_entries(folders: Sequence[Path]) -> tuple[list[ReportEntry], list[str]]:
    """Return an entry for each readable folder with a completed round, and a message for each of the others."""
    entries: list[ReportEntry] = []
    problems: list[str] = []
    for folder in folders:
        try:
            check_readable(folder)
            entry = ReportEntry.from_folder(folder)
        except Exception as error:  # a hostile folder must not hide the others
            text = str(error) if isinstance(error, (HansaError, OSError)) else f"not readable ({error!r:.200})"
            text = " ".join(text.split())[:500]
            problems.append(text if str(folder) in text else f"{folder}: {text}")
            continue
        begun = [run for run in entry.runs if len(run.history)]
        if len(begun) < len(entry.runs):
            waiting = ", ".join(str(run.seed) for run in entry.runs if not len(run.history))
            problems.append(f"{folder}: no completed round yet{f' for seed {waiting}' if begun else ''}.")
        if begun:
            entries.append(entry if len(begun) == len(entry.runs) else ReportEntry.from_seeds(entry.name, begun))
    return entries, problems


def merge_seeds(entries: Sequence[ReportEntry]) -> list[ReportEntry]:
    """Combine runs that differ only in the seed, and give each entry a unique name: its title, or that of its folder.

    >>> configs = ("seed: 0\\nalgorithm: fedavg", "seed: 1\\nalgorithm: fedavg")
    >>> entries = [ReportEntry(f"run {seed}", (), config, seed=seed) for seed, config in enumerate(configs)]
    >>> [len(entry.members) for entry in merge_seeds(entries)]
    [2]
    """
    groups: dict[object, list[tuple[str, ReportEntry]]] = {}
    repeated: Counter[tuple[object, int | None]] = Counter()
    for index, entry in enumerate(entries):
        config = from_yaml(entry.config, building=False) if entry.config and not entry.members else None
        label, title = (index, entry.name) if config is None else (seedless_digest(config), config.title)
        groups.setdefault((label, repeated[label, entry.seed]), []).append((title, entry))  # one entry of each seed
        repeated[label, entry.seed] += 1
    merged: dict[str, ReportEntry] = {}
    for titled in groups.values():
        titles, members = zip(*titled, strict=True)
        entry = members[0] if len(members) == 1 else ReportEntry.from_seeds(min(titles, key=len), members)
        folder = Path(entry.runs[0].folder)
        folder_name = folder.parent.name if entry.members and folder.name.startswith("seed-") else folder.name
        name = unique_name(entry.name, folder_name or entry.name, merged)
        merged[name] = replace(entry, name=name)
    return list(merged.values())


def find_runs(path: Path, depth: int = MAX_DEPTH) -> list[Path]:
    """Return the folders of runs and of seed groups at a path or some levels below it, sorted by name."""
    if (path / GROUP).is_file() or (path / CONFIG).is_file():
        return [path]
    return [run for inner in subfolders(path) for run in find_runs(inner, depth - 1)] if depth else []


def change_stamp(folder: Path) -> tuple[object, ...]:
    """Return the sizes and modification times of a run's files."""
    stamps: list[object] = []
    for run_folder in [folder, *(inner for inner in subfolders(folder) if inner.name.startswith("seed-"))]:
        for name in (CONFIG, GROUP, METRICS, "summary.json"):
            try:
                status = (run_folder / name).stat()
                stamps.append((str(run_folder), name, status.st_size, status.st_mtime_ns))
            except OSError:
                continue
    return tuple(stamps)


def unique_name(name: str, alternative: str, taken: Collection[str]) -> str:
    """Return a name that is not taken: the first, the alternative, or the first with a number.

    >>> unique_name("fedavg", "second", ["fedavg"]), unique_name("fedavg", "second", ["fedavg", "second"])
    ('second', 'fedavg 2')
    """
    names = chain((name, alternative), (f"{name} {number}" for number in count(2)))
    return next(each for each in names if each not in taken)
