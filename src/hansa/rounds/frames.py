"""Frames: the byte form of every message. A head of canonical JSON, blobs, a digest over all of it; no pickle.

======  ======  ==================================================
bytes   type    what
======  ======  ==================================================
0-1     2s      ``hF``
2       u8      version of the format
3       u8      length of the kind, an ASCII word that follows
then    u32     bytes of the head
then    u32     number of blobs
then    u64     one length a blob
then            the head, the blobs
last            16 bytes of BLAKE2b over everything before
======  ======  ==================================================

Everything is little-endian. Sizes are checked before anything is parsed, the digest before anything is believed.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hansa.compress import Packet
from hansa.errors import HansaError

MAGIC, VERSION = b"hF", 1
DIGEST = 16
HEAD_LIMIT = 1 << 26  # bytes of JSON
BLOB_LIMIT = 1 << 20  # blobs
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
    )
}  # fmt: skip
_START, _COUNTS = struct.Struct("<2sBB"), struct.Struct("<II")

Blob = bytes | bytearray | memoryview


class FrameError(HansaError):
    """Bytes that are no message of ours, or not the one expected."""


class Frame(NamedTuple):
    """A message apart: its head and its blobs."""

    head: Any
    blobs: Sequence[memoryview]

    def packet(self, at: Any) -> Packet:
        """The packet in one of the blobs."""
        if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at < len(self.blobs):
            raise FrameError(f"frame: there is no blob {at!r}.")
        return Packet.parse(self.blobs[at])


class reading:
    """Whatever is wrong with the shape of a head is one kind of error: ``with reading("order"): ...``."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (TypeError, ValueError, KeyError, IndexError, AttributeError)) and not isinstance(
            error, FrameError
        ):
            raise FrameError(f"frame: not the head of {self.what}: {type(error).__name__} at {error}.") from error


def pack(kind: str, head: Mapping[str, Any], blobs: Sequence[Blob] = ()) -> bytes:
    """One message as bytes.

    >>> frame = pack("lost", {"client": 3}, [b"abc"])
    >>> unpack(frame, "lost").head, bytes(unpack(frame, "lost").blobs[0])
    ({'client': 3}, b'abc')
    """
    name = kind.encode("ascii")
    text = json.dumps(head, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    views = [memoryview(blob).cast("B") for blob in blobs]
    parts: list[Blob] = [
        _START.pack(MAGIC, VERSION, len(name)),
        name,
        _COUNTS.pack(len(text), len(views)),
        struct.pack(f"<{len(views)}Q", *map(len, views)),
        text,
        *views,
    ]
    state = hashlib.blake2b(digest_size=DIGEST)
    for part in parts:
        state.update(part)
    return b"".join([*parts, state.digest()])


def unpack(data: Blob, kind: str, *, limit: int | None = None) -> Frame:
    """The message of that kind in some bytes, or `FrameError`. ``limit`` bounds them before they are looked at."""
    view = memoryview(data).cast("B")
    if limit is not None and len(view) > limit:
        raise FrameError(f"frame: {len(view)} bytes, at most {limit} are taken.")
    found, at = _kind(view)
    if found != kind.encode("ascii"):
        raise FrameError(f"frame: of kind {bytes(found)!r}, expected {kind!r}.")
    if len(view) < at + _COUNTS.size + DIGEST:
        raise FrameError(f"frame: truncated at {len(view)} bytes.")
    length, count = _COUNTS.unpack_from(view, at)
    at += _COUNTS.size
    if length > HEAD_LIMIT or count > BLOB_LIMIT or len(view) < at + 8 * count + length + DIGEST:
        raise FrameError(f"frame: a head of {length} bytes and {count} blobs do not fit {len(view)} bytes.")
    sizes = struct.unpack_from(f"<{count}Q", view, at)
    at += 8 * count
    if at + length + sum(sizes) + DIGEST != len(view):
        raise FrameError(f"frame: declares {at + length + sum(sizes) + DIGEST} bytes, {len(view)} arrived.")
    if hashlib.blake2b(view[:-DIGEST], digest_size=DIGEST).digest() != view[-DIGEST:]:
        raise FrameError("frame: the digest does not match: the bytes were damaged on the way.")
    try:
        head = json.loads(bytes(view[at : at + length]))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"frame: the head is not JSON: {error}.") from error
    at += length
    blobs = []
    for size in sizes:
        blobs.append(view[at : at + size])
        at += size
    return Frame(head, blobs)


def _kind(view: memoryview) -> tuple[memoryview, int]:
    if len(view) < _START.size:
        raise FrameError(f"frame: truncated at {len(view)} bytes.")
    magic, version, length = _START.unpack_from(view)
    if magic != MAGIC:
        raise FrameError(f"frame: starts with {magic!r}, expected {MAGIC!r}: this is no message of ours.")
    if version != VERSION:
        raise FrameError(f"frame: version {version}, this reader knows version {VERSION}.")
    return view[_START.size : _START.size + length], _START.size + length


def number(value: float | None) -> float | str | None:
    """A number as JSON has it; those that JSON lacks as words.

    >>> number(0.1), number(math.inf), as_number("inf"), as_number(number(0.1))
    (0.1, 'inf', inf, 0.1)
    """
    return value if value is None or math.isfinite(value) else str(float(value))


def as_number(value: Any) -> float | None:
    """The number that `number` wrote."""
    if value is None:
        return None
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        raise FrameError(f"frame: {value!r} is no number.")
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise FrameError(f"frame: a {type(value).__name__} is no number.")
    return float(value)


class Blobs:
    """Collects blobs while a head is written; each `tensor` and `bytes` becomes a small JSON entry."""

    def __init__(self) -> None:
        self.found: list[Blob] = []

    def bytes(self, data: Blob) -> int:
        """The number of a blob."""
        self.found.append(data)
        return len(self.found) - 1

    def tensor(self, value: torch.Tensor) -> list[Any]:
        """A tensor as dtype, shape and blob."""
        name = str(value.dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise FrameError(f"frame: {value.dtype} tensors cannot travel. Known: {', '.join(DTYPES)}.")
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return [name, list(value.shape), self.bytes(raw)]

    def tensors(self, rows: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Named tensors."""
        return {name: self.tensor(rows[name]) for name in sorted(rows)}


def read_tensor(entry: Any, frame: Frame) -> torch.Tensor:
    """A tensor of its own from what `Blobs.tensor` wrote."""
    try:
        name, shape, at = entry
        dtype, blob = DTYPES[name], frame.blobs[at]
        sizes = [int(size) for size in shape]
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise FrameError(f"frame: {_short(entry)} is no tensor.") from error
    if min(sizes, default=0) < 0 or math.prod(sizes) * dtype.itemsize != len(blob):
        raise FrameError(f"frame: a {name} tensor of shape {_short(sizes)} does not take {len(blob)} bytes.")
    if not len(blob):
        return torch.empty(sizes, dtype=dtype)
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8).view(dtype).view(sizes)


def read_tensors(entry: Any, frame: Frame) -> dict[str, torch.Tensor]:
    """What `Blobs.tensors` wrote."""
    if not isinstance(entry, dict):
        raise FrameError(f"frame: {_short(entry)} holds no named tensors.")
    return {str(name): read_tensor(row, frame) for name, row in entry.items()}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
