"""Compression: packets with their exact size, compressors that encode them, and links with error feedback.

>>> import torch
>>> from hansa.core.keys import Key
>>> packet = sign().encode(torch.tensor([0.5, -1.5, 1.0, -1.0]), Key(0))
>>> packet.nbytes, decode(packet)
(29, tensor([ 1., -1.,  1., -1.]))
"""

from __future__ import annotations

from hansa.compress.base import Coder, Compressor
from hansa.compress.dense import cast, identity, sign
from hansa.compress.grid import grid
from hansa.compress.links import (
    Downlink,
    ServerBroadcast,
    Uplink,
    accumulate,
    decode,
    direct,
    error_feedback,
    memoryless,
    replica,
)
from hansa.compress.packet import Packet, PacketError
from hansa.compress.quantize import quantize
from hansa.compress.sparse import random_k, top_k

__all__ = [
    "Coder", "Compressor", "Downlink", "Packet", "PacketError", "ServerBroadcast", "Uplink", "accumulate",
    "cast", "decode", "direct", "error_feedback", "grid", "identity", "memoryless", "quantize", "random_k",
    "replica", "sign", "top_k",
]  # fmt: skip
