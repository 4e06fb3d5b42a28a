"""One way to start a run in a folder: `open_run` decides whether it is started, resumed, replaced or refused.

`plan_runs` and `plan_reusable_runs` plan the runs of all seeds of a configuration: in a folder that the user names, or
below a folder in which runs of the same settings are found and reused.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeAlias

from hansa.config import Config, allow_code, build, to_dict
from hansa.config.sections import CheckpointSection, EvaluateSection, PythonSection
from hansa.core.citations import citations
from hansa.core.errors import HansaError
from hansa.runs.driver import Run
from hansa.runs.experiment import Experiment, RunFactory, build_run, config_digest
from hansa.runs.folder import FINISHED, RunFolder, slug
from hansa.runs.folder_lock import LOCK
from hansa.runs.options import PythonRun, device_names
from hansa.runs.provenance import changed_kinds, provenance_of
from hansa.runs.seed_group import GROUP, SeedGroupFolder, expand_seeds
from hansa.runs.store import ClientStore, io
from hansa.runs.store.lock import FileLock, InUseError
from hansa.runs.trackers import flatten

IfExists: TypeAlias = Literal["resume", "replace", "new", "refuse"]
"""What happens to a run that a folder holds: it is resumed if it has the same settings, or replaced; ``new`` takes the
next free name, folder-2, folder-3, ...; ``refuse`` is an error."""

FREE_SETTINGS = ("rounds", "workers", "engine", "device", "deterministic", "server_device", "name", "checkpoint")
"""The keys of a configuration that may change when its run is resumed."""
RECORDED_OPTIONS = ("dtype", "quorum", "faults", "max_norm", "profile")
"""The options of a run started in Python that affect its results; its folder records them."""
LISTED_CHANGES = 8


def open_run(
    spec: Config | PythonRun | None,
    folder: Path | str,
    if_exists: IfExists = "refuse",
    *,
    rounds: int | None = None,
    fallback: bool = False,
    accept: Sequence[str] = (),
    trust: bool = False,
    run_factory: RunFactory | None = None,
    **settings: Any,
) -> Experiment:
    """Start the run of a folder, or resume or replace the one that it holds.

    Args:
        spec: What to run: a configuration, or an algorithm, a task and options. None resumes whatever the folder holds.
        folder: The folder of the run.
        if_exists: What happens if the folder holds a run already.
        rounds: The last round of a resumed run; by default that of ``spec`` or that of the folder, the later one.
        fallback: Use the newest undamaged checkpoint.
        accept: Kinds of changes of data, model or code with which a run is resumed; they are recorded in the folder.
        trust: Import code that the folder names even if this user did not create the folder on this machine.
        run_factory: Builds the run of a configuration that needs more than its own contents, as that of a federation.
        settings: New values of `FREE_SETTINGS` for a resumed run; by default those of a configuration.

    Returns:
        The run with its folder, before its next round: `Experiment.execute` runs it.
    """
    if isinstance(spec, PythonRun):
        config: Config | None = describe_run(spec)
        run_factory = factory_of(spec)
    else:
        config = spec
    found = RunFolder.containing(folder)
    if config is not None and not (if_exists == "resume" and found.exists):
        overwrite, numbered = if_exists == "replace", if_exists == "new"
        try:
            return Experiment.new(config, folder, overwrite=overwrite, numbered=numbered, run_factory=run_factory)
        except HansaError:
            if if_exists != "resume" or not found.exists:  # otherwise another process has started it in the meantime
                raise
    if config is not None:
        saved = found.config
        refuse_other_settings(found.path, saved, config)
        rounds = max(config.rounds, saved.rounds) if rounds is None else rounds
        if config.python is None:
            given = {name: value for name, value in settings.items() if value is not None}
            settings = {**{name: getattr(config, name) for name in FREE_SETTINGS if name != "rounds"}, **given}
            trust = True  # the caller's configuration names the same code
    return Experiment.resume(
        found.path, fallback=fallback, accept=accept, trust=trust, run_factory=run_factory, rounds=rounds, **settings
    )


def describe_run(run: PythonRun) -> Config:
    """Return the configuration that a folder stores for a run started in Python."""
    changed = run.options.changed()
    return Config(
        name=run.algorithm.name if run.name is None else run.name,
        seed=run.seed,
        rounds=run.rounds,
        device=device_names(run.options.resolve_devices(run.task)),
        deterministic=run.options.deterministic is not False,
        evaluate=EvaluateSection(every=run.options.evaluate_every),
        checkpoint=CheckpointSection(every=run.checkpoint_every),
        python=PythonSection(
            algorithm=_print_value(run.algorithm),
            task=run.task.name,
            options={name: _print_value(value) for name, value in changed.items() if name in RECORDED_OPTIONS},
            cites=list(citations(run.algorithm)),
        ),
    )


def factory_of(run: PythonRun) -> RunFactory:
    """Return the function that builds a folder's run from the Python objects."""

    def build_from_objects(config: Config, store: ClientStore | None, done: int) -> Run:
        options = run.options
        if options.deterministic is None:
            options = replace(options, deterministic=config.deterministic)
        return replace(run, rounds=config.rounds, seed=config.seed, options=options).start(store, done)

    return build_from_objects


