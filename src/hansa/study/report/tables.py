"""Tables of clients, sites and labels, as text: for the report page, the terminal and figures."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from hansa.config import parse_document
from hansa.core.errors import HansaError
from hansa.data.sources import dataset_info
from hansa.data.split import read_label_counts
from hansa.runs.client_columns import ClientColumns, summarize_clients
from hansa.runs.columns import base_metric, column_of, direction_of, lower_is_better
from hansa.runs.folder import RunFolder
from hansa.runs.folder_lock import PARTITION
from hansa.runs.metrics import combined_by, describe_seconds, round_seconds, site_names, site_totals
from hansa.study.report import formats
from hansa.study.report.entries import ReportEntry
from hansa.training.metric_direction import Direction

log = logging.getLogger("hansa")

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


def with_clients(entry: ReportEntry) -> tuple[ReportEntry, list[str]]:
    """Return a run with what its folder has on its clients, and what could not be read."""
    if entry.clients is not None or not entry.folder:
        return entry, []
    count = len(entry.history)
    # a long record that grows, as during `hansa watch`, is read again when it has grown by 5%
    stamp = count if count < 200 else -int(math.log(count) / math.log(1.05))
    try:
        clients = _by_client(entry.folder, stamp, str(entry.environment.get("started")))
    except (HansaError, OSError, ValueError) as error:
        log.warning("%s", error)
        return entry, [f"clients left out: {error}"]
    found = read_label_counts(Path(entry.folder) / PARTITION)
    counts = [] if found is None else found[1]
    names = label_names(entry.config, len(counts[0])) if counts else []
    named = clients.named(entry.client_names) if clients.rows else None
    return replace(entry, clients=named, label_counts=counts, label_names=names), []


@lru_cache(maxsize=64)
def _by_client(folder: str, stamp: int, started: str) -> ClientColumns:
    return RunFolder(folder).by_client()


def job_columns(entry: ReportEntry) -> tuple[ClientColumns | None, list[str]]:
    """Return the jobs of a run, one row each, None if it had no virtual clock; and what could not be read."""
    if entry.jobs is not None:
        return entry.jobs if "start_seconds" in entry.jobs else None, []
    asked = sum(int(record.get("participants") or 0) + int(record.get("lost") or 0) for record in entry.history)
    if not entry.folder or asked > MAX_JOBS or not any("utilisation" in record for record in entry.history[-1:]):
        return None, []
    try:
        columns = RunFolder(entry.folder).clients()
    except (HansaError, OSError, ValueError) as error:
        log.warning("%s", error)
        return None, [f"timeline left out: {error}"]
    return columns if "start_seconds" in columns else None, []


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
    counted = [name for name in ("up_bytes", "down_bytes") if any(name in totals.get(site, {}) for site in sites)]
    timed = any("work_seconds" in totals.get(site, {}) for site in sites)
    rows = []
    for site in _worst_site_first(sites, numbers, columns[0] if columns else first, better):
        key = f"{site}/test_rows"
        held = next((record[key] for record in reversed(history) if key in record), None)
        cells = [site, "–" if held is None else formats.format_count(held)]
        cells += [_site_cell(name, numbers.get(f"{site}/{name}")) for name in columns]
        cells += [formats.format_bytes(totals[site][name]) if site in totals else "–" for name in counted]
        if timed:
            cells.append(formats.format_duration(totals[site]["work_seconds"]) if site in totals else "–")
        rows.append(cells)
    headings = ["site", "test rows", *(column_of(name, better).label for name in columns)]
    headings += [{"up_bytes": "sent", "down_bytes": "received"}[name] for name in counted]
    return SiteTable([*headings, *(["work"] if timed else [])], rows, _site_notes(history, numbers, main, rows))


def _site_notes(
    history: Sequence[Mapping[str, Any]], numbers: Mapping[str, Any], main: str, rows: Sequence[Sequence[str]]
) -> list[str]:
    """The deviation over sites, how metrics were combined, and where the seconds of a round go."""
    notes = []
    over = f"sites_test_{base_metric(main)}"
    if f"{over}_worst" in numbers and f"{over}_std" in numbers:
        write = formats.formatter_of(over)
        worst = f"worst site {rows[0][0]} {write(numbers[f'{over}_worst'])}"
        notes.append(f"{column_of(over).label}: {worst}, deviation over sites {write(numbers[f'{over}_std'])}")
    final = history[-1] if len(history) else {}
    for name, how in combined_by(history).items():
        column = f"sites_test_{name}"
        bounds = [final.get(f"{column}_at_{side}") for side in ("least", "most")]
        bounded = all(isinstance(value, float) for value in bounds)
        within = f"; certainly between {bounds[0]:.3f} and {bounds[1]:.3f}" if bounded else ""
        notes.append(f"{column_of(column).label}: {_site_cell(column, numbers.get(column))}, {how}{within}")
    left_out = final.get("left_out")
    for site, reason in sorted(left_out.items()) if isinstance(left_out, dict) else ():
        notes.append(f"without {site}: {reason}")
    if parts := round_seconds(history):
        notes.append(f"a round takes {describe_seconds(parts)} (median)")
    return notes


def _worst_site_first(
    sites: Sequence[str], numbers: Mapping[str, Any], metric: str, better: Mapping[str, Direction] | None
) -> list[str]:
    direction = direction_of(metric, better)
    if not direction:
        return list(sites)
    sign = -1.0 if direction == "lower" else 1.0
    values = {site: numbers.get(f"{site}/{metric}") for site in sites}
    return sorted(sites, key=lambda site: math.inf if values[site] is None else sign * float(values[site] or 0.0))


def _site_cell(name: str, value: Any) -> str:
    return "–" if value is None else formats.formatter_of(name)(value)


@dataclass(frozen=True, slots=True)
class LabelCounts:
    """How many samples of each label each client holds.

    Args:
        counts: ``counts[client][label]``.
        labels: The names of the labels.
        note: A note below the heat map.
        methods: The methods that train on this partition, if not all do.
        population: The number of clients, if ``counts`` has only the first of them.

    >>> LabelCounts([[4, 0], [1, 3]], ["cat", "dog"]).population
    """

    counts: Sequence[Sequence[int]]
    labels: Sequence[str]
    note: str = ""
    methods: str = ""
    population: int | None = None


def partitions_of(entries: Sequence[ReportEntry]) -> list[LabelCounts]:
    """Return the distinct partitions of runs in folders."""
    partitions: dict[str, tuple[LabelCounts, list[ReportEntry]]] = {}
    for entry in entries:
        run = entry.runs[0]  # every seed has its own partition: show that of the first
        found = read_label_counts(Path(run.folder) / PARTITION) if run.folder else None
        if found is not None:
            clients, counts = found
            partition = LabelCounts(counts, label_names(run.config, len(counts[0]) if counts else 0), "", "", clients)
            partitions.setdefault(repr(found), (partition, []))[1].append(entry)
    drawn = []
    for partition, users in partitions.values():
        if partition.counts and partition.labels:
            seeds = next((user.members[0].seed for user in users if user.members), None)
            note = "" if seeds is None else f"for seed {seeds}; every seed has its own partition"
            methods = ", ".join(user.name for user in users) if len(partitions) > 1 else ""
            drawn.append(replace(partition, note=note, methods=methods))
    return drawn


def label_names(config: str, count: int) -> list[str]:
    """Return the names of the classes of a configuration's data set, or their numbers."""
    try:
        section = parse_document(config).data.get("data") or {}
        names = dataset_info(str(section.get("name", "fashion-mini"))).class_names
    except (HansaError, AttributeError):
        names = ()
    return list(names) if len(names) == count else [str(label) for label in range(count)]
