"""What compressors share: their protocol, and how a payload becomes a packet and a packet's payload a vector."""

from __future__ import annotations

import math
import reprlib
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch

from hansa.compress.packet import (
    HEADER,
    Array,
    Buffer,
    Packet,
    PacketError,
    check_all_finite,
    flat_array,
    floats,
    make_packet,
    write_kind,
)
from hansa.core.errors import invalid_argument
from hansa.core.keys import Key
from hansa.core.protocols import check_component, with_defaults

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 1 << 16


class ParsedPayload(Protocol):
    """A payload that was checked in full: using it cannot fail any more."""

    def write(self, out: Array) -> None:
        """out = C(x)."""
        ...

    def add(self, out: Array, alpha: float) -> None:
        """out = out + alpha * C(x), rounded as written: first the product, then the sum."""
        ...


@runtime_checkable
class Compressor(Protocol):
    """An operator C on flat vectors with E||C(x) - x||^2 <= q^2 ||x||^2, q = ``contraction(dim)``, and C(0) = 0.

    A packet decodes to C(x) exactly: whoever keeps x - C(x) computes it from the packet. This is what links ask of a
    compressor; `Coder` is the short way to be one.

    >>> from hansa.compress import sign
    >>> isinstance(sign(), Compressor)
    True
    """

    __slots__ = ()

    @abstractmethod
    def encode(self, x: Tensor, key: Key) -> Packet:
        """C(x) as bytes. A NaN or an infinity in x is an error, never a packet."""

    @abstractmethod
    def parse(self, payload: memoryview, dim: int, dtype: np.dtype[Any]) -> ParsedPayload:
        """A payload that arrived, checked in full; a `PacketError` where ``encode`` would not have written it."""

    @abstractmethod
    def max_nbytes(self, dim: int, dtype: torch.dtype) -> int:
        """No packet for a vector of ``dim`` entries is longer than this."""


def require_compressor(owner: str, argument: str, value: object) -> None:
    """Refuse what is no compressor."""
    check_component(owner, argument, value, Compressor, "a compressor", example="hansa.compress.sign() is one.")


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


class Coder:
    """A compressor made of its payload: ``payload`` writes it, ``read`` reads it, ``max_payload`` bounds it.

    The packet around the payload, its checks and the ways to add it onto a vector come with it. The packets' ``kind``
    is the name of the class. A compressor of one's own is a frozen dataclass:

    >>> @dataclass(frozen=True, slots=True)
    ... class first(Coder):
    ...     count: int
    ...
    ...     def payload(self, x, key):
    ...         return [x[: self.count].tobytes()]
    ...
    ...     def read(self, payload, dim, dtype):
    ...         out = np.zeros(dim, dtype)
    ...         out[: self.count] = np.frombuffer(payload, dtype)
    ...         return out
    ...
    ...     def max_payload(self, dim, itemsize):
    ...         return min(self.count, dim) * itemsize
    >>> from hansa.compress import decode
    >>> decode(first(2).encode(torch.tensor([1.0, -2.0, 3.0]), Key(0)), first(2))
    tensor([ 1., -2.,  0.])
    """

    __slots__ = ()
    cites: ClassVar[tuple[str, ...]] = ()
    checks_finite: ClassVar[bool] = False
    """Whether ``payload`` itself refuses a NaN or an infinity; else ``encode`` looks for them first."""

    @property
    def kind(self) -> str:
        """The kind that its packets carry."""
        return type(self).__name__

    def payload(self, x: Array, key: Key) -> Sequence[Buffer | Array]:
        """C(x) as a list of bytes and arrays; x has at least one entry and is not to be changed."""
        raise NotImplementedError(f"{type(self).__name__}.payload")

    def read(self, payload: memoryview, dim: int, dtype: np.dtype[Any]) -> Array:
        """C(x) from its payload, ``dim`` numbers of ``dtype``. Whatever error it raises refuses the packet."""
        raise NotImplementedError(f"{type(self).__name__}.read")

    def max_payload(self, dim: int, itemsize: int) -> int:
        """The most bytes that ``payload`` can take; longer ones are refused unread."""
        raise NotImplementedError(f"{type(self).__name__}.max_payload")

    def contraction(self, dim: int) -> float:
        """The papers' q for the worst x of ``dim`` entries; infinite where nothing is promised."""
        return math.inf

    def encode(self, x: Tensor, key: Key) -> Packet:
        """C(x) as a packet. A NaN or an infinity in x is an error, never a packet."""
        place = f"{self.kind}.encode"
        array = flat_array(x, place)
        if not array.size:
            raise invalid_argument(place, "x", tuple(x.shape), "a vector with at least one entry")
        if not self.checks_finite:
            check_all_finite(array, place)
        return make_packet(self.kind, array, self.payload(array, key))

    def parse(self, payload: memoryview, dim: int, dtype: np.dtype[Any]) -> ParsedPayload:
        """The payload as numbers. Compressors that can add theirs onto a vector faster have a body of their own."""
        try:
            values = self.read(payload, dim, dtype)
        except PacketError:
            raise
        except Exception as error:
            raise PacketError(f"packet: {self.kind} cannot read the payload: {reprlib.repr(str(error))}.") from error
        if not isinstance(values, np.ndarray) or values.shape != (dim,) or values.dtype != dtype:
            description = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
            raise PacketError(f"packet: {self.kind} reads {description}, expected {dtype} ({dim},).")
        return DenseValues.checked(values)

    def max_nbytes(self, dim: int, dtype: torch.dtype) -> int:
        """No packet for a vector of ``dim`` entries is longer than this."""
        return HEADER.size + len(write_kind(self.kind)[1]) + self.max_payload(dim, floats(dtype).itemsize)


@dataclass(frozen=True, slots=True)
class DenseValues:
    """A payload of plain numbers."""

    values: Array

    @classmethod
    def checked(cls, values: Array) -> DenseValues:
        """The numbers, if all are finite."""
        for start in range(0, values.size, CHUNK):
            if not np.isfinite(values[start : start + CHUNK]).all():
                raise PacketError("packet: it carries NaN or infinite values.")
        return cls(values)

    def write(self, out: Array) -> None:
        out[:] = self.values

    def add(self, out: Array, alpha: float) -> None:
        for start in range(0, out.size, CHUNK):
            out[start : start + CHUNK] += self.values[start : start + CHUNK] * out.dtype.type(alpha)


def packet_kind(compressor: Compressor) -> str:
    """Return the kind that a compressor's packets carry; by default the name of its class."""
    return with_defaults(compressor, Coder).kind


def check_size(view: memoryview, size: int, kind: str) -> memoryview:
    """The view, if it has the one length that the packet's kind and dim allow."""
    if len(view) != size:
        raise PacketError(f"packet: a {kind} payload of this dim takes {size} bytes, {len(view)} arrived.")
    return view
