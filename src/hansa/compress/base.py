"""What compressors share: their protocol, and how a payload becomes a packet and a packet's payload a vector."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from hansa.compress.packet import HEADER, Array, Buffer, Packet, PacketError, flat, floats, seal
from hansa.errors import refuse
from hansa.keys import Key


@runtime_checkable
class Compressor(Protocol):
    """An operator C on flat vectors with E||C(x) - x||^2 <= q^2 ||x||^2, q = ``contraction(dim)``, and C(0) = 0.

    A packet decodes to C(x) exactly: whoever keeps x - C(x) computes it from the packet.
    """

    cites: ClassVar[tuple[str, ...]]

    @property
    def kind(self) -> str:
        """The kind that its packets carry."""
        ...

    def encode(self, x: Tensor, key: Key) -> Packet:
        """C(x) as bytes. A NaN or an infinity in x is an error, never a packet."""
        ...

    def contraction(self, dim: int) -> float:
        """The papers' q for the worst x of ``dim`` entries."""
        ...

    def max_nbytes(self, dim: int, dtype: torch.dtype) -> int:
        """No packet for a vector of ``dim`` entries is longer than this."""
        ...


@runtime_checkable
class Mergeable(Compressor, Protocol):
    """A compressor whose packets add up exactly, so that several can travel as one."""

    def encode_above(self, x: Tensor, finest: int) -> Packet:
        """C(x) in multiples of 2^finest; the packet says so."""
        ...

    def merge_latest(self, packets: Sequence[Packet], counts: Iterable[int]) -> dict[int, Packet]:
        """For each count n one packet with the sum of the last n."""
        ...

    def finest(self, packet: Packet) -> int:
        """The exponent of the grid on which everything lies that this packet is to be added to."""
        ...


class Body(Protocol):
    """A payload that was checked in full: using it cannot fail any more."""

    def write(self, out: Array) -> None:
        """out = C(x)."""
        ...

    def add(self, out: Array, alpha: float) -> None:
        """out = out + alpha * C(x), rounded as written: first the product, then the sum."""
        ...


Parser: TypeAlias = Callable[[memoryview, int, "np.dtype[np.floating]"], Body]


class Coder:
    """A compressor made of its payload; the packet around it is the same for all."""

    __slots__ = ()
    kind: ClassVar[str]

    def encode(self, x: Tensor, key: Key) -> Packet:
        array = flat(x, f"{self.kind}.encode")
        if not array.size:
            raise refuse(f"{self.kind}.encode", "x", tuple(x.shape), "a vector with at least one entry")
        return seal(self.kind, array, self.payload(array, key))

    def max_nbytes(self, dim: int, dtype: torch.dtype) -> int:
        return HEADER.size + self.max_payload(dim, floats(dtype).itemsize)

    def payload(self, x: Array, key: Key) -> list[Buffer]:
        """The bytes after the header, in parts."""
        raise NotImplementedError

    def max_payload(self, dim: int, itemsize: int) -> int:
        """The most bytes that ``payload`` can take."""
        raise NotImplementedError


def exactly(view: memoryview, size: int, kind: str) -> memoryview:
    """The view, if it has the one length that the packet's kind and dim allow."""
    if len(view) != size:
        raise PacketError(f"packet: a {kind} payload of this dim takes {size} bytes, {len(view)} arrived.")
    return view
