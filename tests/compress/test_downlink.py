"""Two-way compression: one public replica, whoever takes part and whatever gets lost."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hansa.compress import (
    Packet,
    PacketError,
    cast,
    direct,
    grid,
    identity,
    quantize,
    random_k,
    replica,
    sign,
    top_k,
)
from hansa.core.errors import HansaError
from hansa.core.keys import Key

DIM, CLIENTS = 200, 6


@pytest.mark.parametrize("link", [direct(), replica(sign())], ids=repr)
def test_the_sizes_of_many_messages_are_those_of_each(link):
    state, key = link.init(torch.zeros(DIM)), Key(0)
    sent, state = link.broadcast(torch.ones(DIM), state, [0, 1, 2], 0, key)
    sent, state = link.broadcast(2 * torch.ones(DIM), link.acknowledge(state, [0, 2], 0), [0, 1, 3], 1, key)
    assert sent.sizes([0, 1, 3]) == {client: sent.nbytes(client) for client in (0, 1, 3)}
    assert sent.sizes([]) == {}
    with pytest.raises(HansaError, match=r"client=9\)"):
        sent.sizes([0, 9])


COMPRESSORS = [identity(), cast(), sign(), top_k(1 / 8), top_k(1 / 16, sign()), random_k(1 / 4), quantize(3)]
COMPRESSORS += [grid(), grid(5.0)]
DOWNLINKS = [direct(), *(replica(c, public_start=known) for c in COMPRESSORS for known in (True, False))]
contract = pytest.mark.parametrize("downlink", DOWNLINKS, ids=repr)
START = torch.from_numpy(np.random.default_rng(0).standard_normal(DIM)).float()

rounds_of = st.lists(
    st.tuples(st.sets(st.integers(0, CLIENTS - 1), min_size=1), st.sets(st.integers(0, CLIENTS - 1)), st.booleans()),
    min_size=1,
    max_size=25,
)


class Client:
    """A real client: it holds what it made of the bytes that reached it, and knows which version that is.

    Of a merged message it cannot drop what it has applied, so it also keeps what it held before the last message.
    """

    def __init__(self, start: torch.Tensor | None) -> None:
        self.held, self.version = start, 0
        self.before = (start, 0)

    def read(self, downlink, broadcast, client: int, version: int) -> torch.Tensor:
        packets = [Packet.parse(bytes(packet.bytes)) for packet in broadcast.packets(client)]
        base, held = broadcast.bases[client], (self.held, self.version)
        if base is not None and isinstance(downlink.compressor, grid):
            held = held if base == self.version else self.before
            assert held[1] == base
        elif base is not None:
            packets = packets[self.version - base :]
        self.held, self.version, self.before = downlink.apply(held[0], packets), version, held
        return self.held


@contract
@settings(deadline=None, max_examples=15)
@given(rounds_of)
def test_all_participants_hold_the_identical_vector_whoever_took_part_before(downlink, rounds) -> None:
    """Clients come and go; some get a round's message but their report is lost; sometimes the model stands still."""
    draw = np.random.default_rng(1)
    x, state = START, downlink.init(START)
    known = isinstance(downlink, replica) and downlink.public_start
    clients = [Client(START if known else None) for _ in range(CLIENTS)]
    for number, (chosen, silent, still) in enumerate(rounds):
        if not still:
            x = x + 0.1 * torch.from_numpy(draw.standard_normal(DIM)).float()
        frozen = tree(state)
        broadcast, after = downlink.broadcast(x, state, sorted(chosen), number, Key(number))
        assert tree(state) == frozen
        state = after
        for client in chosen:
            held = clients[client].read(downlink, broadcast, client, state.get("version", 0))
            assert torch.equal(held, broadcast.vector)
            assert broadcast.nbytes(client) == sum(len(p.bytes) for p in broadcast.packets(client))
        state = downlink.acknowledge(state, sorted(chosen - silent), number)


def tree(state: dict) -> str:
    """A state as text, to see that it did not change and is nothing but plain data."""
    return json.dumps(state, default=lambda tensor: tensor.tolist(), sort_keys=True)


