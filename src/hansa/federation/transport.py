"""Transport of frames over unreliable connections: enrolls sites first and resends undelivered frames."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hansa.core.errors import HansaError
from hansa.federation.messages import (
    BATCH,
    ENROLLMENT,
    ENROLLMENT_REPLY,
    REFUSAL,
    EnrollmentReply,
    Refusal,
    frame_digest,
    pack_batch,
    unpack_batch,
)
from hansa.rounds import wire_format

log = logging.getLogger("hansa")

POLL_SECONDS = 1.0  # between checks for replies
MAX_TTL = 3600.0  # maximum lifetime of a message in seconds
RETRY_SECONDS = 1.0  # before a failed message is resent
REFUSED_SECONDS = 5.0  # for the other sites to answer when one has refused to take part
PAUSE_SECONDS = 10.0  # between two checks: this process was suspended, or its connections were restarted


class Transport(Protocol):
    """Carries frames to sites and back. The sender is known from the connection (a key, a certificate), never from the
    frame."""

    def send(self, site: str, data: bytes) -> None: ...

    def receive(self) -> Sequence[tuple[str, bytes]]:
        """Wait for frames and return them with their sites; nothing means a time-out."""
        ...


class Reply(NamedTuple):
    """A site's reply to a message, or the error in place of one."""

    site: str
    ticket: int
    data: bytes
    error: str = ""
    work_seconds: float = 0.0
    """The agent's work as the site reports it."""


class SiteSeconds(NamedTuple):
    """The seconds of a site's exchanges, measured by the server, and the site's work in them."""

    seconds: float = 0.0
    work_seconds: float = 0.0

    @property
    def transport_seconds(self) -> float:
        """The seconds except work: polls, TLS and transfer."""
        return max(0.0, self.seconds - self.work_seconds)


class SiteConnections(Protocol):
    """Sends one message at a time to a site and receives one reply. Sites are identified by their keys."""

    def send(self, site: str, ticket: int, data: bytes, ttl: float) -> None: ...

    def receive(self, timeout: float) -> Sequence[Reply]:
        """Wait at most this long for replies and return them."""
        ...

    def online(self) -> frozenset[str]:
        """Return the sites that can be reached now."""
        ...


@dataclass(slots=True)
class _PendingRequest:
    data: bytes
    ticket: int
    deadline: float
    sent: bool = False
    retry_at: float = 0.0
    started_at: float = 0.0


