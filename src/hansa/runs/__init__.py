"""What belongs to a run: the driver, its folder, checkpoints, metrics, the ledger of bytes, trackers."""

from typing import TYPE_CHECKING

from hansa.later import later

if not TYPE_CHECKING:
    __getattr__, __dir__ = later(__name__)
