"""NumPy's shuffles and draws without replacement in native calls, which is faster than creating generators."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hansa.core import native
from hansa.core.errors import HansaError
from hansa.core.native.network import check_tensor

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

MAX_DRAWN = 64  # numbers drawn natively; NumPy uses another algorithm for populations above 10,000
MAX_POPULATION = 10_000


def draws_without_replacement(keys: Sequence[bytes], n: int, k: int) -> list[list[int]]:
    """Return k of the numbers below n for each 16-byte key, as drawn with Philox and this key by Generator.choice,
    without replacement or shuffle.

    >>> draws_without_replacement([bytes(16), bytes(16)], 3, 3)
    [[0, 1, 2], [0, 1, 2]]
    """
    if native.available() and k <= min(MAX_DRAWN, n) and n <= MAX_POPULATION and draws_like_numpy():
        return _draw_natively(keys, n, k)
    return [_draw_with_numpy(key, n, k) for key in keys]


def _draw_natively(keys: Sequence[bytes], n: int, k: int) -> list[list[int]]:
    out = np.empty((len(keys), k), np.int64)
    native.load().choose(b"".join(keys), len(keys), n, k, out.ctypes.data)
    drawn: list[list[int]] = out.tolist()
    return drawn


def _draw_with_numpy(key: bytes, n: int, k: int) -> list[int]:
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key, "<u8")))
    drawn: list[int] = generator.choice(n, k, replace=False, shuffle=False).tolist()
    return drawn


def shuffled_rows(keys: Sequence[bytes], index: torch.Tensor, spans: Array, lengths: Array) -> Array:
    """Return for each 16-byte key ``lengths`` entries of its range ``spans`` [keys, 2] of the index, one key after the
    other: from consecutive permutations of the range, shuffled as by NumPy's Philox with this key.

    >>> drawn = shuffled_rows([bytes(16)] * 2, torch.arange(5), np.array([[0, 2], [2, 5]]), np.array([2, 3]))
    >>> sorted(drawn[:2].tolist()), sorted(drawn[2:].tolist())
    ([0, 1], [2, 3, 4])
    """
    samples, lengths = (spans[:, 1] - spans[:, 0]).astype(np.int64), lengths.astype(np.int64)
    check_tensor("index", index, torch.int64, -1)
    if len(keys) != len(samples) or spans.min() < 0 or samples.min() < 1 or spans.max() > index.numel():
        raise HansaError(f"native: the rows of {len(keys)} clients are out of range: there are {index.numel()}.")
    words = np.frombuffer(b"".join(keys), "<u8").astype(np.uint64)
    first_entries = (index.data_ptr() + 8 * spans[:, 0]).astype(np.uint64)
    order, out = np.empty(int(samples.max()), np.int64), np.empty(int(lengths.sum()), np.int64)
    addresses = [array.ctypes.data for array in (words, first_entries, samples, lengths)]
    native.load().draw(*addresses, len(keys), order.ctypes.data, out.ctypes.data)
    return out


@cache
def draws_like_numpy() -> bool:
    """Return whether this NumPy shuffles and chooses like the native code, which follows NumPy 1.17 to 2.x."""
    key = bytes(range(16))
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key, "<u8")))
    shuffled = np.concatenate([generator.permutation(1000) for _ in range(3)])
    cases = [(n, k) for n in (1, 2, 5, 20, 999) for k in (1, 2, 5, 60) if k <= n]
    chosen = all(_draw_natively([key], n, k) == [_draw_with_numpy(key, n, k)] for n, k in cases)
    return chosen and np.array_equal(
        shuffled, shuffled_rows([key], torch.arange(1000), np.array([[0, 1000]]), np.array([3000]))
    )
