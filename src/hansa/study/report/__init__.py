"""Reports: a self-contained page of curves, tables and configurations; tables for the terminal."""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_attributes
from hansa.study.report.entries import Entry, Standing, by_seeds, common_target, rank
from hansa.study.report.page import page, write
from hansa.study.report.sections import Grid, Holdings, Section

if TYPE_CHECKING:
    from hansa.study.report.results import Comparison, Runs

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
    __getattr__, __dir__ = lazy_attributes(
        __name__, {"Comparison": "hansa.study.report.results", "Runs": "hansa.study.report.results"}
    )
