"""Messages between the server and its clients: work orders out, reports back. All serialize to bytes.

Both are batches: an order asks some clients for work from one version of the model, a report has a row for each.

Engines in this process pass the broadcast vector uncopied. Over a network `OpenedRound.for_receiver` returns the
packets of each receiver, relative to the version that it holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

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


def write_broadcasts(broadcasts: Mapping[str, Broadcast], blobs: Blobs) -> dict[str, Any]:
    """Encode broadcasts for the head of a frame."""
    return {
        name: [broadcast.version, broadcast.base, [blobs.bytes(packet.bytes) for packet in broadcast.packets]]
        for name, broadcast in broadcasts.items()
    }


def read_broadcasts(entry: Mapping[Any, Any], frame: Frame) -> dict[str, Broadcast]:
    """Decode the result of `write_broadcasts`."""
    return {
        wire_format.name(name): Broadcast(
            wire_format.integer(version),
            None if base is None else wire_format.integer(base),
            tuple(frame.packet(index) for index in packets),
        )
        for name, (version, base, packets) in entry.items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class WorkOrder:
    """The work of some clients in one round, from one version of the model.

    Clients that train alone are one order of any number, of which `part` makes smaller ones. A gossiping cluster is an
    order that is not divided.

    Args:
        run: The run.
        round: The round of the version.
        clients: The clients.
        works: The work of each client.
        base: The digest of the model that the broadcasts decode to.
        broadcasts: The packets of each channel.
        key: The run's key.
        cohort: The number of the gossiping cluster; None if the clients train alone.
        reporters: The clients that report; None for all.
        memory: The memory of each reporter that has one.
        absent: Clients that are unreachable; the others continue without them.
        mean: Whether the report contains the mean of all final models.
        attack: The attack of a fault plan's malicious clients on their neighbours.
    """

    run: str
    round: int
    clients: tuple[int, ...]
    works: tuple[Work, ...]
    base: bytes
    broadcasts: Mapping[str, Broadcast]
    key: Key
    cohort: int | None = None
    reporters: tuple[int, ...] = None  # type: ignore[assignment]
    memory: Mapping[int, Vectors] = field(default_factory=dict)
    absent: tuple[int, ...] = ()
    mean: bool = False
    attack: Attack | None = None

    def __post_init__(self) -> None:
        if self.reporters is None:
            object.__setattr__(self, "reporters", self.clients)

    def part(self, indices: slice | Sequence[int]) -> WorkOrder:
        """Return the order of the clients at these indices; they train alone."""
        if isinstance(indices, slice):
            clients, works = self.clients[indices], self.works[indices]
        else:
            clients = tuple([self.clients[index] for index in indices])
            works = tuple([self.works[index] for index in indices])
        memory = {client: self.memory[client] for client in clients if client in self.memory} if self.memory else {}
        return replace(self, clients=clients, reporters=clients, works=works, memory=memory)

    def to_bytes(self) -> bytes:
        """Encode the order as one frame."""
        blobs = Blobs()
        head = {
            "run": self.run,
            "round": self.round,
            "cohort": self.cohort,
            "clients": self.clients,
            "reporters": self.reporters,
            "works": self.works,
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
            clients = wire_format.integers(head["clients"])
            works = tuple(Work(wire_format.integer(steps), wire_format.integer(size)) for steps, size in head["works"])
            if len(works) != len(clients):
                raise FrameError(f"frame: {len(works)} works for {len(clients)} clients.")
            seed, path = head["key"]
            return cls(
                wire_format.name(head["run"]),
                wire_format.integer(head["round"]),
                clients,
                works,
                bytes.fromhex(head["base"]),
                read_broadcasts(head["mail"], frame),
                Key(wire_format.integer(seed, maximum=1 << 256)).child(*path),
                _read_cohort(head["cohort"]),
                wire_format.integers(head["reporters"]),
                {wire_format.whole_key(c): wire_format.read_tensors(rows, frame) for c, rows in head["memory"].items()},
                wire_format.integers(head["absent"]),
                head["mean"] is True,
                _read_attack(head.get("attack")),
            )


def _read_cohort(value: Any) -> int | None:
    return None if value is None else wire_format.integer(value)


def _read_attack(value: Any) -> Attack | None:
    if value is None:
        return None
    clients, kind, scale = value
    return Attack(wire_format.integers(clients), wire_format.name(kind), float(scale))  # type: ignore[arg-type]


def joined_orders(orders: Iterable[WorkOrder]) -> list[WorkOrder]:
    """Return orders of clients that train alone as one order for each version of the model."""
    by_version: dict[int, list[WorkOrder]] = {}
    for order in orders:
        by_version.setdefault(order.round, []).append(order)
    joined = []
    for _, group in sorted(by_version.items()):
        clients = tuple(client for order in group for client in order.clients)
        works = tuple(work for order in group for work in order.works)
        memory = {client: rows for order in group for client, rows in order.memory.items()}
        joined.append(replace(group[0], clients=clients, reporters=clients, works=works, memory=memory))
    return joined


Rows: TypeAlias = "torch.Tensor | Sequence[Packet]"
"""What clients upload on a channel: a packet of each, or, uncompressed, a matrix with a row of each."""


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """The report of some clients of an order. A client's memory is committed only after the round has closed with its
    upload accepted.

    Args:
        run: The run of the order.
        round: The round of the order.
        base: The digest of the model that the clients started from.
        cohort: The gossiping cluster; None if the clients trained alone.
        clients: The clients that upload.
        rows: Their uploads on each channel.
        losses: The mean training loss of each; None if it computed none.
        memory: The new memory of each client that has one.
        dropped: Clients that dropped out.
        peer_bytes: The bytes that each client sent to neighbours.
        exchanges: The number of gossip exchanges.
        info: Further numbers of a gossiping cluster.
        mean: If requested, the mean of the final models of ``trained`` clients, followed by their buffers.
        trained: The number of models in ``mean``.
    """

    run: str
    round: int
    base: bytes
    cohort: int | None = None
    clients: Sequence[int] = ()
    rows: Mapping[str, Rows] = field(default_factory=dict)
    losses: Sequence[float | None] = ()
    memory: Mapping[int, Vectors] = field(default_factory=dict)
    dropped: tuple[DroppedClient, ...] = ()
    peer_bytes: Mapping[int, int] = field(default_factory=dict)
    exchanges: int = 0
    info: Mapping[str, float] = field(default_factory=dict)
    mean: Vector | None = None
    trained: int = 0

    @classmethod
    def on(cls, order: WorkOrder, **facts: Any) -> Report:
        """Return a report on an order."""
        return cls(order.run, order.round, order.base, order.cohort, **facts)

    @classmethod
    def without(cls, order: WorkOrder, reason: str, detail: str) -> Report:
        """Return a report that drops all reporters of an order."""
        return cls.on(order, dropped=tuple(DroppedClient(client, reason, detail) for client in order.reporters))

    def packets(self, index: int) -> dict[str, Packet]:
        """Return the packet of one client on each channel."""
        return {
            name: Packet.of(rows[index]) if isinstance(rows, torch.Tensor) else rows[index]
            for name, rows in self.rows.items()
        }

    def part(self, indices: Sequence[int], *, clients_only: bool = True) -> Report:
        """Return the report of the clients at these indices; ``clients_only`` omits the facts about the whole batch,
        such as dropped clients and the bytes between neighbours."""
        clients = [self.clients[index] for index in indices]
        chosen = replace(
            self,
            clients=clients,
            rows={
                name: rows[list(indices)] if isinstance(rows, torch.Tensor) else [rows[index] for index in indices]
                for name, rows in self.rows.items()
            },
            losses=[self.losses[index] for index in indices],
            memory={c: self.memory[c] for c in clients if type(c) is int and c in self.memory} if self.memory else {},
        )
        if not clients_only:
            return chosen
        return replace(chosen, dropped=(), peer_bytes={}, exchanges=0, info={}, mean=None, trained=0)

    def to_bytes(self) -> bytes:
        """Encode the report as one frame."""
        blobs = Blobs()
        uploads = [self.packets(index) for index in range(len(self.clients))]
        head = {
            "run": self.run,
            "round": self.round,
            "base": self.base.hex(),
            "cohort": self.cohort,
            "clients": list(self.clients),
            "packets": {name: [blobs.bytes(packets[name].bytes) for packets in uploads] for name in self.rows},
            "losses": [wire_format.number(loss) for loss in self.losses],
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
            clients = tuple(head["clients"])
            rows = {
                wire_format.name(name): [frame.packet(index) for index in packets]
                for name, packets in head["packets"].items()
            }
            losses = [wire_format.as_number(loss) for loss in head["losses"]]
            lengths = {len(losses), *(len(packets) for packets in rows.values())}
            if lengths != {len(clients)}:
                raise FrameError(f"frame: expected columns with one entry for each of {len(clients)} clients.")
            return cls(
                head["run"],
                head["round"],
                bytes.fromhex(head["base"]),
                _read_cohort(head["cohort"]),
                clients,
                rows,
                losses,
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


class Trained(NamedTuple):
    """The training result of an order before it is encoded: a report without uploads, the change of each reporter's
    model and buffers, and what its own loop reports, by channel."""

    report: Report
    changes: Sequence[Vector] | Vector = ()
    buffers: Sequence[Vector] = ()
    reports: Mapping[str, Sequence[Vector]] = {}


def joined_reports(reports: Sequence[Report]) -> Report:
    """Return reports of clients of one order that trained alone as one report."""
    names = next((report.rows for report in reports if report.clients), {})
    uploading = [report for report in reports if report.clients]
    return replace(
        reports[0],
        clients=[client for report in uploading for client in report.clients],
        rows={name: [r.packets(index)[name] for r in uploading for index in range(len(r.clients))] for name in names},
        losses=[loss for report in uploading for loss in report.losses],
        memory={client: rows for report in uploading for client, rows in report.memory.items()},
        dropped=tuple(dropped for report in reports for dropped in report.dropped),
    )


def in_client_order(
    reports: Iterable[Report], orders: Iterable[WorkOrder], missing: Collection[int] = ()
) -> Iterator[Report]:
    """Yield reports in the order of the orders' reporters, as soon as possible; those of other clients come last.

    A report whose clients are not consecutive there is divided. No report is expected of ``missing`` clients.
    """
    requested = tuple(client for order in orders for client in order.reporters if client not in missing)
    position_of: dict[int, int] = {}
    waiting: dict[int, tuple[int, Report | None]] = {}
    late: list[Report] = []
    next_position, received = 0, set[int]()
    for report in reports:
        count = len(report.clients)
        due = requested[next_position : next_position + count]
        pieces: Iterable[tuple[int, int, Report | None]] = ((next_position, count, report),)
        if report.dropped or not due or tuple(report.clients) != due:  # not just the clients that are next
            position_of = position_of or {client: position for position, client in enumerate(requested)}
            pieces = _consecutive(report, position_of)
        for first, count, piece in pieces:
            if first < 0 or first in received:
                late += [] if piece is None else [piece]
            else:
                received.update(range(first, first + count))
                waiting[first] = count, piece
        while next_position in waiting:
            count, piece = waiting.pop(next_position)
            next_position += count
            if piece is not None:
                yield piece
    yield from (piece for first in sorted(waiting) if (piece := waiting[first][1]) is not None)
    yield from late


def _consecutive(report: Report, position_of: Mapping[int, int]) -> Iterator[tuple[int, int, Report | None]]:
    """Yield the pieces of a report with consecutive clients, each with its first position and the number of positions:
    -1 for clients of no order, no report for those that dropped out."""
    positions = [position_of.get(client, -1) if type(client) is int else -1 for client in report.clients]
    dropped = [position_of[lost.client] for lost in report.dropped if lost.client in position_of]
    span = sorted({*positions, *dropped})
    contiguous = bool(span) and span[0] >= 0 and span[-1] - span[0] + 1 == len(span)
    if report.cohort is not None or len(span) < 2 or (contiguous and positions == sorted(positions)):
        yield span[0] if span else -1, len(span) if contiguous else 1, report
        return
    yield from ((position, 1, report.part([index])) for index, position in enumerate(positions))
    yield from ((position, 1, None) for position in dropped)
    yield -1, 1, report.part([], clients_only=False)


def scoped(memory: Mapping[str, torch.Tensor], scope: str) -> Vectors:
    """Return the rows of a client's memory that belong to one component.

    >>> sorted(scoped({"solver/control": torch.zeros(1), "uplink/model/residual": torch.zeros(1)}, "solver"))
    ['control']
    """
    if not memory:
        return {}
    prefix = scope + "/"
    return {name[len(prefix) :]: row for name, row in memory.items() if name.startswith(prefix)}
