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

from hansa.data.files import invalid_file, missing_file

_UNSIGNED_BYTE = 0x08
_BLOCK = 1 << 20
_MAX_BYTES = 1 << 28  # five times the largest file: a small .gz must not fill the memory


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


def find_idx(path: Path, remedy: str = "") -> Path:
    """Return the file, or the same name with .gz."""
    compressed = path.with_name(path.name + ".gz")
    if path.is_file():
        return path
    if compressed.is_file():
        return compressed
    raise missing_file(path, remedy or "Neither it nor its .gz exists.")


def read_idx(path: Path, axes: int, remedy: str = "") -> tuple[npt.NDArray[np.uint8], str]:
    """Return the array of an idx file of unsigned bytes, and the SHA-256 of its uncompressed bytes."""
    path = find_idx(path, remedy)
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            return _parse(path, file, axes)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise invalid_file(path, "a whole gzip file", str(error).rstrip(".")) from error


def _read(file: _Stream, count: int) -> bytes:
    """Read at most ``count`` bytes in blocks, so that memory is allocated only for bytes that exist."""
    blocks, remaining = [], count
    while remaining and (block := file.read(min(remaining, _BLOCK))):
        blocks.append(block)
        remaining -= len(block)
    return b"".join(blocks)


def _parse(path: Path, file: _Stream, axes: int) -> tuple[npt.NDArray[np.uint8], str]:
    size = 4 + 4 * axes
    header = file.read(size)
    magic = bytes([0, 0, _UNSIGNED_BYTE, axes])
    if header[:4] != magic:
        raise invalid_file(
            path, f"an idx file of bytes with {axes} axes (magic {magic.hex()})", f"magic {header[:4].hex()!r}"
        )
    if len(header) < size:
        raise invalid_file(path, f"a header of {size} bytes", f"{len(header)}")
    shape = struct.unpack(f">{axes}I", header[4:])
    count = int(np.prod(shape, dtype=object))
    if count > _MAX_BYTES:
        raise invalid_file(path, f"at most {_MAX_BYTES} bytes", f"a header that claims {' x '.join(map(str, shape))}")
    # one byte more than claimed, to detect a longer file
    body = _read(file, count + 1)
    if len(body) != count:
        actual = "more" if len(body) > count else str(len(body))
        raise invalid_file(path, f"{count} bytes for {' x '.join(map(str, shape))}", actual)
    digest = hashlib.sha256(header)
    digest.update(body)
    return np.frombuffer(body, np.uint8).reshape(shape), digest.hexdigest()
