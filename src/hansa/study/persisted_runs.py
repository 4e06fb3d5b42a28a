"""Runs started in Python and stored in folders: start, find, resume."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from hansa.algorithm import Algorithm
from hansa.config import Config
from hansa.config.sections import CheckpointSection, EvaluateSection, PythonSection
from hansa.core.citations import citations
from hansa.core.devices import Device, resolve_devices
from hansa.core.errors import HansaError, invalid_argument
from hansa.engine import auto_engine
from hansa.runs.driver import Run
from hansa.runs.experiment import Experiment, RunFactory, config_digest
from hansa.runs.folder import RunFolder
from hansa.runs.options import Callback, RunOptions
from hansa.runs.seed_group import SeedGroupFolder
from hansa.runs.store import ClientStore
from hansa.study.report.progress import InterruptHandler, ProgressDisplay
from hansa.training import TaskLike
from hansa.training.execution_mode import describe_kernels

if TYPE_CHECKING:
    from hansa.study.jobs import Display, RunJob

RECORDED = ("dtype", "quorum", "faults", "max_norm", "profile")
"""The options that affect results."""


def run_in_folder(
    job: RunJob, seed: int, store: ClientStore | None, display: Display, further: Sequence[Callback] = ()
) -> Run:
    """Start the run of a folder, resume it, or return it finished."""
    place = job.folder
    assert place is not None
    if store is not None:
        raise invalid_argument("run", "store", store, "None with out", "The run's folder holds client memory.")
    config, folder = describe_run(job, seed), RunFolder(place.path)
    make = run_factory(job.algorithm, job.task, job.options)
    if not folder.exists or place.overwrite:
        experiment = Experiment.new(config, place.path, overwrite=place.overwrite, run_factory=make)
    else:
        if config_digest(folder.config) != config_digest(config):
            raise folder_taken_error(folder)
        done = int(folder.summary["rounds"])
        if folder.config.rounds > job.rounds and done > job.rounds:
            raise HansaError(f"{folder}: is already at round {done}, past the requested {job.rounds}.")
        experiment = Experiment.resume(
            place.path, rounds=job.rounds, workers=job.options.workers, accept=place.accept, run_factory=make
        )
    return run_to_end(experiment, job.options, display, job.title, further)


def run_to_end(
    experiment: Experiment, options: RunOptions, display: Display, title: str, further: Sequence[Callback] = ()
) -> Run:
    """Run to the last round. Ctrl-C finishes the round, saves everything, and then interrupts the caller."""
    config, done = experiment.config, experiment.run.state.round
    callbacks = list(further)
    if display is not None:
        display.print_once(describe_kernels(experiment.run.task))
        callbacks.append(display.follow(title, config.rounds, done))
    with InterruptHandler(None, (signal.SIGINT,) if display is None else display.signals) as stopper:
        experiment.execute([*callbacks, stopper], first=options.callbacks)
    if stopper.received is not None:
        raise KeyboardInterrupt(f"saved: hansa.resume({str(experiment.folder)!r}) continues the run.")
    return experiment.run


class ResumeJob(NamedTuple):
    """A run in a folder that is to be resumed; or started, if it is a seed of a group that has none yet."""

    path: Path
    config: Config | None
    """The configuration of a seed of a group."""
    to_round: int | None
    """A new last round."""
    title: str
    algorithm: Algorithm | None
    task: TaskLike | None
    options: RunOptions
    fallback: bool
    accept: Sequence[str]
    trust: bool

    @property
    def rounds(self) -> int:
        assert self.config is not None
        return self.config.rounds

    @property
    def size(self) -> float:
        return self.rounds

    @property
    def folder(self) -> Path:
        return self.path

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where it trains."""
        if self.task is not None:
            return self.options.resolve_devices(self.task)
        return resolve_devices(self.options.device or (self.config.device if self.config is not None else "cpu"))

    def run(self, display: Display, further: Sequence[Callback] = ()) -> Run:
        """Run to the last round, with ``further`` callbacks."""
        make = None
        if self.algorithm is not None and self.task is not None:
            make = run_factory(self.algorithm, self.task, self.options)
        if self.config is not None and not RunFolder(self.path).exists:
            experiment = Experiment.new(self.config, self.path, run_factory=make)
        else:
            experiment = Experiment.resume(
                self.path,
                rounds=self.to_round,
                workers=self.options.workers,
                device=None if self.options.device is None else device_names(self.options.device),
                deterministic=self.options.deterministic,
                server_device=None if self.options.server_device is None else str(self.options.server_device),
                fallback=self.fallback,
                accept=self.accept,
                trust=self.trust,
                run_factory=make,
            )
        return run_to_end(experiment, self.options, display, self.title, further)

    def work(self, display: ProgressDisplay) -> None:
        """Execute it in a worker process; the run is in its folder."""
        from hansa.study.run_worker import JobStopped

        if self.run(display).state.round < self.rounds:
            raise JobStopped

    def collect(self, answer: None) -> Run:
        """Return the run that a worker process has executed."""
        return self._replace(fallback=False).run(None)


def device_names(device: Device) -> str | list[str]:
    """Return devices as a configuration names them.

    >>> device_names(["cpu", "cpu"]), device_names("cpu")
    (['cpu', 'cpu'], 'cpu')
    """
    names = [str(each) for each in resolve_devices(device)]
    return names if len(names) > 1 else names[0]


def run_factory(algorithm: Algorithm, task: TaskLike, options: RunOptions) -> RunFactory:
    """Return a function that builds a folder's run from the Python objects."""

    def make(config: Config, store: ClientStore | None, done: int) -> Run:
        engine = auto_engine(options.workers, config.rounds - done, devices=options.resolve_devices(task))
        deterministic = config.deterministic if options.deterministic is None else options.deterministic
        chosen = replace(options, deterministic=deterministic)
        return Run(algorithm, task, seed=config.seed, store=store, engine=engine, options=chosen)

    return make


def describe_run(job: RunJob, seed: int) -> Config:
    """Return the configuration that a folder stores for a run started in Python."""
    assert job.folder is not None
    devices = [str(device) for device in job.options.resolve_devices(job.task)]
    changed = job.options.changed()
    return Config(
        name=job.folder.name if job.folder.name is not None else job.algorithm.name,
        seed=seed,
        rounds=job.rounds,
        device=devices if len(devices) > 1 else devices[0],
        deterministic=job.options.deterministic is not False,
        evaluate=EvaluateSection(every=job.options.evaluate_every),
        checkpoint=CheckpointSection(every=job.folder.checkpoint_every),
        python=PythonSection(
            algorithm=_printed(job.algorithm),
            task=job.task.name,
            options={name: _printed(value) for name, value in changed.items() if name in RECORDED},
            cites=list(citations(job.algorithm)),
        ),
    )


def same_but_for_seed(one: Config, other: Config) -> bool:
    """Return whether two configurations describe the same run apart from the seed."""
    seedless = {"seed": 0, "seeds": None}
    return config_digest(one.model_copy(update=seedless)) == config_digest(other.model_copy(update=seedless))


def folder_taken_error(folder: RunFolder | SeedGroupFolder) -> HansaError:
    """Return the error for a folder that holds a different run."""
    return HansaError(
        f"{folder}: holds a run with a different method, task, seed or option. Choose another folder; overwrite=True, "
        "or in compare overwrite=[NAME], replaces it."
    )


def _printed(value: object) -> str:
    """Return the repr without addresses in memory."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
