"""Digests of vectors and bytes that detect changed or damaged data, at about the cost of one read.

They are not cryptographic: collisions can be constructed.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch

from hansa.core import native
from hansa.core.devices import copy_to_device
from hansa.core.types import Vector

Words: TypeAlias = "np.ndarray[Any, np.dtype[np.uint32]]"
Sums: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
_BLOCK, _SHIFT = 4096, 4
_AT_ONCE = 1024  # blocks: 32 MB of temporary memory each


def fingerprint(vector: Vector) -> bytes:
    """Return 16 bytes: blake2b of the length and of two sums per 4096 32-bit words, equal on every machine.

    A sum is that of (w_i + k_i)(w_j + k_j) over even i and j = i + 1, brackets modulo 2^32 and the rest modulo 2^64,
    with fixed keys k (NH of UMAC, Black et al. 1999); the second sum uses keys shifted by 4. Those of a vector on a
    device are computed there: the host reads 16 bytes for every 16 KB.

    >>> fingerprint(torch.tensor([1.0, 2.0])) == fingerprint(torch.tensor([2.0, 1.0]))
    False
    """
    length = vector.nbytes // 4
    words = vector.detach().contiguous().view(-1).view(torch.int32)
    sums = _native_sums(words) if vector.is_cpu and native.available() else _torch_sums(words)
    state = hashlib.blake2b(length.to_bytes(8, "little"), digest_size=16)
    state.update(sums.astype("<u8").data)
    return state.digest()


@cache
def _keys() -> Words:
    return np.random.Philox(key=0).random_raw((_BLOCK + _SHIFT) // 2).astype("<u8").view("<u4").astype(np.uint32)


@cache
def _keys_on_device(device: torch.device) -> Vector:
    return copy_to_device(torch.from_numpy(_keys().astype(np.int64)), device)


def _native_sums(words: Vector) -> Sums:
    sums = np.empty((-(-len(words) // _BLOCK), 2), np.uint64)
    native.load().digest(words.data_ptr(), len(words), _keys().ctypes.data, sums.ctypes.data)
    return sums


def _torch_sums(words: Vector) -> Sums:
    """Compute the sums with torch, whose products and sums of int64 are modulo 2^64, and read them at once."""
    keys = _keys_on_device(words.device)
    full = len(words) // _BLOCK
    parts = []
    for start in range(0, full, _AT_ONCE):
        blocks = words[start * _BLOCK : min(start + _AT_ONCE, full) * _BLOCK]
        parts.append(_block_sums(blocks.view(-1, _BLOCK), keys))
    if tail := len(words) % _BLOCK:
        parts.append(_block_sums(torch.nn.functional.pad(words[-tail:], (0, tail % 2))[None], keys))
    return torch.cat(parts).cpu().numpy().view(np.uint64) if parts else np.empty((0, 2), np.uint64)


def _block_sums(blocks: Vector, keys: Vector) -> Vector:
    wide, sums, low = blocks.to(torch.int64), [], torch.full((1,), 0xFFFFFFFF, device=blocks.device)
    for shift in (0, _SHIFT):
        keyed = (wide + keys[shift : shift + blocks.shape[1]]).bitwise_and_(low)
        sums.append((keyed[:, ::2] * keyed[:, 1::2]).sum(dim=1))
    return torch.stack(sums, dim=1)