def test_the_replica_by_hand() -> None:
    """top-1 of two entries: q_t = C(x_t - xhat_{t-1}); what was not sent waits in the difference."""
    link = replica(top_k(0.5))
    state = link.init(torch.zeros(2))
    seen = []
    for number, x in enumerate(([3.0, 2.0], [3.0, 2.0], [5.0, 2.0])):
        broadcast, state = link.broadcast(torch.tensor(x), state, [0], number, Key(0))
        seen.append(broadcast.vector.tolist())
    assert seen == [[3, 0], [3, 2], [5, 2]]


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_the_replica_comes_arbitrarily_near_a_model_that_stands_still(compressor) -> None:
    link = replica(compressor)
    state = link.init(torch.zeros(DIM))
    for number in range(400):
        broadcast, state = link.broadcast(START, state, [], number, Key(number))
    assert float((broadcast.vector - START).norm()) < 1e-3 * float(START.norm())


def walk(link, rounds: int, report: list[list[int]] | None = None):
    x, state = START, link.init(START)
    draw = np.random.default_rng(3)
    for number in range(rounds):
        x = x + torch.from_numpy(draw.standard_normal(DIM)).float()
        _, state = link.broadcast(x, state, range(CLIENTS), number, Key(number))
        state = link.acknowledge(state, report[number] if report else [], number)
    return x, state


def test_a_client_is_sent_the_increments_it_missed_or_the_whole_whichever_is_shorter() -> None:
    """Sign packets of 200 entries take 24 + 4 + 25 = 53 bytes, the whole replica 824: fifteen of them are worth it."""
    link = replica(sign())
    report = [[] for _ in range(20)]
    report[19], report[9], report[5], report[4], report[3] = [0], [1], [2], [3], [4]
    x, state = walk(link, 20, report)
    broadcast, after = link.broadcast(x + 1, state, range(CLIENTS), 20, Key(0))
    assert [broadcast.nbytes(client) for client in range(CLIENTS)] == [53, 11 * 53, 15 * 53, 824, 824, 824]
    assert [len(broadcast.packets(client)) for client in range(3)] == [1, 11, 15]
    assert [p.kind for p in broadcast.packets(3)] == ["whole"]
    assert len(after["log"]) == 15
    assert after["held"] == {"0": 20, "1": 10, "2": 6}


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 60))
def test_the_server_keeps_no_more_increments_than_are_worth_sending(rounds) -> None:
    link = replica(top_k(1 / 8))
    _, state = walk(link, rounds)
    kept = sum(len(entry) for entry in state["log"])
    assert kept < 24 + 4 * DIM
    if len(state["log"]) < rounds:
        assert kept + 24 + 11 + 25 * 5 + 25 >= 24 + 4 * DIM


def test_a_known_start_costs_nothing_and_an_unknown_one_the_whole() -> None:
    for known, cost in ((True, 0), (False, 824)):
        link = replica(sign(), public_start=known)
        broadcast, state = link.broadcast(START, link.init(START), [0, 1], 0, Key(0))
        assert [broadcast.nbytes(0), broadcast.nbytes(1)] == [cost, cost]
        assert torch.equal(broadcast.vector, START)
        state = link.acknowledge(state, [0], 0)
        broadcast, _ = link.broadcast(START, state, [0, 1], 1, Key(1))
        assert [broadcast.nbytes(0), broadcast.nbytes(1)] == [0, cost]


def test_a_compressor_that_saves_nothing_sends_the_whole() -> None:
    link = replica(identity())
    broadcast, state = link.broadcast(START + 1, link.init(START), [0], 0, Key(0))
    assert [packet.kind for packet in broadcast.packets(0)] == ["whole"]
    assert state["log"] == []
    assert broadcast.nbytes(0) == 824


def test_misuse_is_refused_with_a_reason() -> None:
    link = replica(sign())
    state = link.init(START)
    broadcast, after = link.broadcast(START + 1, state, [0], 7, Key(0))
    with pytest.raises(HansaError, match="last broadcast was of round 7"):
        link.acknowledge(after, [0], 6)
    with pytest.raises(HansaError, match="not among the round's clients"):
        broadcast.packets(3)
    with pytest.raises(HansaError, match="from another model"):
        link.broadcast(START[:-1], state, [0], 0, Key(0))
    with pytest.raises(HansaError, match="NaN"):
        link.broadcast(START * float("nan"), state, [0], 0, Key(0))
    with pytest.raises(PacketError, match="no replica is held"):
        link.apply(None, broadcast.packets(0))
    with pytest.raises(PacketError, match="kind top_k, expected sign"):
        link.apply(START, [top_k(0.5).encode(START, Key(0))])
    with pytest.raises(PacketError, match="dim"):
        link.apply(START[:-1], broadcast.packets(0))
    with pytest.raises(PacketError, match="follow the whole"):
        link.apply(None, [Packet.of(START, "whole"), *broadcast.packets(0)])
    with pytest.raises(PacketError, match="expected one"):
        direct().apply(None, [])
