"""From bytes back to vectors, or straight onto one. What is not surely a packet is refused, and nothing is touched."""

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

#: Kinds whose payloads say all that it takes to read them, so that no compressor need be at hand.
BUILT_IN: dict[str, Parser] = {
    **{coder.kind: coder.parse for coder in (identity(), cast(), sign(), quantize(), grid())},
    "whole": identity().parse,
    "top_k": SparseValues.parse,
    "random_k": ShuffledValues.parse,
}

#: Where no ``dim`` is given a packet may declare so many entries, or `RATIO` a byte of it, whichever is more.
ENTRIES, RATIO = 1 << 20, 64


def decode(
    data: Buffer | Packet,
    compressor: Compressor | None = None,
    *,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    kind: str | None = None,
) -> Tensor:
    """The vector that the sender's compressor made, to the bit.

    Packets of Hansa's own compressors say all that it takes to read them; others are read by their ``compressor``. With
    a compressor, packets that it could not have made are refused: of another kind, or longer than it ever needs.
    Give ``dim``, ``dtype`` and ``kind`` where they are known: a packet that says otherwise is refused. Without
    ``dim`` a packet may declare at most 2^20 entries, or 64 for each of its bytes. A packet that holds a tensor gives
    that very tensor: do not change it in place.

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
    """out += alpha * decode(data, compressor), in place and without a second vector; gives ``out``.

    ``accumulate(packet, x, -1.0)`` leaves exactly ``x - decode(packet)``. A refused packet leaves ``out`` as it was.

    Args:
        data: A packet, or its bytes.
        out: Vector that is added to, in place.
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
    """The packet's content, checked in full. Nothing is allocated for a packet of the wrong kind or size."""
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
