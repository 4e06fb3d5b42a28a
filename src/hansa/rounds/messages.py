"""Messages between the server and its clients: work orders out, reports back. All serialize to bytes.

Both are batches: an order asks some clients for work from one version of the model, a report has a row for each.

Engines in this process pass the broadcast vector uncopied. Over a network `OpenedRound.for_receiver` returns the
packets of each receiver, relative to the version that it holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from hansa.compress import Packet
from hansa.compress.links import partial
from hansa.core.keys import Key
from hansa.core.types import Vector, Vectors
from hansa.gossip.robust import Attack
from hansa.local.work import Work
from hansa.rounds.wire_format import (
    TEXT_LIMIT,
    Blobs,
    Frame,
    FrameError,
    Message,
    as_number,
    integer,
    integers,
    mapping_field,
    name,
    number,
    optional,
    read_tensor,
    read_tensors,
    sentence,
    value_field,
    whole_key,
    wire_field,
)  # fmt: skip


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
    def whole(cls, vector: Vector, version: int = 0, link: Any = None) -> Broadcast:
        """Return a broadcast of the vector itself, uncopied; with a downlink, of all entries that it sends."""
        if isinstance(link, partial):
            return cls(version, 0, (link.whole(vector),))
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
        name(channel): Broadcast(
            integer(version), None if base is None else integer(base), tuple(map(frame.packet, packets))
        )
        for channel, (version, base, packets) in entry.items()
    }


def _read_key(entry: Any) -> Key:
    seed, path = entry
    return Key(integer(seed, maximum=1 << 256)).child(*path)


def _read_attack(entry: Any) -> Attack:
    clients, kind, scale = entry
    return Attack(integers(clients), name(kind), float(scale))  # type: ignore[arg-type]


def _write_memory(memory: Mapping[int, Vectors], blobs: Blobs) -> dict[str, Any]:
    return {str(client): blobs.tensors(rows) for client, rows in memory.items()}


def _read_memory(entry: Mapping[Any, Any], frame: Frame) -> dict[int, Vectors]:
    return {whole_key(client): read_tensors(rows, frame) for client, rows in entry.items()}


Rows: TypeAlias = "torch.Tensor | Sequence[Any]"
"""What clients upload on a channel: a packet of each, or, uncompressed, a matrix with a row of each. Before the uplink
encodes them: a vector of each."""


def _packet(rows: Rows, index: int) -> Packet:
    return Packet.of(rows[index]) if isinstance(rows, torch.Tensor) else rows[index]


def _write_rows(rows: Mapping[str, Rows], blobs: Blobs) -> dict[str, list[int]]:
    return {
        name: [blobs.bytes(_packet(column, index).bytes) for index in range(len(column))]
        for name, column in rows.items()
    }


def _read_rows(entry: Mapping[Any, Any], frame: Frame) -> dict[str, list[Packet]]:
    return {name(channel): [frame.packet(index) for index in packets] for channel, packets in entry.items()}


def _write_dropped(dropped: Sequence[DroppedClient]) -> list[list[Any]]:
    return [[lost.client, lost.reason, sentence(lost.detail)] for lost in dropped]


def _read_dropped(entries: Any) -> tuple[DroppedClient, ...]:
    return tuple(
        DroppedClient(integer(client, -1), name(reason), name(detail, TEXT_LIMIT)) for client, reason, detail in entries
    )


def _read_float(value: Any) -> float:
    found = as_number(value)
    if found is None:
        raise FrameError("frame: a number is missing.")
    return found


def _unchecked(value: Any) -> Any:
    """Return what validation compares with the order later."""
    return value


@dataclass(frozen=True, slots=True, eq=False)
class WorkOrder(Message):
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

    kind = "order"
    run: str = value_field(name)
    round: int = value_field(integer)
    clients: tuple[int, ...] = value_field(integers)
    works: tuple[Work, ...] = value_field(lambda pairs: tuple(Work(*map(integer, pair)) for pair in pairs))
    base: bytes = value_field(bytes.fromhex, bytes.hex)
    broadcasts: Mapping[str, Broadcast] = wire_field(read_broadcasts, write_broadcasts)
    key: Key = value_field(_read_key, lambda key: [key.seed, key.path])
    cohort: int | None = value_field(optional(integer), default=None)
    reporters: tuple[int, ...] = value_field(integers, default=None)
    memory: Mapping[int, Vectors] = wire_field(_read_memory, _write_memory, default_factory=dict)
    absent: tuple[int, ...] = value_field(integers, default=())
    mean: bool = value_field(lambda value: value is True, default=False)
    attack: Attack | None = value_field(
        optional(_read_attack), optional(lambda attack: [attack.clients, attack.kind, attack.scale]), default=None
    )

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

    def check_columns(self) -> None:
        """Raise unless every client has its work."""
        if len(self.works) != len(self.clients):
            raise FrameError(f"frame: {len(self.works)} works for {len(self.clients)} clients.")


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


@dataclass(frozen=True, slots=True, eq=False)
class Report(Message):
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

    kind = "report"
    run: str = value_field(_unchecked)
    round: int = value_field(_unchecked)
    base: bytes = value_field(bytes.fromhex, bytes.hex)
    cohort: int | None = value_field(optional(integer), default=None)
    clients: Sequence[int] = value_field(tuple, list, default=())
    rows: Mapping[str, Rows] = wire_field(_read_rows, _write_rows, default_factory=dict)
    losses: Sequence[float | None] = value_field(
        lambda losses: [*map(as_number, losses)], lambda losses: [*map(number, losses)], default=()
    )
    memory: Mapping[int, Vectors] = wire_field(_read_memory, _write_memory, default_factory=dict)
    dropped: tuple[DroppedClient, ...] = value_field(_read_dropped, _write_dropped, default=())
    peer_bytes: Mapping[int, int] = mapping_field(whole_key, integer, default_factory=dict)
    exchanges: int = value_field(integer, default=0)
    info: Mapping[str, float] = mapping_field(name, _read_float, number, default_factory=dict)
    mean: Vector | None = wire_field(
        optional(read_tensor), optional(lambda mean, blobs: blobs.tensor(mean)), default=None
    )
    trained: int = value_field(integer, default=0)

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
        return {name: _packet(rows, index) for name, rows in self.rows.items()}

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

    def check_columns(self) -> None:
        """Raise unless every client that uploads has a packet on each channel and a loss."""
        if {len(self.losses), *map(len, self.rows.values())} != {len(self.clients)}:
            raise FrameError(f"frame: expected columns with one entry for each of {len(self.clients)} clients.")


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
