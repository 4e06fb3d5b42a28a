"""``hansa reproduce``: run published tables and figures, and compare the numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.markup import escape

from hansa.cli import options as opt
from hansa.cli.console import FAILED, note, out, plain_table, report_errors, say
from hansa.cli.report import write_latex, write_report
from hansa.cli.run import session
from hansa.config.registry.import_path import only_look
from hansa.core.errors import HansaError, suggestion

if TYPE_CHECKING:
    from hansa.study.recipes import Recipe
    from hansa.study.recipes.outcome import RecipeResult
    from hansa.study.recipes.schedule import RecipeProgress

STYLES = {"agrees": "green", "differs": "yellow", "same order": "cyan"}


@report_errors
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
    all_recipes: Annotated[
        bool, typer.Option("--all", help="Run all recipes, those with the least work left first.")
    ] = False,
    scale: Annotated[
        str,
        typer.Option(
            help="smoke: a test of seconds. cpu: reduced, some minutes on two cores. paper: the published setting."
        ),
    ] = "cpu",
    seeds: opt.Seeds = None,
    sets: opt.Sets = None,
    workers: opt.Workers = None,
    parallel: opt.Parallel = None,
    folder: Annotated[Path, opt.output("--out", "-o", help="Folder for runs and results.")] = Path("runs/reproduce"),
    export: Annotated[
        Path | None,
        opt.output("--export", help="Also write text, numbers, curves, figures and configurations to this folder."),
    ] = None,
    latex: Annotated[
        Path | None, opt.output("--latex", help="Also write the tables, published numbers and ours, in LaTeX.")
    ] = None,
    status: Annotated[
        bool,
        typer.Option("--status", "--list", help="Show which runs are done and how long the others will take."),
    ] = False,
    quiet: opt.Quiet = False,
) -> None:
    """Reproduce published tables and figures.

    Shows the numbers beside the published ones. Recipes with the least work left come first, and the page of each is
    written as soon as it is finished. Finished runs are not repeated, even if two recipes share them. Run the same
    command again to continue after an interruption.
    """
    from hansa.study.recipes import SCALES, find_recipes, library
    from hansa.study.recipes.schedule import RunRecords, describe_time, plan_recipe, recipe_progress

    if scale not in SCALES:
        raise HansaError(f"--scale {scale}: expected smoke, cpu or paper. {suggestion(scale, SCALES)}")
    if all_recipes and names:
        raise HansaError(f"--all and {names[0]}: expected one of the two.")
    if not all_recipes and not names and not status:
        _list_recipes(list(library().values()))
        return
    chosen = {recipe.name: recipe for name in names or [] for recipe in find_recipes(name)} or library()
    recipes = [recipe for recipe in chosen.values() if scale in recipe.scales or len(chosen) == 1]
    overrides = opt.changes(sets, None, None, workers, seeds)
    place = folder / scale
    with only_look():
        plans = [plan_recipe(recipe, scale, overrides, building=False) for recipe in recipes]
        progress = recipe_progress(plans, RunRecords(place / "runs"))
    if status:
        _show_status(progress, place)
        return
    if len(recipes) > 1 and not quiet:
        left, unknown = sum(each.seconds_left for each in progress), sum(each.unknown for each in progress)
        note(f"{len(recipes)} recipes, time left: {describe_time(left, unknown)}", "bold")
    options = RecipeOptions(scale, overrides, place, export, quiet, parallel)
    results = _run_recipes([each.plan.recipe for each in progress], [recipe.name for recipe in recipes], options)
    if len(results) > 1:
        table = plain_table(*(headings := ("recipe", "reference", "verdict")), left=headings)
        for result in results:
            table.add_row(result.recipe.name, escape(result.recipe.reference), escape(result.verdict))
        out().print(table)
    say(f"\npage: {_page_of(results, place).resolve().as_uri()}")
    if latex is not None:
        from hansa.study.recipes.outcome import HEADINGS, result_tables
        from hansa.study.report.ranking import text_latex_table

        tables = [(title, rows) for result in results if not result.error for title, rows in result_tables(result)]
        write_latex(latex, [text_latex_table(HEADINGS, rows, title) for title, rows in tables])
    if any(result.failed for result in results):
        raise typer.Exit(FAILED)


class RecipeOptions(NamedTuple):
    """How recipes are run, and where their runs and pages are."""

    scale: str
    overrides: Sequence[str]
    place: Path
    export: Path | None
    quiet: bool
    parallel: int | None


def _run_recipes(recipes: Sequence[Recipe], order: Sequence[str], options: RecipeOptions) -> list[RecipeResult]:
    """Run recipes; after each, write its pages and the page of all, which has the order of the list.

    With several recipes, one that cannot be run does not stop the others.
    """
    from hansa.runs.experiment import RunError
    from hansa.runs.store.io import make_folder, write_file
    from hansa.study.recipes.outcome import RecipeResult, results_page

    place, scale, quiet = options.place, options.scale, options.quiet
    results: list[RecipeResult] = []
    for recipe in recipes:
        if not quiet:
            note(f"{recipe.name}: {recipe.summary}", "bold")
            note(f"scale {scale}. {recipe.at(scale).reduction}", "dim")
        try:
            result = _run_recipe(recipe, options)
            show_result(result)
        except HansaError as error:
            if len(recipes) == 1:
                raise
            failed = isinstance(error, RunError)
            reason = "a run failed" if failed else str(error).splitlines()[0]
            result = RecipeResult(recipe, scale, error=reason, failed=failed)
            note(f"{recipe.name}: not run: {str(error).splitlines()[0]}", "yellow")
        results = sorted([*results, result], key=lambda each: order.index(each.recipe.name))
        make_folder(place.absolute())
        text = json.dumps(result.record, indent=1, ensure_ascii=False) + "\n"
        write_file(place / f"{result.recipe.name}.json", text.encode())
        write_file(_page_of(results, place, alone=len(recipes) == 1), results_page(results).encode())
        if len(results) < len(recipes) and not quiet:
            note(f"{len(results)} of {len(recipes)} recipes are done: {_page_of(results, place, alone=False)}", "dim")
    return results


def _page_of(results: Sequence[RecipeResult], place: Path, alone: bool | None = None) -> Path:
    alone = len(results) == 1 if alone is None else alone
    return place / (f"{results[0].recipe.name}-verdict.html" if alone else "reproduced.html")


def _run_recipe(recipe: Recipe, options: RecipeOptions) -> RecipeResult:
    """Run all cells of a recipe, compare them with the paper, and write the report page."""
    from hansa.study.recipes import compare_with_paper
    from hansa.study.recipes.outcome import HEADINGS, RecipeResult, result_tables
    from hansa.study.recipes.publish import CellRun, export_result
    from hansa.study.recipes.schedule import plan_recipe
    from hansa.study.report import ReportTable

    scale, place = options.scale, options.place
    planned = plan_recipe(recipe, scale, options.overrides).cells
    named = {each.cell.label: each.config for each in planned}
    presets = {name: config.algorithm.preset for name, config in named.items()}
    with session(options.quiet) as running:  # a run of fewer rounds stays: another recipe may need it
        found = running.run_reusable(named, place / "runs", options.parallel, extend=False, folder_names=presets)
    entries = list(found.values())
    page = place / f"{recipe.name}.html"
    histories = {
        (each.cell.row, each.cell.column): entry.histories for each, entry in zip(planned, entries, strict=True)
    }
    result = RecipeResult(recipe, scale, *compare_with_paper(recipe, scale, histories), page=page.name)
    tables = [
        ReportTable(f"Published numbers: {title}", HEADINGS, rows, result.verdict)
        for title, rows in result_tables(result)
    ]
    write_report(entries, page, title=f"{recipe.name}: {recipe.reference}", lead=recipe.summary, published=tables)
    if options.export is not None:
        cells = [CellRun(*each, entry) for each, entry in zip(planned, entries, strict=True)]
        export_result(result, cells, options.export)
    return result


def _show_status(progress: Sequence[RecipeProgress], place: Path) -> None:
    """Print what is done of each recipe, in the order in which they will be run."""
    from hansa.study.recipes.outcome import read_verdict
    from hansa.study.recipes.schedule import describe_time

    headings = ("recipe", "runs done", "time left", "result")
    table = plain_table(*headings, left=("recipe", "result"), no_wrap=headings[:3])
    for each in progress:
        name, done = each.plan.recipe.name, each.finished == each.runs
        result = read_verdict(place / f"{name}.json") if done else ""
        table.add_row(name, f"{each.finished} of {each.runs}", each.left, escape(result))
    out().print(table)
    left, unknown = sum(each.seconds_left for each in progress), sum(each.unknown for each in progress)
    complete = sum(each.finished == each.runs for each in progress)
    say(f"\n{complete} of {len(progress)} recipes are done; time left: {describe_time(left, unknown)}")
    say("times are those of recorded runs like these, one after the other", "dim")
    if complete:
        say(f"pages: {place}/RECIPE.html", "dim")


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
