"""Links (uplinks with error feedback, downlinks that send increments to a replica), and decoding of packets."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch

from hansa.compress.base import Compressor, DenseValues, ParsedPayload, packet_kind, require_compressor
from hansa.compress.dense import cast, identity, sign
from hansa.compress.grid import exceeds_grid, finest_exponent, grid, round_to_grid
from hansa.compress.packet import Buffer, Packet, PacketError, check_all_finite, flat_array, floats
from hansa.compress.quantize import quantize
from hansa.compress.sparse import ShuffledValues, SparseValues
from hansa.core.bounds import Checked, bound
from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.core.keys import Key
from hansa.core.protocols import check_component
from hansa.core.types import State
from hansa.core.vectors import allocator

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Uplink(Protocol):
    """A link from a client to the server. ``send`` is pure: it returns the memory to store on acceptance."""

    __slots__ = ()

    @abstractmethod
    def send(self, x: Tensor, memory: Mapping[str, Tensor], key: Key) -> tuple[Packet, dict[str, Tensor]]:
        """Return the packet for x, and the rows that replace those in ``memory``."""

    @abstractmethod
    def receive(self, packet: Packet, *, dim: int, dtype: torch.dtype) -> Tensor:
        """Decode a received packet. Raise a `PacketError` for one that ``send`` cannot produce."""


class BaseUplink(Uplink):
    """The optional traits of uplinks, with their defaults.

    >>> memoryless(sign()).memory
    ()
    """

    __slots__ = ()
    cites: ClassVar[tuple[str, ...]] = ()

    @property
    def memory(self) -> tuple[str, ...]:
        """Names of the rows stored per client."""
        return ()

    @property
    def on_device(self) -> bool:
        """Whether it sends and receives vectors on a device as they are; otherwise it is given vectors on the CPU."""
        return False


require_uplink = functools.partial(
    check_component, protocol=Uplink, noun="a link", example="error_feedback(sign()) is one, direct() another."
)


@dataclass(frozen=True, slots=True)
class direct:
    """Send the vector itself, without a copy, in both directions. Bytes are counted but serialized only on demand.

    >>> x = torch.ones(10)
    >>> packet, memory = direct().send(x, {}, Key(0))
    >>> packet.nbytes, memory, direct().receive(packet, dim=10, dtype=torch.float32) is packet.content
    (64, {}, True)
    """

    memory: ClassVar[tuple[str, ...]] = ()
    on_device: ClassVar[bool] = True

    def send(self, x: Tensor, memory: Mapping[str, Tensor], key: Key) -> tuple[Packet, dict[str, Tensor]]:
        return Packet.of(x), {}

    def receive(self, packet: Packet, *, dim: int, dtype: torch.dtype) -> Tensor:
        return decode(packet, dim=dim, dtype=dtype, kind="identity")

    def init(self, x: Tensor) -> State:
        return {}

    def broadcast(
        self, x: Tensor, state: State, clients: Sequence[int], round: int, key: Key
    ) -> tuple[ServerBroadcast, State]:
        packet = Packet.of(x, "whole")
        return ServerBroadcast(x, dict.fromkeys(clients, (packet,)), dict.fromkeys(clients), round), state

    def acknowledge(self, state: State, clients: Sequence[int], round: int) -> State:
        return state

    def apply(self, previous: Tensor | None, packets: Sequence[Packet]) -> Tensor:
        if len(packets) != 1:
            raise PacketError(f"direct.apply: {len(packets)} packets, expected one.")
        return decode(packets[0], kind="whole", dim=None if previous is None else previous.numel())


@dataclass(frozen=True, slots=True)
class error_feedback(Checked):
    """Error feedback: Chat = C(Delta + e), e <- Delta + e - Chat ([CAMS] Alg. 2, lines 7-10).

    A client that does not participate keeps its residual (lines 14-16), and so does one whose packet was dropped or
    rejected: the new residual is stored only with an accepted report.

    Args:
        compressor: Compressor of the update plus the residual.

    >>> from hansa.compress import top_k
    >>> before = {"residual": torch.tensor([1.0, 0.0])}
    >>> packet, after = error_feedback(top_k(0.5)).send(torch.tensor([1.0, 3.0]), before, Key(0))
    >>> decode(packet), after["residual"]
    (tensor([0., 3.]), tensor([2., 0.]))
    """

    compressor: Compressor = field(metadata=bound(require_compressor))
    memory: ClassVar[tuple[str, ...]] = ("residual",)
    cites: ClassVar[tuple[str, ...]] = ("wang2022", "karimireddy2019")

    def send(self, x: Tensor, memory: Mapping[str, Tensor], key: Key) -> tuple[Packet, dict[str, Tensor]]:
        residual = memory.get("residual")
        if residual is None:
            total = allocator.empty_like(x).copy_(x.detach())
        elif residual.shape != x.shape or residual.dtype != x.dtype:
            actual, expected = (f"{v.dtype} {tuple(v.shape)}" for v in (residual, x))
            raise HansaError(f"error_feedback: the residual is {actual}, the update {expected}: from another model?")
        else:
            total = torch.add(x.detach(), residual, out=allocator.empty_like(x))
        packet = self.compressor.encode(total, key)
        return packet, {"residual": accumulate(packet, total, -1.0, self.compressor)}

    def receive(self, packet: Packet, *, dim: int, dtype: torch.dtype) -> Tensor:
        return decode(packet, self.compressor, dim=dim, dtype=dtype)


@dataclass(frozen=True, slots=True)
class memoryless(Checked):
    """A compressor without error feedback, for ablations and unbiased quantization.

    Args:
        compressor: Compressor of the update.

    >>> from hansa.compress import top_k
    >>> packet, memory = memoryless(top_k(0.5)).send(torch.tensor([1.0, 3.0]), {}, Key(0))
    >>> decode(packet), memory
    (tensor([0., 3.]), {})
    """

    compressor: Compressor = field(metadata=bound(require_compressor))
    memory: ClassVar[tuple[str, ...]] = ()

    def send(self, x: Tensor, memory: Mapping[str, Tensor], key: Key) -> tuple[Packet, dict[str, Tensor]]:
        return self.compressor.encode(x, key), {}

    def receive(self, packet: Packet, *, dim: int, dtype: torch.dtype) -> Tensor:
        return decode(packet, self.compressor, dim=dim, dtype=dtype)


#: Increments of `grid` are kept while their total size is below this many whole replicas: their sum can be worth
#: sending when they are not.
MERGED = 4


@dataclass(frozen=True, slots=True, eq=False)
class ServerBroadcast:
    """The message of a round: the vector that every recipient will hold, and the packets sent to each.

    A client's packets are applied to the replica version in ``bases``, or to nothing if it is None; ``version`` is the
    result.

    Args:
        vector: Vector that every recipient will hold.
        messages: Packets for each client.
        bases: Version that a client's packets are applied to; None for none.
        version: Version after the packets are applied.

    >>> ServerBroadcast(torch.ones(2), {0: ()}, {0: None}).version
    0
    """

    vector: Tensor
    messages: Mapping[int, tuple[Packet, ...]]
    bases: Mapping[int, int | None]
    version: int = 0

    def packets(self, client: int) -> tuple[Packet, ...]:
        """Return the packets sent to this client, in the order in which they are applied."""
        packets = self.messages.get(client)
        if packets is None:
            raise HansaError(
                f"ServerBroadcast.packets(client={client!r}): not among the round's clients {sorted(self.messages)}."
            )
        return packets

    def nbytes(self, client: int) -> int:
        """Return the number of bytes sent to this client."""
        return sum([packet.nbytes for packet in self.packets(client)])

    def sizes(self, clients: Sequence[int]) -> dict[int, int]:
        """Return the number of bytes sent to each client."""
        if clients and len(set(map(id, self.messages.values()))) == 1 and self.messages.keys() >= set(clients):
            return dict.fromkeys(clients, self.nbytes(clients[0]))
        return {client: self.nbytes(client) for client in clients}


@runtime_checkable
class Downlink(Protocol):
    """A link from the server to the clients. ``broadcast`` and ``acknowledge`` are pure and the state is a plain tree.

    Clients call ``apply`` on the vector they hold and the packets they receive. A single packet of kind ``whole`` is
    the vector itself.
    """

    __slots__ = ()

    @abstractmethod
    def init(self, x: Tensor) -> State:
        """Return the state before the first broadcast."""

    @abstractmethod
    def broadcast(
        self, x: Tensor, state: State, clients: Sequence[int], round: int, key: Key
    ) -> tuple[ServerBroadcast, State]:
        """Return the message that brings all clients to the same vector, and the state after it."""

    @abstractmethod
    def acknowledge(self, state: State, clients: Sequence[int], round: int) -> State:
        """Return the state after these clients have confirmed the round's vector."""

    @abstractmethod
    def apply(self, previous: Tensor | None, packets: Sequence[Packet]) -> Tensor:
        """Return the vector that a client holds after a message, from the previous one."""


