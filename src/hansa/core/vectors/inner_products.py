"""Native inner products of rows that arrive in pieces, from memory or a file, bit-identical to the whole-row kernel."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import c_int64
from typing import TYPE_CHECKING

import torch

from hansa.core import native
from hansa.core.errors import HansaError
from hansa.core.native import abi
from hansa.core.vectors.kernels import address_of

if TYPE_CHECKING:
    from torch import Tensor


class ShortRowError(Exception):
    """A file that ends within a row: the row's index among those requested, and the bytes available."""

    def __init__(self, place: int, available: int) -> None:
        super().__init__(place, available)
        self.place, self.available = place, available


class StreamedInnerProducts:
    """Inner products of ``count`` float32 rows that arrive in pieces, bit-identical to `native_inner_products`.

    >>> from hansa.core.vectors.kernels import native_inner_products
    >>> rows, vectors = torch.rand(2, 20), torch.rand(3, 20)
    >>> products = StreamedInnerProducts(2, vectors)
    >>> products.add(rows[:, :16])
    >>> products.add(rows[:, 16:])
    >>> torch.equal(products.total(), native_inner_products(rows, vectors))
    True
    """

    def __init__(self, count: int, vectors: Tensor, isa: str = "") -> None:
        self._first = address_of("StreamedInnerProducts", "vectors", vectors, torch.float32)
        self._count, self._vectors, self._table, self._done = count, vectors, native.load(isa), 0
        self._lanes = torch.zeros(count, len(vectors) + abi.GRAM_SPARE, abi.GRAM_LANES, dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        """Add the next entries of every row, [count, n]; n is a multiple of 8 except for the last."""
        (many, d), (count, n) = self._vectors.shape, rows.shape
        fits = rows.dtype == torch.float32 and rows.device.type == "cpu" and (rows.stride(1) == 1 or n == 1)
        if not fits or count != self._count or self._done + n > d or self._done % abi.GRAM_LANES:
            raise HansaError(
                f"StreamedInnerProducts.add: {rows.dtype} {[count, n]} after {self._done} entries of {d}: expected "
                f"float32 pieces of {self._count} rows, a multiple of {abi.GRAM_LANES} long all but the last."
            )
        there = self._first + self._done * rows.element_size()
        status = self._table.gram32_add(
            rows.data_ptr(), rows.stride(0), count, there, d, many, n, self._lanes.data_ptr()
        )
        if status != abi.OK:
            raise MemoryError("inner_products: no memory for the sums")
        self._done += n

    @property
    def reads(self) -> bool:
        """Return whether `add_from` is supported on this system."""
        return bool(self._table.rows_add)

    def add_from(self, file: int, offsets: Sequence[int], entries: int, crcs: Sequence[int]) -> list[int]:
        """Add the next entries of rows at byte offsets of an open file; return their CRC-32, continued from ``crcs``.

        Raises `ShortRowError` if the file is too short.
        """
        many, d = self._vectors.shape
        if len(offsets) != self._count or self._done + entries > d or self._done % abi.GRAM_LANES:
            raise HansaError(
                f"StreamedInnerProducts.add_from: {len(offsets)} rows, {self._done} + {entries} entries of {d}."
            )
        checks, failure = (ctypes.c_uint32 * self._count)(*crcs), (c_int64 * 2)()
        there = self._first + self._done * self._vectors.element_size()
        places = (c_int64 * self._count)(*offsets)
        result = self._table.rows_add(
            file, places, self._count, there, d, many, entries, self._lanes.data_ptr(), checks, failure
        )
        if result == abi.BAD_ROW and failure[1] < 0:
            raise OSError(-failure[1], os.strerror(-failure[1]))
        if result == abi.BAD_ROW:
            raise ShortRowError(failure[0], failure[1])
        if result != abi.OK:
            raise MemoryError("inner_products: no memory for the sums")
        self._done += entries
        return list(checks)

    def total(self) -> Tensor:
        """Return <row_i, vector_j> after all entries were added."""
        many, d = self._vectors.shape
        if self._done != d:
            raise HansaError(f"StreamedInnerProducts.total: {self._done} of {d} entries were added.")
        out = torch.empty(self._count, many, dtype=torch.float64)
        self._table.gram32_sum(self._lanes.data_ptr(), self._count, many, out.data_ptr())
        return out
