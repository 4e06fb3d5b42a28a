"""Native kernels of the server and the compressors: each entry is read and written once.

All functions take contiguous CPU tensors or NumPy arrays, validate them, and run on the calling thread without the
interpreter lock. An output may be the input of the same name (in-place update); other overlaps are not allowed.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import CancelledError
from ctypes import c_int64
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from hansa.core import native
from hansa.core.errors import HansaError, invalid_argument
from hansa.core.native import abi
from hansa.core.vectors import allocator

if TYPE_CHECKING:
    from torch import Tensor

Array: TypeAlias = "Tensor | np.ndarray[Any, Any]"
Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
_PIECE = 1 << 20  # entries of a row in a file between two checks of ``stop``


class ServerStep(NamedTuple):
    """The step and the moments after it; None for moments that a rule does not have."""

    step: Tensor
    m: Tensor
    v: Tensor | None
    vhat: Tensor | None


def server_step(
    kind: str,
    delta: Tensor,
    m: Tensor,
    v: Tensor | None = None,
    vhat: Tensor | None = None,
    *,
    b1: float,
    b2: float = 0.0,
    eps: float = 0.0,
    eps_inside: bool = False,
    bias_correction: bool = False,
    t: int = 1,
) -> ServerStep:
    """Compute one step of ``momentum``, ``adagrad``, ``adam``, ``yogi``, ``amsgrad`` or ``ams`` of `hansa.server`.

    ``t`` counts from 1 and is used only with ``bias_correction``. float32 or float64.
    """
    if kind not in abi.SERVER_KINDS:
        raise invalid_argument("server_step", "kind", kind, f"one of {', '.join(abi.SERVER_KINDS)}")
    moments, maximum = kind != "momentum", kind in ("amsgrad", "ams")
    if (v is None) == moments or (vhat is None) == maximum:
        raise HansaError(f"server_step({kind!r}): v goes with all rules but momentum, vhat with amsgrad and ams only.")
    fresh = [allocator.empty_like(moment) if moment is not None else None for moment in (v, vhat)]
    out = ServerStep(allocator.empty_like(delta), allocator.empty_like(m), *fresh)
    named = {"delta": delta, "m": m, "v": v, "vhat": vhat}
    named |= {"out.step": out.step, "out.m": out.m, "out.v": out.v, "out.vhat": out.vhat}
    kernel, dtype = _kernel("server", delta)
    pointers = [None if a is None else address_of("server_step", k, a, dtype, delta.numel()) for k, a in named.items()]
    corrected = bias_correction and moments
    rule = abi.Rule(
        abi.SERVER_KINDS.index(kind),
        int(eps_inside),
        b1,
        b2,
        eps,
        1.0,
        1 / (1 - b1**t) if corrected else 1.0,
        1 / (1 - b2**t) if corrected and kind != "adagrad" else 1.0,
    )
    kernel(ctypes.byref(rule), delta.numel(), *pointers, None)
    return out


def native_weighted_sum(
    rows: Tensor | Sequence[Tensor], weights: Sequence[float], total: Tensor | None = None
) -> Tensor:
    """Return total + sum_i w_i row_i, folded left to right for each entry.

    Without a total w_0 row_0 is rounded once, then there is one multiply-add per row (fused if the machine supports
    it). Rows are those of a matrix or separate vectors, float32 or float64.
    """
    count = len(weights)
    if not count or len(rows) != count:
        raise HansaError(f"native_weighted_sum: {len(rows)} rows and {count} weights: expected as many.")
    name, first, size = "native_weighted_sum", rows[0], rows[0].numel()
    kernel, dtype = _kernel("mean", first)
    if isinstance(rows, torch.Tensor):
        pointers = address_of(name, "rows", rows, dtype, count * size) + first.nbytes * np.arange(count)
    else:
        pointers = np.array([address_of(name, f"row {i}", row, dtype, size) for i, row in enumerate(rows)])
    factors = np.array(weights, np.float64)
    if total is not None:
        pointers = np.append(address_of(name, "total", total, dtype, size), pointers)
        factors = np.append(1.0, factors)
    out, addresses = allocator.empty(size, dtype), pointers.astype(np.uint64)
    kernel(addresses.ctypes.data, factors.ctypes.data, len(addresses), size, out.data_ptr())
    return out


def row_norms(rows: Tensor) -> list[float]:
    """Return the Euclidean norm of each row of a float32 matrix, as by `squared_norm`."""
    count, size = rows.shape
    first, step = address_of("row_norms", "rows", rows, torch.float32), rows.stride(0) * 4
    squares, finite = native.load().squares32, ctypes.byref(c_int64())
    return [math.sqrt(squares(first + row * step, size, finite)) for row in range(count)]


class CsrWeights(NamedTuple):
    """A square CSR matrix: row i has the entries ``starts[i]`` to ``starts[i + 1]`` of links and weights."""

    starts: np.ndarray[Any, np.dtype[np.int64]]
    columns: np.ndarray[Any, np.dtype[np.int64]]
    weights: np.ndarray[Any, np.dtype[np.float64]]

    @classmethod
    def of(cls, matrix: Any) -> CsrWeights:
        """Convert a SciPy CSR matrix."""
        links = cls(
            np.ascontiguousarray(matrix.indptr, np.int64),
            np.ascontiguousarray(matrix.indices, np.int64),
            np.ascontiguousarray(matrix.data, np.float64),
        )
        n = len(links.starts) - 1
        if matrix.shape != (n, n) or len(links.columns) != len(links.weights) or links.starts[-1] != len(links.columns):
            raise HansaError(f"CsrWeights.of: a matrix of shape {matrix.shape}: expected a square one in CSR form.")
        low, high = links.columns.min(initial=0), links.columns.max(initial=-1)
        if low < 0 or high >= n:
            raise HansaError(f"CsrWeights.of: links run from {low} to {high}, expected 0..{n - 1}.")
        return links


def mix(rows: Tensor, weights: CsrWeights, out: Tensor) -> None:
    """Set out = W rows, [n, d] in float32 or float64, each entry folded over the row's links in order."""
    kernel, dtype = _kernel("mix", rows)
    n = len(weights.starts) - 1
    if rows.ndim != 2 or len(rows) != n:
        raise HansaError(f"mix: rows of shape {list(rows.shape)}, expected [{n}, d].")
    source, target = address_of("mix", "rows", rows, dtype), address_of("mix", "out", out, dtype, rows.numel())
    if source == target:
        raise HansaError("mix: out is the rows themselves; it must be apart from them.")
    kernel(source, *(array.ctypes.data for array in weights), n, rows.shape[1], target)


