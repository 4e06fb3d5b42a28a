"""``hansa show``: the summary of a run, of several seeds, or of single clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from hansa.cli import options as opt
from hansa.cli.console import fitting_table, out, plain_table, report_errors, say, say_json
from hansa.core.errors import HansaError
from hansa.runs.columns import (
    COSTS,
    OUTCOMES,
    WINDOW,
    base_metric,
    column_of,
    evaluated_metrics,
    lower_is_better,
    main_metric,
    plain_name,
    split_metric,
)
from hansa.runs.metrics import column_names, describe_score, series, summarize
from hansa.study.report import formats

if TYPE_CHECKING:
    from hansa.runs.client_columns import ClientColumns
    from hansa.runs.metrics import RunHistory, SeedStatistics
    from hansa.runs.seed_group import SeedGroupFolder
    from hansa.study.report import ReportEntry
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
    from hansa.runs.folder import RunFolder
    from hansa.runs.folder_lock import MODEL
    from hansa.runs.seed_group import SeedGroupFolder
    from hansa.study.report.entries import ReportEntry, check_readable

    check_readable(folder)
    group, run = SeedGroupFolder(folder), RunFolder.containing(folder)
    if latex is not None:
        from hansa.cli.report import write_latex
        from hansa.study.report import rank

        entry = ReportEntry.from_group(folder) if group.exists else ReportEntry.from_folder(folder)
        target = (group if group.exists else run).config.evaluate.target
        write_latex(latex, [rank([entry], target, metric=metric, window=window).latex()])
    if group.exists:
        show_group(group, ReportEntry.from_group(folder), as_json, metric, window)
        return
    if clients:
        facts = run.facts
        name, better = split_metric(facts.main if metric is None else metric, facts.better)
        show_clients(run.by_client(), str(run), as_json, name, better)
        return
    config, history = run.config, run.metrics
    summary = {**run.summary_of(history), **summarize(history, config.evaluate.target, metric=metric, window=window)}
    if as_json:
        say_json({"config": config.model_dump(), "summary": summary})
        return
    console = out()
    names = column_names(history)
    main = main_metric(names, history.facts) if metric is None else metric.partition(":")[0]
    print_summary(str(run), summary, history, main, window)
    if (run / MODEL).is_file():
        run.read_model()  # verifies its hash
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


def print_summary(title: str, summary: Mapping[str, Any], history: RunHistory, main: str, window: int = WINDOW) -> None:
    """Print the summary of a run, and for a federation its sites, the worst first."""
    from hansa.runs.metrics import describe_seconds, site_names

    console = out()
    if not (sites := site_names(history)):
        console.print(summary_table(title, summary, main=main, window=window))
        if seconds := describe_seconds(history):
            say(seconds)
        return
    from hansa.study.report.tables import site_table

    prefixes = tuple(f"{site}/" for site in sites)
    of_run = {name: value for name, value in summary.items() if not plain_name(name).startswith(prefixes)}
    console.print(summary_table(title, of_run, main=main, window=window))
    table = site_table(history, summary, main, history.facts.better)
    assert table is not None
    columns = zip(table.headings, zip(*table.rows, strict=True), strict=True)
    cells = {heading: list(map(escape, column)) for heading, column in columns}
    console.print()
    console.print(fitting_table(console, cells, left=("site",)))
    for each in table.notes:
        say(each)


def metric_order(names: Iterable[str], main: str) -> list[str]:
    """Return the metrics among some names in the order of tables: the main one first, then test metrics, then others.

    >>> metric_order(["train_loss", "client_auc", "client_loss", "test_auc", "test_loss", "round"], "test_auc")
    ['test_auc', 'test_loss', 'client_auc', 'train_loss']
    """
    known, base = set(names), base_metric(main)
    test = [name for name in evaluated_metrics(known) if name.startswith(("test_", "sites_test_"))]
    sets = [name for name in evaluated_metrics(known) if name.endswith(f"/test_{base}")]
    clients = (f"client_{base}", f"client_{base}_worst", f"client_{base}_std", f"personal_{base}")
    return [name for name in dict.fromkeys([main, f"test_{base}", *sets, *test, *clients, *OUTCOMES]) if name in known]


def summary_table(
    title: str,
    summary: Mapping[str, Any],
    statistics: Mapping[str, SeedStatistics] | None = None,
    *,
    main: str,
    window: int = WINDOW,
) -> Table:
    """Return a run's summary, each number with what it is: final, best, or mean of the last measurements; with several
    seeds, means and deviations."""
    from hansa.study.report.ranking import format_target, shows_spread

    statistics = statistics or {}
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("run", f"[bold]{escape(title)}[/] ({escape(str(summary.get('status', '?')))})")
    numbers = [f"last{window}_{main}", main, f"best_{main}"]
    numbers += [name for name in metric_order(summary, main) if name != main]
    for key in ("rounds", *numbers, *COSTS):
        value, column = summary.get(key), column_of(key)
        if value is None or (column.hide_zero and value == 0):
            continue
        write = formats.format_count if key == "rounds" else formats.formatter_of(key)
        std = statistics[key].std if key in statistics and shows_spread(key) else None
        label = column.label if key == "rounds" or key in COSTS else f"{column.label}, {describe_score(key)}"
        table.add_row(escape(label), formats.format_mean_std(write, value, std))
    if "target" in summary:
        for key, write in (("rounds_to_target", formats.format_count), ("bits_to_target", formats.format_bits)):
            value, over = summary.get(key), statistics.get(key)
            text = formats.format_mean_std(write, value, None if over is None else over.std)
            if value is None:
                text = f"reached by {summary['reached']} runs" if summary.get("reached") else "never"
            table.add_row(f"{key.partition('_')[0]} to {format_target(summary['target'], main)}", text)
    if "server_device" in summary:
        devices = ", ".join(summary.get("devices") or ["cpu"])
        table.add_row("devices", escape(f"clients {devices}; server {summary['server_device']}"))
    for change in summary.get("accepted_changes") or []:
        table.add_row("accepted change", escape(change))
    for reason, count in (summary.get("lost_by_reason") or {}).items():
        table.add_row("", escape(f"{reason}: {count}"))
    return table


def show_group(
    group: SeedGroupFolder,
    entry: ReportEntry,
    as_json: bool = False,
    metric: str | None = None,
    window: int = WINDOW,
) -> None:
    """Show the combined numbers of several seeds, and one line for each seed."""
    from hansa.study.report import rank

    ranking = rank([entry], group.config.evaluate.target, metric=metric, window=window)
    numbers, statistics = ranking[0].numbers, ranking[0].spreads
    if as_json:
        seeds = {str(run.seed): run.summary for run in entry.runs}
        over = {name: each._asdict() for name, each in statistics.items()}
        say_json({"config": group.config.model_dump(), "seeds": seeds, "summary": numbers, "over_seeds": over})
        return
    status = dict.fromkeys(str(run.summary.get("status", "?")) for run in entry.runs)
    title = f"{group}, {len(entry.runs)} seeds"
    summary = {**numbers, "status": ", ".join(status)}
    out().print(summary_table(title, summary, statistics, main=ranking.metric, window=window))
    write = formats.formatter_of(ranking.metric)
    heading = f"{column_of(ranking.metric).label}, {describe_score(ranking.score)}"
    table = plain_table("seed", "rounds", heading, "status", left=("status",))
    for run in entry.runs:
        values = {**run.summary, **summarize(run.history, metric=metric, window=window)}
        table.add_row(
            str(run.seed), str(values["rounds"]), write(values.get(ranking.score)), str(values.get("status", "?"))
        )
    out().print(table)


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
