"""Packets are the same to the byte with native code, on every instruction set, and without it."""

from __future__ import annotations

import pickle
import zlib

import numpy as np
import pytest
import torch

from core.native.sets import each_set
from hansa.compress import Coder, Packet, cast, decode, grid, identity, quantize, sign, top_k
from hansa.compress import entropy_coding as plane_code
from hansa.compress.packet import empty_buffer
from hansa.core import native
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.vectors import kernels

SIZES = (1, 8, 63, 65, 1000, plane_code.BLOCK + 5)
CODERS: list[Coder] = [
    *(grid(coarseness) for coarseness in (1e-9, 0.05, 0.5, 2.0, 20.0)),
    cast("float16"),
    cast("bfloat16"),
    quantize(1, 8, "nearest"),
    quantize(3, 64, "unbiased"),
    quantize(16),
    quantize(127, 2048),
    identity(),
    sign(),
    top_k(0.1),
]


def vectors(size: int) -> dict[str, np.ndarray]:
    """Shapes that models' updates have, and the ends of float32's range."""
    draw = np.random.default_rng(size)
    x = draw.standard_normal(size)
    wide = np.clip(x * np.exp(20 * draw.standard_normal(size)), -3e38, 3e38)
    found = {"normal": x, "sparse": x * (draw.random(size) < 0.02), "whole": np.rint(3 * x), "wide": wide}
    found |= {
        "largest": np.clip(x * 4e38, -3.4e38, 3.4e38),
        "subnormal": x * 1e-40,
        "zero": 0 * x,
        "ties": np.rint(x) / 2,
    }
    return {name: values.astype(np.float32) for name, values in found.items()}


@pytest.mark.parametrize("isa", each_set())
@pytest.mark.parametrize("coder", CODERS, ids=repr)
def test_packets_do_not_depend_on_native_code(monkeypatch, coder, isa) -> None:
    for size in SIZES:
        for name, values in vectors(size).items():
            x = torch.from_numpy(values)
            monkeypatch.setenv("HANSA_NATIVE", isa)
            found = bytes(coder.encode(x, Key(size)).bytes)
            monkeypatch.setenv("HANSA_NATIVE", "off")
            assert found == bytes(coder.encode(x, Key(size)).bytes), (size, name)


@pytest.mark.parametrize("isa", each_set())
def test_whole_numbers_up_to_the_widest_are_coded_alike(isa) -> None:
    draw = np.random.default_rng(3)
    for bits in (1, 3, 9, 17, 24):
        numbers = draw.integers(-(1 << bits), (1 << bits) + 1, 20_011).astype(np.int32)
        numbers[::7] = 0
        room = plane_code.max_nbytes(numbers.size, 24)
        assert kernels.bit_planes_pack(numbers, room, isa=isa).tobytes() == plane_code.encode_integers(
            numbers.astype(np.int64)
        )


@pytest.mark.parametrize("isa", each_set())
def test_the_checksum_is_zlibs(isa) -> None:
    for size in (0, 1, 16, 63, 64, 65, 79, 80, 128, 1000, 100_003):
        data = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
        assert kernels.crc32(data, 12345, isa) == zlib.crc32(data.data, 12345)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("coder", [grid(), cast(), quantize(), identity()], ids=repr)
def test_a_single_bad_entry_is_refused_wherever_it_is(coder, bad) -> None:
    for place in (0, 700, 1999):
        x = torch.ones(2000)
        x[place] = bad
        with pytest.raises(HansaError, match=f"1 of 2000 entries are NaN or infinite, the first at {place}"):
            coder.encode(x, Key(0))


def test_a_long_packet_travels_to_another_process() -> None:
    x = torch.randn(100_000)
    packet = cast().encode(x, Key(0))
    assert isinstance(packet.content, memoryview)
    again = pickle.loads(pickle.dumps(packet))  # noqa: S301
    assert isinstance(again, Packet)
    assert bytes(again.bytes) == bytes(packet.bytes)
    assert torch.equal(decode(again), decode(packet))


def test_the_memory_of_a_long_packet_is_used_again_and_never_while_it_is_held() -> None:
    x = torch.randn(300_000)
    one = cast().encode(x, Key(0))
    kept = bytes(one.bytes)
    two = cast().encode(-x, Key(0))
    assert bytes(one.bytes) == kept != bytes(two.bytes)
    view = one.payload()  # as long as anybody looks
    del one, two
    cast().encode(2 * x, Key(0))
    assert bytes(view) == kept[24:]
    assert len(empty_buffer(700_001)) == 700_001


def test_there_are_native_kernels_here() -> None:
    """Else the tests above compare eager with eager."""
    assert (
        native.available()
        or "compiler" in (native.unavailable_reason() or "")
        or "off" in (native.unavailable_reason() or "")
    )
