"""The report: one HTML file with everything in it, that opens anywhere and asks the network for nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from statistics import fmean
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
    """Who holds how much of what: counts[client][label].

    >>> Holdings([[3, 0], [1, 2]], ["cat", "dog"]).labels
    ['cat', 'dog']
    """

    counts: Sequence[Sequence[int]]
    labels: Sequence[str]
    words: str = ""


def write(path: Path | str, entries: Sequence[Entry], **options: Any) -> Path:
    """Write the report of some runs; `page` has the options.

    >>> import tempfile
    >>> from hansa.report import Entry
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/page.html", [Entry("a", [{"round": 1, "test_accuracy": 0.5}])]).name
    'page.html'
    """
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
    """The report as HTML. Without a target accuracy, one that tells the runs apart is chosen.

    >>> from hansa.report import Entry
    >>> page([Entry("a", [{"round": 1, "test_accuracy": 0.5}])]).startswith("<!doctype html>")
    True
    """
    if target is None:
        target = common_target(entries)
    standings = rank(entries, target)
    metric = ranking_metric(standings)
    order = {id(entry): place for place, entry in enumerate(entries)}
    colours = {id(standing.entry): standing.colour for standing in standings}
    payload = {
        "target": target,
        "runs": [_drawn(entry, colours[id(entry)]) for entry in entries],
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
        ranked_by=escape(_ranked_by(standings, metric)),
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
        ("over clients", "last5_client_accuracy", formats.percent, False),
        ("worst tenth", "last5_client_accuracy_worst", formats.percent, False),
        ("personal", "last5_personal_accuracy", formats.percent, False),
        (reach, "rounds_to_target", formats.count, True),
        ("test loss", "last5_test_loss", formats.number, True),
        ("global loss", "last5_global_loss", formats.number, True),
    ]
    loss: list[tuple[str, str, Any, bool]] = [
        ("test loss", "last5_test_loss", formats.number, True),
        ("over clients", "last5_client_loss", formats.number, True),
        ("worst tenth", "last5_client_loss_worst", formats.number, True),
        ("personal", "last5_personal_loss", formats.number, True),
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
        ("lost", "lost", formats.count, True),
    ]
    known = (accuracy if ranking_metric(standings) == metrics.ACCURACY else loss) + costs
    found = []
    for column in known:
        values = [standing.numbers.get(column[1]) for standing in standings]
        quiet = column[1] in QUIET and not any(values)
        if any(value is not None for value in values) and not quiet:
            found.append(column)
    return found


SPREAD = ("accuracy", "loss", "rounds_to_target")
"""How the names of numbers end whose deviation over seeds is shown beside their mean."""


def cell(standing: Standing, key: str, write: Any) -> str:
    """One number of a method as text: over seeds the mean and the deviation; – where there is none."""
    value, runs = standing.numbers.get(key), len(standing.entry.runs)
    if key == "rounds_to_target" and value is None and runs > 1 and standing.numbers.get("reached"):
        return f"{standing.numbers['reached']} of {runs} runs"
    if value is None and key != "rounds_to_target":
        return "–"
    apart = standing.spreads.get(key) if key.endswith(SPREAD) else None
    return str(formats.give_or_take(write, value, None if apart is None else apart.deviation))


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
            mark = ' class="best"' if key in best and standing.numbers.get(key) == best[key] else ""
            cells.append(f"<td{mark}>{escape(cell(standing, key, write_number))}</td>")
        name = f'<i class="swatch" style="--c:{standing.colour}"></i><b>{escape(standing.entry.name)}</b>'
        if standing.entry.members:
            name += f' <span class="seeds">{len(standing.entry.members)} seeds</span>'
        rows.append(
            f'<tr data-run="{place}"><td class="rank">{position}</td><td class="left">{name}</td>{"".join(cells)}</tr>'
        )
    return (
        f'<table id="ranking"><thead><tr><th></th><th class="left">method</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def table_html(standings: Sequence[Standing], target: float | None) -> str:
    """The ranking alone, for a notebook."""
    return _table(standings, range(len(standings)), target)


def _tiles(standings: Sequence[Standing], target: float | None) -> list[str]:
    def tile(standing: Standing, what: str, value: str) -> str:
        return (
            f'<div class="tile" style="--c:{standing.colour}"><div class="what">{escape(what)}</div>'
            f'<div class="value">{escape(value)}</div><div class="who">{escape(standing.entry.name)}</div></div>'
        )

    metric = ranking_metric(standings)
    write_number = formats.percent if metric == metrics.ACCURACY else formats.number
    first = standings[0].numbers.get(f"last5_{metric}")
    told = cell(standings[0], f"last5_{metric}", write_number)
    found = [] if first is None else [tile(standings[0], f"best {metric.replace('_', ' ')}", told)]
    if target is None or metric != metrics.ACCURACY:
        return found
    for what, cost, written in (
        ("fewest rounds", "round", lambda n: f"{formats.count(n)} rounds"),
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
    """What a run had spent by the end of the round in which it first reached the target; of several seeds the mean, if
    all reached it."""
    spent: list[Any] = []
    for history in entry.histories:
        reached = metrics.rounds_to(history, target)
        if reached is None:
            return None
        spent.append(next(r.get(cost) for r in metrics.running_totals(history) if r["round"] == reached))
    if None in spent:
        return None
    return spent[0] if len(set(spent)) == 1 else fmean(spent)


def _drawn(entry: Entry, colour: str) -> dict[str, Any]:
    """What the page's script is given of a method: its mean curves and those of every seed."""
    found: dict[str, Any] = {"name": entry.name, "colour": colour, "series": entry.series()}
    if entry.members:
        named = zip(entry.members, entry.curves(), strict=True)
        found["seeds"] = [{"seed": member.seed, "series": series} for member, series in named]
    return found


def _ranked_by(standings: Sequence[Standing], metric: str) -> str:
    told = f"by the mean of the last five measurements of {metric.replace('_', ' ')}"
    if any(standing.entry.members for standing in standings):
        told += "; over seeds the mean ± one standard deviation"
    return told


def _config(standing: Standing) -> str:
    entry = standing.entry
    text = entry.config or entry.made or "not from a file"
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
    for run in (run for entry in entries for run in entry.runs):
        for name, value in _flat(run.environment).items():
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
