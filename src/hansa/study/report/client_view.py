"""Who is served how: the clients of each method from worst to best, and the worst of them beside what they hold."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from hansa.core.errors import HansaError
from hansa.data.split import label_facts
from hansa.runs.client_columns import ClientColumns, spread
from hansa.runs.client_record import read_by_client
from hansa.runs.folder_lock import PARTITION, RECORD
from hansa.runs.metrics import smaller_is_better
from hansa.study.report import formats
from hansa.study.report.entries import Entry, Standing
from hansa.study.report.partition_summary import label_names

log = logging.getLogger("hansa")

_SHORT = 1 << 22  # bytes of a record that is read again at every change

RANKED_BY = ("test_accuracy", "test_loss", "loss")
"""What clients are put in order by, the first that there is."""

BARS, ROWS = 300, 10
"""More clients than bars are put together, and so many of the worst are told one by one."""

STYLE = (
    "<style>.served{width:100%;height:90px;display:block;margin:6px 0 2px}.served .rest{fill:var(--c);opacity:.35}"
    ".served .worst{fill:var(--c)}.mix{width:90px;height:12px;vertical-align:middle}.mix rect{fill:var(--c)}"
    ".clients td,.clients th{padding-top:3px;padding-bottom:3px}</style>"
)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A method's clients, one row each, and, where that is known, how many samples of each label they hold."""

    name: str
    colour: str
    by: ClientColumns
    holds: Sequence[Sequence[int]] = ()
    labels: Sequence[str] = ()
    note: str = ""


def served(standings: Sequence[Standing]) -> list[Served]:
    """The clients of methods, of several seeds those of the first."""
    found = []
    for standing in standings:
        first = standing.entry.runs[0]
        if first.clients is None and first.folder:
            first = _read(first)
        if first.clients is not None:
            note = f"seed {first.seed}, the first of {len(standing.entry.runs)}" if standing.entry.members else ""
            found.append(Served(standing.entry.name, standing.colour, first.clients, first.holds, first.labels, note))
    return found


def _read(entry: Entry) -> Entry:
    """The entry with what its folder says of clients; a warning tells of a record that is damaged."""
    path = Path(entry.folder) / RECORD
    try:
        size = path.stat().st_size
        # a long record that grows, as of a run that is watched, is read again when it has grown by a twentieth
        clients = _by_client(path, size if size < _SHORT else -int(math.log(size) / math.log(1.05)))
    except OSError:
        return entry
    except HansaError as damage:
        log.warning("%s", damage)
        return entry
    facts = label_facts(path.with_name(PARTITION))
    holds = [] if facts is None else facts[1]
    names = label_names(entry.config, len(holds[0])) if holds else []
    return replace(entry, clients=clients if clients.rows else None, holds=holds, labels=names)


@lru_cache(maxsize=64)
def _by_client(path: Path, size: int) -> ClientColumns:
    return read_by_client(path)


def client_view(methods: Sequence[Served]) -> str:
    """The part of the page that is about clients; nothing where no method has a record of them."""
    known = [method for method in methods if _metric(method.by) is not None]
    if not known:
        return ""
    tested = any(_metric(method.by) != "loss" for method in known)
    told = "on test rows of their own" if tested else "by their last training loss: test rows have no owners"
    parts = "".join(_method(method, len(known) == 1) for method in known)
    return (
        f'{STYLE}<section class="card" id="clients"><div class="head"><h2>Client by client</h2>'
        f'<span class="note">from worst to best, {told}; strong: the worst tenth</span></div>{parts}</section>'
    )


def _metric(by: Mapping[str, Any]) -> str | None:
    return next((name for name in RANKED_BY if name in by and any(map(math.isfinite, by[name].tolist()))), None)


def _method(method: Served, unfolded: bool) -> str:
    metric = _metric(method.by)
    assert metric is not None
    values = method.by[metric].tolist()
    falls = smaller_is_better(metric)
    order = sorted(
        (row for row, value in enumerate(values) if math.isfinite(value)),
        key=lambda row: (-values[row] if falls else values[row], row),
    )
    words = " · ".join(_words(method.by, name) for name in (metric, f"personal_{metric.removeprefix('test_')}"))
    note = f" · {escape(method.note)}" if method.note else ""
    return (
        f'<details style="--c:{escape(method.colour)}"{" open" if unfolded else ""}><summary><i class="swatch"></i>'
        f'{escape(method.name)} <span class="note">{len(values)} clients · {words.strip(" ·")}{note}</span></summary>'
        f"{_bars([values[row] for row in order], metric)}{_table(method, order)}</details>"
    )


