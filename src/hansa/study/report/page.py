"""The report page: one self-contained HTML file that needs no network, rendered by Jinja2 with uPlot charts."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import yaml

from hansa import __version__
from hansa.config import parse_document
from hansa.core.errors import HansaError
from hansa.core.protocols import bibtex_entries
from hansa.runs.client_columns import Array, ClientColumns, summarize_clients
from hansa.runs.columns import (
    ACCURACY,
    CHARTED,
    OUTCOMES,
    TOTALS,
    WINDOW,
    base_metric,
    column_of,
    evaluated_metrics,
    lower_is_better,
)
from hansa.runs.metrics import (
    column_names,
    combined_by,
    describe_seconds,
    diverged_at,
    is_finite,
    site_names,
    site_totals,
    with_totals,
)
from hansa.runs.store import io
from hansa.runs.trackers import flatten
from hansa.study.report.entries import LabelCounts, ReportEntry
from hansa.study.report.formats import format_number, format_value
from hansa.study.report.ranking import RankedEntry, Ranking, common_target, format_target, rank
from hansa.training.metric_direction import Direction

if TYPE_CHECKING:
    from jinja2 import Environment

log = logging.getLogger("hansa")

MAX_NUMBERS = 140_000
"""The curves of a page have at most this many numbers, about a megabyte; longer histories are thinned with a note."""
MAX_POINTS = 1500
"""Curves with more rounds are thinned for drawing; tables use all rounds."""
MAX_PARTITIONS, MAX_CLIENTS, MAX_CELLS = 4, 400, 20_000
"""Partitions that are drawn, clients of each, and cells of each."""
MAX_BARS, MAX_ROWS = 300, 10
"""Maximum number of bars, in which more clients are binned, and of the worst clients in the table."""
MAX_TIMED_CLIENTS, MAX_JOBS = 1000, 8000
"""Maximum numbers of clients and jobs on a timeline: of more clients every n-th by speed, of more jobs the first."""
JOB_COLUMNS = ("round", "client", "admitted", "start_seconds", "download_seconds", "compute_seconds", "upload_seconds")
VERDICTS = {"agrees": "good", "holds": "good", "same order": "fair", "differs": "bad", "does not hold": "bad"}
"""Styles of table cells that are verdicts."""
CLIENT_METRICS = ("test_accuracy", "test_loss", "loss")
"""If the ranking metric was not measured for clients, they are ordered by the first of these that was."""


class ReportTable(NamedTuple):
    """A table given as data, such as published numbers beside measured ones.

    >>> table = ReportTable("Published numbers", ["", "published", "ours"], [["FedAvg", 0.84, 0.82]])
    >>> "<td>0.84</td>" in render_page([ReportEntry("a", [{"round": 1}])], published=[table])
    True
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader

    environment = Environment(loader=FunctionLoader(asset), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.globals.update(asset=asset, version=__version__, verdicts=VERDICTS)
    return environment


def asset(name: str) -> str:
    """Return a file of the page: its template, its style, its script, or the chart library."""
    return files("hansa.study.report").joinpath("assets", name).read_text(encoding="utf-8")


def ranking_table(ranking: Ranking) -> str:
    """Return the table of a ranking as HTML."""
    macros: Any = _environment().get_template("macros.html").module
    return str(macros.ranking_table(ranking))


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
    **options: Any,
) -> str:
    """Return the report page as HTML.

    Args:
        entries: The methods to compare.
        title: The heading.
        lead: A paragraph below it.
        facts: Short facts on the setting, below the lead.
        **options: The keyword arguments of `page_content`.

    >>> from hansa.study.report import ReportEntry
    >>> render_page([ReportEntry("a", [{"round": 1, "test_accuracy": 0.5}])]).startswith("<!doctype html>")
    True
    """
    content = page_content(entries, **options)
    citations = bibtex_entries(key.strip() for entry in entries for key in entry.runs[0].cites)
    footer = "This page is a single file and needs no network."
    return fill_template(content, title=title, lead=lead, facts=facts, citations=citations, footer=footer)


def fill_template(content: Mapping[str, Any], **header: Any) -> str:
    """Return the page of some content; ``header`` has the title and the other texts around it."""
    return _environment().get_template("report.html").render(**content, **header)