require_downlink = functools.partial(
    check_component, protocol=Downlink, noun="a downlink", example="replica(sign()) is one, direct() another."
)


@dataclass(frozen=True, slots=True)
class replica(Checked):
    """The server broadcasts q_t = C(x_t - xhat_{t-1}) and all train from xhat_t = xhat_{t-1} + q_t.

    xhat is public: the server and every up-to-date client hold the same vector, bit for bit. What C drops stays in
    x - xhat, so error feedback needs no residual. A client that missed rounds is sent the missed increments or the
    whole replica, whichever is smaller; the server therefore keeps the latest increments that together are smaller than
    the replica. A client counts as up to date once its report has arrived. If x did not change, nothing is sent.

    With ``public_start`` all clients know the initial vector, which is generated from the public seed; otherwise a
    client's first message is the whole replica. ``every`` updates the replica only once in that many rounds: clients
    train from a slightly older model, and absent clients miss fewer increments.

    Increments of `grid` are sent as one packet with their sum. The replica then changes in
    multiples of 2^grain, so sums are not rounded and all paths to a version give the same bits; a replica that exceeds
    its grain is sent whole. A client whose last report was dropped starts from its previous vector.

    Args:
        compressor: Compressor of the increments.
        public_start: Whether all clients know the initial vector, from the public seed.
        every: Rounds between updates of the replica.

    >>> replica(sign()).every
    1
    """

    compressor: Compressor = field(metadata=bound(require_compressor))
    public_start: bool = True
    every: int = field(default=1, metadata=bound(check_integer, "1 moves the replica in every round."))
    cites: ClassVar[tuple[str, ...]] = ("wang2022",)

    def init(self, x: Tensor) -> State:
        return {"replica": x.detach().clone(), "version": 0, "round": -1, "log": [], "held": {}}

    def broadcast(
        self, x: Tensor, state: State, clients: Sequence[int], round: int, key: Key
    ) -> tuple[ServerBroadcast, State]:
        vector, version, log = state["replica"], state["version"], list(state["log"])
        if x.shape != vector.shape or x.dtype != vector.dtype:
            actual, expected = (f"{v.dtype} {tuple(v.shape)}" for v in (x, vector))
            raise HansaError(f"replica.broadcast: the vector is {actual}, the replica {expected}: from another model?")
        grain = state.get("grain")
        if round % self.every == 0 and not torch.equal(x, vector):
            moved = self._increment(x, vector, grain, key)
            if moved.grain != grain and version:
                log, version = [], version + 1  # clients hold a finer grid: send the whole replica
            if moved.packet is not None:
                vector, grain = accumulate(moved.packet, moved.start.clone(), 1.0, self.compressor), moved.grain
                version += 1
                log.append(torch.frombuffer(bytearray(moved.packet.bytes), dtype=torch.uint8))
        full = Packet.of(vector, "whole")
        size, limit = sum(map(len, log)), full.nbytes * (MERGED if isinstance(self.compressor, grid) else 1)
        while size >= limit:
            size -= len(log.pop(0))
        oldest = version - len(log)
        first_version = 0 if self.public_start else -1
        versions = {client: state["held"].get(str(client), first_version) for client in clients}
        behind = {version - base for base in versions.values() if base >= max(oldest, 0)}
        latest = self._latest_increments([Packet.parse(memoryview(entry.numpy())) for entry in log], behind)
        latest = {n: sent for n, sent in latest.items() if sum(packet.nbytes for packet in sent) < full.nbytes}
        messages = {client: latest.get(version - base, (full,)) for client, base in versions.items()}
        bases = {client: base if version - base in latest else None for client, base in versions.items()}
        new_state = {"replica": vector, "version": version, "round": round, "log": log}
        if grain is not None:
            new_state["grain"] = grain
        # older clients are sent the whole replica
        new_state["held"] = {client: base for client, base in state["held"].items() if base >= oldest}
        return ServerBroadcast(vector, messages, bases, version), new_state

    def _increment(self, x: Tensor, vector: Tensor, grain: int | None, key: Key) -> _Increment:
        """Return the increment towards x, on the replica's grid or on a coarser one if it exceeds that."""
        if not isinstance(self.compressor, grid):
            return _Increment(self.compressor.encode(x - vector, key), vector, None)
        check_all_finite(flat_array(x, "replica.broadcast"), "replica.broadcast")
        highest = max(float(x.abs().max()), float(vector.abs().max()))
        chosen = finest_exponent(highest, x.dtype) if grain is None or exceeds_grid(highest, grain, x.dtype) else grain
        start = round_to_grid(vector, chosen)
        packet = self.compressor.encode_above(x - start, chosen)
        moves = decode(packet, self.compressor, dim=x.numel()).any()
        return _Increment(packet, start, chosen) if moves else _Increment(None, vector, grain)

    def _latest_increments(self, increments: list[Packet], counts: set[int]) -> dict[int, tuple[Packet, ...]]:
        """Return the last n increments for each count n, separate or merged."""
        if not isinstance(self.compressor, grid):
            return {n: tuple(increments[len(increments) - n :]) for n in counts}
        merged = self.compressor.merge_latest(increments, counts - {0})
        return {n: (merged[n],) if n else () for n in counts}

    def acknowledge(self, state: State, clients: Sequence[int], round: int) -> State:
        if round != state["round"]:
            raise HansaError(f"replica.acknowledge(round={round}): the last broadcast was of round {state['round']}.")
        return {**state, "held": {**state["held"], **{str(client): state["version"] for client in clients}}}

    def apply(self, previous: Tensor | None, packets: Sequence[Packet]) -> Tensor:
        """Return the replica after a message. A client ahead of the message's base skips the packets it has applied, or
        with merged increments starts from its previous vector."""
        dim, dtype = (None, None) if previous is None else (previous.numel(), previous.dtype)
        if packets and packets[0].kind == "whole":
            if len(packets) > 1:
                raise PacketError(f"replica.apply: {len(packets) - 1} packets follow the whole replica.")
            return decode(packets[0], dim=dim, dtype=dtype)
        if previous is None:
            raise PacketError("replica.apply: increments arrived, but no replica is held. Ask for the whole one.")
        vector = previous.clone() if packets else previous
        for packet in packets:
            packet.check(kind=packet_kind(self.compressor), dim=dim, dtype=dtype)
            if isinstance(self.compressor, grid):
                vector = round_to_grid(vector, self.compressor.finest(packet))
            accumulate(packet, vector, 1.0, self.compressor)
        return vector


