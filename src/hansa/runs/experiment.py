"""A run in its folder: `open_run` starts, resumes, replaces or refuses it; `Experiment.execute` runs and saves it.

Commands that run many configurations keep their runs below one folder; `find_folder` finds the run of a configuration.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeAlias

from hansa import data
from hansa.algorithm import Algorithm
from hansa.config import Config, allow_code, build, build_algorithm, to_dict
from hansa.config.sections import FAULTS, LINKS, PROFILE, CheckpointSection, EvaluateSection, PythonSection
from hansa.core.devices import resolve_devices
from hansa.core.errors import HansaError
from hansa.core.protocols import citations
from hansa.core.types import State
from hansa.engine import EngineFactory, auto_engine, build_engine
from hansa.rounds.ledger import Ledger
from hansa.rounds.measures import Measure, compression, local_mean_loss, track_heterogeneity
from hansa.runs.driver import Callback, Record, Run, RunOptions, device_names
from hansa.runs.folder import (
    FAILED,
    FINISHED,
    METRICS,
    PARTITION,
    STOPPED,
    SUMMARY,
    AcceptedChange,
    IfExists,
    RunFolder,
    SeedGroupFolder,
    arithmetic_of,
    expand_seeds,
    settings_digest,
    slug,
)
from hansa.runs.provenance import Provenance, changed_kinds, parse_accepted_changes, provenance_of, stable_repr
from hansa.runs.record import Meta, RunRecord, to_line
from hansa.runs.store import ClientStore, DamagedFileError, DiskStore, io
from hansa.runs.trackers import flatten
from hansa.training import Task, TaskLike

log = logging.getLogger("hansa")

RunFactory: TypeAlias = Callable[[Config, ClientStore | None, int], Run]
"""Builds a run from a configuration, the client rows of a checkpoint if there is one, and the rounds done."""

FREE_SETTINGS = ("rounds", "workers", "engine", "device", "deterministic", "server_device", "name", "checkpoint")
"""The keys of a configuration that may change when its run is resumed."""
RECORDED_OPTIONS = ("dtype", "quorum", "faults", "max_norm", "profile")
"""The options of a run started in Python that affect its results; its folder records them."""
LISTED_CHANGES = 8


@allow_code()
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
    """Start, resume or replace the run in a folder.

    Args:
        config: What to run; None resumes whatever the folder holds.
        folder: The folder of the run.
        if_exists: What happens if the folder holds a run already.
        rounds: The last round of a resumed run; by default that of ``config`` or that of the folder, the later one.
        fallback: Use the newest undamaged checkpoint.
        accept: Kinds of changes of data, model or code with which a run is resumed; they are recorded in the folder.
        trust: Import code that the folder names even if this user did not create the folder on this machine.
        run_factory: Builds runs that a configuration does not fully describe: those started in Python and those of a
            federation.
        settings: New values of `FREE_SETTINGS` for a resumed run; by default those of ``config``.

    Returns:
        The run with its folder, before its next round: `Experiment.execute` runs it.
    """
    accepted, existing = parse_accepted_changes(accept), RunFolder.containing(folder)
    if config is not None and not (if_exists == "resume" and existing.exists):
        try:
            return _start_run(config, RunFolder(folder), if_exists, run_factory)
        except HansaError:
            if if_exists != "resume" or not existing.exists:  # otherwise another process has started it in the meantime
                raise
    new = {name: value for name, value in settings.items() if value is not None}
    if config is not None:
        saved = existing.config
        refuse_other_settings(existing.path, saved, config)
        rounds = max(config.rounds, saved.rounds) if rounds is None else rounds
        if config.python is None:
            new = {**{name: getattr(config, name) for name in FREE_SETTINGS}, **new}
            trust = True  # the caller's configuration names the same code
    if rounds is not None:
        new["rounds"] = rounds
    return _resume_run(existing, new, accepted, run_factory, fallback=fallback, trust=trust)


def _start_run(config: Config, folder: RunFolder, if_exists: IfExists, run_factory: RunFactory | None) -> Experiment:
    """Start a run: build data, model and algorithm, then lock the folder, then write to it.

    A replaced run is removed when the new one has its first checkpoint.
    """
    if if_exists != "new":
        folder.check_free(overwrite=if_exists == "replace")
    run = build_run(config, build.load_data(config)) if run_factory is None else run_factory(config, None, 0)
    with folder.starting(if_exists), ExitStack() as undo:
        folder.write_start(config, run)
        run.record = undo.enter_context(RunRecord.create(folder.path))
        experiment = Experiment(config, run, folder)
        if config.checkpoint.every:
            run.store = DiskStore(run.record)
            experiment.save()  # so that the run can be resumed from the start
        folder.write_config(config)  # last, because a folder with a configuration counts as a run
        undo.pop_all()
    return experiment


def _resume_run(
    folder: RunFolder,
    settings: Mapping[str, Any],
    accepted: set[str],
    run_factory: RunFactory | None,
    *,
    fallback: bool,
    trust: bool,
) -> Experiment:
    """Return the run of a folder at its last checkpoint, with new settings."""
    folder.acquire_existing()
    with ExitStack() as undo:
        undo.callback(folder.release)
        _ = folder.marker  # refuses other formats
        folder.require_trust(trust=trust)
        saved_config = folder.config
        config = saved_config.model_copy(update=settings)
        record = undo.enter_context(RunRecord(folder.path, writing=True))
        last_recorded = record.head.rounds
        if not fallback:
            record.check_pages()
        state, meta, head = record.intact_checkpoint() if fallback else record.load_checkpoint()
        rounds_done = head.rounds
        if fallback and last_recorded > rounds_done:
            log.warning("%s: resumed after round %d; rounds %d to %d are lost and run again",
                        folder, rounds_done, rounds_done + 1, last_recorded)  # fmt: skip
        store = DiskStore(record, head=head)
        if meta["config"] != config_digest(config):
            raise _config_changed(folder)
        if config.rounds < rounds_done:
            raise HansaError(f"{folder}: is already at round {rounds_done}, past the requested {config.rounds}.")
        if run_factory is None:
            run = build_run(config, _load_same_data(config, folder), store, rounds_done)
        else:
            run = run_factory(config, store, rounds_done)
        run.recorded_devices = meta.get("remote_devices", []) if rounds_done else None
        provenance = _check_provenance(folder, run, state, meta, accepted)
        if meta["arithmetic"] != (arithmetic := arithmetic_of(run)):
            log.warning(
                "%s: started with %s, resumed with %s: the result may differ in its last bits from that of an "
                "uninterrupted run", folder, meta["arithmetic"], arithmetic,
            )  # fmt: skip
        run.record = record
        run.restore(state, record.rewind(head))
        io.write_file(folder / METRICS, _metrics_lines(run.history))
        io.remove(folder / SUMMARY)
        run.oldest_resumable_round = min(record.checkpoint_rounds())
        if provenance is not None:
            folder.write_marker(run, *provenance)
        if config != saved_config:
            folder.write_config(config)
        undo.pop_all()
    return Experiment(config, run, folder)


class Experiment:
    """A run in its folder, which `open_run` opens, or in memory; `execute` runs it."""

    def __init__(self, config: Config, run: Run, folder: RunFolder | None = None) -> None:
        self.config, self.run, self._folder = config, run, folder
        self.start_round = self._saved = run.state.round
        self._saved_at = time.monotonic()

    @property
    def folder(self) -> RunFolder:
        """The folder of a run that has one."""
        assert self._folder is not None
        return self._folder

    @property
    def _record(self) -> RunRecord:
        assert self.run.record is not None
        return self.run.record

    @property
    def rounds_left(self) -> int:
        """The number of remaining rounds."""
        return self.config.rounds - self.run.state.round

    def execute(
        self, callbacks: Sequence[Callback] = (), first: Sequence[Callback] = (), *, stopped: bool = False
    ) -> dict[str, Any]:
        """Run to the last round or until a callback stops it, save everything, and return the summary of the folder.

        Args:
            callbacks: Called after every round.
            first: Called before the record of a round is written; they may add to it.
            stopped: Whether a callback has already stopped the run at its current round; then only save.
        """
        rounds = 0 if stopped else self.rounds_left
        if self._folder is None:
            self.run.advance(rounds, [*first, *callbacks])
            return {}
        evaluate, task = self.config.evaluate, self.run.task
        recording: list[Callback] = []
        if evaluate.train and isinstance(task, Task):
            recording.append(measure_global_loss(task, evaluate.every))
        if evaluate.heterogeneity:
            recording.append(track_heterogeneity(evaluate.every or self.config.rounds))
        target = evaluate.target
        try:
            self.run.advance(rounds, [*recording, *first, self._close_round, *callbacks])
        except BaseException as error:
            # closed rounds are saved; an incomplete round must not reach a checkpoint
            if isinstance(error, OSError | DamagedFileError):
                time.sleep(0.2)  # a folder that is being removed goes file by file
            try:
                self._record.check_present()
                self.folder.write_results(self.run, FAILED if isinstance(error, Exception) else STOPPED, target)
            except (HansaError, OSError) as write_error:
                self._record.check_present()
                log.warning("%s: the results were not written: %s", self.folder, write_error)
            finally:
                self._close_record()
                self.folder.release()
            if isinstance(error, HansaError):
                raise RunError(f"failed in round {self.run.state.round + 1}: {error}", self.folder.path) from error
            raise
        if self.config.checkpoint.every and self.run.state.round > self._saved:
            self.save()
        status = FINISHED if self.rounds_left == 0 else STOPPED
        self._close_record()  # before anything says finished: the record is one plain file, whenever this process dies
        summary = self.folder.write_results(self.run, status, target)
        self.folder.release()
        return summary

    def save(self) -> None:
        """Commit a checkpoint of the last closed round, with all that was recorded before."""
        run = self.run
        meta = {
            "round": run.state.round,
            "run": run.id,
            "config": config_digest(self.config),
            "seed": run.key.seed,
            "arithmetic": arithmetic_of(run),
            "remote_devices": run.remote_devices,
        }
        if (schema := getattr(getattr(run.task, "data", None), "schema", None)) is not None:
            meta["schema"] = schema.to_dict()
        self._record.save_checkpoint(run.checkpoint_state(), meta, keep=self.config.checkpoint.keep)
        self._record.commit()
        run.oldest_resumable_round = min(self._record.checkpoint_rounds())
        self._saved, self._saved_at = run.state.round, time.monotonic()

    def _close_round(self, run: Run, record: Record) -> None:
        """Record a round, with a checkpoint if one is due, in one transaction. This is a callback."""
        section = self.config.checkpoint
        overdue = section.minutes is not None and time.monotonic() - self._saved_at >= 60 * section.minutes
        self._record.check_present()
        _, clients = run.client_blocks.pop()
        self._record.add_round(record, clients)
        if section.every and (run.state.round - self._saved >= section.every or overdue):
            self.save()
        else:
            self._record.commit()
        if not section.every:
            run.oldest_resumable_round = run.state.round  # it cannot be resumed
        io.append(self.folder / METRICS, _metrics_lines([record]))

    def _close_record(self) -> None:
        self.run.store.close()
        self._record.close()


@dataclass(frozen=True, slots=True)
class PythonRun:
    """A run started in Python: an algorithm, a task and options, which a configuration file cannot hold."""

    algorithm: Algorithm
    task: TaskLike
    options: RunOptions

    def describe(
        self,
        rounds: int,
        seed: int = 0,
        seeds: Sequence[int] | None = None,
        *,
        name: str | None = None,
        checkpoint_every: int = 10,
    ) -> Config:
        """Return the configuration that a folder stores for the run, or for several seeds of it."""
        options = self.options
        changed = {name: value for name, value in options.changed().items() if name in RECORDED_OPTIONS}
        return Config(
            name=self.algorithm.name if name is None else name,
            seed=seed,
            seeds=None if seeds is None else list(seeds),
            workers=options.workers or "auto",
            rounds=rounds,
            device=device_names(options.resolve_devices(self.task)),
            deterministic=options.deterministic is not False,
            server_device=str(options.server_device or "cpu"),
            evaluate=EvaluateSection(every=options.evaluate_every),
            checkpoint=CheckpointSection(every=checkpoint_every),
            python=PythonSection(
                algorithm=stable_repr(self.algorithm),
                task=self.task.name,
                options={name: stable_repr(value) for name, value in changed.items()},
                cites=list(citations(self.algorithm)),
            ),
        )

    def __call__(self, config: Config, store: ClientStore | None = None, rounds_done: int = 0) -> Run:
        """Return the run before its next round; this is a `RunFactory`."""
        options = replace(
            self.options,
            deterministic=config.deterministic if self.options.deterministic is None else self.options.deterministic,
            server_device=self.options.server_device or config.server_device,
        )
        engine = auto_engine(options.workers, config.rounds - rounds_done, devices=options.resolve_devices(self.task))
        return Run(self.algorithm, self.task, seed=config.seed, store=store, engine=engine, options=options)


def _metrics_lines(records: Iterable[Record]) -> bytes:
    return "".join(to_line(record) + "\n" for record in records).encode()


class RunError(HansaError):
    """A run in a folder failed in a round; the rounds before it are in the folder, if it still exists."""

    exit_code = 1

    def __init__(self, message: str, folder: Path | None = None) -> None:
        super().__init__(message)
        self.folder = folder


def _check_provenance(
    folder: RunFolder, run: Run, state: State, meta: Meta, accepted: set[str]
) -> tuple[Provenance, list[AcceptedChange]] | None:
    """Refuse to resume with changed data, model or code unless the change is accepted.

    Returns the new provenance and all accepted changes, if there is a change to record.
    """
    current, marker = provenance_of(run), folder.marker
    original = marker.bound
    changed = changed_kinds(original, current)
    if refused := [kind for kind in changed if kind not in accepted]:
        details = f" (Hansa {original.get('version')} then, {current['version']} now)" if "version" in refused else ""
        raise HansaError(
            f"{folder}: changed since the run was started: {', '.join(refused)}{details}. Restore it, or pass "
            f"--accept {','.join(changed)} (in Python, accept={changed}) to continue; the change is recorded."
        )
    sizes = {name: len(vector) for name, vector in run.state.vectors.items()}
    saved = {name: len(vector) for name, vector in state["server"]["vectors"].items()}
    if sizes != saved:
        raise HansaError(f"{folder}: the model now has {sizes} parameters, the checkpoint {saved}: not resumable.")
    if meta["run"] != run.id and not changed:
        raise _config_changed(folder)
    if not changed:
        return None
    log.warning("%s: continues after round %d with changed %s", folder, meta["round"], ", ".join(changed))
    note = AcceptedChange(meta["round"], changed, {kind: original.get(kind) for kind in changed})
    return current, [*marker.accepted, note]


def _config_changed(folder: RunFolder) -> HansaError:
    return HansaError(f"{folder}: config.yaml does not describe the run of the checkpoint. Restore it.")


def config_digest(config: Config) -> str:
    """Return a digest of the settings that affect results, except for the number of rounds.

    >>> from hansa.config import from_yaml
    >>> config_digest(from_yaml("rounds: 3")) == config_digest(from_yaml("rounds: 5\\nworkers: 2"))
    True
    """
    return settings_digest(config, (*FREE_SETTINGS, "evaluate", "links"))


def _engine_factory(config: Config, rounds_done: int) -> EngineFactory:
    """Return the engine factory of a run that has completed ``done`` rounds."""
    kind = config.engine.kind
    if config.evaluate.where != "server":
        raise HansaError(f"evaluate.where: {config.evaluate.where}: engine {kind} has no sites. Use server.")
    workers = None if config.workers == "auto" else config.workers
    rounds = config.rounds - rounds_done
    if config.engine.gpus is not None and kind != "ray":
        raise HansaError(f"engine.gpus: {config.engine.gpus:g}: engine {kind} has no actors. Use device, or kind: ray.")
    devices = resolve_devices(config.device)
    return build_engine(kind, workers, rounds, devices, config.engine.address, config.engine.gpus)


@allow_code()
def build_run(
    config: Config,
    federated: data.FederatedData,
    store: ClientStore | None = None,
    rounds_done: int = 0,
    engine: EngineFactory | None = None,
) -> Run:
    """Build the run of a configuration, before its first round."""
    if config.python is not None:
        raise HansaError(
            f"{config.title}: started in Python with an algorithm and a task that no file can hold. "
            "Resume it with the same two: hansa.resume(FOLDER, algorithm, task)."
        )
    if config.seeds is not None:
        raise HansaError("seeds: a run has one seed; hansa.runs.folder.expand_seeds has a configuration for each.")
    task = build.build_task(config, federated)
    measures: list[Measure] = [compression] if config.evaluate.compression else []
    if config.evaluate.local_mean:
        measures.append(local_mean_loss(task, config.evaluate.every or config.rounds))
    options = RunOptions(
        dtype=build.torch_dtype(config),
        device=config.device,
        deterministic=config.deterministic,
        server_device=config.server_device,
        quorum=config.quorum,
        evaluate_every=config.evaluate.every,
        keep_best=config.evaluate.keep_best,
        faults=FAULTS.build(config.faults),
        max_norm=config.max_norm,
        measures=measures,
        per_client=config.evaluate.per_client,
        personalise=build.personalise_option(config),
        profile=PROFILE.build(config.profile),
    )
    engine = _engine_factory(config, rounds_done) if engine is None else engine
    run = Run(build_algorithm(config), task, seed=config.seed, store=store, engine=engine, options=options)
    if config.links is not None and run.clock is not None:
        raise HansaError("links: rounds on a virtual clock take their time from profile. Set one of the two.")
    run.ledger = Ledger(LINKS.build(config.links))
    return run


def measure_global_loss(task: Task, every: int = 1) -> Callback:
    """Return a callback that adds the loss of the server's model on all training data to the record."""
    training, trainer = task.on_training_data(), None

    def measure(run: Run, record: Record) -> None:
        nonlocal trainer
        if every and record["round"] % every == 0:
            trainer = training.trainer(run.dtype, run.device) if trainer is None else trainer
            record["global_loss"] = training.evaluate(trainer, run.state.vectors)["test_loss"]

    return measure


