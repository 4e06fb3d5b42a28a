"""``hansa report`` and ``hansa watch``: ranking tables and report pages of runs, written or served live."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hansa.cli import options as opt
from hansa.cli.console import err, fitting_table, note, out, report_errors, say, say_json
from hansa.core.errors import HansaError
from hansa.runs.columns import WINDOW

if TYPE_CHECKING:
    from hansa.study.report import Ranking, ReportEntry

PORT = 8642
FIRST = ("rounds_to_target", "bits_to_target", "up_bits", "simulated_total_seconds")
"""The columns that come after the score; of the others, a narrow terminal shows those that fit."""


@report_errors
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    page: Annotated[Path, typer.Option("--out", "-o", help="Where to write the report page.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Federated runs",
    metric: opt.Metric = None,
    window: opt.Window = WINDOW,
    target: opt.Target = None,
    latex: opt.Latex = None,
    figure: Annotated[
        Path | None,
        typer.Option(help="Also draw the curves of the metric for a paper: .pdf, .svg or .png.", show_default=False),
    ] = None,
) -> None:
    """Write a report page with the curves, numbers and configurations of runs.

    Runs may be unfinished. Runs that differ only in the seed are combined.
    """
    entries, problems = read_entries(runs)
    ranked: dict[str, Any] = {"metric": metric, "window": window, "target": target, "latex": latex}
    print_and_write(list(entries.values()), page, title=title, problems=problems, **ranked)
    if figure is not None:
        from hansa.study.report.figure import draw_curves

        draw_curves(list(entries.values()), figure, metric)
        say(f"figure: {figure}")


@report_errors
def watch(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders, or folders that contain runs.", show_default="runs"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Port on 127.0.0.1; 0 picks a free one.", min=0, show_default=f"{PORT}, or a free one"),
    ] = None,
) -> None:
    """Serve the report page live while runs are in progress.

    Press Ctrl-C to stop; the runs continue. The page is served on this machine only and needs the token in its address.
    To open it from another machine: ssh -L 8642:127.0.0.1:8642 HOST.
    """
    from hansa.study.report.live import ReportServer, RunWatcher

    folders = runs or [Path("runs")]
    if missing := [folder for folder in runs or [] if not folder.is_dir()]:
        raise HansaError(f"{missing[0]}: no such folder. Pass a run folder, or a folder that contains runs.")
    watcher = RunWatcher(folders)
    try:
        server = ReportServer(watcher, PORT if port is None else port)
    except HansaError:
        if port is not None:
            raise
        server = ReportServer(watcher, 0)
    say(f"watching {', '.join(map(str, folders))}: {server.address}")
    say("Press Ctrl-C to stop; the runs continue.", "dim")
    out().file.flush()
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        say("stopped watching", "dim")
    finally:
        server.server_close()


def read_entries(folders: Sequence[Path | str], alone: bool = True) -> tuple[dict[str, ReportEntry], list[str]]:
    """Return the entries of readable folders by name, and warnings about the others, which are also printed.

    It is an error if none can be read and there is nothing else to show (``alone``).
    """
    from hansa.study.report.entries import read_runs

    entries, problems = read_runs([Path(folder) for folder in folders])
    if problems and not entries and alone:
        raise HansaError(problems[0])
    for problem in problems:
        err().print(f"[yellow]skipped:[/] {escape(problem)}", soft_wrap=True)
    return {entry.name: entry for entry in entries}, problems


def print_and_write(
    entries: Sequence[ReportEntry],
    page: Path,
    *,
    metric: str | None = None,
    window: int = WINDOW,
    target: float | None = None,
    latex: Path | None = None,
    as_json: bool = False,
    **options: Any,
) -> Ranking:
    """Print the ranking, write the report page, and return the ranking; the options are those of `write_page`."""
    from hansa.study.report import common_target, rank, write_page
    from hansa.study.report.page import comparability_warnings

    target = common_target(entries, metric) if target is None else target
    ranking = rank(entries, target, metric=metric, window=window)
    if not as_json:
        console = out()
        console.print(ranking_table(ranking, console))
        say(f"ranked {ranking.order}", "dim")
    for warning in comparability_warnings(entries, ranking.metric):
        err().print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)
    write_page(page, entries, metric=metric, window=window, target=target, **options)
    if latex is not None:
        write_latex(latex, [ranking.latex()])
    if as_json:
        rows = [{"name": each.entry.name, "seeds": len(each.entry.runs), **each.numbers} for each in ranking]
        say_json({"ranked_by": ranking.score, "ranking": rows, "report": str(page)})
    else:
        say(f"\nreport: {page.resolve().as_uri()}")
    return ranking


def write_latex(path: Path, tables: Sequence[str]) -> None:
    """Write LaTeX tables to a file, and say where they are."""
    from hansa.runs.store.io import make_folder, write_file

    make_folder(path.parent.resolve())
    write_file(path, ("\n\n".join(tables) + "\n").encode())
    note(f"table: {path}")


def ranking_table(ranking: Ranking, console: Console) -> Table:
    """Return the ranking for the terminal, the best of each column in green; columns that do not fit are left out."""
    columns = sorted(ranking.columns(), key=lambda column: column.key not in (ranking.score, *FIRST))
    names = [escape(r.entry.name) + f" [dim]({len(r.entry.runs)} seeds)[/]" * bool(r.entry.members) for r in ranking]
    cells = {"#": list(map(str, range(1, len(ranking) + 1))), "method": names}
    for column in columns:
        texts = [(column.is_best(ranked), ranked.cell(column.key, column.write)) for ranked in ranking]
        cells[column.title] = [f"[green]{text}[/]" if best else text for best, text in texts]
    table = fitting_table(console, cells, left=("method",), keep=3)
    table.columns[0].style, table.columns[1].style = "dim", "bold"
    return table
