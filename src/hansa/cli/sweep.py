"""``hansa sweep``: run a grid of configurations, or search for the best one, and rank the points over all seeds."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from rich.table import Table

from hansa.cli import options as opt
from hansa.cli.console import FAILED, err, note, out, plain_table, report_errors, say
from hansa.cli.report import write_report
from hansa.cli.run import run_entries, run_experiment
from hansa.core.errors import HansaError, invalid_argument, suggestion
from hansa.runs.columns import lower_is_better
from hansa.study.report import formats

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.runs.search import Axis, RunningTrial, Search
    from hansa.runs.seed_statistics import SeedStatistics
    from hansa.study.report import ReportEntry
    from hansa.study.report.progress import InterruptHandler, ProgressDisplay

SEARCH = "Search"


class SweepPoint(NamedTuple):
    """A point of the grid with its results: means over its seeds, their spread, and the runs."""

    values: dict[str, str]
    numbers: Mapping[str, Any]
    statistics: Mapping[str, SeedStatistics]
    entry: ReportEntry


@report_errors
@opt.needs_code
def sweep(
    config: Annotated[Path, typer.Argument(help="Configuration file, preset, or MODULE:FUNCTION.")],
    grid: Annotated[
        list[str],
        typer.Argument(metavar="KEY=V1,V2,...", help="Keys and their values; for a search also LOW..HIGH[:log]."),
    ],
    metric: Annotated[str, typer.Option(help="Metric to rank by: the mean of its last five values.")] = "test_accuracy",
    sets: opt.Sets = None,
    rounds: opt.Rounds = None,
    seed: opt.Seed = None,
    seeds: opt.Seeds = None,
    workers: opt.Workers = None,
    device: opt.Device = None,
    folder: Annotated[Path, opt.output("--out", "-o", help="Folder of the sweep.")] = Path("runs/sweep"),
    report: Annotated[
        Path | None,
        opt.output("--report", help="Where to write the report page. By default in that folder."),
    ] = None,
    search: Annotated[
        str | None, opt.option(SEARCH, "--search", help="Search for the best point with this library: optuna.")
    ] = None,
    trials: Annotated[int, opt.option(SEARCH, "--trials", help="Number of points to try.", min=1)] = 20,
    prune: Annotated[bool, opt.option(SEARCH, "--prune/--no-prune", help="Stop points below the median.")] = True,
    trust: opt.Trust = False,
    quiet: opt.Quiet = False,
) -> None:
    """Run every combination of values, or search for the best one.

    Points are ranked by their mean over seeds. `seed=0,1,2` in the grid is the same as --seeds 0,1,2. Run the same
    command again to continue an interrupted sweep.

    With --search optuna, points are proposed from ranges such as local.lr=1e-3..1:log or from the given values.
    """
    from hansa.runs.seed_statistics import summarize_seeds

    axes, listed = split_seeds(grid)
    if listed is not None and (seed is not None or seeds is not None):
        raise _duplicate_seeds()
    overrides = opt.changes(sets, rounds, seed, workers, listed if seeds is None else seeds, device)
    message = ""
    if search is None:
        points = [
            (values, opt.read_config(config, None, [*overrides, *point_changes(values)]))
            for values in grid_points(axes)
        ]
        configs: dict[str, Config | ReportEntry] = {point_name(values) or each.title: each for values, each in points}
        entries = run_entries(configs, folder, quiet)
        finished = list(zip([values for values, _ in points], entries, strict=True))
    elif search != "optuna":
        raise invalid_argument("sweep", "search", search, "optuna")
    else:
        done, finished = run_search(config, axes, overrides, metric, trials, prune, folder, quiet)
        if not finished:
            raise HansaError(f"{folder}: {done.counts()}: no point finished. Try other ranges, or --no-prune.")
        message = f"\n{done.counts()}"
    ranked = rank_points([SweepPoint(values, *summarize_seeds(e.histories), e) for values, e in finished], metric)
    _write_points(folder / "results.csv", ranked, metric)
    _write_runs(folder / "runs.csv", ranked, metric)
    page = folder / "report.html" if report is None else report
    write_report([entry for _, entry in finished], page, title=f"Sweep of {config}")
    out().print(_points_table(ranked, metric))
    best = "  ".join(f"--set {change}" for change in point_changes(ranked[0].values)) or "the only point"
    say(f"{message}\nbest: {best}\nresults: {folder / 'results.csv'}\nreport: {page.resolve().as_uri()}")


def split_seeds(grid: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the grid without its seeds, and the seeds.

    >>> split_seeds(["local.lr=0.1,0.2", "seed=0,1"])
    (['local.lr=0.1,0.2'], '0,1')
    """
    seeds = [axis.partition("=")[2] for axis in grid if axis.partition("=")[0] in ("seed", "seeds")]
    if len(seeds) > 1:
        raise _duplicate_seeds()
    rest = [axis for axis in grid if axis.partition("=")[0] not in ("seed", "seeds")]
    return rest, seeds[0].strip("[]") + ("" if "," in seeds[0] else ",") if seeds else None


