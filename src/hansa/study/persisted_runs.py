"""Runs that were made in Python and are kept in folders: what a folder says of them, begun, found again, gone on."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Any

from hansa.algorithm import Algorithm
from hansa.config import Config
from hansa.config.sections import CheckpointSection, EvaluateSection, PythonSection
from hansa.core.citations import citations
from hansa.core.devices import devices
from hansa.core.errors import HansaError, invalid_argument
from hansa.engine import choose
from hansa.runs.driver import Run
from hansa.runs.experiment import Experiment, Maker, identity
from hansa.runs.folder import RunFolder
from hansa.runs.seed_group import GroupFolder
from hansa.runs.store import ClientStore
from hansa.study.report.progress import Stopper
from hansa.training import TaskLike

if TYPE_CHECKING:
    from hansa.study.api import Options, Place, Shown


def run_kept(
    algorithm: Algorithm,
    task: TaskLike,
    rounds: int,
    seed: int,
    kept: Place,
    store: ClientStore | None,
    options: Options,
    shown: Shown,
    title: str,
) -> Run:
    """The run of a folder: begun, gone on with, or found finished."""
    if store is not None:
        raise invalid_argument("run", "store", store, "None with out", "The run's folder has the clients' rows.")
    config = described(algorithm, task, rounds, seed, kept, options)
    make = maker(algorithm, task, options)
    folder = RunFolder(kept.path)
    if not folder.exists or kept.overwrite:
        return go(Experiment.new(config, kept.path, overwrite=kept.overwrite, make=make), options, shown, title)
    if identity(folder.config) != identity(config):
        raise another(folder)
    if folder.config.rounds > rounds and int(folder.summary["rounds"]) > rounds:
        raise HansaError(f"{folder}: holds {folder.summary['rounds']} rounds of this run already; asked for {rounds}.")
    again = Experiment.resumed(kept.path, rounds=rounds, workers=options.get("workers"), make=make)
    return go(again, options, shown, title)


def go(experiment: Experiment, options: Options, shown: Shown, title: str) -> Run:
    """Run to the end; after a Ctrl-C, which let the round end and saved everything, interrupt the caller too."""
    config, done = experiment.config, experiment.run.state.round
    followed = [] if shown is None else [shown.follow(title, config.rounds, done)]
    with Stopper(None, (signal.SIGINT,)) as stopper:
        experiment.go([*followed, stopper], first=options.get("callbacks", ()))
    if stopper.caught is not None:
        raise KeyboardInterrupt(f"saved: hansa.resume({str(experiment.folder)!r}) goes on.")
    return experiment.run


def maker(algorithm: Algorithm, task: TaskLike, options: Options) -> Maker:
    """How a folder's run is made of what Python has."""
    given: dict[str, Any] = {key: value for key, value in options.items() if key not in ("workers", "callbacks")}

    def make(config: Config, store: ClientStore | None, done: int) -> Run:
        where = devices(options.get("device") or getattr(task, "device", None) or "cpu")
        engine = choose(options.get("workers"), config.rounds - done, devices=where)
        return Run(algorithm, task, seed=config.seed, store=store, engine=engine, **given)

    return make


def described(algorithm: Algorithm, task: TaskLike, rounds: int, seed: int, kept: Place, options: Options) -> Config:
    """What a folder says of a run that was made in Python."""
    watching = (
        "workers", "callbacks", "evaluate_every", "keep_params", "measures", "device", "per_client", "personalise",
    )  # fmt: skip
    told = {key: _printed(value) for key, value in options.items() if key not in watching}
    where = devices(options.get("device") or getattr(task, "device", None) or "cpu")
    return Config(
        name=kept.name if kept.name is not None else algorithm.name,
        seed=seed,
        rounds=rounds,
        device=[str(each) for each in where] if len(where) > 1 else str(where[0]),
        evaluate=EvaluateSection(every=options.get("evaluate_every", 1)),
        checkpoint=CheckpointSection(every=kept.checkpoint_every),
        python=PythonSection(
            algorithm=_printed(algorithm), task=task.name, options=told, cites=list(citations(algorithm))
        ),
    )


def seedless(config: Config) -> str:
    """What makes it this run, whatever its seed."""
    return identity(config.model_copy(update={"seed": 0, "seeds": None}))


def another(folder: RunFolder | GroupFolder) -> HansaError:
    """The error for a folder that is taken."""
    return HansaError(
        f"{folder}: holds a run of another method, task, seed or option. Choose another folder; overwrite=True "
        "replaces it."
    )


def _printed(value: object) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
