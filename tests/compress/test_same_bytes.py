"""Packets and decoded vectors are the same to the bit with native code, on every instruction set, and without it."""

from __future__ import annotations

import pickle
import zlib

import numpy as np
import pytest
import torch

from core.native.sets import in_each_set
from hansa.compress import Coder, Packet, accumulate, cast, decode, grid, identity, quantize, sign, top_k
from hansa.compress import codes as coding
from hansa.compress.codes import pack_codes
from hansa.compress.packet import empty_buffer
from hansa.core.keys import Key
from hansa.core.vectors import kernels

SIZES = (1, 8, 63, 65, 1000, coding.BLOCK + 5)
CODERS: list[Coder] = [
    *(grid(coarseness) for coarseness in (1e-9, 0.05, 0.5, 2.0, 20.0)), cast("float16"), cast("bfloat16"),
    quantize(1, 8, "nearest"), quantize(3, 64, "unbiased"), quantize(16), quantize(127, 2048), identity(),
    sign(), top_k(0.1),
]  # fmt: skip


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


@in_each_set
@pytest.mark.parametrize("coder", CODERS, ids=repr)
def test_packets_do_not_depend_on_native_code(monkeypatch, coder, isa) -> None:
    for size in SIZES:
        for name, values in vectors(size).items():
            x = torch.from_numpy(values)
            monkeypatch.setenv("HANSA_NATIVE", isa)
            found = bytes(coder.encode(x, Key(size)).bytes)
            monkeypatch.setenv("HANSA_NATIVE", "off")
            assert found == bytes(coder.encode(x, Key(size)).bytes), (size, name)


@in_each_set
@pytest.mark.parametrize("coder", [coder for coder in CODERS if not isinstance(coder, top_k)], ids=repr)
def test_decoded_vectors_do_not_depend_on_native_code(monkeypatch, coder, isa) -> None:
    for size in (1, 65, 1027, coding.BLOCK + 5):
        for name, values in vectors(size).items():
            x = torch.from_numpy(values)
            packet = bytes(coder.encode(x, Key(size)).bytes)
            found = []
            for chosen in (isa, "off"):
                monkeypatch.setenv("HANSA_NATIVE", chosen)
                decoded, added = decode(packet), accumulate(packet, 0.5 * x.flip(0), -0.3)
                found.append((decoded.numpy().tobytes(), added.numpy().tobytes()))
            assert found[0] == found[1], (size, name)


@in_each_set
def test_truncated_and_padded_codes_are_refused() -> None:
    draw = np.random.default_rng(5)
    numbers = np.rint(draw.standard_normal(400) * np.exp(draw.standard_normal(400))).astype(np.int64) * 5
    data = coding.encode_integers(numbers)
    for size in (*range(len(data)), len(data) + 1):  # each in memory of its own: reading beyond it is noticed
        cut = np.frombuffer((data + b"\0")[:size], np.uint8).copy()
        assert kernels.bit_planes_unpack(cut, numbers.size) is None, size
    whole = kernels.bit_planes_unpack(np.frombuffer(data, np.uint8).copy(), numbers.size)
    assert whole is not None
    assert np.array_equal(whole, numbers)
    packed = np.frombuffer(pack_codes(np.full(13, 6), 3), np.uint8).copy()
    assert kernels.levels_within(packed, 13, 3)
    packed[-1] |= 0x80  # after the last code
    assert not kernels.levels_within(packed, 13, 3)
    for place in (0, 12, 40):
        codes = np.full(41, 6)
        codes[place] = 7
        assert not kernels.levels_within(np.frombuffer(pack_codes(codes, 3), np.uint8).copy(), 41, 3)


@in_each_set
def test_whole_numbers_up_to_the_widest_are_coded_alike() -> None:
    draw = np.random.default_rng(3)
    for bits in (1, 3, 9, 17, 24):
        numbers = draw.integers(-(1 << bits), (1 << bits) + 1, 20_011).astype(np.int32)
        numbers[::7] = 0
        room = coding.max_nbytes(numbers.size, 24)
        assert kernels.bit_planes_pack(numbers, room).tobytes() == coding.encode_integers(numbers.astype(np.int64))
        data = np.frombuffer(coding.encode_integers(numbers), np.uint8)
        decoded = kernels.bit_planes_unpack(data, numbers.size)
        assert decoded is not None
        assert np.array_equal(decoded, numbers)


@in_each_set
def test_the_checksum_is_zlibs() -> None:
    for size in (0, 1, 16, 63, 64, 65, 79, 80, 128, 1000, 100_003):
        data = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
        assert kernels.crc32(data, 12345) == zlib.crc32(data.data, 12345)


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
