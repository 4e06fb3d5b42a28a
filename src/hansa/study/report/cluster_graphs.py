"""The graphs over which clients gossip, with how fast they average."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from hansa.study.report.entries import Standing
from hansa.study.report.ranking import named
from hansa.study.report.sections import Section

if TYPE_CHECKING:
    from hansa.local.mixing import Mixing

MOST = 6
LARGEST = 2048
"""Clients beyond which a graph is not built for a page."""


def graphs_section(standings: Sequence[Standing], populations: Sequence[int | None]) -> Section:
    """A picture for each method that gossips: a cluster's graph, its rho, how many clusters there are.

    ``populations`` are how many clients each has, None where that is not known. A method that names code of
    somebody's own is left out: looking at a run does not run it.
    """
    found: list[str] = []
    for standing, population in zip(standings, populations, strict=True):
        mixing = _mixing(standing.entry.config)
        if mixing is not None and population is not None and len(found) < MOST:
            drawn = _drawn(mixing, population)
            if drawn:
                found.append(f'<figure class="graph"><figcaption>{named(standing)}</figcaption>{drawn}</figure>')
    text = f'<div class="graphs">{"".join(found)}</div>' if found else ""
    note = "\u03c1: by how much a gossip step brings neighbours closer to their mean, 0 at once, 1 never"
    return Section("Who talks to whom", text, note, "graphs")


def _mixing(config: str) -> Mixing | None:
    from hansa.config import algorithm, from_text, parse
    from hansa.config.registry.import_path import unknown_code
    from hansa.core.errors import HansaError

    if not config:
        return None
    try:
        if unknown_code(parse(config).data):
            return None
        read = from_text(config)
        return None if read.python is not None else algorithm(read).local.mixing
    except HansaError:
        return None


def _drawn(mixing: Mixing, population: int) -> str:
    from hansa import gossip
    from hansa.core.errors import HansaError
    from hansa.core.keys import Key

    try:
        groups = gossip.resolve(mixing.clusters, population, Key(0).child("clusters"))
        sizes = Counter(len(group) for group in groups)
        size = max(sizes)
        if size > LARGEST:
            return ""
        graph = mixing.topology.sparse(size)
        rho = gossip.rho_max(mixing.topology, list(sizes))
    except HansaError:  # clusters by labels, or a graph that this many clients have not
        return ""
    told = ", ".join(f"{count} cluster{'s' if count > 1 else ''} of {each}" for each, count in sorted(sizes.items()))
    words = f"{mixing.topology!r}, {told}, \u03c1 = {rho:.3g}"
    return f'{_themed(gossip.svg(graph, 240))}<p class="note">{escape(words)}</p>'


def _themed(svg: str) -> str:
    """The picture in the page's own colours, light or dark."""
    svg = svg.replace('stroke="#64748b"', 'class="edges"').replace('<g fill="#0f766e"', '<g class="nodes"')
    return re.sub(r' width="\d+"', "", svg, count=1)
