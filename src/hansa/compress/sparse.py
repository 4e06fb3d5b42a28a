"""Sparse compressors: the largest entries (top-k), or a random subset given by a seed (random-k)."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from hansa.compress import chunked
from hansa.compress.base import Coder, ParsedPayload
from hansa.compress.codes import VARINT, EncodedIndices, decode_indices, encode_indices
from hansa.compress.dense import cast, identity, sign
from hansa.compress.packet import Array, Buffer, PacketError, check_all_finite, read_kind, write_kind
from hansa.compress.quantize import quantize
from hansa.core.bounds import bound, floor_share
from hansa.core.errors import check_fraction, invalid_argument
from hansa.core.keys import Key

TOP = struct.Struct("<IIBBB")
RANDOM = struct.Struct("<QIB")
CHUNK = 1 << 16
FORMATS: dict[str, Coder] = {"float32": identity(), "float16": cast("float16"), "bfloat16": cast("bfloat16")}
#: Kinds of values with self-describing payloads.
DENSE: dict[str, Coder] = {coder.kind: coder for coder in (identity(), cast(), sign(), quantize())}


def kept_count(ratio: float, dim: int) -> int:
    """Return k = max(1, floor(r d)).

    >>> kept_count(1 / 64, 11_173_962), kept_count(1 / 64, 10)
    (174593, 1)
    """
    return max(1, floor_share(ratio, dim))


def _check_values(component: str, argument: str, values: object) -> None:
    valid = isinstance(values, str) and values in FORMATS
    if not valid and (not isinstance(values, Coder) or isinstance(values, _Sparse)):
        expected = "float32, float16, bfloat16 or a dense compressor"
        raise invalid_argument(component, argument, values, expected, "sign() is one.")


def _reader(kind: str, coder: Coder | None) -> Coder:
    """Return the decoder of kept values of a kind: the expected compressor, if known."""
    if coder is None and kind in DENSE:
        return DENSE[kind]
    if coder is None or coder.kind != kind:
        expected = f"expected {coder.kind}" if coder else "which only their compressor reads: pass it to decode"
        raise PacketError(f"packet: kept values of kind {kind}, {expected}.")
    return coder


def _read_values(coder: Coder, view: memoryview, count: int, dtype: np.dtype[Any]) -> Array:
    body = coder.parse(view, count, dtype)
    values = np.empty(count, dtype)
    body.write(values)
    return values


@dataclass(frozen=True, slots=True)
class _Sparse(Coder):
    """The fields of sparse compressors: how many entries are kept, and how they are sent."""

    ratio: float = field(metadata=bound(check_fraction, "1/64 keeps one entry in 64."))
    values: str | Coder = field(default="float32", metadata=bound(_check_values))
    checks_finite: ClassVar[bool] = True
    cites: ClassVar[tuple[str, ...]] = ("stich2018",)

    @property
    def coder(self) -> Coder:
        """The compressor of the kept values."""
        return self.values if isinstance(self.values, Coder) else FORMATS[self.values]

    def checked_count(self, dim: int) -> int:
        k = kept_count(self.ratio, dim)
        if k >= 1 << 32:
            raise invalid_argument(self.kind, "ratio", self.ratio, f"fewer than 2^32 kept entries, not {k}")
        return k

    def contraction(self, dim: int) -> float:
        k = kept_count(self.ratio, dim)
        return math.sqrt(max(0.0, 1 - k / dim * (1 - min(1.0, self.coder.contraction(k)) ** 2)))


@dataclass(frozen=True, slots=True)
class top_k(_Sparse):
    """C(x) keeps the k = max(1, floor(r d)) largest magnitudes, ties to the lower index; q = sqrt(1 - k/d)
    (Stich 2018; [CAMS] Remark 4.15).

    ``values`` is the encoding of the kept entries: ``float32`` (float64 for a float64 vector), ``float16``,
    ``bfloat16``, or another compressor, built-in or custom, as in ``top_k(1/64, values=quantize(7))``; then
    q = sqrt(1 - (k/d)(1 - q_values^2)).

    Args:
        ratio: Fraction of the entries that is kept, 0 < ratio <= 1.
        values: How kept values are sent: "float32", "float16", "bfloat16", or a dense compressor such as `sign`.

    >>> import torch
    >>> from hansa.compress import decode
    >>> decode(top_k(0.5).encode(torch.tensor([1.0, -4.0, 0.0, 2.0]), Key(0)))
    tensor([ 0., -4.,  0.,  2.])
    """

    def payload(self, x: Array, key: Key) -> list[Buffer | Array]:
        chosen, coder = chunked.top_k_indices(x, self.checked_count(x.size), "top_k.encode"), self.coder
        values = coder.payload(x[chosen], key) if chosen.size else []
        coded = encode_indices(chosen, x.size) if chosen.size else EncodedIndices(VARINT, 0, b"")
        code, name = write_kind(coder.kind)
        head = TOP.pack(chosen.size, len(coded.data), coded.code, coded.width, code)
        return [head, name, coded.data, *values]

    def max_payload(self, dim: int, itemsize: int) -> int:
        values_size = self.coder.max_payload(kept_count(self.ratio, dim), itemsize)
        return TOP.size + len(write_kind(self.coder.kind)[1]) + -(-dim // 8) + values_size

    def parse(self, payload: memoryview, dim: int, dtype: np.dtype[Any]) -> ParsedPayload:
        return SparseValues.parse(payload, dim, dtype, self.coder)


@dataclass(frozen=True, slots=True)
class SparseValues:
    """A payload of indices and values."""

    indices: Array
    values: Array

    @classmethod
    def parse(cls, view: memoryview, dim: int, dtype: np.dtype[Any], values: Coder | None = None) -> SparseValues:
        """Parse a `top_k` payload. Without the compressor of its values, only the built-in kinds are read."""
        if len(view) < TOP.size:
            raise PacketError("packet: a top_k payload is truncated before its counts.")
        count, length, code, width, value_code = TOP.unpack_from(view)
        kind, body = read_kind(value_code, view[TOP.size :])
        coder = _reader(kind, values)
        if count > dim or length > len(body):
            raise PacketError(f"packet: {count} entries and {length} bytes of indices cannot be in a vector of {dim}.")
        if not count:
            if len(body) or code != VARINT or width:
                raise PacketError("packet: bytes follow a top_k payload without entries.")
            return cls(np.empty(0, np.int64), np.empty(0, dtype))
        numbers = _read_values(coder, body[length:], count, dtype)
        return cls(decode_indices(EncodedIndices(code, width, body[:length]), count, dim), numbers)

    def write(self, out: Array) -> None:
        out[:] = 0
        out[self.indices] = self.values

    def add(self, out: Array, alpha: float) -> None:
        out[self.indices] += self.values * out.dtype.type(alpha)


@dataclass(frozen=True, slots=True)
class random_k(_Sparse):
    """C(x) keeps k = max(1, floor(r d)) uniformly chosen entries; a seed is sent instead of their indices.

    The values are not rescaled: E||C(x) - x||^2 = (1 - k/d) ||x||^2, the contraction in expectation that error feedback
    needs (Stich 2018). ``values`` is as in `top_k`.

    Args:
        ratio: Fraction of the entries that is kept, 0 < ratio <= 1.
        values: How kept values are sent: "float32", "float16", "bfloat16", or a dense compressor such as `sign`.

    >>> random_k(0.25).contraction(8)
    0.8660254037844386
    """

    def payload(self, x: Array, key: Key) -> list[Buffer | Array]:
        check_all_finite(x, "random_k.encode")
        k = self.checked_count(x.size)
        seed = int.from_bytes(key.child("random_k").digest(8), "little")
        chosen = np.empty(k, x.dtype)
        for chunk, indices in shuffled_indices(seed, x.size, k):
            chosen[chunk] = x[indices]
        code, name = write_kind(self.coder.kind)
        return [RANDOM.pack(seed, k, code), name, *self.coder.payload(chosen, key)]

    def max_payload(self, dim: int, itemsize: int) -> int:
        values_size = self.coder.max_payload(kept_count(self.ratio, dim), itemsize)
        return RANDOM.size + len(write_kind(self.coder.kind)[1]) + values_size

    def parse(self, payload: memoryview, dim: int, dtype: np.dtype[Any]) -> ParsedPayload:
        return ShuffledValues.parse(payload, dim, dtype, self.coder)


@dataclass(frozen=True, slots=True)
class ShuffledValues:
    """A payload of a seed and the values at the indices it generates."""

    seed: int
    values: Array

    @classmethod
    def parse(cls, view: memoryview, dim: int, dtype: np.dtype[Any], values: Coder | None = None) -> ShuffledValues:
        """Parse a `random_k` payload, with values as in `SparseValues.parse`."""
        if len(view) < RANDOM.size:
            raise PacketError("packet: a random_k payload is truncated before its seed.")
        seed, count, code = RANDOM.unpack_from(view)
        kind, body = read_kind(code, view[RANDOM.size :])
        coder = _reader(kind, values)
        if not 1 <= count <= dim:
            raise PacketError(f"packet: {count} entries kept of {dim}.")
        return cls(seed, _read_values(coder, body, count, dtype))

    def write(self, out: Array) -> None:
        out[:] = 0
        for chunk, indices in shuffled_indices(self.seed, out.size, self.values.size):
            out[indices] = self.values[chunk]

    def add(self, out: Array, alpha: float) -> None:
        for chunk, indices in shuffled_indices(self.seed, out.size, self.values.size):
            out[indices] += self.values[chunk] * out.dtype.type(alpha)


_MASK = (1 << 64) - 1
_ROUNDS = 8


def shuffled_indices(seed: int, dim: int, count: int) -> Iterator[tuple[slice, Array]]:
    """Yield the first ``count`` entries of a pseudo-random permutation of range(dim), in chunks.

    A Feistel network over the next power of two (at least 16, because smaller ones mix badly), iterated until the
    result is below ``dim``. The arithmetic is part of the wire format, so it does not use a library's sampler.
    """
    bits = max(4, (dim - 1).bit_length())
    low = np.uint64(bits - bits // 2)
    masks = ((1 << int(low)) - 1, (1 << (bits // 2)) - 1)
    keys = [np.uint64((seed + (turn + 1) * 0x9E3779B97F4A7C15) & _MASK) for turn in range(_ROUNDS)]

    def permute(indices: Array) -> Array:
        right, left = indices & np.uint64(masks[0]), indices >> low
        for turn in range(0, _ROUNDS, 2):
            left ^= _mix(right + keys[turn]) & np.uint64(masks[1])
            right ^= _mix(left + keys[turn + 1]) & np.uint64(masks[0])
        return left << low | right

    for start in range(0, count, CHUNK):
        chunk = slice(start, min(start + CHUNK, count))
        indices = permute(np.arange(chunk.start, chunk.stop, dtype=np.uint64))
        outside = np.flatnonzero(indices >= dim)
        while outside.size:
            indices[outside] = permute(indices[outside])
            outside = outside[indices[outside] >= dim]
        yield chunk, indices.astype(np.int64)


def _mix(z: Array) -> Array:
    """Apply the finaliser of SplitMix64 (Steele 2014): every bit of the result depends on every bit of z."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = z ^ (z >> np.uint64(31))
    return mixed
