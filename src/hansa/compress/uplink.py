"""Uplinks: from a client to the server, with the per-client memory they need."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import torch

from hansa.compress.base import Compressor, require_compressor
from hansa.compress.codec import accumulate, decode
from hansa.compress.downlink import ServerBroadcast
from hansa.compress.packet import Packet, PacketError
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.protocols import check_component, missing_methods
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

    >>> from hansa.compress import sign
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


def require_uplink(owner: str, argument: str, value: object) -> None:
    """Raise unless the value is an uplink."""
    bare = not isinstance(value, type) and not missing_methods(value, Compressor)
    instead = f"error_feedback({value!r}) or memoryless({value!r})" if bare else ""
    check_component(owner, argument, value, Uplink, "a link", instead=instead, example="direct() is one.")


@dataclass(frozen=True, slots=True)
class direct:
    """Send the vector itself, without a copy, in both directions. Bytes are counted but serialized only on demand.

    >>> x = torch.ones(10)
    >>> packet, memory = direct().send(x, {}, Key(0))
    >>> packet.nbytes, memory, direct().receive(packet, dim=10, dtype=torch.float32) is packet.content
    (64, {}, True)
    """

    memory: ClassVar[tuple[str, ...]] = ()
    cites: ClassVar[tuple[str, ...]] = ()
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
class error_feedback:
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

    compressor: Compressor
    memory: ClassVar[tuple[str, ...]] = ("residual",)
    cites: ClassVar[tuple[str, ...]] = ("wang2022", "karimireddy2019")

    def __post_init__(self) -> None:
        require_compressor("error_feedback", "compressor", self.compressor)

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
class memoryless:
    """A compressor without error feedback, for ablations and unbiased quantization.

    Args:
        compressor: Compressor of the update.

    >>> from hansa.compress import top_k
    >>> packet, memory = memoryless(top_k(0.5)).send(torch.tensor([1.0, 3.0]), {}, Key(0))
    >>> decode(packet), memory
    (tensor([0., 3.]), {})
    """

    compressor: Compressor
    memory: ClassVar[tuple[str, ...]] = ()
    cites: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        require_compressor("memoryless", "compressor", self.compressor)

    def send(self, x: Tensor, memory: Mapping[str, Tensor], key: Key) -> tuple[Packet, dict[str, Tensor]]:
        return self.compressor.encode(x, key), {}

    def receive(self, packet: Packet, *, dim: int, dtype: torch.dtype) -> Tensor:
        return decode(packet, self.compressor, dim=dim, dtype=dtype)
