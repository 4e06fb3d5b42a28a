"""The idx format of MNIST and Fashion-MNIST: a magic number, big-endian sizes, bytes."""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hansa.data.errors import damaged, missing

_UNSIGNED_BYTE = 0x08
_BLOCK = 1 << 20
_LARGEST = 1 << 28  # five times the largest file of the family: a small .gz may not fill the memory


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


def find_idx(path: Path, remedy: str = "") -> Path:
    """The file itself, or the same name with .gz."""
    packed = path.with_name(path.name + ".gz")
    if path.is_file():
        return path
    if packed.is_file():
        return packed
    raise missing(path, remedy or "Neither it nor its .gz is there.")


def read_idx(path: Path, axes: int, remedy: str = "") -> tuple[npt.NDArray[np.uint8], str]:
    """The array of an idx file of unsigned bytes, and the SHA-256 of its uncompressed bytes."""
    found = find_idx(path, remedy)
    try:
        with gzip.open(found) if found.suffix == ".gz" else open(found, "rb") as file:
            return _parse(found, file, axes)
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise damaged(found, "a whole gzip file", str(problem).rstrip(".")) from problem


def _read(file: _Stream, count: int) -> bytes:
    """At most so many bytes, in blocks: memory is taken for what there is, not for what is asked for."""
    blocks, left = [], count
    while left and (block := file.read(min(left, _BLOCK))):
        blocks.append(block)
        left -= len(block)
    return b"".join(blocks)


def _parse(path: Path, file: _Stream, axes: int) -> tuple[npt.NDArray[np.uint8], str]:
    size = 4 + 4 * axes
    head = file.read(size)
    magic = bytes([0, 0, _UNSIGNED_BYTE, axes])
    if head[:4] != magic:
        raise damaged(path, f"an idx file of bytes with {axes} axes (magic {magic.hex()})", f"magic {head[:4].hex()!r}")
    if len(head) < size:
        raise damaged(path, f"a head of {size} bytes", f"{len(head)}")
    shape = struct.unpack(f">{axes}I", head[4:])
    count = int(np.prod(shape, dtype=object))
    if count > _LARGEST:
        raise damaged(path, f"at most {_LARGEST} bytes", f"a head that claims {' x '.join(map(str, shape))}")
    # one byte more than claimed, so that a file that goes on is seen as wrong too
    body = _read(file, count + 1)
    if len(body) != count:
        more = "more" if len(body) > count else str(len(body))
        raise damaged(path, f"{count} bytes for {' x '.join(map(str, shape))}", more)
    digest = hashlib.sha256(head)
    digest.update(body)
    return np.frombuffer(body, np.uint8).reshape(shape), digest.hexdigest()
