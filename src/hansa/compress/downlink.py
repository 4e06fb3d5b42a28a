"""Downlinks: how the server's vector reaches the clients. `replica` compresses it, also under partial participation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch

from hansa.compress.base import Compressor, Mergeable, packet_kind, require_compressor
from hansa.compress.codec import accumulate, decode
from hansa.compress.grid import exceeds_grid, finest_exponent, round_to_grid
from hansa.compress.packet import Packet, PacketError, check_all_finite, flat_array
from hansa.core.errors import HansaError, check_integer
from hansa.core.keys import Key
from hansa.core.protocols import check_component, missing_methods
from hansa.core.types import State

if TYPE_CHECKING:
    from torch import Tensor

#: Increments that merge are kept as long as all of them are shorter than so many whole replicas: their sum may be
#: worth sending long after they themselves are not.
MERGED = 4


@dataclass(frozen=True, slots=True, eq=False)
class ServerBroadcast:
    """A round's message: the vector that every recipient will hold, and what each must be sent to hold it.

    ``bases`` says which version of the replica a client's packets build upon; None means upon nothing; ``version`` is
    the one they make.

    Args:
        vector: Vector that every recipient will hold.
        messages: Packets for each client.
        bases: Version that a client's packets build on; None for none.
        version: Version that the packets make.

    >>> ServerBroadcast(torch.ones(2), {0: ()}, {0: None}).version
    0
    """

    vector: Tensor
    messages: Mapping[int, tuple[Packet, ...]]
    bases: Mapping[int, int | None]
    version: int = 0

    def packets(self, client: int) -> list[Packet]:
        """What this client is sent, in the order in which it must be applied."""
        if client not in self.messages:
            raise HansaError(
                f"ServerBroadcast.packets(client={client!r}): not among the round's clients {sorted(self.messages)}."
            )
        return list(self.messages[client])

    def nbytes(self, client: int) -> int:
        """Bytes that travel to this client."""
        return sum(packet.nbytes for packet in self.packets(client))


@runtime_checkable
class Downlink(Protocol):
    """``broadcast`` and ``acknowledge`` are pure, the state is a plain tree; ``apply`` is what a client does: from what
    it holds and the packets it is sent to the vector. A single packet of kind ``whole`` is the vector itself.
    """

    __slots__ = ()

    @abstractmethod
    def init(self, x: Tensor) -> State:
        """The state before the first broadcast."""

    @abstractmethod
    def broadcast(
        self, x: Tensor, state: State, clients: Sequence[int], round: int, key: Key
    ) -> tuple[ServerBroadcast, State]:
        """What each client is sent so that all hold one vector, and the state after it."""

    @abstractmethod
    def acknowledge(self, state: State, clients: Sequence[int], round: int) -> State:
        """The state once these clients are known to hold the round's vector."""

    @abstractmethod
    def apply(self, previous: Tensor | None, packets: Sequence[Packet]) -> Tensor:
        """The vector that a client holds after a message, from the one it held before."""


def require_downlink(owner: str, argument: str, value: object) -> None:
    """Refuse what is no link from the server to the clients."""
    bare = not isinstance(value, type) and not missing_methods(value, Compressor)
    instead = f"replica({value!r})" if bare else ""
    check_component(owner, argument, value, Downlink, "a downlink", instead=instead, example="direct() is one.")


