"""The messages between the server and a site: enrollment, rounds, evaluations, refusals.

A site reports an error only as a code of `REASONS`, and for a table that does not fit its schema, a code and a column
of the schema. The text of an error, with paths, values and names, stays in the site's own log; the server prints its
own text for the code.

`EnrollingTransport` carries frames over unreliable connections: it enrolls sites first and resends what was lost.
"""

from __future__ import annotations

import hashlib
import logging
import math
import platform
import re
import reprlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from hansa.core.errors import HansaError
from hansa.core.types import Vector
from hansa.data import DataError
from hansa.data.schema import MISFIT_CODES
from hansa.rounds import wire_format
from hansa.rounds.messages import Broadcast, DroppedClient, Report, WorkOrder, read_broadcasts, write_broadcasts
from hansa.rounds.wire_format import (
    PROTOCOL,
    FrameError,
    Message,
    check_protocol,
    mapping_field,
    value_field,
    wire_field,
)
from hansa.training.metrics import Sketch

log = logging.getLogger("hansa")

ENROLLMENT, ENROLLMENT_REPLY, REFUSAL, BATCH, OVER = "charge", "hello", "refused", "several", "over"
ORDERS, REPORTS, EVALUATION, EVALUATION_REPLY = "orders", "reports", "exam", "marks"
"""The kinds of frames, as named on the wire."""
MAX_SAMPLES = 1 << 40
"""The maximum plausible number of samples of a client."""
_MAX_NAME, _MAX_FACTS = 200, 20


class MemoryVersion(NamedTuple):
    """A version of a client's memory: the round that made it, and the digest of the upload sent with it.

    >>> MemoryVersion.parse(str(MemoryVersion(3, "ab" * 16))).round
    3
    """

    round: int
    digest: str

    def __str__(self) -> str:
        return f"{self.round}:{self.digest}"

    @classmethod
    def parse(cls, text: object) -> MemoryVersion:
        match = re.fullmatch("([0-9]{1,18}):([0-9a-f]{32})", text) if isinstance(text, str) else None
        if match is None:
            raise FrameError(f"frame: {reprlib.repr(text)} is not the version of a memory.")
        return cls(int(match.group(1)), match.group(2))

    @classmethod
    def of_upload(cls, report: Report, index: int) -> MemoryVersion:
        """Return the version of the memory that belongs to a client's upload in a report."""
        state, packets = hashlib.blake2b(digest_size=16), report.packets(index)
        for name in sorted(packets):
            data = packets[name].bytes
            state.update(f"{len(name)}:{name}:{len(memoryview(data).cast('B'))}:".encode())
            state.update(data)
        return cls(report.round, state.hexdigest())

    def to_row(self) -> Vector:
        """Return the version as a row of the server's client store."""
        return torch.tensor(list(str(self).encode()), dtype=torch.uint8)

    @classmethod
    def from_row(cls, row: Vector) -> MemoryVersion:
        return cls.parse(bytes(row.tolist()).decode("ascii", "replace"))


def blob_fields(kind: type[WorkOrder] | type[Report], default: Any = MISSING, **without: Any) -> Any:
    """Return a field of a message with a blob per order or report; ``without`` replaces what is sent separately."""
    return wire_field(
        lambda entry, frame: tuple(kind.from_bytes(frame.take(position)) for position in entry),
        lambda values, blobs: [blobs.bytes(replace(item, **without).to_bytes()) for item in values],
        default=default,
    )


def _text(value: Any) -> str:
    """Return a short text of a site without control characters for terminals."""
    return wire_format.sentence(str(value))[:_MAX_NAME]


def _clusters(groups: Any) -> tuple[tuple[int, ...], ...] | None:
    return None if groups is None else tuple(map(wire_format.integers, groups))


def _facts(entry: Any) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in list(entry.items())[:_MAX_FACTS]}


