"""Randomness as a function of an address: nothing is drawn from shared state, so nothing depends on order."""

from __future__ import annotations

import hashlib
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
        """The key at an address below this one."""
        for part in parts:
            if type(part) is int or type(part) is str:
                continue
            if not isinstance(part, (str, int)) or isinstance(part, bool):
                raise invalid_argument("Key.child", "part", part, "words and whole numbers")
        key = object.__new__(Key)  # the seed has been looked at, and a round makes many of these
        object.__setattr__(key, "seed", self.seed)
        object.__setattr__(key, "path", self.path + parts)
        return key

    def digest(self, size: int = 16) -> bytes:
        """Bytes that stand for this address; every part is written with its type and length."""
        pieces = []
        for part in (self.seed, *self.path):
            text = str(part).encode()
            pieces.append(b"%c%d:%b" % (b"i" if isinstance(part, int) else b"s", len(text), text))
        return hashlib.blake2b(b"".join(pieces), digest_size=size, person=b"hansa key").digest()

    def numpy(self) -> np.random.Generator:
        """A NumPy generator at this address."""
        return np.random.Generator(np.random.Philox(_seed_sequence_class()(self.digest(16))))

    def torch(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A torch generator at this address."""
        generator = torch.Generator(device=device)
        generator.manual_seed(int.from_bytes(self.digest(8), "little") >> 1)
        return generator


@cache
def _seed_sequence_class() -> Any:
    """Hands Philox its 128 bits as they are: what ``Philox(key=...)`` does after asking the system for entropy."""

    class Given(np.random.bit_generator.ISeedSequence):
        def __init__(self, digest: bytes) -> None:
            self.digest = digest

        def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray[Any, Any]:
            return np.frombuffer(self.digest, np.dtype(dtype).newbyteorder("<")).astype(dtype)[:n_words]

        def __reduce__(self) -> tuple[Any, ...]:
            return _restore_seed_sequence, (self.digest,)

    return Given


def _restore_seed_sequence(digest: bytes) -> Any:
    return _seed_sequence_class()(digest)
