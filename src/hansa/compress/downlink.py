"""Downlinks: how the server's vector reaches the clients. `replica` compresses it, also under partial participation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from hansa.compress.base import Compressor
from hansa.compress.codec import accumulate, decode
from hansa.compress.packet import Packet, PacketError
from hansa.errors import HansaError, whole
from hansa.keys import Key
from hansa.types import State


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast:
    """A round's message: the vector that every recipient will hold, and what each must be sent to hold it.

    ``bases`` says which version of the replica a client's packets build upon; None means upon nothing.
    """

    vector: Tensor
    messages: Mapping[int, tuple[Packet, ...]]
    bases: Mapping[int, int | None]

    def packets(self, client: int) -> list[Packet]:
        """What this client is sent, in the order in which it must be applied."""
        if client not in self.messages:
            raise HansaError(
                f"Broadcast.packets(client={client!r}): not among the round's clients {sorted(self.messages)}."
            )
        return list(self.messages[client])

    def nbytes(self, client: int) -> int:
        """Bytes that travel to this client."""
        return sum(packet.nbytes for packet in self.packets(client))


class Downlink(Protocol):
    """``broadcast`` and ``acknowledge`` are pure, the state is a plain tree; ``apply`` is what a client does."""

    cites: ClassVar[tuple[str, ...]]

    def init(self, x: Tensor) -> State: ...

    def broadcast(
        self, x: Tensor, state: State, clients: Sequence[int], round: int, key: Key
    ) -> tuple[Broadcast, State]: ...

    def acknowledge(self, state: State, clients: Sequence[int], round: int) -> State: ...

    def apply(self, held: Tensor | None, packets: Sequence[Packet]) -> Tensor: ...


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
    """

    compressor: Compressor
    public_start: bool = True
    every: int = 1
    cites: ClassVar[tuple[str, ...]] = ("wang2022",)

    def __post_init__(self) -> None:
        whole("replica", "every", self.every, "1 moves the replica in every round.")

    def init(self, x: Tensor) -> State:
        return {"replica": x.detach().clone(), "version": 0, "round": -1, "log": [], "held": {}}

    def broadcast(
        self, x: Tensor, state: State, clients: Sequence[int], round: int, key: Key
    ) -> tuple[Broadcast, State]:
        vector, version, log = state["replica"], state["version"], list(state["log"])
        if x.shape != vector.shape or x.dtype != vector.dtype:
            found, wanted = (f"{v.dtype} {tuple(v.shape)}" for v in (x, vector))
            raise HansaError(f"replica.broadcast: the vector is {found}, the replica {wanted}: from another model?")
        full = Packet.of(vector, "whole")
        if round % self.every == 0 and not torch.equal(x, vector):
            packet = self.compressor.encode(x - vector, key)
            vector = accumulate(packet, vector.clone())
            full = Packet.of(vector, "whole")
            version += 1
            log.append(torch.frombuffer(bytearray(packet.bytes), dtype=torch.uint8))
            size = sum(map(len, log))
            while size >= full.nbytes:
                size -= len(log.pop(0))
        increments = [Packet.parse(memoryview(entry.numpy())) for entry in log]
        oldest = version - len(log)
        messages: dict[int, tuple[Packet, ...]] = {}
        bases: dict[int, int | None] = {}
        for client in clients:
            base = state["held"].get(str(client), 0 if self.public_start else None)
            bases[client] = base if base is not None and base >= oldest else None
            messages[client] = (full,) if bases[client] is None else tuple(increments[base - oldest :])
        after = {"replica": vector, "version": version, "round": round, "log": log}
        return Broadcast(vector, messages, bases), {**after, "held": _worth(state["held"], oldest)}

    def acknowledge(self, state: State, clients: Sequence[int], round: int) -> State:
        if round != state["round"]:
            raise HansaError(f"replica.acknowledge(round={round}): the last broadcast was of round {state['round']}.")
        return {**state, "held": {**state["held"], **{str(client): state["version"] for client in clients}}}

    def apply(self, held: Tensor | None, packets: Sequence[Packet]) -> Tensor:
        """The replica after a message. A client that is ahead of the message's base drops what it has applied."""
        dim, dtype = (None, None) if held is None else (held.numel(), held.dtype)
        if packets and packets[0].kind == "whole":
            if len(packets) > 1:
                raise PacketError(f"replica.apply: {len(packets) - 1} packets follow the whole replica.")
            return decode(packets[0], dim=dim, dtype=dtype)
        if held is None:
            raise PacketError("replica.apply: increments arrived, but no replica is held. Ask for the whole one.")
        vector = held.clone() if packets else held
        for packet in packets:
            accumulate(packet.expect(kind=self.compressor.kind), vector)
        return vector


def _worth(held: Mapping[str, int], oldest: int) -> dict[str, int]:
    """Who holds a version that increments can still mend; all others are sent the whole replica in any case."""
    return {client: version for client, version in held.items() if version >= oldest}
