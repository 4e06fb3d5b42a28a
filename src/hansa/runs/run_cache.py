"""Find runs by the settings that affect results, and reuse or resume them; nothing is overwritten."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from hansa.config import Config, allow_code, build
from hansa.core.errors import HansaError
from hansa.runs.experiment import Experiment, build_run, config_digest
from hansa.runs.folder import FINISHED, RunFolder, slug
from hansa.runs.folder_lock import CHECKPOINT
from hansa.runs.provenance import changed_kinds, provenance_of
from hansa.runs.seed_group import SeedGroupFolder, expand_seeds


def digest_name(name: str, config: Config) -> str:
    """Return a folder name: the start of a title, and a digest of the settings that affect results.

    >>> from hansa.config import from_yaml
    >>> digest_name("local.lr=0.1", from_yaml("rounds: 3")) == digest_name("local.lr=0.1", from_yaml("workers: 2"))
    True
    >>> digest_name("local.lr=0.1", from_yaml("seed: 3")) == digest_name("local.lr=0.1", from_yaml("seed: 4"))
    False
    """
    return f"{slug(name)[:80]}-{config_digest(config)[:10]}"


def find_or_create_run(config: Config, parent: Path | str, name: str, *, extend: bool = True) -> RunFolder | Experiment:
    """Return the finished run of this configuration below ``parent``, or an experiment to be executed: the same run, if
    it stopped earlier or, with ``extend``, had fewer rounds; else a new one in its own folder."""
    base = Path(parent) / digest_name(name, config)
    return _first_reusable(config, _with_same_digest(base), base, extend=extend)


def find_or_create_run_at(config: Config, base: Path) -> RunFolder | Experiment:
    """As `find_or_create_run`, in this folder or the same name with a number. A run with other data, model or code is
    not the same."""
    return _first_reusable(config, _existing_numbered(base), base)


def _first_reusable(
    config: Config, paths: Iterable[Path], base: Path, *, extend: bool = True
) -> RunFolder | Experiment:
    """Prefer a finished run to one that can be resumed, and that to a new one."""
    folders = [RunFolder(path) for path in paths if RunFolder(path).exists]
    reusable = [folder for folder in folders if _is_reusable(folder, config, extend=extend)]
    for folder in sorted(reusable, key=lambda folder: folder.config.rounds != config.rounds):
        return _reuse(folder, config)
    return Experiment.new(config, base, numbered=True)


class PlannedRun(NamedTuple):
    """A run that is to be found or started. It can be sent to another process."""

    config: Config
    open: Callable[[], RunFolder | Experiment]
    """Returns the folder of the finished run, or an experiment to be executed."""


def plan_runs(
    config: Config, parent: Path | str, name: str, *, overwrite: bool = False, extend: bool = True
) -> list[PlannedRun]:
    """Return for every seed its run below ``parent``: the finished one, one to resume, or a new one.

    Args:
        config: A configuration, with one seed or several.
        parent: The folder of the runs.
        name: The title of the run, with which the names of folders begin.
        overwrite: Run all again, under the plain name.
        extend: Whether a run of fewer rounds is continued; otherwise it stays, and another one is started.
    """
    base = Path(parent) / slug(name)
    if config.seeds is None:
        find = partial(find_or_create_run, config, parent, name, extend=extend)
        return [PlannedRun(config, partial(Experiment.new, config, base, overwrite=True) if overwrite else find)]
    if overwrite:
        group = SeedGroupFolder(base)
        group.check(overwrite=True)
        group.write_config(config)
    else:
        group = find_or_create_group(config, parent, name, extend=extend)
    return [
        PlannedRun(
            each,
            partial(Experiment.new, each, group.run(each.seed).path, overwrite=True)
            if overwrite
            else partial(find_or_create_seed_run, each, group),
        )
        for each in expand_seeds(config)
    ]


def find_or_create_group(config: Config, parent: Path | str, name: str, *, extend: bool = True) -> SeedGroupFolder:
    """Return the folder of a configuration's seeds below ``parent``: one whose runs can be reused, or a new one."""
    base = Path(parent) / digest_name(name, config.model_copy(update={"seed": 0, "seeds": None}))
    for path in _existing_numbered(base):
        group = SeedGroupFolder(path)
        runs = [(group.run(each.seed), each) for each in expand_seeds(config)]
        if group.exists and all(_is_reusable(run, each, extend=extend) for run, each in runs if run.exists):
            break
    else:
        group = SeedGroupFolder.create_numbered(base)
    group.write_config(config)
    return group


