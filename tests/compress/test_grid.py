"""Increments on a grid: coded near their entropy, summed without rounding, merged into one packet."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hansa.compress import Packet, PacketError, accumulate, decode, grid, replica, top_k
from hansa.compress import codes as coding
from hansa.compress.grid import finest_exponent, round_to_grid
from hansa.core.errors import HansaError
from hansa.core.keys import Key

KEY = Key(2)
relaxed = settings(deadline=None, max_examples=60)


@pytest.mark.parametrize("spread", [0.2, 0.5, 1.0, 4.0, 300.0])
@pytest.mark.parametrize("kind", ["normal", "laplace"])
def test_numbers_take_at_most_a_tenth_more_than_their_entropy(spread, kind) -> None:
    array = np.rint(getattr(np.random.default_rng(0), kind)(0, spread, 100_000)).astype(np.int64)
    _, counts = np.unique(array, return_counts=True)
    entropy = -(counts * np.log2(counts / array.size)).sum()
    assert 8 * len(coding.encode_integers(array)) <= 1.1 * entropy


@relaxed
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60), st.floats(0.01, 20), st.sampled_from([32, 64])
)
def test_the_step_is_a_power_of_two_below_the_coarseness_and_the_largest_entry(values, coarseness, width) -> None:
    x = np.array(values, np.float32 if width == 32 else np.float64)
    if np.abs(x).max() < 1e-15:
        return
    rms = math.sqrt(math.fsum(float(v) ** 2 for v in x) / x.size)
    bound = min(coarseness * rms, float(np.abs(x).max()))
    delta = 2.0 ** math.floor(math.log2(bound) + 1e-12)
    y = decode(grid(coarseness).encode(torch.from_numpy(x), KEY)).numpy().astype(np.float64)
    nearby = {delta, delta / 2}  # a rounded root mean square may fall on the other side of a power of two
    assert any(np.array_equal(y, np.rint(x.astype(np.float64) / step) * step) for step in nearby)


def test_entries_below_the_last_bit_of_the_largest_are_within_the_promised_contraction() -> None:
    x = torch.full((100_000,), 0.5 * 2.0**-24)
    x[0] = 1.0
    y = decode(grid(1e-9).encode(x, KEY))
    assert 0 < float((y - x).double().norm()) <= grid(1e-9).contraction(x.numel()) * float(x.double().norm())


def test_the_largest_numbers_do_not_overflow() -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.full((5,), torch.finfo(dtype).max, dtype=dtype)
        y = decode(grid(4.0).encode(x, KEY))
        assert bool(torch.isfinite(y).all())
        assert bool((y >= x / 2).all())
        tiny = torch.full((5,), 1e-44 if dtype == torch.float32 else 5e-324, dtype=dtype)
        assert torch.equal(decode(grid(0.1).encode(tiny, KEY)), tiny)


@relaxed
@given(st.data(), st.sampled_from([torch.float32, torch.float64]))
def test_one_merged_packet_equals_all_of_them_one_after_the_other(data, dtype) -> None:
    """On a settled vector no sum is rounded, so every way to split a run of increments ends at the same bits."""
    dim = data.draw(st.integers(1, 50))
    draw = np.random.default_rng(data.draw(st.integers(0, 1000)))
    finest = finest_exponent(10.0, dtype)
    start = round_to_grid(torch.from_numpy(draw.uniform(-10, 10, dim)).to(dtype), finest)
    scales = data.draw(st.lists(st.sampled_from([1e-7, 1e-3, 0.1, 1.0]), min_size=1, max_size=8))
    coder = grid(data.draw(st.sampled_from([0.01, 1.0, 4.0])))
    packets = [
        coder.encode_above(torch.from_numpy(draw.standard_normal(dim) * scale).to(dtype), finest) for scale in scales
    ]
    expected = start.clone()
    for packet in packets:
        accumulate(packet, expected)
    cut = data.draw(st.integers(0, len(packets)))
    parts = [part for part in (packets[:cut], packets[cut:]) if part]
    found = start.clone()
    for part in parts:
        accumulate(Packet.parse(bytes(coder.merge(part).bytes)), found)
    assert torch.equal(found, expected)
    exact = sum((decode(packet).double() for packet in packets), start.double())
    assert torch.equal(expected.double(), exact)
    latest = coder.merge_latest(packets, range(1, len(packets) + 1))
    for n, packet in latest.items():
        assert packet.bytes == coder.merge(packets[len(packets) - n :]).bytes
        assert coder.finest(packet) == finest


def test_sums_that_no_float_holds_are_refused_and_so_are_other_packets() -> None:
    coder = grid(1.0)
    far = [coder.encode(torch.tensor([scale, scale]), KEY) for scale in (1e20, 1.0)]
    with pytest.raises(HansaError, match="more than 24 bits"):
        coder.merge(far)
    with pytest.raises(HansaError, match="counts from 1 to 0"):
        coder.merge([])
    with pytest.raises(PacketError, match="kind top_k, expected grid"):
        coder.merge([top_k(0.5).encode(torch.ones(2), KEY)] * 2)


def run(link: replica, rounds: int, growth: float, absent: int):
    """Client 0 is there in every round, client 1 in every ``absent``-th; both apply real bytes."""
    draw = np.random.default_rng(5)
    x = torch.from_numpy(draw.standard_normal(3000)).float()
    state, held, sizes = link.init(x), {0: x, 1: x}, []
    for number in range(rounds):
        x = x * growth + 0.02 * torch.from_numpy(draw.standard_normal(3000)).float()
        clients = [0, 1] if number % absent == absent - 1 else [0]
        broadcast, state = link.broadcast(x, state, clients, number, Key(number))
        state = link.acknowledge(state, clients, number)
        for client in clients:
            packets = [Packet.parse(bytes(packet.bytes)) for packet in broadcast.packets(client)]
            assert len(packets) == 1
            held[client] = link.apply(held[client], packets)
            assert torch.equal(held[client], broadcast.vector)
        sizes.append((packets[0].kind, broadcast.nbytes(clients[-1]), broadcast.nbytes(0)))
    return x, broadcast.vector, sizes


def test_a_client_that_was_away_hears_one_packet_shorter_than_what_it_missed() -> None:
    _, _, sizes = run(replica(grid(3.0)), 60, 1.0, 10)
    for number in range(9, 60, 10):
        kind, merged, _ = sizes[number]
        missed = sum(size for _, _, size in sizes[number - 9 : number + 1])
        assert kind == "grid"
        assert merged < 0.6 * missed
        assert merged < 24 + 4 * 3000


def test_a_replica_that_outgrows_its_grid_moves_to_a_coarser_one() -> None:
    """Doubling in every round: the three bits of room last a few rounds, then everyone is sent the whole replica."""
    x, vector, sizes = run(replica(grid(0.1)), 24, 2.0, 1)
    kinds = [kind for kind, _, _ in sizes]
    assert 2 <= kinds.count("whole") <= 24 // 2
    assert "grid" in kinds
    assert float((vector - x).norm()) < 0.06 * float(x.norm())


def test_nothing_is_sent_once_the_replica_is_as_near_as_its_grid_allows() -> None:
    link = replica(grid())
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(500)).float()
    state = link.init(torch.zeros(500))
    for number in itertools.count():
        broadcast, state = link.broadcast(x, state, [0], number, Key(number))
        state = link.acknowledge(state, [0], number)
        if not broadcast.packets(0):
            break
        assert number < 200
    assert float((broadcast.vector - x).abs().max()) <= 2.0 ** state["grain"] / 2


def test_each_block_gets_the_code_that_suits_it() -> None:
    draw = np.random.default_rng(1)
    dense, sparse = (
        draw.integers(-3, 4, coding.BLOCK),
        (draw.random(coding.BLOCK) < 0.01).astype(np.int64),
    )
    both = np.concatenate([dense, sparse])
    assert len(coding.encode_integers(both)) == sum(len(coding.encode_integers(part)) for part in (dense, sparse))
    assert np.array_equal(coding.decode_integers(memoryview(coding.encode_integers(both)), both.size, 24), both)
