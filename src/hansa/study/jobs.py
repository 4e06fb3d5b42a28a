"""Requested runs, without their seeds: run in memory or in their folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from hansa.algorithm import Algorithm
from hansa.core.errors import HansaError
from hansa.core.types import State, Vector
from hansa.engine import auto_engine
from hansa.rounds.messages import DroppedClient
from hansa.runs.client_record import ClientRecord
from hansa.runs.driver import Run, requires_disk
from hansa.runs.options import Callback, Record, RunOptions
from hansa.runs.store import ClientStore, RamStore
from hansa.training import TaskLike
from hansa.training.execution_mode import describe_kernels

if TYPE_CHECKING:  # a run in memory needs none of these
    from hansa.study.persisted_runs import ResumeJob
    from hansa.study.report.progress import ProgressDisplay

Display: TypeAlias = "ProgressDisplay | None"


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

    def run(
        self, seed: int, display: Display, store: ClientStore | None = None, further: Sequence[Callback] = ()
    ) -> Run:
        """Run one seed, in memory or in its folder, with ``further`` callbacks."""
        if self.folder is not None:
            from hansa.study import persisted_runs

            return persisted_runs.run_in_folder(self, seed, store, display, further)
        run, callbacks = self.new_run(seed, store), list(further)
        if display is not None:
            display.print_once(describe_kernels(self.task))
            callbacks.append(display.follow(self.title, self.rounds))
        return run.advance(self.rounds, [*self.options.callbacks, *callbacks])

    def new_run(self, seed: int, store: ClientStore | None = None) -> Run:
        """Return the run of a seed in memory, before its first round."""
        engine = auto_engine(self.options.workers, self.rounds, devices=self.options.resolve_devices(self.task))
        return Run(self.algorithm, self.task, seed=seed, store=store, engine=engine, options=self.options)

    def seed_jobs(self, seeds: Sequence[int]) -> list[SeedJob]:
        """Return the run of every seed, each in a folder below that of the job."""
        from hansa.runs.seed_group import SeedGroupFolder
        from hansa.study import persisted_runs

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
        return [SeedJob(job, seed) for seed, job in jobs.items()]


class SeedJob(NamedTuple):
    """A requested run with its seed."""

    job: RunJob
    seed: int

    @property
    def title(self) -> str:
        return self.job.title

    @property
    def rounds(self) -> int:
        return self.job.rounds

    @property
    def size(self) -> float:
        return self.rounds

    @property
    def folder(self) -> OutputFolder | None:
        return self.job.folder

    @property
    def options(self) -> RunOptions:
        return self.job.options

    @property
    def algorithm(self) -> Algorithm:
        return self.job.algorithm

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where it trains."""
        return self.job.options.resolve_devices(self.job.task)

    def run(self, display: Display, further: Sequence[Callback] = ()) -> Run:
        """Execute it in this process, with ``further`` callbacks."""
        return self.job.run(self.seed, display, further=further)

    def work(self, display: ProgressDisplay) -> RunContents | None:
        """Execute it in a worker process; return what the run holds, or None if that is in its folder."""
        from hansa.study.run_worker import JobStopped

        run = self.run(display)
        if run.state.round < self.rounds:
            raise JobStopped
        return RunContents.of(run) if self.job.folder is None else None

    def collect(self, contents: RunContents | None) -> Run:
        """Return the run that a worker process has executed."""
        if contents is not None:
            return contents.restore(self.job.new_run(self.seed))
        assert self.job.folder is not None
        finished = self.job._replace(folder=self.job.folder._replace(overwrite=False))
        return finished.run(self.seed, None)


class RunContents(NamedTuple):
    """What a finished run in memory holds, as it travels from the process that executed it."""

    state: State
    history: list[Record]
    store: RamStore
    record: ClientRecord
    dropped: list[tuple[int, DroppedClient]]
    trajectory: list[Vector] | None

    @classmethod
    def of(cls, run: Run) -> RunContents:
        """Return the contents of a run."""
        if not isinstance(run.store, RamStore):
            raise HansaError("the client memory of this run is in a temporary folder of its process.")
        trajectory = list(run.trajectory) if run.options.keep_params else None
        state = run.checkpoint_state()
        return cls(state, list(run.history), run.store, run.client_record, run.dropped_clients, trajectory)

    def restore(self, run: Run) -> Run:
        """Give the contents to a run before its first round."""
        run.store, run.client_record = self.store, self.record
        run.restore(self.state, self.history)
        run.dropped_clients = self.dropped
        run.restore_trajectory(self.trajectory)
        return run


PythonJob: TypeAlias = "SeedJob | ResumeJob"


def run_jobs(jobs: Sequence[PythonJob], display: Display, parallel: int | None) -> list[Run]:
    """Execute runs, side by side where that saves time; return them in order, without the data their seeds drew."""
    from hansa.study.scheduler import StudyScheduler, choose_parallel

    def run_here(job: PythonJob, after_round: Callback) -> Run:
        run = job.run(display, [after_round])
        run.release_data()
        return run

    def collect(job: PythonJob, answer: Any) -> Run:
        run = job.collect(answer)
        run.release_data()
        return run

    first = jobs[0]
    kinds = [device.type for device in first.devices]
    obstacle = _obstacle(first.options)
    if any(each.folder is None and each.algorithm is not None and requires_disk(each.algorithm) for each in jobs):
        obstacle = "client memory is in temporary folders of this process; out=FOLDER keeps it where others find it"
    count = choose_parallel(parallel, len(jobs), first.options.workers, kinds, obstacle=obstacle)
    saved, eager = first.folder is not None, parallel is not None
    scheduler: StudyScheduler[PythonJob, Run] = StudyScheduler(
        jobs, run_here, collect, parallel=count, eager=eager, display=display, saved=saved
    )
    return scheduler.run()


def _obstacle(options: RunOptions) -> str:
    """Return why runs with these options cannot be executed in other processes; "" if they can."""
    if options.callbacks:
        return "callbacks are called in this process"
    own = [measure for measure in options.measures if type(measure).__module__.partition(".")[0] != "hansa"]
    own = [measure for measure in own if getattr(measure, "__module__", "").partition(".")[0] != "hansa"]
    return "measures of your own are called in this process" if own else ""
