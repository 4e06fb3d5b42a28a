"""Uplinks and downlinks: nothing is lost, nothing changes before it is accepted, and one public replica for all."""

from __future__ import annotations

from typing import Any

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
    error_feedback,
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
from mistakes import refused

COMPRESSORS = [identity(), cast(), sign(), top_k(1 / 8), top_k(1 / 16, sign()), random_k(1 / 4), quantize(3)]
COMPRESSORS += [grid(), grid(5.0)]
remembering = pytest.mark.parametrize("link", list(map(error_feedback, COMPRESSORS)), ids=repr)


def updates(count: int, dim: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    draw = np.random.default_rng(11)
    return [torch.from_numpy(draw.standard_normal(dim)).to(dtype) for _ in range(count)]


@remembering
@settings(deadline=None, max_examples=20)
@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_refused_uploads_leave_the_residual_as_it_was(link, fates) -> None:
    memory: dict[str, torch.Tensor] = {}
    accepted = torch.zeros(40, dtype=torch.float64)
    produced = torch.zeros(40, dtype=torch.float64)
    for i, (arrives, x) in enumerate(zip(fates, updates(len(fates), 40), strict=True)):
        before = {name: row.clone() for name, row in memory.items()}
        packet, after = link.send(x, memory, Key(i))
        damaged = bytearray(packet.bytes)
        damaged[-1] ^= not arrives
        try:
            got = link.receive(type(packet).parse(damaged), dim=40, dtype=torch.float64)
        except PacketError:
            assert not arrives
            assert memory.keys() == before.keys()
            assert all(torch.equal(memory[name], before[name]) for name in memory)
        else:
            assert arrives
            memory, accepted, produced = after, accepted + got, produced + x
    torch.testing.assert_close(accepted + memory.get("residual", 0 * produced), produced, rtol=0, atol=1e-12)


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


START = torch.from_numpy(np.random.default_rng(0).standard_normal(DIM)).float()


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


LINK, REPLICA, (LARGE, RESIDUAL) = error_feedback(top_k(1 / 64)), replica(sign()), updates(2, 640)
SENT, AFTER = REPLICA.broadcast(START + 1, REPLICA.init(START), [0], 7, Key(0))

test_misuse_is_refused_with_a_reason = refused(
    (lambda: LINK.send(LARGE, {"residual": RESIDUAL.float()}, Key(0)), "from another model"),
    (lambda: LINK.send(LARGE, {"residual": RESIDUAL[:-1]}, Key(0)), "from another model"),
    (lambda: REPLICA.acknowledge(AFTER, [0], 6), "last broadcast was of round 7"),
    (lambda: SENT.packets(3), "not among the round's clients"),
    (lambda: REPLICA.broadcast(START[:-1], REPLICA.init(START), [0], 0, Key(0)), "from another model"),
    (lambda: REPLICA.broadcast(START * float("nan"), REPLICA.init(START), [0], 0, Key(0)), "NaN"),
)


def receive(link: Any, sender: Any, dim: int = 640) -> torch.Tensor:
    return link.receive(sender.encode(LARGE, Key(0)), dim=dim, dtype=torch.float64)


test_only_what_the_other_end_could_have_sent_is_accepted = refused(
    (lambda: receive(LINK, sign()), "kind sign, expected top_k"),
    (lambda: receive(LINK, top_k(1 / 4)), "takes at most"),
    (lambda: receive(LINK, identity()), "kind identity, expected top_k"),
    (lambda: receive(LINK, top_k(1 / 64), dim=641), "dim 640, expected 641"),
    (lambda: receive(direct(), sign()), "kind sign, expected identity"),
    (lambda: REPLICA.apply(None, SENT.packets(0)), "no replica is held"),
    (lambda: REPLICA.apply(START, [top_k(0.5).encode(START, Key(0))]), "kind top_k, expected sign"),
    (lambda: REPLICA.apply(START[:-1], SENT.packets(0)), "dim"),
    (lambda: REPLICA.apply(None, [Packet.of(START, "whole"), *SENT.packets(0)]), "follow the whole"),
    (lambda: direct().apply(None, []), "expected one"),
    error=PacketError,
)
