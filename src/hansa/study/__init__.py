"""Run, compare, resume and search from Python; recipes, theory and reports."""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from hansa.study.api import compare, resume, run, run_config, search

__all__ = ["compare", "resume", "run", "run_config", "search"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
