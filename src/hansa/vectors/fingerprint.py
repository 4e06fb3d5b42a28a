"""A digest of a vector, so that what was made from another one is noticed. It takes about as long as reading it once.

It is no signature: whoever wants two vectors of one fingerprint can make them.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from hansa import native
from hansa.types import Vector

_BLOCK, _SHIFT = 4096, 4
_KEYS = np.random.Philox(key=0).random_raw((_BLOCK + _SHIFT) // 2).astype("<u8").view("<u4").astype(np.uint32)


def fingerprint(vector: Vector, isa: str = "") -> bytes:
    """16 bytes: blake2b of the length and of two sums for each 4096 words of 32 bits, the same on every machine.

    A sum is that of (w_i + k_i)(w_j + k_j) over neighbours i even, j = i + 1, brackets modulo 2^32 and the rest modulo
    2^64, with fixed keys k (NH of UMAC, Black et al. 1999); the second sum has its keys 4 further on.

    >>> import torch
    >>> fingerprint(torch.tensor([1.0, 2.0])) == fingerprint(torch.tensor([2.0, 1.0]))
    False
    """
    words = np.ascontiguousarray(vector.detach().cpu().numpy()).reshape(-1).view(np.uint32)
    sums = _native(words, isa) if native.available() else _plain(words)
    state = hashlib.blake2b(len(words).to_bytes(8, "little"), digest_size=16)
    state.update(sums.astype("<u8").data)
    return state.digest()


def _native(words: np.ndarray[Any, np.dtype[np.uint32]], isa: str) -> np.ndarray[Any, np.dtype[np.uint64]]:
    sums = np.empty((-(-len(words) // _BLOCK), 2), np.uint64)
    native.load(isa).digest(words.ctypes.data, len(words), _KEYS.ctypes.data, sums.ctypes.data)
    return sums


def _plain(words: np.ndarray[Any, np.dtype[np.uint32]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    sums = np.empty((-(-len(words) // _BLOCK), 2), np.uint64)
    for place, start in enumerate(range(0, len(words), _BLOCK)):
        block = words[start : start + _BLOCK]
        block = np.pad(block, (0, len(block) % 2))  # a last word alone has a neighbour of zero
        for which, shift in enumerate((0, _SHIFT)):
            keyed = (block + _KEYS[shift : shift + len(block)]).astype(np.uint64)
            sums[place, which] = (keyed[::2] * keyed[1::2]).sum(dtype=np.uint64)
    return sums
