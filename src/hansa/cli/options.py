"""Options that several commands share, and the configurations that they describe."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from hansa.core.errors import HansaError

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.runs.folder import RunFolder

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
        help="Number of parallel runs. By default all cores, where forks are safe; results are the same.",
        min=1,
    ),
]
Device = Annotated[str | None, execution("--device", help="Device: cpu, cuda:0, or several as cuda:0,cuda:1.")]
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
    execution("--trust", help="Import the code that a run folder from elsewhere names."),
]
Metric = Annotated[
    str | None,
    output(
        "--metric",
        metavar="NAME[:lower]",
        help="Metric to rank by: any column of the history, with :lower or :higher if its direction is unknown. "
        "By default the main metric of the task.",
    ),
]
Window = Annotated[
    int, output("--window", help="Number of last measurements that a score averages; 1 is the final one.", min=1)
]
Target = Annotated[
    float | None,
    output("--target", help="Target value of the metric. By default an accuracy that half of the methods reach."),
]
Latex = Annotated[
    Path | None,
    output("--latex", help="Also write the ranking as a LaTeX table, with paired intervals if there are three seeds."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def changes(sets: Sequence[str] | None, **keys: object) -> list[str]:
    """Return the configuration overrides of a command line.

    >>> changes(["local.lr=0.1"], rounds=3, seeds="0,5")
    ['local.lr=0.1', 'rounds=3', 'seeds=[0,5]']
    """
    texts = {key: str(value) for key, value in keys.items() if value is not None}
    if "seed" in texts and "," in texts.get("seeds", ""):
        raise HansaError(f"--seed {texts['seed']}: not allowed with a list, --seeds {texts['seeds']}.")
    return [*(sets or []), *(f"{key}=[{text}]" if "," in text else f"{key}={text}" for key, text in texts.items())]


def needs_code(command: Callable[P, R]) -> Callable[P, R]:
    """Let a command import the components that its configurations name; others import none."""

    @functools.wraps(command)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        from hansa.config.import_path import allow_code

        with allow_code(trust=bool(options.get("trust"))):
            return command(*arguments, **options)

    return run


def run_folder(path: Path | str) -> RunFolder | None:
    """Return the run folder at a path, or the first run of a folder of several seeds; None if it is neither."""
    from hansa.runs.folder import RunFolder, SeedGroupFolder

    group = SeedGroupFolder(path)
    folder = group.runs[0] if group.exists and group.runs else RunFolder.containing(path)
    return folder if folder.exists else None


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

    if (path is None) == (preset is None):
        raise HansaError("expected a configuration file, or --preset NAME. `hansa presets` lists the presets.")
    if path is None or (not os.path.lexists(path) and path.suffix not in (".yaml", ".yml") and len(path.parts) == 1):
        return from_preset(str(preset or path), overrides)
    check_trust(path)
    return load(path, overrides)
