"""Asynchronous runs: the same bits on every engine, after a resume and in their synchronous limits; refusals."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch

import hansa
from contracts import five
from hansa import HansaError, aggregate, compress, local, pace, presets, sample
from hansa.engine import Pool, Serial
from hansa.engine.serial import Loopback
from hansa.runs.driver import Run
from mistakes import refused
from pace.lab import SIZES, table
from pace.lab import task as lines
from same_runs import assert_same_run

PROFILE = pace.devices(step_seconds=local.lognormal(1.0, 1.2), up_bandwidth=5e3, latency=0.3, jitter=0.4)


task = partial(five.task, 15, SIZES)
COMMON = {"local_lr": 0.05, "batch_size": 4, "participation": 0.6}
METHODS = {
    "fedasync": lambda: presets.fedasync(mu=0.1, **COMMON),
    "fedbuff": lambda: presets.fedbuff(size=2, concurrency=6, max_staleness=4, weights="samples", **COMMON),
    "fadas, top-k with error feedback": lambda: presets.fadas(size=2, compressor=compress.top_k(0.2), **COMMON),
    "ca2fl, sign, rows on disk": lambda: presets.ca2fl(
        size=3, compressor=compress.sign(), momentum_storage="disk", **COMMON
    ),
    "scaffold": lambda: presets.scaffold(**COMMON).with_pace(pace.buffered(2)),
    "fedavg, median": lambda: (
        presets.fedavg(**COMMON).on("model", aggregate=aggregate.median()).with_pace(pace.buffered(3, 5))
    ),
}


def run(method: hansa.Algorithm, rounds: int = 9, engine=Serial, **options) -> Run:
    options = {"profile": PROFILE, "seed": 2, "evaluate_every": 3, **options}
    return Run(method, task(), engine=engine, keep_params=True, **options).advance(rounds)


@pytest.mark.parametrize("name", METHODS)
def test_every_engine_gives_the_same_bits(name):
    alone = run(METHODS[name]())
    assert max(record["staleness_max"] for record in alone.history) > 0
    assert len({record["staleness"] for record in alone.history}) > 1
    assert_same_run(alone, run(METHODS[name](), engine=Loopback))
    assert_same_run(alone, run(METHODS[name](), engine=partial(Pool, workers=2, kind="thread")))


def test_a_profile_that_changed_is_not_resumed(tmp_path):
    method = presets.fedbuff(size=2, **COMMON)
    hansa.run(method, lines(), rounds=2, out=tmp_path / "run", profile=table(tmp_path), workers=1)
    (tmp_path / "devices.csv").write_text((tmp_path / "devices.csv").read_text().replace("9.0", "8.0"))
    changed = pace.device_table(str(tmp_path / "devices.csv"))
    with pytest.raises(HansaError, match="profile"):
        hansa.run(method, lines(), rounds=4, out=tmp_path / "run", profile=changed, workers=1)


EQUAL = {"local_lr": 0.05, "steps": 3, "batch_size": 4, "participation": 0.6}
LIMITS = {
    "the buffer is as large as the cohort": lambda m: m.with_pace(pace.buffered(1.0)),
    "nothing is too old then": lambda m: m.with_pace(pace.buffered(5, 5, max_staleness=0)),
    "an endless deadline": lambda m: m.with_pace(pace.deadline(math.inf)),
    "all that were selected count": lambda m: m.with_pace(pace.overselect(1.0)),
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", ["fedavg", "fedams", "scaffold", "fedcams", "fedaware"])
def test_synchronous_limits_are_the_synchronous_run(name, limit):
    method = presets.get(name, **EQUAL)
    plain = Run(method, task(), seed=2, keep_params=True).advance(6)
    limited = Run(LIMITS[limit](method), task(), seed=2, keep_params=True).advance(6)
    assert torch.equal(plain.trajectory, limited.trajectory)
    assert plain.store.digest() == limited.store.digest()
    assert plain.ledger.up_bytes == limited.ledger.up_bytes
    assert not any(record["lost"] for record in limited.history)


def test_an_infinite_deadline_with_a_profile_only_adds_time():
    method = presets.fedavg(**COMMON)
    plain = Run(method, task(), seed=2, keep_params=True).advance(4)
    timed = Run(method, task(), seed=2, keep_params=True, profile=PROFILE).advance(4)
    assert torch.equal(plain.trajectory, timed.trajectory)
    assert all(record["simulated_seconds"] > 0 for record in timed.history)


def test_time_of_equal_links_is_that_of_the_link_model():
    from hansa.rounds.ledger import LinkModel

    links = LinkModel(up_bandwidth=3e3, down_bandwidth=7e3, latency=0.2)
    method = presets.fedavg(**COMMON)
    run = Run(method, task(), seed=2).advance(0)
    run.ledger.links = links
    run.advance(3)
    devices = pace.devices(step_seconds=0.0, up_bandwidth=3e3, down_bandwidth=7e3, latency=0.2)
    timed = Run(method, task(), seed=2, profile=devices).advance(3)
    assert sum(record["simulated_seconds"] for record in timed.history) == pytest.approx(run.ledger.seconds, rel=1e-12)


def test_stragglers_are_dropped_and_keep_their_memory():
    method = presets.scaffold(**{**COMMON, "participation": 1.0})
    slow = Run(method.with_pace(pace.deadline(3.0)), task(), seed=2, profile=PROFILE).advance(3)
    late = {lost.client for _, lost in slow.dropped_clients}
    assert late
    assert {lost.reason for _, lost in slow.dropped_clients} == {"late"}
    always = late - {client for record in slow.history for client in record["clients"]}
    assert always
    assert all(not slow.store.read(client) for client in always)
    assert all(record["wasted_seconds"] > 0 for record in slow.history if record["lost"])
    assert all(record["simulated_seconds"] <= 3.0 for record in slow.history)


def test_refused_updates_leave_the_memory_of_their_clients():
    method = presets.fedbuff(size=1, concurrency=6, max_staleness=1, compressor=compress.sign(), **COMMON)
    found = Run(method, task(), seed=2, profile=PROFILE).advance(12)
    assert {lost.reason for _, lost in found.dropped_clients} == {"stale"}
    admitted = {client for record in found.history for client in record["clients"]}
    refused = {lost.client for _, lost in found.dropped_clients} - admitted
    assert refused
    assert all(not found.store.read(client) for client in refused)
    assert max(record["versions"] for record in found.history) <= 2, "older versions are of no use"


test_what_cannot_work_is_refused_with_the_reason = refused(
    (lambda: presets.fedcams(two_way=True).with_pace(pace.buffered(2)), "all clients share one replica"),
    (lambda: presets.cafga(clusters=2, reporters=1).with_pace(pace.buffered(1)), "finish together"),
    (lambda: presets.ha_fed(clusters=2, reporters=1).with_pace(pace.deadline(3.0)), "finish together"),
    (lambda: presets.feddyn().with_pace(pace.buffered(2)), "updates of one version only"),
    (lambda: presets.fedavg().with_pace("buffered"), "expected a pace"),
    (
        lambda: presets.fedavg().on("model", aggregate=aggregate.krum(1)).with_pace(pace.buffered(2)),
        "needs 4 updates|needs 5 updates|needs 3 updates",
    ),
    (lambda: pace.buffered(5, concurrency=4), "whole number >= 5"),
    (lambda: pace.buffered(0), "size=0"),
    (lambda: pace.buffered(1.5), "size <= 1"),
    (lambda: pace.buffered(2, max_staleness=-1), "max_staleness=-1"),
    (lambda: pace.deadline(0.0), "seconds > 0"),
    (lambda: pace.deadline(1.0, min_updates=0), "min_updates=0"),
    (lambda: pace.overselect(0.5), "factor >= 1"),
    (lambda: pace.devices(step_seconds=math.inf), "step_seconds >= 0"),
    (lambda: pace.devices(step_seconds=math.nan), "step_seconds >= 0"),
    (lambda: pace.devices(up_bandwidth=0.0), "up_bandwidth > 0"),
    (lambda: pace.devices(on_seconds=0.0, off_seconds=1.0), "on_seconds > 0"),
    (lambda: pace.devices(off_seconds=1.0), "on_seconds with it"),
    (lambda: pace.tiers([]), "at least one group"),
    (lambda: pace.tiers([pace.devices()], shares=[0.4]), "sum to 1"),
    (lambda: aggregate.polynomial(-1.0), "a=-1.0"),
    (lambda: aggregate.mixed_models(0.0), "alpha=0.0"),
    (lambda: presets.ca2fl(weights="samples"), "equal weights"),
    (lambda: hansa.server.delay_adaptive(rule="mine"), "'paper' or 'authors'"),
)


test_sizes_beyond_the_population_are_refused = refused(
    (lambda: presets.fedbuff(size=10, concurrency=10), "at most the population of 9 clients"),
    (lambda: presets.fedbuff(size=3, concurrency=12), "at most the population of 9 clients"),
    (lambda: presets.fedbuff(size=6, participation=0.3), "at most the 3 clients that the sampler selects"),
    (lambda: presets.fedbuff(size=6, sampler=sample.replay([[0, 1]])), "at most the 2 clients that the sampler"),
    (lambda: presets.fedavg(participation=0.5).with_pace(pace.deadline(1.0, min_updates=7)), "min_updates=7"),
    by=lambda method: Run(method(), task()).advance(1),
)


def test_a_profile_is_refused_where_clients_gossip():
    with pytest.raises(HansaError, match="peer_bandwidth"):
        Run(presets.cafga(clusters=2, reporters=1), task(), profile=PROFILE)
    with pytest.raises(HansaError, match="a device profile"):
        Run(presets.fedavg(), task(), profile=3.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "its columns are none: expected client"),
        ("client,step_seconds\n", "no row for client 0"),
        ("client,speed\n0,1\n", "columns are client, speed: expected"),
        ("client,step_seconds\n0,1\n0,2\n", "line 3: client '0'"),
        ("client,step_seconds\n0,\n", "line 2, column step_seconds: expected a number, got ''. Fill the hole"),
        ("client,step_seconds\n0,fast\n", "got 'fast'"),
        ("client,step_seconds\n0\n", "expected 2 cells"),
        ("client,step_seconds\n0,1,2\n", "expected 2 cells"),
        ("client,step_seconds\n-1,1\n", "client '-1'"),
        ("client,step_seconds\n0,inf\n", "step_seconds >= 0"),
        ("client,up_bandwidth\n0,0\n", "up_bandwidth > 0"),
        ("client,on_seconds,off_seconds\n0,0,5\n", "on_seconds > 0"),
        ("client,step_seconds\n0,1\n1,1\n", "no row for client 2"),
        ("client,step_seconds\n\xff", "not UTF-8"),
    ],
)
def test_tables_with_holes_are_refused_by_line(text: str, message: str, tmp_path: Path):
    path = tmp_path / "devices.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(HansaError, match=message):
        Run(presets.fedavg(), task(), profile=pace.device_table(str(path)))


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(HansaError, match="No such file"):
        pace.device_table(str(tmp_path / "absent.csv"))
