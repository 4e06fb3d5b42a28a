"""Tables of clients, sites and labels, as text: for the report page and the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from hansa.config import parse_document
from hansa.core.errors import HansaError
from hansa.data.sources import dataset_info
from hansa.data.split import read_label_counts
from hansa.runs.client_columns import ClientColumns, summarize_clients
from hansa.runs.columns import base_metric, column_of, direction_of, lower_is_better
from hansa.runs.folder import PARTITION, RunFolder
from hansa.runs.metrics import combined_by, describe_seconds, site_names, site_totals
from hansa.study.report import formats
from hansa.study.report.entries import LabelCounts, ReportEntry
from hansa.training.metric_direction import Direction

CLIENT_METRICS = ("test_accuracy", "test_loss", "loss")
"""Clients are ordered by the metric that ranks the runs, else by the first of these that was measured."""
MAX_JOBS = 3_000_000
"""Client records with more jobs are not read for a timeline."""


def client_metric(columns: Mapping[str, Any], main: str = "") -> str | None:
    """Return the column that clients are ordered by: the first measured one of the main metric and `CLIENT_METRICS`."""
    names = (main, *CLIENT_METRICS)
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


def clients_of(run: ReportEntry) -> ClientColumns | None:
    """Return one row for each client of a run, read from its folder if it has one."""
    if run.clients is not None or not run.folder:
        return run.clients
    columns = _by_client(run.folder, len(run.history), str(run.environment.get("started")))
    return columns.named(run.client_names) if columns.rows else None


@lru_cache(maxsize=64)
def _by_client(folder: str, rounds: int, started: str) -> ClientColumns:
    """Read the clients of a folder again only when it has other rounds."""
    return RunFolder(folder).by_client()


def jobs_of(run: ReportEntry) -> ClientColumns | None:
    """Return the jobs of a run, one row each, read from its folder if it has one; None if it had no virtual clock."""
    columns, history = run.jobs, run.history
    if columns is None and run.folder and "utilisation" in history[-1]:
        asked = sum(int(record.get("participants") or 0) + int(record.get("lost") or 0) for record in history)
        columns = RunFolder(run.folder).clients() if asked <= MAX_JOBS else None
    return columns if columns is not None and "start_seconds" in columns else None


def labels_of(run: ReportEntry) -> LabelCounts | None:
    """Return the samples of each label that each client of a run holds, read from its folder if it has one."""
    found = read_label_counts(Path(run.folder) / PARTITION) if run.folder and run.labels is None else None
    if found is None:
        return run.labels
    clients, counts = found
    classes = len(counts[0]) if counts else 0
    try:
        section = parse_document(run.config).data.get("data") or {}
        names = list(dataset_info(str(section.get("name", "fashion-mini"))).class_names)
    except (HansaError, AttributeError):
        names = []
    return LabelCounts(counts, names if len(names) == classes else list(map(str, range(classes))), population=clients)


def partitions_of(entries: Sequence[ReportEntry]) -> list[LabelCounts]:
    """Return the distinct partitions of runs, with the methods that train on each."""
    users: dict[str, tuple[LabelCounts, list[ReportEntry]]] = {}
    for entry in entries:  # every seed has its own partition: that of the first is shown
        counts = labels_of(entry.runs[0])
        if counts is not None and len(counts.counts) and len(counts.labels):
            users.setdefault(repr(counts.counts), (counts, []))[1].append(entry)
    partitions = []
    for counts, methods in users.values():
        seeds = [entry.members[0].seed for entry in methods if entry.members]
        note = f"for seed {seeds[0]}; every seed has its own partition" if seeds else ""
        names = ", ".join(entry.name for entry in methods) if len(users) > 1 else ""
        partitions.append(replace(counts, note=note, methods=names))
    return partitions


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
        better: The directions that the run recorded.
    """
    sites = site_names(history)
    if not sites:
        return None
    totals = site_totals(history)
    first = f"test_{base_metric(main)}"
    measured = {name.partition("/")[2] for name in numbers if name.partition("/")[0] in sites}
    columns = [name for name in dict.fromkeys([first, *sorted(measured)]) if name in measured]
    spent = {"up_bytes": "sent", "down_bytes": "received", "work_seconds": "work"}
    spent = {name: heading for name, heading in spent.items() if any(name in each for each in totals.values())}
    order = columns[0] if columns else first
    if direction := direction_of(order, better):
        sign = 1.0 if direction == "higher" else -1.0
        values = {site: numbers.get(f"{site}/{order}") for site in sites}
        sites.sort(key=lambda site: math.inf if (value := values[site]) is None else sign * float(value))
    rows = []
    for site in sites:
        held = next(
            (record[f"{site}/test_rows"] for record in reversed(history) if f"{site}/test_rows" in record), None
        )
        cells = [site, "–" if held is None else formats.format_count(held)]
        cells += [_site_cell(name, numbers.get(f"{site}/{name}")) for name in columns]
        cells += [_site_cell(name, totals[site].get(name) if site in totals else None) for name in spent]
        rows.append(cells)
    headings = ["site", "test rows", *(column_of(name, better).label for name in columns), *spent.values()]
    return SiteTable(headings, rows, _site_notes(history, numbers, main, sites[0]))


def _site_notes(history: Sequence[Mapping[str, Any]], numbers: Mapping[str, Any], main: str, worst: str) -> list[str]:
    """The deviation over sites, how metrics were combined, and where the seconds of a round go."""
    notes = []
    over = f"sites_test_{base_metric(main)}"
    if f"{over}_worst" in numbers and f"{over}_std" in numbers:
        lowest, deviation = (_site_cell(over, numbers[f"{over}_{what}"]) for what in ("worst", "std"))
        notes.append(f"{column_of(over).label}: worst site {worst} {lowest}, deviation over sites {deviation}")
    final = history[-1]
    for name, how in combined_by(history).items():
        column = f"sites_test_{name}"
        bounds = [final.get(f"{column}_at_{side}") for side in ("least", "most")]
        bounded = all(isinstance(value, float) for value in bounds)
        within = f"; certainly between {bounds[0]:.3f} and {bounds[1]:.3f}" if bounded else ""
        notes.append(f"{column_of(column).label}: {_site_cell(column, numbers.get(column))}, {how}{within}")
    left_out = final.get("left_out")
    notes += [f"without {site}: {why}" for site, why in sorted(left_out.items())] if isinstance(left_out, dict) else []
    seconds = describe_seconds(history)
    return [*notes, seconds] if seconds else notes


def _site_cell(name: str, value: Any) -> str:
    return "–" if value is None else formats.formatter_of(name)(value)
