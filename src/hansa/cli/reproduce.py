"""``hansa reproduce``: published tables and figures, each one command with a verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from hansa.cli.console import err, guarded, out
from hansa.cli.run import Quiet, Seeds, Sets, Workers

if TYPE_CHECKING:
    from hansa.study.recipes import Recipe
    from hansa.study.recipes.outcome import Result
    from hansa.study.report import Entry

STYLES = {"agrees": "green", "differs": "yellow", "same order": "cyan"}


@guarded
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Recipes by name, a paper's (cams, hafed, afga, aware), or YAML files of recipes."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every recipe, one after the other.")] = False,
    scale: Annotated[
        str,
        typer.Option(help="smoke: seconds, shows that it runs. cpu: reduced, some minutes on two cores. paper: whole."),
    ] = "cpu",
    seeds: Seeds = None,
    sets: Sets = None,
    workers: Workers = None,
    folder: Annotated[Path, typer.Option("--out", "-o", help="Where runs and results are kept.")] = Path(
        "runs/reproduce"
    ),
    export: Annotated[
        Path | None,
        typer.Option("--export", help="Also write text, numbers, curves, figures and configurations into this folder."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Train what a published table or figure shows and set our numbers beside the published ones.

    Without a name: the list of all recipes. What has been run is not run again, also where two recipes share it; the
    same command goes on after any interruption.
    """
    from hansa.core.errors import HansaError, suggestion
    from hansa.study.recipes import SCALES, library, named

    if scale not in SCALES:
        raise HansaError(f"--scale {scale}: expected smoke, cpu or paper. {suggestion(scale, SCALES)}")
    if everything and names:
        raise HansaError(f"--all and {names[0]}: expected one of the two.")
    if not everything and not names:
        _list(list(library().values()))
        return
    chosen = list(library().values()) if everything else [recipe for word in names or [] for recipe in named(word)]
    chosen = list({recipe.name: recipe for recipe in chosen}.values())
    results = [
        _one(recipe, scale, seeds, sets, workers, folder / scale, export, quiet, len(chosen) > 1) for recipe in chosen
    ]
    page = _keep(results, folder / scale)
    if len(results) > 1:
        out().print(_summary(results))
    out().print(f"\npage: {page.resolve().as_uri()}", markup=False, soft_wrap=True)


def _one(
    recipe: Recipe,
    scale: str,
    seeds: str | None,
    sets: Sequence[str] | None,
    workers: int | None,
    place: Path,
    export: Path | None,
    quiet: bool,
    several: bool,
) -> Result:
    from hansa.core.errors import HansaError
    from hansa.study.recipes.outcome import Result

    if not quiet:
        told = recipe.at(scale).reduces
        err().print(f"{recipe.name}: {recipe.says}", markup=False, soft_wrap=True, style="bold")
        err().print(f"scale {scale}. {told}", markup=False, soft_wrap=True, style="dim")
    try:
        result = _carried_out(recipe, scale, seeds, sets, workers, place, export, quiet)
    except HansaError as error:
        if not several:
            raise
        result = Result(recipe, scale, why_not=str(error).splitlines()[0])
        err().print(f"{recipe.name}: not run: {result.why_not}", style="yellow", markup=False, soft_wrap=True)
        return result
    show(result)
    return result


def _carried_out(
    recipe: Recipe,
    scale: str,
    seeds: str | None,
    sets: Sequence[str] | None,
    workers: int | None,
    place: Path,
    export: Path | None,
    quiet: bool,
) -> Result:
    import yaml

    from hansa.cli.compare import write_page
    from hansa.cli.run import changes
    from hansa.cli.run_batch import carry_out_each
    from hansa.config import from_text
    from hansa.engine import keep_workers
    from hansa.runs.run_cache import each_made_or_begun
    from hansa.study.recipes import compare
    from hansa.study.recipes.outcome import HEADINGS, Result, tables
    from hansa.study.recipes.publish import Trained, publish
    from hansa.study.report import Entry, Grid
    from hansa.study.report.progress import Stopper, progress

    asked = changes(list(sets or []), None, None, workers, seeds)
    cells = list(recipe.cells(scale))
    configs = [from_text(yaml.safe_dump(cell.document), asked, f"{recipe.name}, {cell.label}") for cell in cells]
    entries: list[Entry] = []
    with keep_workers(), Stopper(err()) as stopper, progress(err(), quiet) as shown:
        for cell, config in zip(cells, configs, strict=True):
            titled = config.model_copy(update={"name": cell.label})
            made = each_made_or_begun(titled, place / "runs", config.algorithm.preset)
            runs = carry_out_each(made, config.seeds is not None, shown, stopper)
            entries.append(Entry.of_seeds(cell.label, [Entry.of_folder(run.path) for run in runs]))
    page = place / f"{recipe.name}.html"
    histories = {(cell.row, cell.column): entry.histories for cell, entry in zip(cells, entries, strict=True)}
    result = Result(recipe, scale, *compare(recipe, scale, histories), page=page.name)
    grids = [Grid(f"Beside the paper: {title}", HEADINGS, rows, result.verdict) for title, rows in tables(result)]
    write_page(entries, page, title=f"{recipe.name}: {recipe.where}", lead=recipe.says, published=grids)
    if export is not None:
        publish(result, list(map(Trained, cells, configs, entries)), export)
    return result


def _keep(results: Sequence[Result], place: Path) -> Path:
    from hansa.runs.store.io import make_folder, write_file
    from hansa.study.recipes.outcome import page

    make_folder(place.absolute())
    for result in results:
        text = json.dumps(result.record, indent=1, ensure_ascii=False) + "\n"
        write_file(place / f"{result.recipe.name}.json", text.encode())
    target = place / ("reproduced.html" if len(results) > 1 else f"{results[0].recipe.name}-verdict.html")
    write_file(target, page(results).encode())
    return target


def show(result: Result) -> None:
    """The tables and claims of a recipe on the terminal."""
    from hansa.study.recipes.outcome import HEADINGS, claim_word, tables
    from hansa.study.recipes.verdict import rule

    console = out()
    console.print(f"\n{result.recipe.name}, {result.recipe.where}", style="bold", markup=False)
    for title, rows in tables(result):
        table = Table(box=None, pad_edge=False, header_style="dim")
        for place, heading in enumerate((title, *HEADINGS[1:])):
            table.add_column(escape(heading), justify="left" if place in (0, 4) else "right")
        for row in rows:
            style = STYLES.get(row[-1], "dim")
            table.add_row(*map(escape, row[:-1]), f"[{style}]{escape(row[-1])}[/]")
        console.print(table)
    for one in result.held:
        where = f" ({one.column})" if one.column else ""
        console.print(f"{claim_word(one.holds)}: {one.claim.says}{where}; {one.because}", markup=False, soft_wrap=True)
    told = dict.fromkeys(rule(result.recipe.measures[one.measure]) for one in result.compared if one.published)
    for line in (*told, *result.recipe.knows):
        console.print(line, markup=False, soft_wrap=True, style="dim")


def _list(recipes: Sequence[Recipe]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("recipe", "where", "what it shows"):
        table.add_column(heading, no_wrap=heading == "recipe")
    for recipe in recipes:
        table.add_row(recipe.name, escape(recipe.where), escape(recipe.says))
    out().print(table)
    out().print("\n`hansa reproduce NAME --scale smoke|cpu|paper` runs one; --all runs them one after the other.")


def _summary(results: Sequence[Result]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("recipe", "where", "verdict"):
        table.add_column(heading)
    for result in results:
        table.add_row(result.recipe.name, escape(result.recipe.where), escape(result.verdict))
    return table
