"""Arrival order, staleness and versions agree with the reference simulator for random profiles and paces."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hansa
from hansa import Key, pace, presets
from hansa.core.types import Population
from hansa.pace.events import VirtualClock
from hansa.rounds import ServerState
from hansa.rounds.round import open_paced_round
from oracle import asynchronous as oracle
from pace.lab import Waves

RATES = st.sampled_from([0.25, 0.5, 1.0, 1.0, 2.0, 3.75, 16.0])


def clients_of(orders):
    return [client for order in orders for client in order.clients]


@st.composite
def cases(draw):
    clients = draw(st.integers(1, 12))
    concurrency = draw(st.integers(1, clients))
    size = draw(st.integers(1, concurrency))
    oldest = draw(st.none() | st.integers(0, 4))
    speeds = draw(st.lists(RATES, min_size=clients, max_size=clients))
    windows = draw(st.booleans())
    on = draw(st.lists(st.sampled_from([1.0, 2.5, 7.0]), min_size=clients, max_size=clients))
    off = draw(st.lists(st.sampled_from([0.0, 0.5, 11.0]), min_size=clients, max_size=clients))
    phase = draw(st.lists(st.sampled_from([0.0, 0.75, 3.0]), min_size=clients, max_size=clients))
    count = draw(st.integers(1, clients))
    if not windows:
        off = [0.0] * clients
    return clients, concurrency, size, oldest, speeds, on, off, phase, count, draw(st.integers(0, 99))


class Listed:
    """A profile from lists."""

    def __init__(self, speeds, on, off, phase) -> None:
        self.devices = [
            pace.Device(step_seconds=speed, on_seconds=length, off_seconds=pause, phase=start)
            for speed, length, pause, start in zip(speeds, on, off, phase, strict=True)
        ]

    def device(self, client, samples, key):
        return self.devices[client]


def started(method, clients: int) -> ServerState:
    return ServerState.start(method, {"model": torch.zeros(3, dtype=torch.float64)}, clients)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_arrivals_staleness_and_versions_agree_with_the_simulator(case):
    clients, concurrency, size, oldest, speeds, on, off, phase, count, seed = case
    sampler = hansa.sample.uniform(count=count)
    method = presets.fedbuff(size=size, concurrency=concurrency, max_staleness=oldest, sampler=sampler, steps=2)

    def opens(client: int, now: float) -> float:
        if not off[client]:
            return now
        period = on[client] + off[client]
        place = (now + phase[client]) % period
        return now if place < on[client] else now + (period - place)

    waves = Waves(sampler, clients, seed)
    events = oracle.simulate(clients, waves, lambda client, _: 2 * speeds[client], size, concurrency, oldest, opens)
    population, key = Population((1,) * clients), Key(seed)
    state, clock = started(method, clients), VirtualClock(Listed(speeds, on, off, phase), population.samples, key)
    for t in range(12):
        try:
            expected = next(events)
        except oracle.Stuck:
            with pytest.raises(hansa.HansaError, match="the clock stands still"):
                open_paced_round(method, state, population, "run", key, clock)
            return
        opened = open_paced_round(method, state, population, "run", key, clock)
        assert [(order.clients[0], order.round) for order in opened.orders] == expected.used
        assert [dropped.client for dropped in opened.dropped] == [client for client, _ in expected.refused]
        assert all(dropped.reason == "stale" for dropped in opened.dropped)
        assert math.isclose(opened.timing.end, expected.time, rel_tol=1e-12)
        assert sorted((job[1], job[2]) for job in opened.state.pace["jobs"]) == sorted(expected.in_flight)
        usable = {v for _, v in expected.in_flight if oldest is None or t + 1 - v <= oldest}
        assert {int(number) for number in opened.state.pace["versions"]} == usable, "each version in flight, once"
        state = replace(opened.state, round=t + 1, vectors={"model": torch.full((3,), t + 1.0, dtype=torch.float64)})
        for order in opened.orders:
            assert torch.equal(order.broadcasts["model"].packets[0].content, torch.full((3,), float(order.round)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(RATES, min_size=2, max_size=9), st.sampled_from([0.5, 1.0, 4.0, math.inf]), st.integers(1, 4))
def test_deadline_and_overselect_take_the_first(speeds, limit, least):
    clients = len(speeds)
    population, key = Population((1,) * clients), Key(0)
    clock = VirtualClock(Listed(speeds, [1.0] * clients, [0.0] * clients, [0.0] * clients), population.samples, key)
    least = min(least, clients)
    method = presets.fedavg(steps=1).with_pace(pace.deadline(limit, min_updates=least))
    opened = open_paced_round(method, started(method, clients), population, "run", key, clock)
    ranked = sorted(range(clients), key=lambda client: (speeds[client], client))
    counted = [client for place, client in enumerate(ranked) if speeds[client] <= limit or place < least]
    assert clients_of(opened.orders) == sorted(counted)
    assert [dropped.client for dropped in opened.dropped] == sorted(set(range(clients)) - set(counted))
    slowest = max(speeds[client] for client in counted)
    assert opened.timing.end == (max(speeds) if len(counted) == clients else max(limit, slowest))
    method = presets.fedavg(steps=1).with_pace(pace.overselect(1.5))
    opened = open_paced_round(method, started(method, clients), population, "run", key, clock)
    first = sorted(ranked[: math.ceil(clients / 1.5 - 1e-9)])
    assert clients_of(opened.orders) == first
    assert opened.timing.end == max(speeds[client] for client in first)


def test_jobs_that_take_no_time_still_make_steps():
    method = presets.fedasync(concurrency=2, steps=1, sampler=hansa.sample.uniform(count=2))
    state, population = started(method, 5), Population((1,) * 5)
    clock = VirtualClock(pace.devices(step_seconds=0.0), population.samples, Key(1))
    for t in range(20):
        opened = open_paced_round(method, state, population, "run", Key(1), clock)
        assert opened.timing.end == 0.0
        assert math.isnan(opened.timing.utilisation)
        state = replace(opened.state, round=t + 1)


def test_the_cost_of_a_step_does_not_depend_on_idle_clients(monkeypatch):
    """The devices and work of idle clients are never looked at."""
    population = Population((1,) * 50_000)
    method = presets.fedbuff(size=4, concurrency=10, steps=1, sampler=hansa.sample.uniform(count=10))
    looked: list[int] = []
    profile = pace.devices(step_seconds=hansa.local.lognormal(1.0))
    original = type(profile).device

    def device(self, client, samples, key):
        looked.append(client)
        return original(self, client, samples, key)

    monkeypatch.setattr(pace.devices, "device", device)
    clock, state = VirtualClock(profile, population.samples, Key(0)), started(method, population.count)
    for t in range(10):
        opened = open_paced_round(method, state, population, "run", Key(0), clock)
        state = replace(opened.state, round=t + 1)
    assert len(looked) <= 10 + 4 * 10


def test_a_sampler_that_selects_too_few_clients_ends_with_the_reason():
    method = presets.fedbuff(size=3, concurrency=3, steps=1, sampler=hansa.sample.replay([[0, 1]]))
    task = hansa.training.quadratic(torch.eye(2).expand(5, 2, 2), torch.ones(5, 2))
    with pytest.raises(hansa.HansaError, match=r"the clock stands still at 1 s: 2 of 3 updates have arrived"):
        hansa.run(method, task, rounds=2)