def _finite(value: Any) -> float:
    number = None if isinstance(value, str) else wire_format.as_number(value)
    if number is None or not math.isfinite(number):
        raise FrameError(f"frame: {reprlib.repr(value)} is not a finite number.")
    return int(value) if isinstance(value, int) else number


def _read_sketch(sketch: Any) -> Sketch:
    if not isinstance(sketch, dict) or not all(isinstance(rows, list) for rows in sketch.values()):
        raise FrameError("frame: a sketch that is not lists of rows by name.")
    return {wire_format.name(name): [[_finite(cell) for cell in row] for row in rows] for name, rows in sketch.items()}


def numeric_platform() -> dict[str, str]:
    """Return the platform properties that bit-equal results depend on."""
    return {"torch": torch.__version__, "machine": platform.machine(), "cpu": torch.backends.cpu.get_cpu_capability()}


@dataclass(frozen=True, slots=True, eq=False)
class EnrollmentRequest(Message):
    """Asks a site to join a run: the configuration, the site's clients, the population, and, once they are
    known, the run and the clusters. Without a run it only asks which data the site has. ``schema`` is the schema of its
    tables, as JSON."""

    kind = ENROLLMENT
    site: str = value_field(str)
    version: str = value_field(str)
    config: str = value_field(str)
    clients: tuple[int, ...] = value_field(wire_format.integers)
    population: int = value_field(wire_format.integer)
    run: str = value_field(str, default="")
    clusters: tuple[tuple[int, ...], ...] | None = value_field(_clusters, default=None)
    schema: str = value_field(str, default="")


@dataclass(frozen=True, slots=True, eq=False)
class EnrollmentReply(Message):
    """A site's reply to the enrollment with this digest: its clients' numbers of samples, their label counts if its
    policy permits, the digest of the initial model that it builds, and the SHA-256 of the schema of its tables."""

    kind = ENROLLMENT_REPLY
    enrollment: str = value_field(_text)
    version: str = value_field(_text)
    samples: Mapping[int, int] = mapping_field(wire_format.whole_key, partial(wire_format.integer, maximum=MAX_SAMPLES))
    model: str = value_field(_text)
    labels: Mapping[int, tuple[int, ...]] = mapping_field(
        wire_format.whole_key, wire_format.integers, default_factory=dict
    )
    arithmetic: Mapping[str, str] = value_field(_facts, default_factory=numeric_platform)
    schema: str = value_field(_text, default="")


@dataclass(frozen=True, slots=True)
class Refusal(Message):
    """A refusal of a frame: a code of `REASONS`; for a table that does not fit also a code and a column of the schema.

    >>> Refusal("schema", "not-a-number", "age").detail
    "column 'age': not-a-number"
    >>> Refusal("steps").detail
    "the run has more local steps than the site's policy permits"
    """

    kind = REFUSAL
    reason: str = value_field(lambda value: known_code(str(value)))
    misfit: str = value_field(lambda value: value if value in MISFIT_CODES else "", default="")
    column: str = value_field(_text, default="")

    def __post_init__(self) -> None:
        if not self.misfit:
            object.__setattr__(self, "column", "")

    @property
    def detail(self) -> str:
        """The text of the codes."""
        column = f"column {self.column!r}: " if self.column else ""
        return f"{column}{self.misfit}" if self.misfit else REASONS[self.reason]


@dataclass(frozen=True, slots=True)
class RunOver(Message):
    """Tells a site that the server has no more work for it; the site acknowledges it with the same."""

    kind = OVER


@dataclass(frozen=True, slots=True, eq=False)
class RoundOrders(Message):
    """The request of a round to a site.

    It has the broadcasts, with the digest of each decoded channel; the orders of the site's clients, one for each that
    trains alone; the memory version that each reporter starts from, None for no memory; and the oldest round that the
    server may resume from.
    """

    kind = ORDERS
    run: str = value_field(wire_format.name)
    round: int = value_field(wire_format.integer)
    keep_from: int = value_field(wire_format.integer)
    broadcasts: Mapping[str, Broadcast] = wire_field(read_broadcasts, write_broadcasts)
    orders: tuple[WorkOrder, ...] = blob_fields(WorkOrder, memory={}, broadcasts={})
    versions: Mapping[int, MemoryVersion | None] = mapping_field(
        wire_format.whole_key,
        lambda version: None if version is None else MemoryVersion.parse(version),
        lambda version: None if version is None else str(version),
    )
    digests: Mapping[str, bytes] = mapping_field(wire_format.name, bytes.fromhex, bytes.hex)


