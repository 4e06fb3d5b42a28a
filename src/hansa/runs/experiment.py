"""An experiment: a configuration carried out in a folder of its own, stopped and taken up again exactly."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hansa import data
from hansa.config import Config, algorithm, build, parts
from hansa.engine import choose
from hansa.errors import HansaError
from hansa.measures import compression, track_heterogeneity
from hansa.runs import checkpoint
from hansa.runs.driver import Callback, Record, Run
from hansa.runs.folder import CHECKPOINT, CLIENTS, FAILED, FINISHED, PARTITION, STOPPED, RunFolder, arithmetic
from hansa.runs.ledger import Ledger
from hansa.store import ClientStore, DiskStore, io
from hansa.tasks import Task

log = logging.getLogger("hansa")


class Experiment:
    """A run in its folder. ``Experiment.new`` begins one, ``Experiment.resumed`` takes one up; ``go`` runs it."""

    def __init__(self, config: Config, run: Run, folder: RunFolder) -> None:
        self.config, self.run, self.folder = config, run, folder
        self._saved, self._saved_at = run.state.round, time.monotonic()

    @classmethod
    def new(cls, config: Config, path: Path | str, *, overwrite: bool = False) -> Experiment:
        """A fresh run. Nothing is written before data, model and algorithm are known to fit together."""
        folder = RunFolder(path)
        folder.claim(overwrite=overwrite)
        run = living_run(config, build.federated(config))
        folder.begin(config, run)
        made = cls(config, run, folder)
        if config.checkpoint.every:
            run.store = DiskStore(folder / CLIENTS)
            made.save()  # so that a run can be taken up from its first moment on
        folder.write_config(config)  # last, since a folder with a configuration is a run
        return made

    @classmethod
    def resumed(cls, path: Path | str, *, rounds: int | None = None, workers: int | None = None) -> Experiment:
        """The run of a folder at its last checkpoint, to go on to its last round, or to another, with as many workers
        as before, or others: the result is the same."""
        folder = RunFolder(path)
        changes = {name: value for name, value in (("rounds", rounds), ("workers", workers)) if value is not None}
        config = folder.config.model_copy(update=changes)
        state, meta = checkpoint.load(folder / CHECKPOINT)
        done = int(meta["round"])
        if config.rounds < done:
            raise HansaError(f"{folder}: has {done} rounds behind it, so it cannot end after {config.rounds}.")
        store = DiskStore.open(folder / CLIENTS, at_round=done)
        run = living_run(config, _same_data(config, folder), store, done)
        if (meta["run"], meta["config"]) != (run.id, identity(config)):
            store.close()
            raise HansaError(f"{folder}: config.yaml describes another run than the checkpoint. Put back what it was.")
        if meta["arithmetic"] != arithmetic():
            log.warning(
                "%s: was run with %s, goes on with %s: the result will not be that of an unbroken run to the last bit",
                folder, meta["arithmetic"], arithmetic(),
            )  # fmt: skip
        run.restore(state, folder.rewind(done))
        if changes:
            folder.write_config(config)
        return cls(config, run, folder)

    @property
    def left(self) -> int:
        """Rounds yet to be run."""
        return self.config.rounds - self.run.state.round

    def go(self, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
        """Run to the end, or until a callback says stop; save everything either way; return the summary."""
        everything = [*measures(self.config, self.run), self.folder.record, self._save_when_due, *callbacks]
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
            "arithmetic": arithmetic(),
        }
        home = self.folder / CHECKPOINT
        checkpoint.save(home, run.tree(), meta, keep=self.config.checkpoint.keep)
        run.store.retain([int(facts["round"]) for facts in checkpoint.kept(home)])
        self._saved, self._saved_at = run.state.round, time.monotonic()

    def _save_when_due(self, run: Run, record: Record) -> None:
        asked = self.config.checkpoint
        if not asked.every:
            return
        late = asked.minutes is not None and time.monotonic() - self._saved_at >= 60 * asked.minutes
        if run.state.round - self._saved >= asked.every or late:
            self.save()

    def _close(self) -> None:
        self.run.store.close()


def identity(config: Config) -> str:
    """A digest of all that a result depends on: two runs with equal ones are one run, however long and however watched.

    >>> from hansa.config import from_text
    >>> identity(from_text("rounds: 3")) == identity(from_text("rounds: 5\\nworkers: 2"))
    True
    """
    watching = {"name", "rounds", "workers", "evaluate", "checkpoint", "links"}
    told = config.model_dump(mode="json", exclude_defaults=True, exclude=watching)
    return io.sha256(json.dumps(told, sort_keys=True).encode())


def living_run(config: Config, held: data.FederatedData, store: ClientStore | None = None, done: int = 0) -> Run:
    """A run of a configuration on its data, before the first of its rounds."""
    run = Run(
        algorithm(config),
        build.task(config, held),
        seed=config.seed,
        dtype=build.dtype(config),
        quorum=config.quorum,
        evaluate_every=config.evaluate.every,
        store=store,
        faults=parts.FAULTS.build(config.faults),
        max_norm=config.max_norm,
        measures=[compression] if config.evaluate.compression else [],
        engine=choose(None if config.workers == "auto" else config.workers, config.rounds - done),
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
    record["simulated_seconds"] = run.ledger.rounds[-1].seconds


def global_loss(task: Task, every: int = 1) -> Callback:
    """A callback that measures the server's model on all training data: the global objective, beside the local ones."""
    held = task.data
    rows = torch.cat([held.rows(client) for client in range(held.population)])
    assert isinstance(held, data.FederatedData)
    whole = replace(held, test_inputs=held.inputs[rows], test_targets=held.targets[rows])
    everything = Task(task.model, task.loss, whole, metric=task.metric)
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
    split = data.load_split(folder / PARTITION, again.targets)
    return replace(again, index=split.index, offsets=split.offsets)
