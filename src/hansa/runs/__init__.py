"""What belongs to a run: the driver, its folder, checkpoints, metrics, the ledger of bytes, trackers."""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_attributes

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_attributes(__name__)
