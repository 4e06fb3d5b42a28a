"""Uplinks: nothing is lost, nothing is changed before it is accepted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hansa.compress import (
    PacketError,
    cast,
    decode,
    direct,
    error_feedback,
    identity,
    quantize,
    random_k,
    sign,
    top_k,
)
from hansa.core.errors import HansaError
from hansa.core.keys import Key

COMPRESSORS = [identity(), cast(), sign(), top_k(1 / 8), top_k(1 / 4, sign()), random_k(1 / 4), quantize(16)]
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


def test_error_feedback_by_hand_over_three_rounds() -> None:
    """top-1 of 2 entries, residual carried, one round missed: the numbers of Alg. 2 worked out on paper."""
    link = error_feedback(top_k(0.5))
    x = torch.tensor([3.0, 2.0])
    sent, memory = [], {}
    for _ in range(3):
        packet, memory = link.send(x, memory, Key(0))
        sent.append(decode(packet).tolist())
    assert sent == [[3, 0], [0, 4], [6, 0]]
    assert memory["residual"].tolist() == [0, 2]


@pytest.mark.parametrize("make", [lambda x: x.float(), lambda x: x[:-1]])
def test_a_residual_of_another_model_is_refused(make) -> None:
    x, residual = updates(2, 40)
    with pytest.raises(HansaError, match="from another model"):
        error_feedback(sign()).send(x, {"residual": make(residual)}, Key(0))


def test_the_server_accepts_only_what_its_own_compressor_could_have_sent() -> None:
    (x,) = updates(1, 640)
    link = error_feedback(top_k(1 / 64))
    for sender, complaint in (
        (sign(), "kind sign, expected top_k"),
        (top_k(1 / 4), "takes at most"),
        (identity(), "kind identity, expected top_k"),
    ):
        with pytest.raises(PacketError, match=complaint):
            link.receive(sender.encode(x, Key(0)), dim=640, dtype=torch.float64)
    with pytest.raises(PacketError, match="dim 640, expected 641"):
        link.receive(top_k(1 / 64).encode(x, Key(0)), dim=641, dtype=torch.float64)
    with pytest.raises(PacketError, match="kind sign, expected identity"):
        direct().receive(sign().encode(x, Key(0)), dim=640, dtype=torch.float64)


def test_direct_moves_no_bytes_until_they_are_asked_for() -> None:
    (x,) = updates(1, 97)
    packet, _ = direct().send(x, {}, Key(0))
    assert direct().receive(packet, dim=97, dtype=torch.float64).data_ptr() == x.data_ptr()
    assert packet.nbytes == 24 + 97 * 8
