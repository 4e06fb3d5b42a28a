"""Index coding: exact, never longer than a bitmap, near the entropy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hansa.compress import codes as coding
from hansa.compress.codes import BITMAP, RICE, VARINT, EncodedIndices, decode_indices, encode_indices
from hansa.compress.packet import PacketError


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 400), st.data())
def test_any_set_of_indices_comes_back_and_takes_no_more_than_a_bitmap(dim, data):
    chosen = np.array(sorted(data.draw(st.sets(st.integers(0, dim - 1), min_size=1))), np.int64)
    coded = encode_indices(chosen, dim)
    assert decode_indices(coded, chosen.size, dim).tolist() == chosen.tolist()
    assert len(coded.data) <= math.ceil(dim / 8)


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


@pytest.mark.parametrize(
    ("coded", "count", "complaint"),
    [
        (EncodedIndices(VARINT, 0, coding.encode_varints(np.array([90, 9]))), 2, "beyond"),
        (EncodedIndices(VARINT, 0, coding.encode_varints(np.array([2**40]))), 1, "beyond"),
        (EncodedIndices(RICE, 3, coding.encode_rice(np.array([60, 60]), 3)), 2, "beyond"),
        (EncodedIndices(RICE, 8, b"\x01\x00"), 1, "remainder bits"),
        (EncodedIndices(RICE, 255, b"\x01\x00"), 1, "remainder bits"),
        (EncodedIndices(3, 0, b"\x00"), 1, "unknown index code"),
        (EncodedIndices(BITMAP, 1, b"\x01" + b"\0" * 12), 1, "unknown index code"),
        (EncodedIndices(BITMAP, 0, b"\x01" + b"\0" * 11 + b"\x10"), 2, "padding"),
        (EncodedIndices(BITMAP, 0, b"\x03" + b"\0" * 12), 1, "marks 2"),
        (EncodedIndices(VARINT, 0, b"\x00" * 14), 14, "a bitmap would take 13"),
    ],
)
def test_bad_index_streams_for_a_vector_of_100_are_refused(coded, count, complaint):
    with pytest.raises(PacketError, match=complaint):
        decode_indices(coded, count, 100)


def test_sums_of_gaps_that_overflow_64_bits_are_refused():
    dim = 2**50
    gaps = np.full(2**14, dim - 1)
    with pytest.raises(PacketError, match="beyond"):
        decode_indices(EncodedIndices(VARINT, 0, coding.encode_varints(gaps)), gaps.size, dim)
