"""Rounding to a power-of-two grid: increments add exactly, so missed ones merge into one packet."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from hansa.compress import codes as coding
from hansa.compress.base import Coder, ParsedPayload
from hansa.compress.packet import (
    Array,
    Buffer,
    Packet,
    PacketError,
    check_all_finite,
    flat_array,
    floats,
    make_packet,
    native_array,
)
from hansa.core.bounds import bound
from hansa.core.errors import HansaError, check_positive, invalid_argument
from hansa.core.keys import Key
from hansa.core.vectors import kernels

if TYPE_CHECKING:
    from torch import Tensor

HEAD = struct.Struct("<hh")
CHUNK, LANES = 1 << 16, 32
#: Mantissa bits by itemsize: integers up to 2^bits in magnitude are exact.
BITS = {4: 24, 8: 53}
#: Below this the largest float is so few steps that rounding up could overflow.
LARGE = 1 << 53


@dataclass(frozen=True, slots=True)
class grid(Coder):
    """C(x) = delta rint(x / delta), delta the power of two at or below min(coarseness rms(x), max |x|).

    ||C(x) - x||^2 <= d delta^2 / 4 and at least half of the largest entry is sent, so
    q = min(coarseness / 2, sqrt(1 - 3/(4 d))). The integers are entropy-coded: for normal entries 3 bits at
    delta = rms / 2, 2.1 at rms, 1.3 at 2 rms, 0.3 at 4 rms. Sums of packets are packets.

    Args:
        coarseness: Upper bound of delta, relative to the root mean square of x.

    >>> from hansa.compress import decode
    >>> decode(grid(1.0).encode(torch.tensor([3.0, -1.0, 0.2, 2.0]), Key(0)))
    tensor([ 3., -1.,  0.,  2.])
    """

    coarseness: float = field(
        default=2.0, metadata=bound(check_positive, "2 rounds to about twice the root mean square.")
    )
    checks_finite: ClassVar[bool] = True

    def payload(self, x: Array, key: Key) -> list[Buffer]:
        return self._payload(x, None)

    def encode_above(self, x: Tensor, finest: int) -> Packet:
        """Encode C(x) with delta at least 2^finest, for addition to multiples of 2^finest; the packet records it."""
        array = flat_array(x, "grid.encode")
        return make_packet(self.kind, array, self._payload(array, finest))

    def _payload(self, x: Array, finest: int | None) -> list[Buffer]:
        exponent = step(x, self.coarseness, check_all_finite(x, "grid.encode"))
        if finest is not None:
            exponent = max(exponent, finest)
        head = HEAD.pack(exponent, exponent if finest is None else finest)
        limit = math.ldexp(float(np.finfo(x.dtype).max), -exponent) if exponent > 0 else math.inf
        if native_array(x):
            capacity, edge = coding.max_nbytes(x.size, BITS[4]), 1 << BITS[4]
            return [
                head,
                kernels.bit_planes_pack(x, capacity, exponent, edge if limit > edge else math.floor(limit)).data,
            ]
        codes = np.empty(x.size, np.int64)
        for start in range(0, x.size, CHUNK):
            piece = np.rint(np.ldexp(x[start : start + CHUNK], -exponent))
            codes[start : start + CHUNK] = (
                np.clip(piece, -math.floor(limit), math.floor(limit)) if limit < LARGE else piece
            )
        return [head, coding.encode_integers(codes)]

    def max_payload(self, dim: int, itemsize: int) -> int:
        return HEAD.size + coding.max_nbytes(dim, BITS[itemsize])

    def parse(self, payload: memoryview, dim: int, dtype: np.dtype[Any]) -> ParsedPayload:
        return Lattice.parse(payload, dim, dtype)

    def contraction(self, dim: int) -> float:
        last_bit = math.ldexp(math.sqrt(dim), 1 - BITS[4])  # of the largest entry: the finest step
        return min(max(self.coarseness, last_bit) / 2, math.sqrt(1 - 3 / (4 * dim)))

    def merge(self, packets: Sequence[Packet]) -> Packet:
        """Return one packet with the exact sum, which must fit the precision of the vector.

        >>> from hansa.compress import decode
        >>> coder = grid(1.0)
        >>> decode(coder.merge([coder.encode(torch.tensor([1.0, 4.0]), Key(0)) for _ in range(3)]))
        tensor([ 0., 12.])
        """
        return self.merge_latest(packets, [len(packets)])[len(packets)]

    def merge_latest(self, packets: Sequence[Packet], counts: Iterable[int]) -> dict[int, Packet]:
        """Return, for each count n, the sum of the last n packets, in one pass from the newest."""
        requested = set(counts)
        if not requested <= set(range(1, len(packets) + 1)):
            raise invalid_argument("grid.merge_latest", "counts", sorted(requested), f"counts from 1 to {len(packets)}")
        merged = {n: packets[-1] for n in requested if n == 1}
        total: Lattice | None = None
        for n in range(1, max(requested, default=0) + 1):
            latest = Lattice.of(packets[-n])
            total = latest if total is None else total.plus(latest)
            if n in requested and n > 1:
                merged[n] = total.packet(packets[-1].dtype)
        return merged

    def finest(self, packet: Packet) -> int:
        """Return the exponent of the grid of the vectors that this packet is added to."""
        return exponents(packet.payload(), floats(packet.dtype))[1]


def exponents(view: memoryview, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the validated exponents of a payload's step and of the grid below it."""
    if len(view) < HEAD.size:
        raise PacketError("packet: a grid payload is truncated before its exponents.")
    exponent, finest = HEAD.unpack_from(view)
    info = np.finfo(dtype)
    if not info.minexp - info.nmant <= finest <= exponent < info.maxexp:
        raise PacketError(f"packet: no grid of 2^{exponent} on one of 2^{finest} is in {dtype}.")
    return exponent, finest


