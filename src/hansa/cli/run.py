"""``hansa run`` and ``hansa resume``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from hansa.cli.console import FAILED, err, guarded, out

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.runs.driver import Callback
    from hansa.runs.experiment import Experiment
    from hansa.runs.seed_statistics import Spread
    from hansa.study.report.progress import Bars, Lines, Silence, Stopper

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a key of the configuration, such as local.lr=0.1."),
]
Rounds = Annotated[int | None, typer.Option("--rounds", "-r", help="Short for --set rounds=...", min=1)]
Seed = Annotated[int | None, typer.Option("--seed", help="Short for --set seed=...", min=0)]
Seeds = Annotated[
    str | None,
    typer.Option("--seeds", metavar="N|A,B,...", help="Several runs as one: how many seeds, or which. --set seeds=..."),
]
Workers = Annotated[int | None, typer.Option("--workers", "-w", help="Short for --set workers=...", min=1)]
Device = Annotated[
    str | None, typer.Option("--device", help="Short for --set device=...: cpu, cuda:0, or cuda:0,cuda:1 in turn.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say only what came out.")]
Accept = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-changes",
        metavar="KINDS",
        help="Go on though these changed since the run was begun: data, partition, model, loss, metric, method, "
        "version. The folder notes it.",
    ),
]
Fallback = Annotated[
    bool, typer.Option("--fallback", help="If the newest checkpoint is damaged, go back to the newest whole one.")
]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", help="Also log to tensorboard, mlflow, wandb or trackio; may be repeated."),
]


@guarded
def run(
    config: Annotated[Path | None, typer.Argument(help="A YAML file; see `hansa config example`.")] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", "-p", help="A method on the embedded data, by name.")
    ] = None,
    sets: Sets = None,
    rounds: Rounds = None,
    seed: Seed = None,
    seeds: Seeds = None,
    workers: Workers = None,
    device: Device = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="Short for --set engine=...: pool, or ray for a cluster.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--address", help="Of a Ray cluster, HOST:PORT or auto; by default one is started here."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", "-o", help="The run's folder; by default a new one below runs/.")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Start anew in a folder that holds a run.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on with the run in --out, if there is one.")] = False,
    fallback: Fallback = False,
    accept: Accept = None,
    track: Track = None,
    quiet: Quiet = False,
) -> None:
    """Run a configuration, or a preset by its name; with --seeds, several times as one result."""
    from hansa.core.errors import HansaError
    from hansa.runs.experiment import Experiment
    from hansa.runs.folder import CONFIG, RunFolder, slug
    from hansa.runs.seed_group import GROUP, GroupFolder
    from hansa.runs.trackers import check

    check(track or [])
    carrier = [f"engine.kind={engine}"] if engine else ["engine.kind=ray"] if address else []
    asked = [
        *changes(sets, rounds, seed, workers, seeds, device),
        *carrier,
        *([f"engine.address={address}"] if address else []),
    ]
    if resume and overwrite:
        raise HansaError("--resume and --overwrite: expected one of the two.")
    if resume and folder is not None and RunFolder(folder).exists:
        here = config is None and preset is None
        read = read_config(folder / CONFIG if here else config, preset, asked)
        then = RunFolder(folder).config
        refuse_differences(folder, then, read)
        experiment = Experiment.resumed(
            folder,
            rounds=read.rounds if rounds is not None else max(read.rounds, then.rounds),
            workers=read.workers,
            device=read.device,
            fallback=fallback,
            accept=accept or [],
        )
        carry_out(experiment, quiet, track or [])
        return
    group = None if folder is None else GroupFolder(folder)
    again = resume and group is not None and group.exists
    here = again and config is None and preset is None
    read = read_config(group / GROUP if here and group is not None else config, preset, asked)
    if read.seeds is not None or again:
        from hansa.cli.run_batch import carry_out_group

        if group is None:
            group = GroupFolder.numbered(Path("runs") / slug(read.title))
        elif again:
            then = group.config
            refuse_differences(group.path, then, read.model_copy(update={"seed": then.seed, "seeds": then.seeds}))
        else:
            group.check(overwrite=overwrite)
        carry_out_group(read, group, quiet, track or [], overwrite=overwrite, fallback=fallback, accept=accept or [])
        return
    if folder is None:
        experiment = Experiment.new(read, Path("runs") / slug(read.title), numbered=True)
    else:
        experiment = Experiment.new(read, folder, overwrite=overwrite)
    carry_out(experiment, quiet, track or [])


@guarded
def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that was stopped, killed, or is to go on.")],
    rounds: Annotated[int | None, typer.Option("--rounds", "-r", help="Go on to this round.", min=1)] = None,
    workers: Annotated[int | None, typer.Option("--workers", "-w", help="Others than before.", min=1)] = None,
    device: Annotated[str | None, typer.Option("--device", help="Another than before; several by commas.")] = None,
    fallback: Fallback = False,
    accept: Accept = None,
    track: Track = None,
    quiet: Quiet = False,
) -> None:
    """Go on with a run, or with all its seeds, exactly where it was: the result is that of one that never stopped."""
    from hansa.runs.experiment import Experiment
    from hansa.runs.seed_group import GroupFolder
    from hansa.runs.trackers import check

    check(track or [])
    group = GroupFolder(folder)
    if group.exists:
        from hansa.cli.run_batch import carry_out_group

        given = {"rounds": rounds, "workers": workers, "device": several(device)}
        asked = {name: value for name, value in given.items() if value is not None}
        config = group.config.model_copy(update=asked)
        carry_out_group(config, group, quiet, track or [], fallback=fallback, accept=accept or [])
        return
    experiment = Experiment.resumed(
        folder, rounds=rounds, workers=workers, device=several(device), fallback=fallback, accept=accept or []
    )
    carry_out(experiment, quiet, track or [])


def changes(
    sets: Sequence[str] | None,
    rounds: int | None = None,
    seed: int | None = None,
    workers: int | None = None,
    seeds: str | None = None,
    device: str | None = None,
) -> list[str]:
    """All changes to a configuration that a command line asks for.

    >>> changes(["local.lr=0.1"], rounds=3, seeds="0,5")
    ['local.lr=0.1', 'rounds=3', 'seeds=[0,5]']
    """
    listed = {
        name: f"[{each}]" if each and "," in each else each for name, each in (("seeds", seeds), ("device", device))
    }
    short = {"rounds": rounds, "seed": seed, "workers": workers, **listed}
    return [*(sets or []), *(f"{key}={value}" for key, value in short.items() if value is not None)]


def several(device: str | None) -> str | list[str] | None:
    """One device, or a list of those between commas.

    >>> several("cuda:0,cuda:1"), several("cpu")
    (['cuda:0', 'cuda:1'], 'cpu')
    """
    return device.split(",") if device is not None and "," in device else device


def refuse_differences(folder: Path, then: Config, now: Config) -> None:
    """A run goes on with the settings it was begun with: others are refused, key by key, but for rounds and workers."""
    from hansa.config import to_data
    from hansa.core.errors import HansaError
    from hansa.runs.trackers import flat

    before, after = flat(to_data(then)), flat(to_data(now))
    keys = sorted({*before, *after} - {"rounds", "workers", "engine", "device"})
    told = [
        f"{key}: {before.get(key, 'not set')!s:.60} there, {after.get(key, 'not set')!s:.60} asked for"
        for key in keys
        if before.get(key) != after.get(key)
    ]
    if told:
        more = f"; and {len(told) - 8} more" if len(told) > 8 else ""
        raise HansaError(
            f"{folder}: --resume with other settings than the run was begun with: {'; '.join(told[:8])}{more}. "
            "Leave them as they were, or begin another run."
        )


def read_config(path: Path | None, preset: str | None, asked: Sequence[str]) -> Config:
    """The configuration of a file or of a preset's name, or MODULE:FUNCTION; a name given as a file is forgiven."""
    from hansa.config import from_preset, load
    from hansa.config.registry import KINDS
    from hansa.core.errors import HansaError, suggestion

    if (path is None) == (preset is None):
        raise HansaError("expected a configuration file, or --preset with a name: `hansa presets` shows them.")
    if path is None:
        return from_preset(str(preset), asked)
    if not path.exists() and KINDS["preset"].knows(str(path)):
        return from_preset(str(path), asked)
    if not os.path.lexists(path) and not path.suffix and len(path.parts) == 1:
        raise HansaError(f"{path}: neither a file nor a preset. {suggestion(str(path).lower(), KINDS['preset'].names)}")
    return load(path, asked)


