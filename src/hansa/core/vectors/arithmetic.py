"""Arithmetic on whole vectors, in native code if available and applicable, otherwise in torch; and where it is done.

The choice depends only on the machine and the vector, so equal runs stay bit-identical. The two agree up to rounding.

Digests of vectors and bytes that detect changed or damaged data, at about the cost of one read.

They are not cryptographic: collisions can be constructed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch

from hansa.core import native
from hansa.core.devices import available_cores, copy_to_device, has_float64
from hansa.core.types import Vector
from hansa.core.vectors import kernels

SPAN = 1 << 14  # coordinates converted to float64 at a time
PARALLEL_PRODUCTS = 1 << 24  # products above which a second thread pays off


def native_fits(*vectors: Vector) -> bool:
    """Return whether native kernels support these vectors: one float dtype, contiguous, on the CPU."""
    dtype = vectors[0].dtype
    if dtype != torch.float32 and dtype != torch.float64:
        return False
    for vector in vectors:
        if vector.dtype != dtype or not vector.is_contiguous() or not vector.is_cpu:
            return False
    return native.available()


def norm(x: Vector) -> float:
    """Return the Euclidean norm; NaN or infinite if an entry is, or if a square overflows float64.

    >>> norm(torch.tensor([3.0, 4.0]))
    5.0
    """
    if native_fits(x):
        return math.sqrt(kernels.squared_norm(x)[0])
    return float(norm_on_device(x))


def norm_on_device(x: Vector) -> torch.Tensor:
    """Return the Euclidean norm as a tensor on the device of ``x``, in float64 where the device has it.

    >>> norm_on_device(torch.tensor([3.0, 4.0]))
    tensor(5., dtype=torch.float64)
    """
    size: torch.Tensor = torch.linalg.vector_norm(x, dtype=torch.float64 if has_float64(x.device) else None)
    return size


def all_finite(x: Vector) -> bool:
    """Return whether all entries are finite, in one pass without a temporary vector.

    >>> all_finite(torch.tensor([1.0, 3e38])), all_finite(torch.tensor([1.0, math.nan]))
    (True, False)
    """
    if native_fits(x):
        return kernels.squared_norm(x)[1]
    return math.isfinite(float(torch.linalg.vector_norm(x))) or bool(torch.isfinite(x).all())


def inner_products(rows: Vector, vectors: Vector) -> Vector:
    """Return <row_i, vector_j> in float64 for two matrices.

    Large native products use two threads, without effect on the bits.

    >>> inner_products(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor([[11.,  2.]], dtype=torch.float64)
    """
    if rows.dtype == torch.float32 and native_fits(rows, vectors):
        half = len(rows) // 2
        if half * rows.shape[1] * len(vectors) < PARALLEL_PRODUCTS or available_cores() < 2:
            return kernels.native_inner_products(rows, vectors)
        with ThreadPoolExecutor(1) as executor:
            job = executor.submit(kernels.native_inner_products, rows[half:], vectors)
            first = kernels.native_inner_products(rows[:half], vectors)
            return torch.cat([first, job.result()])
    total = torch.zeros(len(rows), len(vectors), dtype=torch.float64)
    for start in range(0, rows.shape[1], SPAN):
        span = slice(start, start + SPAN)
        total.addmm_(rows[:, span].to(torch.float64), vectors[:, span].to(torch.float64).T)
    return total


def weighted_sum(rows: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """Return sum w_i row_i, folded left to right for each entry.

    >>> weighted_sum([torch.tensor([1.0]), torch.tensor([3.0])], [0.5, 0.5])
    tensor([2.])
    """
    if native_fits(*rows):
        return kernels.native_weighted_sum(rows, weights)
    total = rows[0] * weights[0]
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        total.add_(row, alpha=weight)
    return total


def computes_on(component: object, device: torch.device) -> torch.device:
    """Return the device on which a component computes, where the server's vectors are on ``device``.

    >>> from hansa.aggregate import aware, mean
    >>> computes_on(mean(), torch.device("meta")), computes_on(aware(), torch.device("meta"))
    (device(type='meta'), device(type='cpu'))
    """
    return device if getattr(component, "on_device", False) else torch.device("cpu")


def where_computed(component: object, vector: Vector) -> Vector:
    """Return a vector on the device on which a component computes with it, without a copy if it is there."""
    return vector if vector.is_cpu else vector.to(computes_on(component, vector.device))


def tree_to(tree: Any, device: torch.device) -> Any:
    """Return a plain tree with its tensors on a device.

    >>> tree_to({"t": 1, "m": [torch.zeros(2)]}, torch.device("meta"))["m"][0].device
    device(type='meta')
    """
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {name: tree_to(value, device) for name, value in tree.items()}
    return [tree_to(value, device) for value in tree] if isinstance(tree, list) else tree


_LARGEST_NETWORK = 64  # vectors; more of them are left to torch.sort


@lru_cache(maxsize=_LARGEST_NETWORK)
def comparators(count: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of places that Batcher's odd-even merge sort compares, in order, for ``count`` values.

    >>> comparators(3)
    ((0, 1), (0, 2), (1, 2))
    """
    pairs: list[tuple[int, int]] = []
    sorted_run = 1
    while sorted_run < count:
        distance = sorted_run
        while distance:
            for first in range(distance % sorted_run, count - distance, 2 * distance):
                for low in range(first, min(first + distance, count - distance)):
                    high = low + distance
                    if low // (2 * sorted_run) == high // (2 * sorted_run):
                        pairs.append((low, high))
            distance //= 2
        sorted_run *= 2
    return tuple(pairs)


def sort_vectors(vectors: Sequence[Vector]) -> list[Vector]:
    """Return n vectors of the same length whose i-th has the i-th smallest value of each coordinate.

    The values are those of ``torch.stack(vectors).sort(dim=0)``. Up to 64 vectors are compared as wholes, which is
    about ten times as fast: ``torch.sort`` sorts the few values of every coordinate separately.

    Args:
        vectors: Vectors without NaN, which are not modified.

    >>> sort_vectors([torch.tensor([3.0, 1.0]), torch.tensor([2.0, 4.0])])
    [tensor([2., 1.]), tensor([3., 4.])]
    """
    if len(vectors) > _LARGEST_NETWORK:
        return list(torch.stack(list(vectors)).sort(dim=0).values)
    rows = list(vectors)
    for low, high in comparators(len(rows)):
        rows[low], rows[high] = torch.minimum(rows[low], rows[high]), torch.maximum(rows[low], rows[high])
    return rows


Words: TypeAlias = "np.ndarray[Any, np.dtype[np.uint32]]"
Sums: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
_BLOCK, _SHIFT = 4096, 4
_AT_ONCE = 1024  # blocks: 32 MB of temporary memory each


def fingerprint(vector: Vector) -> bytes:
    """Return 16 bytes: blake2b of the length and of two sums per 4096 32-bit words, equal on every machine.

    A sum is that of (w_i + k_i)(w_j + k_j) over even i and j = i + 1, brackets modulo 2^32 and the rest modulo 2^64,
    with fixed keys k (NH of UMAC, Black et al. 1999); the second sum uses keys shifted by 4. Those of a vector on a
    device are computed there: the host reads 16 bytes for every 16 KB.

    >>> fingerprint(torch.tensor([1.0, 2.0])) == fingerprint(torch.tensor([2.0, 1.0]))
    False
    """
    length = vector.nbytes // 4
    words = vector.detach().contiguous().view(-1).view(torch.int32)
    sums = _native_sums(words) if vector.is_cpu and native.available() else _torch_sums(words)
    state = hashlib.blake2b(length.to_bytes(8, "little"), digest_size=16)
    state.update(sums.astype("<u8").data)
    return state.digest()


@cache
def _keys() -> Words:
    return np.random.Philox(key=0).random_raw((_BLOCK + _SHIFT) // 2).astype("<u8").view("<u4").astype(np.uint32)


@cache
def _keys_on_device(device: torch.device) -> Vector:
    return copy_to_device(torch.from_numpy(_keys().astype(np.int64)), device)


def _native_sums(words: Vector) -> Sums:
    sums = np.empty((-(-len(words) // _BLOCK), 2), np.uint64)
    native.load().digest(words.data_ptr(), len(words), _keys().ctypes.data, sums.ctypes.data)
    return sums


def _torch_sums(words: Vector) -> Sums:
    """Compute the sums with torch, whose products and sums of int64 are modulo 2^64, and read them at once."""
    keys = _keys_on_device(words.device)
    full = len(words) // _BLOCK
    parts = []
    for start in range(0, full, _AT_ONCE):
        blocks = words[start * _BLOCK : min(start + _AT_ONCE, full) * _BLOCK]
        parts.append(_block_sums(blocks.view(-1, _BLOCK), keys))
    if tail := len(words) % _BLOCK:
        parts.append(_block_sums(torch.nn.functional.pad(words[-tail:], (0, tail % 2))[None], keys))
    return torch.cat(parts).cpu().numpy().view(np.uint64) if parts else np.empty((0, 2), np.uint64)


def _block_sums(blocks: Vector, keys: Vector) -> Vector:
    wide, sums, low = blocks.to(torch.int64), [], torch.full((1,), 0xFFFFFFFF, device=blocks.device)
    for shift in (0, _SHIFT):
        keyed = (wide + keys[shift : shift + blocks.shape[1]]).bitwise_and_(low)
        sums.append((keyed[:, ::2] * keyed[:, 1::2]).sum(dim=1))
    return torch.stack(sums, dim=1)