@dataclass(frozen=True, slots=True)
class partial:
    """A link that sends only some entries of a vector: the others are private to each client.

    The inner link, its compressor and its memory see the shared entries only. At the server an update has zeros in the
    private entries; at a client a broadcast leaves them as in the vector that it is relative to: version 0, the
    initial vector, which all parties know. Algorithms with private blocks have it on all channels (`blocks`).

    Args:
        link: The uplink or downlink of the shared entries.
        shared: The ranges of these entries, in order.
        dim: The number of all entries.

    >>> packet, memory = partial(direct(), ((0, 1), (2, 3)), 3).send(torch.tensor([1.0, 2.0, 3.0]), {}, Key(0))
    >>> packet.content, partial(direct(), ((0, 1), (2, 3)), 3).receive(packet, dim=3, dtype=torch.float32)
    (tensor([1., 3.]), tensor([1., 0., 3.]))
    """

    link: Any
    shared: tuple[tuple[int, int], ...]
    dim: int

    @property
    def memory(self) -> tuple[str, ...]:
        return tuple(self.link.memory)

    @property
    def entries(self) -> int:
        """The number of entries that are sent."""
        return sum(stop - start for start, stop in self.shared)

    def send(self, x: Tensor, memory: Mapping[str, Tensor], key: Key) -> tuple[Packet, dict[str, Tensor]]:
        sent: tuple[Packet, dict[str, Tensor]] = self.link.send(self._take(x), memory, key)
        return sent

    def receive(self, packet: Packet, *, dim: int, dtype: torch.dtype) -> Tensor:
        received = self.link.receive(packet, dim=self.entries, dtype=dtype)
        return self._put(received.new_zeros(self.dim), received)

    def whole(self, x: Tensor) -> Packet:
        """Return the shared entries themselves as a packet, which is applied to version 0."""
        return Packet.of(self._take(x), "whole")

    def init(self, x: Tensor) -> State:
        state: State = self.link.init(self._take(x))
        return state

    def broadcast(
        self, x: Tensor, state: State, clients: Sequence[int], round: int, key: Key
    ) -> tuple[ServerBroadcast, State]:
        sent, state = self.link.broadcast(self._take(x), state, clients, round, key)
        bases = {client: 0 if base is None else base for client, base in sent.bases.items()}
        return ServerBroadcast(self._put(x.clone(), sent.vector), sent.messages, bases, sent.version), state

    def acknowledge(self, state: State, clients: Sequence[int], round: int) -> State:
        new_state: State = self.link.acknowledge(state, clients, round)
        return new_state

    def apply(self, previous: Tensor | None, packets: Sequence[Packet]) -> Tensor:
        if len(packets) == 1 and packets[0].kind == "whole" and packets[0].dim == self.dim:
            return decode(packets[0])  # the vector itself, within one process
        if previous is None:
            raise PacketError("partial.apply: shared entries arrived, but the initial vector is not known.")
        return self._put(previous.clone(), self.link.apply(self._take(previous), packets))

    def _take(self, x: Tensor) -> Tensor:
        return torch.cat([x[start:stop] for start, stop in self.shared]) if self.shared else x[:0]

    def _put(self, x: Tensor, values: Tensor) -> Tensor:
        sizes = [stop - start for start, stop in self.shared]
        for (start, stop), part in zip(self.shared, torch.split(values, sizes), strict=True):
            x[start:stop] = part
        return x


