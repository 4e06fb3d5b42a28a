"""Who held what in runs that lie on disk: read from the heads of their partitions, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hansa.config import parse
from hansa.core.errors import HansaError
from hansa.data.sources import source
from hansa.data.split import label_facts
from hansa.runs.folder_lock import PARTITION
from hansa.study.report.entries import Entry
from hansa.study.report.sections import Holdings


def held_by(entries: Sequence[Entry]) -> tuple[list[Holdings], list[int | None]]:
    """The partitions of some runs, each once, with the names of the methods it is theirs; and how many clients each
    method has."""
    found: dict[str, tuple[Holdings, list[str]]] = {}
    populations: list[int | None] = []
    for entry in entries:
        populations.append(None)
        for run in entry.runs[:1]:  # of several seeds the first, since each has its own
            facts = label_facts(Path(run.folder) / PARTITION) if run.folder else None
            if facts is None:
                populations[-1] = _asked(run.config)
                continue
            clients, labels = facts
            populations[-1] = clients
            held = Holdings(labels, label_names(run.config, len(labels[0]) if labels else 0), population=clients)
            found.setdefault(repr((clients, labels)), (held, []))[1].append(entry.name)
    several = len(found) > 1
    drawn = [
        Holdings(held.counts, held.labels, _words(entries, names), ", ".join(names) if several else "", held.population)
        for held, names in found.values()
        if held.counts and held.labels
    ]
    return drawn, populations


def _words(entries: Sequence[Entry], names: Sequence[str]) -> str:
    several = [entry for entry in entries if entry.name in names and entry.members]
    return f"of seed {several[0].members[0].seed}; every seed deals anew" if several else ""


def label_names(config: str, count: int) -> list[str]:
    """The names of the classes, or their numbers."""
    try:
        said = parse(config).data.get("data") or {}
        known = source(str(said.get("name", "fashion-mini"))).class_names
    except (HansaError, AttributeError):
        known = ()
    return list(known) if len(known) == count else [str(place) for place in range(count)]


def _asked(config: str) -> int | None:
    """How many clients a configuration asks for; 50 is what it means where it says nothing."""
    try:
        said = parse(config).data.get("data") or {}
        return None if not config or said.get("factory") else int(said.get("clients") or 50)
    except (HansaError, AttributeError, TypeError, ValueError):
        return None