@dataclass(frozen=True, slots=True, eq=False)
class RoundReports(Message):
    """A site's reply: a report per cohort, without client memory, and the clients whose memory was ``updated``; or the
    channels that it ``need``s in full, since it lacks the version that their broadcast is relative to."""

    kind = REPORTS
    run: str = value_field(wire_format.name)
    round: int = value_field(wire_format.integer)
    reports: tuple[Report, ...] = blob_fields(Report, (), memory={})
    need: tuple[str, ...] = value_field(lambda names: tuple(map(wire_format.name, names)), default=())
    updated: frozenset[int] = value_field(
        lambda clients: frozenset(wire_format.integers(clients)), sorted, default=frozenset()
    )


@dataclass(frozen=True, slots=True, eq=False)
class SiteEvaluationRequest(Message):
    """Asks a site to evaluate the full model after a round on its test rows; ``digest`` is the model's."""

    kind = EVALUATION
    run: str = value_field(wire_format.name)
    round: int = value_field(wire_format.integer)
    broadcasts: Mapping[str, Broadcast] = wire_field(read_broadcasts, write_broadcasts)
    digest: bytes = value_field(bytes.fromhex, bytes.hex)


@dataclass(frozen=True, slots=True)
class SiteEvaluationReply(Message):
    """A site's sums over its test rows: the loss and its divisor, the hits among the labels if the task counts any, and
    the number of rows; further metrics of the task, and sketches of them, as its policy permits. No row and no output
    leaves the site."""

    kind = EVALUATION_REPLY
    run: str = value_field(wire_format.name)
    round: int = value_field(wire_format.integer)
    digest: bytes = value_field(bytes.fromhex, bytes.hex)
    rows: int = value_field(partial(wire_format.integer, maximum=1 << 53), default=0)
    loss: float = value_field(lambda value: wire_format.as_number(value) or 0.0, wire_format.number, default=0.0)
    weight: float = value_field(lambda value: wire_format.as_number(value) or 0.0, wire_format.number, default=0.0)
    hits: float | None = value_field(wire_format.as_number, wire_format.number, default=None)
    labels: float | None = value_field(wire_format.as_number, wire_format.number, default=None)
    metrics: Mapping[str, float] = mapping_field(wire_format.name, _finite, default_factory=dict)
    sketches: Mapping[str, Sketch] = mapping_field(wire_format.name, _read_sketch, dict, default_factory=dict)
    kept_back: bool = value_field(lambda value: value is True, default=False)
    """Whether the site has test rows but fewer than its policy permits to report."""


def pack_batch(frames: list[bytes]) -> bytes:
    """Pack several frames into one.

    >>> unpack_batch(pack_batch([b"a", b"bc"]), limit=100)
    [b'a', b'bc']
    """
    return wire_format.pack(BATCH, {"protocol": PROTOCOL}, frames)


def unpack_batch(data: wire_format.Blob, *, limit: int | None = None) -> list[bytes]:
    """Return the frames that `pack_batch` packed."""
    frame = wire_format.unpack(data, BATCH, limit=limit)
    check_protocol(frame.head)
    return [bytes(blob) for blob in frame.blobs]


