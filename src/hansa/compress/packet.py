"""Packets: one contiguous byte string with a small versioned header. Its length is the number of bytes sent.

==========  =====  ==========================================================
bytes       field  meaning
==========  =====  ==========================================================
0-1         magic  ``hP``
2           u8     version of the format, 2
3           u8     kind (low 7 bits) and dtype (high bit: 0 float32, 1 float64)
4-11        u64    dim, entries of the vector
12-19       u64    bytes that follow the header
20-23       u32    CRC-32 of bytes 0-19 and of everything after the header
==========  =====  ==========================================================

Common kinds are numbered by their position in `KINDS`. All others have number 127 and their name after the header: one
byte with its length, then the ASCII characters.

Everything is little-endian. Every field is validated before memory is allocated for it.
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
from hansa.core.vectors.kernels import crc32

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

Array: TypeAlias = "NDArray[Any]"
Buffer = bytes | bytearray | memoryview

MAGIC, VERSION = b"hP", 2
CHUNK = 1 << 16
HEADER = struct.Struct("<2sBBQQI")
#: Kinds that are sent as a number instead of their name.
KINDS = ("identity", "whole", "cast", "sign", "quantize", "top_k", "random_k", "grid")
NAMED = 127
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,63}")


@cache
def wire_formats() -> dict[torch.dtype, np.dtype[Any]]:
    """Return the dtypes of vectors, in the order of their bit in the header, and their wire formats."""
    return {torch.float32: np.dtype("<f4"), torch.float64: np.dtype("<f8")}


class PacketError(HansaError):
    """An invalid or damaged packet; the message names the problem.

    >>> issubclass(PacketError, HansaError)
    True
    """


@dataclass(frozen=True, slots=True, eq=False)
class Packet:
    """One encoded vector. ``nbytes`` includes the header; ``bytes`` serializes a packet that holds a tensor.

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
        """Return a packet that holds the tensor itself without a copy; do not modify the tensor afterwards."""
        size = HEADER.size + x.numel() * floats(x.dtype).itemsize
        return cls(kind, x.numel(), x.dtype, size, x.detach() if x.requires_grad else x)

    @classmethod
    def parse(cls, data: Buffer) -> Packet:
        """Parse received bytes. The header is validated here, the payload when it is decoded."""
        view = byte_view(data)
        if len(view) < HEADER.size:
            raise PacketError(f"packet: truncated: {len(view)} bytes, the header alone takes {HEADER.size}.")
        magic, version, code, dim, length, _ = HEADER.unpack_from(view)
        if magic != MAGIC:
            raise PacketError(f"packet: starts with {magic!r}, expected {MAGIC!r}: not a hansa packet.")
        if version != VERSION:
            raise PacketError(f"packet: version {version}, expected version {VERSION}.")
        if length != len(view) - HEADER.size:
            raise PacketError(f"packet: declares a payload of {length} bytes, {len(view) - HEADER.size} arrived.")
        kind, _ = read_kind(code & 0x7F, view[HEADER.size :])
        return cls(kind, dim, list(wire_formats())[code >> 7], len(view), view)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as bytes, because memory views cannot be pickled."""
        content = bytes(self.content) if isinstance(self.content, memoryview) else self.content
        return Packet, (self.kind, self.dim, self.dtype, self.nbytes, content)

    @property
    def bytes(self) -> Buffer:
        """The serialized packet: a contiguous byte string of length ``nbytes``."""
        if isinstance(self.content, torch.Tensor):
            x = flat_array(self.content, "Packet.bytes")
            check_all_finite(x, "Packet.bytes")
            return make_packet(self.kind, x, [x.astype(wire_formats()[self.dtype], copy=False).data]).bytes
        return self.content

    def payload(self) -> memoryview:
        """Return the bytes after the header and the kind's name, after verifying the checksum."""
        view = byte_view(self.bytes)
        _, _, code, _, _, crc = HEADER.unpack_from(view)
        if crc32(view[HEADER.size :], zlib.crc32(view[: HEADER.size - 4])) != crc:
            raise PacketError("packet: the checksum does not match: the bytes were damaged on the way.")
        return read_kind(code & 0x7F, view[HEADER.size :])[1]

    def check(self, *, dim: int | None = None, dtype: torch.dtype | None = None, kind: str | None = None) -> Packet:
        """Return this packet; raise unless it has the dim, dtype and kind that the receiver expects."""
        if dim is not None and self.dim != dim:
            raise PacketError(f"packet: dim {self.dim}, expected {dim}.")
        if dtype is not None and self.dtype != dtype:
            raise PacketError(f"packet: dtype {self.dtype}, expected {dtype}.")
        if kind is not None and self.kind != kind:
            raise PacketError(f"packet: kind {self.kind}, expected {kind}.")
        return self


