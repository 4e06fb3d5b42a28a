"""``hansa sweep``: a grid over any keys, a table of results, the best by a metric over all seeds, a page of curves."""

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

from hansa.cli.console import guarded, out
from hansa.cli.run import Device, Quiet, Rounds, Seed, Seeds, Sets, Workers, changes, read_config
from hansa.cli.run_batch import entries_of

if TYPE_CHECKING:
    from hansa.config import Config
    from hansa.core.errors import HansaError
    from hansa.runs.seed_statistics import Spread
    from hansa.study.report import Entry


class Row(NamedTuple):
    """A point of the grid and what came out there: the means over its seeds, how far these lie apart, and the runs."""

    point: dict[str, str]
    numbers: Mapping[str, Any]
    spreads: Mapping[str, Spread]
    entry: Entry


@guarded
def sweep(
    config: Annotated[Path, typer.Argument(help="A YAML file, a preset's name, or MODULE:FUNCTION of yours.")],
    grid: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=V1,V2,...", help="Keys and the values each is to take; for a search also LOW..HIGH[:log]."
        ),
    ],
    metric: Annotated[str, typer.Option(help="What is compared, as the mean of its last five.")] = "test_accuracy",
    sets: Sets = None,
    rounds: Rounds = None,
    seed: Seed = None,
    seeds: Seeds = None,
    workers: Workers = None,
    device: Device = None,
    folder: Annotated[Path, typer.Option("--out", "-o", help="The folder of the sweep.")] = Path("runs/sweep"),
    report: Annotated[
        Path | None, typer.Option("--report", help="Where the page of curves goes; by default into that folder.")
    ] = None,
    search: Annotated[
        str | None, typer.Option("--search", help="Look for the best point instead of trying all: optuna.")
    ] = None,
    trials: Annotated[int, typer.Option("--trials", help="How many points a search tries.", min=1)] = 20,
    prune: Annotated[bool, typer.Option(help="A search ends runs that lag behind the median.")] = True,
    quiet: Quiet = False,
) -> None:
    """Run every combination of the given values, with every seed. A sweep that was stopped goes on where it was.

    With --search optuna, values are proposed instead, from ranges such as local.lr=1e-3..1:log or among those given.

    Seeds are not chosen among: `seed=0,1,2` in the grid is --seeds 0,1,2, and points are ranked by the means over them.
    """
    from hansa.cli.compare import write_page
    from hansa.runs.seed_statistics import combined

    axes, listed = without_seeds(grid)
    if listed is not None and (seed is not None or seeds is not None):
        raise _twice()
    asked = changes(sets, rounds, seed, workers, listed if seeds is None else seeds, device)
    if search is None:
        made = [(point, name, read_config(config, None, [*asked, *pairs])) for name, point, pairs in points(axes)]
        configs: dict[str, Config | Entry] = {name or each.title: each for _, name, each in made}
        found = list(zip([point for point, *_ in made], entries_of(configs, folder, quiet), strict=True))
        told = ""
    else:
        found, told = _search(search, config, axes, asked, metric, trials, prune, folder, quiet)
    entries = [entry for _, entry in found]
    rows = [Row(point, *combined(entry.histories), entry) for point, entry in found]
    ranked = ranking(rows, metric)
    _write(folder / "results.csv", ranked, metric)
    _write_runs(folder / "runs.csv", ranked, metric)
    page = folder / "report.html" if report is None else report
    write_page(entries, page, title=f"A sweep of {config}")
    out().print(_table(ranked, metric))
    best = "  ".join(f"--set {key}={value}" for key, value in ranked[0].point.items()) or "the only point"
    told += f"\nbest: {best}\nresults: {folder / 'results.csv'}\nreport: {page.resolve().as_uri()}"
    out().print(told, markup=False, soft_wrap=True)


def _search(
    kind: str,
    config: Path,
    axes: Sequence[str],
    asked: Sequence[str],
    metric: str,
    trials: int,
    prune: bool,
    folder: Path,
    quiet: bool,
) -> tuple[list[tuple[dict[str, str], Entry]], str]:
    """The finished points of a search, and how it went."""
    from hansa.cli.search import searched
    from hansa.core.errors import HansaError, invalid_argument

    if kind != "optuna":
        raise invalid_argument("sweep", "search", kind, "optuna")
    made, found = searched(config, axes, asked, metric, trials, prune, folder, quiet)
    if not found:
        raise HansaError(f"{folder}: {made.counts()}: no point was finished. Other ranges, or --no-prune?")
    return found, f"\n{made.counts()}"


def without_seeds(grid: Sequence[str]) -> tuple[list[str], str | None]:
    """The grid without its seeds, and these.

    >>> without_seeds(["local.lr=0.1,0.2", "seed=0,1"])
    (['local.lr=0.1,0.2'], '0,1')
    """
    found = [word.partition("=")[2] for word in grid if word.partition("=")[0] in ("seed", "seeds")]
    if len(found) > 1:
        raise _twice()
    rest = [word for word in grid if word.partition("=")[0] not in ("seed", "seeds")]
    return rest, found[0].strip("[]") + ("" if "," in found[0] else ",") if found else None


def _twice() -> HansaError:
    from hansa.core.errors import HansaError

    return HansaError("seeds stand twice: name them in the grid, or by --seeds.")


