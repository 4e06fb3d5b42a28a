"""Options that several commands share, and the configurations that they describe."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

if TYPE_CHECKING:
    from hansa.config import Config

P = ParamSpec("P")
R = TypeVar("R")


def option(panel: str, *names: str, **options: Any) -> Any:
    """Return a typer option in a panel of the help."""
    return typer.Option(*names, rich_help_panel=panel, **options)


setting, execution, output = (partial(option, panel) for panel in ("Configuration", "Execution", "Output"))


Sets = Annotated[
    list[str] | None,
    setting("--set", "-s", metavar="KEY=VALUE", help="Override a configuration key, e.g. local.lr=0.1."),
]
Rounds = Annotated[int | None, setting("--rounds", "-r", help="Number of rounds.", min=1)]
Seed = Annotated[int | None, setting("--seed", help="Random seed.", min=0)]
Seeds = Annotated[
    str | None,
    setting(
        "--seeds",
        metavar="N|A,B,...",
        help="Run several seeds and report their mean: a number of seeds, or a list.",
    ),
]
Workers = Annotated[int | None, execution("--workers", "-w", help="Number of worker processes.", min=1)]
Parallel = Annotated[
    int | None,
    execution(
        "--parallel",
        metavar="N",
        help="Number of runs side by side. By default all cores are used where that saves time; results are the same.",
        min=1,
    ),
]
Device = Annotated[str | None, execution("--device", help="Device: cpu, cuda:0, or several as cuda:0,cuda:1.")]
Deterministic = Annotated[
    bool | None,
    execution(
        "--deterministic/--no-deterministic",
        help="Whether accelerators use deterministic algorithms only (default). No effect on CPUs.",
        show_default=False,
    ),
]
ServerDevice = Annotated[
    str | None,
    execution("--server-device", help="Device of aggregation and of the server's optimizer; cpu by default."),
]
Quiet = Annotated[bool, output("--quiet", "-q", help="Do not show progress.")]
Report = Annotated[Path, output("--report", help="Where to write the report page.")]
Track = Annotated[
    list[str] | None,
    output("--track", help="Also log to tensorboard, mlflow, wandb or trackio. Repeatable."),
]
Accept = Annotated[
    list[str] | None,
    execution(
        "--accept",
        "--accept-changes",
        metavar="KINDS",
        help="Resume although these have changed: data, partition, model, loss, metric, method, version. The change "
        "is recorded.",
    ),
]
Fallback = Annotated[
    bool, execution("--fallback", help="If the latest checkpoint is damaged, use the latest intact one.")
]
Trust = Annotated[
    bool,
    execution("--trust", help="Import code that a run folder names although you did not make it on this machine."),
]
Metric = Annotated[
    str | None,
    output(
        "--metric",
        metavar="NAME[:lower]",
        help="Metric to rank by: any column of the history, with :lower or :higher where its direction is not known. "
        "By default the main metric of the task.",
    ),
]
Window = Annotated[
    int, output("--window", help="How many of the last measurements a score averages; 1 is the final one.", min=1)
]
Target = Annotated[
    float | None,
    output("--target", help="Value for the metric to reach. By default an accuracy that half of the methods reach."),
]
Latex = Annotated[
    Path | None,
    output("--latex", help="Also write the ranking as a LaTeX table, with paired intervals if there are three seeds."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def changes(
    sets: Sequence[str] | None,
    rounds: int | None = None,
    seed: int | None = None,
    workers: int | None = None,
    seeds: str | None = None,
    device: str | None = None,
    deterministic: bool | None = None,
    server_device: str | None = None,
) -> list[str]:
    """Return the overrides of a configuration that a command line asks for.

    >>> changes(["local.lr=0.1"], rounds=3, seeds="0,5", deterministic=True)
    ['local.lr=0.1', 'rounds=3', 'seeds=[0,5]', 'deterministic=true']
    """
    if seed is not None and "," in (seeds or ""):
        from hansa.core.errors import HansaError

        raise HansaError(
            f"--seed {seed}: expected none beside a list, --seeds {seeds}. A number of seeds counts from it."
        )
    short = {"rounds": rounds, "seed": seed, "workers": workers, "seeds": seeds, "device": device}
    short |= {
        "deterministic": None if deterministic is None else str(deterministic).lower(),
        "server_device": server_device,
    }
    texts = {key: str(value) for key, value in short.items() if value is not None}
    return [*(sets or []), *(f"{key}=[{text}]" if "," in text else f"{key}={text}" for key, text in texts.items())]


def parse_devices(device: str | None) -> str | list[str] | None:
    """Return one device, or a list of comma-separated ones.

    >>> parse_devices("cuda:0,cuda:1"), parse_devices("cpu")
    (['cuda:0', 'cuda:1'], 'cpu')
    """
    return device.split(",") if device is not None and "," in device else device


def needs_code(command: Callable[P, R]) -> Callable[P, R]:
    """Let a command import the components that its configurations name; other commands import none."""

    @functools.wraps(command)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        from hansa.config.import_path import allow_code

        with allow_code(trust=bool(options.get("trust"))):
            return command(*arguments, **options)

    return run


def check_trust(path: Path) -> None:
    """Refuse the configuration file of a run folder if code may be imported and the folder is not trusted."""
    from hansa.config.import_path import may_import

    if may_import():
        from hansa.runs.folder import MARKER, RunFolder, SeedGroupFolder

        run, group = RunFolder.containing(path), SeedGroupFolder(path)
        if run.path != path and (run / MARKER).exists():
            run.require_trust()
        elif group.path != path:
            group.require_trust()


def read_config(path: Path | None, preset: str | None, overrides: Sequence[str]) -> Config:
    """Return the configuration of a file, a preset or MODULE:FUNCTION; ``path`` may also be a preset's name."""
    from hansa.config import from_preset, load
    from hansa.config.components import KINDS
    from hansa.core.errors import HansaError, suggestion

    if (path is None) == (preset is None):
        raise HansaError("expected a configuration file, or --preset NAME. `hansa presets` lists the presets.")
    if path is None:
        return from_preset(str(preset), overrides)
    if not path.exists() and KINDS["preset"].knows(str(path)):
        return from_preset(str(path), overrides)
    if not os.path.lexists(path) and not path.suffix and len(path.parts) == 1:
        raise HansaError(f"{path}: not a file or a preset. {suggestion(str(path).lower(), KINDS['preset'].names)}")
    check_trust(path)
    return load(path, overrides)