def squared_norm(x: Array) -> tuple[float, bool]:
    """Return ||x||^2 in float64 and whether all entries are finite. Entry i is added to lane i mod 32 of the sum."""
    (kernel, dtype), finite = _kernel("squares", x), c_int64()
    total = kernel(address_of("squared_norm", "x", x, dtype), _length(x), ctypes.byref(finite))
    return float(total), bool(finite.value)


def native_inner_products(rows: Tensor, vectors: Tensor) -> Tensor:
    """Return <row_i, vector_j> in float64, [n, m], of float32 [n, d] and [m, d].

    Every product is exact; entry k is added to lane k mod 8 of its pair's sum, in order, and the lanes are added in
    pairs. The bits depend only on the two vectors, not on the instruction set or on the other pairs.
    """
    count, columns, d = len(rows), len(vectors), rows.shape[1]
    out = torch.empty(count, columns, dtype=torch.float64)
    first = address_of("native_inner_products", "rows", rows, torch.float32)
    second = address_of("native_inner_products", "vectors", vectors, torch.float32, columns * d)
    if native.load().gram32(first, count, second, columns, d, out.data_ptr()) != abi.OK:
        raise MemoryError("native_inner_products: no memory for the sums")
    return out


def reads_rows() -> bool:
    """Return whether `file_inner_products` is supported on this system."""
    return native.available() and bool(native.load().rows_add)


