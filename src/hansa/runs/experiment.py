"""An experiment: a configuration that is run in its own folder, and can be stopped and resumed exactly."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from hansa import data
from hansa.config import Config, allow_code, build, build_algorithm
from hansa.config.sections import FAULTS, LINKS, PROFILE
from hansa.core.devices import resolve_devices
from hansa.core.errors import HansaError
from hansa.core.types import State
from hansa.engine import EngineFactory, EngineOptions, build_engine
from hansa.rounds.ledger import Ledger
from hansa.rounds.measures import Measure, compression, local_mean_loss, track_heterogeneity
from hansa.runs.driver import Run
from hansa.runs.folder import FAILED, FINISHED, PARTITION, STOPPED, RunFolder, arithmetic_description
from hansa.runs.options import Callback, Record, RunOptions
from hansa.runs.provenance import Provenance, changed_kinds, parse_accepted_changes, provenance_of
from hansa.runs.record import ClientRecord, Meta, RunRecord
from hansa.runs.store import ClientStore, DamagedFileError, io
from hansa.training import Task

log = logging.getLogger("hansa")


class Experiment:
    """A run in its folder. ``Experiment.new`` starts one, ``Experiment.resume`` resumes one; `execute` runs it."""

    def __init__(self, config: Config, run: Run, folder: RunFolder) -> None:
        self.config, self.run, self.folder = config, run, folder
        self.began = self._saved = run.state.round
        self._saved_at = time.monotonic()

    @classmethod
    @allow_code()
    def new(
        cls,
        config: Config,
        path: Path | str,
        *,
        overwrite: bool = False,
        numbered: bool = False,
        run_factory: RunFactory | None = None,
    ) -> Experiment:
        """Start a run: build data, model and algorithm, then lock the folder, then write to it.

        Args:
            config: The configuration.
            path: The folder, which must be empty.
            overwrite: Replace a run in the folder; it is removed when the new one has its first checkpoint.
            numbered: Take the next free name: path, path-2, path-3, ...
            run_factory: Builds a run started in Python, which no configuration describes.
        """
        folder = RunFolder(path)
        if not numbered:
            folder.check_free(overwrite=overwrite)
        if run_factory is None:
            run = build_run(config, build.load_data(config))
        else:
            run = run_factory(config, None, 0)
            config = _with_server_device(config, run)
        folder.acquire(overwrite=overwrite, numbered=numbered)
        try:
            folder.write_start(config, run)
            folder.record = RunRecord.create(folder.path)
            run.client_record = ClientRecord(folder.record)
            experiment = cls(config, run, folder)
            if config.checkpoint.every:
                run.store = folder.record.open_rows()
                experiment.save()  # so that the run can be resumed from the start
            folder.write_config(config)  # last, because a folder with a configuration counts as a run
            folder.discard_replaced()
        except BaseException:
            run.store.close()
            if folder.record is not None:
                folder.record.close()
            folder.roll_back()
            raise
        return experiment

    @classmethod
    @allow_code()
    def resume(
        cls,
        path: Path | str,
        *,
        fallback: bool = False,
        accept: Sequence[str] = (),
        trust: bool = False,
        run_factory: RunFactory | None = None,
        **settings: Any,
    ) -> Experiment:
        """Return the run of a folder at its last checkpoint.

        Args:
            path: The folder.
            fallback: Use the newest undamaged checkpoint.
            accept: Kinds of changes of data, model or code to accept; they are recorded in the folder.
            trust: Import code that the folder names even if this user did not create the folder on this machine.
            run_factory: Builds a run started in Python.
            settings: New values of keys of the configuration that results do not depend on, such as rounds, workers and
                device (on another kind of device the result is the same up to rounding); None keeps a value.
        """
        accepted = parse_accepted_changes(accept)
        folder = RunFolder.containing(path)
        folder.acquire_existing()
        try:
            _ = folder.marker  # refuses other formats
            folder.require_trust(trust=trust)
            if unknown := settings.keys() - Config.model_fields.keys():
                raise TypeError(f"resume: no such setting: {', '.join(sorted(unknown))}")
            saved_config = folder.config
            config = saved_config.model_copy(
                update={name: value for name, value in settings.items() if value is not None}
            )
            folder.record = record = RunRecord(folder.path, writing=True)
            before = record.head.rounds
            if not fallback:
                record.check_pages()
            done = record.intact_checkpoint() if fallback else record.newest_checkpoint()
            if fallback and before > done:
                log.warning("%s: resumed after round %d; rounds %d to %d are lost and run again",
                            folder, done, done + 1, before)  # fmt: skip
            state, meta = record.load_checkpoint(done)
            store = record.open_rows(record.head_of_checkpoint(done).generation)
            if meta["config"] != config_digest(config):
                raise _config_changed(folder)
            if config.rounds < done:
                raise HansaError(f"{folder}: is already at round {done}, past the requested {config.rounds}.")
            if run_factory is None:
                run = build_run(config, _load_same_data(config, folder), store, done)
            else:
                run = run_factory(config, store, done)
                config = _with_server_device(config, run)
            run.recorded_devices = meta.get("remote_devices", []) if done else None
            provenance = _check_provenance(folder, run, state, meta, accepted)
            if meta["arithmetic"] != (now := arithmetic_of(run)):
                log.warning(
                    "%s: started with %s, resumed with %s: the result may differ in its last bits from that of an "
                    "uninterrupted run", folder, meta["arithmetic"], now,
                )  # fmt: skip
            run.client_record = ClientRecord(record)
            run.restore(state, folder.rewind(done))
            run.oldest_resumable_round = min(record.checkpoint_rounds())
            if provenance is not None:
                folder.write_marker(run, *provenance)
            if config != saved_config:
                folder.write_config(config)
            return cls(config, run, folder)
        except BaseException:
            if folder.record is not None:
                folder.record.close()
            folder.release()
            raise

    @property
    def rounds_left(self) -> int:
        """The number of remaining rounds."""
        return self.config.rounds - self.run.state.round

    def execute(
        self, callbacks: Sequence[Callback] = (), first: Sequence[Callback] = (), *, stopped: bool = False
    ) -> dict[str, Any]:
        """Run to the last round or until a callback stops it, save everything, and return the summary.

        Args:
            callbacks: Called after every round.
            first: Called before the record of a round is written; they may add to it.
            stopped: Whether a callback has stopped the run before, at its current round: then only save.
        """
        evaluate, task = self.config.evaluate, self.run.task
        recording: list[Callback] = []
        if evaluate.train and isinstance(task, Task):
            recording.append(measure_global_loss(task, evaluate.every))
        if evaluate.heterogeneity:
            recording.append(track_heterogeneity(evaluate.every or self.config.rounds))
        saving = [self._check_folder, self._close_round]
        target = evaluate.target
        try:
            self.run.advance(0 if stopped else self.rounds_left, [*recording, *first, *saving, *callbacks])
        except BaseException as error:
            # closed rounds are saved; an incomplete round must not reach a checkpoint
            if isinstance(error, OSError | DamagedFileError):
                time.sleep(0.2)  # a folder that is being removed goes file by file
            try:
                self._check_folder()
                self.folder.write_results(self.run, FAILED if isinstance(error, Exception) else STOPPED, target)
            except (HansaError, OSError) as second:
                self._check_folder()
                log.warning("%s: the results were not written: %s", self.folder, second)
            finally:
                self._close()
            if isinstance(error, HansaError):
                raise RunError(f"failed in round {self.run.state.round + 1}: {error}", self.folder.path) from error
            raise
        if self.config.checkpoint.every and self.run.state.round > self._saved:
            self.save()
        status = FINISHED if self.rounds_left == 0 else STOPPED
        summary = self.folder.write_results(self.run, status, target)
        self._close()
        return summary

    def save(self) -> None:
        """Write a checkpoint of the last closed round."""
        self._write_checkpoint()
        self.folder.commit([])
        self._saved_checkpoint()

    def _write_checkpoint(self) -> None:
        run, record = self.run, self.folder.record
        assert record is not None
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
        record.save_checkpoint(run.checkpoint_state(), meta, keep=self.config.checkpoint.keep)

    def _saved_checkpoint(self) -> None:
        assert self.folder.record is not None
        self.run.oldest_resumable_round = min(self.folder.record.checkpoint_rounds())
        self._saved, self._saved_at = self.run.state.round, time.monotonic()

    def _close_round(self, run: Run, record: Record) -> None:
        """Record a round, with a checkpoint if one is due, in one transaction. This is a callback."""
        section = self.config.checkpoint
        overdue = section.minutes is not None and time.monotonic() - self._saved_at >= 60 * section.minutes
        due = bool(section.every) and (run.state.round - self._saved >= section.every or overdue)
        self.folder.append_record(run, record)
        if due:
            self._write_checkpoint()
        self.folder.commit([record])
        if due:
            self._saved_checkpoint()
        elif not section.every:
            run.oldest_resumable_round = run.state.round  # it cannot be resumed

    def _check_folder(self, run: Run | None = None, record: Record | None = None) -> None:
        """Refuse to go on if the folder was removed or moved while the run is active. This is a callback."""
        if not self.folder.exists:
            raise RunError(
                f"{self.folder}: the run folder was removed or moved while the run was active. The run ended after "
                f"round {self.run.state.round}; nothing more can be saved."
            )

    def _close(self) -> None:
        self.run.store.close()
        if self.folder.record is not None:
            self.folder.record.close()
        self.folder.release()


class RunError(HansaError):
    """A run in a folder failed in a round; the rounds before it are in the folder.

    Args:
        message: In which round, and why.
        folder: The folder of the run, if it is still there.
    """

    exit_code = 1

    def __init__(self, message: str, folder: Path | None = None) -> None:
        super().__init__(message)
        self.folder = folder


RunFactory: TypeAlias = "Callable[[Config, ClientStore | None, int], Run]"
"""Builds a run from a configuration, the client rows of a checkpoint if there is one, and the rounds done."""


def _check_provenance(
    folder: RunFolder, run: Run, state: State, meta: Meta, accepted: set[str]
) -> tuple[Provenance, list[dict[str, Any]]] | None:
    """Refuse to resume with other data, model or code than the run was started with, unless the change is accepted.

    Returns the new provenance and all accepted changes, if there is a change to record.
    """
    now, marker = provenance_of(run), folder.marker
    then, earlier = dict(marker["bound"]), list(marker["accepted"])
    changed = changed_kinds(then, now)
    if refused := [kind for kind in changed if kind not in accepted]:
        details = f" (Hansa {then.get('version')} then, {now['version']} now)" if "version" in refused else ""
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
    if changed:
        note = {"round": meta["round"], "changed": changed, "before": {kind: then.get(kind) for kind in changed}}
        log.warning("%s: continues after round %d with changed %s", folder, meta["round"], ", ".join(changed))
        earlier.append(note)
    return (now, earlier) if changed else None


def _with_server_device(config: Config, run: Run) -> Config:
    """Return the configuration with the server's device of a run started in Python. A run that does not name one has
    that of the configuration."""
    if run.options.server_device is None:
        run.move_server(config.server_device)
    return config.model_copy(update={"server_device": str(run.server_device)})


def arithmetic_of(run: Run) -> str:
    """Describe the platform of a run, which the last bits of its result depend on."""
    return arithmetic_description(run.devices, run.deterministic, run.server_device)


def _config_changed(folder: RunFolder) -> HansaError:
    return HansaError(f"{folder}: config.yaml does not describe the run of the checkpoint. Restore it.")


def config_digest(config: Config) -> str:
    """Return a digest of the settings that affect results, except for the number of rounds.

    >>> from hansa.config import from_yaml
    >>> config_digest(from_yaml("rounds: 3")) == config_digest(from_yaml("rounds: 5\\nworkers: 2"))
    True
    """
    watching = {
        "name", "rounds", "engine", "workers", "device", "deterministic", "server_device", "evaluate", "checkpoint",
        "links",
    }  # fmt: skip
    data = config.model_dump(mode="json", exclude_defaults=True, exclude=watching)
    return io.sha256(json.dumps(data, sort_keys=True).encode())


def _engine_factory(config: Config, done: int) -> EngineFactory:
    """Return the engine factory of a run that has completed ``done`` rounds."""
    kind = config.engine.kind
    if config.evaluate.where != "server":
        raise HansaError(f"evaluate.where: {config.evaluate.where}: engine {kind} has no sites. Use server.")
    workers = None if config.workers == "auto" else config.workers
    rounds = config.rounds - done
    if config.engine.gpus is not None and kind != "ray":
        raise HansaError(f"engine.gpus: {config.engine.gpus:g}: engine {kind} has no actors. Use device, or kind: ray.")
    devices = resolve_devices(config.device)
    return build_engine(kind, EngineOptions(workers, rounds, devices, config.engine.address, config.engine.gpus))


@allow_code()
def build_run(
    config: Config,
    federated: data.FederatedData,
    store: ClientStore | None = None,
    done: int = 0,
    engine: EngineFactory | None = None,
) -> Run:
    """Build the run of a configuration, before its first round."""
    if config.python is not None:
        raise HansaError(
            f"{config.title}: started in Python with an algorithm and a task that no file can hold. "
            "hansa.resume(FOLDER, algorithm, task) resumes it, given the same two."
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
        faults=FAULTS.build(config.faults),
        max_norm=config.max_norm,
        measures=measures,
        per_client=config.evaluate.per_client,
        personalise=build.personalise_option(config),
        profile=PROFILE.build(config.profile),
    )
    engine = _engine_factory(config, done) if engine is None else engine
    run = Run(build_algorithm(config), task, seed=config.seed, store=store, engine=engine, options=options)
    if config.links is not None and run.clock is not None:
        raise HansaError("links: rounds on a virtual clock take their time from profile. Set one of the two.")
    run.ledger = Ledger(LINKS.build(config.links))
    return run


def measure_global_loss(task: Task, every: int = 1) -> Callback:
    """Return a callback that adds the loss of the server's model on all training data to the record."""
    training = task.on_training_data()
    trainers: list[Any] = []

    def measure(run: Run, record: Record) -> None:
        if every and record["round"] % every == 0:
            if not trainers:
                trainers.append(training.trainer(run.dtype, run.device))
            record["global_loss"] = training.evaluate(trainers[0], run.state.vectors)["test_loss"]

    return measure


def _load_same_data(config: Config, folder: RunFolder) -> data.FederatedData:
    """Load the data of a run with the partition that it was started with."""
    federated = build.load_data(config)
    if not isinstance(federated, data.FederatedData):  # its clients are generated, or part of it
        return federated
    split = data.load_split(folder / PARTITION, None)
    try:
        return replace(federated, index=split.index, offsets=split.offsets)
    except HansaError as error:
        raise HansaError(f"{folder}: the data changed since the run was started and no longer fits: {error}") from error
