"""The messages of a round between the server and a site, and of an evaluation at the sites."""

from __future__ import annotations

import hashlib
import math
import re
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch

from hansa.core.errors import HansaError
from hansa.core.types import Vector
from hansa.rounds import wire_format
from hansa.rounds.messages import Broadcast, Report, WorkOrder, read_broadcasts, write_broadcasts
from hansa.rounds.wire_format import Blobs, Frame, FrameError
from hansa.training.metrics import Sketch

PROTOCOL = 3
"""Incremented when the meaning of a message changes. Messages of another version are refused."""

ORDERS, REPORTS, EVALUATION, EVALUATION_REPLY = "orders", "reports", "exam", "marks"
"""The kinds of frames, as named on the wire."""


class MemoryVersion(NamedTuple):
    """Names a version of a client's memory: the round that made it, and the digest of the upload sent with it.

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
    def of_upload(cls, report: Report, place: int) -> MemoryVersion:
        """Return the version of the memory that a client's upload in a report was made with."""
        state, packets = hashlib.blake2b(digest_size=16), report.packets(place)
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


class Message:
    """Base of the messages: a frame of a ``kind``, whose head also has the version of the protocol."""

    __slots__ = ()
    kind: ClassVar[str]

    def _head(self, blobs: Blobs) -> dict[str, Any]:
        """Return the head of the frame, and add large contents to ``blobs``."""
        raise NotImplementedError

    @classmethod
    def _read(cls, head: Any, frame: Frame) -> Self:
        raise NotImplementedError

    def to_bytes(self) -> bytes:
        blobs = Blobs()
        head = self._head(blobs)
        return wire_format.pack(self.kind, {"protocol": PROTOCOL, **head}, blobs.blobs)

    @classmethod
    def from_bytes(cls, data: wire_format.Blob, *, limit: int | None = None) -> Self:
        """Read a frame of at most ``limit`` bytes, or raise `FrameError`."""
        frame = wire_format.unpack(data, cls.kind, limit=limit)
        head = check_protocol(frame.head)
        with wire_format.reading(cls.kind):
            return cls._read(head, frame)


@dataclass(frozen=True, slots=True, eq=False)
class RoundOrders(Message):
    """The request of a round to a site.

    It has the broadcasts, with the digest of each decoded channel; the orders of the site's clients, one for each that
    trains alone; the memory version that each reporter starts from, None for no memory; and the oldest round that the
    server may resume from.
    """

    kind = ORDERS
    run: str
    round: int
    keep_from: int
    broadcasts: Mapping[str, Broadcast]
    orders: tuple[WorkOrder, ...]
    versions: Mapping[int, MemoryVersion | None]
    digests: Mapping[str, bytes]

    def _head(self, blobs: Blobs) -> dict[str, Any]:
        return {
            "run": self.run,
            "round": self.round,
            "keep_from": self.keep_from,
            "mail": write_broadcasts(self.broadcasts, blobs),
            "orders": [blobs.bytes(replace(order, broadcasts={}, memory={}).to_bytes()) for order in self.orders],
            "digests": {name: digest.hex() for name, digest in self.digests.items()},
            "stamps": {
                str(client): None if version is None else str(version) for client, version in self.versions.items()
            },
        }

    @classmethod
    def _read(cls, head: Any, frame: Frame) -> Self:
        return cls(
            wire_format.name(head["run"]),
            wire_format.integer(head["round"]),
            wire_format.integer(head["keep_from"]),
            read_broadcasts(head["mail"], frame),
            tuple(WorkOrder.from_bytes(frame.take(at)) for at in head["orders"]),
            {
                wire_format.whole_key(client): None if version is None else MemoryVersion.parse(version)
                for client, version in head["stamps"].items()
            },
            {wire_format.name(name): bytes.fromhex(digest) for name, digest in head["digests"].items()},
        )


@dataclass(frozen=True, slots=True, eq=False)
class RoundReports(Message):
    """A site's reply: a report per cohort, without client memory, and the clients whose memory was ``updated``; or the
    channels that it ``need``s in full, since it lacks the version that their broadcast is relative to."""

    kind = REPORTS
    run: str
    round: int
    reports: tuple[Report, ...] = ()
    need: tuple[str, ...] = ()
    updated: frozenset[int] = frozenset()

    def _head(self, blobs: Blobs) -> dict[str, Any]:
        return {
            "run": self.run,
            "round": self.round,
            "reports": [blobs.bytes(replace(report, memory={}).to_bytes()) for report in self.reports],
            "need": list(self.need),
            "kept": sorted(self.updated),
        }

    @classmethod
    def _read(cls, head: Any, frame: Frame) -> Self:
        return cls(
            wire_format.name(head["run"]),
            wire_format.integer(head["round"]),
            tuple(Report.from_bytes(frame.take(at)) for at in head["reports"]),
            tuple(wire_format.name(name) for name in head["need"]),
            frozenset(wire_format.integers(head["kept"])),
        )


