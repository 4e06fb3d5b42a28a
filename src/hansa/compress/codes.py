"""Integer codes, vectorised: packed codes, bitmaps, varints, Golomb-Rice, ascending indices, planes of bits."""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass

import numpy as np
import torch

from hansa.compress.packet import Array, Buffer, PacketError
from hansa.core import native
from hansa.core.vectors import allocator, kernels

CHUNK = 1 << 16


def packed_size(count: int, width: int) -> int:
    """Return the size in bytes of ``count`` codes of ``width`` bits."""
    return count * (width // 8) + -(-count * (width % 8) // 8)


def pack_codes(codes: Array, width: int) -> bytes:
    """Pack unsigned codes of ``width`` bits: first the whole low bytes, one plane each, then the remaining high bits.

    Eight codes of w < 8 bits are w bytes: they are summed into a 64-bit word, whose low w bytes are kept.

    >>> pack_codes(np.array([1, 2, 3]), 2).hex()
    '39'
    """
    planes = [(codes >> shift).astype(np.uint8) for shift in range(0, width // 8 * 8, 8)]
    high = width % 8
    if high:
        top = np.zeros(-(-codes.size // 8) * 8, np.uint8)
        top[: codes.size] = codes >> (width - high)
        out = np.empty((top.size // 8, high), np.uint8)
        shifts = np.arange(8, dtype=np.uint64) * np.uint64(high)
        for start in range(0, len(out), CHUNK):
            group = top[start * 8 : (start + CHUNK) * 8].reshape(-1, 8)
            words = np.zeros(len(group), "<u8")
            for column, shift in enumerate(shifts):
                words |= group[:, column].astype(np.uint64) << shift
            out[start : start + CHUNK] = words.view(np.uint8).reshape(-1, 8)[:, :high]
        planes.append(out.reshape(-1)[: packed_size(codes.size, high)])
    return b"".join(plane.data for plane in planes)


def unpack_codes(data: Buffer, width: int, count: int) -> Array:
    """Decode :func:`pack_codes`: uint8 up to 8 bits, int64 above. Set bits after the last code are an error."""
    raw = np.frombuffer(data, np.uint8)
    if raw.size != packed_size(count, width):
        raise PacketError(f"packet: {raw.size} bytes of packed codes, expected {packed_size(count, width)}.")
    codes: Array = np.zeros(count, np.uint8 if width <= 8 else np.int64)
    full_bytes = width // 8
    for plane in range(full_bytes):
        codes |= raw[plane * count : (plane + 1) * count].astype(codes.dtype) << (8 * plane)
    high = width % 8
    if high:
        tail = raw[full_bytes * count :]
        if count * high % 8 and tail[-1] >> (count * high % 8):
            raise PacketError("packet: the padding after the packed codes is not zero.")
        mask = np.uint64((1 << high) - 1)
        for start in range(0, count, CHUNK):
            piece = tail[start // 8 * high : (start + CHUNK) // 8 * high]
            groups = -(-piece.size // high)
            padded_bytes = np.zeros(groups * high, np.uint8)
            padded_bytes[: piece.size] = piece
            padded = np.zeros((groups, 8), np.uint8)
            padded[:, :high] = padded_bytes.reshape(groups, high)
            words = padded.reshape(-1).view("<u8")
            fields = np.empty((groups, 8), np.uint8)
            for column in range(8):
                fields[:, column] = (words >> np.uint64(column * high)) & mask
            part = fields.reshape(-1)[: min(CHUNK, count - start)]
            codes[start : start + part.size] |= part.astype(codes.dtype) << (8 * full_bytes)
    return codes


def decode_bitmap(data: Buffer, count: int, size: int, name: str) -> Array:
    """Return the positions of the ones among ``size`` bits; raise unless there are ``count`` and no padding is set."""
    raw = np.frombuffer(data, np.uint8)
    if raw.size != -(-size // 8):
        raise PacketError(f"packet: {raw.size} bytes of {name}, expected {-(-size // 8)}.")
    if size % 8 and raw[-1] >> (size % 8):
        raise PacketError(f"packet: the padding after the {name} is not zero.")
    positions = np.flatnonzero(np.unpackbits(raw, bitorder="little").view(bool))
    if positions.size != count:
        raise PacketError(f"packet: the {name} marks {positions.size} entries, the packet declares {count}.")
    return positions


def encode_bitmap(positions: Array, size: int) -> bytes:
    """Encode ``size`` bits with ones at ``where``, the lowest bit of a byte first.

    >>> encode_bitmap(np.array([0, 9]), 10).hex()
    '0102'
    """
    bits = np.zeros(size, bool)
    bits[positions] = True
    return np.packbits(bits, bitorder="little").tobytes()


def varint_lengths(numbers: Array) -> Array:
    """Return the size in bytes of each number as a varint, with seven bits per byte."""
    lengths = np.ones(numbers.size, np.int64)
    shift, highest = 7, int(numbers.max(initial=0))
    while highest >> shift:
        lengths += numbers >= (1 << shift)
        shift += 7
    return lengths


def encode_varints(numbers: Array) -> bytes:
    """Encode little-endian base-128 varints; the high bit of a byte means that more bytes follow.

    >>> encode_varints(np.array([1, 300])).hex()
    '01ac02'
    """
    lengths = varint_lengths(numbers)
    starts = np.cumsum(lengths) - lengths
    out = np.empty(int(lengths.sum()), np.uint8)
    for byte in range(int(lengths.max(initial=0))):
        has_byte = lengths > byte
        continuation = (lengths[has_byte] > byte + 1).astype(np.int64) << 7
        out[starts[has_byte] + byte] = (numbers[has_byte] >> (7 * byte)) & 0x7F | continuation
    return out.tobytes()


def decode_varints(data: Buffer, count: int) -> Array:
    """Decode :func:`encode_varints`. Numbers of 2^56 or more and overlong encodings are errors."""
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    if ends.size != count or (count and ends[-1] != raw.size - 1) or (not count and raw.size):
        raise PacketError(f"packet: {ends.size} varints in {raw.size} bytes, the packet declares {count}.")
    lengths = np.diff(ends, prepend=-1)
    if lengths.max(initial=0) > 8 or ((raw[ends] == 0) & (lengths > 1)).any():
        raise PacketError("packet: a varint is longer than its number needs.")
    numbers = np.zeros(count, np.int64)
    starts = ends - lengths + 1
    for byte in range(int(lengths.max(initial=0))):
        has_byte = lengths > byte
        numbers[has_byte] |= (raw[starts[has_byte] + byte] & 0x7F).astype(np.int64) << (7 * byte)
    return numbers


def rice_size(numbers: Array, width: int) -> int:
    """Return the size in bytes of a Golomb-Rice code with ``width`` remainder bits."""
    return -(-(numbers.size + int((numbers >> width).sum())) // 8) + packed_size(numbers.size, width)


def encode_rice(numbers: Array, width: int) -> bytes:
    """Encode by Golomb-Rice: first every n >> w in unary (zeros, then a one), then all w-bit remainders packed.

    >>> encode_rice(np.array([5, 0, 2]), 1).hex()
    '2c01'
    """
    ends = np.cumsum((numbers >> width) + 1)
    unary = encode_bitmap(ends - 1, int(ends[-1])) if numbers.size else b""
    return unary + pack_codes(numbers & ((1 << width) - 1), width)


def decode_rice(data: Buffer, width: int, count: int) -> Array:
    """Decode :func:`encode_rice`."""
    view = memoryview(data)
    length = len(view) - packed_size(count, width)
    if length < 0 or (count > 0) != (length > 0):
        raise PacketError(f"packet: {len(view)} bytes cannot hold {count} Golomb-Rice codes of {width} bits.")
    ends = decode_bitmap(view[:length], count, length * 8, "unary stream")
    if count and ends[-1] // 8 != length - 1:
        raise PacketError("packet: the unary stream is longer than its codes need.")
    quotients = np.diff(ends, prepend=-1) - 1
    return quotients << width | unpack_codes(view[length:], width, count).astype(np.int64)


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


# Integers are coded in blocks: which reach 1, which of those reach 2, and so on, then signs. Blocks are independent, so
# that dense and sparse layers each get a suitable code. A magnitude is high * 2^shift + low; low bits are stored raw,
# and the few high values beyond the last plane as varints.
BLOCK = 1 << 14
PLANES = 24
FEW_SET_BITS = 12
NATIVE_BITS = 24  # of numbers that native code reads and writes
START = struct.Struct("<BB")
PLANE = struct.Struct("<HHB")
EXCESS = struct.Struct("<H")


def encode_integers(numbers: Array) -> bytes:
    """Encode signed integers.

    >>> encode_integers(np.array([0, 0, -1, 0, 0, 0, 0, 0])).hex()
    '000101000100000401000001'
    """
    if numbers.dtype == np.int32 and numbers.flags.c_contiguous and sys.byteorder == "little" and native.available():
        return kernels.bit_planes_pack(numbers, max_nbytes(numbers.size, NATIVE_BITS)).tobytes()
    return b"".join(_encode_block(numbers[start : start + BLOCK]) for start in range(0, numbers.size, BLOCK))


def max_nbytes(count: int, bits: int) -> int:
    """Return the largest encoded size of ``count`` numbers below 2^bits in magnitude.

    With the chosen shift the high values sum to less than 4 per entry: 5 bits of planes, a sign, the low bits, and at
    most one high value in six beyond the planes.
    """
    blocks = -(-count // BLOCK)
    overhead = START.size + EXCESS.size + PLANES * (PLANE.size + 1) + 3 + -(-bits // 7)
    return -(-count * (6 + bits) // 8) + -(-count // 6) * -(-bits // 7) + blocks * overhead


def _encode_block(numbers: Array) -> bytes:
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
        coded = encode_indices(np.flatnonzero(reached != flipped), reached.size)
        flags = flipped | coded.code << 1 | coded.width << 3
        parts += [PLANE.pack(reached.size - count if flipped else count, len(coded.data), flags), bytes(coded.data)]
        highs = highs[reached]
    excess = encode_varints(highs - planes)
    if highs.size:
        parts += [EXCESS.pack(len(excess)), excess]
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
        raise PacketError(f"packet: truncated: {count} numbers take at least {least} bytes, {len(view)} arrived.")
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
    active = np.arange(size)
    for plane in range(planes):
        if plane and active.size <= FEW_SET_BITS:
            raise PacketError(f"packet: a plane of {active.size} numbers: so few are sent without one.")
        active = active[_read_plane(reader, active.size)]
        highs[active] += 1
    if planes < PLANES and active.size > FEW_SET_BITS:
        raise PacketError(f"packet: {active.size} numbers are left without another plane.")
    if active.size:
        excess = decode_varints(reader.take(EXCESS.unpack(reader.take(EXCESS.size))[0]), active.size)
        if int(excess.max()) >> bits:
            raise PacketError(f"packet: a number beyond 2^{bits}.")
        highs[active] += excess
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


def _read_plane(reader: ByteReader, size: int) -> Array:
    """Return which of ``size`` numbers reach the next plane."""
    count, length, flags = PLANE.unpack(reader.take(PLANE.size))
    data = reader.take(length)
    flipped, code, width = flags & 1, flags >> 1 & 3, flags >> 3
    if 2 * count > size or (2 * count == size and flipped):
        raise PacketError(f"packet: a plane lists {count} of {size} numbers, expected the smaller side.")
    reached = np.full(size, bool(flipped))
    reached[decode_indices(EncodedIndices(code, width, data), count, size)] ^= True
    return reached
