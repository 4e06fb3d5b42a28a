"""Ascending indices in the shortest of three codes: a bitmap, varints of the gaps, Golomb-Rice of the gaps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hansa.compress.bits import (
    decode_bitmap,
    decode_rice,
    decode_varints,
    encode_bitmap,
    encode_rice,
    encode_varints,
    rice_size,
    varint_lengths,
)
from hansa.compress.packet import Array, Buffer, PacketError

BITMAP, VARINT, RICE = range(3)


@dataclass(frozen=True, slots=True)
class EncodedIndices:
    """Encoded indices: the code, its parameter (the remainder bits of Golomb-Rice, else 0), the bytes."""

    code: int
    width: int
    data: Buffer


def encode_indices(indices: Array, dim: int) -> EncodedIndices:
    """Encode indices in the shortest code; a gap is the number of entries between two neighbours.

    For k of d evenly spread entries Golomb-Rice is within two percent of the entropy. Varints win for dense clusters
    separated by long gaps, the bitmap if more than about an eighth is kept.

    >>> encode_indices(np.array([2, 3, 70]), 1000)
    EncodedIndices(code=1, width=0, data=b'\\x02\\x00B')
    """
    gaps = np.diff(indices, prepend=-1) - 1
    widths = range(int(gaps.mean() if gaps.size else 0).bit_length() + 2)
    width = min(widths, key=lambda width: rice_size(gaps, width))
    sizes = [-(-dim // 8), int(varint_lengths(gaps).sum()), rice_size(gaps, width)]
    shortest = min((BITMAP, VARINT, RICE), key=lambda code: sizes[code])
    if shortest == BITMAP:
        return EncodedIndices(BITMAP, 0, encode_bitmap(indices, dim))
    return (
        EncodedIndices(VARINT, 0, encode_varints(gaps))
        if shortest == VARINT
        else EncodedIndices(RICE, width, encode_rice(gaps, width))
    )


def decode_indices(coded: EncodedIndices, count: int, dim: int) -> Array:
    """Decode the indices, strictly ascending and below ``dim``; no code can repeat an index."""
    if len(coded.data) > -(-dim // 8):
        raise PacketError(f"packet: {len(coded.data)} bytes of indices, a bitmap would take {-(-dim // 8)}.")
    if coded.code not in (BITMAP, VARINT, RICE) or (coded.width and coded.code != RICE):
        raise PacketError(f"packet: unknown index code {coded.code} with parameter {coded.width}.")
    if coded.code == BITMAP:
        return decode_bitmap(coded.data, count, dim, "bitmap")
    if coded.width > dim.bit_length():
        raise PacketError(f"packet: {coded.width} remainder bits for indices below {dim}.")
    gaps = decode_varints(coded.data, count) if coded.code == VARINT else decode_rice(coded.data, coded.width, count)
    if count and int(gaps.max()) >= dim:
        raise PacketError(f"packet: an index lies beyond the {dim} entries of the vector.")
    indices = np.cumsum(gaps + 1) - 1
    if count and not (indices[-1] < dim and indices.min() >= 0):
        raise PacketError(f"packet: index {indices[-1]} lies beyond the {dim} entries of the vector.")
    return indices
