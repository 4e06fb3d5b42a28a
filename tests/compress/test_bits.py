"""Bit packing against codes written out digit by digit; index coding: exact, never longer than a bitmap, near the
entropy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hansa.compress import codes as coding
from hansa.compress.codes import BITMAP, RICE, VARINT, EncodedIndices, decode_indices, encode_indices
from hansa.compress.packet import PacketError
from mistakes import refused

numbers = st.lists(st.integers(0, 2**40), max_size=60)
relaxed = settings(deadline=None, max_examples=60)


def digits(text: str) -> bytes:
    """Bytes of a string of binary digits, the first digit the lowest bit of the first byte."""
    padded = text + "0" * (-len(text) % 8)
    return bytes(int(padded[i : i + 8][::-1], 2) for i in range(0, len(padded), 8))


@relaxed
@given(st.data(), st.integers(0, 40), st.integers(0, 50))
def test_packed_codes_are_whole_low_bytes_then_the_high_bits_in_order(data, width, count):
    codes = data.draw(st.lists(st.integers(0, 2**width - 1), min_size=count, max_size=count))
    expected = b""
    for plane in range(width // 8):
        expected += bytes(code >> (8 * plane) & 0xFF for code in codes)
    high = width % 8
    expected += digits("".join(f"{code >> (width - high):0{high}b}"[::-1] for code in codes) if high else "")
    packed = coding.pack_codes(np.array(codes, np.int64), width)
    assert packed == expected
    assert len(packed) == coding.packed_size(count, width)
    assert coding.unpack_codes(packed, width, count).tolist() == codes


@relaxed
@given(numbers)
def test_varints_are_base_128_with_the_high_bit_for_more(values):
    expected = bytearray()
    for value in values:
        while value >= 128:
            expected.append(value % 128 + 128)
            value //= 128
        expected.append(value)
    array = np.array(values, np.int64)
    assert coding.encode_varints(array) == bytes(expected)
    assert int(coding.varint_lengths(array).sum()) == len(expected)
    assert coding.decode_varints(bytes(expected), len(values)).tolist() == values


@relaxed
@given(st.lists(st.integers(0, 3000), max_size=60), st.integers(0, 13))
def test_golomb_rice_is_a_unary_quotient_and_a_packed_remainder(values, width):
    unary = digits("".join("0" * (value >> width) + "1" for value in values))
    array = np.array(values, np.int64)
    expected = unary + coding.pack_codes(array % 2**width, width)
    assert coding.encode_rice(array, width) == expected
    assert coding.rice_size(array, width) == len(expected)
    assert coding.decode_rice(expected, width, len(values)).tolist() == values


test_streams_that_no_encoder_writes_are_refused = refused(
    (lambda: coding.unpack_codes(b"\x80", 3, 2), "padding"),
    (lambda: coding.unpack_codes(b"\x00\x00", 3, 2), "packed codes"),
    (lambda: coding.decode_varints(b"\x80\x00", 1), "longer than its number needs"),
    (lambda: coding.decode_varints(b"\x01\x80", 1), "varints"),
    (lambda: coding.decode_varints(b"\x01\x01", 1), "varints"),
    (lambda: coding.decode_varints(b"\xff" * 8 + b"\x01", 1), "longer"),
    (lambda: coding.decode_varints(b"\x01", 0), "varints"),
    (lambda: coding.decode_rice(b"\x01\x00", 0, 1), "longer than its codes need"),
    (lambda: coding.decode_rice(b"\x03", 0, 1), "marks 2"),
    (lambda: coding.decode_rice(b"", 3, 1), "cannot hold"),
    (lambda: coding.decode_rice(b"\x01", 0, 0), "cannot hold"),
    (lambda: coding.decode_bitmap(b"\x11", 2, 4, "bitmap"), "padding"),
    (lambda: coding.decode_bitmap(b"\x01", 2, 4, "bitmap"), "marks 1"),
    (lambda: coding.decode_bitmap(b"\x01\x00", 1, 4, "bitmap"), "2 bytes of bitmap"),
    error=PacketError,
)


@pytest.mark.parametrize("ratio", [1 / 16, 1 / 64, 1 / 256])
def test_even_choices_come_within_two_percent_of_their_entropy(ratio):
    dim = 1_000_000
    chosen = np.flatnonzero(np.random.default_rng(1).random(dim) < ratio)
    share = chosen.size / dim
    entropy = -dim * (share * math.log2(share) + (1 - share) * math.log2(1 - share)) / 8
    coded = encode_indices(chosen, dim)
    assert coded.code == RICE
    assert entropy <= len(coded.data) <= 1.02 * entropy
    assert np.array_equal(decode_indices(coded, chosen.size, dim), chosen)


def test_each_code_wins_where_it_is_shortest():
    draw = np.random.default_rng(2)
    half = np.append(np.flatnonzero(draw.random(7999) < 0.5), 7999)
    even = np.flatnonzero(draw.random(8000) < 1 / 64)
    clusters = (np.array([0, 400_000, 900_000])[:, None] + np.arange(40) * 60).reshape(-1)
    assert [encode_indices(half, 8000).code, encode_indices(even, 8000).code, encode_indices(clusters, 10**6).code] == [
        BITMAP,
        RICE,
        VARINT,
    ]
    for chosen, dim in ((half, 8000), (even, 8000), (clusters, 10**6)):
        gaps = np.diff(chosen, prepend=-1) - 1
        alternatives = [
            -(-dim // 8),
            len(coding.encode_varints(gaps)),
            *(len(coding.encode_rice(gaps, width)) for width in range(20)),
        ]
        assert len(encode_indices(chosen, dim).data) == min(alternatives)


test_bad_index_streams_for_a_vector_of_100_are_refused = refused(
    ((EncodedIndices(VARINT, 0, coding.encode_varints(np.array([90, 9]))), 2), "beyond"),
    ((EncodedIndices(VARINT, 0, coding.encode_varints(np.array([2**40]))), 1), "beyond"),
    ((EncodedIndices(RICE, 3, coding.encode_rice(np.array([60, 60]), 3)), 2), "beyond"),
    ((EncodedIndices(RICE, 8, b"\x01\x00"), 1), "remainder bits"),
    ((EncodedIndices(RICE, 255, b"\x01\x00"), 1), "remainder bits"),
    ((EncodedIndices(3, 0, b"\x00"), 1), "unknown index code"),
    ((EncodedIndices(BITMAP, 1, b"\x01" + b"\x00" * 12), 1), "unknown index code"),
    ((EncodedIndices(BITMAP, 0, b"\x01" + b"\x00" * 11 + b"\x10"), 2), "padding"),
    ((EncodedIndices(BITMAP, 0, b"\x03" + b"\x00" * 12), 1), "marks 2"),
    ((EncodedIndices(VARINT, 0, b"\x00" * 14), 14), "a bitmap would take 13"),
    by=lambda given: decode_indices(given[0], given[1], 100),
    error=PacketError,
)


def test_sums_of_gaps_that_overflow_64_bits_are_refused():
    dim = 2**50
    gaps = np.full(2**14, dim - 1)
    with pytest.raises(PacketError, match="beyond"):
        decode_indices(EncodedIndices(VARINT, 0, coding.encode_varints(gaps)), gaps.size, dim)
