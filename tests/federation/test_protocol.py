"""The protocol over a transport that misbehaves: equal to the serial engine, or honest about who was lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import hansa
from contracts.small import NAMES, small
from federation.inprocess import Wire
from hansa import presets
from hansa.compress import grid, sign
from hansa.engine import Serial
from hansa.errors import HansaError
from hansa.federation import DiskVersions, Federation, RamVersions, RoundOrders, RoundReports, Site, Stamp
from hansa.rounds.messages import Report
from hansa.runs.driver import Run

SIZES = (4, 17, 9, 23, 12)
SITES = {"north": (0, 2, 4), "south": (1, 3)}
CLUSTERS = [[0, 2, 4], [1, 3]]
GOSSIP = {"ha_fed", "cafga"}
ONE_CLUSTER = {name for name in NAMES if name in ("afga", "dsgd", "choco_sgd", "gossip_pga", "dadam", "d_amsgrad")}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


def task():
    draw = torch.Generator().manual_seed(0)
    owners = [client for client, size in enumerate(SIZES) for _ in range(size)]
    inputs = torch.randn(sum(SIZES), 6, generator=draw)
    held = hansa.data.from_arrays(inputs, torch.randint(3, (sum(SIZES),), generator=draw), clients=owners)
    return hansa.Task(Net, nn.functional.cross_entropy, held)


def method(name):
    words = {"batch_size": 3}
    if name in GOSSIP:
        words["clusters"] = CLUSTERS
    return small(name, **words)


def serial(algorithm, rounds=3):
    return Run(algorithm, task(), engine=Serial, evaluate_every=0).advance(rounds)


def federated(algorithm, rounds=3, plan=None, sites=None, attempts=60, folder=None, store=None, wire=None):
    """The same run over the protocol; the engine, the wire and the run."""
    held = task()
    places = SITES if sites is None else sites
    bound = Run(algorithm, held).algorithm
    kept = {name: RamVersions() for name in places}

    def build(name: str) -> Site:
        versions = kept[name] if folder is None else DiskVersions(folder / name)
        return Site(bound, held, places[name], versions=versions)

    wire = Wire(build) if wire is None else wire
    if plan is not None:
        wire.plan = plan
    engines = []

    def engine(*parts):
        engines.append(Federation(*parts, transport=wire, sites=places, attempts=attempts))
        return engines[-1]

    run = Run(algorithm, held, engine=engine, evaluate_every=0, store=store).advance(rounds)
    return run, engines[-1], wire


def same(run, expected):
    for name, vector in expected.state.vectors.items():
        assert torch.equal(run.state.vectors[name], vector), name
    for a, b in zip(run.history, expected.history, strict=True):
        assert repr({**a, "seconds": 0}) == repr({**b, "seconds": 0})


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_over_sites_is_the_serial_run(name):
    sites = {"all": range(5)} if name in ONE_CLUSTER else SITES
    run, engine, _ = federated(method(name), sites=sites)
    same(run, serial(method(name)))
    assert not engine.refusals.counts


TROUBLED = {
    "fedavg": presets.fedavg(steps=2, batch_size=3, participation=0.6),
    "two-way fedcams": presets.fedcams(steps=2, batch_size=3, participation=0.6, compressor=sign(), two_way=True),
    "lattice": presets.fedcams(steps=2, batch_size=3, participation=0.6, compressor=sign(), two_way=grid(2.0)),
    "scaffold": presets.scaffold(steps=2, batch_size=3, participation=0.6),
    "feddyn": presets.feddyn(steps=2, batch_size=3, participation=0.6),
    "cafga": presets.cafga(steps=2, batch_size=3, clusters=CLUSTERS, compressor=sign()),
    "fedaware": presets.fedaware(steps=2, batch_size=3, participation=0.6),
}
EXPECTED = {}


@pytest.mark.parametrize("name", TROUBLED)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_lost_doubled_delayed_damaged_frames_and_crashed_sites_change_nothing(name, data, tmp_path_factory):
    words = data.draw(st.lists(st.sampled_from(Wire.WORDS), max_size=14))
    queue = iter(words)
    folder = tmp_path_factory.mktemp("sites")
    run, _, _ = federated(TROUBLED[name], rounds=4, plan=lambda: next(queue, "deliver"), folder=folder)
    if name not in EXPECTED:
        EXPECTED[name] = serial(TROUBLED[name], 4)
    same(run, EXPECTED[name])


@pytest.mark.parametrize("name", ["two-way fedcams", "scaffold", "cafga", "fedaware"])
@pytest.mark.parametrize("back", [1, 2, 3])
def test_a_server_that_goes_back_is_answered_as_before(name, back, tmp_path):
    """The server dies after some rounds and starts again from an older checkpoint; the sites have gone further."""
    algorithm = TROUBLED[name]
    whole, _, _ = federated(algorithm, rounds=6, folder=tmp_path / "a")
    run, _, wire = federated(algorithm, rounds=4 - back, folder=tmp_path / "b")
    tree, history, rows = run.tree(), list(run.history), run.store.tree()
    run.advance(back)  # what is lost with the server
    engines = []

    def engine(*parts):
        engines.append(Federation(*parts, transport=wire, sites=SITES))
        return engines[-1]

    again = Run(algorithm, task(), engine=engine, evaluate_every=0, store=hansa.store.RamStore.restore(rows))
    again.restore(tree, history)
    again.advance(6 - again.state.round)
    same(again, whole)
    same(again, serial(algorithm, 6))


def test_a_silent_site_costs_its_reporters_the_round_and_nothing_else():
    dead = {"south"}

    class Deaf(Wire):
        def send(self, site, data):
            if site not in dead:
                super().send(site, data)

    algorithm = presets.scaffold(steps=2, batch_size=3)
    held = task()
    bound = Run(algorithm, held).algorithm
    wire = Deaf(lambda name: Site(bound, held, SITES[name]))
    run, _, _ = federated(algorithm, rounds=2, wire=wire, attempts=2)
    assert [record["clients"] for record in run.history] == [[0, 2, 4]] * 2
    assert run.history[0]["reasons"] == {"silent": 2}
    dead.clear()
    run.advance(2)
    assert run.history[-1]["participants"] == 5


def test_a_memory_that_is_missing_is_reported_and_never_reset():
    algorithm = presets.scaffold(steps=2, batch_size=3)
    held = task()
    bound = Run(algorithm, held).algorithm
    versions = {name: RamVersions() for name in SITES}
    wire = Wire(lambda name: Site(bound, held, SITES[name], versions=versions[name]))
    run, _, _ = federated(algorithm, rounds=2, wire=wire)
    versions["north"], wire.sites = RamVersions(), {}
    run.advance(1)
    assert run.history[-1]["clients"] == [1, 3]
    assert run.history[-1]["reasons"] == {"memory": 3}
    assert "does not hold version 1:" in run.lost[-1][1].detail


def test_only_what_no_server_can_name_is_forgotten(tmp_path):
    for versions in (RamVersions(), DiskVersions(tmp_path)):
        stamps = [Stamp(round, f"{round:032x}") for round in range(6)]
        for stamp in stamps:
            versions.put(7, stamp, {"a": torch.tensor([float(stamp.round)])})
        versions.prune(7, stamps[1], 4)
        held = [stamp.round for stamp in stamps if versions.get(7, stamp) is not None]
        assert held == [1, 4, 5]
        assert versions.clients() == [7]
        assert versions.get(7, stamps[5])["a"].item() == 5.0
        assert versions.get(8, stamps[5]) is None


def test_a_damaged_memory_is_an_error_that_names_its_file(tmp_path):
    versions, stamp = DiskVersions(tmp_path), Stamp(0, "0" * 32)
    versions.put(3, stamp, {"a": torch.ones(4)})
    (path,) = tmp_path.rglob("*.rows")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(HansaError, match="the memory of client 3 is damaged"):
        versions.get(3, stamp)


def test_memory_never_travels():
    seen = []
    held = task()
    algorithm = TROUBLED["scaffold"]
    bound = Run(algorithm, held).algorithm
    wire = Wire(lambda name: Site(bound, held, SITES[name]), seen=lambda *told: seen.append(told))
    federated(algorithm, rounds=3, wire=wire)
    assert len(seen) > 3
    for _, sent, reply in seen:
        assert not any(order.memory or order.mail for order in RoundOrders.from_bytes(sent).orders)
        assert not any(report.memory for report in RoundReports.from_bytes(reply).reports)


def captured(algorithm):
    """One honest exchange: the site, what it was told, what it answered."""
    seen = []
    held = task()
    bound = Run(algorithm, held).algorithm
    wire = Wire(lambda name: Site(bound, held, SITES[name]), seen=lambda *told: seen.append(told))
    _, engine, _ = federated(algorithm, rounds=1, wire=wire)
    return wire, engine, {site: (sent, reply) for site, sent, reply in seen}


def test_a_site_refuses_what_is_not_for_it():
    wire, _, frames = captured(presets.fedavg(steps=1, batch_size=3))
    site = wire.sites["north"]
    told = RoundOrders.from_bytes(frames["north"][0])
    site.run = told.run
    wrong = {
        "run": replace(told, run="another", orders=tuple(replace(o, run="another") for o in told.orders)),
        "round": replace(told, round=told.round + 1),
        "clients": RoundOrders.from_bytes(frames["south"][0]),
        "channels": replace(told, mail={}),
        "stamps": replace(told, stamps={}),
        "work": replace(told, orders=tuple(replace(o, work=o.work._replace(steps=0)) for o in told.orders)),
    }
    for reason, message in wrong.items():
        assert site.handle(message.to_bytes()) is None, reason
        assert site.refusals.counts[reason] == 1, site.refusals.last
    assert site.handle(b"nonsense") is None
    site.limit = 100
    assert site.handle(told.to_bytes()) is None
    assert site.refusals.counts["malformed"] == 2
    site.limit = None
    assert site.handle(told.to_bytes()) == frames["north"][1], "nothing has changed"


def test_the_server_refuses_what_a_site_may_not_say():
    _, engine, frames = captured(presets.fedavg(steps=1, batch_size=3))
    north, south = (RoundReports.from_bytes(frames[name][1]) for name in ("north", "south"))
    asked = {"north": RoundOrders.from_bytes(frames["north"][0])}
    wrong = {
        "run": replace(north, run="another"),
        "round": replace(north, round=7),
        "cohorts": south,
        "clients": replace(
            north,
            reports=tuple(
                replace(mine, uploads=theirs.uploads)
                for mine, theirs in zip(north.reports, [*south.reports, Report(0)], strict=True)
            ),
        ),
        "need": replace(north, need=("secrets",)),
    }
    for reason, answer in wrong.items():
        assert engine._heard("north", answer.to_bytes(), asked) is None
        assert engine.refusals.counts[reason] == 1, engine.refusals.last
    assert engine._heard("south", frames["south"][1], asked) is None
    assert engine.refusals.counts["unasked"] == 1
    assert engine._heard("north", b"hF\1", asked) is None
    assert engine.refusals.counts["malformed"] == 1
    assert "north" in asked
    assert engine._heard("north", frames["north"][1], asked) is not None


def test_clusters_that_span_sites_are_refused():
    with pytest.raises(HansaError, match="spans sites north, south"):
        federated(small("afga", batch_size=3))


def test_a_client_without_a_site_is_refused():
    with pytest.raises(HansaError, match="client 3 is at no site"):
        federated(presets.fedavg(), sites={"north": (0, 1, 2, 4)})


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_frames_of_sites_are_read_or_refused(data):
    _, _, frames = _exchange()
    for kind, good in ((RoundOrders, frames["north"][0]), (RoundReports, frames["north"][1])):
        at = data.draw(st.integers(0, len(good) - 1))
        bad = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
        with pytest.raises(HansaError):
            kind.from_bytes(bad)
        with pytest.raises(HansaError):
            kind.from_bytes(good[:at])


_CACHE = []


def _cached():
    if not _CACHE:
        _CACHE.append(captured(presets.fedavg(steps=1, batch_size=3)))
    return _CACHE[0]


_exchange = _cached
