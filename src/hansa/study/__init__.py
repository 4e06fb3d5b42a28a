"""Run, compare, resume and search from Python; recipes, advice and reports."""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from hansa.study.api import compare, resume, run, search

__all__ = ["compare", "resume", "run", "search"]

HOMES = dict.fromkeys(__all__, "hansa.study.api")

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_attributes(__name__, HOMES)