def _load_same_data(config: Config, folder: RunFolder) -> data.FederatedData:
    """Load the data of a run with its original partition."""
    federated = build.load_data(config)
    if not isinstance(federated, data.FederatedData):  # the clients are generated, or part of the data
        return federated
    split = data.load_split(folder / PARTITION, None)
    try:
        return replace(federated, index=split.index, offsets=split.offsets)
    except HansaError as error:
        raise HansaError(f"{folder}: the data changed since the run was started and no longer fits: {error}") from error


def refuse_other_settings(folder: Path, saved: Config, requested: Config) -> None:
    """Refuse to resume a run with settings other than its own, except `FREE_SETTINGS`; the error lists each key."""
    current, new = flatten(to_dict(saved)), flatten(to_dict(requested))
    free_keys = {*FREE_SETTINGS, *(("evaluate",) if requested.python is not None else ())}  # Python's options apply
    keys = [key for key in sorted({*current, *new}) if key.partition(".")[0] not in free_keys]
    changed = [
        f"{key} is {_excerpt(current, new, key)}, requested {_excerpt(new, current, key)}"
        for key in keys
        if current.get(key) != new.get(key)
    ]
    if changed:
        suffix = f"; and {len(changed) - LISTED_CHANGES} more" if len(changed) > LISTED_CHANGES else ""
        raise HansaError(
            f"{folder}: holds a different run: {'; '.join(changed[:LISTED_CHANGES])}{suffix}. Use the settings of that "
            "run, choose another folder, or replace it with --overwrite (in Python, overwrite=True)."
        )


