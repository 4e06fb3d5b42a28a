"""A transport inside the process, which loses, doubles, delays and reorders frames and crashes sites as it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hansa.federation import Site


class ServerDied(Exception):
    """The server is no more; what it had saved is all that is left of it."""


@dataclass
class Wire:
    """``plan`` gives the next decision, one of the words below; without it everything arrives once and in order.

    ``build`` makes a site anew by name, from what it has on disk: that is what a crash leaves.
    """

    build: Callable[[str], Site]
    plan: Callable[[], str] = lambda: "deliver"
    sites: dict[str, Site] = field(default_factory=dict)
    inbox: list[tuple[str, bytes]] = field(default_factory=list)
    late: list[tuple[str, bytes]] = field(default_factory=list)
    seen: Any = None
    carried: int = 0

    dying: bool = False

    WORDS = ("deliver", "drop", "double", "crash before", "crash after", "lose the reply", "delay", "damage")
    SERVER_WORDS = ("server dies before", "server dies after", "server dies at receipt")

    def send(self, site: str, data: bytes) -> None:
        word = self.plan()
        self.carried += len(data)
        if word == "drop":
            return
        if word == "server dies before":
            raise ServerDied
        if word == "damage":
            data = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
        if word == "crash before":
            self.sites.pop(site, None)
        for _ in range(2 if word == "double" else 1):
            living = self.sites.setdefault(site, self.build(site)) if site not in self.sites else self.sites[site]
            reply = living.handle(data)
            if self.seen is not None:
                self.seen(site, data, reply)
            if word == "crash after":
                self.sites.pop(site, None)
            if reply is None or word == "lose the reply":
                continue
            (self.late if word == "delay" else self.inbox).append((site, reply))
        self.dying |= word == "server dies at receipt"
        if word == "server dies after":
            raise ServerDied

    def receive(self) -> Sequence[tuple[str, bytes]]:
        if self.dying:
            self.dying = False
            raise ServerDied
        arrived, self.inbox = self.inbox[::-1], []
        if not arrived:
            arrived, self.late = self.late, []
        return arrived
