"""Per-client rows, in memory or on disk, one atomic commit a closed round."""

from hansa.store.base import SERVER, ClientStore, Rows
from hansa.store.disk import DiskStore
from hansa.store.io import Damaged
from hansa.store.ram import RamStore

__all__ = ["SERVER", "ClientStore", "Damaged", "DiskStore", "RamStore", "Rows"]
