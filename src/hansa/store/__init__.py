"""Per-client rows, in memory or on disk, one atomic commit a closed round."""

from typing import TYPE_CHECKING

from hansa.later import later

if TYPE_CHECKING:
    from hansa.store.base import SERVER, ClientStore, Rows
    from hansa.store.disk import DiskStore
    from hansa.store.io import Damaged
    from hansa.store.ram import RamStore

__all__ = ["SERVER", "ClientStore", "Damaged", "DiskStore", "RamStore", "Rows"]

HOMES = {
    "ClientStore": "hansa.store.base",
    "Damaged": "hansa.store.io",
    "DiskStore": "hansa.store.disk",
    "RamStore": "hansa.store.ram",
    "Rows": "hansa.store.base",
    "SERVER": "hansa.store.base",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = later(__name__, HOMES)
