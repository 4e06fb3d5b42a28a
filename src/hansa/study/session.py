"""How the runs of a call are executed: one after the other or side by side, shown, stopped by signals, and saved.

`Session` is what `hansa.run`, `hansa.compare`, `hansa.search`, `hansa.resume`, `hansa.run_config` and the commands have
in common: one display of progress, one handler of signals, one scheduler.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from hansa.config import Config
from hansa.core.errors import HansaError
from hansa.engine import reuse_workers
from hansa.runs.driver import Callback, Record, Run, requires_disk
from hansa.runs.experiment import (
    Experiment,
    IfExists,
    PythonRun,
    digest_name,
    find_folder,
    hold_folder,
    open_run,
    refuse_other_settings,
)
from hansa.runs.folder import FINISHED, RunFolder, SeedGroupFolder, expand_seeds
from hansa.runs.search import RunningTrial, Search
from hansa.runs.store import DamagedFileError
from hansa.runs.trackers import build_trackers
from hansa.study.parallel import JobStopped, StudyScheduler, choose_parallel
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
        shared: Whether other studies may plan the same run: while one executes it, the others wait.
        group: The folder of all seeds, if it is one of several.
        opened: The run, while and after it is executed in this process; None if its folder holds the finished one.
    """

    config: Config
    title: str
    folder: Path | None = None
    if_exists: IfExists = "resume"
    options: Mapping[str, Any] = field(default_factory=dict)
    python: PythonRun | None = None
    callbacks: Sequence[Callback] = ()
    shared: bool = False
    group: Path | None = None
    opened: Experiment | None = None

    @property
    def rounds(self) -> int:
        """Its number of rounds."""
        return self.config.rounds

    @property
    def obstacle(self) -> str:
        """Why it cannot be executed in another process; "" if it can."""
        if self.callbacks:
            return "callbacks are called in this process"
        if self.config.engine.kind != "pool":
            return f"engine {self.config.engine.kind} uses other processes itself"
        for measure in () if self.python is None else self.python.options.measures:
            if not any(str(getattr(of, "__module__", "")).startswith("hansa.") for of in (type(measure), measure)):
                return "measures of your own are called in this process"
        if self.python is not None and self.folder is None and requires_disk(self.python.algorithm):
            return "client memory is in temporary folders of this process; out=FOLDER keeps it where others find it"
        return ""

    def open(self) -> Experiment | None:
        """Open the run before its next round, unless its folder holds the finished one.

        It is an `InUseError` while another process executes the run.
        """
        if self.opened is not None:
            return self.opened
        if self.folder is None:
            assert self.python is not None
            self.opened = Experiment(self.config, self.python(self.config, self.options.get("store")))
            return self.opened
        found = RunFolder(self.folder)
        if self.if_exists == "resume" and found.exists:
            saved = found.config
            if saved.rounds >= self.rounds and found.summary["status"] == FINISHED:
                refuse_other_settings(found.path, saved, self.config)
                return None
        self.opened = open_run(self.config, self.folder, self.if_exists, run_factory=self.python, **self.options)
        return self.opened

    def execute(self, display: ProgressDisplay, callbacks: Sequence[Callback] = (), *, stopped: bool = False) -> None:
        """Execute the run, if it has been opened, as `Experiment.execute` does, and show its progress."""
        if (opened := self.opened) is None:
            display.skip(self.rounds)
        else:
            display.print_once(describe_kernels(opened.run.task))
            progress = display.follow(self.title, opened.config.rounds, opened.began)
            opened.execute([progress, *callbacks], self.callbacks, stopped=stopped)

    def work(self, display: ProgressDisplay) -> Any:
        """Execute it in a worker process; return what a run in memory holds."""
        opened = self.open()
        self.execute(display)
        if opened is not None and opened.rounds_left > 0:
            raise JobStopped
        if opened is None or self.folder is not None:
            return None
        run = opened.run
        saved = run.checkpoint_state(), list(run.history), list(run.trajectory) if run.options.keep_params else None
        return saved, run.store, run.client_blocks, run.dropped_clients

    def collect(self, answer: Any) -> None:
        """Take the run in memory that a worker process has executed, from what `work` has returned."""
        if answer is not None and (opened := self.open()) is not None:
            run = opened.run
            saved, run.store, run.client_blocks, dropped = answer
            run.restore(*saved)
            run.dropped_clients = dropped  # a checkpoint has the last of them only
            run.release_data()

    @property
    def run(self) -> Run:
        """The executed run; one that is only a folder here is restored from it."""
        if self.opened is None:
            assert self.folder is not None
            options = {**self.options, "fallback": False}
            self.opened = open_run(self.config, self.folder, "resume", run_factory=self.python, **options)
            self.opened.execute()
            self.opened.run.release_data()
        return self.opened.run

    @property
    def path(self) -> Path:
        """The folder of the executed run, which may have got a number."""
        assert self.folder is not None
        return self.folder if self.opened is None else self.opened.folder.path

    @property
    def history(self) -> Sequence[Record]:
        """The records of all closed rounds."""
        return RunFolder(self.path).history if self.opened is None else self.opened.run.history


