"""Reports: a self-contained page of curves, tables and configurations; results in Python; tables for the terminal."""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from hansa.study.report.entries import RankedEntry, ReportEntry, common_target, group_by_seed, rank
    from hansa.study.report.page import PageSection, ReportTable, render_page, write_page
    from hansa.study.report.results import Comparison, Runs
    from hansa.study.report.tables import LabelCounts

__all__ = [
    "Comparison",
    "LabelCounts",
    "PageSection",
    "RankedEntry",
    "ReportEntry",
    "ReportTable",
    "Runs",
    "common_target",
    "group_by_seed",
    "rank",
    "render_page",
    "write_page",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
