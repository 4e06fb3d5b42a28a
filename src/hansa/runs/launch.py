"""One way to start a run in a folder: `open_run` decides whether it is started, resumed, replaced or refused.

Commands that run many configurations keep their runs below one folder, where `find_folder` finds those of the same
settings.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, TypeAlias

from hansa.config import Config, allow_code, build, to_dict
from hansa.config.sections import CheckpointSection, EvaluateSection, PythonSection
from hansa.core.citations import citations
from hansa.core.errors import HansaError
from hansa.runs.experiment import Experiment, RunFactory, build_run
from hansa.runs.folder import FINISHED, LOCK, RunFolder, SeedGroupFolder, expand_seeds, slug
from hansa.runs.options import PythonRun, device_names
from hansa.runs.provenance import changed_kinds, provenance_of
from hansa.runs.store import io
from hansa.runs.store.io import FileLock, InUseError
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
    config: Config | None,
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
        config: What to run; None resumes whatever the folder holds.
        folder: The folder of the run.
        if_exists: What happens if the folder holds a run already.
        rounds: The last round of a resumed run; by default that of ``config`` or that of the folder, the later one.
        fallback: Use the newest undamaged checkpoint.
        accept: Kinds of changes of data, model or code with which a run is resumed; they are recorded in the folder.
        trust: Import code that the folder names even if this user did not create the folder on this machine.
        run_factory: Builds the run of a configuration that needs more than its own contents: one that was started in
            Python, or that of a federation.
        settings: New values of `FREE_SETTINGS` for a resumed run; by default those of a configuration.

    Returns:
        The run with its folder, before its next round: `Experiment.execute` runs it.
    """
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


def describe_run(run: PythonRun, seeds: Sequence[int] | None = None) -> Config:
    """Return the configuration that a folder stores for a run started in Python, or for several seeds of it."""
    changed = run.options.changed()
    return Config(
        name=run.algorithm.name if run.name is None else run.name,
        seed=run.seed,
        seeds=None if seeds is None else list(seeds),
        workers=run.options.workers or "auto",
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


def digest_name(name: str, config: Config, *, extend: bool = True) -> str:
    """Return a folder name: the start of a title, and a digest of all settings but `FREE_SETTINGS` and several seeds.

    >>> from hansa.config import from_yaml
    >>> digest_name("local.lr=0.1", from_yaml("rounds: 3")) == digest_name("local.lr=0.1", from_yaml("workers: 2"))
    True
    >>> digest_name("local.lr=0.1", from_yaml("seed: 3")) == digest_name("local.lr=0.1", from_yaml("seed: 4"))
    False
    """
    free = {*FREE_SETTINGS} - ({"rounds"} if not extend else set())
    if config.seeds is not None:
        config = config.model_copy(update={"seed": 0, "seeds": None})
    settings = config.model_dump(mode="json", exclude_defaults=True, exclude=free)
    return f"{slug(name)[:80]}-{io.sha256(json.dumps(settings, sort_keys=True).encode())[:10]}"


def find_folder(config: Config, parent: Path | str, name: str, *, extend: bool = True) -> Path:
    """Return the folder of a run below ``parent``, or that of its seeds: one whose runs can be reused, or a free one.

    Two spellings of a point are one run. If data, model or code have changed since a run was started, the folder is
    another one: name-2, name-3, ...

    Args:
        config: A configuration, with one seed or several.
        parent: The folder of the runs.
        name: The title of the run, with which the name of a new folder begins.
        extend: Whether a run of fewer rounds is continued; otherwise it stays, and another one is started.
    """
    base = Path(parent) / digest_name(name, config, extend=extend)
    same = re.compile(rf".*-{base.name.rpartition('-')[2]}(-\d+)?")
    known = sorted(path for path in base.parent.iterdir() if same.fullmatch(path.name)) if base.parent.is_dir() else []
    free = (base if number == 1 else base.with_name(f"{base.name}-{number}") for number in count(1))
    return next(path for path in chain(known, free) if _is_usable(path, config))


@allow_code()
def _is_usable(path: Path, config: Config) -> bool:
    """Return whether a folder holds nothing but runs of a configuration that can be reused, or is free."""
    group, place = SeedGroupFolder(path), RunFolder(path)
    single = config.seeds is None
    runs = [(place if single else group.run(each.seed), each) for each in expand_seeds(config)]
    started = [(run, each) for run, each in runs if run.exists]
    try:
        place.check_free() if single else group.check()
    except HansaError:
        if not (place if single else group).exists:  # files that are not part of a run
            return False
    return all(_is_reusable(run, each) for run, each in started)


def _is_reusable(folder: RunFolder, config: Config) -> bool:
    """Return whether a run, finished or not, can be that of a configuration with the same digest."""
    try:
        provenance = folder.marker["bound"]
    except HansaError:  # damaged, or of another version
        return False
    if changed_kinds(provenance, provenance_of(build_run(config, build.load_data(config)))):
        return False
    if folder.config.rounds == config.rounds and folder.summary["status"] == FINISHED:
        return True
    return bool(folder.checkpoint_rounds) and int(folder.summary["rounds"]) <= config.rounds


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
