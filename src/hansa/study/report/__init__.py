"""Reports: a self-contained page of curves, tables and configurations; results in Python; tables for the terminal."""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from hansa.study.report.entries import LabelCounts, ReportEntry
    from hansa.study.report.page import ReportTable, render_page, write_page
    from hansa.study.report.ranking import Ranking, common_target, rank
    from hansa.study.report.results import Comparison, Runs

__all__ = [
    "Comparison",
    "LabelCounts",
    "Ranking",
    "ReportEntry",
    "ReportTable",
    "Runs",
    "common_target",
    "rank",
    "render_page",
    "write_page",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
