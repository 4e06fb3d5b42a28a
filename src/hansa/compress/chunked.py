"""Passes over whole vectors, in chunks that fit in cache. Results depend only on the values.

float32 vectors use native code if available, with bit-identical results.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hansa.compress.packet import Array, native_array, nonfinite_error
from hansa.core.vectors import kernels as native_kernels

CHUNK = 1 << 16
LANES = 1 << 10
SAMPLE = 1 << 17


def signs(x: Array) -> tuple[Array, float]:
    """Return `pack_signs` and `absolute_sum`, natively in one pass."""
    if native_array(x):
        return native_kernels.sign_pack(x)
    return pack_signs(x), absolute_sum(x)


def absolute_sum(x: Array) -> float:
    """Return ||x||_1, summed in a fixed order: 1024 float64 lanes per chunk of 65536, then the lanes exactly (fsum).

    Entry i is added to lane i mod 1024. In float64 the mean of equal magnitudes is exact.
    """
    lanes = np.zeros(LANES)
    buffer = np.empty(min(CHUNK, -(-x.size // LANES) * LANES), x.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, x.size, CHUNK):
            piece = x[start : start + CHUNK]
            rows = -(-piece.size // LANES)
            np.abs(piece, out=buffer[: piece.size])
            buffer[piece.size : rows * LANES] = 0
            lanes += np.add.reduce(buffer[: rows * LANES].reshape(rows, LANES), axis=0, dtype=np.float64)
    return math.fsum(lanes) if np.isfinite(lanes).all() else math.nan


def pack_signs(x: Array) -> Array:
    """Pack one bit per entry, 1 where x >= 0 (so both zeros become +1), the lowest bit of a byte first."""
    bits = np.empty(-(-x.size // 8), np.uint8)
    buffer = np.empty(min(CHUNK, x.size), bool)
    for start in range(0, x.size, CHUNK):
        piece = x[start : start + CHUNK]
        up = np.greater_equal(piece, 0, out=buffer[: piece.size])
        bits[start // 8 : (start + piece.size + 7) // 8] = np.packbits(up, bitorder="little")
    return bits


def sign_table(scale: Any) -> Array:
    """Return the eight entries encoded by each byte of signs."""
    up = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(bool)
    table: Array = np.where(up, scale, -scale).astype(scale.dtype)
    return table


def write_signs(bits: Array, scale: Any, out: Array) -> None:
    """Set out = scale * sign, with one table look-up per eight entries."""
    if native_array(out):
        native_kernels.sign_write(bits, float(scale), out)
        return
    table, full_bytes = sign_table(scale), out.size // 8
    np.take(table, bits[:full_bytes], axis=0, out=out[: full_bytes * 8].reshape(full_bytes, 8), mode="clip")
    if full_bytes < bits.size:
        out[full_bytes * 8 :] = table[bits[full_bytes], : out.size - full_bytes * 8]


def add_signs(bits: Array, scale: Any, out: Array) -> None:
    """Add scale * sign to ``out`` without a temporary vector."""
    if native_array(out):
        native_kernels.sign_write(bits, float(scale), out, add=True)
        return
    table, full_bytes, step = sign_table(scale), out.size // 8, CHUNK // 8
    buffer = np.empty((min(step, full_bytes), 8), out.dtype)
    for start in range(0, full_bytes, step):
        piece = bits[start : min(start + step, full_bytes)]
        target = out[start * 8 : (start + piece.size) * 8].reshape(-1, 8)
        target += np.take(table, piece, axis=0, out=buffer[: piece.size], mode="clip")
    if full_bytes < bits.size:
        out[full_bytes * 8 :] += table[bits[full_bytes], : out.size - full_bytes * 8]


def top_k_indices(x: Array, k: int, component: str) -> Array:
    """Return the ascending indices of the k largest magnitudes; ties go to the lower index, zeros are excluded.

    A threshold that slightly more than k entries should pass is estimated from a sample; the exact k are then selected
    among those. If too few pass, the pass is repeated with the exact threshold of the whole vector.
    """
    least = np.finfo(x.dtype).smallest_subnormal
    exact = x.size <= SAMPLE
    threshold = max(_kth_magnitude(x, k) if exact else _estimated_threshold(x, k), least)
    passed = _indices_reaching(x, threshold)
    if not exact and passed.size < k and threshold > least:
        threshold = max(_kth_magnitude(x, k), least)
        passed = _indices_reaching(x, threshold)
    magnitudes = np.abs(x[passed])
    if not np.isfinite(magnitudes).all():
        raise nonfinite_error(x, component)
    if passed.size <= k:
        return passed
    kth = np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
    keep = magnitudes > kth
    ties = np.flatnonzero(magnitudes == kth)
    keep[ties[: k - int(keep.sum())]] = True
    chosen: Array = passed[keep]
    return chosen


def _kth_magnitude(x: Array, k: int) -> Any:
    magnitudes = np.abs(x)
    magnitudes.partition(x.size - k)
    return magnitudes[x.size - k]


def _estimated_threshold(x: Array, k: int) -> Any:
    """Return a magnitude that k entries almost surely exceed: four standard deviations below the sample's k-th."""
    sample = np.abs(x[:: x.size // SAMPLE | 1])
    hits = k * sample.size / x.size
    rank = min(sample.size, math.ceil(hits + 4 * math.sqrt(hits) + 4))
    return np.partition(sample, sample.size - rank)[sample.size - rank]


def _indices_reaching(x: Array, threshold: Any) -> Array:
    """Return the indices where |x| is not below the threshold; NaN and infinity are always included."""
    if native_array(x):
        return native_kernels.indices_reaching(x, float(threshold))[0]
    pieces = []
    buffer, below = np.empty(min(CHUNK, x.size), x.dtype), np.empty(min(CHUNK, x.size), bool)
    with np.errstate(invalid="ignore"):
        for start in range(0, x.size, CHUNK):
            piece = x[start : start + CHUNK]
            np.abs(piece, out=buffer[: piece.size])
            mask = np.less(buffer[: piece.size], threshold, out=below[: piece.size])
            indices = np.flatnonzero(np.logical_not(mask, out=mask))
            indices += start
            pieces.append(indices)
    return np.concatenate(pieces)
