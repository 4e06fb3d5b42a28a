"""``hansa show``: the summary of a run, of several seeds, or of single clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from hansa.cli import options as opt
from hansa.cli.console import fitting_table, out, plain_table, report_errors, say, say_json
from hansa.core.errors import HansaError
from hansa.runs.columns import WINDOW, base_metric, column_of, lower_is_better, split_metric
from hansa.runs.metrics import column_names, describe_score, describe_seconds, series, site_names, summarize
from hansa.study.report import formats

if TYPE_CHECKING:
    from hansa.runs.client_columns import ClientColumns
    from hansa.study.report import Ranking, ReportEntry
    from hansa.training.metric_direction import Direction

LAST_ROUNDS = ("train_loss", "diversity", "participants", "lost")
LAST_CLIENT_COLUMNS = ("loss", "up_bytes", "norm", "down_bytes", "peer_bytes", "asked")
"""Columns of clients that come after the others; a narrow terminal shows those that fit."""
MAX_CLIENTS = 12
"""Rows of the table of clients: the worst and, if there are more clients, the best."""


@report_errors
def show(
    folder: Annotated[Path, typer.Argument(help="Run folder, or the folder of several seeds.")],
    clients: Annotated[bool, typer.Option("--clients", help="Show single clients, the worst first.")] = False,
    metric: opt.Metric = None,
    window: opt.Window = WINDOW,
    latex: opt.Latex = None,
    as_json: opt.AsJson = False,
) -> None:
    """Show the summary, the curve and the last rounds of a run."""
    from hansa.runs.folder import MODEL, RunFolder, SeedGroupFolder
    from hansa.study.report.entries import ReportEntry, check_readable

    check_readable(folder)
    group, run = SeedGroupFolder(folder), RunFolder.containing(folder)
    if clients and not group.exists:
        facts = run.facts
        name, better = split_metric(facts.main if metric is None else metric, facts.better)
        show_clients(run.by_client(), str(run), as_json, name, better)
        return
    entry = ReportEntry.from_group(folder) if group.exists else ReportEntry.from_folder(folder)
    ranking = rank_one(entry, metric, window)
    if latex is not None:
        from hansa.cli.report import write_latex

        write_latex(latex, [ranking.latex()])
    show_numbers(ranking, as_json)
    if as_json or group.exists:
        return
    if (run / MODEL).is_file():
        run.read_model()  # verifies its hash
    history, main, console = entry.history, ranking.metric, out()
    names = column_names(history)
    if main in names:
        curve = sparkline([value for _, value in series(history, main)], 60, console.options.ascii_only)
        label = main.replace("_", " ")
        console.print(f"\n{escape(label)} [cyan]{curve}[/]")
    base = base_metric(main)
    of_clients = (f"client_{base}", f"client_{base}_worst", f"personal_{base}")
    of_rounds = dict.fromkeys(["round", main, f"test_{base}", "test_loss", *of_clients, *LAST_ROUNDS])
    shown = [name for name in of_rounds if name in names]
    table = plain_table(*(name.replace("_", " ") for name in shown))
    for record in history[-5:]:
        values = [(name, record.get(name)) for name in shown]
        table.add_row(*("–" if value is None else formats.formatter_of(name)(value) for name, value in values))
    if shown:
        console.print(table)


def rank_one(entry: ReportEntry, metric: str | None = None, window: int = WINDOW) -> Ranking:
    """Return the ranking of a single method, with the target of its configuration."""
    from hansa.study.report import rank

    return rank([entry], entry.runs[0].summary.get("target"), metric=metric, window=window)


def show_numbers(ranking: Ranking, as_json: bool = False) -> None:
    """Print the numbers of a run, and for a federation its sites; or those of several seeds, and a line for each."""
    (ranked,) = ranking
    entry, history = ranked.entry, ranked.entry.histories[0]
    if as_json:
        from hansa.config import from_yaml

        content: dict[str, Any] = {"config": from_yaml(entry.config, building=False).model_dump()}
        if entry.members:
            content["seeds"] = {str(run.seed): run.summary for run in entry.runs}
            content["over_seeds"] = {name: each._asdict() for name, each in ranked.spreads.items()}
        else:
            content["folder"] = entry.folder
        say_json({**content, "summary": {**entry.summary, **ranked.numbers}})
        return
    console = out()
    console.print(summary_table(ranking))
    if entry.members:
        heading = f"{column_of(ranking.metric).label}, {describe_score(ranking.score)}"
        table = plain_table("seed", "rounds", heading, "status", left=("status",))
        for run in entry.runs:
            numbers = summarize(run.history, metric=ranking.stated, window=ranking.window)
            score = formats.formatter_of(ranking.metric)(numbers.get(ranking.score))
            table.add_row(str(run.seed), str(numbers["rounds"]), score, escape(str(run.summary.get("status", "?"))))
        console.print(table)
    elif site_names(history):
        from hansa.study.report.tables import site_table

        sites = site_table(history, ranked.numbers, ranking.metric, ranking.better)
        assert sites is not None
        columns = zip(sites.headings, zip(*sites.rows, strict=True), strict=True)
        cells = {heading: list(map(escape, column)) for heading, column in columns}
        console.print()
        console.print(fitting_table(console, cells, left=("site",)))
        for each in sites.notes:
            say(each)
    elif seconds := describe_seconds(history):
        say(seconds)


def summary_table(ranking: Ranking) -> Table:
    """Return the numbers of a run, each with what it is: final, best, or mean of the last measurements; with several
    seeds, means and deviations."""
    (ranked,) = ranking
    entry, summary = ranked.entry, ranked.entry.summary
    first, count = Path(entry.runs[0].folder), len(entry.runs)
    title = f"{first.parent}, {count} seeds" if entry.members else str(first)
    status = ", ".join(dict.fromkeys(str(run.summary.get("status", "?")) for run in entry.runs))
    rows = [("run", f"[bold]{escape(title)}[/] ({escape(status)})")]
    rows.append(("rounds", ranked.cell("rounds", formats.format_count)))
    for column in ranking.columns(final=True):
        rows.append((escape(column.title.replace("\n", ", ")), ranked.cell(column.key, column.write)))
    if "server_device" in summary:
        devices = ", ".join(summary.get("devices") or ["cpu"])
        rows.append(("devices", escape(f"clients {devices}; server {summary['server_device']}")))
    rows += [("accepted change", escape(change)) for change in summary.get("accepted_changes") or []]
    rows += [("", escape(f"{reason}: {count}")) for reason, count in (summary.get("lost_by_reason") or {}).items()]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def show_clients(
    columns: ClientColumns,
    title: str,
    as_json: bool,
    main: str = "",
    better: Mapping[str, Direction] | None = None,
) -> None:
    """Show one row for each client, the worst first by the metric of the run; as JSON, all clients."""
    from hansa.study.report.tables import client_metric, describe_spread, format_client_cell, worst_first

    if not columns.rows:
        raise HansaError(f"{title}: no client record: no round has been completed.")
    if as_json:
        say_json({name: values.tolist() for name, values in columns.with_name_column().items()})
        return
    out().print(f"[bold]{escape(title)}[/]: {len(columns['client'])} clients")
    for name in (*columns.evaluated, "loss"):
        say(f"  {name.replace('_', ' ')}: {describe_spread(columns, name, better)}")
    personal = f"personal_{(main or 'test_accuracy').removeprefix('test_')}"
    metric = client_metric(columns, personal if personal in columns else main) or "loss"
    rows: list[int | None] = list(worst_first(columns, metric, better))
    if len(rows) > MAX_CLIENTS:
        rows = [*rows[: MAX_CLIENTS // 2], None, *rows[-MAX_CLIENTS // 2 :]]
    table = columns.with_name_column()
    order = dict.fromkeys([*(name for name in table if name not in LAST_CLIENT_COLUMNS), *LAST_CLIENT_COLUMNS])
    cells = {
        name.replace("_", " "): [
            "..." if row is None else escape(format_client_cell(name, table[name][row])) for row in rows
        ]
        for name in order
        if name in table and (name != "peer_bytes" or table[name].any())
    }
    console = out()
    console.print(fitting_table(console, cells, left=("name",), keep=3))
    first = "highest" if lower_is_better(metric, better) else "lowest"
    say(f"\nsorted by {metric.replace('_', ' ')}, {first} first. All rounds: hansa export RUN -o clients.csv", "dim")


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """Return a curve as one line of text.

    >>> sparkline([0, 1, 2, 3], 4), sparkline([0, 1, 2, 3], 4, ascii_only=True)
    ('▁▃▆█', '_-*#')
    """
    blocks = "_.-=+*%#" if ascii_only else "▁▂▃▄▅▆▇█"
    if not values:
        return ""
    count = min(width, len(values))
    picked = [values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(count)]
    low, high = min(picked), max(picked)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[int((value - low) * scale + 0.5)] for value in picked)
