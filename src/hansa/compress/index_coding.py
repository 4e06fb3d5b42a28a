"""Rising indices in the fewest bytes of three codes: a bitmap, varints of the gaps, Golomb-Rice of the gaps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hansa.compress.bits import bitmap, rice, rice_size, set_bits, unrice, unvarints, varint_lengths, varints
from hansa.compress.packet import Array, Buffer, PacketError

BITMAP, VARINT, RICE = range(3)


@dataclass(frozen=True, slots=True)
class Coded:
    """Indices as bytes: which code, its parameter (the remainder bits of Golomb-Rice, else 0), the bytes."""

    code: int
    width: int
    data: Buffer


def encode(indices: Array, dim: int) -> Coded:
    """The shortest of the three codes; a gap is how many entries lie between two neighbours.

    For k of d entries spread evenly Golomb-Rice comes within two percent of the entropy; varints win where long gaps
    separate dense clusters, the bitmap where more than about an eighth is kept.

    >>> encode(np.array([2, 3, 70]), 1000)
    Coded(code=1, width=0, data=b'\\x02\\x00B')
    """
    gaps = np.diff(indices, prepend=-1) - 1
    widths = range(int(gaps.mean() if gaps.size else 0).bit_length() + 2)
    width = min(widths, key=lambda width: rice_size(gaps, width))
    sizes = [-(-dim // 8), int(varint_lengths(gaps).sum()), rice_size(gaps, width)]
    shortest = min((BITMAP, VARINT, RICE), key=lambda code: sizes[code])
    if shortest == BITMAP:
        return Coded(BITMAP, 0, bitmap(indices, dim))
    return Coded(VARINT, 0, varints(gaps)) if shortest == VARINT else Coded(RICE, width, rice(gaps, width))


def decode(coded: Coded, count: int, dim: int) -> Array:
    """The indices, strictly rising and below ``dim``: no code can say the same index twice."""
    if len(coded.data) > -(-dim // 8):
        raise PacketError(f"packet: {len(coded.data)} bytes of indices, a bitmap would take {-(-dim // 8)}.")
    if coded.code not in (BITMAP, VARINT, RICE) or (coded.width and coded.code != RICE):
        raise PacketError(f"packet: unknown index code {coded.code} with parameter {coded.width}.")
    if coded.code == BITMAP:
        return set_bits(coded.data, count, dim, "bitmap")
    if coded.width > dim.bit_length():
        raise PacketError(f"packet: {coded.width} remainder bits for indices below {dim}.")
    gaps = unvarints(coded.data, count) if coded.code == VARINT else unrice(coded.data, coded.width, count)
    if count and int(gaps.max()) >= dim:
        raise PacketError(f"packet: an index lies beyond the {dim} entries of the vector.")
    indices = np.cumsum(gaps + 1) - 1
    if count and not (indices[-1] < dim and indices.min() >= 0):
        raise PacketError(f"packet: index {indices[-1]} lies beyond the {dim} entries of the vector.")
    return indices
