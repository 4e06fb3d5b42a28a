"""NumPy's draws without replacement in one native call, which is faster than creating a generator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from hansa.core import native

MAX_DRAWN = 64  # numbers drawn natively; NumPy uses another algorithm for populations above 10,000
MAX_POPULATION = 10_000


def draws_without_replacement(keys: Sequence[bytes], many: int, some: int) -> list[list[int]]:
    """Return for each 16-byte key ``some`` of the numbers below ``many``, as drawn by Generator.choice without
    replacement or shuffle, with Philox and this key.

    >>> draws_without_replacement([bytes(16), bytes(16)], 3, 3)
    [[0, 1, 2], [0, 1, 2]]
    """
    if native.available() and some <= min(MAX_DRAWN, many) and many <= MAX_POPULATION and draws_like_numpy():
        return _draw_natively(keys, many, some)
    return [_draw_with_numpy(key, many, some) for key in keys]


def _draw_natively(keys: Sequence[bytes], many: int, some: int) -> list[list[int]]:
    out = np.empty((len(keys), some), np.int64)
    native.load().choose(b"".join(keys), len(keys), many, some, out.ctypes.data)
    drawn: list[list[int]] = out.tolist()
    return drawn


def _draw_with_numpy(key: bytes, many: int, some: int) -> list[int]:
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key, "<u8")))
    drawn: list[int] = generator.choice(many, some, replace=False, shuffle=False).tolist()
    return drawn


@cache
def draws_like_numpy() -> bool:
    """Return whether this NumPy draws like the native code, which follows NumPy 1.17 to 2.x."""
    cases = [(many, some) for many in (1, 2, 5, 20, 999) for some in (1, 2, 5, 60) if some <= many]
    key = bytes(range(16))
    return all(_draw_natively([key], many, some) == [_draw_with_numpy(key, many, some)] for many, some in cases)
