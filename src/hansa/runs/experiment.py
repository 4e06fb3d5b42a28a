"""An experiment: a configuration carried out in a folder of its own, stopped and taken up again exactly."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from hansa import data
from hansa.config import Config, algorithm, build, parts
from hansa.core.devices import devices
from hansa.core.errors import HansaError
from hansa.core.types import State
from hansa.engine import RayPool, choose
from hansa.engine.auto import EngineFactory
from hansa.rounds.ledger import Ledger
from hansa.rounds.measures import Measure, compression, local_mean_loss, track_heterogeneity
from hansa.runs import checkpoint, client_record
from hansa.runs.client_record import ClientRecord
from hansa.runs.driver import Callback, Record, Run
from hansa.runs.folder import CHECKPOINT, CLIENTS, FAILED, FINISHED, PARTITION, RECORD, STOPPED, RunFolder, arithmetic
from hansa.runs.provenance import Bindings, bindings, changes, check_words
from hansa.runs.store import ClientStore, Damaged, DiskStore, io
from hansa.training import Task

log = logging.getLogger("hansa")


class Experiment:
    """A run in its folder. ``Experiment.new`` begins one, ``Experiment.resumed`` takes one up; ``go`` runs it."""

    def __init__(self, config: Config, run: Run, folder: RunFolder) -> None:
        self.config, self.run, self.folder = config, run, folder
        self._saved, self._saved_at = run.state.round, time.monotonic()

    @classmethod
    def new(
        cls,
        config: Config,
        path: Path | str,
        *,
        overwrite: bool = False,
        numbered: bool = False,
        make: Maker | None = None,
    ) -> Experiment:
        """A fresh run: data, model and algorithm are built first, then the folder is taken and held, then written to.

        A folder that holds something is refused; ``overwrite`` puts a run of ours in it aside and removes it when the
        new one can be taken up; ``numbered`` takes the next free name: path, path-2, path-3, ... What the run is made
        of, where the configuration does not say, ``make`` knows.
        """
        if make is None:
            _refuse_python(config, "the configuration")
        folder = RunFolder(path)
        if not numbered:
            folder.check(overwrite=overwrite)
        run = living_run(config, build.federated(config)) if make is None else make(config, None, 0)
        folder.claim(overwrite=overwrite, numbered=numbered)
        try:
            folder.begin(config, run)
            run.client_record = ClientRecord(folder / RECORD)
            made = cls(config, run, folder)
            if config.checkpoint.every:
                run.store = DiskStore(folder / CLIENTS)
                made.save()  # so that a run can be taken up from its first moment on
            folder.write_config(config)  # last, since a folder with a configuration is a run
            folder.settled()
        except BaseException:
            run.store.close()
            folder.withdraw()
            raise
        return made

    @classmethod
    def resumed(
        cls,
        path: Path | str,
        *,
        rounds: int | None = None,
        workers: int | Literal["auto"] | None = None,
        device: str | list[str] | None = None,
        fallback: bool = False,
        accept: Sequence[str] = (),
        make: Maker | None = None,
    ) -> Experiment:
        """The run of a folder at its last checkpoint, to go on to its last round, or to another, with as many workers
        as before, or others: the result is the same. On another kind of ``device`` it is so up to rounding.

        ``fallback`` goes back to the newest point at which nothing is damaged. Data, model or code that changed since
        the run was begun are refused unless ``accept`` names them; then the folder says so for ever.
        """
        accepted = check_words(accept)
        folder = RunFolder.holding(path)
        folder.hold()
        opened: list[ClientStore] = []
        try:
            given = {"rounds": rounds, "workers": workers, "device": device}
            asked = {name: value for name, value in given.items() if value is not None}
            config = folder.config.model_copy(update=asked)
            if make is None:
                _refuse_python(config, str(folder))
            point = _newest_sound(folder) if fallback else _newest(folder)
            opened.append(point.store)
            if point.meta["config"] != identity(config):
                raise _another(folder)
            if config.rounds < point.round:
                raise HansaError(
                    f"{folder}: has {point.round} rounds behind it, so it cannot end after {config.rounds}."
                )
            if make is None:
                run = living_run(config, _same_data(config, folder), point.store, point.round)
            else:
                run = make(config, point.store, point.round)
            bound = _check_bound(folder, run, point, accepted)
            if point.meta["arithmetic"] != (now := arithmetic(run.devices)):
                log.warning(
                    "%s: was run with %s, goes on with %s: the result will not be that of an unbroken run to the last "
                    "bit", folder, point.meta["arithmetic"], now,
                )  # fmt: skip
            run.client_record = ClientRecord.taken_up(folder / RECORD, point.round, point.meta.get("clients"))
            run.restore(point.state, folder.rewind(point.round, point.meta.get("metrics")))
            run.oldest = min([point.round, *(int(facts["round"]) for facts in checkpoint.kept(folder / CHECKPOINT))])
            if bound is not None:  # after the numbers, which an older version did not seal
                folder.bind(run, *bound)
            if asked:
                folder.write_config(config)
            return cls(config, run, folder)
        except BaseException:
            for store in opened:
                store.close()
            folder.release()
            raise

    @property
    def left(self) -> int:
        """Rounds yet to be run."""
        return self.config.rounds - self.run.state.round

    def go(self, callbacks: Sequence[Callback] = (), first: Sequence[Callback] = ()) -> dict[str, Any]:
        """Run to the end, or until a callback says stop; save everything either way; return the summary. The callbacks
        of ``first`` come before the record is written down, so that they may add to it."""
        added = [*measures(self.config, self.run), *first]
        everything = [*added, self.folder.record, self._save_when_due, *callbacks]
        target = self.config.evaluate.target
        try:
            self.run.advance(self.left, everything)
        except BaseException as error:
            # what closed is saved; a checkpoint must not be made of a round that may be half done
            try:
                self.folder.finish(self.run, FAILED if isinstance(error, Exception) else STOPPED, target)
            finally:
                self._close()
            raise
        if self.config.checkpoint.every and self.run.state.round > self._saved:
            self.save()
        status = FINISHED if self.left == 0 else STOPPED
        found = self.folder.finish(self.run, status, target)
        self._close()
        return found

    def save(self) -> None:
        """Write a checkpoint of the last closed round."""
        run = self.run
        meta = {
            "round": run.state.round,
            "run": run.id,
            "config": identity(self.config),
            "seed": run.key.seed,
            "arithmetic": arithmetic(run.devices),
            "metrics": self.folder.seal,
            "clients": run.client_record.seal,
        }
        run.client_record.sync()
        home = self.folder / CHECKPOINT
        checkpoint.save(home, run.tree(), meta, keep=self.config.checkpoint.keep)
        kept = [int(facts["round"]) for facts in checkpoint.kept(home)]
        run.store.retain(kept)
        run.oldest = min(kept)
        self._saved, self._saved_at = run.state.round, time.monotonic()

    def _save_when_due(self, run: Run, record: Record) -> None:
        asked = self.config.checkpoint
        if not asked.every:
            run.oldest = run.state.round  # nobody takes it up again
            return
        late = asked.minutes is not None and time.monotonic() - self._saved_at >= 60 * asked.minutes
        if run.state.round - self._saved >= asked.every or late:
            self.save()

    def _close(self) -> None:
        self.run.store.close()
        self.folder.release()


Maker: TypeAlias = "Callable[[Config, ClientStore | None, int], Run]"
"""Makes the run of a configuration on the clients' rows of a checkpoint, if there is one, after so many rounds."""