def plan_jobs(
    config: Config,
    folder: Path | str | None,
    if_exists: IfExists = "refuse",
    *,
    python: PythonRun | None = None,
    callbacks: Sequence[Callback] = (),
    shared: bool = False,
    **options: Any,
) -> list[Job]:
    """Plan a run, or those of all its seeds, which are in a common folder.

    Args:
        config: A configuration, with one seed or several.
        folder: The folder of the run, or of the seeds; None for runs in memory.
        if_exists: What happens if the folder holds runs already.
        python: The algorithm and the task of a run started in Python.
        callbacks: Called after each round, before its record is written; those of ``python`` are, too.
        shared: Whether other studies may plan the same runs.
        options: Further arguments of `hansa.runs.experiment.open_run`, or the ``store`` of a run in memory.
    """
    group = None
    if config.seeds is not None and folder is not None:
        group = _start_group(config, Path(folder), if_exists)
        if_exists = "replace" if if_exists == "replace" else "resume"
    if python is not None and folder is not None:
        server = None if (given := python.options.server_device) is None else str(given)
        options = {"workers": python.options.workers, "server_device": server, **options}
    callbacks = callbacks if python is None else python.options.callbacks
    jobs, configs = [], expand_seeds(config)
    for each in configs:
        title = f"{config.title}, seed {each.seed}" if len(configs) > 1 else config.title
        place = folder if group is None else group.run(each.seed).path
        path, above = None if place is None else Path(place), None if group is None else group.path
        jobs.append(Job(each, title, path, if_exists, options, python, callbacks, shared, above))
    return jobs


def _start_group(config: Config, folder: Path, if_exists: IfExists) -> SeedGroupFolder:
    """Return the folder of several seeds, which may hold some of their runs."""
    group = SeedGroupFolder.create_numbered(folder) if if_exists == "new" else SeedGroupFolder(folder)
    if group.exists and if_exists == "resume":
        saved = group.config
        same_seeds = {"seed": saved.seed, "seeds": saved.seeds}
        refuse_other_settings(group.path, saved, config.model_copy(update=same_seeds))
    else:
        group.check(overwrite=if_exists == "replace")
    group.write_config(config)
    return group


def plan_resumed(
    folder: Path | str,
    python: PythonRun | None = None,
    settings: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    trust: bool = False,
    **options: Any,
) -> list[Job]:
    """Plan to resume the run in a folder, or its seeds; those that have not been started are.

    Args:
        folder: The folder of a run, or of several seeds.
        python: For runs started in Python, the objects that they were started with.
        settings: New values of `hansa.runs.experiment.FREE_SETTINGS`; None keeps a value.
        callbacks: Called after each round, before its record is written.
        trust: As the options, an argument of `hansa.runs.experiment.open_run`.
        options: Further arguments.
    """
    given = {name: value for name, value in (settings or {}).items() if value is not None}
    group = SeedGroupFolder(folder)
    if not group.exists:
        opened = open_run(None, folder, "resume", trust=trust, run_factory=python, **options, **given)
        return [opened_job(opened, callbacks)]
    if python is None:
        group.require_trust(trust=trust)
    config = group.config.model_copy(update=given)
    return plan_jobs(config, folder, "resume", python=python, callbacks=callbacks, **options, **given)


def plan_reusable(config: Config, parent: Path | str, name: str, *, extend: bool = True) -> list[Job]:
    """Plan for every seed its run below ``parent``: the finished one, one to resume, or a new one.

    Args:
        config: A configuration, with one seed or several.
        parent: The folder of the runs.
        name: The title of the run, with which the names of folders begin.
        extend: Whether a run of fewer rounds is continued; otherwise it stays, and another one is started.
    """
    with hold_folder(Path(parent)):
        folder = find_folder(config, parent, name, extend=extend)
        return plan_jobs(config, folder, "resume", shared=True, rounds=config.rounds)


def opened_job(experiment: Experiment, callbacks: Sequence[Callback] = ()) -> Job:
    """Return an opened run in a folder as a job."""
    config = experiment.config
    return Job(config, config.title, experiment.folder.path, callbacks=callbacks, opened=experiment)


