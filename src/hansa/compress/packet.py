"""Packets: one contiguous byte string with a small versioned header, whose length is what would really travel.

==========  =====  ==========================================================
bytes       field  meaning
==========  =====  ==========================================================
0-1         magic  ``hP``
2           u8     version of the format, 1
3           u8     kind (low 7 bits) and dtype (high bit: 0 float32, 1 float64)
4-11        u64    dim, entries of the vector
12-19       u64    bytes of payload that follow the header
20-23       u32    CRC-32 of bytes 0-19 and the payload
==========  =====  ==========================================================

Everything is little-endian. Decoders trust nothing: every field is checked before memory is taken for it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hansa.errors import HansaError, refuse

Array = NDArray[Any]
Buffer = bytes | bytearray | memoryview

MAGIC, VERSION = b"hP", 1
HEADER = struct.Struct("<2sBBQQI")
KINDS = ("identity", "whole", "cast", "sign", "quantize", "top_k", "random_k", "grid")
FLOATS: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype("<f4"), torch.float64: np.dtype("<f8")}
DTYPES = tuple(FLOATS)

#: The largest vector a sparse packet may declare when the reader names no ``dim``: 1 GiB of float32.
LIMIT = 1 << 28


class PacketError(HansaError):
    """A packet that cannot be what its sender made: the message says what is wrong with it."""


@dataclass(frozen=True, slots=True, eq=False)
class Packet:
    """One encoded vector. ``nbytes`` counts the header; ``bytes`` are made on demand when a tensor is held.

    >>> packet = Packet.of(torch.tensor([1.0, -2.0]))
    >>> packet
    Packet(kind='identity', dim=2, dtype=torch.float32, nbytes=32)
    >>> len(packet.bytes)
    32
    """

    kind: str
    dim: int
    dtype: torch.dtype
    nbytes: int
    content: Buffer | Tensor = field(repr=False)

    @classmethod
    def of(cls, x: Tensor, kind: str = "identity") -> Packet:
        """A packet that holds the tensor itself, uncopied: whoever holds the packet must not change the tensor."""
        size = HEADER.size + x.numel() * floats(x.dtype).itemsize
        return cls(kind, x.numel(), x.dtype, size, x.detach())

    @classmethod
    def parse(cls, data: Buffer) -> Packet:
        """A packet from received bytes; the header is checked here, the payload when it is decoded."""
        view = viewed(data)
        if len(view) < HEADER.size:
            raise PacketError(f"packet: truncated: {len(view)} bytes, the header alone takes {HEADER.size}.")
        magic, version, what, dim, length, _ = HEADER.unpack_from(view)
        if magic != MAGIC:
            raise PacketError(f"packet: starts with {magic!r}, expected {MAGIC!r}: this is no hansa packet.")
        if version != VERSION:
            raise PacketError(f"packet: version {version}, this reader knows version {VERSION}.")
        code, dtype = what & 0x7F, DTYPES[what >> 7]
        if code >= len(KINDS):
            raise PacketError(f"packet: unknown kind {code}. Known: {', '.join(KINDS)}.")
        if length != len(view) - HEADER.size:
            raise PacketError(f"packet: declares a payload of {length} bytes, {len(view) - HEADER.size} arrived.")
        return cls(KINDS[code], dim, dtype, len(view), view)

    @property
    def bytes(self) -> Buffer:
        """What travels: a contiguous byte string of length ``nbytes``."""
        if isinstance(self.content, Tensor):
            x = flat(self.content, "Packet.bytes")
            finite(x, "Packet.bytes")
            return seal(self.kind, x, [x.astype(FLOATS[self.dtype], copy=False).data]).bytes
        return self.content

    def payload(self) -> memoryview:
        """The bytes after the header, once their checksum is right."""
        view = viewed(self.bytes)
        if zlib.crc32(view[HEADER.size :], zlib.crc32(view[: HEADER.size - 4])) != HEADER.unpack_from(view)[5]:
            raise PacketError("packet: the checksum does not match: the bytes were damaged on the way.")
        return view[HEADER.size :]

    def expect(self, *, dim: int | None = None, dtype: torch.dtype | None = None, kind: str | None = None) -> Packet:
        """This packet, if it is what the receiver's own schema says must arrive."""
        for name, got, wanted in (("dim", self.dim, dim), ("dtype", self.dtype, dtype), ("kind", self.kind, kind)):
            if wanted is not None and got != wanted:
                raise PacketError(f"packet: {name} {got}, expected {wanted}.")
        return self


def seal(kind: str, x: Array, parts: Sequence[Buffer]) -> Packet:
    """Header and payload as one byte string, for the vector ``x`` that was encoded."""
    dtype = torch.float32 if x.dtype == np.float32 else torch.float64
    length = sum(len(viewed(part)) for part in parts)
    start = HEADER.pack(MAGIC, VERSION, KINDS.index(kind) | DTYPES.index(dtype) << 7, x.size, length, 0)[:-4]
    crc = zlib.crc32(start)
    for part in parts:
        crc = zlib.crc32(part, crc)
    data = b"".join([start, struct.pack("<I", crc), *parts])
    return Packet(kind, x.size, dtype, len(data), data)


def viewed(data: Buffer) -> memoryview:
    """The bytes of anything bytes-like, uncopied."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise PacketError(f"packet: expected bytes, got {type(data).__name__}.")
    view = memoryview(data)
    if not view.c_contiguous:
        raise PacketError("packet: the bytes are not contiguous. Pass bytes(data).")
    return view.cast("B")


def floats(dtype: torch.dtype) -> np.dtype[Any]:
    """The wire's number format for a vector's dtype."""
    if dtype not in FLOATS:
        raise HansaError(f"packet: {dtype} vectors cannot travel, expected torch.float32 or torch.float64.")
    return FLOATS[dtype]


def flat(x: Tensor, part: str) -> Array:
    """The memory of a flat vector; nothing is copied for a contiguous one on the CPU."""
    if x.ndim != 1:
        raise refuse(part, "x", tuple(x.shape), "a flat vector", "Flatten it first.")
    floats(x.dtype)
    array: Array = x.detach().cpu().contiguous().numpy()
    return array


def finite(x: Array, part: str) -> None:
    """Refuse a vector with a NaN or an infinity, in chunks that stay in cache."""
    for start in range(0, x.size, 1 << 16):
        if not np.isfinite(x[start : start + (1 << 16)]).all():
            raise not_finite(x, part)


def not_finite(x: Array, part: str) -> HansaError:
    """The error for a diverged vector: how many entries, and where the first is."""
    bad = np.flatnonzero(~np.isfinite(x))
    where = (
        f"{bad.size} of {x.size} entries are NaN or infinite, the first at {bad[0]}"
        if bad.size
        else "its sum overflows"
    )
    return HansaError(f"{part}: cannot send this vector: {where}. The sender diverged; lower its learning rate.")