class Point(NamedTuple):
    """Where a run can be taken up: a checkpoint, and the clients' rows at its round."""

    state: State
    meta: checkpoint.Meta
    store: DiskStore

    @property
    def round(self) -> int:
        return int(self.meta["round"])


def _newest(folder: RunFolder) -> Point:
    state, meta = checkpoint.load(folder / CHECKPOINT)
    return Point(state, meta, DiskStore.open(folder / CLIENTS, at_round=int(meta["round"])))


def _newest_sound(folder: RunFolder) -> Point:
    """The newest point of which checkpoint, rows and numbers are all undamaged; what is lost by that is told."""
    reached = [int(facts["round"]) for facts in checkpoint.kept(folder / CHECKPOINT)]
    seals = folder.seals()
    for state, meta in checkpoint.undamaged(folder / CHECKPOINT):
        done = int(meta["round"])
        if done > len(seals) or (done and seals[done - 1] != meta.get("metrics", seals[done - 1])):
            log.warning("%s: the numbers that led to round %d are damaged; falling back further", folder, done)
            continue
        if not client_record.sound(folder / RECORD, done, meta.get("clients")):
            log.warning("%s: the clients' record that led to round %d is damaged; falling back further", folder, done)
            continue
        try:
            store = DiskStore.open(folder / CLIENTS, at_round=done)
            try:
                store.verify()
            except BaseException:
                store.close()
                raise
        except HansaError as damage:
            log.warning("%s Falling back to the checkpoint before it.", damage)
            continue
        if (last := max([done, len(seals), *reached])) > done:
            log.warning("%s: taken up after round %d; the work of rounds %d to %d is lost and is done again",
                        folder, done, done + 1, last)  # fmt: skip
        return Point(state, meta, store)
    raise Damaged(f"{folder}: no checkpoint is left whose state, rows and numbers are undamaged. Start anew.")


