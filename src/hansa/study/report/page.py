"""The report page: one self-contained HTML file that needs no network."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from hansa import __version__
from hansa.runs.columns import WINDOW, column_of
from hansa.runs.metrics import column_names
from hansa.runs.store import io
from hansa.study.report.client_view import clients_section, method_clients
from hansa.study.report.cluster_graphs import graphs_section
from hansa.study.report.entries import (
    MAX_POINTS,
    RankedEntry,
    ReportEntry,
    charted_columns,
    common_target,
    rank,
)
from hansa.study.report.partition import LabelCounts, partitions_of
from hansa.study.report.ranking import describe_order, ladder_table, ranking_html, target_ladder, tiles
from hansa.study.report.sections import (
    PageSection,
    ReportTable,
    citations_section,
    comparability_warnings,
    configs_section,
    environment_section,
    notice_list,
    partition_section,
)
from hansa.study.report.site_view import sites_section
from hansa.study.report.timeline import timeline_section

MARK = (
    '<svg viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="1.7" aria-hidden="true">'
    '<circle cx="12" cy="4.5" r="2.6"/><circle cx="4.5" cy="18" r="2.6"/><circle cx="19.5" cy="18" r="2.6"/>'
    '<path d="M10.7 6.8 5.8 15.7M13.3 6.8l4.9 8.9M7.1 18h9.8"/></svg>'
)
SCRIPTS = ("plot.js", "report.js", "timeline.js")
MAX_NUMBERS = 200_000
"""A page has at most this many numbers, about 1.5 MB. Longer histories are thinned, and the page says so."""


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
        **options: The keyword arguments of `render_parts`.

    >>> from hansa.study.report import ReportEntry
    >>> render_page([ReportEntry("a", [{"round": 1, "test_accuracy": 0.5}])]).startswith("<!doctype html>")
    True
    """
    parts, content = render_parts(entries, **options)
    return fill_template(
        parts,
        content,
        title=title,
        facts=facts,
        footer="This page is a single file and needs no network.",
        lead=escape(lead),
        citations=str(citations_section(citations)),
    )


def fill_template(
    parts: Mapping[str, str],
    content: Mapping[str, Any],
    *,
    title: str,
    facts: Sequence[str],
    footer: str,
    scripts: Sequence[str] = SCRIPTS,
    lead: str = "",
    citations: str = "",
    live: str = "",
    policy: str = "",
) -> str:
    """Return the page made of rendered parts, the content of its charts, its style and its scripts."""
    assets = files("hansa.study.report").joinpath("assets")

    def asset(name: str) -> str:
        return assets.joinpath(name).read_text(encoding="utf-8")

    return Template(asset("report.html")).substitute(
        **parts,
        version=escape(__version__),
        title=escape(title),
        mark=MARK,
        lead=lead,
        facts="".join(f"<span>{escape(fact)}</span>" for fact in facts),
        live=live,
        policy=policy,
        citations=citations,
        footer=footer,
        style=asset("report.css"),
        script="\n".join(map(asset, scripts)),
        data=script_json(content),
    )


def render_parts(
    entries: Sequence[ReportEntry],
    *,
    target: float | None = None,
    metric: str | None = None,
    window: int = WINDOW,
    partition: LabelCounts | None = None,
    problems: Sequence[str] = (),
    published: Sequence[ReportTable] = (),
    sections: Sequence[PageSection] = (),
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the parts of the page that depend on the runs, as HTML by name, and the content of its charts.

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
    order = {id(entry): place for place, entry in enumerate(entries)}
    targets = target_ladder(ranking, target)
    ladder = f'<div class="scroll">{ladder_table(ranking, targets)}</div>' if targets else ""
    partitions, populations = partitions_of([ranked.entry for ranked in ranking])
    drawn = [partition] if partition is not None else partitions
    parts = {
        "notices": notice_list([*problems, *comparability_warnings(entries, ranked_by)]),
        "tiles": "".join(tiles(ranking, target)),
        "ranked_by": escape(describe_order(ranking)),
        "table": ranking_html(ranking, target, [order[id(ranked.entry)] for ranked in ranking]),
        "published": sites_section(ranking) + "".join(str(table.to_section()) for table in published),
        "targets": str(
            PageSection(
                "Rounds to target",
                ladder,
                f"of {column_of(ranked_by).label}; below them the bits sent until then, over all links",
                "reach",
            )
        ),
        "sections": "".join(map(str, sections)),
        "graphs": timeline_section(ranking) + str(graphs_section(ranking, populations)),
        "partition": str(partition_section(drawn)) + clients_section(method_clients(ranking), ranked_by),
        "configs": str(configs_section(ranking)),
        "environment": str(environment_section(entries)),
    }
    return parts, chart_content(entries, ranking, target)


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
    return {
        "label": column.label,
        "unit": column.unit,
        "axis": column.axis,
        "detail": detail,
        "hide_zero": column.hide_zero,
    }


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
    curves: dict[str, Any] = {"name": entry.name, "colour": colour}
    if not entry.members:
        return {**curves, "series": tables[0]}
    seeds = zip(entry.members, tables, strict=True)
    return {**curves, "seeds": [{"seed": member.seed, "series": table} for member, table in seeds]}


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


def script_json(content: Any) -> str:
    """Return JSON that is safe inside a script element."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
