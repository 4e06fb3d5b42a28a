"""``hansa run`` and ``hansa resume``, and how the other commands run configurations with all their seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from hansa.cli import options as opt
from hansa.cli.console import FAILED, err, note, report_errors
from hansa.cli.show import print_summary, show_group
from hansa.core.errors import HansaError
from hansa.runs.metric_facts import main_metric

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.runs.experiment import Experiment
    from hansa.runs.folder import RunFolder
    from hansa.runs.options import Callback
    from hansa.runs.seed_group import SeedGroupFolder
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
    device: opt.Device = None,
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
    overrides = opt.changes(sets, rounds, seed, workers, seeds, device)
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
        run_group(requested, group, quiet, track or [], overwrite=overwrite, **resuming)
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
    device: opt.Device = None,
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
    requested: dict[str, Any] = {"rounds": rounds, "workers": workers, "device": opt.parse_devices(device)}
    resuming: dict[str, Any] = {"fallback": fallback, "accept": accept or []}
    group = SeedGroupFolder(folder)
    if group.exists:
        group.require_trust(trust=trust)
        update = {name: value for name, value in requested.items() if value is not None}
        run_group(group.config.model_copy(update=update), group, quiet, track or [], **resuming)
    else:
        run_and_summarize(Experiment.resume(folder, **requested, **resuming), quiet, track or [])


def refuse_changed_settings(folder: Path, saved: Config, requested: Config) -> None:
    """Refuse to resume with different settings; rounds, workers, engine and device may change."""
    from hansa.config import to_dict
    from hansa.runs.trackers import flatten

    before, after = flatten(to_dict(saved)), flatten(to_dict(requested))
    keys = sorted({*before, *after} - {"rounds", "workers", "engine", "device"})
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
    requested: Mapping[str, Config | ReportEntry], folder: Path, quiet: bool, *, overwrite: bool = False
) -> list[ReportEntry]:
    """Return an entry for each name: configurations are run unless they are finished; entries are taken as they are."""
    from dataclasses import replace

    from hansa.config import Config
    from hansa.study.report import ReportEntry
    from hansa.study.report.progress import InterruptHandler, progress_display

    if not any(isinstance(item, Config) for item in requested.values()):  # nothing to run: do not import torch
        return [replace(item, name=name) for name, item in requested.items() if isinstance(item, ReportEntry)]
    from hansa.engine import reuse_workers
    from hansa.runs.run_cache import find_or_create_runs

    console = err()
    entries = []
    with reuse_workers(), InterruptHandler(console) as interrupt, progress_display(console, quiet) as display:
        display.expect(sum(count_rounds(item) for item in requested.values() if isinstance(item, Config)))
        for name, item in requested.items():
            if not isinstance(item, Config):
                entries.append(replace(item, name=name))
                continue
            config = item.model_copy(update={"name": name})
            runs = find_or_create_runs(config, folder, name, overwrite=overwrite)
            entries.append(run_each(name, runs, config.seeds is not None, display, interrupt))
    return entries


def run_each(
    name: str,
    runs: Iterable[RunFolder | Experiment],
    several_seeds: bool,
    display: ProgressDisplay,
    interrupt: InterruptHandler,
    track: Sequence[str] = (),
) -> ReportEntry:
    """Run the seeds that are not finished, and return all as one entry; an interrupt ends the command."""
    from hansa.runs.experiment import Experiment
    from hansa.study.report import ReportEntry

    entries = []
    for each in runs:
        if isinstance(each, Experiment):
            config = each.config
            title = f"{config.title}, seed {config.seed}" if several_seeds else config.title
            run_experiment(each, display, interrupt, track, title)
            if interrupt.exit_code:
                note(
                    f"interrupted and saved. Run the same command to continue, or `hansa resume {each.folder}` to "
                    f"resume only {config.title}."
                )
                raise typer.Exit(interrupt.exit_code)
            each = each.folder
        else:
            display.skip(each.config.rounds)
        entries.append(ReportEntry.from_folder(each.path))
    return ReportEntry.from_seeds(name, entries)


def count_rounds(config: Config) -> int:
    """Return the rounds of all seeds of a configuration."""
    from hansa.runs.seed_group import expand_seeds

    return config.rounds * len(expand_seeds(config))


def run_group(
    config: Config,
    group: SeedGroupFolder,
    quiet: bool,
    track: Sequence[str] = (),
    **options: Any,
) -> None:
    """Run all seeds of a configuration in their folder, and print the combined result."""
    from hansa.engine import reuse_workers
    from hansa.runs.run_cache import find_or_create_seed_runs
    from hansa.study.report.progress import InterruptHandler, progress_display

    group.write_config(config)
    console = err()
    with reuse_workers(), InterruptHandler(console) as interrupt, progress_display(console, quiet) as display:
        display.expect(count_rounds(config))
        runs = find_or_create_seed_runs(config, group, **options)
        entry = run_each(config.title, runs, True, display, interrupt, track)
    show_group(group, entry)
