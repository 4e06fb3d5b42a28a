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

from hansa.errors import HansaError
from hansa.rounds import frames
from hansa.rounds.frames import Blobs, FrameError
from hansa.rounds.messages import Delivery, Order, Report, Upload, read_mail, write_mail
from hansa.types import Vector

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
    mail: Mapping[str, Delivery]
    orders: tuple[Order, ...]
    stamps: Mapping[int, Stamp | None]
    digests: Mapping[str, bytes]

    def to_bytes(self) -> bytes:
        blobs = Blobs()
        head = {
            "protocol": PROTOCOL,
            "run": self.run,
            "round": self.round,
            "keep_from": self.keep_from,
            "mail": write_mail(self.mail, blobs),
            "orders": [blobs.bytes(replace(order, mail={}, memory={}).to_bytes()) for order in self.orders],
            "digests": {name: digest.hex() for name, digest in self.digests.items()},
            "stamps": {str(client): None if stamp is None else str(stamp) for client, stamp in self.stamps.items()},
        }
        return frames.pack("orders", head, blobs.found)

    @classmethod
    def from_bytes(cls, data: frames.Blob, *, limit: int | None = None) -> RoundOrders:
        frame = frames.unpack(data, "orders", limit=limit)
        head = checked(frame.head)
        with frames.reading("orders"):
            return cls(
                frames.name(head["run"]),
                frames.integer(head["round"]),
                frames.integer(head["keep_from"]),
                read_mail(head["mail"], frame),
                tuple(Order.from_bytes(frame.take(at)) for at in head["orders"]),
                {
                    frames.whole_key(client): None if stamp is None else Stamp.parse(stamp)
                    for client, stamp in head["stamps"].items()
                },
                {frames.name(name): bytes.fromhex(digest) for name, digest in head["digests"].items()},
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
        return frames.pack("reports", head, blobs.found)

    @classmethod
    def from_bytes(cls, data: frames.Blob, *, limit: int | None = None) -> RoundReports:
        frame = frames.unpack(data, "reports", limit=limit)
        head = checked(frame.head)
        with frames.reading("reports"):
            return cls(
                frames.name(head["run"]),
                frames.integer(head["round"]),
                tuple(Report.from_bytes(frame.take(at)) for at in head["reports"]),
                tuple(frames.name(name) for name in head["need"]),
                frozenset(frames.integers(head["kept"])),
            )


@dataclass(frozen=True, slots=True, eq=False)
class Exam:
    """The model after a round, whole, for a site to try on the test rows that it has; ``digest`` is the model's."""

    run: str
    round: int
    mail: Mapping[str, Delivery]
    digest: bytes

    def to_bytes(self) -> bytes:
        blobs = Blobs()
        head = {
            "protocol": PROTOCOL,
            "run": self.run,
            "round": self.round,
            "mail": write_mail(self.mail, blobs),
            "digest": self.digest.hex(),
        }
        return frames.pack("exam", head, blobs.found)

    @classmethod
    def from_bytes(cls, data: frames.Blob, *, limit: int | None = None) -> Exam:
        frame = frames.unpack(data, "exam", limit=limit)
        head = checked(frame.head)
        with frames.reading("exam"):
            return cls(
                frames.name(head["run"]),
                frames.integer(head["round"]),
                read_mail(head["mail"], frame),
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
            "loss": frames.number(self.loss),
            "weight": frames.number(self.weight),
            "hits": frames.number(self.hits),
        }
        return frames.pack("marks", head)

    @classmethod
    def from_bytes(cls, data: frames.Blob, *, limit: int | None = None) -> Marks:
        head = checked(frames.unpack(data, "marks", limit=limit).head)
        with frames.reading("marks"):
            return cls(
                frames.name(head["run"]),
                frames.integer(head["round"]),
                bytes.fromhex(head["digest"]),
                frames.integer(head["rows"], most=1 << 53),
                float(frames.as_number(head["loss"]) or 0.0),
                float(frames.as_number(head["weight"]) or 0.0),
                frames.as_number(head["hits"]),
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
        self.last[reason] = frames.sentence(detail)

    def note_error(self, error: HansaError) -> None:
        """Count what was raised: by its own reason where it has one."""
        self.note(str(getattr(error, "reason", "malformed")), str(getattr(error, "detail", error)))
