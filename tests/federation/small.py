"""Five clients of unequal sizes at two sites, a model of one's own, and runs over the protocol in this process."""

from __future__ import annotations

import torch

from contracts.five import task
from contracts.small import NAMES, small
from federation.inprocess import Wire
from hansa.engine import Serial
from hansa.federation import DiskVersions, Federation, RamVersions, Site
from hansa.runs.driver import Run

SITES = {"north": (0, 2, 4), "south": (1, 3)}
CLUSTERS = [[0, 2, 4], [1, 3]]
GOSSIP = {"ha_fed", "cafga"}
ONE_CLUSTER = {name for name in NAMES if name in ("afga", "dsgd", "choco_sgd", "gossip_pga", "dadam", "d_amsgrad")}


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
        plain = [
            {name: value for name, value in record.items() if name not in ("seconds", "sites")} for record in (a, b)
        ]
        assert repr(plain[0]) == repr(plain[1])


def captured(algorithm):
    """One honest exchange: the site, what it was told, what it answered."""
    seen = []
    held = task()
    bound = Run(algorithm, held).algorithm
    wire = Wire(lambda name: Site(bound, held, SITES[name]), seen=lambda *told: seen.append(told))
    _, engine, _ = federated(algorithm, rounds=1, wire=wire)
    return wire, engine, {site: (sent, reply) for site, sent, reply in seen}
