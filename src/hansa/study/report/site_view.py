"""The sites of a federation in reports: one row for each site, the worst first, on the page and in the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from hansa.runs.columns import base_metric, column_of, lower_is_better
from hansa.runs.metrics import combined_by, describe_seconds, round_seconds, site_names, site_totals
from hansa.study.report import formats
from hansa.study.report.entries import RankedEntry
from hansa.training.metric_direction import Direction


class SiteTable(NamedTuple):
    """A table of sites: headings, and a row of texts for each site, the worst first; and notes about it."""

    headings: list[str]
    rows: list[list[str]]
    notes: list[str]


def site_table(
    history: Sequence[Mapping[str, Any]],
    numbers: Mapping[str, Any],
    main: str,
    better: Mapping[str, Direction] | None = None,
) -> SiteTable | None:
    """Return the table of a run's sites; None if the run has no metrics by site.

    A number that a site's policy does not let out is shown as –.

    Args:
        history: The records of the run.
        numbers: Its summary, with final values.
        main: The metric that the run is ranked by, which comes first and orders the sites.
        better: The directions that the task stated.
    """
    sites = site_names(history)
    if not sites:
        return None
    totals = site_totals(history)
    first = f"test_{base_metric(main)}"
    measured = {name.partition("/")[2] for name in numbers if name.partition("/")[0] in sites}
    columns = [name for name in dict.fromkeys([first, *sorted(measured)]) if name in measured]
    counted = [name for name in ("up_bytes", "down_bytes") if any(name in totals.get(site, {}) for site in sites)]
    timed = any("work_seconds" in totals.get(site, {}) for site in sites)
    rows = []
    for site in _worst_first(sites, numbers, columns[0] if columns else first, better):
        last = next(
            (record[f"{site}/test_rows"] for record in reversed(history) if f"{site}/test_rows" in record), None
        )
        cells = [site, "–" if last is None else formats.format_count(last)]
        cells += [_cell(name, numbers.get(f"{site}/{name}")) for name in columns]
        cells += [formats.format_bytes(totals[site][name]) if site in totals else "–" for name in counted]
        if timed:
            cells.append(formats.format_duration(totals[site]["work_seconds"]) if site in totals else "–")
        rows.append(cells)
    headings = ["site", "test rows", *(column_of(name, better).label for name in columns)]
    headings += [{"up_bytes": "sent", "down_bytes": "received"}[name] for name in counted]
    return SiteTable([*headings, *(["work"] if timed else [])], rows, _notes(history, numbers, main, rows))


def _notes(
    history: Sequence[Mapping[str, Any]], numbers: Mapping[str, Any], main: str, rows: Sequence[Sequence[str]]
) -> list[str]:
    """The deviation over sites, how metrics were combined, and where the seconds of a round go."""
    notes = []
    over = f"sites_test_{base_metric(main)}"
    if f"{over}_worst" in numbers and f"{over}_std" in numbers:
        write = formats.formatter_of(over)
        worst = f"worst site {rows[0][0]} {write(numbers[f'{over}_worst'])}"
        notes.append(f"{column_of(over).label}: {worst}, deviation over sites {write(numbers[f'{over}_std'])}")
    last = history[-1] if len(history) else {}
    for name, how in combined_by(history).items():
        column = f"sites_test_{name}"
        bounds = [last.get(f"{column}_at_{side}") for side in ("least", "most")]
        known = all(isinstance(value, float) for value in bounds)
        within = f"; certainly between {bounds[0]:.3f} and {bounds[1]:.3f}" if known else ""
        notes.append(f"{column_of(column).label}: {_cell(column, numbers.get(column))}, {how}{within}")
    left_out = last.get("left_out")
    for site, reason in sorted(left_out.items()) if isinstance(left_out, dict) else ():
        notes.append(f"without {site}: {reason}")
    if parts := round_seconds(history):
        notes.append(f"a round takes {describe_seconds(parts)} (median)")
    return notes


def _worst_first(
    sites: Sequence[str], numbers: Mapping[str, Any], metric: str, better: Mapping[str, Direction] | None
) -> list[str]:
    try:
        sign = -1.0 if lower_is_better(metric, better) else 1.0
    except Exception:  # a metric without a direction
        return list(sites)
    values = {site: numbers.get(f"{site}/{metric}") for site in sites}
    return sorted(sites, key=lambda site: math.inf if values[site] is None else sign * float(values[site] or 0.0))


def _cell(name: str, value: Any) -> str:
    return "–" if value is None else formats.formatter_of(name)(value)


def sites_section(ranking: Sequence[RankedEntry]) -> str:
    """Return the section on sites as HTML; "" if no run has metrics by site."""
    parts = []
    for ranked in ranking:
        table = site_table(ranked.entry.histories[0], ranked.numbers, ranked.metric, ranked.better)
        if table is None:
            continue
        head, *body = (
            _row_html(row, "th" if not place else "td") for place, row in enumerate([table.headings, *table.rows])
        )
        notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
        name = f'<i class="swatch" style="--c:{ranked.colour}"></i> {escape(ranked.entry.name)}'
        rows = f"<thead>{head}</thead><tbody>{''.join(body)}</tbody>"
        parts.append(f'<h3>{name}</h3><div class="scroll"><table>{rows}</table></div>{notes}')
    if not parts:
        return ""
    return (
        '<section class="card" id="sites"><div class="head"><h2>Sites</h2><span class="note">'
        "final values on each site's own test rows, the worst first; –: the site's policy does not send it</span></div>"
        f"{''.join(parts)}</section>"
    )


def _row_html(cells: Sequence[str], tag: str) -> str:
    first, *others = (escape(cell) for cell in cells)
    return f'<tr><{tag} class="left">{first}</{tag}>{"".join(f"<{tag}>{cell}</{tag}>" for cell in others)}</tr>'
