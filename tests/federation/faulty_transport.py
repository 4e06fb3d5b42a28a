"""A transport inside the process that loses, repeats, delays, damages and reorders frames, and crashes sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hansa.federation.site import Site


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
