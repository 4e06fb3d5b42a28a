"""The label distribution over clients: counts, read from run folders without torch, and heat maps of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from hansa.config import parse_document
from hansa.core.errors import HansaError
from hansa.data.sources import dataset_info
from hansa.data.split import read_label_counts
from hansa.runs.folder_lock import PARTITION
from hansa.study.report.entries import ReportEntry

MAX_CLIENTS = 400
"""Heat maps draw at most this many clients."""


@dataclass(frozen=True, slots=True)
class LabelCounts:
    """How many samples of each label each client holds.

    Args:
        counts: ``counts[client][label]``.
        labels: The names of the labels.
        note: A note below the heat map.
        methods: The methods that train on this partition, if not all do.
        population: The number of clients, if ``counts`` has only the first of them.

    >>> LabelCounts([[4, 0], [1, 3]], ["cat", "dog"]).heat_map().count("<rect")
    3
    """

    counts: Sequence[Sequence[int]]
    labels: Sequence[str]
    note: str = ""
    methods: str = ""
    population: int | None = None

    def heat_map(self) -> str:
        """Draw the counts as an SVG image, with one column for each client and one row for each label."""
        shown = self.counts[:MAX_CLIENTS]
        most = max((count for row in shown for count in row), default=0) or 1
        width, top, left = 1180, 4, 112
        row_height = max(10.0, min(1060 / (len(shown) or 1), 19.0))
        column_width = (width - left) / (len(shown) or 1)
        gap = 1.0 if column_width > 4 else 0.0
        body = [
            f'<text x="{left - 8}" y="{top + row * row_height + row_height / 2 + 4:.1f}" '
            f'text-anchor="end">{escape(name)}</text>'
            for row, name in enumerate(self.labels)
        ]
        for client, counts in enumerate(shown):
            for row, count in enumerate(counts):
                if count:
                    x, y = left + client * column_width, top + row * row_height
                    body.append(
                        f'<rect class="cell" x="{x:.1f}" y="{y:.1f}" width="{column_width - gap:.1f}" '
                        f'height="{row_height - 1:.1f}" rx="1.5" opacity="{0.12 + 0.88 * (count / most) ** 0.6:.2f}">'
                        f"<title>client {client}: {count} of {escape(self.labels[row])}</title></rect>"
                    )
        height = top + len(self.labels) * row_height + 22
        total = self.population or len(self.counts)
        more = f", the first {len(shown)} of {total}" if total > len(shown) else ""
        body.append(f'<text x="{left}" y="{height - 5:.1f}">clients 0 to {len(shown) - 1}{more}</text>')
        return (
            f'<svg class="heat" viewBox="0 0 {width} {height:.0f}" role="img"><title>samples of each label for each '
            f"client</title>{''.join(body)}</svg>"
        )


def partitions_of(entries: Sequence[ReportEntry]) -> tuple[list[LabelCounts], list[int | None]]:
    """Return the distinct partitions of runs in folders, and the number of clients of each entry if it is known."""
    partitions: dict[str, tuple[LabelCounts, list[ReportEntry]]] = {}
    populations: list[int | None] = []
    for entry in entries:
        run = entry.runs[0]  # every seed has its own partition: show that of the first
        facts = read_label_counts(Path(run.folder) / PARTITION) if run.folder else None
        if facts is None:
            populations.append(_configured_clients(run.config))
            continue
        clients, counts = facts
        populations.append(clients)
        names = label_names(run.config, len(counts[0]) if counts else 0)
        partition = LabelCounts(counts, names, population=clients)
        partitions.setdefault(repr((clients, counts)), (partition, []))[1].append(entry)
    several = len(partitions) > 1
    drawn = []
    for partition, users in partitions.values():
        if partition.counts and partition.labels:
            seeds = next((user.members[0].seed for user in users if user.members), None)
            note = "" if seeds is None else f"for seed {seeds}; every seed has its own partition"
            methods = ", ".join(user.name for user in users) if several else ""
            drawn.append(replace(partition, note=note, methods=methods))
    return drawn, populations


def label_names(config: str, count: int) -> list[str]:
    """Return the names of the classes of a configuration's data set, or their numbers."""
    try:
        section = parse_document(config).data.get("data") or {}
        known = dataset_info(str(section.get("name", "fashion-mini"))).class_names
    except (HansaError, AttributeError):
        known = ()
    return list(known) if len(known) == count else [str(place) for place in range(count)]


def _configured_clients(config: str) -> int | None:
    """The number of clients in a configuration (50 by default), or None if it is not known."""
    try:
        section = parse_document(config).data.get("data") or {}
        return None if not config or section.get("factory") else int(section.get("clients") or 50)
    except (HansaError, AttributeError, TypeError, ValueError):
        return None