class _Increment(NamedTuple):
    """An increment (None if nothing is sent), the vector it is added to, and the exponent of their common grid."""

    packet: Packet | None
    start: Tensor
    grain: int | None


Parser: TypeAlias = Callable[[memoryview, int, "np.dtype[Any]"], ParsedPayload]

#: Kinds with self-describing payloads, which decode without their compressor.
BUILT_IN: dict[str, Parser] = {
    **{coder.kind: coder.parse for coder in (identity(), cast(), sign(), quantize(), grid())},
    "whole": identity().parse,
    "top_k": SparseValues.parse,
    "random_k": ShuffledValues.parse,
}

#: Without ``dim``, a packet may declare at most this many entries or `RATIO` per byte, whichever is more.
ENTRIES, RATIO = 1 << 20, 64


def decode(
    data: Buffer | Packet,
    compressor: Compressor | None = None,
    *,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    kind: str | None = None,
) -> Tensor:
    """Decode a packet into the vector C(x), bit for bit.

    Packets of built-in compressors are self-describing; others need their ``compressor``. With a compressor, packets
    of another kind or longer than its maximum are rejected.
    Pass ``dim``, ``dtype`` and ``kind`` if they are known: a packet that differs is rejected. Without ``dim`` a packet
    may declare at most 2^20 entries, or 64 for each of its bytes. A packet that holds a tensor returns that tensor
    itself: do not modify it in place.

    Args:
        data: A packet, or its bytes.
        compressor: Compressor that made it; not needed for built-in kinds.
        dim: Expected number of entries.
        dtype: Expected dtype.
        kind: Expected kind.

    >>> packet = sign().encode(torch.tensor([1.0, -3.0]), Key(0))
    >>> decode(packet.bytes)
    tensor([ 2., -2.])
    >>> decode(packet.bytes, dim=3)
    Traceback (most recent call last):
    ...
    hansa.compress.packet.PacketError: packet: dim 2, expected 3.
    """
    packet = (data if isinstance(data, Packet) else Packet.parse(data)).check(dim=dim, dtype=dtype, kind=kind)
    limit = max(ENTRIES, RATIO * packet.nbytes)
    if dim is None and packet.dim > limit:
        raise PacketError(f"packet: declares {packet.dim} entries, at most {limit} are read unless dim= is given.")
    if isinstance(packet.content, torch.Tensor):
        packet.check(kind=None if compressor is None else packet_kind(compressor))
        return packet.content
    body = _parse(packet, compressor)
    out = allocator.empty(packet.dim, packet.dtype)
    body.write(out.numpy())
    return out


