"""``hansa reproduce``: run published tables and figures, and compare the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from hansa.cli import options as opt
from hansa.cli.console import FAILED, note, print_table, say
from hansa.cli.run import session
from hansa.cli.show import write_latex
from hansa.core.errors import HansaError, suggestion

if TYPE_CHECKING:
    from hansa.study.recipes import Recipe
    from hansa.study.recipes.outcome import RecipeResult

STYLES = {"agrees": "green", "differs": "yellow", "same order": "cyan"}


@opt.needs_code
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Recipes, groups (cams, hafed, afga, aware, flamby, niid, reddi, open), or YAML files. "
            "Without any, list all.",
            show_default=False,
        ),
    ] = None,
    all_recipes: Annotated[bool, typer.Option("--all", help="Run all recipes.")] = False,
    scale: Annotated[
        str,
        typer.Option(
            help="smoke: a test of seconds. cpu: reduced, a few minutes on two cores. paper: the published setting."
        ),
    ] = "cpu",
    seeds: opt.Seeds = None,
    sets: opt.Sets = None,
    workers: opt.Workers = None,
    parallel: opt.Parallel = None,
    folder: Annotated[Path, opt.output("--out", "-o", help="Folder for runs and results.")] = Path("runs/reproduce"),
    export: Annotated[
        Path | None,
        opt.output("--export", help="Also write a page, its figures and the measured numbers to this folder."),
    ] = None,
    latex: Annotated[
        Path | None, opt.output("--latex", help="Also write the tables, published numbers and ours, in LaTeX.")
    ] = None,
    status: Annotated[bool, typer.Option("--status", "--list", help="Show which runs are done, and the verdicts.")] = (
        False
    ),
    quiet: opt.Quiet = False,
) -> None:
    """Reproduce published tables and figures.

    Shows the numbers beside the published ones, and writes a page for each recipe. Finished runs are not repeated, even
    if two recipes share them. Run the same command again to continue after an interruption.
    """
    from hansa.config import only_look
    from hansa.study.recipes import SCALES, find_recipes, library, outcome

    if scale not in SCALES:
        raise HansaError(f"--scale {scale}: expected smoke, cpu or paper. {suggestion(scale, SCALES)}")
    if all_recipes and names:
        raise HansaError(f"--all and {names[0]}: expected one of the two.")
    if not all_recipes and not names and not status:
        rows = [(recipe.name, recipe.reference, recipe.summary) for recipe in library().values()]
        print_table(("recipe", "reference", "summary"), rows)
        say("\nRun one with `hansa reproduce NAME --scale smoke|cpu|paper`, or all with --all.")
        return
    chosen = {recipe.name: recipe for name in names or [] for recipe in find_recipes(name)} or library()
    recipes = [recipe for recipe in chosen.values() if scale in recipe.scales or len(chosen) == 1]
    overrides = opt.changes(sets, seeds=seeds, workers=workers)
    scale_folder = folder / scale
    with only_look():  # check all files before anything is trained
        plans = [(item, outcome.plan_recipe(item, scale, overrides, building=False)) for item in recipes]
        if status:
            rows = outcome.recipe_status(plans, scale_folder)
            print_table(("recipe", "runs done", "result"), rows, right=("runs done",))
            return
    from hansa.runs.store.io import make_folder

    results: list[RecipeResult] = []
    for recipe in recipes:
        results.append(_run_recipe(recipe, scale, overrides, scale_folder, parallel, quiet, alone=len(recipes) == 1))
        if export is not None and not results[-1].error:
            outcome.export_result(results[-1], export)
        make_folder(scale_folder.absolute())
        outcome.save_result(results[-1], scale_folder / f"{recipe.name}.json")
    if len(results) > 1:
        lines = [(result.recipe.name, result.recipe.reference, result.verdict) for result in results]
        print_table(("recipe", "reference", "verdict"), lines)
    page = scale_folder / f"{results[0].recipe.name}.html" if len(results) == 1 else scale_folder
    say(f"\npage{'s' * (len(results) > 1)}: {page.resolve().as_uri()}")
    if latex is not None:
        from hansa.study.report.ranking import latex_table

        tables = [table for result in results for table in outcome.result_tables(result)]
        headings = outcome.HEADINGS[1:]
        columns = [dict(zip((title, *headings), zip(*rows, strict=True), strict=True)) for title, rows in tables]
        write_latex(latex, [latex_table(each) for each in columns])
    if any(result.failed for result in results):
        raise typer.Exit(FAILED)


def _run_recipe(
    recipe: Recipe, scale: str, overrides: Sequence[str], folder: Path, parallel: int | None, quiet: bool, alone: bool
) -> RecipeResult:
    """Run a recipe, print its result and write its page; if it is not ``alone``, print an error instead of raising."""
    from hansa.runs.experiment import RunError
    from hansa.study.recipes import outcome
    from hansa.study.report import write_page

    if not quiet:
        note(f"{recipe.name}: {recipe.summary}", "bold")
        note(f"scale {scale}. {recipe.at(scale).reduction}", "dim")
    try:
        with session(quiet) as running:
            result = outcome.run_recipe(recipe, scale, folder / "runs", running, overrides, parallel)
    except HansaError as error:
        if alone:
            raise
        reason, failed = str(error).splitlines()[0], isinstance(error, RunError)
        note(f"{recipe.name}: not run: {reason}", "yellow")
        return outcome.RecipeResult(recipe, scale, error="a run failed" if failed else reason, failed=failed)
    _show_result(result)
    title, tables = f"{recipe.name}: {recipe.reference}", outcome.report_tables(result)
    write_page(
        folder / f"{recipe.name}.html", list(result.runs.values()), title=title, lead=recipe.summary, published=tables
    )
    return result


def _show_result(result: RecipeResult) -> None:
    """Print the tables and claims of a recipe."""
    from hansa.study.recipes.outcome import HEADINGS, claim_lines, result_tables

    say(f"\n{result.recipe.name}, {result.recipe.reference}", "bold")
    for title, rows in result_tables(result):
        cells = [[*map(Text, row[:-1]), Text(row[-1], style=STYLES.get(row[-1], "dim"))] for row in rows]
        print_table((title, *HEADINGS[1:]), cells, right=HEADINGS[1:-1])
    for verdict, text in claim_lines(result):
        say(f"{verdict}: {text}")
    for line in (*result.rules, *result.recipe.known_differences):
        say(line, "dim")
