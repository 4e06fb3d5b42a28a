"""``hansa reproduce``: run published tables and figures, and compare the numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from hansa.cli import options as opt
from hansa.cli.console import err, note, out, plain_table, report_errors, say
from hansa.cli.report import write_latex, write_report
from hansa.cli.run import run_each
from hansa.core.errors import HansaError, suggestion

if TYPE_CHECKING:
    from hansa.study.recipes import Recipe
    from hansa.study.recipes.outcome import RecipeResult

STYLES = {"agrees": "green", "differs": "yellow", "same order": "cyan"}


@report_errors
@opt.needs_code
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Recipes, groups (cams, hafed, afga, aware, flamby, open), or YAML files. Without any, list all.",
            show_default=False,
        ),
    ] = None,
    all_recipes: Annotated[bool, typer.Option("--all", help="Run all recipes.")] = False,
    scale: Annotated[
        str,
        typer.Option(
            help="smoke: a test of seconds. cpu: reduced, some minutes on two cores. paper: the published setting."
        ),
    ] = "cpu",
    seeds: opt.Seeds = None,
    sets: opt.Sets = None,
    workers: opt.Workers = None,
    folder: Annotated[Path, opt.output("--out", "-o", help="Folder for runs and results.")] = Path("runs/reproduce"),
    export: Annotated[
        Path | None,
        opt.output("--export", help="Also write text, numbers, curves, figures and configurations to this folder."),
    ] = None,
    latex: Annotated[
        Path | None, opt.output("--latex", help="Also write the tables, published numbers and ours, in LaTeX.")
    ] = None,
    quiet: opt.Quiet = False,
) -> None:
    """Reproduce published tables and figures.

    Shows the numbers beside the published ones. Finished runs are not repeated, even if two recipes share them. Run the
    same command again to continue after an interruption.
    """
    from hansa.runs.store.io import make_folder, write_file
    from hansa.study.recipes import SCALES, find_recipes, library
    from hansa.study.recipes.outcome import RecipeResult, results_page

    if scale not in SCALES:
        raise HansaError(f"--scale {scale}: expected smoke, cpu or paper. {suggestion(scale, SCALES)}")
    if all_recipes and names:
        raise HansaError(f"--all and {names[0]}: expected one of the two.")
    if not all_recipes and not names:
        _list_recipes(list(library().values()))
        return
    chosen = {recipe.name: recipe for name in names or [] for recipe in find_recipes(name)}
    recipes = list((library() if all_recipes else chosen).values())
    overrides = opt.changes(sets, None, None, workers, seeds)
    place = folder / scale
    results = []
    for recipe in recipes:
        if not quiet:
            note(f"{recipe.name}: {recipe.summary}", "bold")
            note(f"scale {scale}. {recipe.at(scale).reduction}", "dim")
        try:
            result = _run_recipe(recipe, scale, overrides, place, export, quiet)
            show_result(result)
        except HansaError as error:
            if len(recipes) == 1:
                raise
            result = RecipeResult(recipe, scale, error=str(error).splitlines()[0])
            note(f"{recipe.name}: not run: {result.error}", "yellow")
        results.append(result)
    make_folder(place.absolute())
    for result in results:
        text = json.dumps(result.record, indent=1, ensure_ascii=False) + "\n"
        write_file(place / f"{result.recipe.name}.json", text.encode())
    page = place / ("reproduced.html" if len(results) > 1 else f"{results[0].recipe.name}-verdict.html")
    write_file(page, results_page(results).encode())
    if len(results) > 1:
        table = plain_table(*(headings := ("recipe", "reference", "verdict")), left=headings)
        for result in results:
            table.add_row(result.recipe.name, escape(result.recipe.reference), escape(result.verdict))
        out().print(table)
    say(f"\npage: {page.resolve().as_uri()}")
    if latex is not None:
        from hansa.study.recipes.outcome import HEADINGS, result_tables
        from hansa.study.report.latex import text_latex_table

        tables = [(title, rows) for result in results if not result.error for title, rows in result_tables(result)]
        write_latex(latex, [text_latex_table(HEADINGS, rows, title) for title, rows in tables])


def _run_recipe(
    recipe: Recipe, scale: str, overrides: Sequence[str], place: Path, export: Path | None, quiet: bool
) -> RecipeResult:
    """Run all cells of a recipe, compare them with the paper, and write the report page."""
    import yaml

    from hansa.config import from_yaml
    from hansa.engine import reuse_workers
    from hansa.runs.run_cache import find_or_create_runs
    from hansa.study.recipes import compare_with_paper
    from hansa.study.recipes.outcome import HEADINGS, RecipeResult, result_tables
    from hansa.study.recipes.publish import CellRun, export_result
    from hansa.study.report import ReportTable
    from hansa.study.report.progress import InterruptHandler, progress_display

    cells = list(recipe.cells(scale))
    configs = [from_yaml(yaml.safe_dump(cell.document), overrides, f"{recipe.name}, {cell.label}") for cell in cells]
    entries = []
    with reuse_workers(), InterruptHandler(err()) as interrupt, progress_display(err(), quiet) as display:
        for cell, config in zip(cells, configs, strict=True):
            titled = config.model_copy(update={"name": cell.label})
            runs = find_or_create_runs(titled, place / "runs", config.algorithm.preset)
            entries.append(run_each(cell.label, runs, config.seeds is not None, display, interrupt))
    page = place / f"{recipe.name}.html"
    histories = {(cell.row, cell.column): entry.histories for cell, entry in zip(cells, entries, strict=True)}
    result = RecipeResult(recipe, scale, *compare_with_paper(recipe, scale, histories), page=page.name)
    tables = [
        ReportTable(f"Published numbers: {title}", HEADINGS, rows, result.verdict)
        for title, rows in result_tables(result)
    ]
    write_report(entries, page, title=f"{recipe.name}: {recipe.reference}", lead=recipe.summary, published=tables)
    if export is not None:
        export_result(result, list(map(CellRun, cells, configs, entries)), export)
    return result


def show_result(result: RecipeResult) -> None:
    """Print the tables and claims of a recipe."""
    from hansa.study.recipes.outcome import HEADINGS, claim_status, result_tables

    say(f"\n{result.recipe.name}, {result.recipe.reference}", "bold")
    for title, rows in result_tables(result):
        title = escape(title)
        table = plain_table(title, *HEADINGS[1:], left=(title, HEADINGS[-1]))
        for row in rows:
            style = STYLES.get(row[-1], "dim")
            table.add_row(*map(escape, row[:-1]), f"[{style}]{escape(row[-1])}[/]")
        out().print(table)
    for one in result.claims:
        setting = f" ({one.setting})" if one.setting else ""
        say(f"{claim_status(one.holds)}: {one.claim.statement}{setting}; {one.evidence}")
    for line in (*result.rules, *result.recipe.known_differences):
        say(line, "dim")


def _list_recipes(recipes: Sequence[Recipe]) -> None:
    headings = ("recipe", "reference", "summary")
    table = plain_table(*headings, left=headings, no_wrap=("recipe",))
    for recipe in recipes:
        table.add_row(recipe.name, escape(recipe.reference), escape(recipe.summary))
    out().print(table)
    say("\nRun one with `hansa reproduce NAME --scale smoke|cpu|paper`, or all with --all.")
