"""Messages that can travel: everything as bytes gives the bits of nothing as bytes, and a frame is read or refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import hansa
from contracts.five import task
from contracts.small import NAMES, small
from hansa import presets
from hansa.compress import grid, sign, top_k
from hansa.core.keys import Key
from hansa.engine import Loopback, Serial
from hansa.rounds import wire_format
from hansa.rounds.messages import Broadcast, DroppedClient, Report, WorkOrder
from hansa.runs.driver import Run
from same_runs import assert_same_run


def both(algorithm, rounds=4, **options):
    runs = [
        Run(algorithm, task(), engine=engine, evaluate_every=0, **options).advance(rounds)
        for engine in (Serial, Loopback)
    ]
    return runs


@pytest.mark.parametrize("name", NAMES)
def test_a_round_through_bytes_is_the_round_without(name):
    assert_same_run(*both(small(name, batch_size=3)))


@pytest.mark.parametrize("down", [sign(), top_k(0.3), grid(2.0)], ids=["sign", "top_k", "grid"])
def test_each_client_unpacks_what_it_missed(down):
    """At 40% a round clients are behind by different numbers of increments, and some are sent the whole replica."""
    algorithm = presets.fedcams(steps=2, batch_size=3, participation=0.4, compressor=sign(), two_way=down)
    assert_same_run(*both(algorithm, rounds=9))


def test_under_faults_too():
    plan = hansa.faults(before=0.1, after=0.1, nan=0.1, scaled=0.05, stale=0.05)
    for name in ("fedcams", "scaffold", "cafga"):
        assert_same_run(*both(small(name, batch_size=3), rounds=5, faults=plan, max_norm=1e3))


def test_mail_that_does_not_make_the_model_is_not_trained_on():
    algorithm, held = small("fedavg", batch_size=3), task()
    run = Run(algorithm, held)
    opened = hansa.rounds.open_round(run.algorithm, run.state, held.population, "run", Key(0))
    order = WorkOrder.from_bytes(opened.for_receiver(opened.orders[0]).to_bytes())
    shell = held.trainer(torch.float32, torch.device("cpu"))
    (good,) = hansa.rounds.client_round(run.algorithm, [order], shell, held.population)
    assert list(good.clients) == list(order.clients)
    other = {name: Broadcast.whole(made.vector + 1) for name, made in opened.broadcasts.items()}
    wrong = WorkOrder.from_bytes(replace(order, broadcasts=other).to_bytes())
    (bad,) = hansa.rounds.client_round(run.algorithm, [wrong], shell, held.population)
    assert not bad.clients
    assert {lost.reason for lost in bad.dropped} == {"base"}


def example_report() -> Report:
    packet = sign().encode(torch.tensor([1.0, -2.0]), Key(0))
    memory = {7: {"uplink/model/residual": torch.tensor([0.5, -0.25]), "n": torch.tensor([3])}}
    dropped, info = (DroppedClient(1, "lost", "before"),), {"consensus": math.inf, "x": math.nan}
    return Report("run", 3, b"\1\2", 2, [7], {"model": [packet]}, [0.1], memory, dropped, {7: 12}, 4, info)


def test_a_report_keeps_every_bit():
    sent = example_report()
    found = Report.from_bytes(sent.to_bytes())
    assert (found.cohort, found.dropped, found.peer_bytes, found.exchanges) == (2, sent.dropped, {7: 12}, 4)
    assert found.info["consensus"] == math.inf
    assert math.isnan(found.info["x"])
    assert (list(found.clients), found.losses) == ([7], [0.1])
    assert bytes(found.packets(0)["model"].bytes) == bytes(sent.packets(0)["model"].bytes)
    assert torch.equal(found.memory[7]["uplink/model/residual"], sent.memory[7]["uplink/model/residual"])
    assert found.memory[7]["n"].dtype == torch.int64
    assert found.to_bytes() == sent.to_bytes()


HEAD = wire_format.unpack(Report("r", 1, b"").to_bytes(), "report").head


@pytest.mark.parametrize(
    "head",
    [
        {},
        [],
        {**HEAD, "protocol": 0},
        {**HEAD, "cohort": "x"},
        {name: value for name, value in HEAD.items() if name != "losses"},
        {**HEAD, "clients": [1]},
        {**HEAD, "clients": [1], "losses": [0.5], "rows": {"model": []}},
        {**HEAD, "memory": {"1": {"a": ["float32", [10**12], 0]}}},
        {**HEAD, "memory": {"1": {"a": ["float32", [-1], 0]}}},
        {**HEAD, "memory": {"1": {"a": ["object", [1], 0]}}},
    ],
)
def test_a_well_sealed_frame_with_a_wrong_head_is_refused(head):
    with pytest.raises(wire_format.FrameError, match="frame: "):
        Report.from_bytes(wire_format.pack("report", head, [b"1234"]))


def test_a_frame_is_bounded_before_it_is_read():
    with pytest.raises(wire_format.FrameError, match="at most 10 are accepted"):
        Report.from_bytes(example_report().to_bytes(), limit=10)
    with pytest.raises(wire_format.FrameError, match="of kind b'order', expected 'report'"):
        Report.from_bytes(wire_format.pack("order", HEAD))
