"""Per-client rows, in memory or on disk, with one atomic commit per closed round."""

from typing import TYPE_CHECKING

from hansa.core.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from hansa.runs.record import SERVER, ClientStore, DiskStore, Rows
    from hansa.runs.store.io import DamagedFileError

__all__ = ["SERVER", "ClientStore", "DamagedFileError", "DiskStore", "Rows"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__)
