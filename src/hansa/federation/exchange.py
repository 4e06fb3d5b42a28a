"""What travels between the server and a site: one frame out, one frame back, a round."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from hansa.errors import HansaError
from hansa.rounds import frames
from hansa.rounds.frames import Blobs, FrameError
from hansa.rounds.messages import Delivery, Order, Report, Upload
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
            raise FrameError(f"frame: {text!r} names no version of a memory.")
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
            "mail": {
                name: [sent.version, sent.base, [blobs.bytes(packet.bytes) for packet in sent.packets]]
                for name, sent in self.mail.items()
            },
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
            mail = {
                str(name): Delivery(
                    int(version), None if base is None else int(base), tuple(frame.packet(at) for at in packets)
                )
                for name, (version, base, packets) in head["mail"].items()
            }
            return cls(
                str(head["run"]),
                int(head["round"]),
                int(head["keep_from"]),
                mail,
                tuple(Order.from_bytes(frame.blobs[at]) for at in head["orders"]),
                {
                    int(client): None if stamp is None else Stamp.parse(stamp)
                    for client, stamp in head["stamps"].items()
                },
                {str(name): bytes.fromhex(digest) for name, digest in head["digests"].items()},
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
                str(head["run"]),
                int(head["round"]),
                tuple(Report.from_bytes(frame.blobs[at]) for at in head["reports"]),
                tuple(str(name) for name in head["need"]),
                frozenset(int(client) for client in head["kept"]),
            )


def checked(head: Any) -> Any:
    """The head, if it speaks this protocol."""
    spoken = head.get("protocol") if isinstance(head, dict) else None
    if spoken != PROTOCOL:
        raise FrameError(f"frame: protocol {spoken!r}, this side speaks {PROTOCOL}. Install one version everywhere.")
    return head


class NotOurs(HansaError):
    """A message that is well formed and not meant for this place; ``reason`` is a word to count by."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail
