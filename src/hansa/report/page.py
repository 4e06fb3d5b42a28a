"""The report: one HTML file with everything in it, that opens anywhere and asks the network for nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from hansa.report import formats
from hansa.report.heatmap import heat_map
from hansa.report.standings import Entry, Standing, common_target, rank, ranking_metric
from hansa.runs import metrics
from hansa.store import io

_MARK = (
    '<svg viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="1.7" aria-hidden="true">'
    '<circle cx="12" cy="4.5" r="2.6"/><circle cx="4.5" cy="18" r="2.6"/><circle cx="19.5" cy="18" r="2.6"/>'
    '<path d="M10.7 6.8 5.8 15.7M13.3 6.8l4.9 8.9M7.1 18h9.8"/></svg>'
)

QUIET = ("peer_bits", "lost")
"""Columns that are left out where they are all zero, and in which having none is no merit."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Who holds how much of what: counts[client][label]."""

    counts: Sequence[Sequence[int]]
    labels: Sequence[str]
    words: str = ""


def write(path: Path | str, entries: Sequence[Entry], **options: Any) -> Path:
    """Write the report of some runs; `page` has the options."""
    path = Path(path)
    io.make_folder(path.parent.resolve())
    io.write_file(path, page(entries, **options).encode())
    return path


def page(
    entries: Sequence[Entry],
    *,
    title: str = "Federated runs compared",
    lead: str = "",
    facts: Sequence[str] = (),
    target: float | None = None,
    holdings: Holdings | None = None,
    citations: str = "",
) -> str:
    """The report as HTML. Without a target accuracy, one that tells the runs apart is chosen."""
    if target is None:
        target = common_target(entries)
    standings = rank(entries, target)
    metric = ranking_metric(standings)
    order = {id(entry): place for place, entry in enumerate(entries)}
    colours = {id(standing.entry): standing.colour for standing in standings}
    payload = {
        "target": target,
        "runs": [{"name": e.name, "colour": colours[id(e)], "series": e.series()} for e in entries],
    }
    assets = files("hansa.report").joinpath("assets")
    return Template(assets.joinpath("report.html").read_text(encoding="utf-8")).substitute(
        version=escape(_version()),
        title=escape(title),
        mark=_MARK,
        lead=escape(lead),
        facts="".join(f"<span>{escape(fact)}</span>" for fact in facts),
        style=assets.joinpath("report.css").read_text(encoding="utf-8"),
        script=assets.joinpath("report.js").read_text(encoding="utf-8"),
        tiles="".join(_tiles(standings, target)),
        ranked_by=escape(f"by the mean of the last five measurements of {metric.replace('_', ' ')}"),
        table=_table(standings, [order[id(standing.entry)] for standing in standings], target),
        partition="" if holdings is None else _holdings(holdings),
        configs="".join(_config(standing) for standing in standings),
        environment=_environment(entries),
        citations=_citations(citations),
        data=json.dumps(payload, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    )


def columns(standings: Sequence[Standing], target: float | None) -> list[tuple[str, str, Any, bool]]:
    """(heading, number, how it is written, smaller is better) of each column that some run has."""
    reach = f"rounds to {_short(target)}" if target is not None else ""
    accuracy: list[tuple[str, str, Any, bool]] = [
        ("accuracy", "last5_test_accuracy", formats.percent, False),
        ("best", "best_test_accuracy", formats.percent, False),
        (reach, "rounds_to_target", lambda n: "never" if n is None else str(n), True),
        ("test loss", "last5_test_loss", formats.number, True),
        ("global loss", "last5_global_loss", formats.number, True),
    ]
    loss: list[tuple[str, str, Any, bool]] = [
        ("test loss", "last5_test_loss", formats.number, True),
        ("global loss", "last5_global_loss", formats.number, True),
        ("loss", "last5_loss", formats.number, True),
        ("local loss", "last5_train_loss", formats.number, True),
    ]
    costs: list[tuple[str, str, Any, bool]] = [
        ("sent up", "up_bits", formats.bits, True),
        ("sent down", "down_bits", formats.bits, True),
        ("to peers", "peer_bits", formats.bits, True),
        ("simulated time", "simulated_total_seconds", formats.duration, True),
        ("wall time", "wall_seconds", formats.duration, True),
        ("lost", "lost", str, True),
    ]
    known = (accuracy if ranking_metric(standings) == metrics.ACCURACY else loss) + costs
    found = []
    for column in known:
        values = [standing.numbers.get(column[1]) for standing in standings]
        quiet = column[1] in QUIET and not any(values)
        if any(value is not None for value in values) and not quiet:
            found.append(column)
    return found


def _table(standings: Sequence[Standing], places: Sequence[int], target: float | None) -> str:
    shown = columns(standings, target)
    best: dict[str, Any] = {}
    for _, key, _, smaller in shown:
        values = [s.numbers[key] for s in standings if s.numbers.get(key) is not None]
        if len(set(values)) > 1 and key not in QUIET:
            best[key] = min(values) if smaller else max(values)
    head = "".join(f"<th>{escape(heading)}</th>" for heading, *_ in shown)
    rows = []
    for position, (standing, place) in enumerate(zip(standings, places, strict=True), start=1):
        cells = []
        for _, key, write_number, _ in shown:
            value = standing.numbers.get(key)
            mark = ' class="best"' if key in best and value == best[key] else ""
            missing = value is None and key != "rounds_to_target"
            cells.append(f"<td{mark}>{'–' if missing else escape(write_number(value))}</td>")
        name = f'<i class="swatch" style="--c:{standing.colour}"></i><b>{escape(standing.entry.name)}</b>'
        rows.append(
            f'<tr data-run="{place}"><td class="rank">{position}</td><td class="left">{name}</td>{"".join(cells)}</tr>'
        )
    return (
        f'<table id="ranking"><thead><tr><th></th><th class="left">method</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _tiles(standings: Sequence[Standing], target: float | None) -> list[str]:
    def tile(standing: Standing, what: str, value: str) -> str:
        return (
            f'<div class="tile" style="--c:{standing.colour}"><div class="what">{escape(what)}</div>'
            f'<div class="value">{escape(value)}</div><div class="who">{escape(standing.entry.name)}</div></div>'
        )

    metric = ranking_metric(standings)
    write_number = formats.percent if metric == metrics.ACCURACY else formats.number
    first = standings[0].numbers.get(f"last5_{metric}")
    found = [] if first is None else [tile(standings[0], f"best {metric.replace('_', ' ')}", write_number(first))]
    if target is None or metric != metrics.ACCURACY:
        return found
    for what, cost, written in (
        ("fewest rounds", "round", lambda n: f"{n} rounds"),
        ("fewest bits with the server", "server_bits", formats.bits),
        ("least simulated time", "simulated_total_seconds", formats.duration),
    ):
        costs = [(standing, _cost_at(standing.entry, target, cost)) for standing in standings]
        able = [(standing, spent) for standing, spent in costs if spent is not None]
        if able:
            standing, spent = min(able, key=lambda pair: pair[1])
            found.append(tile(standing, f"{what} to {_short(target)}", written(spent)))
    return found


def _cost_at(entry: Entry, target: float, cost: str) -> Any:
    """What a run had spent by the end of the round in which it first reached the target."""
    reached = metrics.rounds_to(entry.history, target)
    if reached is None:
        return None
    return next(r.get(cost) for r in metrics.running_totals(entry.history) if r["round"] == reached)


def _config(standing: Standing) -> str:
    entry = standing.entry
    text = entry.config or "not from a file"
    return (
        f'<details><summary><i class="swatch" style="--c:{standing.colour}"></i>{escape(entry.name)}</summary>'
        f"<pre>{escape(text.strip())}</pre></details>"
    )


def _holdings(holdings: Holdings) -> str:
    note = f'<p class="note">{escape(holdings.words)}</p>' if holdings.words else ""
    return (
        '<section class="card"><div class="head"><h2>Who holds what</h2>'
        '<span class="note">a column a client, a row a label; darker is more</span></div>'
        f"{heat_map(holdings.counts, holdings.labels)}{note}</section>"
    )


def _environment(entries: Sequence[Entry]) -> str:
    found: dict[str, dict[str, None]] = {}
    for entry in entries:
        for name, value in _flat(entry.environment).items():
            found.setdefault(name, {})[str(value)] = None
    if not found:
        return '<p class="note">not recorded</p>'
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(', '.join(values))}</dd>" for name, values in found.items())
    return f"<dl>{lines}</dl>"


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(value if isinstance(value, Mapping) else {name: value})
    return flat


def _citations(text: str) -> str:
    if not text:
        return ""
    return (
        '<section class="card"><div class="head"><h2>Cite</h2>'
        '<span class="note">exactly the parts in use</span></div>'
        f"<details><summary>BibTeX</summary><pre>{escape(text.strip())}</pre></details></section>"
    )


def _short(target: float) -> str:
    return formats.percent(target).replace(".0%", "%")


def _version() -> str:
    try:
        return version("hansa")
    except PackageNotFoundError:
        return ""