class EnrollingTransport:
    """A transport over site connections.

    A site that is not enrolled receives its enrollment together with its first frame. An undelivered frame is
    resent when the site can be reached, until ``deadline`` seconds have passed.

    Args:
        connections: The connections to the sites.
        enrollments: The enrollment frame of each site.
        on_enrolled: Called with a site and its reply; raises if the reply is not acceptable. None: the messages
            need no enrollment.
        deadline: Seconds that a site has to answer a frame.
        clock: The time in seconds.
    """

    def __init__(
        self,
        connections: SiteConnections,
        enrollments: Mapping[str, bytes],
        on_enrolled: Callable[[str, EnrollmentReply], None] | None = None,
        *,
        deadline: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connections, self.enrollments, self.on_enrolled = connections, enrollments, on_enrolled
        self.deadline, self.clock = deadline, clock
        self.rejected: dict[str, str] = {}  # the server's text of the error in a site's last reply
        self.seconds: dict[str, SiteSeconds] = {}  # of the exchanges with each site, until they are taken
        self._enrolled = set() if on_enrolled is not None else set(enrollments)
        self._pending: dict[str, _PendingRequest] = {}
        self._tickets = 0

    def send(self, site: str, data: bytes) -> None:
        """Send a frame, or with no data only the enrollment. It replaces an earlier frame that is still pending."""
        self._tickets += 1
        now = self.clock()
        self._pending[site] = _PendingRequest(data, self._tickets, now + self.deadline, started_at=now)
        self._send_pending(self.clock())

    def ask_all(self, requests: Mapping[str, bytes]) -> dict[str, bytes]:
        """Send each site its request and return the replies. An error names every site that refuses."""
        replies, refused = {}, {}
        for site, data in requests.items():
            self.send(site, data)
        while frames := self.receive():
            for site, frame in frames:
                if wire_format.kind_of(frame) != REFUSAL:
                    replies[site] = frame
                    continue
                refusal = Refusal.from_bytes(frame)
                refused[site] = self.rejected.get(site, f"{refusal.reason}: {refusal.detail}")
                for request in self._pending.values():
                    request.deadline = min(request.deadline, self.clock() + REFUSED_SECONDS)
        if refused:
            raise HansaError("; ".join(f"site {site} does not take part: {refused[site]}" for site in sorted(refused)))
        return replies

    def take_seconds(self) -> dict[str, SiteSeconds]:
        """Return the seconds of the exchanges with each site since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    @property
    def waiting(self) -> frozenset[str]:
        """The sites with pending answers."""
        return frozenset(self._pending)

    def receive(self) -> list[tuple[str, bytes]]:
        """Return frames of sites as soon as there are any; empty if no frame is pending. The time in which this process
        was suspended, or restarted its connections, does not count towards the deadlines."""
        last = self.clock()
        while self._pending:
            now = self.clock()
            if now - last > PAUSE_SECONDS:
                log.warning("the server stood still for %.0f s, which its sites are given in addition", now - last)
                for request in self._pending.values():
                    request.deadline += now - last
            last = now
            for site in [site for site, request in self._pending.items() if request.deadline <= now]:
                log.warning("site %s did not answer in time", site)
                del self._pending[site]
            self._send_pending(now)
            frames = [frame for reply in self.connections.receive(POLL_SECONDS) for frame in self._handle(reply)]
            if frames:
                return frames
        return []

    def _send_pending(self, now: float) -> None:
        for site, request in self._pending.items():
            if request.sent or request.retry_at > now or site not in self.connections.online():
                continue
            enrollment = [] if site in self._enrolled else [self.enrollments[site]]
            data = pack_batch([*enrollment, *([request.data] if request.data else [])])
            request.sent = True
            self.connections.send(site, request.ticket, data, min(MAX_TTL, max(1.0, request.deadline - now)))

    def _handle(self, reply: Reply) -> list[tuple[str, bytes]]:
        site, request = reply.site, self._pending.get(reply.site)
        if request is not None and request.ticket != reply.ticket:
            request = None  # a reply to an earlier frame
        if reply.error:
            if request is not None:
                log.warning("site %s: %s; the message is sent again", site, reply.error)
                request.sent, request.retry_at = False, self.clock() + RETRY_SECONDS
            return []
        try:
            frames = self._unpack(site, reply.data)
        except HansaError as error:
            self._enrolled.discard(site)
            log.error("site %s: %s", site, error)
            self.rejected[site] = str(error)
            frames = [Refusal("hello").to_bytes()]
        if frames is None:
            self._enrolled.discard(site)
            if request is not None:
                request.sent = False  # resent, with the enrollment
            return []
        if request is not None:
            del self._pending[site]
            earlier, seconds = self.seconds.get(site, SiteSeconds()), self.clock() - request.started_at
            work = min(max(0.0, reply.work_seconds), seconds)  # a site cannot have worked longer than its exchange took
            self.seconds[site] = SiteSeconds(earlier.seconds + seconds, earlier.work_seconds + work)
        return [(site, frame) for frame in frames]

    def _unpack(self, site: str, data: bytes) -> list[bytes] | None:
        """Handle the enrollment replies of a reply, and return its other frames; None if the site is not enrolled."""
        frames = unpack_batch(data) if wire_format.kind_of(data) == BATCH else [data]
        refusals = [Refusal.from_bytes(frame) for frame in frames if wire_format.kind_of(frame) == REFUSAL]
        for refusal in refusals:
            if refusal.reason != ENROLLMENT:
                return [refusal.to_bytes()]
        if refusals:
            return None
        for frame in frames:
            if wire_format.kind_of(frame) == ENROLLMENT_REPLY:
                reply = EnrollmentReply.from_bytes(frame)
                if reply.enrollment != frame_digest(self.enrollments[site]):
                    raise HansaError(f"site {site} replies to another enrollment")
                if self.on_enrolled is not None:
                    self.on_enrolled(site, reply)
                self._enrolled.add(site)
        return [frame for frame in frames if wire_format.kind_of(frame) != ENROLLMENT_REPLY]
