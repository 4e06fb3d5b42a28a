"""Messages between the server and its clients: work orders out, reports back. All serialize to bytes.

Engines in this process pass the broadcast vector uncopied. Over a network `OpenedRound.for_receiver` returns the
packets of each receiver, relative to the version that it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hansa.compress import Packet
from hansa.core.keys import Key
from hansa.core.types import Vector, Vectors
from hansa.gossip.robust import Attack
from hansa.local.work import Work
from hansa.rounds import wire_format
from hansa.rounds.wire_format import Blobs, Frame, FrameError


@dataclass(frozen=True, slots=True)
class DroppedClient:
    """A client dropped from a round, with a short machine-readable reason and a readable detail."""

    client: int
    reason: str
    detail: str = ""


class Broadcast(NamedTuple):
    """The packets of one channel that turn version ``base`` (None: nothing) into ``version``."""

    version: int
    base: int | None
    packets: tuple[Packet, ...]

    @classmethod
    def whole(cls, vector: Vector, version: int = 0) -> Broadcast:
        """Return a broadcast of the vector itself, uncopied."""
        return cls(version, None, (Packet.of(vector, "whole"),))


def write_broadcasts(mail: Mapping[str, Broadcast], blobs: Blobs) -> dict[str, Any]:
    """Encode broadcasts for the head of a frame."""
    return {
        name: [sent.version, sent.base, [blobs.bytes(packet.bytes) for packet in sent.packets]]
        for name, sent in mail.items()
    }


def read_broadcasts(entry: Mapping[Any, Any], frame: Frame) -> dict[str, Broadcast]:
    """Decode the result of `write_broadcasts`."""
    return {
        wire_format.name(name): Broadcast(
            wire_format.integer(version),
            None if base is None else wire_format.integer(base),
            tuple(frame.packet(at) for at in packets),
        )
        for name, (version, base, packets) in entry.items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class WorkOrder:
    """A cohort's work in one round: its clients, reporters, broadcasts and client memory.

    ``absent`` clients are unreachable; the others continue without them. ``base`` is the digest of the model that the
    broadcasts decode to. With ``mean`` the report contains the mean of the cohort's models. ``attack`` is what a fault
    plan lets malicious clients send to their neighbours.
    """

    run: str
    round: int
    cohort: int
    clients: tuple[int, ...]
    reporters: tuple[int, ...]
    work: Work
    base: bytes
    broadcasts: Mapping[str, Broadcast]
    key: Key
    memory: Mapping[int, Vectors] = field(default_factory=dict)
    absent: tuple[int, ...] = ()
    mean: bool = False
    attack: Attack | None = None

    def to_bytes(self) -> bytes:
        """Encode the order as one frame."""
        blobs = Blobs()
        head = {
            "run": self.run,
            "round": self.round,
            "cohort": self.cohort,
            "clients": self.clients,
            "reporters": self.reporters,
            "work": self.work,
            "base": self.base.hex(),
            "mail": write_broadcasts(self.broadcasts, blobs),
            "key": [self.key.seed, self.key.path],
            "memory": {str(client): blobs.tensors(rows) for client, rows in self.memory.items()},
            "absent": self.absent,
            "mean": self.mean,
        }
        if self.attack is not None:
            head["attack"] = [self.attack.clients, self.attack.kind, self.attack.scale]
        return wire_format.pack("order", head, blobs.blobs)

    @classmethod
    def from_bytes(cls, data: wire_format.Blob, *, limit: int | None = None) -> WorkOrder:
        """Decode an order from a frame."""
        frame = wire_format.unpack(data, "order", limit=limit)
        with wire_format.reading("order"):
            head = frame.head
            steps, batch = head["work"]
            seed, path = head["key"]
            return cls(
                wire_format.name(head["run"]),
                wire_format.integer(head["round"]),
                wire_format.integer(head["cohort"]),
                wire_format.integers(head["clients"]),
                wire_format.integers(head["reporters"]),
                Work(wire_format.integer(steps), wire_format.integer(batch)),
                bytes.fromhex(head["base"]),
                read_broadcasts(head["mail"], frame),
                Key(wire_format.integer(seed, most=1 << 256)).child(*path),
                {wire_format.whole_key(c): wire_format.read_tensors(rows, frame) for c, rows in head["memory"].items()},
                wire_format.integers(head["absent"]),
                head["mean"] is True,
                _read_attack(head.get("attack")),
            )


def _read_attack(value: Any) -> Attack | None:
    if value is None:
        return None
    clients, kind, scale = value
    return Attack(wire_format.integers(clients), wire_format.name(kind), float(scale))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, eq=False)
class LocalUpdate:
    """The result of one reporter: the change of its model and buffers, its training loss (None if no client computed)
    and its memory."""

    delta: Vector
    buffers: Vector | None
    loss: float | None
    memory: Vectors = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Upload:
    """One client's upload: a packet per channel, and the fields that the server validates."""

    run: str
    round: int
    base: bytes
    client: int
    packets: Mapping[str, Packet]
    loss: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """A cohort's report. A client's memory is committed only after the round has closed with its upload accepted.

    ``peer_bytes`` are the bytes each client sent to neighbours, ``exchanges`` counts the gossip exchanges. ``mean``,
    if requested, is the mean of the final models of ``trained`` clients, followed by their buffers.
    """

    cohort: int
    uploads: tuple[Upload, ...] = ()
    memory: Mapping[int, Vectors] = field(default_factory=dict)
    dropped: tuple[DroppedClient, ...] = ()
    peer_bytes: Mapping[int, int] = field(default_factory=dict)
    exchanges: int = 0
    info: Mapping[str, float] = field(default_factory=dict)
    mean: Vector | None = None
    trained: int = 0

    def to_bytes(self) -> bytes:
        """Encode the report as one frame."""
        blobs = Blobs()
        uploads = [
            {
                "run": upload.run,
                "round": upload.round,
                "base": upload.base.hex(),
                "client": upload.client,
                "packets": {name: blobs.bytes(packet.bytes) for name, packet in upload.packets.items()},
                "loss": wire_format.number(upload.loss),
            }
            for upload in self.uploads
        ]
        head = {
            "cohort": self.cohort,
            "uploads": uploads,
            "memory": {str(client): blobs.tensors(rows) for client, rows in self.memory.items()},
            "lost": [[lost.client, lost.reason, wire_format.sentence(lost.detail)] for lost in self.dropped],
            "peer": {str(client): sent for client, sent in self.peer_bytes.items()},
            "exchanges": self.exchanges,
            "info": {name: wire_format.number(value) for name, value in self.info.items()},
            "mean": {} if self.mean is None else blobs.tensors({"mean": self.mean}),
            "trained": self.trained,
        }
        return wire_format.pack("report", head, blobs.blobs)

    @classmethod
    def from_bytes(cls, data: wire_format.Blob, *, limit: int | None = None) -> Report:
        """Decode a report from a frame; its uploads are validated later."""
        frame = wire_format.unpack(data, "report", limit=limit)
        with wire_format.reading("report"):
            head = frame.head
            uploads = tuple(
                Upload(
                    item["run"],
                    item["round"],
                    bytes.fromhex(item["base"]),
                    item["client"],
                    {wire_format.name(name): frame.packet(at) for name, at in item["packets"].items()},
                    wire_format.as_number(item["loss"]),
                )
                for item in head["uploads"]
            )
            return cls(
                wire_format.integer(head["cohort"]),
                uploads,
                {wire_format.whole_key(c): wire_format.read_tensors(rows, frame) for c, rows in head["memory"].items()},
                tuple(
                    DroppedClient(
                        wire_format.integer(client, -1),
                        wire_format.name(reason),
                        wire_format.name(detail, wire_format.TEXT_LIMIT),
                    )
                    for client, reason, detail in head["lost"]
                ),
                {wire_format.whole_key(client): wire_format.integer(sent) for client, sent in head["peer"].items()},
                wire_format.integer(head["exchanges"]),
                {wire_format.name(name): _float(value) for name, value in head["info"].items()},
                wire_format.read_tensors(head["mean"], frame).get("mean"),
                wire_format.integer(head["trained"]),
            )


def _float(value: Any) -> float:
    number = wire_format.as_number(value)
    if number is None:
        raise FrameError("frame: a number is missing.")
    return number


def scoped(memory: Mapping[str, torch.Tensor], scope: str) -> Vectors:
    """Return the rows of a client's memory that belong to one component.

    >>> sorted(scoped({"solver/control": torch.zeros(1), "uplink/model/residual": torch.zeros(1)}, "solver"))
    ['control']
    """
    if not memory:
        return {}
    prefix = scope + "/"
    return {name[len(prefix) :]: row for name, row in memory.items() if name.startswith(prefix)}
