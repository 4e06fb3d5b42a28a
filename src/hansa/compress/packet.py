"""Packets: one contiguous byte string with a small versioned header, whose length is what would really travel.

==========  =====  ==========================================================
bytes       field  meaning
==========  =====  ==========================================================
0-1         magic  ``hP``
2           u8     version of the format, 2
3           u8     kind (low 7 bits) and dtype (high bit: 0 float32, 1 float64)
4-11        u64    dim, entries of the vector
12-19       u64    bytes that follow the header
20-23       u32    CRC-32 of bytes 0-19 and of all that follows the header
==========  =====  ==========================================================

The usual kinds are a number, their place in `KINDS`. All others are 127, and what follows the header then starts with
their name: a byte with its length, and so many ASCII characters. Version 1 had no names and is read as well.

Everything is little-endian. Decoders trust nothing: every field is checked before memory is taken for it.
"""

from __future__ import annotations

import math
import re
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from hansa.core import native
from hansa.core.errors import HansaError, invalid_argument
from hansa.core.vectors import allocator, kernels
from hansa.core.vectors.fingerprint import checksum

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

Array: TypeAlias = "NDArray[Any]"
Buffer = bytes | bytearray | memoryview

MAGIC, VERSION = b"hP", 2
CHUNK = 1 << 16
HEADER = struct.Struct("<2sBBQQI")
#: Kinds so usual that they travel as a number instead of their name.
KINDS = ("identity", "whole", "cast", "sign", "quantize", "top_k", "random_k", "grid")
NAMED = 127
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,63}")


@cache
def wire_formats() -> dict[torch.dtype, np.dtype[Any]]:
    """The dtypes of vectors, in the order of their bit in the header, and how their numbers are written."""
    return {torch.float32: np.dtype("<f4"), torch.float64: np.dtype("<f8")}


class PacketError(HansaError):
    """A packet that cannot be what its sender made: the message says what is wrong with it.

    >>> issubclass(PacketError, HansaError)
    True
    """


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
        return cls(kind, x.numel(), x.dtype, size, x.detach() if x.requires_grad else x)

    @classmethod
    def parse(cls, data: Buffer) -> Packet:
        """A packet from received bytes; the header is checked here, the payload when it is decoded."""
        view = byte_view(data)
        if len(view) < HEADER.size:
            raise PacketError(f"packet: truncated: {len(view)} bytes, the header alone takes {HEADER.size}.")
        magic, version, what, dim, length, _ = HEADER.unpack_from(view)
        if magic != MAGIC:
            raise PacketError(f"packet: starts with {magic!r}, expected {MAGIC!r}: this is no hansa packet.")
        if not 1 <= version <= VERSION or (version == 1 and what & 0x7F == NAMED):
            raise PacketError(f"packet: version {version}, this reader knows versions up to {VERSION}.")
        if length != len(view) - HEADER.size:
            raise PacketError(f"packet: declares a payload of {length} bytes, {len(view) - HEADER.size} arrived.")
        kind, _ = read_kind(what & 0x7F, view[HEADER.size :])
        return cls(kind, dim, list(wire_formats())[what >> 7], len(view), view)

    def __reduce__(self) -> tuple[Any, ...]:
        """Views do not travel between processes, bytes do."""
        content = bytes(self.content) if isinstance(self.content, memoryview) else self.content
        return Packet, (self.kind, self.dim, self.dtype, self.nbytes, content)

    @property
    def bytes(self) -> Buffer:
        """What travels: a contiguous byte string of length ``nbytes``."""
        if isinstance(self.content, torch.Tensor):
            x = flat_array(self.content, "Packet.bytes")
            check_all_finite(x, "Packet.bytes")
            return make_packet(self.kind, x, [x.astype(wire_formats()[self.dtype], copy=False).data]).bytes
        return self.content

    def payload(self) -> memoryview:
        """The bytes after the header and the name of the kind, once their checksum is right."""
        view = byte_view(self.bytes)
        _, _, what, _, _, crc = HEADER.unpack_from(view)
        if checksum(view[HEADER.size :], zlib.crc32(view[: HEADER.size - 4])) != crc:
            raise PacketError("packet: the checksum does not match: the bytes were damaged on the way.")
        return read_kind(what & 0x7F, view[HEADER.size :])[1]

    def check(self, *, dim: int | None = None, dtype: torch.dtype | None = None, kind: str | None = None) -> Packet:
        """This packet, if it is what the receiver's own schema says must arrive."""
        if dim is not None and self.dim != dim:
            raise PacketError(f"packet: dim {self.dim}, expected {dim}.")
        if dtype is not None and self.dtype != dtype:
            raise PacketError(f"packet: dtype {self.dtype}, expected {dtype}.")
        if kind is not None and self.kind != kind:
            raise PacketError(f"packet: kind {self.kind}, expected {kind}.")
        return self


