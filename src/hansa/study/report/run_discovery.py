"""Runs in folders as entries of a report: those that can be read, what is wrong with the others, where they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hansa.core.errors import HansaError
from hansa.runs.folder import RunFolder
from hansa.runs.folder_lock import CONFIG, METRICS
from hansa.runs.seed_group import GROUP, GroupFolder
from hansa.study.report.entries import Entry, by_seeds

DEEPEST = 4
"""How far below a folder runs are looked for."""


def read(folders: Sequence[Path]) -> tuple[list[Entry], list[str]]:
    """An entry for each folder of a run or of several seeds, runs that differ in the seed alone put together, each by a
    name of its own; and a sentence for each that cannot be read or has no round yet."""
    entries, problems = gathered(folders)
    return put_together(entries), problems


def gathered(folders: Sequence[Path]) -> tuple[list[Entry], list[str]]:
    """An entry for each folder that can be read and has a round, and what is to be said of the others."""
    entries: list[Entry] = []
    problems: list[str] = []
    for folder in folders:
        try:
            made = Entry.of_group(folder) if GroupFolder(folder).exists else Entry.of_folder(folder)
        except (HansaError, OSError, UnicodeDecodeError) as error:
            problems.append(_told(folder, error))
            continue
        begun = [run for run in made.runs if len(run.history)]
        if not begun:
            problems.append(f"{folder}: no round has been closed yet.")
        elif len(begun) < len(made.runs):
            waiting = ", ".join(str(run.seed) for run in made.runs if not len(run.history))
            problems.append(f"{folder}: no round has been closed yet with seed {waiting}.")
        if begun:
            made = made if len(begun) == len(made.runs) else Entry.of_seeds(made.name, begun)
            entries.append(made)
    return entries, problems


def put_together(entries: Sequence[Entry]) -> list[Entry]:
    """Runs that differ in the seed alone as one, each by a name of its own: its title, else that of its folder."""
    found: dict[str, Entry] = {}
    for entry in by_seeds(entries):
        folder = Path(entry.runs[0].folder)
        place = folder.parent.name if entry.members and folder.name.startswith("seed-") else folder.name
        name = fresh_name(entry.name, place or entry.name, found)
        found[name] = replace(entry, name=name)
    return list(found.values())


def runs_below(place: Path) -> list[Path]:
    """The folders of runs, and of several seeds, at a place or below it, in the order of their names; a run inside
    another, as of a seed, goes with it."""
    found: list[Path] = []

    def look(folder: Path, depth: int) -> None:
        if (folder / GROUP).is_file() or (folder / CONFIG).is_file():
            found.append(folder)
        elif depth:
            for inner in _inside(folder):
                look(inner, depth - 1)

    look(place, DEEPEST)
    return found


def _inside(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    except OSError:  # gone, or not ours to read
        return


def stamp(folders: Sequence[Path]) -> tuple[object, ...]:
    """What changes when a run does: the size and time of its metrics, of its summary and of its configuration."""
    found: list[object] = []
    for folder in folders:
        inner = [folder, *(each for each in _inside(folder) if each.name.startswith("seed-"))]
        for each in inner:
            for name in (CONFIG, GROUP, METRICS, "summary.json"):
                try:
                    known = (each / name).stat()
                    found.append((str(each), name, known.st_size, known.st_mtime_ns))
                except OSError:
                    continue
    return tuple(found)


def fresh_name(name: str, other: str, taken: Collection[str]) -> str:
    """A name that is not taken: this one, the other, or the first with a number.

    >>> fresh_name("fedavg", "second", ["fedavg"]), fresh_name("fedavg", "second", ["fedavg", "second"])
    ('second', 'fedavg 2')
    """
    if name not in taken:
        return name
    number = 2
    while other in taken:
        other = f"{name} {number}"
        number += 1
    return other


def _told(folder: Path, error: Exception) -> str:
    told = str(error)
    if isinstance(error, UnicodeDecodeError):
        told = f"{CONFIG} is not text"
    return told if str(folder) in told else f"{folder}: {told}"


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a run, or of several seeds."""
    return RunFolder.holding(folder).exists or GroupFolder(folder).exists
