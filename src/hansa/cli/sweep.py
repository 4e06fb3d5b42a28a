"""``hansa sweep``: a grid over any keys, a table of results, the best by a metric."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from hansa.cli.console import err, guarded, out
from hansa.cli.run import Quiet, Rounds, Seed, Sets, Workers, changes, follow, read_config

if TYPE_CHECKING:
    from hansa.config import Config


@guarded
def sweep(
    config: Annotated[Path, typer.Argument(help="A YAML file, a preset's name, or MODULE:FUNCTION of yours.")],
    grid: Annotated[list[str], typer.Argument(metavar="KEY=V1,V2,...", help="Keys and the values each is to take.")],
    metric: Annotated[str, typer.Option(help="What is compared, as the mean of its last five.")] = "test_accuracy",
    sets: Sets = None,
    rounds: Rounds = None,
    seed: Seed = None,
    workers: Workers = None,
    folder: Annotated[Path, typer.Option("--out", "-o", help="The folder of the sweep.")] = Path("runs/sweep"),
    quiet: Quiet = False,
) -> None:
    """Run every combination of the given values. A sweep that was stopped goes on where it was."""
    from hansa.cli.progress import Stopper, progress

    asked = changes(sets, rounds, seed, workers)
    found = {name: (point, read_config(config, None, [*asked, *pairs])) for name, point, pairs in points(grid)}
    rows: list[tuple[dict[str, str], dict[str, Any]]] = []
    console = err()
    with Stopper(console) as stopper, progress(console, quiet) as shown:
        for name, (point, asked_for) in found.items():
            rows.append((point, _result(name, asked_for, folder, shown, stopper)))
            if stopper.code:
                console.print("stopped: the same command goes on with the rest.")
                raise typer.Exit(stopper.code)
    ranked = ranking(rows, metric)
    _write(folder / "results.csv", ranked, metric)
    out().print(_table(ranked, metric))
    best = "  ".join(f"--set {key}={value}" for key, value in ranked[0][0].items())
    out().print(f"\nbest: {best}\nresults: {folder / 'results.csv'}", markup=False, soft_wrap=True)


def points(grid: Sequence[str]) -> list[tuple[str, dict[str, str], list[str]]]:
    """Every point of the grid: its name, its values by key, and the changes that make it.

    >>> [name for name, *_ in points(["local.lr=0.1,0.2", "seed=0,1"])]
    ['local.lr=0.1 seed=0', 'local.lr=0.1 seed=1', 'local.lr=0.2 seed=0', 'local.lr=0.2 seed=1']
    """
    from hansa.errors import HansaError

    axes: dict[str, list[str]] = {}
    for word in grid:
        key, equals, values = word.partition("=")
        if not equals or not key or not values:
            raise HansaError(f"{word}: expected KEY=V1,V2,..., such as local.lr=0.01,0.1.")
        if key in axes:
            raise HansaError(f"{word}: {key} stands twice in the grid.")
        axes[key] = split_values(values)
    combined = []
    for choice in itertools.product(*axes.values()):
        point = dict(zip(axes, choice, strict=True))
        pairs = [f"{key}={value}" for key, value in point.items()]
        combined.append((" ".join(pairs), point, pairs))
    return combined


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


def ranking(
    rows: Sequence[tuple[dict[str, str], dict[str, Any]]], metric: str
) -> list[tuple[dict[str, str], dict[str, Any]]]:
    """Best first; runs in which the metric was never measured last."""
    from hansa.errors import HansaError, near
    from hansa.runs.metrics import smaller_is_better

    key = f"last5_{metric}"
    if all(summary.get(key) is None for _, summary in rows):
        known = {name.removeprefix("last5_") for _, s in rows for name in s if name.startswith("last5_")}
        raise HansaError(f"--metric {metric}: no run has it. {near(metric, known)}")
    sign = 1 if smaller_is_better(metric) else -1
    return sorted(rows, key=lambda row: (row[1].get(key) is None, sign * (row[1].get(key) or 0.0)))


def _result(name: str, config: Config, folder: Path, shown: Any, stopper: Any) -> dict[str, Any]:
    """The summary of one point: a finished run of the very same configuration counts, a shorter one is gone on with."""
    from hansa.runs.experiment import Experiment
    from hansa.runs.reuse import made_or_begun

    found = made_or_begun(config.model_copy(update={"name": name}), folder, name)
    return follow(found, shown, stopper) if isinstance(found, Experiment) else found.summary


def _table(ranked: Sequence[tuple[Mapping[str, str], Mapping[str, Any]]], metric: str) -> Table:
    from hansa.report import formats

    table = Table(box=None, pad_edge=False, header_style="dim")
    for key in ranked[0][0]:
        table.add_column(escape(key), no_wrap=True)
    write = formats.percent if metric.endswith("accuracy") else formats.number
    for heading in (metric.replace("_", " "), "best", "sent", "wall time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for place, (point, summary) in enumerate(ranked):
        cells = [
            write(summary.get(f"last5_{metric}")),
            write(summary.get(f"best_{metric}")),
            formats.bits(summary.get("bits")),
            formats.duration(summary.get("wall_seconds")),
        ]
        table.add_row(*map(escape, point.values()), *cells, style="green" if place == 0 else None)
    return table


def _write(path: Path, ranked: Sequence[tuple[Mapping[str, str], Mapping[str, Any]]], metric: str) -> None:
    from hansa.store.io import write_file

    text = io.StringIO()
    columns = [f"last5_{metric}", f"best_{metric}", metric, "rounds", "bits", "wall_seconds", "status"]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*ranked[0][0], *columns])
    writer.writerows([*point.values(), *(summary.get(name, "") for name in columns)] for point, summary in ranked)
    write_file(path, text.getvalue().encode())
