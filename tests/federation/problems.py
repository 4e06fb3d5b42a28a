"""Five clients of unequal sizes at two sites, a custom model, and runs over the protocol in this process."""

from __future__ import annotations

import torch

from contracts.five import task
from contracts.small import NAMES, small
from federation.faulty_transport import FaultyTransport
from hansa.engine import Serial
from hansa.federation.server import Federation
from hansa.federation.site import MemoryStore, Site
from hansa.runs.driver import Run
from hansa.runs.metrics import PARTS
from hansa.runs.store.database import row_digest
from same_runs import untimed

SITES = {"north": (0, 2, 4), "south": (1, 3)}
CLUSTERS = [[0, 2, 4], [1, 3]]
GOSSIP = {"ha_fed", "cafga"}
ONE_CLUSTER = {name for name in NAMES if name in ("afga", "dsgd", "choco_sgd", "gossip_pga", "dadam", "d_amsgrad")}


class Federations:
    """Makes federations with these options, and keeps the last one."""

    def __init__(self, **options) -> None:
        self.options = {"sites": SITES, **options}

    def __call__(self, *parts) -> Federation:
        self.last = Federation(*parts, **self.options)
        return self.last


def method(name):
    options = {"batch_size": 3}
    if name in GOSSIP:
        options["clusters"] = CLUSTERS
    return small(name, **options)


def serial(algorithm, rounds=3):
    return Run(algorithm, task(), engine=Serial, evaluate_every=0).advance(rounds)


def transport_of(algorithm, kind=FaultyTransport, stores=None, **options):
    """Return a transport to sites of this algorithm; ``stores`` has their memory by name."""
    problem = task()
    bound = Run(algorithm, problem).algorithm
    return kind(lambda name: Site(bound, problem, SITES[name], memory_store=stores and stores[name]), **options)


def federated(algorithm, rounds=3, sites=SITES, transport=None):
    """Return the same run over the protocol, its engine and its transport."""
    problem = task()
    bound = Run(algorithm, problem).algorithm
    stores = {name: MemoryStore() for name in sites}
    transport = transport or FaultyTransport(lambda name: Site(bound, problem, sites[name], memory_store=stores[name]))
    engine = Federations(transport=transport, sites=sites)
    run = Run(algorithm, problem, engine=engine, evaluate_every=0).advance(rounds)
    return run, engine.last, transport


def state_of(site: Site) -> str:
    """A digest of all that a site remembers: its clients' versions, and the broadcasts that it holds."""
    store = site.memory_store
    versions = [(client, version) for client in range(5) for version in sorted(store.versions(client))]
    rows = [[(name, row_digest(row)) for name, row in sorted(store.get(*each).items())] for each in versions]
    held = [[name, version, row_digest(vector)] for name, received in sorted(site._received.items())
            for version, vector in sorted(received.items())]  # fmt: skip
    return repr((versions, rows, held))


def same(run, expected):
    for name, vector in expected.state.vectors.items():
        assert torch.equal(run.state.vectors[name], vector), name
    assert untimed(run, "sites", *PARTS) == untimed(expected, "sites", *PARTS)


def captured(algorithm):
    """Return one correct exchange: the transport, the engine, and each site's request and reply."""
    seen = []
    transport = transport_of(algorithm, on_message=lambda *message: seen.append(message))
    _, engine, _ = federated(algorithm, rounds=1, transport=transport)
    return transport, engine, {site: (sent, reply) for site, sent, reply in seen}
