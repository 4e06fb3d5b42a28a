"""Randomness as a function of an address, without shared state, so that results do not depend on order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from hansa.core.errors import invalid_argument


@dataclass(frozen=True, slots=True)
class Key:
    """A seed and a path. Equal keys draw equal numbers, on any worker and in any order.

    Args:
        seed: A whole number of at least 0.
        path: Address below the seed.

    >>> key = Key(0).child("batch", 3, 17)
    >>> int(key.numpy().integers(1000)) == int(Key(0).child("batch").child(3, 17).numpy().integers(1000))
    True
    >>> Key(0).child("a", "b").digest() == Key(0).child("ab").digest()
    False
    """

    seed: int
    path: tuple[str | int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise invalid_argument("Key", "seed", self.seed, "a whole number >= 0")

    def child(self, *parts: str | int) -> Key:
        """Return the key at an address below this one."""
        for part in parts:
            if type(part) is int or type(part) is str:
                continue
            if not isinstance(part, (str, int)) or isinstance(part, bool):
                raise invalid_argument("Key.child", "part", part, "words and whole numbers")
        key = object.__new__(Key)  # skip validation: the seed is valid, and a round creates many keys
        object.__setattr__(key, "seed", self.seed)
        object.__setattr__(key, "path", self.path + parts)
        return key

    def digest(self, size: int = 16) -> bytes:
        """Return a hash of this address; every component is encoded with its type and length."""
        return _hash(_encode(self.seed, *self.path), size).digest()

    def digests(self, numbers: Iterable[int], *parts: str | int, size: int = 16) -> list[bytes]:
        """Return ``self.child(number, *parts).digest(size)`` for each number.

        >>> Key(0).child("local").digests([3, 14], "batch")[1] == Key(0).child("local", 14, "batch").digest()
        True
        """
        common, end = _hash(_encode(self.seed, *self.path), size), _encode(*parts)
        digests = []
        for number in numbers:
            state = common.copy()
            state.update(b"i%d:%d%b" % (len(str(number)), number, end))
            digests.append(state.digest())
        return digests

    def numpy(self) -> np.random.Generator:
        """Return a NumPy generator for this address."""
        return np.random.Generator(np.random.Philox(_seed_sequence()(self.digest(16))))

    def torch(self, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a torch generator for this address."""
        generator = torch.Generator(device=device)
        generator.manual_seed(int.from_bytes(self.digest(8), "little") >> 1)
        return generator


def _hash(address: bytes, size: int) -> hashlib.blake2b:
    return hashlib.blake2b(address, digest_size=size, person=b"hansa key")


def _encode(*parts: str | int) -> bytes:
    pieces = []
    for part in parts:
        text = str(part).encode()
        pieces.append(b"%c%d:%b" % (b"i" if isinstance(part, int) else b"s", len(text), text))
    return b"".join(pieces)


@cache
def _seed_sequence() -> Any:
    """Return a class that gives 128 bits to Philox: ``Philox(key=...)`` also draws entropy of the system, which takes
    longer than all the rest. It is made when numpy is used, which commands that look are not to import."""

    class Digest(np.random.bit_generator.ISeedSequence):
        def __init__(self, digest: bytes) -> None:
            self.digest = digest

        def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray[Any, Any]:
            return np.frombuffer(self.digest, np.dtype(dtype).newbyteorder("<")).astype(dtype)[:n_words]

        def __reduce__(self) -> tuple[Any, ...]:
            return _restored, (self.digest,)

    return Digest


def _restored(digest: bytes) -> Any:
    return _seed_sequence()(digest)
