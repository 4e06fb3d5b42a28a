"""Dense compressors: identity, half precision, scaled sign."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from hansa.compress import chunked
from hansa.compress.base import Coder, DenseValues, ParsedPayload, check_size
from hansa.compress.packet import (
    Array,
    Buffer,
    PacketError,
    check_all_finite,
    flat_array,
    native_array,
    nonfinite_error,
)
from hansa.core import native
from hansa.core.bounds import bound, one_of
from hansa.core.keys import Key
from hansa.core.vectors import kernels

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class identity(Coder):
    """C(x) = x, q = 0: no compression.

    >>> from hansa.compress import decode
    >>> decode(identity().encode(torch.tensor([1.0, 0.25]), Key(0)))
    tensor([1.0000, 0.2500])
    """

    checks_finite: ClassVar[bool] = True

    def payload(self, x: Array, key: Key) -> list[Buffer]:
        check_all_finite(x, "identity.encode")
        return [x.data]

    def max_payload(self, dim: int, itemsize: int) -> int:
        return dim * itemsize

    def parse(self, payload: memoryview, dim: int, dtype: np.dtype[Any]) -> ParsedPayload:
        return DenseValues.checked(np.frombuffer(check_size(payload, dim * dtype.itemsize, "identity"), dtype))

    def contraction(self, dim: int) -> float:
        return 0.0


HALVES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class cast(Coder):
    """Cast to 16 bits, as 2^e (x / 2^e) with the largest magnitude below 1: no overflow, little underflow.

    float16 keeps 11 significant bits, bfloat16 keeps 8: q is about 2^-11 or 2^-8.

    Args:
        to: "float16" or "bfloat16".

    >>> from hansa.compress import decode
    >>> decode(cast("bfloat16").encode(torch.tensor([1.0, 0.333]), Key(0)))
    tensor([1.0000, 0.3320])
    """

    to: str = field(default="float16", metadata=bound(one_of, *HALVES))
    checks_finite: ClassVar[bool] = True

    def payload(self, x: Array, key: Key) -> list[Buffer]:
        _, exponent = math.frexp(check_all_finite(x, "cast.encode"))
        half = getattr(torch, self.to)
        below_one = 1 - torch.finfo(half).eps / 2
        if native_array(x):
            codes = kernels.half_pack(x, exponent, below_one, half == torch.bfloat16)
        else:
            unit = torch.from_numpy(np.clip(np.ldexp(x, -exponent), -below_one, below_one))
            codes = unit.to(half).view(torch.int16).numpy()
        return [bytes([HALVES.index(self.to)]), exponent.to_bytes(2, "little", signed=True), codes.data]

    def max_payload(self, dim: int, itemsize: int) -> int:
        return 3 + 2 * dim

    def parse(self, payload: memoryview, dim: int, dtype: np.dtype[Any]) -> ParsedPayload:
        return Halves.parse(payload, dim, dtype)

    def contraction(self, dim: int) -> float:
        info = torch.finfo(getattr(torch, self.to))
        return min(1.0, math.sqrt(info.eps**2 + dim * info.smallest_normal**2 * info.eps**2 * 4))


#: The bits of 1 in each; magnitudes are ordered like their bits, with infinity and NaN on top.
ONES = (0x3C00, 0x3F80)


@dataclass(frozen=True, slots=True)
class Halves:
    """A payload of 16-bit floats below 1 in magnitude, times 2^exponent."""

    format_index: int
    exponent: int
    codes: Array
    """Their bytes."""

    @classmethod
    def parse(cls, view: memoryview, dim: int, dtype: np.dtype[Any]) -> Halves:
        check_size(view, 3 + 2 * dim, "cast")
        format_index, exponent = view[0], int.from_bytes(view[1:3], "little", signed=True)
        info = np.finfo(dtype)
        if format_index >= len(HALVES) or not info.minexp - info.nmant <= exponent <= info.maxexp:
            raise PacketError(f"packet: no 16-bit format {format_index} with exponent {exponent}.")
        codes = np.frombuffer(view[3:], np.uint8)
        if sys.byteorder == "little" and native.available():
            valid = kernels.halves_below_one(codes, bool(format_index))
        else:
            valid = int((codes.view("<u2") & 0x7FFF).max(initial=0)) < ONES[format_index]
        if not valid:
            raise PacketError("packet: a 16-bit value is NaN, infinite or not below 1.")
        return cls(format_index, exponent, codes)

    def values(self, dtype: np.dtype[Any]) -> Array:
        """Return the decoded vector."""
        codes = torch.from_numpy(self.codes.view("<i2").astype(np.int16))
        unit = codes.view(getattr(torch, HALVES[self.format_index])).to(torch.float32).numpy()
        scaled: Array = np.ldexp(unit.astype(dtype), self.exponent)
        return scaled

    def write(self, out: Array) -> None:
        if native_array(out):
            kernels.half_unpack(self.codes, self.exponent, out, brain=bool(self.format_index))
        else:
            out[:] = self.values(out.dtype)

    def add(self, out: Array, alpha: float) -> None:
        if native_array(out):
            kernels.half_unpack(self.codes, self.exponent, out, alpha, brain=bool(self.format_index))
        else:
            DenseValues(self.values(out.dtype)).add(out, alpha)


@dataclass(frozen=True, slots=True)
class sign(Coder):
    """Scaled sign: C(x) = (||x||_1 / d) sign(x) at 1 bit per entry, with sign(0) = +1.

    q = sqrt(1 - ||x||_1^2 / (d ||x||_2^2)) (Karimireddy 2019; [CAMS] Remark 4.16); at worst sqrt(1 - 1/d).

    >>> from hansa.compress import decode
    >>> decode(sign().encode(torch.tensor([3.0, -1.0, 0.0, 2.0]), Key(0)))
    tensor([ 1.5000, -1.5000,  1.5000,  1.5000])
    """

    checks_finite: ClassVar[bool] = True
    cites: ClassVar[tuple[str, ...]] = ("karimireddy2019",)

    def payload(self, x: Array, key: Key) -> list[Buffer]:
        bits, total = chunked.signs(x)
        scale = total / x.size
        if not math.isfinite(scale):
            raise nonfinite_error(x, "sign.encode")
        return [np.asarray(scale, x.dtype).tobytes(), bits.data]

    def max_payload(self, dim: int, itemsize: int) -> int:
        return itemsize + -(-dim // 8)

    def parse(self, payload: memoryview, dim: int, dtype: np.dtype[Any]) -> ParsedPayload:
        return Signs.parse(payload, dim, dtype)

    def contraction(self, dim: int) -> float:
        return math.sqrt(1 - 1 / dim)

    @staticmethod
    def q(x: Tensor) -> float:
        """Return the paper's q for this x; it is 0 for equal magnitudes and for the zero vector."""
        array = flat_array(x, "sign.q")
        squares = float(np.square(array, dtype=np.float64).sum())
        share = chunked.absolute_sum(array) ** 2 / (array.size * squares) if squares else 1.0
        return math.sqrt(max(0.0, 1 - share))


@dataclass(frozen=True, slots=True)
class Signs:
    """A payload of a scale and one bit per entry."""

    scale: Any
    bits: Array

    @classmethod
    def parse(cls, view: memoryview, dim: int, dtype: np.dtype[Any]) -> Signs:
        check_size(view, dtype.itemsize + -(-dim // 8), "sign")
        scale = np.frombuffer(view[: dtype.itemsize], dtype)[0]
        if not (np.isfinite(scale) and scale >= 0):
            raise PacketError(f"packet: a sign packet with scale {scale}, expected a finite number >= 0.")
        bits = np.frombuffer(view[dtype.itemsize :], np.uint8)
        if dim % 8 and bits[-1] >> (dim % 8):
            raise PacketError("packet: the padding after the signs is not zero.")
        return cls(scale, bits)

    def write(self, out: Array) -> None:
        chunked.write_signs(self.bits, self.scale, out)

    def add(self, out: Array, alpha: float) -> None:
        chunked.add_signs(self.bits, self.scale * out.dtype.type(alpha), out)
