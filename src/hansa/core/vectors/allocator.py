"""An allocator that reuses the memory of large vectors.

Fresh memory of this size is mapped page by page, which takes several times as long as filling it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from threading import RLock
from typing import Any

import numpy as np
import torch

from hansa.core.types import Vector

MIN_BYTES = 1 << 16  # bytes; the system allocator already caches smaller blocks
MAX_IDLE_BYTES = 1 << 29  # idle bytes kept, or eight of the largest vectors if that is more
_ALIGN = 64


class Allocator:
    """Allocates uninitialized vectors. Memory is reused once the last tensor that views it is deleted.

    >>> memory = Allocator(min_bytes=0)
    >>> x = memory.empty_like(torch.ones(1000))
    >>> address, view = x.data_ptr(), x[10:20]
    >>> del x
    >>> memory.empty_like(torch.ones(1000)).data_ptr() == address  # the view still looks at it
    False
    >>> del view
    >>> memory.empty_like(torch.ones(1000)).data_ptr() == address
    True
    """

    def __init__(self, min_bytes: int = MIN_BYTES, max_idle_bytes: int | None = None) -> None:
        self._min_bytes, self._max_idle_bytes = min_bytes, max_idle_bytes
        self._idle: dict[int, list[np.ndarray[Any, Any]]] = {}
        self._bytes = 0
        self._lock = RLock()  # reentrant: garbage collection may release memory during an allocation

    def empty_like(self, x: Vector) -> Vector:
        """Return an uninitialized vector of the same length, dtype and device."""
        if x.device.type != "cpu" or x.ndim != 1:
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        return self.empty(x.numel(), x.dtype)

    def empty(self, entries: int, dtype: torch.dtype) -> Vector:
        """Return an uninitialized vector on the CPU."""
        size = entries * dtype.itemsize
        if size < max(1, self._min_bytes) or dtype not in _numpy_dtypes():
            return torch.empty(entries, dtype=dtype)
        lent = self._acquire(size).view(_borrowed_class())
        lent.owner = self
        return torch.from_numpy(lent.view(_numpy_dtypes()[dtype]))  # the tensor keeps the memory alive

    def release(self, memory: np.ndarray[Any, Any]) -> None:
        """Take back memory that is no longer referenced."""
        with self._lock:
            limit = max(MAX_IDLE_BYTES, 8 * memory.size) if self._max_idle_bytes is None else self._max_idle_bytes
            if self._bytes + memory.size <= limit:
                self._idle.setdefault(memory.size, []).append(memory)
                self._bytes += memory.size

    def _acquire(self, size: int) -> np.ndarray[Any, Any]:
        with self._lock:
            idle = self._idle.get(size)
            if idle:
                self._bytes -= size
                return idle.pop()
        memory = np.empty(size + _ALIGN, np.uint8)
        start = -memory.ctypes.data % _ALIGN
        return memory[start : start + size]


@cache
def _borrowed_class() -> type[Any]:
    """Return the array class that releases its memory to the allocator when no tensor references it."""

    class Lent(np.ndarray[Any, Any]):
        owner: Allocator | None = None

        def __del__(self) -> None:
            if np is None:  # interpreter shutdown
                return
            if self.owner is not None and isinstance(self.base, np.ndarray):
                self.owner.release(self.base)

    return Lent


@cache
def _numpy_dtypes() -> dict[torch.dtype, Any]:
    return {torch.float32: np.float32, torch.float64: np.float64}


def trim() -> None:
    """Return freed memory to the system, if the C library supports it; call it after large one-time work."""
    if (give_back := _malloc_trim()) is not None:
        give_back(0)


@cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim  # glibc's
    except (AttributeError, OSError, TypeError):
        return None


SHARED = Allocator()
empty_like, empty = SHARED.empty_like, SHARED.empty
