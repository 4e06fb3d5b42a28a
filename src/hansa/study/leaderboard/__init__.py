"""A leaderboard that takes entries: results of recipes as files, their checks, and the page of all."""

from hansa.study.leaderboard.collect import collect_entry
from hansa.study.leaderboard.entry import (
    Entry,
    EntryRow,
    SeedResult,
    check_entry,
    check_same_data,
    read_entry,
    write_entry,
)
from hansa.study.leaderboard.page import leaderboard_page

__all__ = [
    "Entry",
    "EntryRow",
    "SeedResult",
    "check_entry",
    "check_same_data",
    "collect_entry",
    "leaderboard_page",
    "read_entry",
    "write_entry",
]
