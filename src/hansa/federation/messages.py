"""What travels between the server and a site: one frame out, one frame back, a round; an exam and its marks."""

from __future__ import annotations

import hashlib
import re
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from hansa.core.errors import HansaError
from hansa.core.types import Vector
from hansa.rounds import wire_format
from hansa.rounds.messages import Broadcast, Report, Upload, WorkOrder, read_broadcasts, write_broadcasts
from hansa.rounds.wire_format import Blobs, FrameError

PROTOCOL = 1
"""Raised whenever a message changes its meaning: a site of another one is refused."""


class Stamp(NamedTuple):
    """The name of a version of a client's memory: the round that made it, and the digest of the upload it went with.

    >>> Stamp.parse(str(Stamp(3, "ab" * 16))).round
    3
    """

    round: int
    digest: str

    def __str__(self) -> str:
        return f"{self.round}:{self.digest}"

    @classmethod
    def parse(cls, text: object) -> Stamp:
        found = re.fullmatch("([0-9]{1,18}):([0-9a-f]{32})", text) if isinstance(text, str) else None
        if found is None:
            raise FrameError(f"frame: {reprlib.repr(text)} names no version of a memory.")
        return cls(int(found.group(1)), found.group(2))

    @classmethod
    def of(cls, upload: Upload) -> Stamp:
        """The stamp of the memory that goes with an upload."""
        state = hashlib.blake2b(digest_size=16)
        for name in sorted(upload.packets):
            data = upload.packets[name].bytes
            state.update(f"{len(name)}:{name}:{len(memoryview(data).cast('B'))}:".encode())
            state.update(data)
        return cls(upload.round, state.hexdigest())

    def row(self) -> Vector:
        """The stamp as a row that the server's store keeps of the client."""
        return torch.tensor(list(str(self).encode()), dtype=torch.uint8)

    @classmethod
    def from_row(cls, row: Vector) -> Stamp:
        return cls.parse(bytes(row.tolist()).decode("ascii", "replace"))


@dataclass(frozen=True, slots=True, eq=False)
class RoundOrders:
    """All that a site is told of a round: the mail once, with the digest of what each channel must come to; the
    orders of its cohorts; the stamp that each reporter builds upon, None meaning upon nothing; the oldest round that
    the server may still go back to."""

    run: str
    round: int
    keep_from: int
    mail: Mapping[str, Broadcast]
    orders: tuple[WorkOrder, ...]
    stamps: Mapping[int, Stamp | None]
    digests: Mapping[str, bytes]

    def to_bytes(self) -> bytes:
        blobs = Blobs()
        head = {
            "protocol": PROTOCOL,
            "run": self.run,
            "round": self.round,
            "keep_from": self.keep_from,
            "mail": write_broadcasts(self.mail, blobs),
            "orders": [blobs.bytes(replace(order, broadcasts={}, memory={}).to_bytes()) for order in self.orders],
            "digests": {name: digest.hex() for name, digest in self.digests.items()},
            "stamps": {str(client): None if stamp is None else str(stamp) for client, stamp in self.stamps.items()},
        }
        return wire_format.pack("orders", head, blobs.found)

    @classmethod
    def from_bytes(cls, data: wire_format.Blob, *, limit: int | None = None) -> RoundOrders:
        frame = wire_format.unpack(data, "orders", limit=limit)
        head = checked(frame.head)
        with wire_format.reading("orders"):
            return cls(
                wire_format.name(head["run"]),
                wire_format.integer(head["round"]),
                wire_format.integer(head["keep_from"]),
                read_broadcasts(head["mail"], frame),
                tuple(WorkOrder.from_bytes(frame.take(at)) for at in head["orders"]),
                {
                    wire_format.whole_key(client): None if stamp is None else Stamp.parse(stamp)
                    for client, stamp in head["stamps"].items()
                },
                {wire_format.name(name): bytes.fromhex(digest) for name, digest in head["digests"].items()},
            )


