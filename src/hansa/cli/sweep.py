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
from hansa.cli.console import note, out, plain_table, report_errors, say, say_json
from hansa.cli.report import write_latex, write_report
from hansa.cli.run import session
from hansa.core.errors import HansaError, invalid_argument
from hansa.runs.columns import WINDOW, column_of
from hansa.runs.metrics import describe_score
from hansa.study.report import formats

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.runs.columns import MetricFacts
    from hansa.runs.search import Axis, Search
    from hansa.study.report import RankedEntry, ReportEntry
    from hansa.study.session import Session

SEARCH = "Search"


class SweepPoint(NamedTuple):
    """A point of the grid with its results: means over its seeds, their spread, and the runs."""

    values: dict[str, str]
    ranked: RankedEntry


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

    Points are ranked by their mean over seeds. `seed=0,1,2` in the grid is the same as --seeds 0,1,2. Run the same
    command again to continue an interrupted sweep.

    With --search optuna, points are proposed from ranges such as local.lr=1e-3..1:log or from the given values.
    """
    from hansa.runs.columns import scores_test_rows
    from hansa.runs.launch import hold_folder
    from hansa.runs.metrics import facts_of
    from hansa.runs.search import DONE
    from hansa.study.report.ranking import describe_order

    axes, listed = split_seeds(grid)
    if listed is not None and (seed is not None or seeds is not None):
        raise _duplicate_seeds()
    several = listed if seeds is None else seeds
    overrides = opt.changes(sets, rounds, seed, workers, several, device, deterministic, server_device)
    if search not in (None, "optuna"):
        raise invalid_argument("sweep", "search", search, "optuna")
    done = None
    with session(quiet) as running:
        if search is None:
            points = grid_points(axes)
        else:
            how: dict[str, Any] = {"metric": metric, "window": window, "trials": trials, "prune": prune}
            done = run_search(config, parse_axes(axes), overrides, folder, running, parallel=parallel, **how)
            points = [format_point(trial.point) for trial in done.trials if trial.status == DONE]
            if not points:
                raise HansaError(f"{folder}: {done.counts()}: no point finished. Try other ranges, or --no-prune.")
        named = {
            point_name(values): opt.read_config(config, None, [*overrides, *point_changes(values)]) for values in points
        }
        if points == [{}]:
            named = {each.title: each for each in named.values()}
        entries = running.run_reusable(named, folder, parallel)
    values_of = dict(zip(map(point_name, points), points, strict=True))
    finished = list(zip(values_of.values(), entries.values(), strict=True))
    facts = facts_of(finished[0][1].histories[0])
    metric = (facts.tuning or None) if metric is None else metric
    ranked = rank_points(finished, metric, window)
    page = folder / "report.html" if report is None else report
    options: dict[str, Any] = {"metric": metric, "window": window}
    with hold_folder(folder):
        _write_points(folder / "results.csv", ranked)
        _write_runs(folder / "runs.csv", ranked)
        write_report([entry for _, entry in finished], page, title=f"Sweep of {config}", target=target, **options)
    if as_json:
        ranking = [
            {"point": point.values, "seeds": len(point.ranked.entry.runs), **point.ranked.numbers} for point in ranked
        ]
        say_json({"metric": ranked[0].ranked.metric, "points": ranking, "report": str(page)})
        return
    out().print(_points_table(ranked))
    say(f"ranked {describe_order([point.ranked for point in ranked])}", "dim")
    if warning := scores_test_rows(ranked[0].ranked.metric):
        note(warning, "yellow")
    if latex is not None:
        _write_latex(latex, finished, metric, window, target)
    best = "  ".join(f"--set {change}" for change in point_changes(ranked[0].values)) or "the only point"
    message = "" if done is None else f"\n{done.counts()}"
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
    axes: Mapping[str, Axis],
    overrides: Sequence[str],
    folder: Path,
    running: Session,
    *,
    metric: str | None,
    window: int,
    trials: int,
    prune: bool,
    parallel: int | None = None,
) -> Search:
    """Run a search, or resume it; its trials are runs below a folder."""
    from hansa.runs.experiment import config_digest
    from hansa.runs.search import Search
    from hansa.runs.seed_group import expand_seeds
    from hansa.study.session import StudyJob, reusable_jobs

    base = opt.read_config(config, None, overrides)
    seeds = [each.seed for each in expand_seeds(base)] if base.seeds is not None else [base.seed]
    facts = _metric_facts(base)
    search = Search(
        axes,
        facts.tuning if metric is None else metric,
        better=facts.better,
        window=window,
        seeds=len(seeds),
        rounds=base.rounds,
        seed=base.seed,
        prune=prune,
        folder=folder,
        facts={
            "config": config_digest(base),
            "evaluate": base.evaluate.model_dump(mode="json", exclude_defaults=True),
            "links": base.model_dump(mode="json", include={"links"})["links"],
            "seed_list": seeds,
        },
    )

    def plan(point: Mapping[str, Any]) -> list[StudyJob]:
        values = format_point(point)
        name = point_name(values)
        requested = opt.read_config(config, None, [*overrides, *point_changes(values)])
        return reusable_jobs(requested.model_copy(update={"name": name}), folder, name)

    running.run_trials(search, trials, plan, parallel)
    return search


def _metric_facts(config: Config) -> MetricFacts:
    """What the task of a configuration states about its metrics."""
    from hansa.config import build
    from hansa.runs.columns import MetricFacts
    from hansa.runs.seed_group import expand_seeds

    first = expand_seeds(config)[0]
    return MetricFacts.of_task(build.build_task(first, build.load_data(first)))


def format_point(point: Mapping[str, Any]) -> dict[str, str]:
    """Return a point as it is written on the command line."""
    return {key: value if isinstance(value, str) else repr(value) for key, value in point.items()}


def rank_points(
    finished: Sequence[tuple[dict[str, str], ReportEntry]], metric: str | None = None, window: int = WINDOW
) -> list[SweepPoint]:
    """Rank points by their mean over seeds; points without a value for every seed come last."""
    from dataclasses import replace

    from hansa.study.report import rank

    entries = [replace(entry, name=str(place)) for place, (_, entry) in enumerate(finished)]
    return [
        SweepPoint(finished[int(ranked.entry.name)][0], ranked)
        for ranked in rank(entries, metric=metric, window=window)
    ]


def _write_latex(
    path: Path,
    finished: Sequence[tuple[dict[str, str], ReportEntry]],
    metric: str | None,
    window: int,
    target: float | None,
) -> None:
    """Write the ranking of the points, named by their values, as a LaTeX table."""
    from dataclasses import replace

    from hansa.study.report import common_target, rank
    from hansa.study.report.ranking import latex_table

    entries = [replace(entry, name=point_name(values) or entry.name) for values, entry in finished]
    target = common_target(entries, metric) if target is None else target
    write_latex(path, [latex_table(rank(entries, target, metric=metric, window=window), target)])


def _points_table(points: Sequence[SweepPoint]) -> Table:
    first = points[0].ranked
    keys = tuple(map(escape, points[0].values))
    seeds = ("seeds",) if any(point.ranked.entry.members for point in points) else ()
    numbers = _numbers(points)
    headings = [f"{column_of(first.metric).label}\n{describe_score(name)}" for name in numbers]
    table = plain_table(*keys, *seeds, *headings, "sent", "wall time", left=keys, no_wrap=True)
    write = formats.formatter_of(first.metric)
    for place, (values, ranked) in enumerate(points):
        cells = [*map(escape, values.values()), *([str(len(ranked.entry.runs))] if seeds else [])]
        for name in numbers:
            std = ranked.spreads[name].std if name in ranked.spreads else None
            cells.append(formats.format_mean_std(write, ranked.numbers.get(name), std))
        cells.append(formats.format_bits(ranked.numbers.get("bits")))
        cells.append(formats.format_duration(ranked.numbers.get("wall_seconds")))
        table.add_row(*cells, style="green" if place == 0 else None)
    return table


def _numbers(points: Sequence[SweepPoint]) -> list[str]:
    """The numbers of the ranking metric, the one that ranks first."""
    first = points[0].ranked
    return list(dict.fromkeys([first.score, f"best_{first.metric}", first.metric]))


def _columns(points: Sequence[SweepPoint]) -> dict[str, str]:
    """The columns of the files, each with the number of a summary that it has."""
    metric = points[0].ranked.metric
    columns = {f"final_{metric}" if name == metric else name: name for name in _numbers(points)}
    return {**columns, "rounds": "rounds", "bits": "bits", "wall_seconds": "wall_seconds"}


def _write_points(path: Path, points: Sequence[SweepPoint]) -> None:
    """Write one line for each point: means over its seeds, and the spread of the score."""
    columns = _columns(points)
    score = next(iter(columns))
    lines = []
    for values, ranked in points:
        over = ranked.spreads.get(columns[score])
        spread = ["", "", ""] if over is None else [over.std, over.min, over.max]
        status = "/".join(dict.fromkeys(str(run.summary.get("status", "")) for run in ranked.entry.runs))
        means = [ranked.numbers.get(name, "") for name in columns.values()]
        lines.append([*values.values(), *means, *spread, len(ranked.entry.runs), status])
    spread_names = [f"{name}_{score}" for name in ("std", "min", "max")]
    _write_csv(path, [*points[0].values, *columns, *spread_names, "seeds", "status"], lines)


def _write_runs(path: Path, points: Sequence[SweepPoint]) -> None:
    """Write one line for each run."""
    from hansa.runs.metrics import summarize

    columns, window, lines = _columns(points), points[0].ranked.window, []
    stated = f"{points[0].ranked.metric}:{'lower' if points[0].ranked.falls else 'higher'}"
    for values, ranked in points:
        for run in ranked.entry.runs:
            numbers = summarize(run.history, metric=stated, window=window)
            lines.append([*values.values(), run.seed, *(numbers.get(name, "") for name in columns.values())])
    _write_csv(path, [*points[0].values, "seed", *columns], lines)


def _write_csv(path: Path, header: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    from hansa.runs.store.io import write_file

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(lines)
    write_file(path, text.getvalue().encode())
