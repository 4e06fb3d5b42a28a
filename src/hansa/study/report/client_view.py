"""The metrics of single clients: ordered from worst to best, with the labels that the worst of them hold."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from hansa.core.errors import HansaError
from hansa.data.split import read_label_counts
from hansa.runs.client_columns import ClientColumns, summarize_clients
from hansa.runs.client_record import read_by_client
from hansa.runs.columns import direction_of, lower_is_better
from hansa.runs.folder_lock import PARTITION, RECORD
from hansa.study.report import formats
from hansa.study.report.entries import RankedEntry, ReportEntry
from hansa.study.report.partition import label_names
from hansa.training.metric_direction import Direction

log = logging.getLogger("hansa")

_SMALL_RECORD = 1 << 22  # bytes; smaller records are read again at every change

METRICS = ("test_accuracy", "test_loss", "loss")
"""Clients are ordered by the metric that ranks the runs, else by the first of these that was measured."""
MAX_BARS, MAX_ROWS = 300, 10
"""More clients are binned to this many bars; this many of the worst have a table row."""

STYLE = (
    "<style>.served{width:100%;height:90px;display:block;margin:6px 0 2px}.served .rest{fill:var(--c);opacity:.35}"
    ".served .worst{fill:var(--c)}.mix{width:90px;height:12px;vertical-align:middle}.mix rect{fill:var(--c)}"
    ".clients td,.clients th{padding-top:3px;padding-bottom:3px}</style>"
)


@dataclass(frozen=True, slots=True, eq=False)
class MethodClients:
    """The clients of a method, one row each, and the samples of each label that they hold if that is known."""

    name: str
    colour: str
    columns: ClientColumns
    label_counts: Sequence[Sequence[int]] = ()
    label_names: Sequence[str] = ()
    note: str = ""
    better: Mapping[str, Direction] = field(default_factory=dict)


def method_clients(ranking: Sequence[RankedEntry]) -> list[MethodClients]:
    """Return the clients of each method that has a record of them; with several seeds, those of the first."""
    methods = []
    for ranked in ranking:
        entry = ranked.entry
        run = entry.runs[0]
        if run.clients is None and run.folder:
            run = _read_clients(run)
        if run.clients is not None:
            note = f"seed {run.seed}, the first of {len(entry.runs)}" if entry.members else ""
            methods.append(
                MethodClients(
                    entry.name, ranked.colour, run.clients, run.label_counts, run.label_names, note, ranked.better
                )
            )
    return methods


def _read_clients(entry: ReportEntry) -> ReportEntry:
    """Add what the entry's folder has on clients; a damaged record is skipped with a warning."""
    path = Path(entry.folder) / RECORD
    try:
        size = path.stat().st_size
        # a large record that grows, as during `hansa watch`, is read again when it has grown by 5%
        clients = _by_client(path, size if size < _SMALL_RECORD else -int(math.log(size) / math.log(1.05)))
    except OSError:
        return entry
    except HansaError as damage:
        log.warning("%s", damage)
        return entry
    facts = read_label_counts(path.with_name(PARTITION))
    counts = [] if facts is None else facts[1]
    names = label_names(entry.config, len(counts[0])) if counts else []
    known = clients.named(entry.client_names) if clients.rows else None
    return replace(entry, clients=known, label_counts=counts, label_names=names)


@lru_cache(maxsize=64)
def _by_client(path: Path, size: int) -> ClientColumns:
    return read_by_client(path)


def client_metric(columns: Mapping[str, Any], main: str = "") -> str | None:
    """Return the column that clients are ordered by: the first that was measured of the main metric and `METRICS`."""
    names = (main, *METRICS)
    return next((n for n in names if n in columns and any(map(math.isfinite, columns[n].tolist()))), None)


def worst_first(columns: Mapping[str, Any], metric: str, better: Mapping[str, Direction] | None = None) -> list[int]:
    """Return the rows of clients from worst to best; those without a value come last."""
    sign = -1.0 if lower_is_better(metric, better) else 1.0
    values = [float(value) for value in columns[metric]]
    return sorted(range(len(values)), key=lambda row: (values[row] != values[row], sign * values[row], row))


def format_client_cell(name: str, value: Any) -> str:
    """Format one value of a client column."""
    if value.dtype.kind == "U":
        return str(value)
    exact = value.dtype.kind != "f" and not name.endswith("_bytes")
    return str(int(value)) if exact else formats.formatter_of(name)(float(value))


def describe_spread(columns: Mapping[str, Any], name: str, better: Mapping[str, Direction] | None = None) -> str:
    """Return mean, deviation and, where the direction is known, worst tenth of a column over clients."""
    write, direction = formats.formatter_of(name), direction_of(name, better)
    mean, deviation, worst = summarize_clients(columns[name].tolist(), direction == "lower")
    text = f"mean {write(mean)}, deviation {write(deviation)}"
    return f"{text}, worst tenth {write(worst)}" if direction else text