def refuse_other_settings(folder: Path, saved: Config, requested: Config) -> None:
    """Refuse to resume a run with other settings than its own, but for `FREE_SETTINGS`; the error lists each key."""
    before, after = flatten(to_dict(saved)), flatten(to_dict(requested))
    free = {*FREE_SETTINGS, *(("evaluate",) if requested.python is not None else ())}  # options of Python take effect
    keys = [key for key in sorted({*before, *after}) if key.partition(".")[0] not in free]
    changed = [
        f"{key} is {_excerpt(before, after, key)}, requested {_excerpt(after, before, key)}"
        for key in keys
        if before.get(key) != after.get(key)
    ]
    if changed:
        more = f"; and {len(changed) - LISTED_CHANGES} more" if len(changed) > LISTED_CHANGES else ""
        raise HansaError(
            f"{folder}: holds a different run: {'; '.join(changed[:LISTED_CHANGES])}{more}. Use the settings of that "
            "run, choose another folder, or replace it with --overwrite (in Python, overwrite=True)."
        )


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run that is to be found, resumed or started in a folder. It can be sent to another process."""

    spec: Config | PythonRun
    folder: Path
    if_exists: IfExists = "resume"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `open_run`."""
    shared: bool = False
    """Whether other studies may plan the same run: while one executes it, the others wait."""
    numbered: bool = False
    """Whether the run is searched for in all folders of this name, with a number or without."""
    extend: bool = True
    """Whether a run of fewer rounds is found, too."""

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        return describe_run(self.spec) if isinstance(self.spec, PythonRun) else self.spec

    def open(self) -> RunFolder | Experiment:
        """Return the folder of the finished run, or an experiment to be executed.

        It is an `InUseError` while another process executes the run.
        """
        if self.numbered:
            config = self.config
            others = [RunFolder(path) for path in _with_same_digest(self.folder) if RunFolder(path).exists]
            reusable = [folder for folder in others if _is_reusable(folder, config, extend=self.extend)]
            found = max(reusable, key=lambda folder: (is_finished(folder, config), folder.config.rounds), default=None)
            if found is not None and is_finished(found, config):
                return found
            path = _first_free(self.folder, [each.path for each in others]) if found is None else found.path
            return open_run(self.spec, path, "resume", rounds=config.rounds, **self.options)
        folder = RunFolder(self.folder)
        if self.if_exists == "resume" and isinstance(self.spec, Config) and _has_reached(folder, self.spec.rounds):
            refuse_other_settings(folder.path, folder.config, self.spec)
            return folder
        return open_run(self.spec, self.folder, self.if_exists, **self.options)

    def reopen(self) -> Experiment:
        """Return the run at its last checkpoint, after another process has executed it."""
        return open_run(self.spec, self.folder, "resume", **{**self.options, "fallback": False})


def plan_runs(
    spec: Config | PythonRun,
    folder: Path | str,
    if_exists: IfExists = "refuse",
    seeds: Sequence[int] | None = None,
    **options: Any,
) -> tuple[SeedGroupFolder | None, list[PlannedRun]]:
    """Plan a run, or those of all seeds of a configuration in a common folder, which is started, resumed or replaced.

    Args:
        spec: A configuration, with one seed or several, or an algorithm, a task and options.
        folder: The folder of the run, or of the seeds.
        if_exists: What happens if the folder holds runs already.
        seeds: The seeds of a run started in Python.
        options: Further arguments of `open_run`.

    Returns:
        The folder of the seeds, None for one run; and the runs.
    """
    config = describe_run(spec).model_copy(update={"seeds": seeds}) if isinstance(spec, PythonRun) else spec
    if config.seeds is None:
        return None, [PlannedRun(spec, Path(folder), if_exists, options)]
    if if_exists == "new":
        group = SeedGroupFolder.create_numbered(Path(folder))
    else:
        group = SeedGroupFolder(folder)
        if group.exists and if_exists == "resume":
            saved = group.config
            same_seeds = {"seed": saved.seed, "seeds": saved.seeds}
            refuse_other_settings(group.path, saved, config.model_copy(update=same_seeds))
        else:
            group.check(overwrite=if_exists == "replace")
    group.write_config(config)
    each_exists: IfExists = "replace" if if_exists == "replace" else "resume"
    specs = [replace(spec, seed=each.seed) if isinstance(spec, PythonRun) else each for each in expand_seeds(config)]
    return group, [PlannedRun(each, group.run(each.seed).path, each_exists, options) for each in specs]


