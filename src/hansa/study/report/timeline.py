"""The timeline of a run on the virtual clock: for each client its downloads, computation, uploads and refused work."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from hansa.core.errors import HansaError
from hansa.runs.client_columns import Array, ClientColumns
from hansa.runs.client_record import read_columns
from hansa.runs.folder_lock import RECORD
from hansa.study.report.entries import RankedEntry, ReportEntry

log = logging.getLogger("hansa")

MAX_CLIENTS, MAX_JOBS = 1000, 20_000
"""Clients and jobs that are drawn of a method. Of more clients every n-th by speed, of more jobs the first."""
TICKS = 1_000_000
"""Times are stored as whole numbers, in this fraction of the drawn time."""
COLUMNS = (
    "round", "client", "admitted", "start_seconds", "download_seconds", "compute_seconds", "upload_seconds",
    "staleness",
)  # fmt: skip
_MAX_RECORD = 1 << 28  # bytes; larger records are not read
STYLE = (
    "<style>.timeline canvas{width:100%;height:420px;display:block;touch-action:none;cursor:crosshair}"
    ".timeline .keys{display:flex;flex-wrap:wrap;gap:4px 16px;align-items:center;margin:6px 0;font-size:13px}"
    ".timeline .keys i{display:inline-block;width:14px;height:10px;border-radius:2px;margin-right:5px}"
    ".timeline output{font-size:13px;color:var(--soft);min-height:1.4em;display:block}</style>"
)
KEYS = (
    ("download", "--accent", 0.45),
    ("compute", "--accent", 1.0),
    ("upload", "--good", 1.0),
    ("refused", "--bad", 1.0),
)


def timeline_section(ranking: Sequence[RankedEntry]) -> str:
    """Return the timelines of the methods with a device profile as HTML; "" if there are none."""
    parts = []
    for ranked in ranking:
        run = ranked.entry.runs[0]
        columns = job_columns(run)
        if columns is not None:
            note = f", seed {run.seed}, the first of {len(ranked.entry.runs)}" if ranked.entry.members else ""
            parts.append(_method_html(ranked, timeline_data(columns), note))
    if not parts:
        return ""
    parts[0] = parts[0].replace("<details", "<details open", 1)
    keys = "".join(
        f'<span><i style="background:var({colour});opacity:{opacity}"></i>{name}</span>'
        for name, colour, opacity in KEYS
    )
    return (
        f'{STYLE}<section class="card timeline" id="timeline"><div class="head"><h2>Timeline</h2><span class="note">'
        "virtual time; drag or scroll to zoom, double-click to show all, arrow keys to move</span></div>"
        f'<div class="keys">{keys}<span>blank: idle</span></div>{"".join(parts)}'
        "<noscript><p>The timeline needs JavaScript.</p></noscript></section>"
    )


def job_columns(entry: ReportEntry) -> ClientColumns | None:
    """Return the jobs of a run, one row each; None if it had no virtual clock."""
    if entry.jobs is not None:
        return entry.jobs if "start_seconds" in entry.jobs else None
    if not entry.folder:
        return None
    path = Path(entry.folder) / RECORD
    try:
        stat = path.stat()
        return _read(path, stat.st_size, stat.st_mtime_ns) if stat.st_size <= _MAX_RECORD else None
    except OSError:
        return None
    except HansaError as damage:
        log.warning("%s", damage)
        return None


@lru_cache(maxsize=16)
def _read(path: Path, size: int, changed: int) -> ClientColumns | None:
    columns = read_columns(path)
    if "start_seconds" not in columns:
        return None
    return ClientColumns({name: columns[name] for name in COLUMNS})


def timeline_data(columns: Mapping[str, Array]) -> dict[str, Any]:
    """Return what the page draws: rows of clients from fast to slow, and their jobs in whole ticks of the drawn time.

    >>> one = {"round": [1], "client": [7], "admitted": [True], "start_seconds": [0.0], "download_seconds": [1.0],
    ...        "compute_seconds": [2.0], "upload_seconds": [1.0], "staleness": [0.0]}
    >>> data = timeline_data({name: np.array(values) for name, values in one.items()})
    >>> data["clients"], data["seconds"], data["jobs"]
    ([7], 4.0, [[0, 0, 250000, 500000, 250000, 0, 1, 0]])
    """
    timed = ~np.isnan(columns["start_seconds"].astype(np.float64))
    table = {name: columns[name][timed] for name in COLUMNS}
    start = table["start_seconds"].astype(np.float64)
    phases = [table[f"{name}_seconds"].astype(np.float64) for name in ("download", "compute", "upload")]
    length = phases[0] + phases[1] + phases[2]
    clients, places = np.unique(table["client"], return_inverse=True)
    speed = np.bincount(places, length) / np.bincount(places) if len(clients) else np.zeros(0)
    order = np.lexsort((clients, speed))
    if len(order) > MAX_CLIENTS:
        order = order[np.linspace(0, len(order) - 1, MAX_CLIENTS).round().astype(int)]
    row_of = np.full(len(clients), -1)
    row_of[order] = np.arange(len(order))
    rows = row_of[places] if len(clients) else np.zeros(0, int)
    shown = np.flatnonzero(rows >= 0)
    shown = shown[np.lexsort((rows[shown], start[shown]))][:MAX_JOBS]
    total = float((start + length)[shown].max(initial=0.0)) or 1.0

    def ticks(values: Array) -> list[int]:
        return [int(value) for value in np.rint(values[shown] / total * TICKS)]

    refused = (~table["admitted"].astype(bool))[shown].astype(int).tolist()
    numbers = (rows[shown].tolist(), ticks(start), *map(ticks, phases), refused, table["round"][shown].tolist())
    ages = np.nan_to_num(table["staleness"][shown].astype(np.float64)).astype(int).tolist()
    jobs = [list(job) for job in zip(*numbers, ages, strict=True)]
    return {
        "seconds": total,
        "clients": clients[order].tolist(),
        "jobs": jobs,
        "all_jobs": int(timed.sum()),
        "all_clients": len(clients),
    }


def _method_html(ranked: RankedEntry, data: Mapping[str, Any], note: str) -> str:
    facts = f"{data['all_clients']} clients, {data['all_jobs']} jobs{note}"
    if data["all_clients"] > len(data["clients"]):
        facts += f"; {len(data['clients'])} clients are drawn, from fast to slow"
    if data["all_jobs"] > len(data["jobs"]):
        facts += f"; {len(data['jobs'])} jobs are drawn"
    content = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        f'<details style="--c:{escape(ranked.colour)}"><summary><i class="swatch"></i>{escape(ranked.entry.name)} '
        f'<span class="note">{escape(facts)}</span></summary><div class="choices"><span class="label">rows</span>'
        '<span class="segments" role="group" aria-label="Rows"><button type="button" data-rows="client" '
        'aria-pressed="true">clients, from fast to slow</button><button type="button" data-rows="tier" '
        'aria-pressed="false">quarters by speed</button></span></div>'
        f'<canvas tabindex="0" role="img" aria-label="Timeline of {escape(ranked.entry.name)}"></canvas>'
        "<output></output>"
        f'<script type="application/json">{content}</script></details>'
    )
