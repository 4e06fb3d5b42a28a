"""Requested runs, without their seeds: run in memory or in their folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from hansa.algorithm import Algorithm
from hansa.core.devices import Device, resolve_devices
from hansa.engine import auto_engine
from hansa.runs.driver import Run
from hansa.runs.options import Callback, RunOptions
from hansa.runs.store import ClientStore
from hansa.training import TaskLike
from hansa.training.execution_mode import describe_kernels

if TYPE_CHECKING:  # a run in memory needs none of these
    from hansa.study.report.progress import ProgressDisplay
    from hansa.study.report.results import Runs

Display: TypeAlias = "ProgressDisplay | None"


def device_names(device: Device) -> str | list[str]:
    """Return devices as a configuration names them.

    >>> device_names(["cpu", "cpu"]), device_names("cpu")
    (['cpu', 'cpu'], 'cpu')
    """
    names = [str(each) for each in resolve_devices(device)]
    return names if len(names) > 1 else names[0]


class OutputFolder(NamedTuple):
    """The folder in which a run is stored."""

    path: Path
    name: str | None
    overwrite: bool
    checkpoint_every: int
    accept: Sequence[str] = ()


class RunJob(NamedTuple):
    """A requested run, without its seed."""

    algorithm: Algorithm
    task: TaskLike
    rounds: int
    options: RunOptions
    title: str
    folder: OutputFolder | None

    def run(self, seed: int, display: Display, store: ClientStore | None = None) -> Run:
        """Run one seed, in memory or in its folder."""
        if self.folder is not None:
            from hansa.study import persisted_runs

            return persisted_runs.run_in_folder(self, seed, store, display)
        engine = auto_engine(self.options.workers, self.rounds, devices=self.options.resolve_devices(self.task))
        run = Run(self.algorithm, self.task, seed=seed, store=store, engine=engine, options=self.options)
        callbacks: list[Callback] = []
        if display is not None:
            display.print_once(describe_kernels(self.task))
            callbacks.append(display.follow(self.title, self.rounds))
        return run.advance(self.rounds, [*self.options.callbacks, *callbacks])

    def run_seeds(self, seeds: Sequence[int], display: Display) -> Runs:
        """Run every seed, each in a folder below that of the job."""
        from hansa.runs.seed_group import SeedGroupFolder
        from hansa.study import persisted_runs
        from hansa.study.report.results import Runs

        jobs = {seed: self if len(seeds) == 1 else self._replace(title=f"{self.title}, seed {seed}") for seed in seeds}
        if self.folder is not None:
            group = SeedGroupFolder(self.folder.path)
            config = persisted_runs.describe_run(self, seeds[0]).model_copy(update={"seeds": list(seeds)})
            if not group.exists:
                group.check()
            elif not self.folder.overwrite and not persisted_runs.same_but_for_seed(group.config, config):
                raise persisted_runs.folder_taken_error(group)
            group.write_config(config)
            jobs = {
                seed: job._replace(folder=self.folder._replace(path=group.run(seed).path)) for seed, job in jobs.items()
            }
        return Runs(self.title, [job.run(seed, display) for seed, job in jobs.items()])