@dataclass(frozen=True, slots=True, eq=False)
class SiteEvaluationRequest(Message):
    """Asks a site to evaluate the full model after a round on its test rows; ``digest`` is the model's."""

    kind = EVALUATION
    run: str
    round: int
    broadcasts: Mapping[str, Broadcast]
    digest: bytes

    def _head(self, blobs: Blobs) -> dict[str, Any]:
        return {
            "run": self.run,
            "round": self.round,
            "mail": write_broadcasts(self.broadcasts, blobs),
            "digest": self.digest.hex(),
        }

    @classmethod
    def _read(cls, head: Any, frame: Frame) -> Self:
        return cls(
            wire_format.name(head["run"]),
            wire_format.integer(head["round"]),
            read_broadcasts(head["mail"], frame),
            bytes.fromhex(head["digest"]),
        )


@dataclass(frozen=True, slots=True)
class SiteEvaluationReply(Message):
    """A site's sums over its test rows: the loss and its divisor, the hits among the labels if the task counts any, and
    the number of rows; further metrics of the task, and sketches of them, as its policy permits. No row and no output
    leaves the site."""

    kind = EVALUATION_REPLY
    run: str
    round: int
    digest: bytes
    rows: int = 0
    loss: float = 0.0
    weight: float = 0.0
    hits: float | None = None
    labels: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    sketches: Mapping[str, Sketch] = field(default_factory=dict)
    kept_back: bool = False
    """Whether the site has test rows but fewer than its policy permits to report."""

    def _head(self, blobs: Blobs) -> dict[str, Any]:
        more = {"metrics": dict(self.metrics), "sketches": {name: dict(each) for name, each in self.sketches.items()}}
        return {
            **{name: value for name, value in more.items() if value},
            **({"kept_back": True} if self.kept_back else {}),
            "run": self.run,
            "round": self.round,
            "digest": self.digest.hex(),
            "rows": self.rows,
            "loss": wire_format.number(self.loss),
            "weight": wire_format.number(self.weight),
            "hits": wire_format.number(self.hits),
            "labels": wire_format.number(self.labels),
        }

    @classmethod
    def _read(cls, head: Any, frame: Frame) -> Self:
        return cls(
            wire_format.name(head["run"]),
            wire_format.integer(head["round"]),
            bytes.fromhex(head["digest"]),
            wire_format.integer(head["rows"], most=1 << 53),
            float(wire_format.as_number(head["loss"]) or 0.0),
            float(wire_format.as_number(head["weight"]) or 0.0),
            wire_format.as_number(head["hits"]),
            wire_format.as_number(head["labels"]),
            {wire_format.name(name): _finite(value) for name, value in head.get("metrics", {}).items()},
            {wire_format.name(name): _read_sketch(sketch) for name, sketch in head.get("sketches", {}).items()},
            head.get("kept_back") is True,
        )


def _finite(value: Any) -> float:
    number = None if isinstance(value, str) else wire_format.as_number(value)
    if number is None or not math.isfinite(number):
        raise FrameError(f"frame: {reprlib.repr(value)} is not a finite number.")
    return int(value) if isinstance(value, int) else number


def _read_sketch(sketch: Any) -> Sketch:
    if not isinstance(sketch, dict) or not all(isinstance(rows, list) for rows in sketch.values()):
        raise FrameError("frame: a sketch that is not lists of rows by name.")
    return {wire_format.name(name): [[_finite(each) for each in row] for row in rows] for name, rows in sketch.items()}


def check_protocol(head: Any) -> Any:
    """Return the head of a frame, or raise if its protocol version differs."""
    version = head.get("protocol") if isinstance(head, dict) else None
    if type(version) is not int or version != PROTOCOL:
        message = f"frame: protocol {reprlib.repr(version)}, expected {PROTOCOL}. Install one version everywhere."
        raise FrameError(message, "version")
    return head


class ProtocolError(HansaError):
    """A message that is refused; ``reason`` is a code. For a table that does not fit its schema, ``misfit`` and
    ``column`` say why. The detail stays where the error happened."""

    def __init__(self, reason: str, detail: str, misfit: str = "", column: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.misfit, self.column = reason, detail, misfit, column


@dataclass(slots=True)
class Refusals:
    """Counts refused messages by reason, and keeps the last detail of each."""

    counts: Counter[str] = field(default_factory=Counter)
    last: dict[str, str] = field(default_factory=dict)

    def record(self, reason: str, detail: str) -> None:
        self.counts[reason] += 1
        self.last[reason] = wire_format.sentence(detail)

    def record_error(self, error: HansaError) -> None:
        """Count an error by its ``reason``, or as malformed."""
        self.record(str(getattr(error, "reason", "malformed")), str(getattr(error, "detail", error)))
