"""Frames to sites and back over a post that may fail: charges first, then orders, and again what did not arrive."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hansa.core.errors import HansaError
from hansa.federation.enrollment import CHARGE, HELLO, REFUSED, SEVERAL, Hello, Refused, apart, digest, several
from hansa.rounds import wire_format

log = logging.getLogger("hansa")

PAUSE = 1.0  # seconds between looks at what has come
LONGEST = 3600.0  # seconds that a message may be on its way
AGAIN = 3.0  # seconds before a site whose messages failed is tried again


class Arrival(NamedTuple):
    """What the post brought: an answer of a site, or why there is none."""

    site: str
    ticket: int
    data: bytes
    error: str = ""


class Post(Protocol):
    """Carries one message to a site and one answer back. Whose answer it is, the post knows by the site's identity."""

    def send(self, site: str, ticket: int, data: bytes, ttl: float) -> None: ...

    def receive(self, timeout: float) -> Sequence[Arrival]:
        """What has come, waiting for it at most so long."""
        ...

    def online(self) -> frozenset[str]:
        """The sites that can be reached now."""
        ...


@dataclass(slots=True)
class _Errand:
    data: bytes
    ticket: int
    end: float
    sent: bool = False
    again: float = 0.0


class Charged:
    """A transport over a post. A site that has not said hello is given its charge along with what it is sent; what a
    site could not be given is sent again when it can be reached, until ``deadline`` seconds have passed."""

    def __init__(
        self,
        post: Post,
        charges: Mapping[str, bytes],
        greeted: Callable[[str, Hello], None],
        *,
        deadline: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.post, self.charges, self.greeted, self.deadline, self.clock = post, charges, greeted, deadline, clock
        self.sent_bytes, self.received_bytes = dict.fromkeys(charges, 0), dict.fromkeys(charges, 0)
        self._known: set[str] = set()
        self._errands: dict[str, _Errand] = {}
        self._tickets = 0

    def send(self, site: str, data: bytes) -> None:
        """Send a frame, or with nothing the charge alone; what was sent before is no longer waited for."""
        self._tickets += 1
        self._errands[site] = _Errand(data, self._tickets, self.clock() + self.deadline)
        self._set_out(self.clock())

    def receive(self) -> list[tuple[str, bytes]]:
        """Frames of sites; nothing when nobody can answer any more."""
        while self._errands:
            now = self.clock()
            for site in [site for site, errand in self._errands.items() if errand.end <= now]:
                log.warning("site %s did not answer within %.0f seconds", site, self.deadline)
                del self._errands[site]
            self._set_out(now)
            found = [answer for arrival in self.post.receive(PAUSE) for answer in self._arrived(arrival)]
            if found:
                return found
        return []

    def _set_out(self, now: float) -> None:
        for site, errand in self._errands.items():
            if errand.sent or errand.again > now or site not in self.post.online():
                continue
            charge = [] if site in self._known else [self.charges[site]]
            data = several([*charge, *([errand.data] if errand.data else [])])
            errand.sent = True
            self.sent_bytes[site] += len(data)
            self.post.send(site, errand.ticket, data, min(LONGEST, max(1.0, errand.end - now)))

    def _arrived(self, arrival: Arrival) -> list[tuple[str, bytes]]:
        site, errand = arrival.site, self._errands.get(arrival.site)
        if errand is not None and errand.ticket != arrival.ticket:
            errand = None  # an answer to an earlier frame
        if arrival.error:
            if errand is not None:
                log.warning("site %s: %s; it is asked again", site, arrival.error)
                errand.sent, errand.again = False, self.clock() + AGAIN
            return []
        self.received_bytes[site] += len(arrival.data)
        try:
            answers = self._opened(site, arrival.data)
        except _Uncharged:
            self._known.discard(site)
            if errand is not None:
                errand.sent = False  # the same again, with the charge
            return []
        except HansaError as error:
            self._known.discard(site)
            answers = [Refused("hello", str(error)).to_bytes()]
        if errand is not None:
            del self._errands[site]
        return [(site, answer) for answer in answers]

    def _opened(self, site: str, data: bytes) -> list[bytes]:
        """The frames for the federation in an answer; hellos are for us."""
        parts = apart(data) if wire_format.kind_of(data) == SEVERAL else [data]
        refused = [Refused.from_bytes(part) for part in parts if wire_format.kind_of(part) == REFUSED]
        for refusal in refused:
            if refusal.reason != CHARGE:
                return [refusal.to_bytes()]
        if refused:
            raise _Uncharged
        for part in parts:
            if wire_format.kind_of(part) == HELLO:
                hello = Hello.from_bytes(part)
                if hello.charge != digest(self.charges[site]):
                    raise HansaError(f"site {site} says hello to another charge")
                self.greeted(site, hello)
                self._known.add(site)
        return [part for part in parts if wire_format.kind_of(part) != HELLO]


class _Uncharged(Exception):
    """The site knows nothing of its charge."""
