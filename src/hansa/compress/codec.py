"""From bytes back to vectors, or straight onto one. What is not surely a packet is refused, and nothing is touched."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hansa.compress.base import Body, Parser
from hansa.compress.dense import Signs, Values, parse_cast
from hansa.compress.grid import Lattice
from hansa.compress.packet import LIMIT, Buffer, Packet, PacketError, flat, floats
from hansa.compress.quantize import Levels
from hansa.compress.sparse import Shuffled, Sparse
from hansa.errors import refuse
from hansa.vectors import allocate

PARSERS: dict[str, Parser] = {
    "identity": Values.parse,
    "whole": Values.parse,
    "cast": parse_cast,
    "sign": Signs.parse,
    "quantize": Levels.parse,
    "top_k": Sparse.parse,
    "random_k": Shuffled.parse,
    "grid": Lattice.parse,
}


def decode(
    data: Buffer | Packet, *, dim: int | None = None, dtype: torch.dtype | None = None, kind: str | None = None
) -> Tensor:
    """The vector that the sender's compressor made, to the bit.

    Give ``dim``, ``dtype`` and ``kind`` where they are known: a packet that says otherwise is refused. Without
    ``dim`` a packet may declare at most 2^28 entries. A packet that holds a tensor gives that very tensor: do not
    change it in place.

    >>> from hansa.compress import sign
    >>> from hansa.keys import Key
    >>> packet = sign().encode(torch.tensor([1.0, -3.0]), Key(0))
    >>> decode(packet.bytes)
    tensor([ 2., -2.])
    >>> decode(packet.bytes, dim=3)
    Traceback (most recent call last):
    ...
    hansa.compress.packet.PacketError: packet: dim 2, expected 3.
    """
    packet = (data if isinstance(data, Packet) else Packet.parse(data)).expect(dim=dim, dtype=dtype, kind=kind)
    if isinstance(packet.content, Tensor):
        return packet.content
    if dim is None and packet.dim > LIMIT:
        raise PacketError(f"packet: declares {packet.dim} entries, at most {LIMIT} are read unless dim= is given.")
    body = _body(packet)
    out = allocate.empty(packet.dim, packet.dtype)
    body.write(out.numpy())
    return out


def accumulate(data: Buffer | Packet, out: Tensor, alpha: float = 1.0) -> Tensor:
    """out += alpha * decode(data), in place and without a second vector; gives ``out``.

    ``accumulate(packet, x, -1.0)`` leaves exactly ``x - decode(packet)``. A refused packet leaves ``out`` as it was.
    """
    packet = (data if isinstance(data, Packet) else Packet.parse(data)).expect(dim=out.numel(), dtype=out.dtype)
    if out.ndim != 1 or not out.is_contiguous() or out.requires_grad:
        raise refuse("accumulate", "out", tuple(out.shape), "a contiguous flat vector without gradient")
    body = _body(packet)
    if out.device.type == "cpu":
        body.add(out.numpy(), alpha)
        return out
    change = np.zeros(packet.dim, floats(packet.dtype))
    body.add(change, alpha)
    return out.add_(torch.from_numpy(change).to(out.device))


def _body(packet: Packet) -> Body:
    if isinstance(packet.content, Tensor):
        return Values(flat(packet.content, "decode"))
    if not packet.dim and packet.kind not in ("identity", "whole"):
        raise PacketError("packet: a vector without entries.")
    return PARSERS[packet.kind](packet.payload(), packet.dim, floats(packet.dtype))
