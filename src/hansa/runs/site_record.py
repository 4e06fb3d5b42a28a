"""What a run's history says about the sites of a federation: metrics, bytes, and where the seconds of a round go."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hansa.runs.metrics_log import HistoryColumns

if TYPE_CHECKING:
    from hansa.runs.driver import Run

ROWS = "/test_rows"
PARTS = ("work_seconds", "start_seconds", "transport_seconds")
"""The parts of a round's seconds that were spent on the site that it waited for longest; the rest is the server's."""


def site_names(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the sites that a history has metrics of, in the order of their names.

    >>> site_names([{"round": 1, "north/test_rows": 7, "validation/test_loss": 0.5}])
    ['north']
    """
    names = history.names if isinstance(history, HistoryColumns) else {name for record in history for name in record}
    return sorted(name.removesuffix(ROWS) for name in names if name.endswith(ROWS))


def site_totals(history: Sequence[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Return the bytes and seconds of each site, summed over rounds.

    >>> site_totals([{"round": number, "sites": {"north": {"up_bytes": number + 2}}} for number in (1, 2)])
    {'north': Counter({'up_bytes': 7})}
    """
    return history.sites if isinstance(history, HistoryColumns) else HistoryColumns(history).sites


def combined_by(history: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return how each metric over all sites was last computed."""
    return history.combined_by if isinstance(history, HistoryColumns) else HistoryColumns(history).combined_by


def round_seconds(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median seconds of a round, and of its parts: the work of the site that it waited for longest, the
    start of processes there, transport, and the server; nothing if the history has no parts.

    The first round is left out if there are others: it also enrolls the sites.

    >>> first = {"round": 1, "seconds": 9.0, "work_seconds": 5.0, "start_seconds": 1.0, "transport_seconds": 1.0}
    >>> round_seconds([first, {**first, "seconds": 4.0, "work_seconds": 1.5}])
    {'seconds': 4.0, 'work_seconds': 1.5, 'start_seconds': 1.0, 'transport_seconds': 1.0, 'server_seconds': 0.5}
    """
    measured = [record for record in history if all(name in record for name in PARTS)]
    if not measured:
        return {}
    measured = measured[1:] or measured
    medians = {name: statistics.median(record[name] for record in measured) for name in ("seconds", *PARTS)}
    server = statistics.median(record["seconds"] - sum(record[name] for name in PARTS) for record in measured)
    return {**medians, "server_seconds": max(0.0, server)}


def describe_seconds(parts: Mapping[str, float]) -> str:
    """Return the parts of a round's seconds as a sentence.

    >>> parts = {"work_seconds": 1.5, "start_seconds": 1, "transport_seconds": 1, "server_seconds": 0.5}
    >>> describe_seconds({"seconds": 4.0, **parts})
    '4.0 s: 1.5 work at the slowest site, 1.0 start of processes, 1.0 transport, 0.5 server'
    """
    names = {"work": "work at the slowest site", "start": "start of processes", "transport": "transport"}
    texts = [f"{parts[f'{name}_seconds']:.1f} {text}" for name, text in {**names, "server": "server"}.items()]
    return f"{parts['seconds']:.1f} s: {', '.join(texts)}"


def federation_summary(run: Run, columns: HistoryColumns) -> dict[str, Any]:
    """Return what the summary of a federation has in addition: every update that was asked for and is not in the run,
    bytes and seconds by site, how metrics were combined over sites, and where the seconds of a round go."""
    lost = [
        {"site": run.site_of.get(dropped.client), "client": dropped.client, "round": round, "reason": dropped.reason}
        for round, dropped in run.dropped_clients
    ]
    return {
        "lost_updates": lost,
        "sites": {name: dict(counts) for name, counts in sorted(columns.sites.items())},
        "combined_by": columns.combined_by,
        "round_seconds": round_seconds(columns),
    }