def file_inner_products(
    file: int, offsets: Sequence[int], vectors: Tensor, stop: Event | None = None
) -> tuple[Tensor, list[int]]:
    """Return `native_inner_products` of rows at byte offsets of an open file, with the same bits, and their CRC-32.

    A piece of every row is in memory at a time. Raises `CancelledError` soon after ``stop`` is set.
    """
    count, (columns, d), table = len(offsets), vectors.shape, native.load()
    first = address_of("file_inner_products", "vectors", vectors, torch.float32)
    lanes = torch.zeros(count, columns + abi.GRAM_SPARE, abi.GRAM_LANES, dtype=torch.float64)
    crcs, failure = (ctypes.c_uint32 * count)(), (c_int64 * 2)()
    for start in range(0, d, _PIECE):
        if stop is not None and stop.is_set():
            raise CancelledError
        addresses, entries = (c_int64 * count)(*(offset + 4 * start for offset in offsets)), min(_PIECE, d - start)
        result = table.rows_add(
            file, addresses, count, first + 4 * start, d, columns, entries, lanes.data_ptr(), crcs, failure
        )
        if result == abi.BAD_ROW:
            number = -failure[1] if failure[1] < 0 else errno.EIO
            raise OSError(number, os.strerror(number) if failure[1] < 0 else f"the file ends in row {failure[0]}")
        if result != abi.OK:
            raise MemoryError("file_inner_products: no memory for the sums")
    out = torch.empty(count, columns, dtype=torch.float64)
    table.gram32_sum(lanes.data_ptr(), count, columns, out.data_ptr())
    return out, list(crcs)


