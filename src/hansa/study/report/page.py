"""The report: one HTML file with everything in it, that opens anywhere and asks the network for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from hansa import __version__
from hansa.runs.store import io
from hansa.study.report.client_view import client_view, served
from hansa.study.report.cluster_graphs import graphs_section
from hansa.study.report.entries import Entry, common_target, rank, ranking_metric
from hansa.study.report.partition_summary import held_by
from hansa.study.report.payload import payload, written
from hansa.study.report.ranking import ladder_table, ranked_by, table, target_ladder, tiles
from hansa.study.report.sections import (
    Grid,
    Holdings,
    Section,
    citations_section,
    configs_section,
    environment_section,
    holdings_section,
    mixed,
    notices,
)

MARK = (
    '<svg viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="1.7" aria-hidden="true">'
    '<circle cx="12" cy="4.5" r="2.6"/><circle cx="4.5" cy="18" r="2.6"/><circle cx="19.5" cy="18" r="2.6"/>'
    '<path d="M10.7 6.8 5.8 15.7M13.3 6.8l4.9 8.9M7.1 18h9.8"/></svg>'
)
SCRIPTS = ("plot.js", "report.js")


def write(path: Path | str, entries: Sequence[Entry], **options: Any) -> Path:
    """Write the report of some runs; `page` has the options.

    >>> import tempfile
    >>> from hansa.study.report import Entry
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
    problems: Sequence[str] = (),
    published: Sequence[Grid] = (),
    sections: Sequence[Section] = (),
) -> str:
    """The report as HTML. Without a target accuracy, one that tells the runs apart is chosen.

    ``problems`` are named above the numbers: folders that could not be read, and the like. ``published`` are tables
    given as data, such as a paper's numbers beside ours; ``sections`` are further parts of the page.

    >>> from hansa.study.report import Entry
    >>> page([Entry("a", [{"round": 1, "test_accuracy": 0.5}])]).startswith("<!doctype html>")
    True
    """
    parts, content = rendered(
        entries, target=target, holdings=holdings, problems=problems, published=published, sections=sections
    )
    return template().substitute(
        **parts,
        version=escape(__version__),
        title=escape(title),
        mark=MARK,
        lead=escape(lead),
        facts="".join(f"<span>{escape(fact)}</span>" for fact in facts),
        live="",
        policy="",
        citations=citations_section(citations),
        footer="This page is one file and asks the network for nothing.",
        data=written(content),
    )


def rendered(
    entries: Sequence[Entry],
    *,
    target: float | None = None,
    holdings: Holdings | None = None,
    problems: Sequence[str] = (),
    published: Sequence[Grid] = (),
    sections: Sequence[Section] = (),
) -> tuple[dict[str, str], dict[str, Any]]:
    """The parts of the page that hang on the runs, as HTML by name, and what its script draws."""
    if target is None:
        target = common_target(entries)
    standings = rank(entries, target)
    order = {id(entry): place for place, entry in enumerate(entries)}
    ladder = target_ladder(entries, target)
    reach = f'<div class="scroll">{ladder_table(standings, ladder)}</div>' if ladder else ""
    found, populations = held_by([standing.entry for standing in standings])
    drawn = [holdings] if holdings is not None else found
    parts = {
        "notices": notices([*problems, *mixed(entries)]),
        "tiles": "".join(tiles(standings, target)),
        "ranked_by": escape(ranked_by(standings, ranking_metric(standings))),
        "table": table(standings, [order[id(standing.entry)] for standing in standings], target),
        "published": "".join(str(grid.section()) for grid in published),
        "targets": str(Section("Rounds to a target", reach, "test accuracy; below, what had been sent up", "reach")),
        "sections": "".join(map(str, sections)),
        "graphs": str(graphs_section(standings, populations)),
        "partition": str(holdings_section(drawn)) + client_view(served(standings)),
        "configs": str(configs_section(standings)),
        "environment": str(environment_section(entries)),
    }
    return parts, payload(entries, standings, target)


def template(scripts: Sequence[str] = SCRIPTS) -> Template:
    """The page with its style and scripts in it, and places for the rest."""
    assets = files("hansa.study.report").joinpath("assets")
    found = {
        name: assets.joinpath(name).read_text(encoding="utf-8") for name in ("report.html", "report.css", *scripts)
    }
    script = "\n".join(found[name] for name in scripts)
    text = Template(found["report.html"]).safe_substitute(style=_kept(found["report.css"]), script=_kept(script))
    return Template(text)


def _kept(text: str) -> str:
    """Text in which a dollar is a dollar."""
    return text.replace("$", "$$")
