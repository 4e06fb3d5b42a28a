"""The compressor protocol, and the conversion between payloads, packets and vectors."""

from __future__ import annotations

import math
import reprlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
from hansa.core.bounds import Checked
from hansa.core.errors import invalid_argument
from hansa.core.keys import Key
from hansa.core.protocols import check_component, with_defaults

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 1 << 16


class ParsedPayload(Protocol):
    """A fully validated payload: using it cannot fail."""

    def write(self, out: Array) -> None:
        """Set out = C(x)."""
        ...

    def add(self, out: Array, alpha: float) -> None:
        """Set out = out + alpha * C(x), with the product rounded before the sum."""
        ...


@runtime_checkable
class Compressor(Protocol):
    """An operator C on flat vectors with E||C(x) - x||^2 <= q^2 ||x||^2, q = ``contraction(dim)``, and C(0) = 0.

    A packet decodes to C(x) exactly, so the residual x - C(x) can be computed from the packet. Links require this
    protocol; `Coder` is the short way to implement it.

    >>> from hansa.compress import sign
    >>> isinstance(sign(), Compressor)
    True
    """

    __slots__ = ()

    @abstractmethod
    def encode(self, x: Tensor, key: Key) -> Packet:
        """Encode C(x). Raise an error if x contains a NaN or an infinity."""

    @abstractmethod
    def parse(self, payload: memoryview, dim: int, dtype: np.dtype[Any]) -> ParsedPayload:
        """Validate a received payload. Raise a `PacketError` for one that ``encode`` cannot produce."""

    @abstractmethod
    def max_nbytes(self, dim: int, dtype: torch.dtype) -> int:
        """No packet for a vector of ``dim`` entries is longer than this."""


require_compressor = partial(
    check_component, protocol=Compressor, noun="a compressor", example="hansa.compress.sign() is one."
)


class Coder(Checked):
    """A compressor defined by its payload: ``payload`` writes it, ``read`` reads it, ``max_payload`` bounds it.

    The class adds the packet header, validation, and addition onto a vector. The packets' ``kind`` is the name of the
    class. A custom compressor is a frozen dataclass:

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
    """Whether ``payload`` itself rejects NaN and infinity; otherwise ``encode`` checks for them first."""

    @property
    def kind(self) -> str:
        """The kind written in its packets."""
        return type(self).__name__

    def payload(self, x: Array, key: Key) -> Sequence[Buffer | Array]:
        """Return C(x) as a list of bytes and arrays. x has at least one entry and must not be modified."""
        raise NotImplementedError(f"{type(self).__name__}.payload")

    def read(self, payload: memoryview, dim: int, dtype: np.dtype[Any]) -> Array:
        """Return C(x) from its payload, ``dim`` numbers of ``dtype``. Any exception rejects the packet."""
        raise NotImplementedError(f"{type(self).__name__}.read")

    def max_payload(self, dim: int, itemsize: int) -> int:
        """Return the largest size of ``payload`` in bytes; longer ones are rejected unread."""
        raise NotImplementedError(f"{type(self).__name__}.max_payload")

    def contraction(self, dim: int) -> float:
        """Return the papers' q for the worst x of ``dim`` entries; infinite if there is no bound."""
        return math.inf

    def encode(self, x: Tensor, key: Key) -> Packet:
        """Encode C(x) as a packet. Raise an error if x contains a NaN or an infinity."""
        component = f"{self.kind}.encode"
        array = flat_array(x, component)
        if not array.size:
            raise invalid_argument(component, "x", tuple(x.shape), "a vector with at least one entry")
        if not self.checks_finite:
            check_all_finite(array, component)
        return make_packet(self.kind, array, self.payload(array, key))

    def parse(self, payload: memoryview, dim: int, dtype: np.dtype[Any]) -> ParsedPayload:
        """Validate and decode the payload. Compressors with a faster addition override this."""
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
        """Return the numbers; raise unless all are finite."""
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
    """Return the kind written in a compressor's packets; by default the name of its class."""
    return with_defaults(compressor, Coder).kind


def check_size(view: memoryview, size: int, kind: str) -> memoryview:
    """Return the view; raise unless it has the length that the packet's kind and dim require."""
    if len(view) != size:
        raise PacketError(f"packet: a {kind} payload of this dim takes {size} bytes, {len(view)} arrived.")
    return view