def sign_pack(x: Array) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], float]:
    """Return the signs of a float32 vector as bits (1 where x >= 0, lowest bit of a byte first) and ||x||_1.

    The sum is accumulated in 1024 float64 lanes, entry i in lane i mod 1024, which are then added exactly; it is NaN if
    an entry is not finite.
    """
    pointer, size = address_of("sign_pack", "x", x, torch.float32), _length(x)
    bits, lanes = np.empty(-(-size // 8), np.uint8), np.empty(abi.SUM_LANES)
    native.load().sign_pack(pointer, size, bits.ctypes.data, lanes.ctypes.data)
    return bits, math.fsum(lanes) if np.isfinite(lanes).all() else math.nan


def sign_write(bits: Array, scale: float, out: Array, add: bool = False) -> None:
    """Set out = scale * sign, from the bits of ``sign_pack``, or add that."""
    target, size = address_of("sign_write", "out", out, torch.float32), _length(out)
    pointer = address_of("sign_write", "bits", bits, torch.uint8, -(-size // 8))
    packet, factor = (ctypes.c_void_p * 1)(pointer), (ctypes.c_float * 1)(scale)
    native.load().sign_add(packet, factor, 1, size, int(not add), target)


def indices_reaching(
    x: Array, threshold: float, capacity: int | None = None
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.float32]]]:
    """Return ascending indices and values of the entries whose magnitude is not below the threshold, including NaN.

    ``room`` is an estimate of their number; a low one costs a second pass.
    """
    pointer, size = address_of("indices_reaching", "x", x, torch.float32), _length(x)
    capacity = min(size, size // 32 + 1024 if capacity is None else capacity)
    kernel = native.load().reaching
    while True:
        index, value = np.empty(capacity, np.int64), np.empty(capacity, np.float32)
        count = kernel(pointer, size, threshold, capacity, index.ctypes.data, value.ctypes.data)
        if count <= capacity:
            return index[:count], value[:count]
        capacity = count


def crc32(data: bytes | bytearray | memoryview | Bytes, crc: int = 0) -> int:
    """Return zlib's CRC-32 of bytes, continued from ``crc``; native if available and faster.

    >>> crc32(b"ab", crc32(b"c")) == crc32(b"cab") == zlib.crc32(b"cab")
    True
    """
    array = np.frombuffer(data, np.uint8)
    split, kernel = array.size & ~15, native.load().crc32 if native.available() else None
    if split < 64 or not kernel:
        return zlib.crc32(array.data, crc)
    return zlib.crc32(array[split:].data, kernel(address_of("crc32", "data", array, torch.uint8), split, crc))


def max_magnitude(x: Array) -> float:
    """Return the largest magnitude of a float32 vector; NaN or infinite if an entry is."""
    return float(native.load().highest32(address_of("max_magnitude", "x", x, torch.float32), _length(x)))


def half_pack(x: Array, exponent: int, limit: float, brain: bool = False) -> Bytes:
    """Encode float32 x / 2^exponent, at most ``limit`` < 1 in magnitude, as float16 or bfloat16, rounded to even."""
    pointer, size = address_of("half_pack", "x", x, torch.float32), _length(x)
    out = allocator.empty(-(-size // 2), torch.float32).numpy().view(np.uint8)[: 2 * size]
    native.load().half_pack(pointer, size, _power_of_two(exponent), limit, int(brain), out.ctypes.data)
    return out


def quantize_pack(
    x: Array, bucket: int, levels: int, width: int, key: bytes | None
) -> tuple[np.ndarray[Any, np.dtype[np.float32]], Bytes] | None:
    """Encode a float32 vector as `hansa.compress.quantize` does, or return None if an entry is not finite.

    The result is the largest magnitude of each bucket and one code of ``width`` bits per entry. Rounding is stochastic
    by the Philox numbers of a 16-byte key, or to nearest without a key.
    """
    pointer, size = address_of("quantize_pack", "x", x, torch.float32), _length(x)
    if not 1 <= levels <= 127 or width != (2 * levels).bit_length() or bucket % 8 or bucket < 8:
        raise HansaError(f"quantize_pack: {levels} levels of {width} bits in buckets of {bucket}.")
    norms = np.empty(-(-size // bucket), np.float32)
    length = -(-size * width // 8)
    out = allocator.empty(-(-(length + 8) // 4), torch.float32).numpy().view(np.uint8)
    words = None if key is None else (ctypes.c_uint64 * 2)(*np.frombuffer(key, "<u8").tolist())
    args = pointer, size, bucket, levels, width, words, norms.ctypes.data, out.ctypes.data
    return (norms, out[:length]) if native.load().levels_pack(*args) else None


def bit_planes_pack(x: Array, capacity: int, exponent: int = 0, limit: int = 1 << 24) -> Bytes:
    """Encode integers (int32), or rint(x / 2^exponent) (float32), as `hansa.compress.codes` does.

    They are at most ``limit`` <= 2^24 in magnitude and take at most ``capacity`` bytes.
    """
    numbers = x.dtype in (torch.int32, np.int32)
    pointer = address_of("bit_planes_pack", "x", x, torch.int32 if numbers else torch.float32)
    out = np.empty(capacity + 8, np.uint8)
    source = (None, pointer) if numbers else (pointer, None)
    length = native.load().planes_pack(*source, _length(x), _power_of_two(exponent), limit, out.ctypes.data)
    if length < 0:
        raise MemoryError("bit_planes_pack: no memory for a block")
    return out[:length]


def halves_below_one(codes: Bytes, brain: bool = False) -> bool:
    """Return whether all 16-bit floats of ``half_pack`` are below 1 in magnitude, so that none is NaN or infinite."""
    pointer = address_of("halves_below_one", "codes", codes, torch.uint8)
    return bool(native.load().half_check(pointer, codes.size // 2, int(brain)))


def half_unpack(codes: Bytes, exponent: int, out: Array, alpha: float | None = None, brain: bool = False) -> None:
    """Set out = 2^exponent v for the codes of v, or add alpha times that; codes must pass ``halves_below_one``."""
    target, size = address_of("half_unpack", "out", out, torch.float32), _length(out)
    pointer = address_of("half_unpack", "codes", codes, torch.uint8, 2 * size)
    native.load().half_unpack(pointer, size, _power_of_two(-exponent), int(brain), *_addition_flags(alpha), target)


def levels_within(codes: Bytes, count: int, levels: int) -> bool:
    """Return whether ``count`` packed codes of ``quantize_pack`` are at most 2 levels, with zeros after the last."""
    width = (2 * levels).bit_length()
    pointer = address_of("levels_within", "codes", codes, torch.uint8, -(-count * width // 8))
    return bool(native.load().levels_check(pointer, count, levels, width))


def quantize_unpack(
    codes: Bytes, norms: Bytes, bucket: int, levels: int, out: Array, alpha: float | None = None
) -> None:
    """Set out = ((code - levels) / levels) norm, or add alpha times that.

    ``codes`` must pass ``levels_within``; ``norms`` are the bytes of one float32 per bucket.
    """
    target, size = address_of("quantize_unpack", "out", out, torch.float32), _length(out)
    if not 1 <= levels <= 127 or bucket % 8 or bucket < 8:
        raise HansaError(f"quantize_unpack: {levels} levels in buckets of {bucket}.")
    width = (2 * levels).bit_length()
    pointer = address_of("quantize_unpack", "codes", codes, torch.uint8, -(-size * width // 8))
    scales = address_of("quantize_unpack", "norms", norms, torch.uint8, -(-size // bucket) * 4)
    native.load().levels_unpack(pointer, size, bucket, levels, width, scales, *_addition_flags(alpha), target)


def bit_planes_unpack(data: Bytes, count: int) -> np.ndarray[Any, np.dtype[np.int32]] | None:
    """Decode ``bit_planes_pack``, or return None for bytes that `hansa.compress.codes` refuses."""
    pointer = address_of("bit_planes_unpack", "data", data, torch.uint8)
    out = allocator.empty(count, torch.float32).numpy().view(np.int32)
    state = native.load().planes_unpack(pointer, data.size, count, out.ctypes.data)
    if state == abi.NO_MEMORY:
        raise MemoryError("bit_planes_unpack: no memory for a block")
    return out if state == abi.OK else None


def multiples_write(numbers: Array, exponent: int, out: Array, alpha: float | None = None) -> None:
    """Set out = 2^exponent numbers, of int32 up to 2^24 in magnitude, or add alpha times that."""
    target, size = address_of("multiples_write", "out", out, torch.float32), _length(out)
    pointer = address_of("multiples_write", "numbers", numbers, torch.int32, size)
    native.load().numbers_write(pointer, size, _power_of_two(-exponent), *_addition_flags(alpha), target)


def _kernel(name: str, x: Array) -> tuple[Any, torch.dtype]:
    """Return the kernel for the dtype of a vector, float64 or else float32, and that dtype."""
    dtype = torch.float64 if x.dtype in (torch.float64, np.float64) else torch.float32
    return getattr(native.load(), f"{name}{8 * dtype.itemsize}"), dtype


def _addition_flags(alpha: float | None) -> tuple[int, float]:
    """Return whether a vector is added to the output, and its factor."""
    return (0, 1.0) if alpha is None else (1, alpha)


def _power_of_two(exponent: int) -> Any:
    """Return 2^-exponent as two float32 factors, so that a product with both is rounded once."""
    parts = (exponent, 0) if abs(exponent) <= 126 else (exponent // 2, exponent - exponent // 2)
    return (ctypes.c_float * 2)(*(math.ldexp(1.0, -part) for part in parts))


def _length(x: Array) -> int:
    return x.numel() if isinstance(x, torch.Tensor) else x.size


def address_of(component: str, name: str, x: Array, dtype: torch.dtype, size: int | None = None) -> int:
    """Return the address of a contiguous CPU vector; raise unless it has the given dtype and size."""
    if isinstance(x, torch.Tensor):
        fits, address = x.dtype == dtype and x.is_contiguous() and x.is_cpu, x.data_ptr()
        if fits and (size is None or x.numel() == size):
            return address
    expected = str(dtype).removeprefix("torch.")
    if not isinstance(x, torch.Tensor):
        fits, address = x.dtype == np.dtype(expected) and x.flags.c_contiguous, x.ctypes.data
    if not fits or (size is not None and _length(x) != size):
        device = x.device if isinstance(x, torch.Tensor) else "cpu"
        entries = "" if size is None else f" of {size} entries"
        raise HansaError(
            f"{component}: {name} is {str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {device}, "
            f"expected contiguous {expected}{entries} on the CPU."
        )
    return address
