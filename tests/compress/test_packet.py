"""The wire format, byte by byte, and everything that is not in it."""

from __future__ import annotations

import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch

from hansa.compress import (
    Packet,
    PacketError,
    accumulate,
    cast,
    decode,
    grid,
    identity,
    quantize,
    random_k,
    sign,
    top_k,
)
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from mistakes import refused

KEY = Key(5)
X = torch.tensor([0.5, -2.0, 0.0, 4.0, -1.5, 0.25, 3.0, -0.125, 1.0, -1.0, 2.5])
ALL = [
    identity(), cast("float16"), cast("bfloat16"), sign(), top_k(0.4), top_k(0.4, "float16"),
    top_k(0.4, quantize(3)), top_k(0.4, sign()), random_k(0.4), quantize(5, 8), grid(0.1), grid(2.0),
]  # fmt: skip
IDENTITY, WHOLE, CAST, SIGN, QUANTIZE, TOP_K, RANDOM_K, GRID = range(8)


def build(
    kind: int, dim: int, payload: bytes, *, wide: bool = False, length: int | None = None, version: int = 2
) -> bytes:
    """A packet by the format's description alone, with a right checksum."""
    length = len(payload) if length is None else length
    start = b"hP" + bytes([version, kind + 128 * wide]) + struct.pack("<QQ", dim, length)
    return start + struct.pack("<I", zlib.crc32(start + payload)) + payload


def test_a_sign_packet_is_header_scale_and_bits() -> None:
    x = torch.tensor([1.0, -2.0, 0.0, 3.0, -4.0, 5.0, 6.0, -7.0, 8.0])
    assert sign().encode(x, KEY).bytes == build(SIGN, 9, struct.pack("<fBB", 4.0, 0b01101101, 0b1))
    assert sign().encode(x.double(), KEY).bytes == build(SIGN, 9, struct.pack("<dBB", 4.0, 0b01101101, 0b1), wide=True)


def test_an_identity_packet_is_header_and_numbers() -> None:
    assert identity().encode(X, KEY).bytes == build(IDENTITY, 11, struct.pack("<11f", *X.tolist()))
    assert Packet.of(X).bytes == identity().encode(X, KEY).bytes


def test_a_top_k_packet_is_counts_gaps_and_values() -> None:
    x = torch.zeros(1000)
    x[[2, 3, 70]] = torch.tensor([5.0, -6.0, 7.0])
    payload = struct.pack("<IIBBB", 3, 3, 1, 0, 0) + bytes([2, 0, 66]) + struct.pack("<3f", 5, -6, 7)
    assert top_k(3 / 1000).encode(x, KEY).bytes == build(TOP_K, 1000, payload)


def test_a_quantize_packet_is_levels_norms_and_codes() -> None:
    packet = quantize(1, 8, "nearest").encode(torch.tensor([2.0, -2.0, 1.1, 0.0, -0.9]), KEY)
    levels = [1, -1, 1, 0, 0]
    word = sum(level + 1 << 2 * place for place, level in enumerate(levels))
    assert packet.bytes == build(QUANTIZE, 5, struct.pack("<BIf", 1, 8, 2.0) + word.to_bytes(2, "little"))
    assert decode(packet).tolist() == [2, -2, 2, 0, 0]


@pytest.mark.parametrize("compressor", ALL, ids=repr)
def test_every_single_flipped_bit_is_noticed(compressor) -> None:
    data = bytes(compressor.encode(X, KEY).bytes)
    for place in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(PacketError):
            decode(damaged)


test_a_packet_that_is_not_what_the_receiver_expects_is_refused = refused(
    ({"dim": 12}, "dim 11, expected 12"),
    ({"dtype": torch.float64}, "dtype torch.float32, expected torch.float64"),
    ({"kind": "top_k"}, "kind sign, expected top_k"),
    by=lambda expected: decode(sign().encode(X, KEY), **expected),
    error=PacketError,
)


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def lattice(rest: bytes, exponent: int = 0, finest: int = 0, shift: int = 0, planes: int = 1) -> bytes:
    return struct.pack("<hhBB", exponent, finest, shift, planes) + rest


