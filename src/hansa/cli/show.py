"""``hansa show``: the summary of a run, of several seeds, or of single clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from hansa.cli import options as opt
from hansa.cli.console import out, plain_table, report_errors, say, say_json
from hansa.core.errors import HansaError
from hansa.runs.columns import OUTCOMES, column_of, lower_is_better
from hansa.study.report import formats

if TYPE_CHECKING:
    from hansa.runs.client_columns import ClientColumns
    from hansa.runs.seed_group import SeedGroupFolder
    from hansa.runs.seed_statistics import SeedStatistics
    from hansa.study.report import ReportEntry

SUMMARY = (
    "rounds", "last5_test_accuracy", "best_test_accuracy", "client_accuracy", "client_accuracy_worst",
    "client_accuracy_std", "personal_accuracy", "test_loss", "global_loss", "loss", "train_loss", "up_bits",
    "down_bits", "peer_bits", "simulated_total_seconds", "wall_seconds", "lost",
)  # fmt: skip
"""The numbers of a summary, in order; those that a run does not have are left out."""
HEADINGS = {
    "rounds": "rounds",
    "last5_test_accuracy": "accuracy, mean of last 5",
    "best_test_accuracy": "best accuracy",
}
LAST_ROUNDS = (
    "round", "test_accuracy", "test_loss", "client_accuracy", "client_accuracy_worst", "personal_accuracy",
    "train_loss", "diversity", "participants", "lost",
)  # fmt: skip
MAX_CLIENTS = 12
"""Rows of the table of clients: the worst and, if there are more clients, the best."""


@report_errors
def show(
    folder: Annotated[Path, typer.Argument(help="Run folder, or the folder of several seeds.")],
    clients: Annotated[bool, typer.Option("--clients", help="Show single clients, the worst first.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Show the summary, the curve and the last rounds of a run."""
    from hansa.runs.folder import RunFolder
    from hansa.runs.folder_lock import MODEL
    from hansa.runs.seed_group import SeedGroupFolder

    if (group := SeedGroupFolder(folder)).exists:
        from hansa.study.report import ReportEntry

        show_group(group, ReportEntry.from_group(folder), as_json)
        return
    run = RunFolder.containing(folder)
    if clients:
        show_clients(run.by_client(), str(run), as_json)
        return
    config, history = run.config, run.metrics
    summary = run.summary_of(history)
    if as_json:
        say_json({"config": config.model_dump(), "summary": summary})
        return
    console = out()
    console.print(summary_table(str(run), summary))
    if (run / MODEL).is_file():
        run.read_model()  # verifies its hash
    metric = next((name for name in OUTCOMES if name in history.names), None)
    if metric is not None:
        curve = sparkline(list(filter(math.isfinite, history.floats(metric))), 60, console.options.ascii_only)
        console.print(f"\n{escape(metric.replace('_', ' '))} [cyan]{curve}[/]")
    shown = [name for name in LAST_ROUNDS if name in history.names]
    table = plain_table(*(name.replace("_", " ") for name in shown))
    for record in history[-5:]:
        values = [(name, record.get(name)) for name in shown]
        table.add_row(*("–" if value is None else formats.formatter_of(name)(value) for name, value in values))
    if shown:
        console.print(table)


def summary_table(
    title: str, summary: Mapping[str, Any], statistics: Mapping[str, SeedStatistics] | None = None
) -> Table:
    """Return a run's summary; with several seeds, means and deviations."""
    from hansa.study.report.ranking import SPREAD_SHOWN

    statistics = statistics or {}
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("run", f"[bold]{escape(title)}[/] ({escape(str(summary.get('status', '?')))})")
    for key in SUMMARY:
        value, column = summary.get(key), column_of(key)
        if value is None or (column.hide_zero and value == 0):
            continue
        write = formats.format_count if key == "rounds" else formats.formatter_of(key)
        std = statistics[key].std if key in statistics and key.endswith(SPREAD_SHOWN) else None
        table.add_row(HEADINGS.get(key, column.label), formats.format_mean_std(write, value, std))
    if "target" in summary:
        rounds, over = summary.get("rounds_to_target"), statistics.get("rounds_to_target")
        text = formats.format_mean_std(formats.format_count, rounds, None if over is None else over.std)
        if rounds is None and summary.get("reached"):
            text = f"reached by {summary['reached']} runs"
        table.add_row(f"rounds to {formats.format_percent(summary['target'])}", text)
    for change in summary.get("accepted_changes") or []:
        table.add_row("accepted change", escape(change))
    for reason, count in (summary.get("lost_by_reason") or {}).items():
        table.add_row("", escape(f"{reason}: {count}"))
    return table


def show_group(group: SeedGroupFolder, entry: ReportEntry, as_json: bool = False) -> None:
    """Show the combined numbers of several seeds, and one line for each seed."""
    from hansa.runs.seed_statistics import summarize_seeds
    from hansa.study.report import rank
    from hansa.study.report.entries import ranking_metric

    numbers, statistics = summarize_seeds(entry.histories, group.config.evaluate.target)
    if as_json:
        seeds = {str(run.seed): run.summary for run in entry.runs}
        over = {name: each._asdict() for name, each in statistics.items()}
        say_json({"config": group.config.model_dump(), "seeds": seeds, "summary": numbers, "over_seeds": over})
        return
    status = dict.fromkeys(str(run.summary.get("status", "?")) for run in entry.runs)
    title = f"{group}, {len(entry.runs)} seeds"
    out().print(summary_table(title, {**numbers, "status": ", ".join(status)}, statistics))
    metric = ranking_metric(rank([entry]))
    write = formats.formatter_of(metric)
    table = plain_table("seed", "rounds", metric.replace("_", " "), "status", left=("status",))
    for run in entry.runs:
        values = run.summary
        score = write(values.get(f"last5_{metric}"))
        table.add_row(str(run.seed), str(values["rounds"]), score, str(values.get("status", "?")))
    out().print(table)


def show_clients(columns: ClientColumns, title: str, as_json: bool) -> None:
    """Show one row for each client, the worst first; as JSON, all clients."""
    from hansa.study.report.client_view import describe_spread, format_client_cell, worst_first

    if not columns.rows:
        raise HansaError(f"{title}: no client record: no round has been completed, or the run is from hansa 0.1.")
    if as_json:
        say_json({name: values.tolist() for name, values in columns.items()})
        return
    out().print(f"[bold]{escape(title)}[/]: {len(columns['client'])} clients")
    for name in (*columns.evaluated, "loss"):
        say(f"  {name.replace('_', ' ')}: {describe_spread(columns, name)}")
    metric = next(name for name in ("personal_accuracy", "test_accuracy", "test_loss", "loss") if name in columns)
    rows: list[int | None] = list(worst_first(columns, metric))
    if len(rows) > MAX_CLIENTS:
        rows = [*rows[: MAX_CLIENTS // 2], None, *rows[-MAX_CLIENTS // 2 :]]
    table = plain_table(*(name.replace("_", " ") for name in columns))
    for row in rows:
        table.add_row(*("..." if row is None else format_client_cell(name, columns[name][row]) for name in columns))
    out().print(table)
    order = "highest" if lower_is_better(metric) else "lowest"
    say(f"\nsorted by {metric.replace('_', ' ')}, {order} first. All rounds: hansa export RUN -o clients.csv", "dim")


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
