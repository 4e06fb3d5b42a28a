"""Federations of every preset that go on whatever happens to frames, sites and the server."""

from __future__ import annotations

import hansa
from contracts.small import NAMES, bowls, small
from federation.inprocess import ServerDied, Wire
from federation.small import CLUSTERS, GOSSIP, ONE_CLUSTER, SITES
from hansa.compress import sign
from hansa.federation import Federation, RamVersions, Site
from hansa.runs.driver import Run

CLUSTERED = {name: {"clusters": CLUSTERS, "reporters": 1} for name in GOSSIP}
SETTINGS = {name: (name, CLUSTERED.get(name, {})) for name in NAMES} | {
    f"{name}, compressed both ways": (name, {**CLUSTERED.get(name, {}), "compressor": sign(), "two_way": True})
    for name in ("fedavg", "scaffold", "feddyn", "fedaware", "cafga")
}
"""Every preset as it is, and some with residuals at the sites and a replica to keep up with."""


def survive(setting, rounds, words, backs=(), keep=3):
    """A run over the protocol that goes as ``words`` say. The server saves every round and keeps the ``keep`` newest;
    each time that it dies it is taken up from the newest but so many."""
    name, more = SETTINGS[setting]
    algorithm, held = small(name, **more), bowls()
    places = {"all": range(5)} if name in ONE_CLUSTER else SITES
    bound, kept = Run(algorithm, held).algorithm, {site: RamVersions() for site in places}
    queue, back = iter(words), iter(backs)
    wire = Wire(lambda site: Site(bound, held, places[site], held.dtype, versions=kept[site]))
    wire.plan = lambda: next(queue, "deliver")
    saved = []

    def save(run, record=None):
        saved.append((run.tree(), list(run.history), run.store.tree()))
        del saved[:-keep]
        run.oldest = saved[0][0]["server"]["round"]

    def engine(*parts):
        return Federation(*parts, transport=wire, sites=places, attempts=60)

    run = Run(algorithm, held, engine=engine, evaluate_every=0)
    save(run)
    while True:
        try:
            return run.advance(rounds - run.state.round, [save]), kept
        except ServerDied:
            del saved[max(1, len(saved) - next(back, 0)) :]
            tree, history, rows = saved[-1]
            store = hansa.runs.store.RamStore.restore(rows)
            run = Run(algorithm, held, engine=engine, evaluate_every=0, store=store)
            run.restore(tree, history)
            run.oldest = saved[0][0]["server"]["round"]


_EXPECTED = {}


def expected(setting, rounds):
    if (setting, rounds) not in _EXPECTED:
        name, more = SETTINGS[setting]
        _EXPECTED[setting, rounds] = Run(small(name, **more), bowls(), evaluate_every=0).advance(rounds)
    return _EXPECTED[setting, rounds]
