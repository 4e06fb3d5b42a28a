"""The report page: one self-contained HTML file that needs no network, made by Jinja2 and drawn by uPlot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import yaml

from hansa import __version__
from hansa.runs.client_columns import Array
from hansa.runs.columns import ACCURACY, OUTCOMES, TOTALS, WINDOW, column_of, evaluated_metrics
from hansa.runs.metrics import column_names, diverged_at
from hansa.runs.store import io
from hansa.study.report.entries import (
    MAX_POINTS,
    RankedEntry,
    ReportEntry,
    charted_columns,
    common_target,
    has_column,
    rank,
)
from hansa.study.report.ranking import (
    best_values,
    describe_order,
    format_cell,
    format_target,
    is_best,
    ranking_columns,
    target_cells,
    target_ladder,
    tiles,
)
from hansa.study.report.tables import (
    LabelCounts,
    client_metric,
    describe_spread,
    format_client_cell,
    job_columns,
    partitions_of,
    site_table,
    with_clients,
    worst_first,
)

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

MAX_NUMBERS = 140_000
"""The curves of a page have at most this many numbers, about a megabyte. Longer histories are thinned, and the page
says so."""
MAX_PARTITIONS, MAX_CLIENTS, MAX_CELLS = 4, 400, 20_000
"""Partitions that are drawn, clients of each, and cells of each."""
MAX_BARS, MAX_ROWS = 300, 10
"""More clients are binned to this many bars; this many of the worst have a table row."""
MAX_TIMED_CLIENTS, MAX_JOBS = 1000, 8000
"""Clients and jobs drawn on a page's timelines. Of more clients every n-th by speed, of more jobs the first."""
JOB_COLUMNS = ("round", "client", "admitted", "start_seconds", "download_seconds", "compute_seconds", "upload_seconds")
VERDICT_STYLES = {"agrees": "good", "holds": "good", "same order": "fair", "differs": "bad", "does not": "bad"}
"""How table cells that begin with a verdict are marked."""
PARTS = (
    "notices",
    "tiles",
    "ranking",
    "tables",
    "targets",
    "timeline",
    "partition",
    "clients",
    "configs",
    "environment",
)
"""The blocks of the template that depend on the runs; a live page replaces those that changed."""


class PageSection(NamedTuple):
    """A section of the page. ``html`` is inserted unchanged: the caller escapes untrusted text.

    >>> str(PageSection("Clients", "<p>none</p>"))
    '<section class="card"><div class="head"><h2>Clients</h2></div><p>none</p></section>'
    """

    title: str
    html: str
    note: str = ""
    id: str = ""

    def __str__(self) -> str:
        return str(_macro("card", self.title, self.note, self.id, self.html)) if self.html else ""


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table given as data, such as published numbers beside measured ones.

    >>> table = ReportTable("Published numbers", ["", "published", "ours"], [["FedAvg", 0.84, 0.82]])
    >>> "published" in str(table.to_section())
    True
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""

    def to_section(self) -> PageSection:
        """Return the table as a section of the page."""
        cells = [[verdict_cell(cell) for cell in row] for row in self.rows]
        return PageSection(self.title, table_html(self.headings, cells), self.note, "published")


