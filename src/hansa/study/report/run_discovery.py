"""Run folders as entries of a report: finding them, reading them, and naming those that cannot be read."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from hansa.core.errors import HansaError
from hansa.runs.folder import RunFolder
from hansa.runs.folder_lock import CONFIG, METRICS
from hansa.runs.seed_group import GROUP, SeedGroupFolder
from hansa.study.report.entries import ReportEntry, group_by_seed

MAX_DEPTH, MAX_FILES = 4, 2000
"""How many levels below a folder are searched for runs, and how many of its files and folders."""
MAX_BYTES = 1 << 29
"""Run folders with larger files, besides the model and the record, are named and not read."""


def read_runs(folders: Sequence[Path]) -> tuple[list[ReportEntry], list[str]]:
    """Return an entry with a unique name for each method, with its seeds, and a message for each unreadable folder."""
    entries, problems = read_entries(folders)
    return merge_seeds(entries), problems


def read_entries(folders: Sequence[Path]) -> tuple[list[ReportEntry], list[str]]:
    """Return an entry for each folder that can be read and has a round, and a message for each of the others."""
    entries: list[ReportEntry] = []
    problems: list[str] = []
    for folder in folders:
        try:
            check_readable(folder)
            read = ReportEntry.from_group if SeedGroupFolder(folder).exists else ReportEntry.from_folder
            entry = read(folder)
        except Exception as error:  # whatever a folder of somebody else contains: the others are shown
            if isinstance(error, UnicodeDecodeError):
                text = f"{CONFIG} is not text"
            else:
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


def check_readable(folder: Path) -> None:
    """Refuse a run folder with files that a report cannot read to their end: pipes, devices, or more than `MAX_BYTES`.

    The model is not read, and the record has readers with bounds of their own, so these may be larger.
    """
    if not folder.is_dir():  # a file in it, or nothing: their reader says so
        return
    for inner in (folder, *(each for each in _subfolders(folder) if each.name.startswith("seed-"))):
        with os.scandir(inner) as files:
            for file in islice(files, MAX_FILES):
                status = file.stat()
                if stat.S_ISDIR(status.st_mode):
                    continue
                if not stat.S_ISREG(status.st_mode):
                    raise HansaError(f"{inner}: {file.name} is not a regular file.")
                if status.st_size > MAX_BYTES and not file.name.startswith(("model.", "run.")):
                    raise HansaError(
                        f"{inner}: {file.name} has {status.st_size:,} bytes; reports read at most {MAX_BYTES:,}."
                    )


def merge_seeds(entries: Sequence[ReportEntry]) -> list[ReportEntry]:
    """Combine runs that differ only in the seed, and give each a unique name: its title, or that of its folder."""
    merged: dict[str, ReportEntry] = {}
    for entry in group_by_seed(entries):
        folder = Path(entry.runs[0].folder)
        folder_name = folder.parent.name if entry.members and folder.name.startswith("seed-") else folder.name
        name = unique_name(entry.name, folder_name or entry.name, merged)
        merged[name] = replace(entry, name=name)
    return list(merged.values())


def find_runs(place: Path) -> list[Path]:
    """Return the folders of runs and of seed groups at a place or below it, sorted by name."""
    runs: list[Path] = []

    def search(folder: Path, depth: int) -> None:
        if (folder / GROUP).is_file() or (folder / CONFIG).is_file():
            runs.append(folder)
        elif depth:
            for inner in _subfolders(folder):
                search(inner, depth - 1)

    search(place, MAX_DEPTH)
    return runs


def _subfolders(folder: Path) -> Iterator[Path]:
    try:
        inside = islice(folder.iterdir(), MAX_FILES)
        yield from sorted(each for each in inside if each.is_dir() and not each.name.startswith("."))
    except OSError:  # deleted, or not readable
        return


def change_stamp(folder: Path) -> tuple[object, ...]:
    """Return sizes and times of a run's files, which change when the run does."""
    stamps: list[object] = []
    for each in [folder, *(inner for inner in _subfolders(folder) if inner.name.startswith("seed-"))]:
        for name in (CONFIG, GROUP, METRICS, "summary.json"):
            try:
                status = (each / name).stat()
                stamps.append((str(each), name, status.st_size, status.st_mtime_ns))
            except OSError:
                continue
    return tuple(stamps)


def unique_name(name: str, alternative: str, taken: Collection[str]) -> str:
    """Return a name that is not taken: the first, the alternative, or the first with a number.

    >>> unique_name("fedavg", "second", ["fedavg"]), unique_name("fedavg", "second", ["fedavg", "second"])
    ('second', 'fedavg 2')
    """
    if name not in taken:
        return name
    number = 2
    while alternative in taken:
        alternative = f"{name} {number}"
        number += 1
    return alternative


def is_run_folder(folder: Path | str) -> bool:
    """Return whether this is the folder of a run or of several seeds."""
    return RunFolder.containing(folder).exists or SeedGroupFolder(folder).exists