def frame_digest(data: bytes) -> str:
    """Return the digest that identifies a frame."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class ProtocolError(HansaError):
    """A refused message; ``reason`` is a code. For a table that does not fit its schema, ``misfit`` and ``column`` give
    the cause. The detail is not sent."""

    def __init__(self, reason: str, detail: str, misfit: str = "", column: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.misfit, self.column = reason, detail, misfit, column


def refuse(fault: object, reason: str, detail: str) -> None:
    """Raise `ProtocolError` if there is a fault."""
    if fault:
        raise ProtocolError(reason, detail)


REASONS = {
    # a frame that cannot be read
    "oversize": "the message has more bytes than the site's policy permits",
    "truncated": "the message is incomplete",
    "damaged": "the digest of the message does not match",
    "version": "the site has another version of Hansa or of the protocol",
    "inflated": "the message would unpack to far more than its size",
    "malformed": "the message is not one of the protocol",
    # a message that is not for this site, or asks for more than it permits
    "charge": "the site is not enrolled in this run",
    "site": "the message is for another site: the keys or --site of two sites are exchanged",
    "run": "the message is of another run",
    "round": "the message mixes rounds, or releases memory of future rounds",
    "rounds": "the run has more rounds than the site's policy permits",
    "steps": "the run has more local steps than the site's policy permits",
    "code": "the configuration names code that the site's policy does not list under factories",
    "data": "the configuration names data that the site's policy does not list",
    "channels": "the message has other channels than the algorithm",
    "clients": "the message is for clients of other sites, or for one client twice",
    "stamps": "the memory version of a client is missing",
    "work": "the order has other work than the configuration",
    "rows": "an update would be computed from fewer rows than the site's policy permits (min_rows)",
    "budget": "the site's policy permits no more trainings or evaluations",
    "paths": "the configuration names a file that the site's policy does not list under data",
    "parameters": "the model has more parameters than the site's policy permits",
    # the site's data or work does not fit, or fails
    "config": "the site cannot use the configuration",
    "site-data": "the site's data cannot be read, or has another number of clients",
    "schema": "the site's table does not fit the schema",
    "no-schema": "the site has tables, which need a schema: the server's configuration has no data.options.schema",
    "no-tables": "the site has no tables: its data is not a folder of CSV files",
    "model": "the site cannot build the model, or has another one",
    "memory": "the site has lost the memory of a client: restore it there, or restart the server with --forget CLIENT",
    "disk": "the site cannot write to its disk",
    "non-finite": "the parameters of a client became non-finite; a smaller local rate or max_grad_norm may help",
    "base": "the broadcast does not decode to the model that was sent",
    "failed": "the work failed at the site; its own log says why",
    # a reply to an enrollment that the server refuses
    "hello": "the site's reply to the enrollment is not acceptable",
}
"""The codes, with the text that the server prints."""


def known_code(code: str) -> str:
    """Return a code of `REASONS`; any other becomes ``failed``.

    >>> known_code("disk"), known_code("/data/patients.csv")
    ('disk', 'failed')
    """
    return code if code in REASONS else "failed"


def code_of(error: BaseException) -> str:
    """Return the code of an error that happened at a site.

    >>> code_of(OSError(28, "No space left on device", "/data/patients")), code_of(ZeroDivisionError())
    ('disk', 'failed')
    """
    reason = getattr(error, "reason", None)
    if isinstance(error, HansaError) and isinstance(reason, str):
        return known_code(reason)
    if isinstance(error, DataError):
        return "site-data"
    return "disk" if isinstance(error, (OSError, sqlite3.Error)) else "failed"


def without_details(dropped: Iterable[DroppedClient]) -> tuple[DroppedClient, ...]:
    """Return dropped clients with their numbers and codes only; the details go to the site's log."""
    codes = []
    for client in dropped:
        if client.detail:
            log.warning("client %d was left out (%s): %s", client.client, client.reason, client.detail)
        codes.append(DroppedClient(client.client, known_code(client.reason)))
    return tuple(codes)


def with_texts(site: str, dropped: Iterable[DroppedClient]) -> tuple[DroppedClient, ...]:
    """Return dropped clients of a site with the server's text for each code."""
    codes = [(client.client, known_code(client.reason)) for client in dropped]
    return tuple(DroppedClient(client, code, f"site {site}: {REASONS[code]}") for client, code in codes)


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