def render_parts(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the parts of the page that depend on the runs, as HTML by name."""
    template = _environment().get_template("report.html")
    context = template.new_context(dict(content))
    return {name: "".join(block(context)) for name, block in template.blocks.items()}


def page_content(
    entries: Sequence[ReportEntry],
    *,
    target: float | None = None,
    metric: str | None = None,
    window: int = WINDOW,
    problems: Sequence[str] = (),
    published: Sequence[ReportTable] = (),
) -> dict[str, Any]:
    """Return the data of the page's template and script.

    Args:
        entries: The methods to compare.
        target: The target value of the metric; by default an accuracy that about half of the methods reach.
        metric: The column to rank by; by default the main metric of the tasks.
        window: Number of last measurements that a score averages.
        problems: Warnings for the top of the page, such as folders that could not be read.
        published: Tables of published numbers.
    """
    ranking = rank(entries, common_target(entries, metric) if target is None else target, metric=metric, window=window)
    targets = ranking.targets()
    damages = [f"{entry.name}: {note}" for entry in entries for run in entry.runs for note in run.notes]
    read = _read_first_runs("clients", ranking, damages)
    clients = [table for ranked, columns in read if (table := _client_table(ranked, columns, ranking)) is not None]
    jobs = [each for each in _read_first_runs("jobs", ranking, damages) if "start_seconds" in each[1]]
    timelines = [_timeline(ranked, columns, MAX_JOBS // len(jobs)) for ranked, columns in jobs]
    partitions = partitions_of([ranked.entry for ranked in ranking])[:MAX_PARTITIONS]
    sites = ((r, site_table(r.entry.histories[0], r.numbers, ranking.metric, ranking.better)) for r in ranking)
    return {
        "notices": [*problems, *dict.fromkeys(damages), *comparability_warnings(entries, ranking.metric)],
        "tiles": ranking.tiles(),
        "ranking": ranking,
        "tables": published,
        "sites": [(ranked, table) for ranked, table in sites if table is not None],
        "targets": targets and {
            "label": column_of(ranking.metric).label,
            "headings": [format_target(value, ranking.metric) for value in targets],
            "rows": list(zip(ranking, ranking.target_rows(targets), strict=True)),
        },
        "timelines": timelines,
        "partitions": partitions,
        "clients": clients,
        "differences": differences([ranked.entry for ranked in ranking]),
        "configs": [(r, r.entry.config or r.entry.composition or "no configuration file") for r in ranking],
        "environment": _environments(entries),
        "data": {
            **_charts(entries, ranking),
            **{
                name: [view["data"] for view in views]
                for name, views in (("timelines", timelines), ("clients", clients), ("partitions", partitions))
            },
        },
    }  # fmt: skip


def empty_content(problems: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of a page without runs."""
    chosen = {"metric": None, "target": None, "window": WINDOW, "stride": 1}
    return {"notices": list(problems), "data": {"runs": [], "columns": {}, **chosen}}


def _charts(entries: Sequence[ReportEntry], ranking: Ranking) -> dict[str, Any]:
    """Return the data of the page's charts: the target and the curves, in the order of the entries."""
    names = {name for entry in entries for history in entry.histories for name in column_names(history)}
    charted = charted_columns(names)
    numbers = (2 + len(names.intersection(charted))) * sum(len(entry.runs) for entry in entries)
    max_points = max(60, min(MAX_POINTS, MAX_NUMBERS // numbers))
    longest, runs = 0, []
    for ranked in sorted(ranking, key=lambda ranked: ranked.place):
        entry, length = ranked.entry, min(map(len, ranked.entry.histories))
        series = [_curve(history[:length], charted, max_points) for history in entry.histories]
        seeds = [run.seed for run in entry.members] or [None]
        runs.append({"name": entry.name, "colour": ranked.colour, "seeds": seeds, "series": series})
        longest = max(longest, length)
    return {
        "target": ranking.target,
        "metric": ranking.metric,
        "window": ranking.window,
        "stride": max(1, math.ceil(longest / max_points)),
        "columns": {name: asdict(column_of(name)) for name in sorted(charted, key=lambda name: name != ranking.metric)},
        "runs": runs,
    }


def _curve(
    history: Sequence[Mapping[str, Any]], charted: Sequence[str], max_points: int
) -> dict[str, list[float | None]]:
    """Return the columns of a run to draw, at most ``max_points`` rows including the last round; None: not measured."""
    records = with_totals(history)[:: -max(1, math.ceil(len(history) / max_points))][::-1]
    columns = {name: [_number(record.get(name)) for record in records] for name in charted}
    return {name: values for name, values in columns.items() if name == "round" or any(v is not None for v in values)}


def charted_columns(names: Iterable[str]) -> list[str]:
    """Return the columns to draw: those declared as charts, and after the test loss other evaluated metrics.

    >>> columns = charted_columns(["round", "test_auc"])
    >>> columns[columns.index("test_loss") + 1]
    'test_auc'
    """
    task_metrics = [name for name in evaluated_metrics(names) if name not in CHARTED and not name.endswith("_std")]
    index = CHARTED.index("test_loss") + 1
    return [*CHARTED[:index], *sorted(task_metrics, key=lambda name: not name.startswith("test_")), *CHARTED[index:]]


def _number(value: Any) -> float | None:
    return (value if isinstance(value, int) else float(f"{value:.6g}")) if is_finite(value) else None


def _read_first_runs(name: str, ranking: Ranking, damages: list[str]) -> list[tuple[RankedEntry, ClientColumns]]:
    """Read the clients or jobs of the first run of each method, if it has some; list damaged folders in ``damages``."""
    read = []
    for ranked in ranking:
        try:
            columns = getattr(ranked.entry.runs[0], name)()
        except (HansaError, OSError, ValueError) as error:
            log.warning("%s", error)
            damages.append(f"{ranked.entry.name}: {name} left out: {error}")
        else:
            read += [(ranked, columns)] * bool(columns.rows)
    return read


def _client_table(ranked: RankedEntry, columns: ClientColumns, ranking: Ranking) -> dict[str, Any] | None:
    """Return the clients of a method from worst to best; None if no client metric was measured."""
    metric, ordered = worst_first(columns, ranking.metric, ranking.better)
    if not metric:
        return None
    described = [name for name in (metric, f"personal_{metric.removeprefix('test_')}") if name in columns]
    notes = [f"{name.replace('_', ' ')}: {describe_spread(columns, name, ranking.better)}" for name in described]
    ordered = ordered.take(np.isfinite(ordered[metric]))
    more = ordered.rows > MAX_ROWS
    listed = ordered.take([*range(min(ordered.rows, MAX_ROWS)), *[-1] * more])
    headings, cells = client_rows(listed)
    labels = ranked.entry.runs[0].labels()
    held = [_labels_held(labels, client) for client in listed["client"].tolist()]
    bars = np.array_split(ordered[metric].astype(np.float64), min(MAX_BARS, ordered.rows))  # of neighbours
    return {
        "ranked": ranked,
        "notes": [f"{columns.rows} clients", *notes, *_seed_note(ranked)],
        "tested": metric != "loss",
        "headings": headings[1:],
        "rows": list(zip(cells, held, strict=True)),
        "labelled": labels is not None,
        "best": more,
        "data": {
            "name": metric,
            "unit": column_of(metric).unit,
            "values": [float(f"{part.mean():.4g}") for part in bars],
            "clients": ordered.rows,
        },
    }


def _seed_note(ranked: RankedEntry) -> list[str]:
    runs = ranked.entry.runs
    return [f"seed {runs[0].seed}, the first of {len(runs)}"] if ranked.entry.members else []


def _labels_held(labels: LabelCounts | None, client: int) -> list[tuple[str, int, float]]:
    """Return name, samples and share of each label of a client, the largest first."""
    if labels is None or client >= len(labels.counts):
        return []
    held = dict(zip(labels.labels, labels.counts[client], strict=True))
    order = sorted((name for name in held if held[name]), key=lambda name: -held[name])
    return [(name, held[name], held[name] / sum(held.values())) for name in order]


def _timeline(ranked: RankedEntry, columns: Mapping[str, Array], max_jobs: int) -> dict[str, Any]:
    data = timeline_data(columns, max_jobs)
    clients, jobs = len(data["clients"]), len(data["jobs"])
    notes = [f"{data['all_clients']} clients, {data['all_jobs']} jobs", *_seed_note(ranked)]
    notes += [f"{clients} clients are drawn, from fast to slow"] * (data["all_clients"] > clients)
    notes += [f"{jobs} jobs are drawn"] * (data["all_jobs"] > jobs)
    return {"ranked": ranked, "notes": notes, "data": data}


def timeline_data(columns: Mapping[str, Array], max_jobs: int = MAX_JOBS) -> dict[str, Any]:
    """Return the data of a timeline: clients from fast to slow, and for each job its row, the seconds of its start and
    of the ends of download, computation and upload, whether it was refused, and its round.
    """
    import pandas

    jobs = pandas.DataFrame({name: columns[name] for name in JOB_COLUMNS}).dropna(subset="start_seconds")
    times = jobs.iloc[:, 3:].astype(np.float64).cumsum(axis=1)  # start, and the ends of the three phases
    speeds = (times.iloc[:, 3] - times.iloc[:, 0]).groupby(jobs["client"]).mean().sort_values(kind="stable")
    drawn = np.linspace(0, len(speeds) - 1, min(len(speeds), MAX_TIMED_CLIENTS)).round().astype(int)
    clients = speeds.index[drawn]
    times.insert(0, "row", clients.get_indexer(jobs["client"]))
    times = times[times["row"] >= 0].sort_values(["start_seconds", "row"], kind="stable")[:max_jobs]
    shown = jobs.loc[times.index]
    seconds = [[float(f"{value:.5g}") for value in times[name]] for name in times.columns[1:]]
    refused = (~shown["admitted"].astype(bool)).astype(int)
    rows = zip(times["row"].tolist(), *seconds, refused.tolist(), shown["round"].tolist(), strict=True)
    return {
        "seconds": float(times.iloc[:, 4].to_numpy().max(initial=0.0)) or 1.0,
        "clients": clients.tolist(),
        "jobs": list(map(list, rows)),
        "all_jobs": len(jobs),
        "all_clients": len(speeds),
    }


def differences(entries: Sequence[ReportEntry]) -> list[tuple[str, list[str]]]:
    """Return the dotted keys in which the configurations differ, with the YAML value of each entry."""
    if len(entries) < 2 or not all(entry.config for entry in entries):
        return []
    tables = [_flat_config(entry) for entry in entries]
    keys = {key: None for table in tables for key in table if key.split(".")[0] not in ("name", "seed", "seeds")}
    rows = [(key, [table.get(key, "–") for table in tables]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat_config(entry: ReportEntry) -> dict[str, str]:
    """Return the YAML text of each value of a configuration, by dotted key."""
    try:
        data = parse_document(entry.config).data
    except HansaError:
        return {}
    values = flatten(data) if isinstance(data, Mapping) else {}
    options: dict[str, Any] = {"default_flow_style": True, "width": 10_000, "sort_keys": False}
    texts = {key: yaml.safe_dump(value, **options).strip() for key, value in values.items()}
    return {key: text.removesuffix("\n...").strip()[:200] for key, text in texts.items()}


def _environments(entries: Sequence[ReportEntry]) -> list[tuple[str, str]]:
    """Return the facts about machines and versions: names, and the distinct values of all runs."""
    values: dict[str, dict[str, None]] = {}
    for run in (run for entry in entries for run in entry.runs):
        for name, value in run.environment.items():
            for key, inner in value.items() if isinstance(value, Mapping) else ((name, value),):
                values.setdefault(key, {})[str(inner)] = None
    return [(name, ", ".join(texts)) for name, texts in values.items()]


def comparability_warnings(entries: Sequence[ReportEntry], metric: str = ACCURACY) -> list[str]:
    """Return warnings about entries that cannot be compared directly or that diverged.

    Args:
        entries: The methods to compare.
        metric: The column that they are ranked by.
    """
    warnings, label = _data_warnings(entries), metric.replace("_", " ")
    columns = {entry.name: [{*column_names(history)} for history in entry.histories] for entry in entries}
    unmeasured = [name for name, measured in columns.items() if not any(metric in names for names in measured)]
    if metric not in TOTALS and 0 < len(unmeasured) < len(entries):
        they_are = "they are" if len(unmeasured) > 1 else "it is"
        warnings.append(f"{', '.join(unmeasured)} measured no {label}: {they_are} ranked after those that did.")
    for entry in entries:
        rounds = [(run.seed, diverged_at(run.history, metric)) for run in entry.runs]
        seeds = [f"{f'seed {seed} ' if entry.members else ''}from round {round} on" for seed, round in rounds if round]
        if seeds:
            warnings.append(f"{entry.name} diverged: its {label} is not finite {', '.join(seeds)}. It is ranked last.")
        if (
            len({(*evaluated_metrics(names), *sorted(names.intersection(OUTCOMES))) for names in columns[entry.name]})
            > 1
        ):
            warnings.append(f"{entry.name}: its seeds measured different metrics; only common ones are averaged.")
    return warnings


def _data_warnings(entries: Sequence[ReportEntry]) -> list[str]:
    """Return warnings about different data, or different clients of the same data.

    Compares digests of the first seed for which all runs recorded one, otherwise the names of the data.
    """
    names = {entry.name: entry.runs[0].data.get("name", "") for entry in entries}
    for kind, labels in (("data", list(names.values())), ("partition", [""] * len(entries))):
        digests = [{run.seed: run.data[kind] for run in entry.runs if kind in run.data} for entry in entries]
        if common := [seed for seed in digests[0] if all(seed in of_entry for of_entry in digests)]:
            labels = [of_entry[common[0]] for of_entry in digests]
        groups: dict[str, list[str]] = {}
        for label, name in zip(labels, names, strict=True):
            groups.setdefault(label, []).append(name)
        groups.pop("", None)
        listed = {", ".join(members): names[members[0]] or "data" for members in groups.values()}
        if len(groups) > 1 and kind == "data":
            different = "; ".join(f"{data}: {members}" for members, data in listed.items())
            return [f"These runs use different data ({different}): accuracies and losses are not comparable."]
        if len(groups) > 1:
            return [f"These runs divide the data differently over clients ({'; '.join(listed)})."]
    return []


def worst_first(
    columns: ClientColumns, main: str, better: Mapping[str, Direction] | None = None
) -> tuple[str, ClientColumns]:
    """Return the metric that orders clients, the first measured one of the main metric and `CLIENT_METRICS`, or "";
    and the clients from worst to best, those without a value last."""
    metric = next((n for n in (main, *CLIENT_METRICS) if n in columns and np.isfinite(columns[n]).any()), "")
    if not metric:
        return "", columns
    sign = -1.0 if lower_is_better(metric, better) else 1.0
    return metric, columns.take(np.argsort(sign * columns[metric].astype(np.float64), kind="stable"))


def client_rows(columns: ClientColumns) -> tuple[list[str], list[list[str]]]:
    """Return headings, and the names and numbers of clients as text."""
    numbers = (*columns.evaluated, "loss", "norm", "participations", "up_bytes", "down_bytes", "peer_bytes")
    names = [name for name in numbers if name in columns and (name != "peer_bytes" or columns[name].any())]
    texts = [[str(v) if n == "participations" else format_value(n, v) for v in columns[n].tolist()] for n in names]
    headings = [name.replace("_bytes", "").replace("_", " ") for name in names]
    clients = [columns.name_of(client) for client in columns["client"].tolist()]
    return ["client", *headings], [list(row) for row in zip(clients, *texts, strict=True)]


def describe_spread(columns: Mapping[str, Any], name: str, better: Mapping[str, Direction] | None = None) -> str:
    """Return mean, deviation and, if the direction is known, worst tenth of a column over clients."""
    direction = column_of(name, better).better
    numbers = summarize_clients(columns[name].tolist(), direction == "lower")
    statistics = ("mean", "deviation", "worst tenth") if direction else ("mean", "deviation")
    return ", ".join(f"{each} {format_value(name, number)}" for each, number in zip(statistics, numbers, strict=False))


def partitions_of(entries: Sequence[ReportEntry]) -> list[dict[str, Any]]:
    """Return the distinct partitions of runs, with a note and the methods that train on each."""
    users: dict[str, tuple[LabelCounts, list[ReportEntry]]] = {}
    for entry in entries:  # every seed has its own partition; the page shows the first
        held = entry.runs[0].labels()
        if held is not None and len(held.counts) and len(held.labels):
            users.setdefault(repr(held.counts), (held, []))[1].append(entry)
    partitions = []
    for held, methods in users.values():
        seeds = [entry.members[0].seed for entry in methods if entry.members]
        rows = held.counts[: min(MAX_CLIENTS, MAX_CELLS // len(held.labels))]
        counts = [list(map(int, row)) for row in rows]
        partitions.append({
            "note": f"for seed {seeds[0]}; every seed has its own partition" if seeds else "",
            "methods": ", ".join(entry.name for entry in methods) if len(users) > 1 else "",
            "data": {"labels": held.labels, "counts": counts, "clients": held.population or len(held.counts)},
        })  # fmt: skip
    return partitions


def site_table(
    history: Sequence[Mapping[str, Any]],
    numbers: Mapping[str, Any],
    main: str,
    better: Mapping[str, Direction] | None = None,
) -> tuple[list[str], list[list[str]], list[str]] | None:
    """Return the table of a run's sites: headings, a row of texts for each from worst to best, and notes.

    None if the run has no metrics by site. A number that a site's policy withholds is shown as –.

    Args:
        history: The records of the run.
        numbers: Its summary, with final values.
        main: The ranking metric, which is the first column and orders the sites.
        better: The directions that the run recorded.
    """
    if not (sites := site_names(history)):
        return None
    measured = sorted({name.partition("/")[2] for name in numbers if name.partition("/")[0] in sites})
    columns = sorted(measured, key=lambda name: name != f"test_{base_metric(main)}")
    totals = site_totals(history)
    spent = {"up_bytes": "sent", "down_bytes": "received", "work_seconds": "work"}
    spent = {name: heading for name, heading in spent.items() if any(name in costs for costs in totals.values())}
    if columns and (direction := column_of(columns[0], better).better):
        values = {site: numbers.get(f"{site}/{columns[0]}") for site in sites}
        sign = 1.0 if direction == "higher" else -1.0
        sites.sort(key=lambda site: (values[site] is None, sign * float(values[site] or 0.0)))
    last = {name: value for record in history for name, value in record.items()}
    rows = []
    for site in sites:
        cells = [format_value(name, numbers.get(f"{site}/{name}")) for name in columns]
        cells += [format_value(name, totals[site].get(name) if site in totals else None) for name in spent]
        rows.append([site, format_number(last.get(f"{site}/test_rows"), "count"), *cells])
    headings = ["site", "test rows", *(column_of(name, better).label for name in columns), *spent.values()]
    return headings, rows, list(_site_notes(history, numbers, f"sites_test_{base_metric(main)}", sites[0]))


def _site_notes(
    history: Sequence[Mapping[str, Any]], numbers: Mapping[str, Any], main: str, worst: str
) -> Iterator[str]:
    """Yield notes on the deviation over sites, how metrics were combined, and the seconds of a round."""
    if f"{main}_worst" in numbers and f"{main}_std" in numbers:
        lowest, deviation = (format_value(main, numbers[f"{main}_{key}"]) for key in ("worst", "std"))
        yield f"{column_of(main).label}: worst site {worst} {lowest}, deviation over sites {deviation}"
    final = history[-1]
    for column, rule in ((f"sites_test_{name}", rule) for name, rule in combined_by(history).items()):
        bounds = [final.get(f"{column}_at_{side}") for side in ("least", "most")]
        bounded = all(isinstance(value, float) for value in bounds)
        limits = f"; certainly between {bounds[0]:.3f} and {bounds[1]:.3f}" if bounded else ""
        yield f"{column_of(column).label}: {format_value(column, numbers.get(column))}, {rule}{limits}"
    if isinstance(left_out := final.get("left_out"), dict):
        yield from (f"without {site}: {reason}" for site, reason in sorted(left_out.items()))
    if seconds := describe_seconds(history):
        yield seconds
