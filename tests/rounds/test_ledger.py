"""The ledger against a published table, and its arithmetic against numbers worked out by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from hansa.compress import decode, sign, top_k
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.rounds.ledger import Ledger, LinkModel, afga
from hansa.rounds.measures import gamma, q

HOURS = [  # [AFGA] Table 1 (rounds to 78%, setting 1) and Table 7 (hours): 5 participants, 24 local iterations
    ("FedAMSGrad", 388, 0, 194.0),
    ("AFGA", 302, 24, 223.48),
    ("CAFGA", 233, 24, 172.42),
]


@pytest.mark.parametrize(("name", "rounds", "gossip", "hours"), HOURS)
def test_the_afga_constants_give_the_published_hours(name, rounds, gossip, hours) -> None:
    ledger = Ledger(links=afga(messages=20))
    for number in range(rounds):
        sent = dict.fromkeys(range(5), 44_000_000)
        ledger.record(number, up=sent, down=sent, peer={0: 10}, exchanges=gossip)
    assert round(ledger.seconds / 3600, 2) == hours


def test_time_waits_for_the_slowest_participant_and_the_busiest_peer() -> None:
    links = LinkModel(up_bandwidth=10, down_bandwidth=100, latency=1, peer_bandwidth=50, peer_latency=0.5)
    up, down = {1: 100, 2: 20}, {1: 100, 2: 1500, 3: 100}
    assert links.seconds(up, down) == max(1 + 1 + 10, 1 + 15 + 2, 1 + 1)
    assert links.seconds(up, down, {1: 500, 9: 1000}, exchanges=4) == 18 + 4 * 0.5 + 20
    assert links.seconds({}, {}) == 0
    serial = LinkModel(up_bandwidth=10, down_bandwidth=100, latency=1, serial=True)
    assert serial.seconds(up, down) == 12 + 18 + 2


def test_totals_are_the_sums_of_the_rounds() -> None:
    ledger = Ledger(links=LinkModel(latency=2.0))
    ledger.record(1, up={0: 1, 1: 2}, down={0: 10, 1: 20, 2: 30})
    entry = ledger.record(2, up={3: 4}, down={3: 40}, peer={3: 7, 4: 8})
    assert (ledger.up_bytes, ledger.down_bytes, ledger.peer_bytes, ledger.seconds) == (7, 100, 15, 4.0)
    assert (entry.round, entry.up_bytes, entry.down_bytes, entry.peer_bytes, entry.seconds) == (2, 4, 40, 15, 2.0)


def test_the_ledger_goes_through_json_and_on() -> None:
    one = Ledger(links=LinkModel(latency=2.0))
    one.record(1, up={0: 1}, down={0: 10}, peer={0: 7})
    two = Ledger.restore(json.loads(json.dumps(one.state())), links=one.links)
    for ledger in (one, two):
        ledger.record(2, up={0: 3}, down={0: 5})
    assert one == two


def test_its_state_stays_small_and_its_totals_exact_however_many_rounds() -> None:
    links = LinkModel(up_bandwidth=7.0, latency=0.1)
    ledger, seconds, sizes = Ledger(links=links), [], []
    for round in range(1, 2001):
        found = ledger.record(round, up={0: round, 3: 10**12 + round}, down={0: 3}, peer={1: round}).seconds
        assert found is not None
        seconds.append(found)
        sizes.append(len(json.dumps(ledger.state())))
    assert max(sizes) < 600
    assert (ledger.up_bytes, ledger.peer_bytes) == (2000 * 10**12 + 2000 * 2001, 1000 * 2001)
    assert ledger.seconds == math.fsum(seconds)


def test_time_without_a_link_model_is_an_error() -> None:
    ledger = Ledger()
    assert ledger.record(1, up={0: 1}, down={}).seconds is None
    with pytest.raises(HansaError, match="no link model"):
        _ = ledger.seconds


@pytest.mark.parametrize(
    "wrong", [{"up_bandwidth": 0}, {"down_bandwidth": -1}, {"peer_bandwidth": math.nan}, {"latency": -1}]
)
def test_impossible_links_are_refused(wrong) -> None:
    with pytest.raises(HansaError, match=next(iter(wrong))):
        LinkModel(**wrong)


def test_q_of_a_round_is_below_the_compressors_contraction() -> None:
    x = torch.from_numpy(np.random.default_rng(1).standard_normal(640))
    assert q(x, decode(sign().encode(x, Key(0)))) == pytest.approx(sign.q(x), rel=1e-12)
    assert 0 < q(x, decode(top_k(1 / 64).encode(x, Key(0)))) <= math.sqrt(1 - 1 / 64)
    assert q(torch.zeros(3), torch.zeros(3)) == 0


def test_gamma_of_nothing() -> None:
    zero, one = torch.zeros(2), torch.tensor([1.0, -1.0])
    assert gamma(sign(), [zero], [None], Key(0)) == 0
    assert gamma(top_k(0.5), [one, -one], [torch.tensor([0.0, 5.0]), None], Key(0)) == math.inf
    with pytest.raises(HansaError, match="expected one residual per update"):
        gamma(sign(), [one], [], Key(0))