def points(grid: Sequence[str]) -> list[tuple[str, dict[str, str], list[str]]]:
    """Every point of the grid: its name, its values by key, and the changes that make it.

    >>> [name for name, *_ in points(["local.lr=0.1,0.2", "local.steps=1,5"])][:3]
    ['local.lr=0.1 local.steps=1', 'local.lr=0.1 local.steps=5', 'local.lr=0.2 local.steps=1']
    """
    from hansa.core.errors import HansaError
    from hansa.runs.search import read_range

    axes: dict[str, list[str]] = {}
    for key, text, values in axis_values(grid):
        if read_range(text) is not None:
            raise HansaError(f"{key}={text}: a range has no end of points: --search optuna draws from it.")
        axes[key] = values
    combined = []
    for choice in itertools.product(*axes.values()):
        point = dict(zip(axes, choice, strict=True))
        pairs = [f"{key}={value}" for key, value in point.items()]
        combined.append((" ".join(pairs), point, pairs))
    return combined


def axis_values(grid: Sequence[str]) -> list[tuple[str, str, list[str]]]:
    """The axes of a grid: the key, what stands there, and its values."""
    from hansa.core.errors import HansaError

    found: dict[str, tuple[str, str, list[str]]] = {}
    for word in grid:
        key, equals, values = word.partition("=")
        if not equals or not key or not values:
            raise HansaError(f"{word}: expected KEY=V1,V2,..., such as local.lr=0.01,0.1.")
        if key in found:
            raise HansaError(f"{word}: {key} stands twice in the grid.")
        found[key] = key, values, split_values(values)
    return list(found.values())


def split_values(text: str) -> list[str]:
    """Values apart at the commas that are not inside brackets.

    >>> split_values("0.1,{kind: cosine, lr: 0.1, rounds: 5},[1,2]")
    ['0.1', '{kind: cosine, lr: 0.1, rounds: 5}', '[1,2]']
    """
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [value.strip() for value in found if value.strip()]


def ranking(rows: Sequence[Row], metric: str) -> list[Row]:
    """Best first, by the mean over seeds; points at which the metric was not measured with every seed last."""
    from hansa.core.errors import HansaError, suggestion
    from hansa.runs.metrics import smaller_is_better

    key = f"last5_{metric}"
    if all(row.numbers.get(key) is None for row in rows):
        known = {name.removeprefix("last5_") for row in rows for name in row.numbers if name.startswith("last5_")}
        raise HansaError(f"--metric {metric}: no run has it. {suggestion(metric, known)}")
    sign = 1 if smaller_is_better(metric) else -1
    return sorted(rows, key=lambda row: (row.numbers.get(key) is None, sign * (row.numbers.get(key) or 0.0)))


def _table(ranked: Sequence[Row], metric: str) -> Table:
    from hansa.study.report import formats

    table = Table(box=None, pad_edge=False, header_style="dim")
    for key in ranked[0].point:
        table.add_column(escape(key), no_wrap=True)
    write = formats.percent if metric.endswith("accuracy") else formats.number
    several = any(row.entry.members for row in ranked)
    for heading in (*(["seeds"] if several else []), metric.replace("_", " "), "best", "sent", "wall time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for place, (point, numbers, spreads, entry) in enumerate(ranked):
        found = [(numbers.get(name), spreads.get(name)) for name in (f"last5_{metric}", f"best_{metric}")]
        cells = [
            *([str(len(entry.runs))] if several else []),
            *(formats.give_or_take(write, mean, apart.deviation if apart else None) for mean, apart in found),
            formats.bits(numbers.get("bits")),
            formats.duration(numbers.get("wall_seconds")),
        ]
        table.add_row(*map(escape, point.values()), *cells, style="green" if place == 0 else None)
    return table


def _columns(metric: str) -> list[str]:
    return [f"last5_{metric}", f"best_{metric}", metric, "rounds", "bits", "wall_seconds"]


def _write(path: Path, ranked: Sequence[Row], metric: str) -> None:
    """A line a point: the means over its seeds; of what is compared also deviation, least and most."""
    found = []
    for point, numbers, spreads, entry in ranked:
        apart = spreads.get(f"last5_{metric}")
        spread = ["", "", ""] if apart is None else [apart.deviation, apart.least, apart.most]
        status = "/".join(dict.fromkeys(str(run.summary.get("status", "")) for run in entry.runs))
        means = [numbers.get(name, "") for name in _columns(metric)]
        found.append([*point.values(), *means, *spread, len(entry.runs), status])
    apart_names = [f"{word}_last5_{metric}" for word in ("deviation", "least", "most")]
    _write_csv(path, [*ranked[0].point, *_columns(metric), *apart_names, "seeds", "status"], found)


def _write_runs(path: Path, ranked: Sequence[Row], metric: str) -> None:
    """A line a run."""
    found = [
        [*row.point.values(), run.seed, *(run.summary.get(name, "") for name in _columns(metric))]
        for row in ranked
        for run in row.entry.runs
    ]
    _write_csv(path, [*ranked[0].point, "seed", *_columns(metric)], found)


def _write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    from hansa.runs.store.io import write_file

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_file(path, text.getvalue().encode())