def accumulate(data: Buffer | Packet, out: Tensor, alpha: float = 1.0, compressor: Compressor | None = None) -> Tensor:
    """Add alpha * decode(data, compressor) to ``out`` in place, without a temporary vector, and return ``out``.

    ``accumulate(packet, x, -1.0)`` gives exactly ``x - decode(packet)``. A rejected packet leaves ``out`` unchanged.

    Args:
        data: A packet, or its bytes.
        out: Vector to add to, in place.
        alpha: Factor of the decoded vector.
        compressor: Compressor that made it; not needed for built-in kinds.

    >>> accumulate(sign().encode(torch.tensor([1.0, -3.0]), Key(0)), torch.zeros(2), 0.5)
    tensor([ 1., -1.])
    """
    packet = (data if isinstance(data, Packet) else Packet.parse(data)).check(dim=out.numel(), dtype=out.dtype)
    if out.ndim != 1 or not out.is_contiguous() or out.requires_grad:
        raise invalid_argument("accumulate", "out", tuple(out.shape), "a contiguous flat vector without gradient")
    body = _parse(packet, compressor)
    if out.device.type == "cpu":
        body.add(out.numpy(), alpha)
        return out
    change = np.zeros(packet.dim, floats(packet.dtype))
    body.add(change, alpha)
    return out.add_(torch.from_numpy(change).to(out.device))


def _parse(packet: Packet, compressor: Compressor | None) -> ParsedPayload:
    """Validate the packet's content. Nothing is allocated for a packet of the wrong kind or size."""
    if compressor is not None:
        packet.check(kind=packet_kind(compressor))
        max_nbytes = compressor.max_nbytes(packet.dim, packet.dtype)
        if packet.nbytes > max_nbytes:
            raise PacketError(
                f"packet: {packet.nbytes} bytes, {compressor!r} takes at most {max_nbytes} for {packet.dim} entries."
            )
    elif packet.kind not in BUILT_IN:
        raise PacketError(
            f"packet: of kind {packet.kind!r}, which only its compressor reads: decode(packet, {packet.kind}(...))."
        )
    if isinstance(packet.content, torch.Tensor):
        return DenseValues(flat_array(packet.content, "decode"))
    if not packet.dim and packet.kind not in ("identity", "whole"):
        raise PacketError("packet: a vector without entries.")
    parse = BUILT_IN[packet.kind] if compressor is None else compressor.parse
    return parse(packet.payload(), packet.dim, floats(packet.dtype))
