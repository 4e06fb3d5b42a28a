"""``hansa sweep --search optuna``: points are proposed in place of a grid, and those that lag behind are pruned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hansa.cli.console import FAILED, err
from hansa.cli.run import follow, read_config
from hansa.cli.run_batch import entries_of

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.runs.search import Asked, Axis, Search
    from hansa.study.report import Entry
    from hansa.study.report.progress import Bars, Lines, Silence, Stopper


def axes_of(grid: Sequence[str]) -> dict[str, Axis]:
    """The axes of a search: a range, or values to choose among.

    >>> axes_of(["local.lr=1e-3..1:log", "local.steps=5,10"])
    {'local.lr': between(low=0.001, high=1.0, log=True), 'local.steps': ['5', '10']}
    """
    from hansa.cli.sweep import axis_values
    from hansa.runs.search import read_range

    found: dict[str, Any] = {}
    for key, text, values in axis_values(grid):
        found[key] = read_range(text) or values
    return found


def searched(
    config: Path,
    grid: Sequence[str],
    asked: Sequence[str],
    metric: str,
    trials: int,
    prune: bool,
    folder: Path,
    quiet: bool,
) -> tuple[Search, list[tuple[dict[str, str], Entry]]]:
    """Carry out a search, or the rest of it; the points that were finished, with their runs."""
    from hansa.engine import keep_workers
    from hansa.runs.search import DONE, Search
    from hansa.runs.seed_group import per_seed
    from hansa.study.report.progress import Stopper, progress

    base = read_config(config, None, asked)
    seeds = [each.seed for each in per_seed(base)] if base.seeds is not None else [base.seed]
    search = Search(
        axes_of(grid),
        metric,
        seeds=len(seeds),
        rounds=base.rounds,
        seed=base.seed,
        prune=prune,
        folder=folder,
        facts={"asked": list(asked), "of": str(config), "seed_list": seeds},
    )
    console = err()
    with keep_workers(), Stopper(console) as stopper, progress(console, quiet) as shown:
        for trial in search.ask(trials):
            _carry_out(config, trial, asked, folder, shown, stopper)
    points = [written(each.point) for each in search.trials if each.status == DONE]
    done = {" ".join(pairs(point)): point for point in points}
    configs: dict[str, Config | Entry] = {
        name: read_config(config, None, [*asked, *pairs(point)]) for name, point in done.items()
    }
    return search, list(zip(done.values(), entries_of(configs, folder, True), strict=True))


def _carry_out(
    config: Path,
    trial: Asked,
    asked: Sequence[str],
    folder: Path,
    shown: Bars | Lines | Silence,
    stopper: Stopper,
) -> None:
    from hansa.runs.experiment import Experiment
    from hansa.runs.run_cache import each_made_or_begun

    point = pairs(written(trial.point))
    made = read_config(config, None, [*asked, *point])
    name = " ".join(point)
    failed = False
    for each in each_made_or_begun(made.model_copy(update={"name": name}), folder, name):
        trial.next_seed()
        if not isinstance(each, Experiment):
            trial.take(each.history)
        else:
            trial.take(each.run.history)
            title = f"{name}, seed {each.config.seed}" if made.seeds is not None else name
            try:
                follow(each, shown, stopper, title=title, watch=[trial])
            except typer.Exit as end:
                if end.exit_code != FAILED:
                    raise
                failed = True
            if stopper.code:
                err().print("stopped: the same command goes on with the search.", markup=False, soft_wrap=True)
                raise typer.Exit(stopper.code)
        if failed or trial.hopeless:
            break
    trial.tell(failed=failed)


def pairs(point: Mapping[str, str]) -> list[str]:
    """A point as changes to a configuration."""
    return [f"{key}={value}" for key, value in point.items()]


def written(point: Mapping[str, Any]) -> dict[str, str]:
    """A point as it is written on a command line."""
    return {key: value if isinstance(value, str) else repr(value) for key, value in point.items()}