def _duplicate_seeds() -> HansaError:
    return HansaError("seeds are given twice. Pass them in the grid or with --seeds.")


def grid_points(grid: Sequence[str]) -> list[dict[str, str]]:
    """Return every point of the grid as its values by key.

    >>> [point_name(values) for values in grid_points(["local.lr=0.1,0.2", "local.steps=1,5"])][:2]
    ['local.lr=0.1 local.steps=1', 'local.lr=0.1 local.steps=5']
    """
    from hansa.runs.search import search_range

    axes = parse_axes(grid)
    for key, values in axes.items():
        if isinstance(values, search_range):
            raise HansaError(f"{key}: a grid needs values, not a range. Ranges need --search optuna.")
    return [dict(zip(axes, choice, strict=True)) for choice in itertools.product(*axes.values())]  # type: ignore[arg-type]


def point_changes(values: Mapping[str, str]) -> list[str]:
    """Return a point as overrides of a configuration."""
    return [f"{key}={value}" for key, value in values.items()]


def point_name(values: Mapping[str, str]) -> str:
    """Return the name of a point: its overrides."""
    return " ".join(point_changes(values))


def parse_axes(grid: Sequence[str]) -> dict[str, Axis]:
    """Parse the axes of a grid or a search: a list of values, or a range.

    >>> parse_axes(["local.lr=1e-3..1:log", "local.steps=5,10"])
    {'local.lr': search_range(low=0.001, high=1.0, log=True), 'local.steps': ['5', '10']}
    """
    from hansa.runs.search import parse_range

    axes: dict[str, Axis] = {}
    for axis in grid:
        key, equals, values = axis.partition("=")
        if not equals or not key or not values:
            raise HansaError(f"{axis}: expected KEY=V1,V2,..., such as local.lr=0.01,0.1.")
        if key in axes:
            raise HansaError(f"{axis}: {key} is given twice.")
        axes[key] = parse_range(values) or split_values(values)
    return axes


def split_values(text: str) -> list[str]:
    """Split values at commas that are not inside brackets.

    >>> split_values("0.1,{kind: cosine, lr: 0.1, rounds: 5},[1,2]")
    ['0.1', '{kind: cosine, lr: 0.1, rounds: 5}', '[1,2]']
    """
    values, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values if value.strip()]


def run_search(
    config: Path,
    grid: Sequence[str],
    overrides: Sequence[str],
    metric: str,
    trials: int,
    prune: bool,
    folder: Path,
    quiet: bool,
) -> tuple[Search, list[tuple[dict[str, str], ReportEntry]]]:
    """Run a search, or resume it; return it with the finished points and their runs."""
    from hansa.engine import reuse_workers
    from hansa.runs.search import DONE, Search
    from hansa.runs.seed_group import expand_seeds
    from hansa.study.report.progress import InterruptHandler, progress_display

    base = opt.read_config(config, None, overrides)
    seeds = [each.seed for each in expand_seeds(base)] if base.seeds is not None else [base.seed]
    search = Search(
        parse_axes(grid),
        metric,
        seeds=len(seeds),
        rounds=base.rounds,
        seed=base.seed,
        prune=prune,
        folder=folder,
        facts={"asked": list(overrides), "of": str(config), "seed_list": seeds},
    )
    console = err()
    with reuse_workers(), InterruptHandler(console) as interrupt, progress_display(console, quiet) as display:
        for trial in search.ask(trials):
            name = point_name(format_point(trial.point))
            requested = opt.read_config(config, None, [*overrides, *point_changes(format_point(trial.point))])
            _run_trial(trial, requested.model_copy(update={"name": name}), folder, display, interrupt)
    points = [format_point(each.point) for each in search.trials if each.status == DONE]
    done = {point_name(point): point for point in points}
    configs: dict[str, Config | ReportEntry] = {
        name: opt.read_config(config, None, [*overrides, *point_changes(point)]) for name, point in done.items()
    }
    return search, list(zip(done.values(), run_entries(configs, folder, True), strict=True))