def carry_out(experiment: Experiment, quiet: bool, track: Sequence[str] = ()) -> None:
    """Run one experiment with its progress shown, print its summary, end with the right code."""
    from hansa.study.report.progress import Stopper, progress

    console = err()
    if experiment.left == 0:
        done = experiment.run.state.round
        console.print(
            f"{experiment.folder}: has finished its {done} rounds; --rounds {2 * done} goes on to round {2 * done}.",
            markup=False,
            soft_wrap=True,
        )
    with Stopper(console) as stopper, progress(console, quiet) as shown:
        summary = follow(experiment, shown, stopper, track)
    out().print(summary_table(str(experiment.folder), summary))
    if stopper.code:
        console.print(f"stopped and saved: `hansa resume {experiment.folder}` goes on.", markup=False, soft_wrap=True)
        raise typer.Exit(stopper.code)


def follow(
    experiment: Experiment,
    shown: Bars | Lines | Silence,
    stopper: Stopper,
    track: Sequence[str] = (),
    title: str | None = None,
    watch: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Run one experiment to its end or to the stop; a failure inside is told with where the run lies."""
    from hansa.core.errors import HansaError
    from hansa.runs.trackers import trackers

    title = experiment.config.title if title is None else title
    done = experiment.run.state.round
    callbacks: list[Callback] = [
        shown.follow(title, experiment.config.rounds, done),
        *trackers(track, experiment),
        *watch,
    ]
    try:
        return experiment.go([*callbacks, stopper])
    except HansaError as error:
        at = experiment.run.state.round + 1
        err().print(f"[bold red]failed[/] in round {at}: {escape(str(error))}", soft_wrap=True)
        err().print(f"what was done is in {experiment.folder}", markup=False, soft_wrap=True)
        raise typer.Exit(FAILED) from error


def summary_table(title: str, summary: Mapping[str, Any], spreads: Mapping[str, Spread] | None = None) -> Table:
    """A run's summary for the terminal; of several seeds, the means with their deviations."""
    from hansa.study.report import formats

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("run", f"[bold]{escape(title)}[/] ({escape(str(summary.get('status', '?')))})")
    written: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
        ("rounds", "rounds", formats.count),
        ("accuracy, mean of last 5", "last5_test_accuracy", formats.percent),
        ("best accuracy", "best_test_accuracy", formats.percent),
        ("mean over clients", "client_accuracy", formats.percent),
        ("worst tenth of clients", "client_accuracy_worst", formats.percent),
        ("deviation over clients", "client_accuracy_std", formats.percent),
        ("after steps of their own", "personal_accuracy", formats.percent),
        ("test loss", "test_loss", formats.number),
        ("global loss", "global_loss", formats.number),
        ("loss", "loss", formats.number),
        ("local loss", "train_loss", formats.number),
        ("sent up", "up_bits", formats.bits),
        ("sent down", "down_bits", formats.bits),
        ("sent to peers", "peer_bits", formats.bits),
        ("simulated time", "simulated_total_seconds", formats.duration),
        ("wall time", "wall_seconds", formats.duration),
        ("clients lost", "lost", formats.count),
    )
    for heading, key, write in written:
        value = summary.get(key)
        if value is not None and not (key in ("peer_bits", "lost") and value == 0):
            apart = (spreads or {}).get(key) if key.endswith(("accuracy", "loss")) else None
            table.add_row(heading, formats.give_or_take(write, value, None if apart is None else apart.deviation))
    if "target" in summary:
        mean, apart = summary.get("rounds_to_target"), (spreads or {}).get("rounds_to_target")
        told = formats.give_or_take(formats.count, mean, None if apart is None else apart.deviation)
        if mean is None and summary.get("reached"):
            told = f"{summary['reached']} runs reached it"
        table.add_row(f"rounds to {formats.percent(summary['target'])}", told)
    for note in summary.get("accepted_changes") or []:
        table.add_row("went on with other", escape(note))
    for reason, count in (summary.get("lost_by_reason") or {}).items():
        table.add_row("", escape(f"{reason}: {count}"))
    return table