def plane(count: int, data: bytes, code: int = 0, width: int = 0, flipped: int = 0) -> bytes:
    return struct.pack("<HHB", count, len(data), flipped + 2 * code + 8 * width) + data


def top(count: int, length: int, code: int, width: int, values: int) -> bytes:
    return struct.pack("<IIBBB", count, length, code, width, values)


NAN, INF = float("nan"), float("inf")
BAD = {
    "other magic": (b"PK" + build(SIGN, 8, floats(1) + b"\0")[2:], "not a hansa packet"),
    "later version": (build(SIGN, 8, floats(1) + b"\0", version=3), "version 3"),
    "unknown kind": (build(99, 8, floats(1) + b"\0"), "unknown kind 99"),
    "declared length": (build(SIGN, 8, floats(1) + b"\0", length=2**60), "declares a payload"),
    "no entries": (build(SIGN, 0, floats(1)), "without entries"),
    "sign dim too large": (build(SIGN, 9, floats(1) + b"\0"), "takes 6 bytes"),
    "sign huge dim": (build(SIGN, 2**60, floats(1) + b"\0"), "declares 1152921504606846976 entries"),
    "sign padding": (build(SIGN, 3, floats(1) + b"\x08"), "padding"),
    "sign NaN scale": (build(SIGN, 8, floats(NAN) + b"\0"), "scale nan"),
    "sign infinite scale": (build(SIGN, 8, floats(INF) + b"\0"), "scale inf"),
    "sign negative scale": (build(SIGN, 8, floats(-1) + b"\0"), "scale -1"),
    "identity NaN": (build(IDENTITY, 2, floats(1, NAN)), "NaN"),
    "whole infinite": (build(WHOLE, 2, floats(1, INF)), "NaN or infinite"),
    "cast format": (build(CAST, 1, b"\x02\0\0\0\0"), "no 16-bit format"),
    "cast exponent": (build(CAST, 1, b"\x00" + struct.pack("<hh", 200, 0)), "exponent 200"),
    "cast NaN": (build(CAST, 1, b"\x00\0\0" + struct.pack("<H", 0x7E00)), "not below 1"),
    "cast one": (build(CAST, 1, b"\x00\0\0" + struct.pack("<H", 0x3C00)), "not below 1"),
    "quantize no levels": (build(QUANTIZE, 8, struct.pack("<BI", 0, 8) + floats(1)), "0 levels"),
    "quantize bucket": (
        build(QUANTIZE, 8, struct.pack("<BI", 1, 2**32 - 8) + floats(1) + b"\0\0"),
        "buckets of 4294967288",
    ),
    "quantize odd bucket": (build(QUANTIZE, 20, struct.pack("<BI", 1, 9) + floats(1)), "buckets of 9"),
    "quantize code": (build(QUANTIZE, 8, struct.pack("<BI", 1, 8) + floats(1) + b"\x03\0"), "code 3"),
    "quantize padding": (build(QUANTIZE, 5, struct.pack("<BI", 1, 8) + floats(1) + b"\0\xf0"), "padding"),
    "quantize NaN norm": (build(QUANTIZE, 8, struct.pack("<BI", 1, 8) + floats(NAN) + b"\0\0"), "norm"),
    "quantize negative norm": (build(QUANTIZE, 8, struct.pack("<BI", 1, 8) + floats(-1) + b"\0\0"), "norm"),
    "top_k too many": (build(TOP_K, 8, top(9, 1, 0, 0, 0) + b"\xff" + floats(*[1] * 9)), "9 entries"),
    "top_k index length": (build(TOP_K, 8, top(1, 99, 1, 0, 0) + b"\0" + floats(1)), "99 bytes of indices"),
    "top_k index beyond": (build(TOP_K, 8, top(1, 1, 1, 0, 0) + b"\x08" + floats(1)), "beyond"),
    "top_k bitmap count": (build(TOP_K, 8, top(1, 1, 0, 0, 0) + b"\x03" + floats(1)), "marks 2"),
    "top_k bitmap padding": (build(TOP_K, 7, top(1, 1, 0, 0, 0) + b"\x80" + floats(1)), "padding"),
    "top_k index code": (build(TOP_K, 8, top(1, 1, 7, 0, 0) + b"\x01" + floats(1)), "unknown index code"),
    "top_k value kind": (build(TOP_K, 8, top(1, 1, 0, 0, TOP_K) + b"\x01" + floats(1)), "values of kind top_k"),
    "top_k value length": (build(TOP_K, 8, top(1, 1, 0, 0, 0) + b"\x01" + floats(1, 1)), "takes 4 bytes"),
    "top_k NaN value": (build(TOP_K, 8, top(1, 1, 0, 0, 0) + b"\x01" + floats(NAN)), "NaN"),
    "top_k bytes after none": (build(TOP_K, 8, top(0, 0, 1, 0, 0) + floats(1)), "without entries"),
    "top_k huge dim": (build(TOP_K, 2**40, top(1, 1, 1, 0, 0) + b"\x01" + floats(1)), "at most 1048576"),
    "grid exponent": (build(GRID, 8, lattice(plane(0, b"", 1), exponent=128)), "no grid of 2\\^128"),
    "grid finer than fine": (build(GRID, 8, lattice(plane(0, b"", 1), finest=-150)), "on one of 2\\^-150"),
    "grid finest above": (build(GRID, 8, lattice(plane(0, b"", 1), finest=1)), "on one of 2\\^1"),
    "grid beyond float32": (build(GRID, 8, lattice(plane(1, b"\1") + b"\1\0\1\0", exponent=127)), "beyond"),
    "grid no planes": (build(GRID, 8, lattice(b"\0" * 9, planes=0)), "0 planes"),
    "grid planes": (build(GRID, 8, lattice(plane(0, b"", 1), planes=25)), "25 planes"),
    "grid low bits": (build(GRID, 8, lattice(plane(0, b"", 1), shift=25)), "25 low bits"),
    "grid more than half": (build(GRID, 8, lattice(plane(5, b"\x1f") + b"\0")), "expected the smaller side"),
    "grid half flipped": (build(GRID, 8, lattice(plane(4, b"\x0f", flipped=1) + b"\0")), "the smaller side"),
    "grid bitmap count": (build(GRID, 8, lattice(plane(1, b"\3") + b"\0")), "marks 2"),
    "grid index code": (build(GRID, 8, lattice(plane(1, b"\1", code=3) + b"\0")), "unknown index code"),
    "grid needless plane": (build(GRID, 8, lattice(plane(0, b"", 1) * 2, planes=2)), "sent without"),
    "grid sign padding": (build(GRID, 8, lattice(plane(1, b"\1") + b"\1\0\0" + b"\2")), "padding"),
    "grid varint": (build(GRID, 8, lattice(plane(1, b"\1") + b"\2\0\x80\0" + b"\0")), "longer than its number"),
    "grid huge number": (build(GRID, 8, lattice(plane(1, b"\1") + b"\4\0\xff\xff\xff\x7f\0")), "beyond 2\\^24"),
    "grid low bits beyond": (
        build(GRID, 8, lattice(plane(1, b"\1") + b"\4\0\xff\xff\xff\1" + b"\xff\0" + b"\0", shift=2)),
        "beyond 2\\^24",
    ),
    "grid missing plane": (build(GRID, 40, lattice(plane(20, b"\x0f" * 5) + b"\0")), "without another plane"),
    "grid truncated": (build(GRID, 8, lattice(plane(1, b"\1"))), "truncated"),
    "grid bytes after": (build(GRID, 8, lattice(plane(0, b"", 1) + b"\0")), "follow the last number"),
    "grid huge dim": (build(GRID, 2**20, lattice(plane(0, b"", 1))), "at least 448 bytes"),
    "random_k none": (build(RANDOM_K, 8, struct.pack("<QIB", 1, 0, 0)), "0 entries"),
    "random_k too many": (build(RANDOM_K, 8, struct.pack("<QIB", 1, 9, 0) + floats(*[1] * 9)), "9 entries"),
    "random_k NaN": (build(RANDOM_K, 8, struct.pack("<QIB", 1, 1, 0) + floats(NAN)), "NaN"),
    "random_k value kind": (
        build(RANDOM_K, 8, struct.pack("<QIB", 1, 1, RANDOM_K) + floats(1)),
        "values of kind random_k",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_packets_with_a_right_checksum_and_a_wrong_content_are_refused_and_touch_nothing(name) -> None:
    data, complaint = BAD[name]
    with pytest.raises(PacketError, match=complaint):
        decode(data)
    out = torch.arange(8.0)
    with pytest.raises(PacketError):
        accumulate(data, out)
    assert torch.equal(out, torch.arange(8.0))


def test_refusals_take_no_more_memory_than_twice_the_expected_vector() -> None:
    dim = 1 << 20
    draw = np.random.default_rng(0)
    full = draw.integers(0, 256, dim // 8, np.uint8).tobytes()
    hostile = [
        build(TOP_K, 2**62, top(2**32 - 1, 0, 1, 0, 0)),
        build(TOP_K, dim, top(dim, dim // 8, 1, 0, 0) + full + b"\0" * (4 * dim)),
        build(TOP_K, dim, top(dim, dim // 8, 2, 20, SIGN) + full + floats(1) + b"\0" * (dim // 8)),
        build(TOP_K, dim, top(dim, 2**32 - 1, 2, 20, SIGN) + full),
        build(RANDOM_K, dim, struct.pack("<QIB", 1, 2**32 - 1, SIGN) + floats(1)),
        build(QUANTIZE, dim, struct.pack("<BI", 127, 2**32 - 8) + floats(1) + b"\xff" * dim),
        build(QUANTIZE, dim, struct.pack("<BI", 1, 8) + b"\xff" * (dim // 2 + dim // 4)),
        build(SIGN, 2**62, full),
        build(GRID, dim, lattice(plane(0, b"", 1) + full[:8000])),
        build(IDENTITY, 2**62, full),
    ]
    for data in hostile:
        for expected in (dim, None):
            tracemalloc.start()
            with pytest.raises(PacketError):
                decode(data, dim=expected)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak <= 2 * 4 * dim


@pytest.mark.parametrize("data", ["text", None, 7, [1, 2]])
def test_only_bytes_are_read(data) -> None:
    with pytest.raises(PacketError, match="expected bytes"):
        decode(data)


def test_a_packet_may_hold_a_tensor_and_still_knows_its_bytes() -> None:
    packet = Packet.of(X)
    assert packet.nbytes == 24 + 44 == len(packet.bytes)
    assert decode(packet).data_ptr() == X.data_ptr()
    assert torch.equal(decode(packet.bytes), X)
    assert torch.equal(accumulate(packet, torch.ones(11), -1.0), 1 - X)
    with pytest.raises(PacketError, match="dim 11"):
        decode(packet, dim=10)
    with pytest.raises(HansaError, match="1 of 2 entries are NaN"):
        _ = Packet.of(torch.tensor([1.0, NAN])).bytes


@pytest.mark.parametrize(
    ("x", "complaint"),
    [
        (torch.ones(2, 2), "flat vector"),
        (torch.ones(2, dtype=torch.float16), "float16 vectors cannot be sent"),
        (torch.ones(2, dtype=torch.int64), "cannot be sent"),
        (torch.ones(0), "at least one entry"),
    ],
)
@pytest.mark.parametrize("compressor", ALL, ids=repr)
def test_what_is_no_flat_float_vector_is_refused(compressor, x, complaint) -> None:
    with pytest.raises(HansaError, match=complaint):
        compressor.encode(x, KEY)


@pytest.mark.parametrize("out", [torch.ones(22)[::2], torch.ones(11, requires_grad=True), torch.ones(11, 1)])
def test_accumulate_wants_a_contiguous_vector(out) -> None:
    with pytest.raises(HansaError, match="contiguous flat vector"):
        accumulate(sign().encode(X, KEY), out)