def _run_trial(
    trial: RunningTrial, config: Config, folder: Path, display: ProgressDisplay, interrupt: InterruptHandler
) -> None:
    from hansa.runs.experiment import Experiment
    from hansa.runs.run_cache import find_or_create_runs

    name, failed = config.title, False
    for each in find_or_create_runs(config, folder, name):
        trial.next_seed()
        if not isinstance(each, Experiment):
            trial.report(each.history)
        else:
            trial.report(each.run.history)
            title = f"{name}, seed {each.config.seed}" if config.seeds is not None else name
            try:
                run_experiment(each, display, interrupt, title=title, callbacks=[trial])
            except typer.Exit as end:
                if end.exit_code != FAILED:
                    raise
                failed = True
            if interrupt.exit_code:
                note("interrupted and saved. Run the same command to continue the search.")
                raise typer.Exit(interrupt.exit_code)
        if failed or trial.pruned:
            break
    trial.finish(failed=failed)


def format_point(point: Mapping[str, Any]) -> dict[str, str]:
    """Return a point as it is written on the command line."""
    return {key: value if isinstance(value, str) else repr(value) for key, value in point.items()}


def rank_points(points: Sequence[SweepPoint], metric: str) -> list[SweepPoint]:
    """Rank points by their mean over seeds; points without a value for every seed come last."""
    key = f"last5_{metric}"
    if all(point.numbers.get(key) is None for point in points):
        known = {name.removeprefix("last5_") for p in points for name in p.numbers if name.startswith("last5_")}
        raise HansaError(f"--metric {metric}: no run has it. {suggestion(metric, known)}")
    sign = 1 if lower_is_better(metric) else -1
    return sorted(points, key=lambda point: (point.numbers.get(key) is None, sign * (point.numbers.get(key) or 0.0)))


def _points_table(ranked: Sequence[SweepPoint], metric: str) -> Table:
    keys = tuple(map(escape, ranked[0].values))
    seeds = ("seeds",) if any(point.entry.members for point in ranked) else ()
    table = plain_table(*keys, *seeds, metric.replace("_", " "), "best", "sent", "wall time", left=keys, no_wrap=True)
    write = formats.formatter_of(metric)
    for place, (values, numbers, statistics, entry) in enumerate(ranked):
        cells = [*map(escape, values.values()), *([str(len(entry.runs))] if seeds else [])]
        for name in (f"last5_{metric}", f"best_{metric}"):
            std = statistics[name].std if name in statistics else None
            cells.append(formats.format_mean_std(write, numbers.get(name), std))
        cells += [formats.format_bits(numbers.get("bits")), formats.format_duration(numbers.get("wall_seconds"))]
        table.add_row(*cells, style="green" if place == 0 else None)
    return table


def _columns(metric: str) -> list[str]:
    return [f"last5_{metric}", f"best_{metric}", metric, "rounds", "bits", "wall_seconds"]


def _write_points(path: Path, ranked: Sequence[SweepPoint], metric: str) -> None:
    """Write one line for each point: means over its seeds, and the spread of the metric."""
    lines = []
    for values, numbers, statistics, entry in ranked:
        over = statistics.get(f"last5_{metric}")
        spread = ["", "", ""] if over is None else [over.std, over.min, over.max]
        status = "/".join(dict.fromkeys(str(run.summary.get("status", "")) for run in entry.runs))
        means = [numbers.get(name, "") for name in _columns(metric)]
        lines.append([*values.values(), *means, *spread, len(entry.runs), status])
    spread_names = [f"{name}_last5_{metric}" for name in ("std", "min", "max")]
    _write_csv(path, [*ranked[0].values, *_columns(metric), *spread_names, "seeds", "status"], lines)


def _write_runs(path: Path, ranked: Sequence[SweepPoint], metric: str) -> None:
    """Write one line for each run."""
    lines = [
        [*point.values.values(), run.seed, *(run.summary.get(name, "") for name in _columns(metric))]
        for point in ranked
        for run in point.entry.runs
    ]
    _write_csv(path, [*ranked[0].values, "seed", *_columns(metric)], lines)


def _write_csv(path: Path, header: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    from hansa.runs.store.io import write_file

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(lines)
    write_file(path, text.getvalue().encode())
