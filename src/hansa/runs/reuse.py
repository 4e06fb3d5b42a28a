"""Runs that have been made already: found by what their result depends on, gone on with, never overwritten."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from hansa.config import Config
from hansa.runs.experiment import Experiment, identity
from hansa.runs.folder import CHECKPOINT, FINISHED, RunFolder, slug


def hashed_name(name: str, config: Config) -> str:
    """A folder's name: as much of a title as is readable, and a digest of all that the result depends on.

    >>> from hansa.config import from_text
    >>> hashed_name("local.lr=0.1", from_text("rounds: 3")) == hashed_name("local.lr=0.1", from_text("workers: 2"))
    True
    >>> hashed_name("local.lr=0.1", from_text("seed: 3")) == hashed_name("local.lr=0.1", from_text("seed: 4"))
    False
    """
    return f"{slug(name)[:80]}-{identity(config)[:10]}"


def made_or_begun(config: Config, parent: Path | str, name: str) -> RunFolder | Experiment:
    """The finished run of this very configuration below ``parent``; or one to be run: the same that stopped earlier or
    was asked for fewer rounds, else a new one in a folder of its own. Nothing that is there is ever overwritten."""
    base = Path(parent) / hashed_name(name, config)
    same = [found for found in _numbered(base) if _same(found.config, config)]
    for found in same:
        if found.config.rounds == config.rounds and found.summary["status"] == FINISHED:
            return found
    for found in same:
        if (found / CHECKPOINT).is_dir() and found.summary["rounds"] <= config.rounds:
            return Experiment.resumed(found.path, rounds=config.rounds, workers=config.workers)
    return Experiment.new(config, base, numbered=True)


def _numbered(base: Path) -> Iterator[RunFolder]:
    """The runs under a name and its numbers, as far as these go without a gap."""
    for number in count(1):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if not os.path.lexists(path):
            return
        if RunFolder(path).exists:
            yield RunFolder(path)


def _same(one: Config, other: Config) -> bool:
    """Whether two configurations give the same records, but for how many."""
    return identity(one) == identity(other) and (one.evaluate, one.links) == (other.evaluate, other.links)
