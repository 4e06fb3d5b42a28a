"""Federations in this process: sites that are agents in folders, and a transport that fails in every way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from contracts.five import task
from contracts.small import NAMES, bowls, small
from hansa.compress import grid, sign
from hansa.config import build, from_yaml
from hansa.engine import Serial
from hansa.federation.messages import Reply
from hansa.federation.policy import Policy
from hansa.federation.server import Federation, Server
from hansa.federation.site import Agent, DataSource, MemoryStore, Site
from hansa.runs.driver import Run
from hansa.runs.metrics import PARTS
from hansa.runs.store.database import row_digest
from same_runs import untimed

TEXT = """
name: trial
rounds: 4
data: {name: synthetic, clients: 6}
algorithm: fedavg
local: {steps: 3, batch_size: 5}
sample: {participation: 0.7}
checkpoint: {every: 1}
engine: {kind: flower, sites: {north: 3, south: 3}, deadline: 60}
"""


class LocalSites:
    """``away`` sites are offline; the answers of ``failing`` ones are lost; ``seen`` records all messages."""

    def __init__(
        self, folder: Path, sites=("north", "south"), policy: Policy | dict[str, Policy] | None = None
    ) -> None:
        self.folder, self.policy = folder, policy
        self.agents: dict[str, Agent] = {}
        self.sites, self.away, self.failing = tuple(sites), set(), []
        self.inbox: list[Reply] = []
        self.seen: list[tuple[str, bytes, bytes]] = []
        self.idle: Callable[[], None] = lambda: None

    def agent(self, site: str) -> Agent:
        if site not in self.agents:
            policy = self.policy[site] if isinstance(self.policy, dict) else self.policy
            self.agents[site] = Agent(site, self.source(site), self.folder / site, policy)
        return self.agents[site]

    def source(self, site: str) -> DataSource:
        return DataSource(build.load_data, shared=True)

    def kill(self, site: str) -> None:
        """Drop what is not on disk."""
        self.agents.pop(site, None)

    def send(self, site, ticket, data, ttl):
        answer = self.agent(site).handle(data)
        self.seen.append((site, data, answer))
        if site in self.failing:
            self.failing.remove(site)
            self.inbox.append(Reply(site, ticket, b"", "5: the node is gone"))
        else:
            self.inbox.append(Reply(site, ticket, answer))

    def receive(self, timeout):
        if not self.inbox:
            self.idle()
        replies, self.inbox = self.inbox[::-1], []
        return replies

    def online(self):
        return frozenset(self.sites) - self.away


def server(sites: LocalSites, *changes: str, text: str = TEXT) -> Server:
    return Server(from_yaml(text, changes), sites)


class ServerDied(Exception):
    """The server has crashed; only what it had saved is left."""


@dataclass
class FaultyTransport:
    """``plan`` returns the next fault, one of the faults below; by default everything arrives once and in order.

    ``build`` builds a site by name from what it has on disk, as after a crash.
    """

    build: Callable[[str], Site]
    plan: Callable[[], str] = lambda: "deliver"
    sites: dict[str, Site] = field(default_factory=dict)
    inbox: list[tuple[str, bytes, bytes]] = field(default_factory=list)  # sites, frames and replies
    late: list[tuple[str, bytes, bytes]] = field(default_factory=list)
    on_message: Any = None
    carried: int = 0
    attempts: int = 60
    """How often a frame is sent again whose answer does not arrive."""
    unanswered: dict[str, bytes] = field(default_factory=dict)
    dying: bool = False

    FAULTS = ("deliver", "drop", "double", "crash before", "crash after", "lose the reply", "delay", "damage")
    SERVER_FAULTS = ("server dies before", "server dies after", "server dies at receipt")

    def send(self, site: str, data: bytes) -> None:
        self.unanswered[site] = data
        self.deliver(site, data)

    def deliver(self, site: str, frame: bytes) -> None:
        fault, data = self.plan(), frame
        self.carried += len(data)
        if fault == "drop":
            return
        if fault == "server dies before":
            raise ServerDied
        if fault == "damage":
            data = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
        if fault == "crash before":
            self.sites.pop(site, None)
        for _ in range(2 if fault == "double" else 1):
            running = self.sites.setdefault(site, self.build(site)) if site not in self.sites else self.sites[site]
            reply = running.handle(data)
            if self.on_message is not None:
                self.on_message(site, data, reply)
            if fault == "crash after":
                self.sites.pop(site, None)
            if reply is None or fault == "lose the reply":
                continue
            (self.late if fault == "delay" else self.inbox).append((site, frame, reply))
        self.dying |= fault == "server dies at receipt"
        if fault == "server dies after":
            raise ServerDied

    def receive(self) -> Sequence[tuple[str, bytes]]:
        for _ in range(self.attempts):
            if self.dying:
                self.dying = False
                raise ServerDied
            arrived, self.inbox = self.inbox[::-1], []
            if not arrived:
                arrived, self.late = self.late, []
            for site, frame, _ in arrived:
                if self.unanswered.get(site) == frame:
                    del self.unanswered[site]
            if arrived or not self.unanswered:
                return [(site, reply) for site, _, reply in arrived]
            for site, frame in list(self.unanswered.items()):
                self.deliver(site, frame)
        self.inbox = []
        return []


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


def evaluated(algorithm, tasks, where="sites", rounds=2, policies=None, **options):
    """A run over sites with tasks of their own that is evaluated after each round, its engine and its transport."""
    bound, stores = Run(algorithm, tasks["server"]).algorithm, {name: MemoryStore() for name in SITES}
    transport = FaultyTransport(
        lambda name: Site(
            bound, tasks[name], SITES[name], policy=policies and policies[name], memory_store=stores[name]
        ),
        **options,
    )
    engine = Federations(transport=transport, where=where)
    found = Run(algorithm, tasks["server"], engine=engine, evaluate_every=1).advance(rounds)
    return found, engine.last, transport


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