@dataclass(frozen=True, slots=True, eq=False)
class RoundReports:
    """A site's answer: a report a cohort, without memory, which stays where it is, and the clients of whom a new
    version was ``kept``; or the channels that it ``need``s whole, since it lacks what their mail builds upon."""

    run: str
    round: int
    reports: tuple[Report, ...] = ()
    need: tuple[str, ...] = ()
    kept: frozenset[int] = frozenset()

    def to_bytes(self) -> bytes:
        blobs = Blobs()
        head = {
            "protocol": PROTOCOL,
            "run": self.run,
            "round": self.round,
            "reports": [blobs.bytes(replace(report, memory={}).to_bytes()) for report in self.reports],
            "need": list(self.need),
            "kept": sorted(self.kept),
        }
        return wire_format.pack("reports", head, blobs.found)

    @classmethod
    def from_bytes(cls, data: wire_format.Blob, *, limit: int | None = None) -> RoundReports:
        frame = wire_format.unpack(data, "reports", limit=limit)
        head = checked(frame.head)
        with wire_format.reading("reports"):
            return cls(
                wire_format.name(head["run"]),
                wire_format.integer(head["round"]),
                tuple(Report.from_bytes(frame.take(at)) for at in head["reports"]),
                tuple(wire_format.name(name) for name in head["need"]),
                frozenset(wire_format.integers(head["kept"])),
            )


@dataclass(frozen=True, slots=True, eq=False)
class Exam:
    """The model after a round, whole, for a site to try on the test rows that it has; ``digest`` is the model's."""

    run: str
    round: int
    mail: Mapping[str, Broadcast]
    digest: bytes

    def to_bytes(self) -> bytes:
        blobs = Blobs()
        head = {
            "protocol": PROTOCOL,
            "run": self.run,
            "round": self.round,
            "mail": write_broadcasts(self.mail, blobs),
            "digest": self.digest.hex(),
        }
        return wire_format.pack("exam", head, blobs.found)

    @classmethod
    def from_bytes(cls, data: wire_format.Blob, *, limit: int | None = None) -> Exam:
        frame = wire_format.unpack(data, "exam", limit=limit)
        head = checked(frame.head)
        with wire_format.reading("exam"):
            return cls(
                wire_format.name(head["run"]),
                wire_format.integer(head["round"]),
                read_broadcasts(head["mail"], frame),
                bytes.fromhex(head["digest"]),
            )


@dataclass(frozen=True, slots=True)
class Marks:
    """What an exam came to at a site: the loss summed over its test rows and what to divide it by, the hits where the
    task counts any, and the rows. No row and no output leaves the site."""

    run: str
    round: int
    digest: bytes
    rows: int = 0
    loss: float = 0.0
    weight: float = 0.0
    hits: float | None = None

    def to_bytes(self) -> bytes:
        head = {
            "protocol": PROTOCOL,
            "run": self.run,
            "round": self.round,
            "digest": self.digest.hex(),
            "rows": self.rows,
            "loss": wire_format.number(self.loss),
            "weight": wire_format.number(self.weight),
            "hits": wire_format.number(self.hits),
        }
        return wire_format.pack("marks", head)

    @classmethod
    def from_bytes(cls, data: wire_format.Blob, *, limit: int | None = None) -> Marks:
        head = checked(wire_format.unpack(data, "marks", limit=limit).head)
        with wire_format.reading("marks"):
            return cls(
                wire_format.name(head["run"]),
                wire_format.integer(head["round"]),
                bytes.fromhex(head["digest"]),
                wire_format.integer(head["rows"], most=1 << 53),
                float(wire_format.as_number(head["loss"]) or 0.0),
                float(wire_format.as_number(head["weight"]) or 0.0),
                wire_format.as_number(head["hits"]),
            )


def checked(head: Any) -> Any:
    """The head, if it speaks this protocol."""
    spoken = head.get("protocol") if isinstance(head, dict) else None
    if type(spoken) is not int or spoken != PROTOCOL:
        told = f"frame: protocol {reprlib.repr(spoken)}, this side speaks {PROTOCOL}"
        raise FrameError(f"{told}. Install one version everywhere.", "version")
    return head


class NotOurs(HansaError):
    """A message that is well formed and not meant for this place; ``reason`` is a word to count by."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(slots=True)
class Refusals:
    """What was refused, counted by reason, and the last detail of each."""

    counts: Counter[str] = field(default_factory=Counter)
    last: dict[str, str] = field(default_factory=dict)

    def note(self, reason: str, detail: str) -> None:
        self.counts[reason] += 1
        self.last[reason] = wire_format.sentence(detail)

    def note_error(self, error: HansaError) -> None:
        """Count what was raised: by its own reason where it has one."""
        self.note(str(getattr(error, "reason", "malformed")), str(getattr(error, "detail", error)))