def table_html(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells, text or markup; the first column is left-aligned."""
    return str(_macro("table", headings, rows))


def verdict_cell(value: Any) -> Markup:
    """Return a table cell as markup, with verdicts marked."""
    text = "–" if value is None else str(value)
    style = next((style for verdict, style in VERDICT_STYLES.items() if text.startswith(verdict)), "")
    return _macro("verdict", text, style)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader

    environment = Environment(loader=FunctionLoader(asset), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.globals.update(asset=asset, version=__version__)
    return environment


def asset(name: str) -> str:
    """Return a file of the page: its template, its style, its script, or the chart library."""
    return files("hansa.study.report").joinpath("assets", name).read_text(encoding="utf-8")


def _macro(name: str, *arguments: Any) -> Markup:
    """Call a macro of the templates; arguments that are text are escaped."""
    rendered: Markup = getattr(_environment().get_template("macros.html").module, name)(*arguments)
    return rendered


def write_page(path: Path | str, entries: Sequence[ReportEntry], **options: Any) -> Path:
    """Write the report page of some entries and return its path.

    Args:
        path: The HTML file.
        entries: The methods to compare.
        **options: The keyword arguments of `render_page`.

    >>> import tempfile
    >>> from hansa.study.report import ReportEntry
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_page(f"{folder}/page.html", [ReportEntry("a", [{"round": 1, "test_accuracy": 0.5}])]).name
    'page.html'
    """
    path = Path(path)
    io.make_folder(path.parent.resolve())
    io.write_file(path, render_page(entries, **options).encode("utf-8", "surrogateescape"))
    return path


def render_page(
    entries: Sequence[ReportEntry],
    *,
    title: str = "Federated runs compared",
    lead: str = "",
    facts: Sequence[str] = (),
    citations: str = "",
    **options: Any,
) -> str:
    """Return the report page as HTML.

    Args:
        entries: The methods to compare.
        title: The heading.
        lead: A paragraph below it.
        facts: Short facts on the setting, below the lead.
        citations: BibTeX entries.
        **options: The keyword arguments of `page_content`.

    >>> from hansa.study.report import ReportEntry
    >>> render_page([ReportEntry("a", [{"round": 1, "test_accuracy": 0.5}])]).startswith("<!doctype html>")
    True
    """
    content = page_content(entries, **options)
    footer = "This page is a single file and needs no network."
    return fill_template(content, title=title, lead=lead, facts=facts, citations=citations.strip(), footer=footer)


def fill_template(content: Mapping[str, Any], **header: Any) -> str:
    """Return the page of some content; ``header`` has the title and what else stands around it."""
    return _environment().get_template("report.html").render(**content, **header)


def render_parts(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the parts of the page that depend on the runs, as HTML by name."""
    template = _environment().get_template("report.html")
    context = template.new_context(dict(content))
    return {name: "".join(template.blocks[name](context)) for name in PARTS}


def page_content(
    entries: Sequence[ReportEntry],
    *,
    target: float | None = None,
    metric: str | None = None,
    window: int = WINDOW,
    partition: LabelCounts | None = None,
    problems: Sequence[str] = (),
    published: Sequence[ReportTable] = (),
    sections: Sequence[PageSection] = (),
) -> dict[str, Any]:
    """Return what the template and the script of a page show of some runs.

    Args:
        entries: The methods to compare.
        target: A value for the metric to reach; by default an accuracy that about half of the methods reach.
        metric: The column to rank by; by default the main metric of the tasks.
        window: How many of the last measurements a score averages.
        partition: The label distribution to draw; by default those of the run folders.
        problems: Warnings for the top of the page, such as folders that could not be read.
        published: Tables of published numbers.
        sections: Additional sections.
    """
    if target is None:
        target = common_target(entries, metric)
    ranking = rank(entries, target, metric=metric, window=window)
    ranked_by = ranking[0].metric
    targets = target_ladder(ranking, target)
    damages: list[str] = [f"{entry.name}: {note}" for entry in entries for run in entry.runs for note in run.notes]
    clients = _clients(ranking, damages)
    timelines = _timelines(ranking, damages)
    partitions = (partitions_of([r.entry for r in ranking]) if partition is None else [partition])[:MAX_PARTITIONS]
    return {
        "notices": [*problems, *dict.fromkeys(damages), *comparability_warnings(entries, ranked_by)],
        "tiles": tiles(ranking, target),
        "ranking": ranking_table(ranking, target, entries),
        "tables": [table.to_section() for table in published] + list(sections),
        "sites": _sites(ranking),
        "targets": {
            "label": column_of(ranked_by).label,
            "headings": [format_target(value, ranked_by) for value in targets],
            "rows": list(zip(ranking, target_cells(ranking, targets), strict=True)),
        }
        if targets
        else None,
        "timelines": timelines,
        "partitions": partitions,
        "clients": clients,
        "differences": differences([ranked.entry for ranked in ranking]),
        "configs": [(r, r.entry.config or r.entry.composition or "no configuration file") for r in ranking],
        "environment": _environments(entries),
        "data": {
            **chart_content(entries, ranking, target),
            "timelines": [timeline.pop("data") for timeline in timelines],
            "clients": [method.pop("data") for method in clients],
            "partitions": [_heat(each) for each in partitions],
        },
    }


def empty_content(problems: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of a page without runs."""
    return {"notices": list(problems), "data": chart_content(())}


def ranking_table(
    ranking: Sequence[RankedEntry], target: float | None, entries: Sequence[ReportEntry] = ()
) -> dict[str, Any]:
    """Return the ranking as the template shows it; rows have the place of their entry among the curves of the page."""
    columns = ranking_columns(ranking, target)
    best = best_values(ranking, columns)
    places = {id(entry): place for place, entry in enumerate(entries)}
    rows = [
        {
            "ranked": ranked,
            "place": places.get(id(ranked.entry), 0),
            "cells": [(format_cell(ranked, c.key, c.write), is_best(ranked, c.key, best)) for c in columns],
        }
        for ranked in ranking
    ]
    return {"columns": columns, "rows": rows, "order": describe_order(ranking)}


def ranking_html(ranking: Sequence[RankedEntry], target: float | None) -> str:
    """Return the ranking as an HTML table, for notebooks."""
    return str(_macro("ranking_table", ranking_table(ranking, target)))


def facts_html(caption: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return a small table of names and values with a caption, for notebooks."""
    return str(_macro("facts_table", caption, rows))


def chart_content(
    entries: Sequence[ReportEntry], ranking: Sequence[RankedEntry] = (), target: float | None = None
) -> dict[str, Any]:
    """Return what the page's script draws: the target and the curves, in the order of the entries."""
    colours = {id(ranked.entry): ranked.colour for ranked in ranking}
    most = max_points(entries)
    longest = max((min(map(len, entry.histories)) for entry in entries), default=0)
    main = ranking[0].metric if ranking else None
    names = dict.fromkeys(n for entry in entries for h in entry.histories for n in column_names(h))
    return {
        "target": target,
        "metric": main,
        "window": ranking[0].window if ranking else WINDOW,
        "stride": max(1, math.ceil(longest / most)),
        "columns": {name: _chart_column(name) for name in sorted(charted_columns(names), key=lambda n: n != main)},
        "runs": [_method_curves(entry, colours[id(entry)], most) for entry in entries],
    }


def _chart_column(name: str) -> dict[str, Any]:
    """What the page's script needs to know of a column."""
    column = column_of(name)
    detail = "detail" in column.charts
    return {"label": column.label, "unit": column.unit, "axis": column.axis, "detail": detail,
            "hide_zero": column.hide_zero}  # fmt: skip


def max_points(entries: Sequence[ReportEntry]) -> int:
    """Return how many points each curve may have, so that the page stays small."""

    def measured_columns(history: Sequence[Mapping[str, Any]]) -> int:  # evenly rising columns take no space
        names = set(column_names(history))
        return 2 + len(set(charted_columns(names)) & names)

    curves = sum(len(entry.runs) for entry in entries) or 1
    columns = max((measured_columns(history) for entry in entries for history in entry.histories), default=1)
    return max(60, min(MAX_POINTS, MAX_NUMBERS // (curves * columns)))


def _method_curves(entry: ReportEntry, colour: str, most: int) -> dict[str, Any]:
    tables = [{name: pack_column(values) for name, values in table.items()} for table in entry.curves(most)]
    seeds = [member.seed for member in entry.members] or [None]
    return {"name": entry.name, "colour": colour, "seeds": seeds, "series": tables}


def pack_column(values: Sequence[float | None]) -> Any:
    """Return a column of integers with equal steps as first value, step and length; other columns as they are.

    >>> pack_column([8, 16, 24]), pack_column([0.5, 0.7, 0.6]), pack_column([1, None, 3])
    ({'first': 8, 'step': 8, 'count': 3}, [0.5, 0.7, 0.6], [1, None, 3])
    """
    if len(values) > 2 and all(isinstance(value, int) for value in values):
        first, step = values[0], values[1] - values[0]  # type: ignore[operator]
        if all(value == first + place * step for place, value in enumerate(values)):  # type: ignore[operator]
            return {"first": first, "step": step, "count": len(values)}
    return list(values)


def _sites(ranking: Sequence[RankedEntry]) -> list[tuple[RankedEntry, Any]]:
    tables = ((r, site_table(r.entry.histories[0], r.numbers, r.metric, r.better)) for r in ranking)
    return [(ranked, table) for ranked, table in tables if table is not None]


def _clients(ranking: Sequence[RankedEntry], damages: list[str]) -> list[dict[str, Any]]:
    """Return the clients of each method that has a record of them; with several seeds, those of the first."""
    methods = []
    for ranked in ranking:
        run, problems = with_clients(ranked.entry.runs[0])
        damages += [f"{ranked.entry.name}: {problem}" for problem in problems]
        metric = None if run.clients is None else client_metric(run.clients, ranked.metric)
        if run.clients is not None and metric is not None:
            methods.append(_client_table(ranked, run, run.clients, metric))
    return methods


def _client_table(ranked: RankedEntry, run: ReportEntry, columns: Any, metric: str) -> dict[str, Any]:
    values = columns[metric].tolist()
    order = [row for row in worst_first(columns, metric, ranked.better) if math.isfinite(values[row])]
    described = [name for name in (metric, f"personal_{metric.removeprefix('test_')}") if name in columns]
    notes = [f"{len(values)} clients"]
    notes += [f"{name.replace('_', ' ')}: {describe_spread(columns, name, ranked.better)}" for name in described]
    notes += [f"seed {run.seed}, the first of {len(ranked.entry.runs)}"] if ranked.entry.members else []
    numbers = (*columns.evaluated, "loss", "norm", "participations", "up_bytes", "down_bytes", "peer_bytes")
    names = [name for name in numbers if name in columns and (name != "peer_bytes" or columns[name].any())]
    rows = []
    for row in [*order[:MAX_ROWS], *(order[-1:] if len(order) > MAX_ROWS else ())]:
        client = int(columns["client"][row])
        cells = [format_client_cell(name, columns[name][row]) for name in names]
        rows.append({"name": columns.name_of(client), "labels": _labels_held(run, client), "cells": cells})
    return {
        "ranked": ranked,
        "notes": notes,
        "tested": metric != "loss",
        "headings": [name.replace("_bytes", "").replace("_", " ") for name in names],
        "rows": rows,
        "labelled": len(run.label_counts) > 0,
        "best": len(order) > MAX_ROWS,
        "data": {
            "name": metric,
            "unit": column_of(metric).unit,
            "values": [float(f"{value:.4g}") for value in binned([values[row] for row in order], MAX_BARS)],
            "clients": len(order),
        },
    }


def _labels_held(run: ReportEntry, client: int) -> list[tuple[str, int, float]]:
    """The labels that a client holds: name, samples and share of each, the largest first."""
    counts = run.label_counts[client] if client < len(run.label_counts) else ()
    total = sum(counts)
    names = run.label_names if len(run.label_names) == len(counts) else list(map(str, range(len(counts))))
    held = [(name, count, count / total) for name, count in zip(names, counts, strict=True) if count]
    return sorted(held, key=lambda label: -label[1])


def binned(values: Sequence[float], most: int) -> list[float]:
    """At most ``most`` values: means of neighbours if there are more.

    >>> binned([1.0, 3.0, 5.0, 7.0], 2)
    [2.0, 6.0]
    """
    if len(values) <= most:
        return list(values)
    ends = [round(place * len(values) / most) for place in range(most + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(ends)]


def _timelines(ranking: Sequence[RankedEntry], damages: list[str]) -> list[dict[str, Any]]:
    """Return the timelines of the methods with a virtual clock."""
    found = []
    for ranked in ranking:
        columns, problems = job_columns(ranked.entry.runs[0])
        damages += [f"{ranked.entry.name}: {problem}" for problem in problems]
        if columns is not None:
            found.append((ranked, columns))
    timelines = []
    for ranked, columns in found:
        data = timeline_data(columns, MAX_JOBS // len(found))
        notes = [f"{data['all_clients']} clients, {data['all_jobs']} jobs"]
        if ranked.entry.members:
            notes.append(f"seed {ranked.entry.runs[0].seed}, the first of {len(ranked.entry.runs)}")
        if data["all_clients"] > len(data["clients"]):
            notes.append(f"{len(data['clients'])} clients are drawn, from fast to slow")
        if data["all_jobs"] > len(data["jobs"]):
            notes.append(f"{len(data['jobs'])} jobs are drawn")
        timelines.append({"ranked": ranked, "notes": notes, "data": data})
    return timelines


def timeline_data(columns: Mapping[str, Array], most: int = MAX_JOBS) -> dict[str, Any]:
    """Return what the page draws: clients from fast to slow, and for each job its row, the seconds at which it starts,
    is downloaded, computed and uploaded, whether it was refused, and its round.

    >>> one = {"round": [1], "client": [7], "admitted": [True], "start_seconds": [0.0], "download_seconds": [1.0],
    ...        "compute_seconds": [2.0], "upload_seconds": [1.0]}
    >>> data = timeline_data({name: np.array(values) for name, values in one.items()})
    >>> data["clients"], data["seconds"], data["jobs"]
    ([7], 4.0, [[0, 0.0, 1.0, 3.0, 4.0, 0, 1]])
    """
    timed = ~np.isnan(columns["start_seconds"].astype(np.float64))
    table = {name: columns[name][timed] for name in JOB_COLUMNS}
    start = table["start_seconds"].astype(np.float64)
    phases = [table[f"{name}_seconds"].astype(np.float64) for name in ("download", "compute", "upload")]
    times = [start, *(start + np.cumsum(phases, axis=0))]
    clients, places = np.unique(table["client"], return_inverse=True)
    speed = np.bincount(places, times[3] - start) / np.bincount(places) if len(clients) else np.zeros(0)
    order = np.lexsort((clients, speed))
    if len(order) > MAX_TIMED_CLIENTS:
        order = order[np.linspace(0, len(order) - 1, MAX_TIMED_CLIENTS).round().astype(int)]
    row_of = np.full(len(clients), -1)
    row_of[order] = np.arange(len(order))
    rows = row_of[places] if len(clients) else np.zeros(0, int)
    shown = np.flatnonzero(rows >= 0)
    shown = shown[np.lexsort((rows[shown], start[shown]))][:most]
    refused = (~table["admitted"].astype(bool))[shown].astype(int).tolist()
    seconds = [[float(f"{value:.5g}") for value in time[shown]] for time in times]
    return {
        "seconds": float(times[3][shown].max(initial=0.0)) or 1.0,
        "clients": clients[order].tolist(),
        "jobs": [
            list(job)
            for job in zip(rows[shown].tolist(), *seconds, refused, table["round"][shown].tolist(), strict=True)
        ],
        "all_jobs": int(timed.sum()),
        "all_clients": len(clients),
    }


def _heat(partition: LabelCounts) -> dict[str, Any]:
    """The label distribution that the page draws: the labels, and the samples of each that each client holds."""
    shown = partition.counts[: min(MAX_CLIENTS, MAX_CELLS // max(1, len(partition.labels)))]
    total = partition.population or len(partition.counts)
    return {"labels": list(partition.labels), "counts": [list(map(int, row)) for row in shown], "clients": total}


def differences(entries: Sequence[ReportEntry]) -> list[tuple[str, list[str]]]:
    """Return the dotted keys in which the configurations differ, with the value of each as YAML.

    >>> first = ReportEntry("a", (), "algorithm: fedavg\\nlocal: {lr: 0.1}")
    >>> differences([first, ReportEntry("b", (), "local: {lr: 0.2, steps: 3}")])[1]
    ('local.lr', ['0.1', '0.2'])
    """
    tables = [flatten_config(_config_data(entry.config)) for entry in entries]
    if len(entries) < 2 or not all(entry.config for entry in entries):
        return []
    keys = {key: None for table in tables for key in table if key.split(".")[0] not in ("name", "seed", "seeds")}
    differing = [key for key in keys if len({repr(table.get(key, ...)) for table in tables}) > 1]
    return [(key, [_yaml_value(table.get(key, ...)) for table in tables]) for key in differing]


def flatten_config(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections to dotted keys; a component (a mapping with ``kind``) stays whole.

    >>> flatten_config({"local": {"lr": 0.1}, "data": {"partition": {"kind": "iid"}}})
    {'local.lr': 0.1, 'data.partition': {'kind': 'iid'}}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(value, Mapping) and "kind" not in value and value:
            flat.update(flatten_config(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _config_data(text: str) -> Any:
    from hansa.config import parse_document
    from hansa.core.errors import HansaError

    try:
        return parse_document(text).data if text else {}
    except HansaError:
        return {}


def _yaml_value(value: Any) -> str:
    if value is ...:
        return "–"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).strip()
    return text.removesuffix("\n...").strip()[:200]


def _environments(entries: Sequence[ReportEntry]) -> list[tuple[str, str]]:
    """The machines and versions of all runs: names, and the values of all runs."""
    values: dict[str, dict[str, None]] = {}
    for run in (run for entry in entries for run in entry.runs):
        for name, value in run.environment.items():
            for key, inner in value.items() if isinstance(value, Mapping) else ((name, value),):
                values.setdefault(key, {})[str(inner)] = None
    return [(name, ", ".join(texts)) for name, texts in values.items()]


def comparability_warnings(entries: Sequence[ReportEntry], metric: str = ACCURACY) -> list[str]:
    """Return why some entries cannot be compared directly, and which of them diverged.

    Args:
        entries: The methods to compare.
        metric: The column that they are ranked by.

    >>> one, other = (
    ...     ReportEntry("a", [{"round": 1, "test_accuracy": 0.5}]),
    ...     ReportEntry("b", [{"round": 1, "loss": 0.5}]),
    ... )
    >>> comparability_warnings([one, other])
    ['b measured no test accuracy: it is ranked after those that did.']
    """
    warnings = _data_warnings(entries)
    what = metric.replace("_", " ")
    without = [entry.name for entry in entries if not any(has_column(h, metric) for h in entry.histories)]
    if metric not in TOTALS and without and len(without) < len(entries):
        they_are = "they are" if len(without) > 1 else "it is"
        warnings.append(f"{', '.join(without)} measured no {what}: {they_are} ranked after those that did.")
    for entry in entries:
        rounds = [(run.seed, diverged_at(run.history, metric)) for run in entry.runs]
        seeds = [f"{f'seed {seed} ' if entry.members else ''}from round {round} on" for seed, round in rounds if round]
        if seeds:
            warnings.append(f"{entry.name} diverged: its {what} is not finite {', '.join(seeds)}. It is ranked last.")
        columns = [{*OUTCOMES, *evaluated_metrics(column_names(h))} & {*column_names(h)} for h in entry.histories]
        if len(set(map(frozenset, columns))) > 1:
            warnings.append(f"{entry.name}: its seeds measured different metrics; only common ones are averaged.")
    return warnings


def _data_warnings(entries: Sequence[ReportEntry]) -> list[str]:
    """Return warnings about different data, or different clients of the same data.

    Digests of runs with the same seed decide, as far as they were recorded; otherwise the name of the data does.
    """
    rows, partitions = (_by_digest(entries, kind) for kind in ("data", "partition"))
    if rows is None:
        groups = {name: members for name, members in _by_name(entries).items() if name}
        listed = "; ".join(f"{name}: {', '.join(members)}" for name, members in groups.items())
    else:
        groups = rows
        names = {member: name for name, members in _by_name(entries).items() for member in members}
        listed = "; ".join(f"{names[members[0]] or 'data'}: {', '.join(members)}" for members in rows.values())
    if len(groups) > 1:
        return [f"These runs use different data ({listed}): accuracies and losses are not comparable."]
    if partitions is not None and len(partitions) > 1:
        listed = "; ".join(", ".join(members) for members in partitions.values())
        return [f"These runs divide the data differently over clients ({listed})."]
    return []


def _by_digest(entries: Sequence[ReportEntry], kind: str) -> dict[str, list[str]] | None:
    """Entries by a digest, at the first seed that all of them ran; None if there is none, or no digest."""
    tables = [{run.seed: run.data[kind] for run in entry.runs if kind in run.data} for entry in entries]
    common = [seed for seed in tables[0] if all(seed in table for table in tables)]
    if not common:
        return None
    groups: dict[str, list[str]] = {}
    for entry, table in zip(entries, tables, strict=True):
        groups.setdefault(table[common[0]], []).append(entry.name)
    return groups


def _by_name(entries: Iterable[ReportEntry]) -> dict[str, list[str]]:
    """Entries by the name of their data, "" if it is not known."""
    groups: dict[str, list[str]] = {}
    for entry in entries:
        section = _config_data(entry.config).get("data") if entry.config else None
        in_file = str(section.get("factory") or section.get("name") or "") if isinstance(section, Mapping) else ""
        recorded = entry.runs[0].data.get("name", "")
        name = in_file or recorded or ("fashion-mini" if isinstance(section, Mapping) else "")
        groups.setdefault(name, []).append(entry.name)
    return groups
