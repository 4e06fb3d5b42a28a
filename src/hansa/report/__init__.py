"""Reports: a self-contained page of curves, tables and configurations; tables for the terminal."""

from typing import TYPE_CHECKING

from hansa.later import later
from hansa.report.page import page, write
from hansa.report.pieces import Grid, Holdings, Section
from hansa.report.standings import Entry, Standing, by_seeds, common_target, rank

if TYPE_CHECKING:
    from hansa.report.results import Comparison, Runs

__all__ = [
    "Comparison",
    "Entry",
    "Grid",
    "Holdings",
    "Runs",
    "Section",
    "Standing",
    "by_seeds",
    "common_target",
    "page",
    "rank",
    "write",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = later(__name__, {"Comparison": "hansa.report.results", "Runs": "hansa.report.results"})
