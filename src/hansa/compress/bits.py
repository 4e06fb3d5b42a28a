"""Vectorised integer codes: packed codes, bitmaps, varints, Golomb-Rice."""

from __future__ import annotations

import numpy as np

from hansa.compress.packet import Array, Buffer, PacketError

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
        raise PacketError(
            f"packet: {raw.size} bytes of packed codes, {count} codes of {width} bits take another number."
        )
    codes: Array = np.zeros(count, np.uint8 if width <= 8 else np.int64)
    whole = width // 8
    for plane in range(whole):
        codes |= raw[plane * count : (plane + 1) * count].astype(codes.dtype) << (8 * plane)
    high = width % 8
    if high:
        tail = raw[whole * count :]
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
            codes[start : start + part.size] |= part.astype(codes.dtype) << (8 * whole)
    return codes


def decode_bitmap(data: Buffer, count: int, size: int, what: str) -> Array:
    """Return the positions of the ones among ``size`` bits; raise unless there are ``count`` and no padding is set."""
    raw = np.frombuffer(data, np.uint8)
    if raw.size != -(-size // 8):
        raise PacketError(f"packet: {raw.size} bytes of {what}, expected {-(-size // 8)}.")
    if size % 8 and raw[-1] >> (size % 8):
        raise PacketError(f"packet: the padding after the {what} is not zero.")
    where = np.flatnonzero(np.unpackbits(raw, bitorder="little").view(bool))
    if where.size != count:
        raise PacketError(f"packet: the {what} marks {where.size} entries, the packet declares {count}.")
    return where


def encode_bitmap(where: Array, size: int) -> bytes:
    """Encode ``size`` bits with ones at ``where``, the lowest bit of a byte first.

    >>> encode_bitmap(np.array([0, 9]), 10).hex()
    '0102'
    """
    bits = np.zeros(size, bool)
    bits[where] = True
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
    for place in range(int(lengths.max(initial=0))):
        long = lengths > place
        more = (lengths[long] > place + 1).astype(np.int64) << 7
        out[starts[long] + place] = (numbers[long] >> (7 * place)) & 0x7F | more
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
    for place in range(int(lengths.max(initial=0))):
        long = lengths > place
        numbers[long] |= (raw[starts[long] + place] & 0x7F).astype(np.int64) << (7 * place)
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
