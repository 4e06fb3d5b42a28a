"""Runs: the driver, run folders, checkpoints, metrics, byte counts and trackers."""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_exports

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