def clients_section(methods: Sequence[MethodClients], main: str = "") -> str:
    """Return the section on clients as HTML; "" if no method has a record of them.

    Args:
        methods: The clients of each method.
        main: The metric that the runs are ranked by.
    """
    chosen = ((method, client_metric(method.columns, main)) for method in methods)
    known = [(method, metric) for method, metric in chosen if metric is not None]
    if not known:
        return ""
    tested = any(metric != "loss" for _, metric in known)
    by = "on their own test rows" if tested else "by their last training loss; the test rows have no owners"
    parts = "".join(_method_html(method, metric, len(known) == 1) for method, metric in known)
    return (
        f'{STYLE}<section class="card" id="clients"><div class="head"><h2>Clients</h2>'
        f'<span class="note">from worst to best, {by}; dark: the worst tenth</span></div>{parts}</section>'
    )


def _method_html(method: MethodClients, metric: str, unfolded: bool) -> str:
    columns = method.columns
    values = columns[metric].tolist()
    order = [row for row in worst_first(columns, metric, method.better) if math.isfinite(values[row])]
    shown = [name for name in (metric, f"personal_{metric.removeprefix('test_')}") if name in columns]
    notes = [
        f"{len(values)} clients",
        *(f"{n.replace('_', ' ')}: {describe_spread(columns, n, method.better)}" for n in shown),
    ]
    notes += [method.note] if method.note else []
    return (
        f'<details style="--c:{escape(method.colour)}"{" open" if unfolded else ""}><summary><i class="swatch"></i>'
        f'{escape(method.name)} <span class="note">{escape(" · ".join(notes))}</span></summary>'
        f"{_bars([values[row] for row in order], metric)}{_table(method, order)}</details>"
    )


def _bars(values: Sequence[float], metric: str) -> str:
    """Clients in order as bars, drawn as two paths to keep the page small."""
    drawn = _binned(values, MAX_BARS)
    top = 1.0 if metric.endswith("accuracy") else max(drawn, default=0.0) or 1.0
    width = 1000 / len(drawn)
    gap = 0.15 * width
    worst = -(-len(drawn) // 10)
    paths = []
    for kind, first, last in (("worst", 0, worst), ("rest", worst, len(drawn))):
        steps = []
        for place in range(first, last):
            high = max(0.5, 100 * min(max(drawn[place], 0.0) / top, 1.0))
            steps.append(f"M{place * width:.1f} 100v-{high:.1f}h{width - gap:.1f}v{high:.1f}z")
        paths.append(f'<path class="{kind}" d="{"".join(steps)}"/>')
    title = f"{metric.replace('_', ' ')} of {len(values)} clients, from worst to best"
    return (
        f'<svg class="served" viewBox="0 0 1000 100" preserveAspectRatio="none" role="img"><title>{escape(title)}'
        f"</title>{''.join(paths)}</svg>"
    )


def _binned(values: Sequence[float], most: int) -> list[float]:
    """At most ``most`` values: means of neighbours if there are more.

    >>> _binned([1.0, 3.0, 5.0, 7.0], 2)
    [2.0, 6.0]
    """
    if len(values) <= most:
        return list(values)
    ends = [round(place * len(values) / most) for place in range(most + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(ends)]


def _table(method: MethodClients, order: Sequence[int]) -> str:
    columns = method.columns
    shown = [*order[:MAX_ROWS], *(order[-1:] if len(order) > MAX_ROWS else ())]
    names = [
        name
        for name in (*columns.evaluated, "loss", "norm", "participations", "up_bytes", "down_bytes", "peer_bytes")
        if name in columns and (name != "peer_bytes" or columns[name].any())
    ]
    with_labels = len(method.label_counts) > 0
    head = "".join(f"<th>{escape(name.replace('_bytes', '').replace('_', ' '))}</th>" for name in names)
    rows = []
    for place, row in enumerate(shown):
        client = int(columns["client"][row])
        cells = "".join(f"<td>{escape(format_client_cell(name, columns[name][row]))}</td>" for name in names)
        labels = f'<td class="left">{_label_bar(method, client)}</td>' if with_labels else ""
        best = " (best)" if place == MAX_ROWS else ""
        name = escape(columns.name_of(client))
        rows.append(f'<tr><td class="left">{name}{best}</td>{labels}{cells}</tr>')
    labels = '<th class="left">labels held</th>' if with_labels else ""
    return (
        f'<div class="scroll"><table class="clients"><thead><tr><th class="left">worst clients</th>{labels}'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _label_bar(method: MethodClients, client: int) -> str:
    """The labels that a client holds, as one bar."""
    counts = method.label_counts[client] if client < len(method.label_counts) else ()
    total = sum(counts)
    if not total:
        return ""
    names = method.label_names if len(method.label_names) == len(counts) else list(map(str, range(len(counts))))
    title = ", ".join(f"{count} of {name}" for count, name in zip(counts, names, strict=True) if count)
    at, bars = 0.0, []
    for place, count in enumerate(counts):
        if count:
            share = 90 * count / total
            opacity = 0.2 + 0.8 * place / max(1, len(counts) - 1)
            bars.append(f'<rect x="{at:.1f}" width="{max(share - 0.6, 0.4):.1f}" height="12" opacity="{opacity:.2f}"/>')
            at += share
    return f'<svg class="mix" viewBox="0 0 90 12" role="img"><title>{escape(title)}</title>{"".join(bars)}</svg>'