def find_or_create_seed_run(config: Config, group: SeedGroupFolder) -> RunFolder | Experiment:
    """Return the finished run of a seed in its group's folder, or an experiment to be executed."""
    folder = group.run(config.seed)
    if folder.exists:
        if not _is_reusable(folder, config):
            raise HansaError(f"{folder}: has other settings, data or code, or more rounds. Choose another folder.")
        return _reuse(folder, config)
    return Experiment.new(config, folder.path)


def plan_seed_runs(
    config: Config,
    group: SeedGroupFolder,
    *,
    overwrite: bool = False,
    fallback: bool = False,
    accept: Sequence[str] = (),
) -> list[PlannedRun]:
    """Return for every seed its run in the group's folder: finished, to be resumed, or with ``overwrite`` a new one."""
    how = partial(_open_seed_run, overwrite=overwrite, fallback=fallback, accept=list(accept))
    return [PlannedRun(each, partial(how, each, group)) for each in expand_seeds(config)]


def _open_seed_run(
    config: Config, group: SeedGroupFolder, *, overwrite: bool, fallback: bool, accept: Sequence[str]
) -> RunFolder | Experiment:
    folder = group.run(config.seed)
    if overwrite or not folder.exists:
        return Experiment.new(config, folder.path, overwrite=overwrite)
    if folder.summary["status"] == FINISHED and folder.config.rounds >= config.rounds:
        return folder
    return Experiment.resume(
        folder.path, rounds=config.rounds, workers=config.workers, fallback=fallback, accept=accept
    )


@allow_code()
def _is_reusable(folder: RunFolder, config: Config, *, extend: bool = True) -> bool:
    """Return whether a run is that of a configuration, finished or not."""
    if folder.older_version() is not None:
        return False
    old = folder.config
    if config_digest(old) != config_digest(config) or (old.evaluate, old.links) != (config.evaluate, config.links):
        return False
    if not extend and old.rounds != config.rounds:
        return False
    provenance = (folder.marker or {}).get("bound")
    if provenance is not None and changed_kinds(provenance, provenance_of(build_run(config, build.load_data(config)))):
        return False
    summary = folder.summary
    if old.rounds == config.rounds and summary["status"] == FINISHED:
        return True
    return (folder / CHECKPOINT).is_dir() and int(summary["rounds"]) <= config.rounds


def _reuse(folder: RunFolder, config: Config) -> RunFolder | Experiment:
    if folder.config.rounds == config.rounds and folder.summary["status"] == FINISHED:
        return folder
    # the folder names the same code as the configuration, so it needs no separate trust
    return Experiment.resume(folder.path, rounds=config.rounds, workers=config.workers, trust=True)


def _existing_numbered(base: Path) -> Iterator[Path]:
    """Yield the existing paths name, name-2, name-3, ... up to the first gap."""
    for number in count(1):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if not os.path.lexists(path):
            return
        yield path


def _with_same_digest(base: Path) -> list[Path]:
    """Return the paths whose names have the same digest: two spellings of a point are one run."""
    digest = base.name.rpartition("-")[2]
    pattern = re.compile(rf".*-{digest}(-\d+)?")
    return (
        [path for path in sorted(base.parent.iterdir()) if pattern.fullmatch(path.name)] if base.parent.is_dir() else []
    )