def _words(by: Mapping[str, Any], name: str) -> str:
    if name not in by:
        return ""
    mean, deviation, worst = spread(by[name].tolist(), smaller_is_better(name))
    write = _writer(name)
    title = escape(name.replace("_", " "))
    return f"{title} {write(mean)} on average, deviation {write(deviation)}, worst tenth {write(worst)}"


def _bars(values: Sequence[float], metric: str) -> str:
    """Clients in order as bars of two strengths, drawn as two paths: small, however many."""
    drawn = _binned(values, BARS)
    top = 1.0 if metric.endswith("accuracy") else max(drawn, default=0.0) or 1.0
    wide = 1000 / len(drawn)
    gap = 0.15 * wide
    worst = -(-len(drawn) // 10)
    paths = []
    for kind, first, last in (("worst", 0, worst), ("rest", worst, len(drawn))):
        steps = []
        for place in range(first, last):
            high = max(0.5, 100 * min(max(drawn[place], 0.0) / top, 1.0))
            steps.append(f"M{place * wide:.1f} 100v-{high:.1f}h{wide - gap:.1f}v{high:.1f}z")
        paths.append(f'<path class="{kind}" d="{"".join(steps)}"/>')
    title = f"{metric.replace('_', ' ')} of {len(values)} clients, from worst to best"
    return (
        f'<svg class="served" viewBox="0 0 1000 100" preserveAspectRatio="none" role="img"><title>{escape(title)}'
        f"</title>{''.join(paths)}</svg>"
    )


def _binned(values: Sequence[float], most: int) -> list[float]:
    """At most so many values: means of neighbours where there are more.

    >>> _binned([1.0, 3.0, 5.0, 7.0], 2)
    [2.0, 6.0]
    """
    if len(values) <= most:
        return list(values)
    ends = [round(place * len(values) / most) for place in range(most + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(ends)]


def _table(method: Served, order: Sequence[int]) -> str:
    by = method.by
    shown = [*order[:ROWS], *(order[-1:] if len(order) > ROWS else ())]
    names = [name for name in (*by.tests, "loss", "norm", "participations", "up_bytes", "down_bytes", "peer_bytes")
             if name in by and (name != "peer_bytes" or by[name].any())]  # fmt: skip
    mixed = len(method.holds) > 0
    head = "".join(f"<th>{escape(name.replace('_bytes', '').replace('_', ' '))}</th>" for name in names)
    rows = []
    for place, row in enumerate(shown):
        client = int(by["client"][row])
        cells = "".join(f"<td>{escape(_writer(name)(float(by[name][row])))}</td>" for name in names)
        holds = f'<td class="left">{_mix(method, client)}</td>' if mixed else ""
        best = " (best)" if place == ROWS else ""
        rows.append(f'<tr><td class="left">client {client}{best}</td>{holds}{cells}</tr>')
    holds = '<th class="left">labels held</th>' if mixed else ""
    return (
        f'<div style="overflow-x:auto"><table class="clients"><thead><tr><th class="left">worst served</th>{holds}'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _mix(method: Served, client: int) -> str:
    """The labels that a client holds, as one bar."""
    counts = method.holds[client] if client < len(method.holds) else ()
    total = sum(counts)
    if not total:
        return ""
    names = method.labels if len(method.labels) == len(counts) else [str(label) for label in range(len(counts))]
    told = ", ".join(f"{count} of {name}" for count, name in zip(counts, names, strict=True) if count)
    at, bars = 0.0, []
    for place, count in enumerate(counts):
        if count:
            share = 90 * count / total
            strength = 0.2 + 0.8 * place / max(1, len(counts) - 1)
            bars.append(
                f'<rect x="{at:.1f}" width="{max(share - 0.6, 0.4):.1f}" height="12" opacity="{strength:.2f}"/>'
            )
            at += share
    return f'<svg class="mix" viewBox="0 0 90 12" role="img"><title>{escape(told)}</title>{"".join(bars)}</svg>'


def _writer(name: str) -> Any:
    if name.endswith("accuracy"):
        return formats.percent
    if name.endswith("_bytes"):
        return lambda value: formats.bits(8 * value)
    if name == "participations":
        return lambda value: str(int(value))
    return formats.number