def _check_bound(
    folder: RunFolder, run: Run, point: Point, accepted: set[str]
) -> tuple[Bindings, list[dict[str, Any]]] | None:
    """Refuse to go on with other data, model or code than the run was begun with, unless the change is accepted.

    Returns what the run is bound to from now on and the changes so far, where that is news.
    """
    now, facts = bindings(run), folder.marker
    if facts is None:
        log.warning("%s: made by a hansa that kept no digests of data and code; those of now are taken", folder)
        then, earlier = dict(now), []
    else:
        then, earlier = dict(facts["bound"]), list(facts["accepted"])
    changed = changes(then, now)
    if refused := [kind for kind in changed if kind not in accepted]:
        details = f" (hansa {then.get('version')} then, {now['version']} now)" if "version" in refused else ""
        raise HansaError(
            f"{folder}: changed since the run was begun: {', '.join(refused)}{details}. Put back what it was; or go on "
            f"with what there is now, and have it noted: --accept-changes {','.join(changed)}."
        )
    sizes = {name: len(vector) for name, vector in run.state.vectors.items()}
    saved = {name: len(vector) for name, vector in point.state["server"]["vectors"].items()}
    if sizes != saved:
        raise HansaError(f"{folder}: the model has {sizes} numbers now, the checkpoint {saved}: it cannot go on.")
    if point.meta["run"] != run.id and not changed:
        raise _another(folder)
    if changed:
        note = {"round": point.round, "changed": changed, "before": {kind: then.get(kind) for kind in changed}}
        log.warning("%s: goes on after round %d with other %s", folder, point.round, ", ".join(changed))
        earlier.append(note)
    return (now, earlier) if changed or facts is None else None


def _refuse_python(config: Config, where: str) -> None:
    if config.python is not None:
        raise HansaError(
            f"{where}: begun in Python with an algorithm and a task that no file can hold. "
            "hansa.resume(FOLDER, algorithm, task) goes on with it, given the same two."
        )


def _another(folder: RunFolder) -> HansaError:
    return HansaError(f"{folder}: config.yaml describes another run than the checkpoint. Put back what it was.")


