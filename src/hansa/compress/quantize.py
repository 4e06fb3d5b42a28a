"""Stochastic quantization (QSGD), bit-packed."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from hansa.compress.base import Coder, ParsedPayload, check_size
from hansa.compress.codes import pack_codes, packed_size, unpack_codes
from hansa.compress.packet import Array, Buffer, PacketError, check_all_finite, native_array, nonfinite_error
from hansa.core.bounds import Checked, bound, one_of
from hansa.core.errors import check_integer, invalid_argument
from hansa.core.keys import Key
from hansa.core.vectors import kernels

HEAD = struct.Struct("<BI")
CHUNK = 1 << 16


def bucket_size(bucket: int, dim: int) -> int:
    """Return the effective bucket size: at most the vector's length rounded up to a multiple of eight."""
    return min(bucket, -(-dim // 8) * 8)


@dataclass(frozen=True, slots=True)
class quantize(Coder):
    """Each entry becomes M l/s with l in -s..s, M the largest magnitude of its bucket (Alistarh 2017, with max norms).

    ``rounding`` is how |x| s/M becomes an integer, with omega = min((b-1)/(4 s^2), sqrt(b)/s) for buckets of b:

    - ``stochastic``: random rounding, then division by 1 + omega, which makes it a contraction in mean square,
      q^2 = omega / (1 + omega): the form that error feedback needs. It is biased: E C(x) = x / (1 + omega).
    - ``nearest``: to the nearest level; always a contraction, q^2 = w / (1 + w) with w = (b-1)/(4 s^2).
    - ``unbiased``: plain QSGD, E C(x) = x, q^2 = omega, for links without memory; may exceed 1.

    A code takes ceil(log2(2 s + 1)) bits, so 1, 3, 7, 15, 31, 63 and 127 levels waste the fewest codes.

    Args:
        levels: Number s of positive levels.
        bucket: Entries per bucket, a multiple of 8.
        rounding: "stochastic", "nearest" or "unbiased", as above.

    >>> import torch
    >>> from hansa.compress import decode
    >>> decode(quantize(levels=2, rounding="nearest").encode(torch.tensor([1.0, 0.4, -0.1]), Key(0)))
    tensor([1.0000, 0.5000, 0.0000])
    """

    levels: int = field(default=16, metadata=bound(check_integer, "16 levels take 6 bits an entry.", maximum=127))
    bucket: int = field(default=512, metadata=bound(check_integer, minimum=8, maximum=(1 << 32) - 8))
    rounding: str = field(default="stochastic", metadata=bound(one_of, "stochastic", "nearest", "unbiased"))
    checks_finite: ClassVar[bool] = True
    cites: ClassVar[tuple[str, ...]] = ("alistarh2017",)

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.bucket % 8:
            raise invalid_argument("quantize", "bucket", self.bucket, "a multiple of 8", "512 is usual.")

    @property
    def width(self) -> int:
        """Bits per code."""
        return (2 * self.levels).bit_length()

    def omega(self, dim: int) -> float:
        """Return omega with E||Q(x) - x||^2 <= omega ||x||^2 for the unbiased Q.

        The largest entry of a bucket is exact, the others err by at most half a step in root mean square.
        """
        bucket = min(self.bucket, dim)
        even = (bucket - 1) / (4 * self.levels**2)
        return even if self.rounding == "nearest" else min(even, math.sqrt(bucket) / self.levels)

    def contraction(self, dim: int) -> float:
        omega = self.omega(dim)
        return math.sqrt(omega) if self.rounding == "unbiased" else math.sqrt(omega / (1 + omega))

    def payload(self, x: Array, key: Key) -> list[Buffer]:
        bucket = bucket_size(self.bucket, x.size)
        if native_array(x):
            drawn = None if self.rounding == "nearest" else key.digest(16)
            native_result = kernels.quantize_pack(x, bucket, self.levels, self.width, drawn)
            if native_result is None:
                raise nonfinite_error(x, "quantize.encode")
            norms, packed = native_result
        else:
            norms, packed = self._encode_in_numpy(x, key, bucket)
        if self.rounding == "stochastic":
            norms /= x.dtype.type(1 + self.omega(x.size))
        return [HEAD.pack(self.levels, bucket), norms.data, packed.data]

    def _encode_in_numpy(self, x: Array, key: Key, bucket: int) -> tuple[Array, Array]:
        """Return the largest magnitude of each bucket, and the packed codes."""
        check_all_finite(x, "quantize.encode")
        draw = None if self.rounding == "nearest" else key.numpy()
        norms = np.empty(-(-x.size // bucket), x.dtype)
        codes = np.empty(x.size, np.uint8)
        rows = max(1, CHUNK // bucket)
        for first in range(0, norms.size, rows):
            piece = x[first * bucket : (first + rows) * bucket]
            count = min(rows, norms.size - first)
            grid = np.zeros((count, bucket), x.dtype)
            grid.reshape(-1)[: piece.size] = piece
            size = np.abs(grid)
            highest = norms[first : first + count] = size.max(axis=1)
            size /= np.where(highest > 0, highest, 1)[:, None]
            size *= self.levels
            if draw is None:
                np.rint(size, out=size)
            else:
                size += draw.random(size.shape, dtype=x.dtype)
                np.floor(size, out=size)
            np.minimum(size, self.levels, out=size)
            np.copysign(size, grid, out=size)
            size += self.levels
            codes[first * bucket : first * bucket + piece.size] = size.reshape(-1)[: piece.size]
        return norms, np.frombuffer(pack_codes(codes, self.width), np.uint8)

    def max_payload(self, dim: int, itemsize: int) -> int:
        return HEAD.size + -(-dim // self.bucket) * itemsize + packed_size(dim, self.width)

    def parse(self, payload: memoryview, dim: int, dtype: np.dtype[Any]) -> ParsedPayload:
        return Levels.parse(payload, dim, dtype)


@dataclass(frozen=True, slots=True)
class Levels:
    """A payload of one norm per bucket and one code per entry, packed; or unpacked, if native code does not read it."""

    levels: int
    bucket: int
    norms: Array
    packed: Array
    unpacked: Array | None

    @classmethod
    def parse(cls, view: memoryview, dim: int, dtype: np.dtype[Any]) -> Levels:
        if len(view) < HEAD.size:
            raise PacketError("packet: a quantize payload is truncated before its levels.")
        levels, bucket = HEAD.unpack_from(view)
        if not 1 <= levels <= 127 or bucket < 8 or bucket % 8 or bucket != bucket_size(bucket, dim):
            raise PacketError(f"packet: no quantizer has {levels} levels and buckets of {bucket}.")
        like = quantize(levels, bucket)
        check_size(view, like.max_payload(dim, dtype.itemsize), "quantize")
        count = -(-dim // bucket)
        norms = np.frombuffer(view[HEAD.size :], dtype, count)
        if not (np.isfinite(norms) & (norms >= 0)).all():
            raise PacketError("packet: the norm of a bucket is negative, NaN or infinite.")
        packed = np.frombuffer(view[HEAD.size + norms.nbytes :], np.uint8)
        if native_array(norms) and kernels.levels_within(packed, dim, levels):
            return cls(levels, bucket, norms, packed, None)
        codes = unpack_codes(packed.data, like.width, dim)
        if codes.max(initial=0) > 2 * levels:
            raise PacketError(f"packet: code {codes.max()} is beyond the {levels} levels.")
        return cls(levels, bucket, norms, packed, codes)

    def pieces(self, size: int, dtype: np.dtype[Any]) -> Iterator[tuple[slice, Array]]:
        """Yield the decoded vector in chunks, each with its slice."""
        width = quantize(self.levels).width
        codes = unpack_codes(self.packed.data, width, size) if self.unpacked is None else self.unpacked
        table = (np.arange(-self.levels, self.levels + 1) / self.levels).astype(dtype)
        rows = max(1, CHUNK // self.bucket)
        for first in range(0, self.norms.size, rows):
            entries = slice(first * self.bucket, min((first + rows) * self.bucket, size))
            units = np.take(table, codes[entries], mode="clip")
            units *= np.repeat(self.norms[first : first + rows], self.bucket)[: units.size]
            yield entries, units

    def write(self, out: Array) -> None:
        if native_array(out):
            self._decode_native(out, None)
            return
        for entries, piece in self.pieces(out.size, out.dtype):
            out[entries] = piece

    def add(self, out: Array, alpha: float) -> None:
        if native_array(out):
            self._decode_native(out, alpha)
            return
        for entries, piece in self.pieces(out.size, out.dtype):
            piece *= out.dtype.type(alpha)
            out[entries] += piece

    def _decode_native(self, out: Array, alpha: float | None) -> None:
        kernels.quantize_unpack(self.packed, self.norms.view(np.uint8), self.bucket, self.levels, out, alpha)