def make_packet(kind: str, x: Array, parts: Sequence[Buffer | Array]) -> Packet:
    """Header and payload as one byte string, for the vector ``x`` that was encoded."""
    dtype = torch.float32 if x.dtype == np.float32 else torch.float64
    code, name = write_kind(kind)
    pieces = [byte_view(name), *(byte_view(part.tobytes() if isinstance(part, np.ndarray) else part) for part in parts)]
    length = sum(map(len, pieces))
    start = HEADER.pack(MAGIC, VERSION, code | list(wire_formats()).index(dtype) << 7, x.size, length, 0)[:-4]
    if HEADER.size + length < allocator.MIN_BYTES:
        body = b"".join(pieces)
        data: Buffer = b"".join([start, struct.pack("<I", zlib.crc32(body, zlib.crc32(start))), body])
    else:
        data = empty_buffer(HEADER.size + length)
        place = HEADER.size
        for piece in pieces:
            data[place : place + len(piece)] = piece
            place += len(piece)
        data[: HEADER.size] = start + struct.pack("<I", checksum(data[HEADER.size :], zlib.crc32(start)))
    return Packet(kind, x.size, dtype, HEADER.size + length, data)


def empty_buffer(size: int) -> memoryview:
    """Room for a long packet, of memory that is used again: in steps of an eighth, so that what fits is found."""
    grain = max(1, 1 << size.bit_length() >> 4)
    buffer = allocator.empty(-(-size // grain) * grain // 4 + 1, torch.float32)
    return buffer.numpy().data.cast("B")[:size]


def write_kind(kind: str) -> tuple[int, bytes]:
    """The number of a kind, and the bytes of its name where it is none of the usual ones.

    >>> write_kind("sign"), write_kind("ternary")
    ((3, b''), (127, b'\\x07ternary'))
    """
    if kind in KINDS:
        return KINDS.index(kind), b""
    if not isinstance(kind, str) or not NAME.fullmatch(kind):
        raise invalid_argument("Packet", "kind", kind, "a name of up to 64 ASCII letters, digits and _ . : -")
    return NAMED, bytes([len(kind)]) + kind.encode("ascii")


def read_kind(code: int, view: memoryview) -> tuple[str, memoryview]:
    """The kind that a number, and perhaps the name at the start of a view, stand for; and the rest of the view."""
    if code < len(KINDS):
        return KINDS[code], view
    if code != NAMED:
        raise PacketError(f"packet: unknown kind {code}. Known: {', '.join(KINDS)}.")
    end = 1 + view[0] if len(view) else 0
    name = bytes(view[1:end]).decode("latin-1")
    if len(name) != end - 1 or not NAME.fullmatch(name) or name in KINDS:
        raise PacketError(f"packet: {name[:80]!r} is not the name of a kind.")
    return name, view[end:]


def byte_view(data: Buffer) -> memoryview:
    """The bytes of anything bytes-like, uncopied."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise PacketError(f"packet: expected bytes, got {type(data).__name__}.")
    view = memoryview(data)
    if not view.c_contiguous:
        raise PacketError("packet: the bytes are not contiguous. Pass bytes(data).")
    return view.cast("B")


def floats(dtype: torch.dtype) -> np.dtype[Any]:
    """The wire's number format for a vector's dtype."""
    if dtype not in wire_formats():
        raise HansaError(f"packet: {dtype} vectors cannot travel, expected torch.float32 or torch.float64.")
    return wire_formats()[dtype]


def flat_array(x: Tensor, component: str) -> Array:
    """The memory of a flat vector; nothing is copied for a contiguous one on the CPU."""
    if x.ndim != 1:
        raise invalid_argument(component, "x", tuple(x.shape), "a flat vector", "Flatten it first.")
    floats(x.dtype)
    array: Array = x.detach().cpu().contiguous().numpy()
    return array


def native_array(x: Array) -> bool:
    """Whether native code may take this vector."""
    fits = x.dtype == np.float32 and bool(x.flags.c_contiguous) and sys.byteorder == "little"
    return fits and native.available()


def check_all_finite(x: Array, component: str) -> float:
    """The largest magnitude; a vector with a NaN or an infinity is refused. In chunks that stay in cache."""
    if native_array(x):
        most = kernels.max_magnitude(x)
    else:
        most = float(np.max([np.abs(x[start : start + CHUNK]).max() for start in range(0, x.size, CHUNK)], initial=0))
    if not math.isfinite(most):
        raise nonfinite_error(x, component)
    return most


def nonfinite_error(x: Array, component: str) -> HansaError:
    """The error for a diverged vector: how many entries, and where the first is."""
    bad = np.flatnonzero(~np.isfinite(x))
    where = (
        f"{bad.size} of {x.size} entries are NaN or infinite, the first at {bad[0]}"
        if bad.size
        else "its sum overflows"
    )
    return HansaError(f"{component}: cannot send this vector: {where}. The sender diverged; lower its learning rate.")
