"""Entropy coding of integers in blocks: which reach 1, which of those reach 2, and so on, then signs.

A block of up to 16384 numbers is coded independently, so that dense and sparse layers each get a suitable code. A
magnitude is high * 2^shift + low; low bits are stored raw, and the few high values beyond the last plane as varints.
"""

from __future__ import annotations

import struct
import sys

import numpy as np
import torch

from hansa.compress import index_coding as index_code
from hansa.compress.bits import decode_varints, encode_varints, pack_codes, packed_size, unpack_codes
from hansa.compress.index_coding import EncodedIndices
from hansa.compress.packet import Array, PacketError
from hansa.core import native
from hansa.core.vectors import allocator, kernels

BLOCK = 1 << 14
PLANES = 24
FEW_SET_BITS = 12
NATIVE_BITS = 24  # of numbers that native code reads and writes
START = struct.Struct("<BB")
PLANE = struct.Struct("<HHB")
REST = struct.Struct("<H")


def encode_integers(numbers: Array) -> bytes:
    """Encode signed integers.

    >>> encode_integers(np.array([0, 0, -1, 0, 0, 0, 0, 0])).hex()
    '000101000100000401000001'
    """
    if numbers.dtype == np.int32 and numbers.flags.c_contiguous and sys.byteorder == "little" and native.available():
        return kernels.bit_planes_pack(numbers, max_nbytes(numbers.size, NATIVE_BITS)).tobytes()
    return b"".join(_block(numbers[start : start + BLOCK]) for start in range(0, numbers.size, BLOCK))


def max_nbytes(count: int, bits: int) -> int:
    """Return the largest encoded size of ``count`` numbers below 2^bits in magnitude.

    With the chosen shift the high values sum to less than 4 per entry: 5 bits of planes, a sign, the low bits, and at
    most one high value in six beyond the planes.
    """
    blocks = -(-count // BLOCK)
    overhead = START.size + REST.size + PLANES * (PLANE.size + 1) + 3 + -(-bits // 7)
    return -(-count * (6 + bits) // 8) + -(-count // 6) * -(-bits // 7) + blocks * overhead


def _block(numbers: Array) -> bytes:
    magnitudes = np.abs(numbers)
    shift = max(0, int(magnitudes.mean()).bit_length() - 2)
    highs = magnitudes >> shift
    parts: list[bytes] = []
    planes = 0
    while planes < PLANES and (highs.size > FEW_SET_BITS or not planes):
        planes += 1
        reached = highs >= planes
        count = int(reached.sum())
        flipped = 2 * count > reached.size
        coded = index_code.encode_indices(np.flatnonzero(reached != flipped), reached.size)
        flags = flipped | coded.code << 1 | coded.width << 3
        parts += [PLANE.pack(reached.size - count if flipped else count, len(coded.data), flags), bytes(coded.data)]
        highs = highs[reached]
    rest = encode_varints(highs - planes)
    if highs.size:
        parts += [REST.pack(len(rest)), rest]
    low = pack_codes(magnitudes & ((1 << shift) - 1), shift)
    negative = pack_codes((numbers[magnitudes > 0] < 0).astype(np.uint8), 1)
    return b"".join([START.pack(shift, planes), *parts, low, negative])


class ByteReader:
    """A sequential reader of a payload; a truncated one raises an error."""

    __slots__ = ("view",)

    def __init__(self, view: memoryview) -> None:
        self.view = view

    def take(self, size: int) -> memoryview:
        if size > len(self.view):
            raise PacketError(f"packet: truncated: {size} bytes expected where {len(self.view)} are left.")
        piece, self.view = self.view[:size], self.view[size:]
        return piece


def decode_integers(view: memoryview, count: int, bits: int) -> Array:
    """Decode :func:`encode_integers` from the whole view; magnitudes beyond 2^bits are an error."""
    reader = ByteReader(view)
    least = -(-count // BLOCK) * (START.size + PLANE.size)
    if len(view) < least:
        raise PacketError(f"packet: truncated: {count} numbers take {least} bytes at least, {len(view)} arrived.")
    if count and bits == NATIVE_BITS and sys.byteorder == "little" and native.available():
        decoded = kernels.bit_planes_unpack(np.frombuffer(view, np.uint8), count)
        if decoded is not None:
            return decoded  # otherwise the code below names the reason, in the same memory
    narrow = bits < 31
    numbers = allocator.empty(count, torch.float32 if narrow else torch.float64).numpy()
    numbers = numbers.view(np.int32 if narrow else np.int64)
    for start in range(0, count, BLOCK):
        piece = numbers[start : start + BLOCK]
        piece[:] = _read_block(reader, piece.size, bits)
    if len(reader.view):
        raise PacketError(f"packet: {len(reader.view)} bytes follow the last number.")
    return numbers


def _read_block(reader: ByteReader, size: int, bits: int) -> Array:
    shift, planes = START.unpack(reader.take(START.size))
    if shift > bits or not 1 <= planes <= PLANES:
        raise PacketError(f"packet: no block of numbers has {planes} planes and {shift} low bits.")
    highs: Array = np.zeros(size, np.int64)
    where = np.arange(size)
    for plane in range(planes):
        if plane and where.size <= FEW_SET_BITS:
            raise PacketError(f"packet: a plane of {where.size} numbers, so few travel without.")
        where = where[_reached(reader, where.size)]
        highs[where] += 1
    if planes < PLANES and where.size > FEW_SET_BITS:
        raise PacketError(f"packet: {where.size} numbers are left without another plane.")
    if where.size:
        rest = decode_varints(reader.take(REST.unpack(reader.take(REST.size))[0]), where.size)
        if int(rest.max()) >> bits:
            raise PacketError(f"packet: a number beyond 2^{bits}.")
        highs[where] += rest
    if int(highs.max()) > 1 << (bits - shift):
        raise PacketError(f"packet: a number beyond 2^{bits}.")
    magnitudes: Array = highs << shift | unpack_codes(reader.take(packed_size(size, shift)), shift, size).astype(
        np.int64
    )
    if int(magnitudes.max()) > 1 << bits:
        raise PacketError(f"packet: a number beyond 2^{bits}.")
    signed = np.flatnonzero(magnitudes)
    negative = unpack_codes(reader.take(packed_size(signed.size, 1)), 1, signed.size).view(bool)
    magnitudes[signed[negative]] *= -1
    return magnitudes


def _reached(reader: ByteReader, size: int) -> Array:
    """Return which of ``size`` numbers reach the next plane."""
    count, length, flags = PLANE.unpack(reader.take(PLANE.size))
    data = reader.take(length)
    flipped, code, width = flags & 1, flags >> 1 & 3, flags >> 3
    if 2 * count > size or (2 * count == size and flipped):
        raise PacketError(f"packet: {count} of {size} numbers in a plane, the fewer are to be listed.")
    reached = np.full(size, bool(flipped))
    reached[index_code.decode_indices(EncodedIndices(code, width, data), count, size)] ^= True
    return reached
