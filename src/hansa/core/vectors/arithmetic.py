"""Passes over whole vectors, by native code where it is there and fits, otherwise by torch.

Which of the two it is depends on the machine and the vector alone, so equal runs stay equal to the bit. The two agree
to rounding.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from hansa.core import native
from hansa.core.types import Vector
from hansa.core.vectors import allocator, kernels

SPAN = 1 << 14  # coordinates turned to float64 at a time
PARALLEL_PRODUCTS = 1 << 24  # products that are worth a thread of their own


def native_fits(*vectors: Vector) -> bool:
    """Whether native kernels can take these vectors: alike, dense and on the CPU."""
    dtype = vectors[0].dtype
    if dtype != torch.float32 and dtype != torch.float64:
        return False
    for vector in vectors:
        if vector.dtype != dtype or not vector.is_contiguous() or not vector.is_cpu:
            return False
    return native.available()


def norm(x: Vector) -> float:
    """The Euclidean length; NaN or infinite where an entry is, or where its square is beyond float64.

    >>> norm(torch.tensor([3.0, 4.0]))
    5.0
    """
    if native_fits(x):
        return math.sqrt(kernels.squared_norm(x)[0])
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def all_finite(x: Vector) -> bool:
    """Whether no entry is NaN or infinite, in one pass without a vector of answers.

    >>> all_finite(torch.tensor([1.0, 3e38])), all_finite(torch.tensor([1.0, math.nan]))
    (True, False)
    """
    if native_fits(x):
        return kernels.squared_norm(x)[1]
    return math.isfinite(float(torch.linalg.vector_norm(x))) or bool(torch.isfinite(x).all())


def inner_products(rows: Vector, vectors: Vector) -> Vector:
    """<row_i, vector_j> in float64 of two matrices: natively as `kernels.inner_products` has it, on two threads
    where that pays, which the bits do not show.

    >>> inner_products(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor([[11.,  2.]], dtype=torch.float64)
    """
    if rows.dtype == torch.float32 and native_fits(rows, vectors):
        half = len(rows) // 2
        if half * rows.shape[1] * len(vectors) < PARALLEL_PRODUCTS or cores() < 2:
            return kernels.native_inner_products(rows, vectors)
        with ThreadPoolExecutor(1) as other:
            job = other.submit(kernels.native_inner_products, rows[half:], vectors)
            first = kernels.native_inner_products(rows[:half], vectors)
            return torch.cat([first, job.result()])
    total = torch.zeros(len(rows), len(vectors), dtype=torch.float64)
    for start in range(0, rows.shape[1], SPAN):
        span = slice(start, start + SPAN)
        total.addmm_(rows[:, span].to(torch.float64), vectors[:, span].to(torch.float64).T)
    return total


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_LARGE = 1 << 20  # entries from which a sum is worth dividing
_ALIGNED = 64  # entries: ranges begin where vector instructions do


class ParallelSums:
    """Sums of large vectors are divided by coordinates among so many threads, until it is closed. Each entry is summed
    over all rows in their order, whoever does it: the bits do not depend on the number."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        flushes = float(torch.full((1,), 1e-310, dtype=torch.float64).mul(1.0).sum()) == 0.0  # as this thread does
        self._pool = (
            ThreadPoolExecutor(threads, "hansa-sum", torch.set_flush_denormal, (flushes,)) if threads > 1 else None
        )

    def sum(self, rows: Sequence[Vector], weights: Sequence[float]) -> Vector:
        assert self._pool is not None
        out = allocator.empty_like(rows[0])
        size = -(-len(out) // self.threads // _ALIGNED) * _ALIGNED + _ALIGNED
        parts = [slice(start, min(start + size, len(out))) for start in range(0, len(out), size)]
        done = [
            self._pool.submit(kernels.native_weighted_sum, [row[part] for row in rows], weights, out[part])
            for part in parts
        ]
        for part in done:
            part.result()
        return out

    def close(self) -> None:
        if self in _active_pools:
            _active_pools.remove(self)
        if self._pool is not None:
            self._pool.shutdown()


_active_pools: list[ParallelSums] = []


def parallel_sums(threads: int) -> ParallelSums:
    """Have large sums done by so many threads, for a run whose other work is elsewhere."""
    _active_pools.append(ParallelSums(threads))
    return _active_pools[-1]


def weighted_sum(rows: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """sum w_i row_i, folded left to right entry by entry.

    >>> weighted_sum([torch.tensor([1.0]), torch.tensor([3.0])], [0.5, 0.5])
    tensor([2.])
    """
    if native_fits(*rows):
        if _active_pools and _active_pools[-1].threads > 1 and rows[0].ndim == 1 and len(rows[0]) >= _LARGE:
            return _active_pools[-1].sum(rows, weights)
        return kernels.native_weighted_sum(rows, weights)
    total = rows[0] * weights[0]
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        total.add_(row, alpha=weight)
    return total
