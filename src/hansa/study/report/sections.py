"""The sections of a report page besides its curves: each has a heading, a note and escaped HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import yaml

from hansa.runs.columns import ACCURACY, OUTCOMES, TOTALS, evaluated_metrics
from hansa.runs.metrics import column_names, diverged_at
from hansa.study.report.entries import RankedEntry, ReportEntry, has_column
from hansa.study.report.partition import LabelCounts
from hansa.study.report.ranking import method_label

MAX_PARTITIONS = 4
VERDICT_STYLES = {"agrees": "good", "holds": "good", "same order": "fair", "differs": "bad", "does not": "bad"}
"""How table cells that begin with a verdict are marked."""


class PageSection(NamedTuple):
    """A section of the page. ``html`` is inserted unchanged: the caller escapes untrusted text.

    >>> str(PageSection("Clients", "<p>none</p>"))
    '<section class="card"><div class="head"><h2>Clients</h2></div><p>none</p></section>'
    """

    title: str
    html: str
    note: str = ""
    id: str = ""

    def __str__(self) -> str:
        if not self.html:
            return ""
        note = f'<span class="note">{escape(self.note)}</span>' if self.note else ""
        anchor = f' id="{escape(self.id)}"' if self.id else ""
        head = f'<div class="head"><h2>{escape(self.title)}</h2>{note}</div>'
        return f'<section class="card"{anchor}>{head}{self.html}</section>'


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table given as data, such as published numbers beside measured ones.

    >>> table = ReportTable("Published numbers", ["", "published", "ours"], [["FedAvg", 0.84, 0.82]])
    >>> "published" in str(table.to_section())
    True
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""

    def to_section(self) -> PageSection:
        """Return the table as a section of the page."""
        cells = [[verdict_cell(cell) for cell in row] for row in self.rows]
        return PageSection(self.title, table_html([escape(h) for h in self.headings], cells), self.note, "published")


def table_html(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of escaped cells; the first column is left-aligned."""

    def left(place: int) -> str:
        return ' class="left"' if place == 0 else ""

    head = "".join(f'<th scope="col"{left(place)}>{cell}</th>' for place, cell in enumerate(headings))
    body = "".join(
        "<tr>" + "".join(f"<td{left(place)}>{cell}</td>" for place, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def verdict_cell(value: Any) -> str:
    """Return a table cell as HTML, with verdicts marked."""
    text = "–" if value is None else str(value)
    for verdict, style in VERDICT_STYLES.items():
        if text.startswith(verdict):
            return f'<span class="verdict {style}">{escape(text)}</span>'
    return escape(text)


def notice_list(messages: Iterable[str]) -> str:
    """Return warnings for the top of the page as HTML."""
    items = "".join(f"<li>{escape(message)}</li>" for message in messages)
    return f'<section class="notice" role="status"><ul>{items}</ul></section>' if items else ""


def partition_section(partitions: Sequence[LabelCounts]) -> PageSection:
    """Draw a heat map of each partition."""
    parts = []
    for each in partitions[:MAX_PARTITIONS]:
        methods = f"<h3>{escape(each.methods)}</h3>" if each.methods else ""
        note = f'<p class="note">{escape(each.note)}</p>' if each.note else ""
        parts.append(f"{methods}{each.heat_map()}{note}")
    if len(partitions) > MAX_PARTITIONS:
        parts.append(f'<p class="note">and {len(partitions) - MAX_PARTITIONS} other partitions</p>')
    note = "one column for each client, one row for each label; a darker cell has more samples"
    return PageSection("Label distribution", "".join(parts), note, "partition")


def configs_section(ranking: Sequence[RankedEntry]) -> PageSection:
    """Show every configuration, and a table of their differences."""
    parts = [differences_table(ranking)]
    for ranked in ranking:
        text = ranked.entry.config or ranked.entry.composition or "no configuration file"
        parts.append(f"<details><summary>{method_label(ranked)}</summary><pre>{escape(text.strip())}</pre></details>")
    return PageSection("Configurations", "".join(parts), "each is a file that hansa run accepts", "configs")


def differences_table(ranking: Sequence[RankedEntry]) -> str:
    """Return a table of the keys in which the configurations differ; "" if there are none."""
    keys, tables = differences([ranked.entry for ranked in ranking])
    if not keys:
        return ""
    head = "".join(f'<th scope="col" class="left">{method_label(ranked)}</th>' for ranked in ranking)
    rows = []
    for key in keys:
        values = [_yaml_value(table.get(key, ...)) for table in tables]
        cells = "".join(f'<td class="left mono">{escape(value)}</td>' for value in values)
        rows.append(f'<tr><th scope="row" class="left mono">{escape(key)}</th>{cells}</tr>')
    return (
        '<div class="scroll"><table id="differences" class="plain"><thead><tr><th scope="col" class="left">key</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def differences(entries: Sequence[ReportEntry]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the dotted keys in which the configurations differ, and each configuration by its dotted keys.

    >>> first = ReportEntry("a", (), "algorithm: fedavg\\nlocal: {lr: 0.1}")
    >>> differences([first, ReportEntry("b", (), "local: {lr: 0.2, steps: 3}")])[0]
    ['algorithm', 'local.lr', 'local.steps']
    """
    tables = [flatten_config(_config_data(entry.config)) for entry in entries]
    if len(entries) < 2 or not all(entry.config for entry in entries):
        return [], tables
    known = {key: None for table in tables for key in table if key.split(".")[0] not in ("name", "seed", "seeds")}
    return [key for key in known if len({repr(table.get(key, ...)) for table in tables}) > 1], tables


def flatten_config(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections to dotted keys; a component (a mapping with ``kind``) stays whole.

    >>> flatten_config({"local": {"lr": 0.1}, "data": {"partition": {"kind": "iid"}}})
    {'local.lr': 0.1, 'data.partition': {'kind': 'iid'}}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(value, Mapping) and "kind" not in value and value:
            flat.update(flatten_config(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _config_data(text: str) -> Any:
    from hansa.config import parse_document
    from hansa.core.errors import HansaError

    try:
        return parse_document(text).data if text else {}
    except HansaError:
        return {}


def _yaml_value(value: Any) -> str:
    if value is ...:
        return "–"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).strip()
    return text.removesuffix("\n...").strip()[:200]


def environment_section(entries: Sequence[ReportEntry]) -> PageSection:
    """Show the machines and versions of all runs."""
    values: dict[str, dict[str, None]] = {}
    for run in (run for entry in entries for run in entry.runs):
        for name, value in run.environment.items():
            for key, inner in value.items() if isinstance(value, Mapping) else ((name, value),):
                values.setdefault(key, {})[str(inner)] = None
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(', '.join(each))}</dd>" for name, each in values.items())
    return PageSection("Environment", f"<dl>{lines}</dl>" if lines else '<p class="note">not recorded</p>')


def citations_section(text: str) -> PageSection:
    """Show the BibTeX entries of the components in use."""
    body = f"<details><summary>BibTeX</summary><pre>{escape(text.strip())}</pre></details>" if text else ""
    return PageSection("Citations", body, "of the components in use")


def _data_warnings(entries: Sequence[ReportEntry]) -> list[str]:
    """Return warnings about different data, or different clients of the same data.

    Digests of runs with the same seed decide, as far as they were recorded; otherwise the name of the data does.
    """
    rows, partitions = (_by_digest(entries, kind) for kind in ("data", "partition"))
    if rows is None:
        groups = {name: members for name, members in _by_name(entries).items() if name}
        listed = "; ".join(f"{name}: {', '.join(members)}" for name, members in groups.items())
    else:
        groups = rows
        names = {member: name for name, members in _by_name(entries).items() for member in members}
        listed = "; ".join(f"{names[members[0]] or 'data'}: {', '.join(members)}" for members in rows.values())
    if len(groups) > 1:
        return [f"These runs use different data ({listed}): accuracies and losses are not comparable."]
    if partitions is not None and len(partitions) > 1:
        listed = "; ".join(", ".join(members) for members in partitions.values())
        return [f"These runs divide the data differently over clients ({listed})."]
    return []


def _by_digest(entries: Sequence[ReportEntry], kind: str) -> dict[str, list[str]] | None:
    """Entries by a digest, at the first seed that all of them ran; None if there is none, or no digest."""
    tables = [{run.seed: run.data[kind] for run in entry.runs if kind in run.data} for entry in entries]
    common = [seed for seed in tables[0] if all(seed in table for table in tables)]
    if not common:
        return None
    groups: dict[str, list[str]] = {}
    for entry, table in zip(entries, tables, strict=True):
        groups.setdefault(table[common[0]], []).append(entry.name)
    return groups


def _by_name(entries: Sequence[ReportEntry]) -> dict[str, list[str]]:
    """Entries by the name of their data, "" if it is not known."""
    groups: dict[str, list[str]] = {}
    for entry in entries:
        section = _config_data(entry.config).get("data") if entry.config else None
        in_file = str(section.get("factory") or section.get("name") or "") if isinstance(section, Mapping) else ""
        recorded = entry.runs[0].data.get("name", "")
        name = in_file or recorded or ("fashion-mini" if isinstance(section, Mapping) else "")
        groups.setdefault(name, []).append(entry.name)
    return groups


def _divergence(entry: ReportEntry, metric: str) -> list[str]:
    rounds = [(run.seed, diverged_at(run.history, metric)) for run in entry.runs]
    seeds = [f"{f'seed {seed} ' if entry.members else ''}from round {round} on" for seed, round in rounds if round]
    what = metric.replace("_", " ")
    return [f"{entry.name} diverged: its {what} is not finite {', '.join(seeds)}. It is ranked last."] if seeds else []


def comparability_warnings(entries: Sequence[ReportEntry], metric: str = ACCURACY) -> list[str]:
    """Return why some entries cannot be compared directly.

    Args:
        entries: The methods to compare.
        metric: The column that they are ranked by.

    >>> one, other = (
    ...     ReportEntry("a", [{"round": 1, "test_accuracy": 0.5}]),
    ...     ReportEntry("b", [{"round": 1, "loss": 0.5}]),
    ... )
    >>> comparability_warnings([one, other])
    ['b measured no test accuracy: it is ranked after those that did.']
    """
    warnings = _data_warnings(entries)
    without = [entry.name for entry in entries if not any(has_column(h, metric) for h in entry.histories)]
    if metric not in TOTALS and without and len(without) < len(entries):
        they_are = "they are" if len(without) > 1 else "it is"
        what = metric.replace("_", " ")
        warnings.append(f"{', '.join(without)} measured no {what}: {they_are} ranked after those that did.")
    for entry in entries:
        warnings += _divergence(entry, metric)
        columns = [{*OUTCOMES, *evaluated_metrics(column_names(h))} & {*column_names(h)} for h in entry.histories]
        if len(set(map(frozenset, columns))) > 1:
            warnings.append(f"{entry.name}: its seeds measured different metrics; only common ones are averaged.")
    return warnings