def digest_name(name: str, config: Config, *, extend: bool = True) -> str:
    """Return a folder name: the start of a title, and a digest of all settings but `FREE_SETTINGS` and lists of seeds.

    >>> from hansa.config import from_yaml
    >>> digest_name("local.lr=0.1", from_yaml("rounds: 3")) == digest_name("local.lr=0.1", from_yaml("workers: 2"))
    True
    >>> digest_name("local.lr=0.1", from_yaml("seed: 3")) == digest_name("local.lr=0.1", from_yaml("seed: 4"))
    False
    """
    if config.seeds is not None:
        config = config.model_copy(update={"seed": 0, "seeds": None})
    return f"{slug(name)[:80]}-{settings_digest(config, FREE_SETTINGS if extend else FREE_SETTINGS[1:])[:10]}"


def find_folder(config: Config, parent: Path | str, name: str, *, extend: bool = True) -> Path:
    """Return the folder of a run, or of its seeds, below ``parent``: one whose runs can be reused, or a free one.

    Configurations that differ only in spelling have the same folder. If data, model or code have changed since a run
    was started, a new folder is used: name-2, name-3, ...

    Args:
        config: A configuration, with one seed or several.
        parent: The folder of the runs.
        name: The title of the run; the name of a new folder begins with it.
        extend: Whether a run of fewer rounds is continued; otherwise a new run is started.
    """
    base = Path(parent) / digest_name(name, config, extend=extend)
    pattern = re.compile(rf".*-{base.name.rpartition('-')[2]}(-\d+)?")
    paths = base.parent.iterdir() if base.parent.is_dir() else ()
    existing = sorted(path for path in paths if pattern.fullmatch(path.name))
    candidates = (base if number == 1 else base.with_name(f"{base.name}-{number}") for number in count(1))
    return next(path for path in chain(existing, candidates) if _is_usable(path, config))


