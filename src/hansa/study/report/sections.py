"""The sections of a report beside its curves: each a heading, a note and HTML that is safe to put on the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import yaml

from hansa.study.report.entries import Entry, Standing
from hansa.study.report.heatmap import heat_map
from hansa.study.report.ranking import named

MOST_HELD = 4
"""More partitions than this are not drawn."""


class Section(NamedTuple):
    """A part of the page. ``html`` stands there as it is: whoever makes it escapes what comes from outside.

    >>> str(Section("Clients", "<p>none</p>"))
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
        place = f' id="{escape(self.id)}"' if self.id else ""
        head = f'<div class="head"><h2>{escape(self.title)}</h2>{note}</div>'
        return f'<section class="card"{place}>{head}{self.html}</section>'


@dataclass(frozen=True, slots=True)
class Holdings:
    """Who holds how much of what: counts[client][label]. ``who`` are the methods it holds for, if not for all.

    >>> Holdings([[3, 0], [1, 2]], ["cat", "dog"]).labels
    ['cat', 'dog']
    """

    counts: Sequence[Sequence[int]]
    labels: Sequence[str]
    words: str = ""
    who: str = ""
    population: int | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """A table given as data, such as a paper's numbers beside ours: a row is a sequence of words or numbers.

    >>> "published" in str(Grid("Beside the paper", ["", "published", "ours"], [["FedAvg", 0.84, 0.82]]).section())
    True
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""

    def section(self) -> Section:
        """It on the page; a cell that begins with "agrees" is marked as good, one with "differs" as bad."""
        head = "".join(
            f'<th scope="col"{_left(place)}>{escape(str(word))}</th>' for place, word in enumerate(self.headings)
        )
        body = "".join(
            "<tr>" + "".join(f"<td{_left(place)}>{_verdict(word)}</td>" for place, word in enumerate(row)) + "</tr>"
            for row in self.rows
        )
        text = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        return Section(self.title, text, self.note, "published")


def _left(place: int) -> str:
    return ' class="left"' if place == 0 else ""


def _verdict(word: Any) -> str:
    text = "–" if word is None else str(word)
    for start, mark in (
        ("agrees", "good"),
        ("holds", "good"),
        ("same order", "fair"),
        ("differs", "bad"),
        ("fails", "bad"),
    ):
        if text.startswith(start):
            return f'<span class="verdict {mark}">{escape(text)}</span>'
    return escape(text)


def notices(messages: Iterable[str]) -> str:
    """What a reader must know before the numbers."""
    told = "".join(f"<li>{escape(message)}</li>" for message in messages)
    return f'<section class="notice" role="status"><ul>{told}</ul></section>' if told else ""


def holdings_section(held: Sequence[Holdings]) -> Section:
    """Who holds what, a picture a partition."""
    parts = []
    for each in held[:MOST_HELD]:
        who = f"<h3>{escape(each.who)}</h3>" if each.who else ""
        words = f'<p class="note">{escape(each.words)}</p>' if each.words else ""
        parts.append(f"{who}{heat_map(each.counts, each.labels, each.population)}{words}")
    if len(held) > MOST_HELD:
        parts.append(f'<p class="note">and {len(held) - MOST_HELD} other partitions</p>')
    return Section(
        "Who holds what",
        "".join(parts),
        "a column a client, a row a label; the stronger the colour, the more",
        "partition",
    )


def configs_section(standings: Sequence[Standing]) -> Section:
    """Every configuration, and a table of what differs between them."""
    found = "".join(_config(standing) for standing in standings)
    table = differences_table(standings)
    return Section("Configurations", table + found, "each is a file that hansa run accepts", "configs")


def _config(standing: Standing) -> str:
    entry = standing.entry
    text = entry.config or entry.made or "not from a file"
    return f"<details><summary>{named(standing)}</summary><pre>{escape(text.strip())}</pre></details>"


def differences_table(standings: Sequence[Standing]) -> str:
    """The keys in which configurations differ, side by side; nothing where there is nothing to compare."""
    keys, tables = differences([standing.entry for standing in standings])
    if not keys:
        return ""
    head = "".join(f'<th scope="col" class="left">{named(standing)}</th>' for standing in standings)
    rows = []
    for key in keys:
        values = [_shown(table.get(key, ...)) for table in tables]
        cells = "".join(f'<td class="left mono">{escape(value)}</td>' for value in values)
        rows.append(f'<tr><th scope="row" class="left mono">{escape(key)}</th>{cells}</tr>')
    return (
        '<div class="scroll"><table id="differences" class="plain"><thead><tr>'
        '<th scope="col" class="left">what differs</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def differences(entries: Sequence[Entry]) -> tuple[list[str], list[dict[str, Any]]]:
    """The dotted keys in which the configurations of some entries differ, and each configuration by such keys.

    >>> first = Entry("a", (), "algorithm: fedavg\\nlocal: {lr: 0.1}")
    >>> differences([first, Entry("b", (), "local: {lr: 0.2, steps: 3}")])[0]
    ['algorithm', 'local.lr', 'local.steps']
    """
    tables = [flat(_data(entry.config)) for entry in entries]
    if len(entries) < 2 or not all(entry.config for entry in entries):
        return [], tables
    known = {key: None for table in tables for key in table if key.split(".")[0] not in ("name", "seed", "seeds")}
    return [key for key in known if len({repr(table.get(key, ...)) for table in tables}) > 1], tables


def flat(tree: Any, above: str = "") -> dict[str, Any]:
    """A tree of sections as one table, its keys dotted; a part stays whole.

    >>> flat({"local": {"lr": 0.1}, "data": {"partition": {"kind": "iid"}}})
    {'local.lr': 0.1, 'data.partition': {'kind': 'iid'}}
    """
    found: dict[str, Any] = {}
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        at = f"{above}{key}"
        if isinstance(value, Mapping) and "kind" not in value and value:
            found.update(flat(value, f"{at}."))
        else:
            found[at] = value
    return found


def _data(text: str) -> Any:
    from hansa.config import parse
    from hansa.core.errors import HansaError

    try:
        return parse(text).data if text else {}
    except HansaError:
        return {}


def _shown(value: Any) -> str:
    if value is ...:
        return "–"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).strip()
    return text.removesuffix("\n...").strip()[:200]


def environment_section(entries: Sequence[Entry]) -> Section:
    """The machines and versions that all runs were made with."""
    found: dict[str, dict[str, None]] = {}
    for run in (run for entry in entries for run in entry.runs):
        for name, value in _one_level(run.environment).items():
            found.setdefault(name, {})[str(value)] = None
    if not found:
        return Section("Where it was made", '<p class="note">not recorded</p>')
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(', '.join(values))}</dd>" for name, values in found.items())
    return Section("Where it was made", f"<dl>{lines}</dl>")


def _one_level(tree: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found.update(value if isinstance(value, Mapping) else {name: value})
    return found


def citations_section(text: str) -> Section:
    """BibTeX of what was used."""
    body = f"<details><summary>BibTeX</summary><pre>{escape(text.strip())}</pre></details>" if text else ""
    return Section("Cite", body, "exactly the parts in use")


def mixed(entries: Sequence[Entry]) -> list[str]:
    """What keeps some entries from being compared like with like, in words.

    >>> one, other = Entry("a", [{"round": 1, "test_accuracy": 0.5}]), Entry("b", [{"round": 1, "loss": 0.5}])
    >>> mixed([one, other])
    ['b measured no test accuracy: it is ranked after those that did.']
    """
    from hansa.study.report.ranking import has_accuracy

    found = []
    data: dict[str, list[str]] = {}
    for entry in entries:
        said = _data(entry.config).get("data") if entry.config else None
        if isinstance(said, Mapping):
            data.setdefault(str(said.get("factory") or said.get("name") or "fashion-mini"), []).append(entry.name)
    if len(data) > 1:
        told = "; ".join(f"{name}: {', '.join(who)}" for name, who in data.items())
        found.append(f"These runs are of different data ({told}): their accuracies and losses are not comparable.")
    able = [entry for entry in entries if any(map(has_accuracy, entry.histories))]
    if able and len(able) < len(entries):
        without = [entry.name for entry in entries if entry not in able]
        who = ", ".join(without)
        some = "they are" if len(without) > 1 else "it is"
        found.append(f"{who} measured no test accuracy: {some} ranked after those that did.")
    for entry in entries:
        kinds = {
            frozenset(k for k in ("test_accuracy", "test_loss", "global_loss", "loss") if _has(h, k))
            for h in entry.histories
        }
        if len(kinds) > 1:
            found.append(f"{entry.name}: its seeds did not measure the same; what only some measured is not averaged.")
    return found


def _has(history: Sequence[Mapping[str, Any]], name: str) -> bool:
    names = getattr(history, "names", None)
    return name in names if names is not None else any(name in record for record in history)
