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

Everything is little-endian. Sizes are checked before anything is parsed, the digest before anything is believed. A
digest without a key proves no sender: what is in a head may be anything. So every number and word in it is held to its
type and bounds, a head has no more lists and entries than a real one, and a blob is taken once: what a frame unpacks to
is of the size of the frame.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hansa.compress import Packet
from hansa.core.errors import HansaError

MAGIC, VERSION = b"hF", 1
DIGEST = 16
HEAD_LIMIT = 1 << 26  # bytes of JSON
ENTRY_LIMIT = 1 << 22  # commas of JSON, and a quarter as many brackets: an empty list is 2 bytes there, 56 in memory
BLOB_LIMIT = 1 << 20  # blobs
WORD_LIMIT, TEXT_LIMIT = 100, 4000  # characters of a name, and of a sentence
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
_AXES = 8
_START, _COUNTS = struct.Struct("<2sBB"), struct.Struct("<II")

Blob = bytes | bytearray | memoryview


class FrameError(HansaError):
    """Bytes that are no message of ours, or not the one expected; ``reason`` is a word to count by."""

    def __init__(self, message: str, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True, eq=False)
class Frame:
    """A message apart: its head and its blobs."""

    head: Any
    blobs: Sequence[memoryview]
    _taken: set[int] = field(default_factory=set, repr=False)

    def take(self, at: Any) -> memoryview:
        """One of the blobs, which a message may name but once."""
        if type(at) is not int or not 0 <= at < len(self.blobs):
            raise FrameError(f"frame: there is no blob {_short(at)}.")
        if at in self._taken:
            raise FrameError(f"frame: names blob {at} twice.", "inflated")
        self._taken.add(at)
        return self.blobs[at]

    def packet(self, at: Any) -> Packet:
        """The packet in one of the blobs."""
        return Packet.parse(self.take(at))


