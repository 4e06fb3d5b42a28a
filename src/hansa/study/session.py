"""Execution of the runs of a call: sequential or parallel, with progress, signal handling and saving.

`hansa.run`, `hansa.compare`, `hansa.search`, `hansa.resume`, `hansa.run_config` and the commands share `Session`: one
progress display, one signal handler, one scheduler.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from hansa.config import Config
from hansa.core.errors import HansaError
from hansa.engine import reuse_workers
from hansa.runs.driver import Callback, Record, Run, requires_disk
from hansa.runs.experiment import (
    FREE_SETTINGS,
    Experiment,
    PythonRun,
    digest_name,
    find_folder,
    open_run,
    refuse_other_settings,
)
from hansa.runs.folder import FINISHED, IfExists, RunFolder, SeedGroupFolder, expand_seeds
from hansa.runs.search import RunningTrial, Search
from hansa.runs.store import DamagedFileError, io
from hansa.runs.store.io import InUseError
from hansa.runs.trackers import build_trackers
from hansa.study.parallel import StudyScheduler, choose_parallel
from hansa.study.report.entries import ReportEntry
from hansa.study.report.progress import InterruptHandler, ProgressDisplay, progress_display
from hansa.training.execution_mode import describe_kernels

log = logging.getLogger("hansa")


class Interrupted(KeyboardInterrupt):
    """A signal stopped the runs of a call after a round; those in folders are saved. The message says how to resume."""

    def __init__(self, message: str, number: int, folder: Path | None = None) -> None:
        super().__init__(message)
        self.exit_code, self.folder = 128 + number, folder


@dataclass(slots=True, eq=False)
class Job:
    """A run of a study: in memory, or in a folder.

    Args:
        config: What to run.
        title: Its name in the progress display.
        folder: Its folder; None for a run in memory.
        if_exists: What happens if the folder holds a run already.
        options: Further arguments of `hansa.runs.experiment.open_run`.
        python: The algorithm and the task of a run started in Python.
        callbacks: Called after each round, before its record is written.
        group: The folder of all seeds, if the run is one of several.
        opened: The run, once opened in this process; None if its folder holds the finished one.
    """

    config: Config
    title: str
    folder: Path | None = None
    if_exists: IfExists = "resume"
    options: Mapping[str, Any] = field(default_factory=dict)
    python: PythonRun | None = None
    callbacks: Sequence[Callback] = ()
    group: Path | None = None
    opened: Experiment | None = None

    @property
    def obstacle(self) -> str:
        """Why the run cannot be executed in another process; "" if it can."""
        if self.callbacks:
            return "callbacks are called in this process"
        if self.config.engine.kind != "pool":
            return f"engine {self.config.engine.kind} uses other processes itself"
        for measure in () if self.python is None else self.python.options.measures:
            modules = (getattr(part, "__module__", "") for part in (type(measure), measure))
            if not any(str(module).startswith("hansa.") for module in modules):
                return "measures of your own are called in this process"
        if self.python is not None and self.folder is None and requires_disk(self.python.algorithm):
            return "client memory is in temporary folders of this process; out=FOLDER makes it available to others"
        return ""

    def open(self) -> Experiment | None:
        """Open the run before its next round, unless its folder holds the finished one.

        Raises `InUseError` while another process executes the run.
        """
        if self.opened is not None:
            return self.opened
        if self.folder is None:
            assert self.python is not None
            self.opened = Experiment(self.config, self.python(self.config, self.options.get("store")))
            return self.opened
        run_folder = RunFolder(self.folder)
        if self.if_exists == "resume" and run_folder.exists:
            saved = run_folder.config
            if saved.rounds >= self.config.rounds and run_folder.summary["status"] == FINISHED:
                refuse_other_settings(run_folder.path, saved, self.config)
                return None
        self.opened = open_run(self.config, self.folder, self.if_exists, run_factory=self.python, **self.options)
        return self.opened

    def execute(self, display: ProgressDisplay, callbacks: Sequence[Callback] = (), *, stopped: bool = False) -> None:
        """Execute the run, if it has been opened, as `Experiment.execute` does, and show its progress."""
        if (opened := self.opened) is None:
            display.skip(self.config.rounds)
        else:
            display.print_once(describe_kernels(opened.run.task))
            progress = display.follow(self.title, opened.config.rounds, opened.start_round)
            opened.execute([progress, *callbacks], self.callbacks, stopped=stopped)

    def work(self, display: ProgressDisplay, stop: Callback) -> Any:
        """Execute the run in a worker process; return the state of a run in memory that was not stopped."""
        opened = self.open()
        self.execute(display, [stop])
        if opened is None or self.folder is not None or opened.rounds_left:
            return None
        run = opened.run
        saved = run.checkpoint_state(), list(run.history), list(run.trajectory) if run.options.keep_params else None
        return saved, run.store, run.client_blocks, run.dropped_clients

    def collect(self, result: Any) -> None:
        """Restore a run in memory from the result of `work` in a worker process."""
        if result is not None and (opened := self.open()) is not None:
            run = opened.run
            saved, run.store, run.client_blocks, dropped = result
            run.restore(*saved)
            run.dropped_clients = dropped  # a checkpoint has only the last ones
            run.release_data()

    @property
    def run(self) -> Run:
        """The executed run; if another process executed it, restored from its folder."""
        if self.opened is None:
            assert self.folder is not None
            options = {**self.options, "fallback": False}
            self.opened = open_run(self.config, self.folder, "resume", run_factory=self.python, **options)
            self.opened.execute()
            self.opened.run.release_data()
        return self.opened.run

    @property
    def path(self) -> Path:
        """The folder of the executed run, with its number if it has one."""
        assert self.folder is not None
        return self.folder if self.opened is None else self.opened.folder.path

    @property
    def history(self) -> Sequence[Record]:
        """The records of all closed rounds."""
        return RunFolder(self.path).history if self.opened is None else self.opened.run.history


def plan_jobs(
    config: Config | None,
    folder: Path | str | None,
    if_exists: IfExists = "refuse",
    *,
    python: PythonRun | None = None,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> list[Job]:
    """Plan a run, or the runs of all its seeds in a common folder.

    Args:
        config: A configuration, with one seed or several; None resumes what the folder holds, and starts the seeds that
            were not started.
        folder: The folder of the run, or of the seeds; None for runs in memory.
        if_exists: What happens if the folder holds runs already.
        python: The algorithm and the task of a run started in Python.
        callbacks: Called after each round, before its record is written; with ``python``, its callbacks are used.
        options: Further arguments of `hansa.runs.experiment.open_run`, or the ``store`` of a run in memory.
    """
    callbacks = callbacks if python is None else python.options.callbacks
    if config is None:
        assert folder is not None
        saved_group = SeedGroupFolder(folder)
        if not saved_group.exists:
            return [opened_job(open_run(None, folder, "resume", run_factory=python, **options), callbacks)]
        if python is None:
            saved_group.require_trust(trust=options["trust"])
        new = {name: value for name in FREE_SETTINGS if (value := options.get(name)) is not None}
        config, if_exists = saved_group.config.model_copy(update=new), "resume"
    group = None
    if config.seeds is not None and folder is not None:
        group = SeedGroupFolder(io.create_numbered(Path(folder)) if if_exists == "new" else folder)
        if group.exists and if_exists == "resume":
            saved = group.config
            same_seeds = {"seed": saved.seed, "seeds": saved.seeds}
            refuse_other_settings(group.path, saved, config.model_copy(update=same_seeds))
        else:
            group.check_free(overwrite=if_exists == "replace")
        group.write_config(config)
        if_exists = "replace" if if_exists == "replace" else "resume"
    if python is not None and folder is not None:
        server = None if (device := python.options.server_device) is None else str(device)
        options = {"workers": python.options.workers, "server_device": server, **options}
    jobs: list[Job] = []
    for seed_config in (configs := expand_seeds(config)):
        title = f"{config.title}, seed {seed_config.seed}" if len(configs) > 1 else config.title
        path = None if folder is None else Path(folder) if group is None else group.run(seed_config.seed).path
        group_path = None if group is None else group.path
        jobs.append(Job(seed_config, title, path, if_exists, options, python, callbacks, group_path))
    return jobs


def opened_job(experiment: Experiment, callbacks: Sequence[Callback] = ()) -> Job:
    """Return an opened run in a folder as a job."""
    config = experiment.config
    return Job(config, config.title, experiment.folder.path, callbacks=callbacks, opened=experiment)


class Session(ExitStack):
    """A context that executes runs, shows their progress and stops them on signals.

    Args:
        progress: Whether to show progress.
        console: Where to show it; by default on standard error.
        signals: The signals that stop runs after their round; by default Ctrl-C.
        saved: Whether stopped runs are saved: signals then stop them after a round, otherwise at once.
        track: The trackers to which runs in folders are logged.
    """

    def __init__(
        self,
        progress: bool = False,
        *,
        console: Console | None = None,
        signals: Sequence[signal.Signals] = (signal.SIGINT,),
        saved: bool = True,
        track: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.display = progress_display(console, quiet=not progress)
        self.interrupt = InterruptHandler(console, signals if saved else ())
        self.track = list(track)

    def __enter__(self) -> Self:
        self.enter_context(reuse_workers())
        self.enter_context(self.interrupt)
        self.enter_context(self.display)
        return super().__enter__()

    def run_jobs(self, jobs: Sequence[Job], parallel: int | None = None) -> None:
        """Execute runs, at most ``parallel`` at once; None chooses the number."""
        if len(jobs) > 1 or jobs[0].group is not None:
            self.display.expect(sum(job.config.rounds for job in jobs))
        self._run(jobs, parallel)

    def _run(self, jobs: Sequence[Job], parallel: int | None = None, trial: RunningTrial | None = None) -> None:
        """Execute runs; a pruned trial stops its run."""
        first = jobs[0]
        group = first.group if len({job.group for job in jobs}) == 1 and first.python is None else None
        single = len(jobs) == 1 and group is None

        def run_here(job: Job) -> None:
            opened = job.open()
            watching: list[Callback] = [*([] if trial is None else [trial]), self.interrupt]
            if opened is not None and job.folder is not None:
                watching = [*build_trackers(self.track, opened), *watching]
            job.execute(self.display, watching, stopped=trial is not None and trial.report(job.history))
            if self.interrupt.received is not None:
                raise KeyboardInterrupt
            if opened is not None and not single:
                opened.run.release_data()

        count = choose_parallel(parallel, jobs, "trackers are called in this process" if self.track else "")
        try:
            StudyScheduler(self, jobs, run_here, count).run()
        except KeyboardInterrupt:
            if self.interrupt.received is None:  # nothing is saved
                raise
            folder = first.path if single and first.opened is not None and first.folder is not None else None
            to_resume = folder if group is None and first.config.python is None else group
            repeat = "Run the same command or call again to continue."
            hint = repeat if to_resume is None else f"To resume: hansa resume {to_resume}"
            message = f"interrupted and saved. {hint}"
            raise Interrupted(message, self.interrupt.received, folder) from None

    def run_reusable(
        self,
        configs: Mapping[str, Config],
        parent: Path,
        parallel: int | None = None,
        *,
        extend: bool = True,
    ) -> dict[str, ReportEntry]:
        """Execute the unfinished seeds of several configurations, and return the entries of all.

        Configurations that differ only in rounds continue each other's runs and are executed in order.

        Args:
            configs: Configurations by name.
            parent: The folder of their runs.
            parallel: The maximum number of parallel runs; None chooses it.
            extend: Whether a run of fewer rounds is continued; otherwise a new run is started.
        """
        self.display.expect(sum(config.rounds * len(expand_seeds(config)) for config in configs.values()))
        entries: dict[str, ReportEntry] = {}
        pending = dict(configs)
        while pending:
            by_folder: dict[str, str] = {}  # the first name for each folder
            for name, config in pending.items():
                by_folder.setdefault(digest_name("one run" if config.seeds is None else "seeds", config), name)
            jobs = {}
            for name in by_folder.values():
                config = pending.pop(name).model_copy(update={"name": name})
                folder = find_folder(config, parent, name, extend=extend)
                jobs[name] = plan_jobs(config, folder, "resume", rounds=config.rounds)
            self._run([job for seed_jobs in jobs.values() for job in seed_jobs], parallel)
            for name, seed_jobs in jobs.items():  # before others continue these runs
                entries[name] = ReportEntry.from_seeds(name, [ReportEntry.from_folder(job.path) for job in seed_jobs])
        return {name: entries[name] for name in configs}

    def run_trials(
        self,
        search: Search,
        trials: int,
        plan: Callable[[Mapping[str, Any]], Sequence[Job]],
        parallel: int | None = None,
    ) -> None:
        """Run the trials of a search until it has ``trials``.

        Args:
            search: Proposes points and records their values.
            trials: The number of trials.
            plan: Returns the runs of a point, one for each seed.
            parallel: The number of seeds of a trial that run in parallel, if trials are not pruned.
        """
        self.display.expect(search.rounds * search.seeds * (trials - len(search.trials)))
        for trial in search.ask(trials):
            jobs, failed = plan(trial.point), False
            try:
                if not search.prune:
                    self._run(jobs, parallel)
                for job in jobs:
                    trial.next_seed()
                    if search.prune:
                        self._run([job], 1, trial)
                    if trial.report(job.history):
                        break
            except (DamagedFileError, InUseError):
                raise
            except HansaError as error:  # such as a learning rate at which every update is non-finite
                log.warning("trial %d, %s: %s", trial.number, jobs[0].title, error)
                failed = True
            trial.finish(failed=failed)
