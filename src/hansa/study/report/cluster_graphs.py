"""The gossip graphs of a report, with how fast they average."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from hansa.config.registry.import_path import NOT_LOADED, named_code
from hansa.study.report.entries import RankedEntry
from hansa.study.report.ranking import method_label
from hansa.study.report.sections import PageSection

if TYPE_CHECKING:
    from hansa.gossip.mixing import Mixing

MAX_GRAPHS = 6
MAX_CLIENTS = 2048
"""Graphs with more clients are not built for a page."""


def graphs_section(ranking: Sequence[RankedEntry], populations: Sequence[int | None]) -> PageSection:
    """Draw the gossip graph of a cluster of each method that gossips.

    ``populations`` is the number of clients of each method, None if it is not known. No code that a configuration names
    is imported: gossip with such components is named, not drawn.
    """
    figures: list[str] = []
    for ranked, population in zip(ranking, populations, strict=True):
        mixing, own = _mixing(ranked.entry.config)
        if (mixing is not None or own) and population is not None and len(figures) < MAX_GRAPHS:
            names = escape(f"{NOT_LOADED}: {', '.join(own)}")
            drawn = f'<p class="note">{names}</p>' if mixing is None else _draw_cluster(mixing, population)
            if drawn:
                figures.append(f'<figure class="graph"><figcaption>{method_label(ranked)}</figcaption>{drawn}</figure>')
    html = f'<div class="graphs">{"".join(figures)}</div>' if figures else ""
    note = "\u03c1: the factor by which a gossip step shrinks the distance to the mean; 0 averages at once, 1 never"
    return PageSection("Gossip graphs", html, note, "graphs")


def _mixing(config: str) -> tuple[Mixing | None, list[str]]:
    """The gossip of a configuration; or, if it names code, what its gossip section names."""
    from hansa.config import build_algorithm, code_names, from_yaml, only_look
    from hansa.core.errors import HansaError

    if not config:
        return None, []
    try:
        with only_look():
            read = from_yaml(config)
            if code_names(read):
                return None, named_code(read.gossip.model_dump())
            return None if read.python is not None else build_algorithm(read).local.mixing, []
    except HansaError:
        return None, []


def _draw_cluster(mixing: Mixing, population: int) -> str:
    from hansa import gossip
    from hansa.core.errors import HansaError
    from hansa.core.keys import Key

    try:
        clusters = gossip.resolve(mixing.clusters, population, Key(0).child("clusters"))
        sizes = Counter(len(cluster) for cluster in clusters)
        if max(sizes) > MAX_CLIENTS:
            return ""
        graph = mixing.topology.sparse(max(sizes))
        rho = gossip.rho_max(mixing.topology, list(sizes))
    except HansaError:  # clusters by labels, or a topology that does not exist for this many clients
        return ""
    counts = ", ".join(f"{count} cluster{'s' if count > 1 else ''} of {size}" for size, count in sorted(sizes.items()))
    caption = f"{mixing.topology!r}, {counts}, \u03c1 = {rho:.3g}"
    svg = gossip.svg(graph, 240).replace('stroke="#64748b"', 'class="edges"')  # in the page's colours, light or dark
    svg = re.sub(r' width="\d+"', "", svg.replace('<g fill="#0f766e"', '<g class="nodes"'), count=1)
    return f'{svg}<p class="note">{escape(caption)}</p>'