def plan_reusable_runs(
    config: Config, parent: Path | str, name: str, *, overwrite: bool = False, extend: bool = True
) -> list[PlannedRun]:
    """Plan for every seed its run below ``parent``: the finished one, one to resume, or a new one.

    Args:
        config: A configuration, with one seed or several.
        parent: The folder of the runs.
        name: The title of the run, with which the names of folders begin.
        overwrite: Run all again, under the plain name.
        extend: Whether a run of fewer rounds is continued; otherwise it stays, and another one is started.
    """
    if overwrite:
        return plan_runs(config, Path(parent) / slug(name), "replace")[1]
    if config.seeds is None:
        return [PlannedRun(config, Path(parent) / digest_name(name, config), shared=True, numbered=True, extend=extend)]
    base = Path(parent) / digest_name(name, config.model_copy(update={"seed": 0, "seeds": None}))
    with hold_folder(Path(parent)):
        group = _find_group(config, base, extend=extend)
        group.write_config(config)
    return [
        PlannedRun(each, group.run(each.seed).path, options={"rounds": each.rounds}, shared=True)
        for each in expand_seeds(config)
    ]


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Wait until no other process is in this context for a folder of several runs, whose common files it may write."""
    io.make_folder(folder.absolute())
    while True:
        try:
            lock = FileLock(folder / LOCK)
            break
        except InUseError:
            time.sleep(0.02)
    try:
        yield
    finally:
        lock.close()


def digest_name(name: str, config: Config) -> str:
    """Return a folder name: the start of a title, and a digest of the settings that affect results.

    >>> from hansa.config import from_yaml
    >>> digest_name("local.lr=0.1", from_yaml("rounds: 3")) == digest_name("local.lr=0.1", from_yaml("workers: 2"))
    True
    >>> digest_name("local.lr=0.1", from_yaml("seed: 3")) == digest_name("local.lr=0.1", from_yaml("seed: 4"))
    False
    """
    return f"{slug(name)[:80]}-{config_digest(config)[:10]}"


def is_finished(folder: RunFolder, config: Config) -> bool:
    """Return whether a run has ended with the last round of a configuration."""
    return folder.config.rounds == config.rounds and folder.summary["status"] == FINISHED


def _has_reached(folder: RunFolder, rounds: int) -> bool:
    return folder.exists and folder.summary["status"] == FINISHED and folder.config.rounds >= rounds


def _find_group(config: Config, base: Path, *, extend: bool) -> SeedGroupFolder:
    """Return the folder of a configuration's seeds: one whose runs can be reused, or the first free name."""
    for path in _numbered(base):
        group = SeedGroupFolder(path)
        if not os.path.lexists(path) or (
            path.is_dir() and all(name.startswith((".hansa", GROUP)) for name in os.listdir(path))
        ):
            return group  # another process may be about to start the same group
        runs = [(group.run(each.seed), each) for each in expand_seeds(config)]
        if group.exists and all(_is_reusable(run, each, extend=extend) for run, each in runs if run.exists):
            return group
    raise AssertionError


def _first_free(base: Path, others: Sequence[Path]) -> Path:
    """Return the first of the names base, base-2, ... that is none of ``others`` and holds nothing but a run: one whose
    start was interrupted, or one that another process has started in the meantime."""
    for path in _numbered(base):
        if path not in others:
            try:
                RunFolder(path).lock.check()
            except HansaError:
                if not RunFolder(path).exists:  # files that are not part of a run
                    continue
            return path
    raise AssertionError


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
    if is_finished(folder, config):
        return True
    return bool(folder.checkpoint_rounds) and int(folder.summary["rounds"]) <= config.rounds


def _numbered(base: Path) -> Iterator[Path]:
    """Yield the paths name, name-2, name-3, ..."""
    yield base
    yield from (base.with_name(f"{base.name}-{number}") for number in count(2))


def _with_same_digest(base: Path) -> list[Path]:
    """Return the paths whose names have the same digest: two spellings of a point are one run."""
    digest = base.name.rpartition("-")[2]
    pattern = re.compile(rf".*-{digest}(-\d+)?")
    return (
        [path for path in sorted(base.parent.iterdir()) if pattern.fullmatch(path.name)] if base.parent.is_dir() else []
    )


def _excerpt(settings: Mapping[str, Any], others: Mapping[str, Any], key: str) -> str:
    """Return at most 60 characters of a setting, from where it begins to differ from the other one."""
    if key not in settings:
        return "not set"
    text, other = str(settings[key]), str(others.get(key, ""))
    same = next((place for place, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), len(other))
    start = max(0, same - 20) if len(text) > 60 else 0
    return f"{'...' if start else ''}{text[start : start + 60]}"


def _print_value(value: object) -> str:
    """Return the repr without addresses in memory."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