class Session(ExitStack):
    """A context in which runs are executed, shown and stopped by signals.

    Args:
        progress: Whether to show progress.
        console: Where; by default on standard error.
        signals: The signals that stop runs after their round; by default Ctrl-C, and those that a display asks for.
        saved: Whether runs are saved when they are stopped: then signals stop them after a round, otherwise at once.
        track: The names of trackers that runs in folders are logged to.
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
        """Execute runs; ``parallel`` says how many are under way at once, None chooses it."""
        if len(jobs) > 1 or jobs[0].group is not None:
            self.display.expect(sum(job.rounds for job in jobs))
        self._run(jobs, parallel)

    def _run(self, jobs: Sequence[Job], parallel: int | None = None, trial: RunningTrial | None = None) -> None:
        """Execute runs; a trial stops a run that is pruned."""
        group = jobs[0].group if len({job.group for job in jobs}) == 1 and jobs[0].python is None else None
        alone = len(jobs) == 1 and group is None

        def run_here(job: Job) -> None:
            opened = job.open()
            path = None if opened is None or job.folder is None else job.path
            watching: list[Callback] = [*([] if trial is None else [trial]), self.interrupt]
            if opened is not None and path is not None:
                watching = [*build_trackers(self.track, opened), *watching]
            try:
                job.execute(self.display, watching, stopped=trial is not None and trial.report(job.history))
                if self.interrupt.received is not None:
                    raise KeyboardInterrupt
            except KeyboardInterrupt:
                raise self._interrupted(path, path if alone and job.config.python is None else group) from None
            if opened is not None and not alone:
                opened.run.release_data()

        count = choose_parallel(parallel, jobs, "trackers are called in this process" if self.track else "")
        try:
            StudyScheduler(self, jobs, run_here, count).run()
        except Interrupted:
            raise
        except KeyboardInterrupt:
            raise self._interrupted(None, group) from None

    def _interrupted(self, folder: Path | None, to_resume: object) -> KeyboardInterrupt:
        """Return the error that says how to resume; without a handler of signals, nothing has been saved."""
        if self.interrupt.received is None:
            return KeyboardInterrupt()
        again = "Run the same command or call again to continue."
        how = again if to_resume is None else f"To resume: hansa resume {to_resume}"
        return Interrupted(f"interrupted and saved. {how}", self.interrupt.received, folder)

    def run_reusable(
        self,
        configs: Mapping[str, Config],
        parent: Path,
        parallel: int | None = None,
        *,
        extend: bool = True,
    ) -> dict[str, ReportEntry]:
        """Execute the seeds of several configurations, unless they have finished before, and return their entries.

        Configurations that differ only in rounds continue each other's runs: they are executed in their order.

        Args:
            configs: Configurations by name.
            parent: The folder of their runs.
            parallel: How many runs may be under way at once; None chooses it.
            extend: Whether a run of fewer rounds is continued; otherwise it stays, and another one is started.
        """
        self.display.expect(sum(each.rounds * len(expand_seeds(each)) for each in configs.values()))
        entries: dict[str, ReportEntry] = {}
        left = dict(configs)
        while left:
            first: dict[str, str] = {}  # of those that share a folder
            for name, config in left.items():
                first.setdefault(digest_name("one run" if config.seeds is None else "seeds", config), name)
            jobs = {}
            for name in first.values():
                config = left.pop(name).model_copy(update={"name": name})
                jobs[name] = plan_reusable(config, parent, name, extend=extend)
            self._run([job for listed in jobs.values() for job in listed], parallel)
            for name, listed in jobs.items():  # before others continue these runs
                entries[name] = ReportEntry.from_seeds(name, [ReportEntry.from_folder(job.path) for job in listed])
        return {name: entries[name] for name in configs}

    def run_trials(
        self,
        search: Search,
        trials: int,
        plan: Callable[[Mapping[str, Any]], Sequence[Job]],
        parallel: int | None = None,
    ) -> None:
        """Run the trials of a search until there are this many.

        Args:
            search: Proposes points and records what they are worth.
            trials: The number of trials.
            plan: Returns the runs of a point, one for each seed.
            parallel: How many seeds of a trial run side by side, if trials are not pruned.
        """
        self.display.expect(search.rounds * search.seeds * (trials - len(search.trials)))
        for trial in search.ask(trials):
            jobs = plan(trial.point)
            finished = False
            if not search.prune and len(jobs) > 1 and parallel != 1:
                with suppress(HansaError):  # it is raised again below, by the run that failed
                    self._run(jobs, parallel)
                    finished = True
            failed = False
            for job in jobs:
                trial.next_seed()
                try:
                    if finished:
                        trial.report(job.history)
                    else:
                        job.opened = None
                        self._run([job], 1, trial)
                except DamagedFileError:
                    raise
                except HansaError as error:  # such as a learning rate at which every update is non-finite
                    log.warning("trial %d, %s: %s", trial.number, job.title, error)
                    failed = True
                if failed or trial.pruned:
                    break
            trial.finish(failed=failed)
