"""Federations of every preset that recover from faults of frames, sites and the server."""

from __future__ import annotations

import copy

from contracts.small import NAMES, bowls, small
from federation.faulty_transport import FaultyTransport, ServerDied
from federation.problems import CLUSTERS, GOSSIP, ONE_CLUSTER, SITES, Federations
from hansa.compress import grid, sign
from hansa.federation.site import MemoryStore, Site
from hansa.runs.driver import Run

CLUSTERED = {name: {"clusters": CLUSTERS, "reporters": 1} for name in GOSSIP}
SETTINGS = {name: (name, CLUSTERED.get(name, {})) for name in NAMES} | {
    f"{name}, compressed both ways": (name, {**CLUSTERED.get(name, {}), "compressor": sign(), "two_way": True})
    for name in ("fedavg", "scaffold", "feddyn", "fedaware", "cafga")
}
SETTINGS["fedcams, a lattice down"] = ("fedcams", {"compressor": sign(), "two_way": grid(2.0)})
"""Every preset as it is, and some with residuals at the sites and a replica to keep up with."""


def read_again(store: MemoryStore) -> MemoryStore:
    """What a site that was killed has on disk. No power is lost here, so nothing waits for the disk."""
    again = MemoryStore(store.folder)
    again._durable = False
    return again


def survive(setting, rounds, faults, rollbacks=(), keep=3):
    """Run over the protocol with these faults. The server saves every round and keeps the ``keep`` newest; after a
    crash it resumes from the newest, or from an older one as ``rollbacks`` says."""
    name, more = SETTINGS[setting]
    algorithm, problem = small(name, **more), bowls()
    places = {"all": range(5)} if name in ONE_CLUSTER else SITES
    bound, stores = Run(algorithm, problem).algorithm, {site: MemoryStore() for site in places}
    queue, rollback = iter(faults), iter(rollbacks)
    transport = FaultyTransport(
        lambda site: Site(bound, problem, places[site], problem.dtype, memory_store=read_again(stores[site]))
    )
    transport.plan = lambda: next(queue, "deliver")
    saved = []

    def save(run, record=None):
        saved.append((run.checkpoint_state(), list(run.history), copy.deepcopy(run.store)))
        del saved[:-keep]
        run.oldest_resumable_round = saved[0][0]["server"]["round"]

    engine = Federations(transport=transport, sites=places)
    run = Run(algorithm, problem, engine=engine, evaluate_every=0)
    save(run)
    while True:
        try:
            return run.advance(rounds - run.state.round, [save]), stores
        except ServerDied:
            del saved[max(1, len(saved) - next(rollback, 0)) :]
            tree, history, store = copy.deepcopy(saved[-1])
            run = Run(algorithm, problem, engine=engine, evaluate_every=0, store=store)
            run.restore(tree, history)
            run.oldest_resumable_round = saved[0][0]["server"]["round"]


_EXPECTED = {}


def expected(setting, rounds):
    if (setting, rounds) not in _EXPECTED:
        name, more = SETTINGS[setting]
        _EXPECTED[setting, rounds] = Run(small(name, **more), bowls(), evaluate_every=0).advance(rounds)
    return _EXPECTED[setting, rounds]
