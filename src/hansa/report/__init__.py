"""Reports: a self-contained page of curves, tables and configurations; tables for the terminal."""

from hansa.report.page import Holdings, page, write
from hansa.report.results import Comparison, Runs
from hansa.report.standings import Entry, Standing, by_seeds, common_target, rank

__all__ = ["Comparison", "Entry", "Holdings", "Runs", "Standing", "by_seeds", "common_target", "page", "rank", "write"]
