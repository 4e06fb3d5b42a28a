"""The short form of the decoder's fuzzing; ``make fuzz`` runs the long one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.fuzz_decode import DIM, check, corpus, mend, run
from hansa.compress import PacketError, decode


def test_three_thousand_damaged_packets_are_refused_or_are_proper_vectors() -> None:
    outcomes = run(3000, seed=1)
    assert outcomes["damaged refused"] > 1400
    assert outcomes["mended refused"] > 500
    assert outcomes["mended accepted"] > 50  # the checksum was mended: a packet of other, valid content


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data) -> None:
    with pytest.raises(PacketError):
        decode(data)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(corpus()), st.integers(24, 200), st.binary(min_size=1, max_size=40))
def test_bytes_laid_over_a_payload_with_a_mended_checksum_never_crash_the_decoder(packet, at, data) -> None:
    check(mend(packet[:at] + data + packet[at + len(data) :]), genuine=True, watched=True)


def test_the_corpus_itself_is_accepted() -> None:
    assert len({decode(packet, dim=DIM).dtype for packet in corpus()}) == 2
    assert all(check(packet, genuine=True) == "accepted" for packet in corpus())


def test_the_harness_notices_a_damaged_packet_that_is_accepted() -> None:
    with pytest.raises(AssertionError, match="damaged bytes were accepted"):
        check(corpus()[0], genuine=False)
