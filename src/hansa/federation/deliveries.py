"""The messages to sites that have no answer yet, and how a lost one is noticed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

PROBE_SECONDS = 10.0  # without an answer, before the site is probed
REPEAT_SECONDS = 60.0  # before another probe, if there is no answer to the last
GRACE_SECONDS = 5.0  # between the answer to a probe and the conclusion that the message is lost


class Node(NamedTuple):
    """A node of a site: its number, and when it became active. A node that was restarted has another time."""

    number: str
    activated: str


@dataclass(slots=True)
class _Delivery:
    site: str
    node: Node
    sent: float
    probed: float | None = None
    probe_answered: float | None = None


class Deliveries:
    """Tracks messages by ticket.

    A node answers one message after the other, in the order in which they were sent. So a message is lost if its node
    was restarted or replaced since, or if the node has answered a later one: a small probe is sent to a node that has
    not answered for some time.

    >>> deliveries = Deliveries()
    >>> deliveries.add(1, "north", Node("7", "then"), now=0.0)
    >>> deliveries.lost({"north": Node("7", "then")}, now=1.0)
    []
    >>> deliveries.lost({"north": Node("8", "now")}, now=2.0)
    [(1, 'north', 'its node was restarted')]
    """

    def __init__(self) -> None:
        self._waiting: dict[int, _Delivery] = {}
        self._probes: dict[int, int] = {}  # message by probe
        self._tickets = itertools.count(-2, -1)
        self._lock = threading.Lock()

    def next_ticket(self) -> int:
        """Return a ticket for a message of our own: a negative number."""
        return next(self._tickets)

    def add(self, ticket: int, site: str, node: Node, now: float) -> None:
        """Record that a message was sent; a repeated one replaces the record."""
        with self._lock:
            self._waiting[ticket] = _Delivery(site, node, now)

    def answered(self, ticket: int, number: str) -> str | None:
        """Return the site of a message that its node answers, once."""
        with self._lock:
            delivery = self._waiting.get(ticket)
            if delivery is None or delivery.node.number != number:
                return None
            del self._waiting[ticket]
            return delivery.site

    def probes(self, now: float) -> list[tuple[int, Node]]:
        """Return the probes to send now, with the node of each."""
        due = []
        with self._lock:
            for ticket, delivery in self._waiting.items():
                start = delivery.sent + PROBE_SECONDS if delivery.probed is None else delivery.probed + REPEAT_SECONDS
                if now >= start and delivery.probe_answered is None:
                    delivery.probed = now
                    probe = next(self._tickets)
                    self._probes[probe] = ticket
                    due.append((probe, delivery.node))
        return due

    def probe_answered(self, probe: int, now: float, *, failed: bool = False) -> bool:
        """Record the answer to a probe; return whether the ticket is that of a probe."""
        with self._lock:
            if probe not in self._probes:
                return False
            delivery = self._waiting.get(self._probes.pop(probe))
            if delivery is not None and not failed:
                delivery.probe_answered = now
            return True

    def lost(self, nodes: Mapping[str, Node], now: float) -> list[tuple[int, str, str]]:
        """Remove and return the messages that are lost: ticket, site and reason."""
        lost = []
        with self._lock:
            for ticket, delivery in list(self._waiting.items()):
                node = nodes.get(delivery.site)
                answered = delivery.probe_answered
                if node is not None and node != delivery.node:
                    reason = "its node was restarted"
                elif answered is not None and now - answered > GRACE_SECONDS:
                    reason = "it did not receive the message, or its answer was lost"
                else:
                    continue
                lost.append((ticket, delivery.site, reason))
                del self._waiting[ticket]
        return lost

    def by_site(self) -> dict[str, int]:
        """Return the number of messages without an answer, by site."""
        with self._lock:
            sites = [delivery.site for delivery in self._waiting.values()]
        return {site: sites.count(site) for site in sites}

    def clear(self) -> list[tuple[int, str]]:
        """Remove and return all messages: ticket and site."""
        with self._lock:
            waiting = [(ticket, delivery.site) for ticket, delivery in self._waiting.items()]
            self._waiting.clear()
            self._probes.clear()
        return waiting
