"""``hansa sweep``: run a grid of configurations, or search for the best one, and rank the points over all seeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hansa.cli import options as opt
from hansa.cli.console import note, report_errors, say
from hansa.cli.report import print_and_write
from hansa.cli.run import session
from hansa.core.errors import HansaError, invalid_argument
from hansa.runs.columns import WINDOW

if TYPE_CHECKING:
    from hansa.config import Config

SEARCH = "Search"


@report_errors
@opt.needs_code
def sweep(
    config: Annotated[Path, typer.Argument(help="Configuration file, preset, or MODULE:FUNCTION.")],
    grid: Annotated[
        list[str],
        typer.Argument(metavar="KEY=V1,V2,...", help="Keys and their values; for a search also LOW..HIGH[:log]."),
    ],
    metric: opt.Metric = None,
    window: opt.Window = WINDOW,
    sets: opt.Sets = None,
    rounds: opt.Rounds = None,
    seed: opt.Seed = None,
    seeds: opt.Seeds = None,
    workers: opt.Workers = None,
    parallel: opt.Parallel = None,
    device: opt.Device = None,
    deterministic: opt.Deterministic = None,
    server_device: opt.ServerDevice = None,
    folder: Annotated[Path, opt.output("--out", "-o", help="Folder of the sweep.")] = Path("runs/sweep"),
    report: Annotated[
        Path | None,
        opt.output("--report", help="Where to write the report page. By default in that folder."),
    ] = None,
    target: opt.Target = None,
    latex: opt.Latex = None,
    search: Annotated[
        str | None, opt.option(SEARCH, "--search", help="Search for the best point with this library: optuna.")
    ] = None,
    trials: Annotated[int, opt.option(SEARCH, "--trials", help="Number of points to try.", min=1)] = 20,
    prune: Annotated[bool, opt.option(SEARCH, "--prune/--no-prune", help="Stop points below the median.")] = True,
    trust: opt.Trust = False,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Run every combination of values, or search for the best one.

    Points are ranked by their mean over --seeds. Run the same command again to continue an interrupted sweep.

    With --search optuna, points are proposed from ranges such as local.lr=1e-3..1:log or from the given values.
    """
    from hansa.runs.columns import scores_test_rows
    from hansa.runs.experiment import hold_folder
    from hansa.runs.metrics import facts_of
    from hansa.runs.search import DONE
    from hansa.study import sweep as study

    if search not in (None, "optuna"):
        raise invalid_argument("sweep", "search", search, "optuna")
    axes = study.parse_axes(grid)
    overrides = opt.changes(sets, rounds, seed, workers, seeds, device, deterministic, server_device)

    def configure(point: Mapping[str, Any]) -> Config:
        return opt.read_config(config, None, [*overrides, *study.point_changes(point)])

    done, points = None, [] if search else study.grid_points(axes)
    with session(quiet) as running:
        if search is not None:
            how: dict[str, Any] = {"metric": metric, "window": window, "trials": trials, "prune": prune}
            done = study.run_search(running, configure, axes, folder, parallel=parallel, **how)
            points = [trial.point for trial in done.trials if trial.status == DONE]
            if not points:
                raise HansaError(f"{folder}: {done.counts()}: no point finished. Try other ranges, or --no-prune.")
        configs = {study.point_name(point): configure(point) for point in points}
        values_of: dict[str, Mapping[str, Any]] = {study.point_name(point): point for point in points}
        if "" in configs:  # the only point of no axes
            configs, values_of = {configs[""].title: configs[""]}, {configs[""].title: {}}
        entries = list(running.run_reusable(configs, folder, parallel).values())
    metric = (facts_of(entries[0].histories[0]).tuning or None) if metric is None else metric
    page = folder / "report.html" if report is None else report
    ranked: dict[str, Any] = {"metric": metric, "window": window, "target": target, "latex": latex}
    with hold_folder(folder):
        ranking = print_and_write(entries, page, title=f"Sweep of {config}", as_json=as_json, **ranked)
        study.write_results(folder, ranking, values_of)
    if warning := scores_test_rows(ranking.metric):
        note(warning, "yellow")
    best = "  ".join(f"--set {each}" for each in study.point_changes(values_of[ranking[0].entry.name]))
    message = "" if done is None else f"{done.counts()}\n"
    if not as_json:
        say(f"{message}best: {best or 'the only point'}\nresults: {folder / 'results.csv'}")
