"""Reports: a self-contained page of curves, tables and configurations; tables for the terminal."""

from hansa.report.page import Holdings, page, write
from hansa.report.standings import Entry, Standing, by_seeds, common_target, rank

__all__ = ["Entry", "Holdings", "Standing", "by_seeds", "common_target", "page", "rank", "write"]
