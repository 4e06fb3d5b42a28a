"""Site connections inside the process: sites are agents in folders, which can be offline, crash and come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hansa.config import build, from_yaml
from hansa.federation.messages import Reply
from hansa.federation.policy import Policy
from hansa.federation.server import Server
from hansa.federation.site import Agent, DataSource

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
