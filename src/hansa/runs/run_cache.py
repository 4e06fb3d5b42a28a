"""Runs that have been made already: found by what their result depends on, gone on with, never overwritten."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path

from hansa.config import Config, build
from hansa.core.errors import HansaError
from hansa.runs.experiment import Experiment, identity, living_run
from hansa.runs.folder import CHECKPOINT, FINISHED, RunFolder, slug
from hansa.runs.provenance import bindings, changes
from hansa.runs.seed_group import GroupFolder, per_seed


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
    return _first_usable(config, _alike(base), base)


def made_or_begun_at(config: Config, base: Path) -> RunFolder | Experiment:
    """As `made_or_begun`, under this name or its numbers. A run whose data, model or code have changed since is not the
    same any more."""
    return _first_usable(config, _numbered(base), base)


def _first_usable(config: Config, paths: Iterable[Path], base: Path) -> RunFolder | Experiment:
    """What has been finished counts before what can be gone on with, and that before a new run."""
    found = [RunFolder(path) for path in paths if RunFolder(path).exists]
    for folder in sorted(found, key=lambda folder: folder.config.rounds != config.rounds):
        if _usable(folder, config):
            return _taken_up(folder, config)
    return Experiment.new(config, base, numbered=True)


def each_made_or_begun(
    config: Config, parent: Path | str, name: str, *, overwrite: bool = False
) -> Iterator[RunFolder | Experiment]:
    """For every seed of a configuration its finished run below ``parent``, or one to be run before the next is asked
    for. With ``overwrite`` all are made anew, under the plain name."""
    place = Path(parent) / slug(name)
    if config.seeds is None:
        yield Experiment.new(config, place, overwrite=True) if overwrite else made_or_begun(config, parent, name)
        return
    if overwrite:
        group = GroupFolder(place)
        group.check(overwrite=True)
        group.write_config(config)
    else:
        group = group_made_or_begun(config, parent, name)
    for each in per_seed(config):
        if overwrite:
            yield Experiment.new(each, group.run(each.seed).path, overwrite=True)
        else:
            yield seed_made_or_begun(each, group)


def group_made_or_begun(config: Config, parent: Path | str, name: str) -> GroupFolder:
    """The folder of a configuration's seeds below ``parent``: one whose runs may all be used, or a new one."""
    base = Path(parent) / hashed_name(name, config.model_copy(update={"seed": 0, "seeds": None}))
    for path in _numbered(base):
        found = GroupFolder(path)
        made = [(found.run(each.seed), each) for each in per_seed(config)]
        if found.exists and all(_usable(run, each) for run, each in made if run.exists):
            break
    else:
        found = GroupFolder.numbered(base)
    found.write_config(config)
    return found


def seed_made_or_begun(config: Config, group: GroupFolder) -> RunFolder | Experiment:
    """The finished run of a seed in its group's folder, or one to be run."""
    folder = group.run(config.seed)
    if folder.exists:
        if not _usable(folder, config):
            raise HansaError(f"{folder}: of other settings, data or code, or of more rounds. Choose another folder.")
        return _taken_up(folder, config)
    return Experiment.new(config, folder.path)


def seeds_made_or_begun(
    config: Config, group: GroupFolder, *, overwrite: bool = False, fallback: bool = False, accept: Sequence[str] = ()
) -> Iterator[RunFolder | Experiment]:
    """For every seed its finished run in the group's folder, or one to be run before the next is asked for: gone on
    with, or with ``overwrite`` begun anew."""
    for each in per_seed(config):
        found = group.run(each.seed)
        if overwrite or not found.exists:
            yield Experiment.new(each, found.path, overwrite=overwrite)
        elif found.summary["status"] == FINISHED and found.config.rounds >= each.rounds:
            yield found
        else:
            yield Experiment.resumed(
                found.path, rounds=each.rounds, workers=each.workers, fallback=fallback, accept=accept
            )


def _usable(found: RunFolder, config: Config) -> bool:
    """Whether a run is what a configuration asks for, or the beginning of it."""
    then = found.config
    if identity(then) != identity(config) or (then.evaluate, then.links) != (config.evaluate, config.links):
        return False
    bound = (found.marker or {}).get("bound")
    if bound is not None and changes(bound, bindings(living_run(config, build.federated(config)))):
        return False
    done = found.summary
    if then.rounds == config.rounds and done["status"] == FINISHED:
        return True
    return (found / CHECKPOINT).is_dir() and int(done["rounds"]) <= config.rounds


def _taken_up(found: RunFolder, config: Config) -> RunFolder | Experiment:
    if found.config.rounds == config.rounds and found.summary["status"] == FINISHED:
        return found
    return Experiment.resumed(found.path, rounds=config.rounds, workers=config.workers)


def _numbered(base: Path) -> Iterator[Path]:
    """What there is under a name and its numbers, as far as these go without a gap."""
    for number in count(1):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if not os.path.lexists(path):
            return
        yield path


def _alike(base: Path) -> list[Path]:
    """What has the digest of a name, whatever it is called and numbered: two spellings of one point are one run."""
    digest = base.name.rpartition("-")[2]
    form = re.compile(rf".*-{digest}(-\d+)?")
    return [path for path in sorted(base.parent.iterdir()) if form.fullmatch(path.name)] if base.parent.is_dir() else []
