"""Decoding of packets into new or existing vectors. An invalid packet raises an error and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from hansa.compress.base import Compressor, DenseValues, ParsedPayload, packet_kind
from hansa.compress.dense import cast, identity, sign
from hansa.compress.grid import grid
from hansa.compress.packet import Buffer, Packet, PacketError, flat_array, floats
from hansa.compress.quantize import quantize
from hansa.compress.sparse import ShuffledValues, SparseValues
from hansa.core.errors import invalid_argument
from hansa.core.vectors import allocator

if TYPE_CHECKING:
    from torch import Tensor

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

    >>> from hansa.compress import sign
    >>> from hansa.core.keys import Key
    >>> packet = sign().encode(torch.tensor([1.0, -3.0]), Key(0))
    >>> decode(packet.bytes)
    tensor([ 2., -2.])
    >>> decode(packet.bytes, dim=3)
    Traceback (most recent call last):
    ...
    hansa.compress.packet.PacketError: packet: dim 2, expected 3.
    """
    packet = (data if isinstance(data, Packet) else Packet.parse(data)).check(dim=dim, dtype=dtype, kind=kind)
    most = max(ENTRIES, RATIO * packet.nbytes)
    if dim is None and packet.dim > most:
        raise PacketError(f"packet: declares {packet.dim} entries, at most {most} are read unless dim= is given.")
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

    >>> from hansa.compress import sign
    >>> from hansa.core.keys import Key
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
        most = compressor.max_nbytes(packet.dim, packet.dtype)
        if packet.nbytes > most:
            raise PacketError(
                f"packet: {packet.nbytes} bytes, {compressor!r} takes at most {most} for {packet.dim} entries."
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