def identity(config: Config) -> str:
    """A digest of all that a result depends on: two runs with equal ones are one run, however long and however watched.

    >>> from hansa.config import from_text
    >>> identity(from_text("rounds: 3")) == identity(from_text("rounds: 5\\nworkers: 2"))
    True
    """
    watching = {"name", "rounds", "engine", "workers", "device", "evaluate", "checkpoint", "links"}
    told = config.model_dump(mode="json", exclude_defaults=True, exclude=watching)
    return io.sha256(json.dumps(told, sort_keys=True).encode())


def _engine(config: Config, done: int) -> EngineFactory:
    """What carries the run's work."""
    workers = None if config.workers == "auto" else config.workers
    if config.evaluate.where != "server":
        kind = config.engine.kind
        raise HansaError(f"evaluate.where: {config.evaluate.where}: engine {kind} has no sites. Leave it at server.")
    if config.engine.kind == "ray":
        return partial(RayPool, workers=workers, address=config.engine.address)
    if config.engine.kind == "flower":
        raise HansaError("engine: flower: the clients are at sites, which `hansa serve` asks. Run it with that.")
    return choose(workers, config.rounds - done, devices=devices(config.device))


def living_run(
    config: Config,
    held: data.FederatedData,
    store: ClientStore | None = None,
    done: int = 0,
    engine: EngineFactory | None = None,
) -> Run:
    """A run of a configuration on its data, before the first of its rounds."""
    if config.seeds is not None:
        raise HansaError(
            "seeds: one run has one seed; several are carried out one by one: hansa.runs.seed_group.per_seed."
        )
    task = build.task(config, held)
    observed: list[Measure] = [compression] if config.evaluate.compression else []
    if config.evaluate.local_mean:
        observed.append(local_mean_loss(task, config.evaluate.every or config.rounds))
    run = Run(
        algorithm(config),
        task,
        seed=config.seed,
        dtype=build.dtype(config),
        device=config.device,
        quorum=config.quorum,
        evaluate_every=config.evaluate.every,
        store=store,
        faults=parts.FAULTS.build(config.faults),
        max_norm=config.max_norm,
        measures=observed,
        per_client=config.evaluate.per_client,
        personalise=build.personalised(config),
        engine=_engine(config, done) if engine is None else engine,
    )
    run.ledger = Ledger(parts.LINKS.build(config.links))
    return run


def measures(config: Config, run: Run) -> list[Callback]:
    """The callbacks that add what a configuration asks for to each round's record."""
    found: list[Callback] = []
    if run.ledger.links is not None:
        found.append(simulated_seconds)
    if config.evaluate.train and isinstance(run.task, Task):
        found.append(global_loss(run.task, config.evaluate.every))
    if config.evaluate.heterogeneity:
        found.append(track_heterogeneity(config.evaluate.every or config.rounds))
    return found


def simulated_seconds(run: Run, record: Record) -> None:
    """The time that the round's messages take by the link model."""
    assert run.ledger.last is not None
    record["simulated_seconds"] = run.ledger.last.seconds


def global_loss(task: Task, every: int = 1) -> Callback:
    """A callback that measures the server's model on all training data: the global objective, beside the local ones."""
    everything = task.on_training_data()
    shells: list[Any] = []

    def measure(run: Run, record: Record) -> None:
        if every and record["round"] % every == 0:
            if not shells:
                shells.append(everything.shell(run.dtype, run.device))
            record["global_loss"] = everything.evaluate(shells[0], run.state.vectors)["test_loss"]

    return measure


def _same_data(config: Config, folder: RunFolder) -> data.FederatedData:
    """The data of a run that was begun: dealt as it was then, whatever has changed since."""
    again = build.federated(config)
    if not isinstance(again, data.FederatedData):  # its clients are a function of their numbers, or given with it
        return again
    split = data.load_split(folder / PARTITION, again.targets if folder.marker is None else None)
    try:
        return replace(again, index=split.index, offsets=split.offsets)
    except HansaError as error:
        raise HansaError(f"{folder}: the data changed since the run was begun, and no longer fits: {error}") from error