@dataclass(frozen=True, slots=True)
class replica:
    """The server broadcasts q_t = C(x_t - xhat_{t-1}) and all train from xhat_t = xhat_{t-1} + q_t.

    xhat is public: the server and every client that is up to date hold the same vector, to the bit. What C drops
    stays in x - xhat, so error feedback needs no residual here. A client that missed rounds is sent the increments it
    missed or the whole replica, whichever is fewer bytes; so the server keeps the latest increments that together are
    shorter than the whole. A client counts as up to date once its report came back. Where x stayed nothing is sent.

    With ``public_start`` the initial vector is known to all, being made from the public seed; else a client's first
    message is the whole replica. ``every`` moves the replica in every so many rounds only: clients train from a
    slightly older model, and those that were away have fewer increments to hear.

    Increments that are `Mergeable`, as those of `grid` are, reach a client as one packet with their sum. The replica
    then moves in multiples of 2^grain, so that no sum is rounded and all ways to the same version end at the same bits;
    a replica that outgrows its grain is sent whole. A client whose last report was lost adds to what it held before.

    Args:
        compressor: Compressor of the increments.
        public_start: Whether all clients know the initial vector, from the public seed.
        every: Rounds from one move of the replica to the next.

    >>> from hansa.compress import sign
    >>> replica(sign()).every
    1
    """

    compressor: Compressor
    public_start: bool = True
    every: int = 1
    cites: ClassVar[tuple[str, ...]] = ("wang2022",)

    def __post_init__(self) -> None:
        require_compressor("replica", "compressor", self.compressor)
        check_integer("replica", "every", self.every, "1 moves the replica in every round.")

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
                log, version = [], version + 1  # what clients hold lies on a finer grid: only the whole replica helps
            if moved.packet is not None:
                vector, grain = accumulate(moved.packet, moved.start.clone(), 1.0, self.compressor), moved.grain
                version += 1
                log.append(torch.frombuffer(bytearray(moved.packet.bytes), dtype=torch.uint8))
        full = Packet.of(vector, "whole")
        size, limit = sum(map(len, log)), full.nbytes * (MERGED if self._merges else 1)
        while size >= limit:
            size -= len(log.pop(0))
        oldest = version - len(log)
        unheard = 0 if self.public_start else -1
        versions = {client: state["held"].get(str(client), unheard) for client in clients}
        behind = {version - base for base in versions.values() if base >= max(oldest, 0)}
        latest = self._latest([Packet.parse(memoryview(entry.numpy())) for entry in log], behind)
        latest = {n: sent for n, sent in latest.items() if sum(packet.nbytes for packet in sent) < full.nbytes}
        messages = {client: latest.get(version - base, (full,)) for client, base in versions.items()}
        bases = {client: base if version - base in latest else None for client, base in versions.items()}
        after = {"replica": vector, "version": version, "round": round, "log": log}
        if grain is not None:
            after["grain"] = grain
        return ServerBroadcast(vector, messages, bases, version), {
            **after,
            "held": _worth_keeping(state["held"], oldest),
        }

    @property
    def _merges(self) -> bool:
        return isinstance(self.compressor, Mergeable)

    def _increment(self, x: Tensor, vector: Tensor, grain: int | None, key: Key) -> _Increment:
        """The increment towards x; a replica on a grid stays on it, or on a coarser one where it outgrew it."""
        if not isinstance(self.compressor, Mergeable):
            return _Increment(self.compressor.encode(x - vector, key), vector, None)
        check_all_finite(flat_array(x, "replica.broadcast"), "replica.broadcast")
        highest = max(float(x.abs().max()), float(vector.abs().max()))
        chosen = finest_exponent(highest, x.dtype) if grain is None or exceeds_grid(highest, grain, x.dtype) else grain
        start = round_to_grid(vector, chosen)
        packet = self.compressor.encode_above(x - start, chosen)
        moves = decode(packet, self.compressor, dim=x.numel()).any()
        return _Increment(packet, start, chosen) if moves else _Increment(None, vector, grain)

    def _latest(self, increments: list[Packet], counts: set[int]) -> dict[int, tuple[Packet, ...]]:
        """The last n increments for each count n, as they are or merged into one."""
        if not isinstance(self.compressor, Mergeable):
            return {n: tuple(increments[len(increments) - n :]) for n in counts}
        merged = self.compressor.merge_latest(increments, counts - {0})
        return {n: (merged[n],) if n else () for n in counts}

    def acknowledge(self, state: State, clients: Sequence[int], round: int) -> State:
        if round != state["round"]:
            raise HansaError(f"replica.acknowledge(round={round}): the last broadcast was of round {state['round']}.")
        return {**state, "held": {**state["held"], **{str(client): state["version"] for client in clients}}}

    def apply(self, previous: Tensor | None, packets: Sequence[Packet]) -> Tensor:
        """The replica after a message. A client that is ahead of the message's base drops what it has applied, or with
        merged increments starts from what it held before."""
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
            if isinstance(self.compressor, Mergeable):
                vector = round_to_grid(vector, self.compressor.finest(packet))
            accumulate(packet, vector, 1.0, self.compressor)
        return vector


class _Increment(NamedTuple):
    """An increment, if there is anything to send; what it is added to; the exponent of the grid that holds both."""

    packet: Packet | None
    start: Tensor
    grain: int | None


def _worth_keeping(versions: Mapping[str, int], oldest: int) -> dict[str, int]:
    """Keep the versions that increments can still update; clients at older ones are sent the whole replica."""
    return {client: version for client, version in versions.items() if version >= oldest}