@dataclass(frozen=True, slots=True)
class Lattice:
    """A payload of integer multiples of 2^exponent, for addition to multiples of 2^finest."""

    exponent: int
    finest: int
    codes: Array

    @classmethod
    def of(cls, packet: Packet) -> Lattice:
        return cls.parse(packet.check(kind="grid").payload(), packet.dim, floats(packet.dtype))

    @classmethod
    def parse(cls, view: memoryview, dim: int, dtype: np.dtype[Any]) -> Lattice:
        exponent, finest = exponents(view, dtype)
        codes = coding.decode_integers(view[HEAD.size :], dim, BITS[dtype.itemsize])
        highest = max(int(codes.max()), -int(codes.min())) if exponent > 0 else 0
        if exponent > 0 and highest > math.ldexp(float(np.finfo(dtype).max), -exponent):
            raise PacketError(f"packet: {highest} times 2^{exponent} is beyond {dtype}.")
        return cls(exponent, finest, codes)

    def plus(self, other: Lattice) -> Lattice:
        """Return the sum of two payloads."""
        exponent = min(self.exponent, other.exponent)
        bits = BITS[4 if self.codes.dtype == np.int32 else 8]
        parts = []
        for payload in (self, other):
            shift = payload.exponent - exponent
            if shift > bits or int(np.abs(payload.codes).max()) > 1 << (bits - shift):
                raise _too_long(bits)
            parts.append(payload.codes << shift)
        codes = parts[0] + parts[1]
        if int(np.abs(codes).max()) > 1 << bits:
            raise _too_long(bits)
        return Lattice(exponent, min(self.finest, other.finest), codes)

    def packet(self, dtype: torch.dtype) -> Packet:
        """Encode as a packet, on the coarsest grid that represents it."""
        common = int(np.bitwise_or.reduce(self.codes))
        shift = (common & -common).bit_length() - 1 if common else 0
        like = np.broadcast_to(floats(dtype).type(0), self.codes.shape)
        return make_packet(
            "grid",
            like,
            [HEAD.pack(self.exponent + shift, self.finest), coding.encode_integers(self.codes >> shift)],
        )

    def write(self, out: Array) -> None:
        if native_array(out) and self.codes.dtype == np.int32:
            kernels.multiples_write(self.codes, self.exponent, out)
            return
        for start in range(0, out.size, CHUNK):
            out[start : start + CHUNK] = np.ldexp(self.codes[start : start + CHUNK].astype(out.dtype), self.exponent)

    def add(self, out: Array, alpha: float) -> None:
        if native_array(out) and self.codes.dtype == np.int32:
            kernels.multiples_write(self.codes, self.exponent, out, alpha)
            return
        for start in range(0, out.size, CHUNK):
            piece = np.ldexp(self.codes[start : start + CHUNK].astype(out.dtype), self.exponent)
            out[start : start + CHUNK] += piece * out.dtype.type(alpha)


def _too_long(bits: int) -> HansaError:
    return HansaError(f"grid.merge: the sum takes more than {bits} bits an entry. Send the packets one by one.")


def finest_exponent(highest: float, dtype: torch.dtype) -> int:
    """Return the exponent g whose multiples of 2^g represent a vector up to ``highest`` with three spare bits.

    With m mantissa bits, integer multiples of 2^g up to 2^m add and subtract without rounding.
    """
    info = np.finfo(floats(dtype))
    return max(math.frexp(highest)[1] - int(info.nmant) + 3, int(info.minexp) - int(info.nmant))


def exceeds_grid(highest: float, exponent: int, dtype: torch.dtype) -> bool:
    """Return whether sums up to ``highest`` may be inexact in multiples of 2^exponent."""
    return highest >= math.ldexp(0.5, exponent + int(np.finfo(floats(dtype)).nmant))


def round_to_grid(x: Tensor, exponent: int) -> Tensor:
    """Round x to multiples of 2^exponent; entries already on the grid are unchanged."""
    rounded = np.rint(np.ldexp(flat_array(x, "grid"), -exponent))
    return torch.from_numpy(np.ldexp(rounded, exponent)).to(x.device)


def step(x: Array, coarseness: float, highest: float) -> int:
    """Return the exponent of delta: no finer than the last bit of the largest entry, and 0 for the zero vector."""
    if not highest:
        return 0
    _, top = math.frexp(highest)
    unit = 0 if x.dtype == np.float32 else top  # squares of float32 are exact in float64
    _, exponent = math.frexp(coarseness * math.sqrt(squares(x, unit) / x.size))
    info = np.finfo(x.dtype)
    least = max(top - 1 - int(info.nmant), int(info.minexp) - int(info.nmant))
    return max(min(unit + exponent, top) - 1, least)


def squares(x: Array, unit: int) -> float:
    """Return ||x / 2^unit||^2, summed in 32 float64 lanes (entry i in lane i mod 32), then pairwise over lanes."""
    if native_array(x) and not unit:
        return kernels.squared_norm(x)[0]
    lanes = np.zeros((1, LANES))
    for start in range(0, x.size, CHUNK):
        piece = np.square(np.ldexp(x[start : start + CHUNK], -unit), dtype=np.float64)
        rows = np.pad(piece, (0, -piece.size % LANES)).reshape(-1, LANES)
        lanes = np.add.reduce(np.concatenate([lanes, rows]), axis=0, keepdims=True)
    while lanes.size > 1:
        lanes = lanes[:, : lanes.size // 2] + lanes[:, lanes.size // 2 :]
    return float(lanes[0, 0])
