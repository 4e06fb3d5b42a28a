"""``hansa show``, ``report`` and ``watch``: runs summarized, ranked, and shown as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from hansa.cli import options as opt
from hansa.cli.console import err, note, out, print_table, say, say_json
from hansa.core.errors import HansaError
from hansa.runs.columns import WINDOW, base_metric, column_of, lower_is_better, split_metric
from hansa.runs.metrics import column_names, describe_score, describe_seconds, site_names
from hansa.study.report.formats import format_value

if TYPE_CHECKING:
    from hansa.runs.client_columns import ClientColumns
    from hansa.study.report import Ranking, ReportEntry
    from hansa.training.metric_direction import Direction

PORT = 8642
FIRST = ("rounds_to_target", "bits_to_target", "up_bits", "simulated_total_seconds")
"""The columns after the score; a narrow terminal shows those of the others that fit."""
LAST_ROUNDS = ("train_loss", "diversity", "participants", "lost")
MAX_CLIENTS = 12
"""Rows of the table of clients: if there are more clients, half are the worst and half the best."""


def show(
    folder: Annotated[Path, typer.Argument(help="Run folder, or the folder of several seeds.")],
    clients: Annotated[bool, typer.Option("--clients", help="Show single clients, the worst first.")] = False,
    metric: opt.Metric = None,
    window: opt.Window = WINDOW,
    latex: opt.Latex = None,
    as_json: opt.AsJson = False,
) -> None:
    """Show the summary and the last rounds of a run."""
    from hansa.runs.folder import MODEL, RunFolder, SeedGroupFolder, check_readable
    from hansa.study.report.entries import ReportEntry

    check_readable(folder)
    group, run = SeedGroupFolder(folder), RunFolder.containing(folder)
    if clients and not group.exists:
        facts = run.facts
        name, better = split_metric(facts.main if metric is None else metric, facts.better)
        show_clients(run.by_client(), str(run), as_json, name, better)
        return
    entry = ReportEntry.from_folder(folder)
    ranking = rank_one(entry, metric, window)
    if latex is not None:
        write_latex(latex, [ranking.latex()])
    show_numbers(ranking, as_json)
    if as_json or group.exists:
        return
    if (run / MODEL).is_file():
        run.read_model()  # verifies its hash
    history, main = entry.history, ranking.metric
    names = column_names(history)
    base = base_metric(main)
    of_clients = (f"client_{base}", f"client_{base}_worst", f"personal_{base}")
    of_rounds = dict.fromkeys(["round", main, f"test_{base}", "test_loss", *of_clients, *LAST_ROUNDS])
    columns = [name for name in of_rounds if name in names]
    rows = []
    for record in history[-5:]:
        values = [(name, record.get(name)) for name in columns]
        rows.append([format_value(name, value) for name, value in values])
    headings = [name.replace("_", " ") for name in columns]
    print_table(headings, rows, right=headings)


def rank_one(entry: ReportEntry, metric: str | None = None, window: int = WINDOW) -> Ranking:
    """Return the ranking of a single method, with the target of its configuration."""
    from hansa.study.report import rank

    return rank([entry], entry.runs[0].summary.get("target"), metric=metric, window=window)


def show_numbers(ranking: Ranking, as_json: bool = False) -> None:
    """Print the numbers of a run, with the sites of a federation; or those of several seeds, with a line for each."""
    (ranked,) = ranking
    entry, history = ranked.entry, ranked.entry.histories[0]
    if as_json:
        from hansa.config import from_yaml

        content: dict[str, Any] = {"config": from_yaml(entry.config, building=False).model_dump()}
        if entry.members:
            content["seeds"] = {str(run.seed): run.summary for run in entry.runs}
            content["over_seeds"] = {name: spread._asdict() for name, spread in ranked.spreads.items()}
        else:
            content["folder"] = entry.folder
        if notes := [text for run in entry.runs for text in run.notes]:
            content["notes"] = notes
        say_json({**content, "summary": {**entry.summary, **ranked.numbers}})
        return
    print_table((), _summary(ranking))
    if entry.members:
        heading = f"{column_of(ranking.metric).label}, {describe_score(ranking.score)}"
        rows = []
        for run, numbers in ranked.seeds:
            score = format_value(ranking.metric, numbers.get(ranking.score))
            rows.append((str(run.seed), str(numbers["rounds"]), score, str(run.summary.get("status", "?"))))
        print_table(("seed", "rounds", heading, "status"), rows, right=("seed", "rounds", heading))
    elif site_names(history):
        from hansa.study.report.page import site_table

        sites = site_table(history, ranked.numbers, ranking.metric, ranking.better)
        assert sites is not None
        headings, cells, notes = sites
        say("")
        print_table(headings, cells, right=headings[1:], keep=1)
        for line in notes:
            say(line)
    elif seconds := describe_seconds(history):
        say(seconds)


def _summary(ranking: Ranking) -> list[tuple[str, str | Text]]:
    """Return the labelled numbers of a run; with several seeds, means and deviations."""
    (ranked,) = ranking
    entry, summary = ranked.entry, ranked.entry.summary
    first_folder, seeds = Path(entry.runs[0].folder), len(entry.runs)
    title = f"{first_folder.parent}, {seeds} seeds" if entry.members else str(first_folder)
    status = ", ".join(dict.fromkeys(str(run.summary.get("status", "?")) for run in entry.runs))
    rows: list[tuple[str, str | Text]] = [("run", Text.assemble((title, "bold"), f" ({status})"))]
    rows.append(("rounds", ranked.cell("rounds")))
    rows += [(column.title.replace("\n", ", "), column.cells[0]) for column in ranking.columns(final=True)]
    if "server_device" in summary:
        devices = ", ".join(summary.get("devices") or ["cpu"])
        rows.append(("devices", f"clients {devices}; server {summary['server_device']}"))
    rows += [("accepted change", str(change)) for change in summary.get("accepted_changes") or []]
    return rows + [("", f"{reason}: {count}") for reason, count in (summary.get("lost_by_reason") or {}).items()]


def show_clients(
    columns: ClientColumns,
    title: str,
    as_json: bool,
    main: str = "",
    better: Mapping[str, Direction] | None = None,
) -> None:
    """Show one row for each client, the worst first by the metric of the run; as JSON, all clients."""
    from hansa.study.report.page import client_rows, describe_spread, worst_first

    if not columns.rows:
        raise HansaError(f"{title}: no client record: no round has been completed.")
    if as_json:
        say_json({name: values.tolist() for name, values in columns.frame().items()})
        return
    out().print(Text.assemble((title, "bold"), f": {len(columns['client'])} clients"), soft_wrap=True)
    for name in (*columns.evaluated, "loss"):
        say(f"  {name.replace('_', ' ')}: {describe_spread(columns, name, better)}")
    personal = f"personal_{(main or 'test_accuracy').removeprefix('test_')}"
    metric, ordered = worst_first(columns, personal if personal in columns else main, better)
    headings, cells = client_rows(ordered)
    if len(cells) > MAX_CLIENTS:
        half = MAX_CLIENTS // 2
        cells = [*cells[:half], ["..." for _ in headings], *cells[-half:]]
    print_table(headings, cells, right=headings[1:], keep=3)
    metric = metric or "loss"
    extreme = "highest" if lower_is_better(metric, better) else "lowest"
    say(f"\nsorted by {metric.replace('_', ' ')}, {extreme} first. All rounds: hansa export RUN -o clients.csv", "dim")


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
        from hansa.study.report.ranking import draw_curves

        draw_curves(list(entries.values()), figure, metric)
        say(f"figure: {figure}")


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

    It is an error if none can be read and nothing else is shown (``alone``).
    """
    from hansa.study.report import entries as reader

    entries, problems = reader.read_entries([Path(folder) for folder in folders])
    if problems and not entries and alone:
        raise HansaError(problems[0])
    for problem in problems:
        err().print(f"[yellow]skipped:[/] {escape(problem)}", soft_wrap=True)
    return {entry.name: entry for entry in reader.merge_seeds(entries)}, problems


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
        _print_ranking(ranking)
        say(f"ranked {ranking.order}", "dim")
    for warning in comparability_warnings(entries, ranking.metric):
        err().print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)
    write_page(page, entries, metric=metric, window=window, target=target, **options)
    if latex is not None:
        write_latex(latex, [ranking.latex()])
    if as_json:
        rows = [{"name": ranked.entry.name, "seeds": len(ranked.entry.runs), **ranked.numbers} for ranked in ranking]
        content: dict[str, Any] = {"ranked_by": ranking.score, "ranking": rows, "report": str(page)}
        if notes := [text for entry in entries for run in entry.runs for text in run.notes]:
            content["notes"] = notes
        say_json(content)
    else:
        say(f"\nreport: {page.resolve().as_uri()}")
    return ranking


def write_latex(path: Path, tables: Sequence[str]) -> None:
    """Write LaTeX tables to a file, and print its path."""
    from hansa.runs.store.io import make_folder, write_file

    make_folder(path.parent.resolve())
    write_file(path, ("\n\n".join(tables) + "\n").encode())
    note(f"table: {path}")


def _print_ranking(ranking: Ranking) -> None:
    """Print the ranking, with the best value of each column in green."""
    columns = sorted(ranking.columns(), key=lambda column: column.key not in (ranking.score, *FIRST))
    rows = []
    for index, ranked in enumerate(ranking):
        seeds = f" ({len(ranked.entry.runs)} seeds)" * bool(ranked.entry.members)
        name = Text.assemble((ranked.entry.name, "bold"), (seeds, "dim"))
        cells = [Text(column.cells[index], "green" if column.best[index] else "") for column in columns]
        rows.append([Text(str(index + 1), style="dim"), name, *cells])
    titles = [column.title for column in columns]
    print_table(["#", "method", *titles], rows, right=["#", *titles], keep=3)