@allow_code()
def _is_usable(path: Path, config: Config) -> bool:
    """Return whether a folder is free, or holds only reusable runs of a configuration."""
    group = SeedGroupFolder(path)
    holder = RunFolder(path) if config.seeds is None else group
    if not holder.exists:
        try:
            holder.check_free()
        except HansaError:  # files that are not part of a run
            return False
    runs = [(holder if config.seeds is None else group.run(seed.seed), seed) for seed in expand_seeds(config)]
    return all(_is_reusable(run, seed_config) for run, seed_config in runs if run.exists)


def _is_reusable(folder: RunFolder, config: Config) -> bool:
    """Return whether a run can be used for a configuration with the same digest."""
    try:
        provenance = folder.marker.bound
    except HansaError:  # damaged, or of another version
        return False
    if changed_kinds(provenance, provenance_of(build_run(config, build.load_data(config)))):
        return False
    if folder.config.rounds == config.rounds and folder.summary["status"] == FINISHED:
        return True
    return bool(folder.checkpoint_rounds) and int(folder.summary["rounds"]) <= config.rounds


def _excerpt(settings: Mapping[str, Any], others: Mapping[str, Any], key: str) -> str:
    """Return at most 60 characters of a setting, beginning 20 before its first difference from another one."""
    text = str(settings.get(key, "not set"))
    pairs = enumerate(zip(text, str(others.get(key, "")), strict=False))
    start = max(0, next((place for place, (own, other) in pairs if own != other), 0) - 20) if len(text) > 60 else 0
    return f"{'...' if start else ''}{text[start : start + 60]}"
