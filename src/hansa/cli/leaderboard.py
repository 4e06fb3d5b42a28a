"""``hansa leaderboard``: write, check and show results of recipes that anybody can send."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hansa.cli import options as opt
from hansa.cli.console import FAILED, note, report_errors, say
from hansa.core.errors import HansaError

if TYPE_CHECKING:
    from hansa.study.leaderboard import Entry

app = typer.Typer(no_args_is_help=True, help="Write, check and show entries of the leaderboard.")
Entries = Annotated[list[Path], typer.Argument(help="Entries, or folders of entries.")]


@app.command()
@report_errors
def entry(
    recipe: Annotated[str, typer.Argument(help="Recipe, or a YAML file with one of its name and further rows.")],
    title: Annotated[str, typer.Option(help="Title of the entry.")],
    author: Annotated[list[str], typer.Option(help="Who ran it. Repeatable.")],
    url: Annotated[str, typer.Option(help="Address of a page about it, https://...")] = "",
    scale: Annotated[str, typer.Option(help="cpu or paper.")] = "cpu",
    seeds: opt.Seeds = None,
    sets: opt.Sets = None,
    folder: Annotated[Path, opt.output("--runs", help="Folder given to `hansa reproduce --out`.")] = Path(
        "runs/reproduce"
    ),
    out: Annotated[Path | None, opt.output("--out", "-o", help="File to write. By default RECIPE.json.")] = None,
) -> None:
    """Write an entry from the finished runs of a recipe."""
    from hansa.study.leaderboard import collect_entry, write_entry
    from hansa.study.recipes import find_recipes

    recipes = find_recipes(recipe)
    if len(recipes) != 1:
        raise HansaError(f"{recipe}: expected one recipe, found {', '.join(each.name for each in recipes)}.")
    overrides = opt.changes(sets, None, None, None, seeds)
    content = collect_entry(
        recipes[0], scale, folder / scale / "runs", title=title, authors=author, url=url, overrides=overrides
    )
    path = Path(f"{recipes[0].name}.json") if out is None else out
    written = write_entry(content, path)
    say(f"{path}: {len(written.rows)} rows, sha256 {written.sha256[:12]}")


@app.command()
@report_errors
def check(entries: Entries) -> None:
    """Check entries: fields, hashes, settings and seeds; of several, also that they have the same data."""
    from hansa.study.leaderboard.entry import check_same_data, entries_in, read_entry

    refused = 0
    passed: list[tuple[Path, Entry]] = []
    for path in entries_in(entries):
        try:
            read = read_entry(path)
            check_same_data([*passed, (path, read)])
        except HansaError as error:
            refused += 1
            note(f"refused: {error}", "yellow")
        else:
            passed.append((path, read))
            say(f"{path}: {read.title}: {read.recipe}, {len(read.rows)} rows, all checks passed")
    if refused:
        raise typer.Exit(FAILED)


@app.command()
@report_errors
def build(
    entries: Entries,
    out: Annotated[Path, opt.output("--out", "-o", help="Markdown page to write.")] = Path("docs/leaderboard.md"),
) -> None:
    """Build the page of all entries; an entry that does not pass the checks ends the command."""
    from hansa.runs.store.io import write_file
    from hansa.study.leaderboard import check_same_data, leaderboard_page, read_entry
    from hansa.study.leaderboard.entry import entries_in

    checked = {path: read_entry(path) for path in entries_in(entries)}
    check_same_data(list(checked.items()))
    write_file(out, leaderboard_page(list(checked.values())).encode())
    say(f"{out}: {len(checked)} entries")