def make_packet(kind: str, x: Array, parts: Sequence[Buffer | Array]) -> Packet:
    """Build the packet of the encoded vector ``x`` from the pieces of its payload."""
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
        offset = HEADER.size
        for piece in pieces:
            data[offset : offset + len(piece)] = piece
            offset += len(piece)
        data[: HEADER.size] = start + struct.pack("<I", crc32(data[HEADER.size :], zlib.crc32(start)))
    return Packet(kind, x.size, dtype, HEADER.size + length, data)


def empty_buffer(size: int) -> memoryview:
    """Return a buffer for a long packet. Sizes are rounded up by at most an eighth, so that memory is reused."""
    grain = max(1, 1 << size.bit_length() >> 4)
    buffer = allocator.empty(-(-size // grain) * grain // 4 + 1, torch.float32)
    return buffer.numpy().data.cast("B")[:size]


def write_kind(kind: str) -> tuple[int, bytes]:
    """Return the number of a kind, and its encoded name if it is not in `KINDS`.

    >>> write_kind("sign"), write_kind("ternary")
    ((3, b''), (127, b'\\x07ternary'))
    """
    if kind in KINDS:
        return KINDS.index(kind), b""
    if not isinstance(kind, str) or not NAME.fullmatch(kind):
        raise invalid_argument("Packet", "kind", kind, "a name of up to 64 ASCII letters, digits and _ . : -")
    return NAMED, bytes([len(kind)]) + kind.encode("ascii")


def read_kind(code: int, view: memoryview) -> tuple[str, memoryview]:
    """Return the kind for a number, or from the name at the start of a view, and the rest of the view."""
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
    """Return the bytes of a bytes-like object without a copy."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise PacketError(f"packet: expected bytes, got {type(data).__name__}.")
    view = memoryview(data)
    if not view.c_contiguous:
        raise PacketError("packet: the bytes are not contiguous. Pass bytes(data).")
    return view.cast("B")


def floats(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the wire format of a vector's dtype."""
    if dtype not in wire_formats():
        raise HansaError(f"packet: {dtype} vectors cannot be sent: expected torch.float32 or torch.float64.")
    return wire_formats()[dtype]


def flat_array(x: Tensor, component: str) -> Array:
    """Return a flat vector as an array, without a copy if it is contiguous and on the CPU."""
    if x.ndim != 1:
        raise invalid_argument(component, "x", tuple(x.shape), "a flat vector", "Flatten it first.")
    floats(x.dtype)
    array: Array = x.detach().cpu().contiguous().numpy()
    return array


def native_array(x: Array) -> bool:
    """Return whether native code supports this vector."""
    fits = x.dtype == np.float32 and bool(x.flags.c_contiguous) and sys.byteorder == "little"
    return fits and native.available()


def check_all_finite(x: Array, component: str) -> float:
    """Return the largest magnitude; raise if an entry is NaN or infinite. Works in chunks that fit in cache."""
    if native_array(x):
        largest = kernels.max_magnitude(x)
    else:
        chunks = range(0, x.size, CHUNK)
        largest = float(np.max([np.abs(x[start : start + CHUNK]).max() for start in chunks], initial=0))
    if not math.isfinite(largest):
        raise nonfinite_error(x, component)
    return largest


def nonfinite_error(x: Array, component: str) -> HansaError:
    """Return the error for a non-finite vector, with the number of such entries and the index of the first."""
    nonfinite = np.flatnonzero(~np.isfinite(x))
    problem = (
        f"{nonfinite.size} of {x.size} entries are NaN or infinite, the first at {nonfinite[0]}"
        if nonfinite.size
        else "its sum overflows"
    )
    return HansaError(f"{component}: cannot send this vector: {problem}. The sender diverged; lower its learning rate.")
