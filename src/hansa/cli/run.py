"""``hansa run`` and ``hansa resume``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hansa.cli import options as opt
from hansa.cli.console import err, note
from hansa.cli.show import rank_one, show_numbers
from hansa.core.errors import HansaError

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.runs.folder import IfExists
    from hansa.study.report import ReportEntry
    from hansa.study.session import Job, Session


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
    as_json: opt.AsJson = False,
) -> None:
    """Run a configuration or a preset."""
    from hansa.runs.folder import CONFIG, GROUP, slug
    from hansa.study.session import plan_jobs

    overrides = opt.changes(sets, rounds=rounds, seed=seed, seeds=seeds, workers=workers, device=device)
    overrides += [f"engine.kind={engine}"] if engine else ["engine.kind=ray"] if address else []
    overrides += [f"engine.address={address}"] if address else []
    if resume and overwrite:
        raise HansaError("--resume and --overwrite: expected one of the two.")
    if config is None and preset is None and resume and folder is not None:  # its own configuration
        config = next((folder / name for name in (CONFIG, GROUP) if (folder / name).is_file()), None)
    requested = opt.read_config(config, preset, overrides)
    if_exists: IfExists = "new" if folder is None else "replace" if overwrite else "resume" if resume else "refuse"
    path = Path("runs") / slug(requested.title) if folder is None else folder
    plan = partial(plan_jobs, requested, path, if_exists, rounds=rounds, fallback=fallback, accept=accept or [])
    run_and_show(plan, quiet, track, as_json, parallel)


@opt.needs_code
def resume(
    folder: Annotated[Path, typer.Argument(help="Run folder, or the folder of several seeds.")],
    rounds: Annotated[int | None, opt.setting("--rounds", "-r", help="Train up to this round.", min=1)] = None,
    workers: opt.Workers = None,
    parallel: opt.Parallel = None,
    device: opt.Device = None,
    deterministic: Annotated[
        bool | None, opt.execution("--deterministic/--no-deterministic", help="Deterministic accelerator kernels.")
    ] = None,
    server_device: Annotated[str | None, opt.execution("--server-device", help="Device of the server.")] = None,
    fallback: opt.Fallback = False,
    accept: opt.Accept = None,
    trust: opt.Trust = False,
    track: opt.Track = None,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Resume a run from its last checkpoint.

    The result is bit-identical to that of an uninterrupted run.
    """
    from hansa.study.session import plan_jobs

    devices = device.split(",") if device is not None and "," in device else device
    plan = partial(
        plan_jobs, None, folder, trust=trust, fallback=fallback, accept=accept or [], rounds=rounds,
        workers=workers, device=devices, deterministic=deterministic, server_device=server_device,
    )  # fmt: skip
    run_and_show(plan, quiet, track, as_json, parallel)


def session(quiet: bool, track: Sequence[str] | None = None) -> Session:
    """Return the session of a command: it shows progress on standard error and saves runs on a signal to stop."""
    from hansa.runs.trackers import check_trackers
    from hansa.study.report.progress import SIGNALS
    from hansa.study.session import Session

    check_trackers(track or [])
    return Session(not quiet, console=err(), signals=SIGNALS, track=track or [])


def run_and_show(
    plan: Callable[[], list[Job]],
    quiet: bool,
    track: Sequence[str] | None = None,
    as_json: bool = False,
    parallel: int | None = None,
) -> None:
    """Execute a run, or several seeds, and print the result; also that of a run stopped by a signal."""
    from hansa.study.report import ReportEntry
    from hansa.study.session import Interrupted

    try:
        with session(quiet, track) as running:
            jobs = plan()
            running.run_jobs(jobs, parallel)
    except Interrupted as stop:
        if stop.folder is not None:
            show_numbers(rank_one(ReportEntry.from_folder(stop.folder)), as_json)
        raise
    members = [ReportEntry.from_folder(job.path) for job in jobs]
    opened, rounds = jobs[0].opened, jobs[0].config.rounds
    if jobs[0].group is None and (opened is None or opened.start_round == opened.config.rounds):
        note(f"{members[0].folder}: already finished at round {rounds}. Pass --rounds {2 * rounds} to continue.")
    show_numbers(rank_one(ReportEntry.from_seeds(jobs[0].config.title, members)), as_json)


def run_entries(
    requested: Mapping[str, Config | ReportEntry],
    folder: Path,
    quiet: bool,
    parallel: int | None = None,
) -> list[ReportEntry]:
    """Return an entry for each name; configurations are run unless they are finished."""
    from hansa.config import Config

    configs = {name: item for name, item in requested.items() if isinstance(item, Config)}
    entries = {name: replace(item, name=name) for name, item in requested.items() if not isinstance(item, Config)}
    if configs:  # otherwise nothing needs torch
        with session(quiet) as running:
            entries |= running.run_reusable(configs, folder, parallel)
    return [entries[name] for name in requested]
