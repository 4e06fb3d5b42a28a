"""How the runs of a call are executed: one after the other or side by side, shown, stopped by signals, and saved.

`Session` is what `hansa.run`, `hansa.compare`, `hansa.search`, `hansa.resume`, `hansa.run_config` and the commands have
in common: one display of progress, one handler of signals, one scheduler.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from rich.console import Console

from hansa.config import Config
from hansa.core.devices import resolve_devices
from hansa.core.errors import HansaError
from hansa.core.types import State, Vector
from hansa.engine import reuse_workers
from hansa.rounds.messages import DroppedClient
from hansa.runs.driver import Run, requires_disk
from hansa.runs.experiment import Experiment, config_digest
from hansa.runs.folder import RunFolder
from hansa.runs.launch import IfExists, PlannedRun, factory_of, open_run, plan_reusable_runs, plan_runs
from hansa.runs.options import Callback, PythonRun, Record
from hansa.runs.record import ClientRecord
from hansa.runs.search import Search
from hansa.runs.seed_group import SeedGroupFolder, expand_seeds
from hansa.runs.store import DamagedFileError, RamStore
from hansa.runs.store.lock import InUseError
from hansa.runs.trackers import build_trackers
from hansa.study.parallel import JobStopped, StudyScheduler, choose_parallel
from hansa.study.report.entries import ReportEntry
from hansa.study.report.progress import InterruptHandler, ProgressDisplay, progress_display
from hansa.training.execution_mode import describe_kernels

if TYPE_CHECKING:
    from hansa.study.report.results import Runs

log = logging.getLogger("hansa")

Opened: TypeAlias = "Run | Experiment | RunFolder"
"""A run in memory, a run in its folder, or the folder of a run that has finished before."""
WAIT_SECONDS = 0.5
"""The time between two attempts to open a run that another process executes."""


class Interrupted(KeyboardInterrupt):
    """A signal stopped the runs of a call after a round; those in folders are saved.

    Args:
        message: What to do next.
        number: The signal.
        folder: The folder of the run, if it is one.
    """

    def __init__(self, message: str, number: int, folder: Path | None = None) -> None:
        super().__init__(message)
        self.exit_code, self.folder = 128 + number, folder


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


@dataclass(frozen=True, slots=True)
class StudyJob:
    """A run of a session: in memory, or planned in a folder."""

    title: str
    spec: Config | PythonRun
    planned: PlannedRun | None = None
    """Where it is in a folder; None for a run in memory."""
    callbacks: Sequence[Callback] = ()
    """Called after each round, before its record is written."""

    @classmethod
    def of(cls, experiment: Experiment, callbacks: Sequence[Callback] = ()) -> StudyJob:
        """Return an opened run as a job."""
        config = experiment.config
        return cls(config.title, config, PlannedRun(config, experiment.folder.path), callbacks)

    @property
    def rounds(self) -> int:
        """Its number of rounds."""
        return self.spec.rounds

    @property
    def size(self) -> float:
        """Its work, in rounds."""
        return self.rounds

    @property
    def shared(self) -> bool:
        """Whether other studies may execute the same run."""
        return self.planned is not None and self.planned.shared

    def open(self) -> Opened:
        """Return the run before its next round, or the folder of the finished one."""
        if self.planned is not None:
            return self.planned.open()
        assert isinstance(self.spec, PythonRun)
        return self.spec.start()

    def execute(
        self,
        opened: Opened,
        display: ProgressDisplay,
        callbacks: Sequence[Callback] = (),
        *,
        stopped: bool = False,
    ) -> Opened:
        """Run to the last round, or until a callback stops the run; return what was opened.

        Args:
            opened: The run, or the folder of a finished one.
            display: Shows its progress.
            callbacks: Called after each round, when its record has been written.
            stopped: Whether a callback has stopped the run before: then it is only saved.
        """
        if isinstance(opened, RunFolder):
            display.skip(opened.config.rounds)
            return opened
        run = opened.run if isinstance(opened, Experiment) else opened
        rounds = opened.config.rounds if isinstance(opened, Experiment) else self.rounds
        display.print_once(describe_kernels(run.task))
        watching: list[Callback] = [display.follow(self.title, rounds, run.state.round), *callbacks]
        if isinstance(opened, Experiment):
            opened.execute(watching, self.callbacks, stopped=stopped)
        elif not stopped:
            run.advance(rounds - run.state.round, [*self.callbacks, *watching])
        return opened

    def work(self, display: ProgressDisplay) -> RunContents | Path:
        """Execute it in a worker process; return what the run holds, or its folder."""
        opened = self.execute(self.open(), display)
        if isinstance(opened, RunFolder):
            return opened.path
        if isinstance(opened, Experiment):
            if opened.rounds_left:
                raise JobStopped
            return opened.folder.path
        if opened.state.round < self.rounds:
            raise JobStopped
        return RunContents.of(opened)

    def collect(self, answer: RunContents | Path) -> Opened:
        """Return the run that a worker process has executed."""
        if isinstance(answer, RunContents):
            opened = self.open()
            assert isinstance(opened, Run)
            answer.restore(opened).release_data()
            return opened
        return RunFolder(answer)

    def as_run(self, opened: Opened) -> Run:
        """Return an executed run as a `Run`; one that is only a folder here is restored from it."""
        if isinstance(opened, RunFolder):
            assert self.planned is not None
            opened = self.planned.reopen()
            opened.execute()
            opened.run.release_data()
        return opened.run if isinstance(opened, Experiment) else opened

    @property
    def obstacle(self) -> str:
        """Why it cannot be executed in another process; "" if it can."""
        if self.callbacks:
            return "callbacks are called in this process"
        if isinstance(self.spec, Config):
            kind = self.spec.engine.kind
            return "" if kind == "pool" else f"engine {kind} uses other processes itself"
        for measure in self.spec.options.measures:
            if not any(str(getattr(of, "__module__", "")).startswith("hansa.") for of in (type(measure), measure)):
                return "measures of your own are called in this process"
        if self.planned is None and requires_disk(self.spec.algorithm):
            return "client memory is in temporary folders of this process; out=FOLDER keeps it where others find it"
        return ""

    @property
    def workers(self) -> int | None:
        """The number of workers that it sets."""
        if isinstance(self.spec, PythonRun):
            return self.spec.options.workers
        return 1 if self.spec.workers == "auto" else self.spec.workers

    @property
    def devices(self) -> set[str]:
        """The kinds of devices on which it trains."""
        if isinstance(self.spec, PythonRun):
            return {device.type for device in self.spec.options.resolve_devices(self.spec.task)}
        return {device.type for device in resolve_devices(self.spec.device)}


class Finished(NamedTuple):
    """The executed runs of a configuration, and the folder of its seeds if there are several."""

    jobs: Sequence[StudyJob]
    opened: Sequence[Opened]
    group: SeedGroupFolder | None = None
    repeated: bool = False
    """Whether the run had finished before."""

    @property
    def runs(self) -> list[Run]:
        """The runs, without the data that their seeds drew."""
        return [job.as_run(opened) for job, opened in zip(self.jobs, self.opened, strict=True)]

    def as_runs(self) -> Run | Runs:
        """Return the run, or those of all seeds."""
        if self.group is None:
            return self.jobs[0].as_run(self.opened[0])
        from hansa.study.report.results import Runs

        return Runs(self.group.config.title, self.runs)

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return _path_of(self.opened[0])

    @property
    def entry(self) -> ReportEntry:
        """The runs as an entry of a report."""
        members = [ReportEntry.from_folder(_path_of(each)) for each in self.opened]
        return ReportEntry.from_seeds(members[0].name if self.group is None else self.group.config.title, members)


class Session:
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
        self.display = progress_display(console, quiet=not progress)
        self.interrupt = InterruptHandler(console, signals if saved else ())
        self.track = list(track)
        self._to_resume: Path | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Session:
        self._stack.enter_context(reuse_workers())
        self._stack.enter_context(self.interrupt)
        self._stack.enter_context(self.display)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run_jobs(self, jobs: Sequence[StudyJob], parallel: int | None = None) -> list[Opened]:
        """Execute runs, side by side where that saves time; return them in order.

        Args:
            jobs: The runs.
            parallel: How many runs may be under way at once; None chooses it.
        """
        obstacle = "trackers are called in this process" if self.track else ""
        scheduler = StudyScheduler(
            jobs,
            self._run_here,
            parallel=choose_parallel(parallel, jobs, obstacle),
            eager=parallel is not None,
            display=self.display,
            saved=jobs[0].planned is not None,
            interrupted=lambda: self.interrupt.received is not None,
        )
        try:
            return scheduler.run()
        except KeyboardInterrupt as error:
            if isinstance(error, Interrupted) or self.interrupt.received is None:
                raise
            raise self._interrupted() from None

    def _run_here(self, job: StudyJob, after_round: Callback) -> Opened:
        """Execute a run of several in this process, and free the data that its seed drew."""
        opened = self.run_job(job, job.open(), [after_round])
        if not isinstance(opened, RunFolder):
            (opened.run if isinstance(opened, Experiment) else opened).release_data()
        return opened

    def run_job(
        self, job: StudyJob, opened: Opened, callbacks: Sequence[Callback] = (), *, stopped: bool = False
    ) -> Opened:
        """Execute an opened run in this process; an interrupt ends the session."""
        watching: list[Callback] = [*callbacks, self.interrupt]
        if isinstance(opened, Experiment):
            watching = [*build_trackers(self.track, opened), *watching]
        job.execute(opened, self.display, watching, stopped=stopped)
        if self.interrupt.received is not None:
            raise self._interrupted(opened.folder.path if isinstance(opened, Experiment) else None)
        return opened

    def _interrupted(self, folder: Path | None = None) -> Interrupted:
        assert self.interrupt.received is not None
        place, again = self._to_resume, "Run the same command or call again to continue."
        how = again if place is None else f"To resume: hansa resume {place}"
        return Interrupted(f"interrupted and saved. {how}", self.interrupt.received, folder)

    def run_python(self, jobs: Sequence[StudyJob], parallel: int | None) -> list[Run]:
        """Execute runs of Python and return them in order."""
        return Finished(jobs, self.run_jobs(jobs, parallel)).runs

    def run_config(
        self,
        config: Config,
        folder: Path | str,
        if_exists: IfExists = "refuse",
        callbacks: Sequence[Callback] = (),
        parallel: int | None = None,
        **options: Any,
    ) -> Finished:
        """Execute a configuration with all its seeds in a folder.

        Args:
            config: The configuration.
            folder: The folder of the run, or of its seeds.
            if_exists: What happens if the folder holds runs already.
            callbacks: Called after each round, before its record is written.
            parallel: How many seeds run side by side; None chooses it.
            options: Further arguments of `hansa.runs.launch.open_run`.
        """
        group, planned = plan_runs(config, folder, if_exists, **options)
        jobs = [replace(config_job(each, several=group is not None), callbacks=callbacks) for each in planned]
        if group is None:
            return self.finish(jobs[0], jobs[0].open())
        return self._finish_group(group, jobs, parallel)

    def resume(
        self,
        folder: Path | str,
        spec: PythonRun | None = None,
        settings: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] = (),
        parallel: int | None = None,
        *,
        trust: bool = False,
        **options: Any,
    ) -> Finished:
        """Resume the run in a folder, or its seeds; those that have not been started are.

        Args:
            folder: The folder of a run, or of several seeds.
            spec: For runs started in Python, the objects that they were started with.
            settings: New values of `hansa.runs.launch.FREE_SETTINGS`; None keeps a value.
            callbacks: Called after each round, before its record is written.
            parallel: How many seeds run side by side; None chooses it.
            trust: Import code that the folder names even if this user did not create it on this machine.
            options: Further arguments of `hansa.runs.launch.open_run`.
        """
        given = {name: value for name, value in (settings or {}).items() if value is not None}
        options = {**options, **given, "run_factory": None if spec is None else factory_of(spec)}
        group = SeedGroupFolder(folder)
        if not group.exists:
            experiment = open_run(None, folder, "resume", trust=trust, **options)
            return self.finish(StudyJob.of(experiment, callbacks), experiment)
        if spec is None:
            group.require_trust(trust=trust)
        config = group.config.model_copy(update=given)
        if given:
            group.write_config(config)
        planned = [PlannedRun(each, group.run(each.seed).path, options=options) for each in expand_seeds(config)]
        jobs = [replace(config_job(each, several=True), callbacks=callbacks) for each in planned]
        return self._finish_group(group, jobs, parallel)

    def finish(self, job: StudyJob, opened: Opened) -> Finished:
        """Execute one opened run."""
        if isinstance(opened, Experiment) and opened.config.python is None:
            self._to_resume = opened.folder.path
        repeated = isinstance(opened, RunFolder) or (isinstance(opened, Experiment) and opened.rounds_left == 0)
        return Finished([job], [self.run_job(job, opened)], repeated=repeated)

    def _finish_group(self, group: SeedGroupFolder, jobs: Sequence[StudyJob], parallel: int | None) -> Finished:
        self._to_resume = group.path
        self.display.expect(sum(job.rounds for job in jobs))
        return Finished(jobs, self.run_jobs(jobs, parallel), group)

    def run_reusable(
        self,
        configs: Mapping[str, Config],
        parent: Path,
        parallel: int | None = None,
        *,
        overwrite: bool = False,
        extend: bool = True,
        folder_names: Mapping[str, str] | None = None,
    ) -> dict[str, ReportEntry]:
        """Execute the seeds of several configurations, unless they have finished before, and return their entries.

        Configurations that differ only in rounds continue each other's runs: they are executed in their order.

        Args:
            configs: Configurations by name.
            parent: The folder of their runs.
            parallel: How many runs may be under way at once; None chooses it.
            overwrite: Run all again, in folders with their plain names.
            extend: Whether a run of fewer rounds is continued; otherwise it stays, and another one is started.
            folder_names: With what the names of their folders begin; by default their names.
        """
        self.display.expect(sum(each.rounds * len(expand_seeds(each)) for each in configs.values()))
        entries: dict[str, ReportEntry] = {}
        for wave in independent_waves(configs):
            jobs = {
                name: reusable_jobs(
                    config.model_copy(update={"name": name}),
                    parent,
                    (folder_names or {}).get(name, name),
                    overwrite=overwrite,
                    extend=extend,
                )
                for name, config in wave.items()
            }
            opened = iter(self.run_jobs([job for listed in jobs.values() for job in listed], parallel))
            for name, listed in jobs.items():  # before the next wave continues these runs
                members = [ReportEntry.from_folder(_path_of(next(opened))) for _ in listed]
                entries[name] = ReportEntry.from_seeds(name, members)
        return {name: entries[name] for name in configs}

    def run_trials(
        self,
        search: Search,
        trials: int,
        plan: Callable[[Mapping[str, Any]], Sequence[StudyJob]],
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
            finished: Sequence[Opened] = ()
            if not search.prune and len(jobs) > 1 and parallel != 1:
                with suppress(HansaError):  # it is raised again below, by the run that failed
                    finished = self.run_jobs(jobs, parallel)
            failed = False
            for place, job in enumerate(jobs):
                trial.next_seed()
                opened = None
                try:
                    opened = finished[place] if finished else self._open_shared(job)
                    trial.report(opened.run.history if isinstance(opened, Experiment) else opened.history)
                    if not finished:
                        self.run_job(job, opened, [trial], stopped=trial.pruned)
                except DamagedFileError:
                    raise
                except HansaError as error:  # such as a learning rate at which every update is non-finite
                    log.warning("trial %d, %s: %s", trial.trial.number, job.title, error)
                    failed = True
                if failed or trial.pruned:
                    break
            trial.finish(failed=failed)

    def _open_shared(self, job: StudyJob) -> Opened:
        """Open a run; wait while another process executes it."""
        while True:
            try:
                return job.open()
            except InUseError:
                if not job.shared:
                    raise
            if self.interrupt.received is not None:
                raise self._interrupted()
            time.sleep(WAIT_SECONDS)


def python_jobs(
    spec: PythonRun,
    title: str,
    seeds: Sequence[int] | None,
    out: Path | str | None,
    *,
    overwrite: bool = False,
    accept: Sequence[str] = (),
) -> list[StudyJob]:
    """Return a run of Python, or those of all seeds, as jobs: in memory, or in a folder.

    Args:
        spec: The run, with any seed.
        title: Its name in the progress display.
        seeds: The seeds, each of which has a folder below ``out``; None for the one of ``spec``.
        out: The folder; None for runs in memory.
        overwrite: Replace different runs in the folder, which are otherwise refused.
        accept: Kinds of changes with which runs in the folder are continued.
    """
    how: IfExists = "replace" if overwrite else "resume"
    options = {"rounds": spec.rounds, "workers": spec.options.workers, "accept": list(accept)}
    specs = [spec] if seeds is None else [replace(spec, seed=seed) for seed in seeds]
    titles = [title] if len(specs) == 1 else [f"{title}, seed {each.seed}" for each in specs]
    planned: Sequence[PlannedRun | None] = [None] * len(specs)
    if out is not None:
        planned = plan_runs(spec, out, how, seeds, **options)[1]
    callbacks = spec.options.callbacks
    return [StudyJob(*each, callbacks) for each in zip(titles, specs, planned, strict=True)]


def reusable_jobs(
    config: Config, parent: Path, name: str, *, overwrite: bool = False, extend: bool = True
) -> list[StudyJob]:
    """Return the runs of all seeds of a configuration as jobs; see `hansa.runs.launch.plan_reusable_runs`."""
    planned = plan_reusable_runs(config, parent, name, overwrite=overwrite, extend=extend)
    return [config_job(each, several=config.seeds is not None) for each in planned]


def config_job(planned: PlannedRun, *, several: bool) -> StudyJob:
    """Return a planned run of a configuration as a job; its title names the seed if there are several."""
    config = planned.config
    return StudyJob(f"{config.title}, seed {config.seed}" if several else config.title, config, planned)


def independent_waves(configs: Mapping[str, Config]) -> list[dict[str, Config]]:
    """Split configurations into groups in which no two share a run folder.

    >>> from hansa.config import from_yaml
    >>> short, long, other = (from_yaml(text) for text in ("rounds: 2", "rounds: 4", "local: {lr: 0.5}"))
    >>> [list(wave) for wave in independent_waves({"short": short, "long": long, "other": other})]
    [['short', 'other'], ['long']]
    """
    waves: list[dict[str, Config]] = []
    seen: dict[tuple[str, bool], int] = {}
    for name, config in configs.items():
        several = config.seeds is not None
        key = config_digest(config.model_copy(update={"seed": 0, "seeds": None}) if several else config), several
        place = seen[key] = seen.get(key, -1) + 1
        if place == len(waves):
            waves.append({})
        waves[place][name] = config
    return waves


def _path_of(opened: Opened) -> Path:
    assert not isinstance(opened, Run)
    return opened.folder.path if isinstance(opened, Experiment) else opened.path
