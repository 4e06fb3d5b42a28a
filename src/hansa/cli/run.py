"""``hansa run`` and ``hansa resume``, and how the other commands run configurations with all their seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from hansa.cli import options as opt
from hansa.cli.console import FAILED, err, note, report_errors
from hansa.cli.show import print_summary, show_group
from hansa.core.errors import HansaError
from hansa.runs.columns import main_metric

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.runs.experiment import Experiment
    from hansa.runs.options import Callback
    from hansa.runs.run_cache import PlannedRun
    from hansa.runs.seed_group import SeedGroupFolder
    from hansa.study.config_jobs import ConfigJob
    from hansa.study.report import ReportEntry
    from hansa.study.report.progress import InterruptHandler, ProgressDisplay


@report_errors
@opt.needs_code
def run(
    config: Annotated[
        Path | None, typer.Argument(help="Configuration file. `hansa config example` prints one.", show_default=False)
    ] = None,
    preset: Annotated[
        str | None, opt.setting("--preset", "-p", help="Run a preset on the embedded data instead.")
    ] = None,
    sets: opt.Sets = None,
    rounds: opt.Rounds = None,
    seed: opt.Seed = None,
    seeds: opt.Seeds = None,
    workers: opt.Workers = None,
    parallel: opt.Parallel = None,
    device: opt.Device = None,
    deterministic: opt.Deterministic = None,
    server_device: opt.ServerDevice = None,
    engine: Annotated[str | None, opt.execution("--engine", help="Engine: pool, or ray for a cluster.")] = None,
    address: Annotated[
        str | None,
        opt.execution("--address", help="Ray cluster, HOST:PORT or auto. By default a local one is started."),
    ] = None,
    folder: Annotated[
        Path | None, opt.output("--out", "-o", help="Run folder. By default a new folder in runs/.")
    ] = None,
    overwrite: Annotated[bool, opt.output("--overwrite", help="Replace the run in --out.")] = False,
    resume: Annotated[bool, opt.output("--resume", help="Resume the run in --out if there is one.")] = False,
    fallback: opt.Fallback = False,
    accept: opt.Accept = None,
    trust: opt.Trust = False,
    track: opt.Track = None,
    quiet: opt.Quiet = False,
) -> None:
    """Run a configuration or a preset."""
    from hansa.runs.experiment import Experiment
    from hansa.runs.folder import RunFolder, slug
    from hansa.runs.folder_lock import CONFIG
    from hansa.runs.seed_group import GROUP, SeedGroupFolder
    from hansa.runs.trackers import check_trackers

    check_trackers(track or [])
    overrides = opt.changes(sets, rounds, seed, workers, seeds, device, deterministic, server_device)
    overrides += [f"engine.kind={engine}"] if engine else ["engine.kind=ray"] if address else []
    overrides += [f"engine.address={address}"] if address else []
    if resume and overwrite:
        raise HansaError("--resume and --overwrite: expected one of the two.")
    from_folder = config is None and preset is None
    resuming: dict[str, Any] = {"fallback": fallback, "accept": accept or []}
    if resume and folder is not None and RunFolder(folder).exists:
        requested = opt.read_config(folder / CONFIG if from_folder else config, preset, overrides)
        saved = RunFolder(folder).config
        refuse_changed_settings(folder, saved, requested)
        last = requested.rounds if rounds is not None else max(requested.rounds, saved.rounds)
        experiment = Experiment.resume(
            folder,
            rounds=last,
            workers=requested.workers,
            device=requested.device,
            deterministic=requested.deterministic,
            server_device=requested.server_device,
            trust=trust or not from_folder,  # a file of the user names the same code
            **resuming,
        )
        run_and_summarize(experiment, quiet, track or [])
        return
    group = None if folder is None else SeedGroupFolder(folder)
    group_exists = resume and group is not None and group.exists
    requested = opt.read_config(
        group / GROUP if group is not None and group_exists and from_folder else config, preset, overrides
    )
    if requested.seeds is not None or group_exists:
        if group is None:
            group = SeedGroupFolder.create_numbered(Path("runs") / slug(requested.title))
        elif group_exists:
            saved = group.config
            same_seeds = requested.model_copy(update={"seed": saved.seed, "seeds": saved.seeds})
            refuse_changed_settings(group.path, saved, same_seeds)
        else:
            group.check(overwrite=overwrite)
        run_group(requested, group, quiet, track or [], parallel, overwrite=overwrite, **resuming)
        return
    if folder is None:
        experiment = Experiment.new(requested, Path("runs") / slug(requested.title), numbered=True)
    else:
        experiment = Experiment.new(requested, folder, overwrite=overwrite)
    run_and_summarize(experiment, quiet, track or [])


@report_errors
@opt.needs_code
def resume(
    folder: Annotated[Path, typer.Argument(help="Run folder, or the folder of several seeds.")],
    rounds: Annotated[int | None, opt.setting("--rounds", "-r", help="Train up to this round.", min=1)] = None,
    workers: opt.Workers = None,
    parallel: opt.Parallel = None,
    device: opt.Device = None,
    deterministic: opt.Deterministic = None,
    server_device: opt.ServerDevice = None,
    fallback: opt.Fallback = False,
    accept: opt.Accept = None,
    trust: opt.Trust = False,
    track: opt.Track = None,
    quiet: opt.Quiet = False,
) -> None:
    """Resume a run from its last checkpoint.

    The result is bit-identical to that of an uninterrupted run.
    """
    from hansa.runs.experiment import Experiment
    from hansa.runs.seed_group import SeedGroupFolder
    from hansa.runs.trackers import check_trackers

    check_trackers(track or [])
    requested: dict[str, Any] = {
        "rounds": rounds,
        "workers": workers,
        "device": opt.parse_devices(device),
        "deterministic": deterministic,
        "server_device": server_device,
    }
    resuming: dict[str, Any] = {"fallback": fallback, "accept": accept or []}
    group = SeedGroupFolder(folder)
    if group.exists:
        group.require_trust(trust=trust)
        update = {name: value for name, value in requested.items() if value is not None}
        run_group(group.config.model_copy(update=update), group, quiet, track or [], parallel, **resuming)
    else:
        run_and_summarize(Experiment.resume(folder, **requested, **resuming), quiet, track or [])


def refuse_changed_settings(folder: Path, saved: Config, requested: Config) -> None:
    """Refuse to resume with different settings; rounds, workers, engine, devices and determinism may change."""
    from hansa.config import to_dict
    from hansa.runs.trackers import flatten

    before, after = flatten(to_dict(saved)), flatten(to_dict(requested))
    may_change = {"rounds", "workers", "engine", "device", "deterministic", "server_device"}
    keys = sorted(key for key in {*before, *after} if key.partition(".")[0] not in may_change)
    changed = [
        f"{key} is {before.get(key, 'not set')!s:.60}, requested {after.get(key, 'not set')!s:.60}"
        for key in keys
        if before.get(key) != after.get(key)
    ]
    if changed:
        more = f"; and {len(changed) - 8} more" if len(changed) > 8 else ""
        raise HansaError(
            f"{folder}: --resume with different settings: {'; '.join(changed[:8])}{more}. "
            "Use the settings of the run, or start another run."
        )


def run_and_summarize(experiment: Experiment, quiet: bool, track: Sequence[str] = ()) -> None:
    """Run one experiment with progress, print its summary, and exit with the right code."""
    from hansa.study.report.progress import InterruptHandler, progress_display

    if experiment.rounds_left == 0:
        done = experiment.run.state.round
        note(f"{experiment.folder}: already finished at round {done}. Pass --rounds {2 * done} to continue.")
    console = err()
    with InterruptHandler(console) as interrupt, progress_display(console, quiet) as display:
        summary = run_experiment(experiment, display, interrupt, track)
    history = experiment.run.history
    main = main_metric({name for record in history for name in record}, history.facts)
    print_summary(str(experiment.folder), summary, history, main)
    if interrupt.exit_code:
        note(f"interrupted and saved. To resume: hansa resume {experiment.folder}")
        raise typer.Exit(interrupt.exit_code)


def run_experiment(
    experiment: Experiment,
    display: ProgressDisplay,
    interrupt: InterruptHandler,
    track: Sequence[str] = (),
    title: str | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    stopped: bool = False,
) -> dict[str, Any]:
    """Run one experiment until it ends or is interrupted; a failure is reported with its round and folder.

    With ``stopped`` the run was ended early by a callback before, and is only saved.
    """
    from hansa.runs.trackers import build_trackers
    from hansa.training.execution_mode import describe_kernels

    title = experiment.config.title if title is None else title
    display.print_once(describe_kernels(experiment.run.task))
    progress = display.follow(title, experiment.config.rounds, experiment.run.state.round)
    try:
        watchers: list[Callback] = [progress, *build_trackers(track, experiment), *callbacks, interrupt]
        return experiment.execute(watchers, stopped=stopped)
    except HansaError as error:
        failed = experiment.run.state.round + 1
        err().print(f"[bold red]failed[/] in round {failed}: {escape(str(error))}", soft_wrap=True)
        note(f"completed rounds are in {experiment.folder}")
        raise typer.Exit(FAILED) from error


def run_entries(
    requested: Mapping[str, Config | ReportEntry],
    folder: Path,
    quiet: bool,
    *,
    overwrite: bool = False,
    parallel: int | None = None,
) -> list[ReportEntry]:
    """Return an entry for each name: configurations are run unless they are finished; entries are taken as they are."""
    from dataclasses import replace

    from hansa.config import Config
    from hansa.study.report import ReportEntry
    from hansa.study.report.progress import InterruptHandler, progress_display

    configs = {name: item for name, item in requested.items() if isinstance(item, Config)}
    entries = {name: replace(item, name=name) for name, item in requested.items() if isinstance(item, ReportEntry)}
    if configs:  # otherwise nothing needs torch
        console = err()
        with InterruptHandler(console) as interrupt, progress_display(console, quiet) as display:
            display.expect(sum(map(count_rounds, configs.values())))
            plan = partial(plan_below, folder, overwrite=overwrite)
            entries |= run_configs(configs, plan, display, interrupt, parallel, overwrite=overwrite)
    return [entries[name] for name in requested]


def plan_below(folder: Path, name: str, config: Config, *, overwrite: bool = False) -> list[PlannedRun]:
    """Return the runs of a configuration below a folder."""
    from hansa.runs.run_cache import plan_runs

    return plan_runs(config.model_copy(update={"name": name}), folder, name, overwrite=overwrite)


def run_configs(
    configs: Mapping[str, Config],
    plan: Callable[[str, Config], list[PlannedRun]],
    display: ProgressDisplay,
    interrupt: InterruptHandler,
    parallel: int | None = None,
    track: Sequence[str] = (),
    *,
    overwrite: bool = False,
) -> dict[str, ReportEntry]:
    """Run the seeds of every configuration that are not finished, side by side where that saves time.

    Returns an entry for each name. An interrupt ends the command, with everything saved.
    """
    from hansa.engine import reuse_workers
    from hansa.study.config_jobs import ConfigJob, choose_parallel_configs, independent_waves
    from hansa.study.report import ReportEntry
    from hansa.study.scheduler import StudyScheduler

    entries: dict[str, ReportEntry] = {}
    for wave in independent_waves(configs, overwrite=overwrite):
        jobs: dict[str, list[ConfigJob]] = {}
        for name, config in wave.items():
            several = config.seeds is not None
            jobs[name] = [
                ConfigJob(each, f"{each.config.title}, seed {each.config.seed}" if several else each.config.title)
                for each in plan(name, config)
            ]
        every = [job for listed in jobs.values() for job in listed]
        scheduler = StudyScheduler(
            every,
            lambda job, after_round: _run_here(job, after_round, display, interrupt, track),
            lambda job, path: ReportEntry.from_folder(path),
            parallel=choose_parallel_configs(parallel, len(every), wave, bool(track)),
            eager=parallel is not None,
            display=display,
            interrupted=lambda: interrupt.received is not None,
        )
        try:
            with reuse_workers():
                finished = iter(scheduler.run())
        except KeyboardInterrupt:
            if not interrupt.exit_code:
                raise
            note("interrupted and saved. Run the same command to continue.")
            raise typer.Exit(interrupt.exit_code) from None
        for name, listed in jobs.items():
            entries[name] = ReportEntry.from_seeds(name, [next(finished) for _ in listed])
    return {name: entries[name] for name in configs}


def _run_here(
    job: ConfigJob,
    after_round: Callback,
    display: ProgressDisplay,
    interrupt: InterruptHandler,
    track: Sequence[str],
) -> ReportEntry:
    """Run a job in this process unless it is finished; an interrupt ends the command."""
    from hansa.runs.experiment import Experiment
    from hansa.study.report import ReportEntry

    each = job.planned.open()
    if isinstance(each, Experiment):
        run_experiment(each, display, interrupt, track, job.title, [after_round])
        if interrupt.exit_code:
            note(
                f"interrupted and saved. Run the same command to continue, or `hansa resume {each.folder}` to "
                f"resume only {each.config.title}."
            )
            raise typer.Exit(interrupt.exit_code)
        each = each.folder
    else:
        display.skip(each.config.rounds)
    return ReportEntry.from_folder(each.path)


def count_rounds(config: Config) -> int:
    """Return the rounds of all seeds of a configuration."""
    from hansa.runs.seed_group import expand_seeds

    return config.rounds * len(expand_seeds(config))


def run_group(
    config: Config,
    group: SeedGroupFolder,
    quiet: bool,
    track: Sequence[str] = (),
    parallel: int | None = None,
    **options: Any,
) -> None:
    """Run all seeds of a configuration in their folder, and print the combined result."""
    from hansa.runs.run_cache import plan_seed_runs
    from hansa.study.report.progress import InterruptHandler, progress_display

    group.write_config(config)
    console = err()
    with InterruptHandler(console) as interrupt, progress_display(console, quiet) as display:
        display.expect(count_rounds(config))
        plan = partial(plan_seed_runs, config, group, **options)
        entries = run_configs({config.title: config}, lambda *_: plan(), display, interrupt, parallel, track)
    show_group(group, entries[config.title])
