"""Reports: a self-contained page of curves, tables and configurations; tables for the terminal."""

from hansa.report.entries import Entry, Standing, common_target, rank
from hansa.report.page import Holdings, page, write

__all__ = ["Entry", "Holdings", "Standing", "common_target", "page", "rank", "write"]