class reading:
    """Whatever is wrong with the shape of a head is one kind of error: ``with reading("order"): ...``."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)) and not isinstance(
            error, FrameError
        ):
            raise FrameError(
                f"frame: not the head of {self.what}: {type(error).__name__} at {_short(error)}."
            ) from error


def pack(kind: str, head: Mapping[str, Any], blobs: Sequence[Blob] = ()) -> bytes:
    """One message as bytes.

    >>> frame = pack("lost", {"client": 3}, [b"abc"])
    >>> unpack(frame, "lost").head, bytes(unpack(frame, "lost").blobs[0])
    ({'client': 3}, b'abc')
    """
    word = kind.encode("ascii")
    text = json.dumps(head, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    views = [memoryview(blob).cast("B") for blob in blobs]
    parts: list[Blob] = [
        _START.pack(MAGIC, VERSION, len(word)),
        word,
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
        raise FrameError(f"frame: {len(view)} bytes, at most {limit} are taken.", "oversize")
    frame_kind, at = _kind(view)
    if frame_kind != kind.encode("ascii"):
        raise FrameError(f"frame: of kind {_short(bytes(frame_kind))}, expected {kind!r}.")
    if len(view) < at + _COUNTS.size + DIGEST:
        raise FrameError(f"frame: truncated at {len(view)} bytes.", "truncated")
    length, count = _COUNTS.unpack_from(view, at)
    at += _COUNTS.size
    if length > HEAD_LIMIT or count > BLOB_LIMIT or len(view) < at + 8 * count + length + DIGEST:
        raise FrameError(f"frame: a head of {length} bytes and {count} blobs: not in {len(view)} bytes.", "truncated")
    sizes = struct.unpack_from(f"<{count}Q", view, at)
    at += 8 * count
    if at + length + sum(sizes) + DIGEST != len(view):
        declared = at + length + sum(sizes) + DIGEST
        raise FrameError(f"frame: declares {declared} bytes, {len(view)} arrived.", "truncated")
    if hashlib.blake2b(view[:-DIGEST], digest_size=DIGEST).digest() != view[-DIGEST:]:
        raise FrameError("frame: the digest does not match: the bytes were damaged on the way.", "damaged")
    head = _head(bytes(view[at : at + length]))
    at += length
    blobs = []
    for size in sizes:
        blobs.append(view[at : at + size])
        at += size
    return Frame(head, blobs)


def kind_of(data: Blob) -> str:
    """The word that says what a frame is, before anything else in it is looked at."""
    frame_kind, _ = _kind(memoryview(data).cast("B"))
    return bytes(frame_kind).decode("ascii", "replace")


def _head(text: bytes) -> Any:
    brackets, commas = text.count(b"[") + text.count(b"{"), text.count(b",")
    if commas > ENTRY_LIMIT or 4 * brackets > ENTRY_LIMIT:
        raise FrameError(f"frame: a head of {brackets} lists and {commas} entries, too many.", "inflated")
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"frame: the head is not JSON: {_short(error)}.") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _kind(view: memoryview) -> tuple[memoryview, int]:
    if len(view) < _START.size:
        raise FrameError(f"frame: truncated at {len(view)} bytes.", "truncated")
    magic, version, length = _START.unpack_from(view)
    if magic != MAGIC:
        raise FrameError(f"frame: starts with {magic!r}, expected {MAGIC!r}: this is no message of ours.")
    if version != VERSION:
        raise FrameError(f"frame: version {version}, this reader knows version {VERSION}.", "version")
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
        raise FrameError(f"frame: {_short(value)} is no number.")
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise FrameError(f"frame: a {type(value).__name__} is no number.")
    try:
        return float(value)
    except OverflowError as error:
        raise FrameError(f"frame: {_short(value)} is larger than any number.") from error


def integer(value: Any, least: int = 0, most: int = (1 << 63) - 1) -> int:
    """A whole number as a head has it: no text, no 3.0, no true.

    >>> integer(3)
    3
    """
    if type(value) is not int or not least <= value <= most:
        raise FrameError(f"frame: {_short(value)}, expected a whole number from {least} to {most}.")
    return value


def integers(values: Any, least: int = 0) -> tuple[int, ...]:
    """A list of whole numbers."""
    if not isinstance(values, list):
        raise FrameError(f"frame: {_short(values)} is no list of whole numbers.")
    return tuple(integer(value, least) for value in values)


def name(value: Any, most: int = WORD_LIMIT) -> str:
    """A name or a sentence of at most so many characters, each of which can be printed.

    >>> name("model")
    'model'
    """
    if not isinstance(value, str) or len(value) > most or not value.isprintable():
        raise FrameError(f"frame: {_short(value)}, expected at most {most} characters that can be printed.")
    return value


def sentence(text: str) -> str:
    """What a message may carry of a text: its beginning, on one line.

    >>> sentence("two\\nlines")
    'two lines'
    """
    one = "".join(letter if letter.isprintable() else " " for letter in text[:TEXT_LIMIT])
    return one if len(text) <= TEXT_LIMIT else one[: TEXT_LIMIT - 3] + "..."


def whole_key(text: Any) -> int:
    """A whole number that is a key of JSON, and so a text."""
    if not isinstance(text, str) or not re.fullmatch("0|[1-9][0-9]{0,17}", text):
        raise FrameError(f"frame: {_short(text)}, expected the number of a client.")
    return int(text)


class Blobs:
    """Collects blobs while a head is written; each `tensor` and `bytes` becomes a small JSON entry."""

    def __init__(self) -> None:
        self.blobs: list[Blob] = []

    def bytes(self, data: Blob) -> int:
        """The number of a blob."""
        self.blobs.append(data)
        return len(self.blobs) - 1

    def tensor(self, value: torch.Tensor) -> list[Any]:
        """A tensor as dtype, shape and blob."""
        kind = str(value.dtype).removeprefix("torch.")
        if kind not in DTYPES:
            raise FrameError(f"frame: {value.dtype} tensors cannot travel. Known: {', '.join(DTYPES)}.")
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return [kind, list(value.shape), self.bytes(raw)]

    def tensors(self, rows: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Named tensors."""
        return {name: self.tensor(rows[name]) for name in sorted(rows)}


def read_tensor(entry: Any, frame: Frame) -> torch.Tensor:
    """A tensor of its own from what `Blobs.tensor` wrote."""
    try:
        kind, shape, at = entry
        dtype = getattr(torch, DTYPES[DTYPES.index(kind)])
    except (TypeError, ValueError) as error:
        raise FrameError(f"frame: {_short(entry)} is no tensor.") from error
    sizes, blob = integers(shape), frame.take(at)
    if len(sizes) > _AXES or math.prod(max(1, size) for size in sizes) > 1 << 58:
        raise FrameError(f"frame: a tensor of shape {_short(sizes)} is none that travels.")
    if math.prod(sizes) * dtype.itemsize != len(blob):
        raise FrameError(f"frame: a {kind} tensor of shape {_short(sizes)} does not take {len(blob)} bytes.")
    if not len(blob):
        return torch.empty(sizes, dtype=dtype)
    raw = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    if dtype == torch.bool and int(raw.max()) > 1:
        raise FrameError("frame: a tensor of truth values holds another number than 0 and 1.")
    return raw.view(dtype).view(sizes)


def read_tensors(entry: Any, frame: Frame) -> dict[str, torch.Tensor]:
    """What `Blobs.tensors` wrote."""
    if not isinstance(entry, dict):
        raise FrameError(f"frame: {_short(entry)} holds no named tensors.")
    return {name(row): read_tensor(value, frame) for row, value in entry.items()}


def _short(value: object) -> str:
    text = reprlib.repr(value) if not isinstance(value, Exception) else ascii(str(value))
    return text if len(text) <= 60 else text[:57] + "..."
