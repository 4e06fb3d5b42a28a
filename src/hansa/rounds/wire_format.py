"""Messages as bytes: frames, and dataclasses whose fields declare how they are read.

A frame is a head of canonical JSON, blobs, and a digest; no pickle.

======  ======  ==================================================
bytes   type    content
======  ======  ==================================================
0-1     2s      ``hF``
2       u8      version of the format
3       u8      length of the kind, the ASCII word that follows
then    u32     length of the head
then    u32     number of blobs
then    u64     length of each blob
then            the head, the blobs
last            16 bytes of BLAKE2b over everything before
======  ======  ==================================================

Everything is little-endian. Sizes and the digest are checked before the head is parsed. The digest has no key and does
not authenticate the sender, so every value in a head is checked for type and bounds, the number of lists and entries is
limited, and a blob is read once: the decoded message is about as large as the frame.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import torch

from hansa.compress import Packet
from hansa.core.errors import HansaError

MAGIC, VERSION = b"hF", 1
PROTOCOL = 5
"""Incremented when the meaning of a message changes. Messages of another version are refused."""
DIGEST = 16
HEAD_LIMIT = 1 << 26  # bytes of JSON
ENTRY_LIMIT = 1 << 22  # commas, and a quarter as many brackets: an empty list takes 2 bytes in JSON, 56 in memory
BLOB_LIMIT = 1 << 20  # blobs
WORD_LIMIT, TEXT_LIMIT = 100, 4000  # characters of a name, and of a sentence
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
_AXES = 8
_START, _COUNTS = struct.Struct("<2sBB"), struct.Struct("<II")

Blob = bytes | bytearray | memoryview


class FrameError(HansaError):
    """Bytes that are not a valid message, or not the expected one; ``reason`` is machine-readable."""

    def __init__(self, message: str, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True, eq=False)
class Frame:
    """A decoded message: its head and its blobs."""

    head: Any
    blobs: Sequence[memoryview]
    _used: set[int] = field(default_factory=set, repr=False)

    def take(self, index: Any) -> memoryview:
        """Return one of the blobs; a message may refer to each only once."""
        if type(index) is not int or not 0 <= index < len(self.blobs):
            raise FrameError(f"frame: there is no blob {_abbreviate(index)}.")
        if index in self._used:
            raise FrameError(f"frame: names blob {index} twice.", "inflated")
        self._used.add(index)
        return self.blobs[index]

    def packet(self, index: Any) -> Packet:
        """Return the packet in one of the blobs."""
        return Packet.parse(self.take(index))


class reading:
    """Turn any error in the structure of a head into a `FrameError`: ``with reading("order"): ...``."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)) and not isinstance(
            error, FrameError
        ):
            raise FrameError(
                f"frame: not the head of {self.what}: {type(error).__name__} at {_abbreviate(error)}."
            ) from error


def pack(kind: str, head: Mapping[str, Any], blobs: Sequence[Blob] = ()) -> bytes:
    """Encode one message as bytes.

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
    """Decode a message of the given kind, or raise `FrameError`; ``limit`` is the maximum number of bytes."""
    view = memoryview(data).cast("B")
    if limit is not None and len(view) > limit:
        raise FrameError(f"frame: {len(view)} bytes, at most {limit} are accepted.", "oversize")
    frame_kind, offset = _parse_kind(view)
    if frame_kind != kind.encode("ascii"):
        raise FrameError(f"frame: of kind {_abbreviate(bytes(frame_kind))}, expected {kind!r}.")
    if len(view) < offset + _COUNTS.size + DIGEST:
        raise FrameError(f"frame: truncated at {len(view)} bytes.", "truncated")
    length, count = _COUNTS.unpack_from(view, offset)
    offset += _COUNTS.size
    if length > HEAD_LIMIT or count > BLOB_LIMIT or len(view) < offset + 8 * count + length + DIGEST:
        raise FrameError(f"frame: a head of {length} bytes and {count} blobs: not in {len(view)} bytes.", "truncated")
    sizes = struct.unpack_from(f"<{count}Q", view, offset)
    offset += 8 * count
    if offset + length + sum(sizes) + DIGEST != len(view):
        declared = offset + length + sum(sizes) + DIGEST
        raise FrameError(f"frame: declares {declared} bytes, {len(view)} arrived.", "truncated")
    if hashlib.blake2b(view[:-DIGEST], digest_size=DIGEST).digest() != view[-DIGEST:]:
        raise FrameError("frame: the digest does not match: the bytes were damaged on the way.", "damaged")
    head = _parse_head(bytes(view[offset : offset + length]))
    offset += length
    blobs = []
    for size in sizes:
        blobs.append(view[offset : offset + size])
        offset += size
    return Frame(head, blobs)


def kind_of(data: Blob) -> str:
    """Return the kind of a frame without parsing the rest."""
    frame_kind, _ = _parse_kind(memoryview(data).cast("B"))
    return bytes(frame_kind).decode("ascii", "replace")


def _parse_head(text: bytes) -> Any:
    brackets, commas = text.count(b"[") + text.count(b"{"), text.count(b",")
    if commas > ENTRY_LIMIT or 4 * brackets > ENTRY_LIMIT:
        raise FrameError(f"frame: a head of {brackets} lists and {commas} entries, too many.", "inflated")
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"frame: the head is not JSON: {_abbreviate(error)}.") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _parse_kind(view: memoryview) -> tuple[memoryview, int]:
    if len(view) < _START.size:
        raise FrameError(f"frame: truncated at {len(view)} bytes.", "truncated")
    magic, version, length = _START.unpack_from(view)
    if magic != MAGIC:
        raise FrameError(f"frame: starts with {magic!r}, expected {MAGIC!r}: not a hansa frame.")
    if version != VERSION:
        raise FrameError(f"frame: version {version}, expected version {VERSION}.", "version")
    return view[_START.size : _START.size + length], _START.size + length


def number(value: float | None) -> float | str | None:
    """Encode a number for JSON; infinities and NaN become strings.

    >>> number(0.1), number(math.inf), as_number("inf"), as_number(number(0.1))
    (0.1, 'inf', inf, 0.1)
    """
    return value if value is None or math.isfinite(value) else str(float(value))


def as_number(value: Any) -> float | None:
    """Decode the result of `number`."""
    if value is None:
        return None
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        raise FrameError(f"frame: {_abbreviate(value)} is not a number.")
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise FrameError(f"frame: a {type(value).__name__} is not a number.")
    try:
        return float(value)
    except OverflowError as error:
        raise FrameError(f"frame: {_abbreviate(value)} is larger than any number.") from error


def integer(value: Any, minimum: int = 0, maximum: int = (1 << 63) - 1) -> int:
    """Return the value if it is an integer within bounds: not a string, 3.0 or true.

    >>> integer(3)
    3
    """
    if type(value) is not int or not minimum <= value <= maximum:
        raise FrameError(f"frame: {_abbreviate(value)}, expected a whole number from {minimum} to {maximum}.")
    return value


def integers(values: Any, minimum: int = 0) -> tuple[int, ...]:
    """Return the values if they are a list of integers."""
    if not isinstance(values, list):
        raise FrameError(f"frame: {_abbreviate(values)} is not a list of whole numbers.")
    return tuple(integer(value, minimum) for value in values)


def name(value: Any, limit: int = WORD_LIMIT) -> str:
    """Return the value if it is a printable string of at most ``most`` characters.

    >>> name("model")
    'model'
    """
    if not isinstance(value, str) or len(value) > limit or not value.isprintable():
        raise FrameError(f"frame: {_abbreviate(value)}, expected at most {limit} printable characters.")
    return value


def sentence(text: str) -> str:
    """Shorten a text to one line that fits a message.

    >>> sentence("two\\nlines")
    'two lines'
    """
    line = "".join(letter if letter.isprintable() else " " for letter in text[:TEXT_LIMIT])
    return line if len(text) <= TEXT_LIMIT else line[: TEXT_LIMIT - 3] + "..."


def whole_key(text: Any) -> int:
    """Return the integer in a JSON key, which is a string."""
    if not isinstance(text, str) or not re.fullmatch("0|[1-9][0-9]{0,17}", text):
        raise FrameError(f"frame: {_abbreviate(text)}, expected the number of a client.")
    return int(text)


class Blobs:
    """The blobs of a message under construction; `tensor` and `bytes` return the JSON entries that refer to them."""

    def __init__(self) -> None:
        self.blobs: list[Blob] = []

    def bytes(self, data: Blob) -> int:
        """Add a blob and return its number."""
        self.blobs.append(data)
        return len(self.blobs) - 1

    def tensor(self, value: torch.Tensor) -> list[Any]:
        """Encode a tensor as dtype, shape and blob."""
        kind = str(value.dtype).removeprefix("torch.")
        if kind not in DTYPES:
            raise FrameError(f"frame: {value.dtype} tensors cannot be sent. Supported: {', '.join(DTYPES)}.")
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return [kind, list(value.shape), self.bytes(raw)]

    def tensors(self, rows: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Encode named tensors."""
        return {name: self.tensor(rows[name]) for name in sorted(rows)}


def read_tensor(entry: Any, frame: Frame) -> torch.Tensor:
    """Decode the result of `Blobs.tensor` into a new tensor."""
    try:
        kind, shape, index = entry
        dtype = getattr(torch, DTYPES[DTYPES.index(kind)])
    except (TypeError, ValueError) as error:
        raise FrameError(f"frame: {_abbreviate(entry)} is not a tensor.") from error
    sizes, blob = integers(shape), frame.take(index)
    if len(sizes) > _AXES or math.prod(max(1, size) for size in sizes) > 1 << 58:
        raise FrameError(f"frame: a tensor of shape {_abbreviate(sizes)} is not supported.")
    if math.prod(sizes) * dtype.itemsize != len(blob):
        raise FrameError(f"frame: a {kind} tensor of shape {_abbreviate(sizes)} does not take {len(blob)} bytes.")
    if not len(blob):
        return torch.empty(sizes, dtype=dtype)
    raw = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    if dtype == torch.bool and int(raw.max()) > 1:
        raise FrameError("frame: a bool tensor contains values other than 0 and 1.")
    return raw.view(dtype).view(sizes)


def read_tensors(entry: Any, frame: Frame) -> dict[str, torch.Tensor]:
    """Decode the result of `Blobs.tensors`."""
    if not isinstance(entry, dict):
        raise FrameError(f"frame: {_abbreviate(entry)} is not a mapping of tensors.")
    return {name(row): read_tensor(value, frame) for row, value in entry.items()}


def _abbreviate(value: object) -> str:
    text = reprlib.repr(value) if not isinstance(value, Exception) else ascii(str(value))
    return text if len(text) <= 60 else text[:57] + "..."


def check_protocol(head: Any) -> Any:
    """Return the head of a frame, or raise if its protocol version differs."""
    version = head.get("protocol") if isinstance(head, dict) else None
    if type(version) is not int or version != PROTOCOL:
        message = f"frame: protocol {reprlib.repr(version)}, expected {PROTOCOL}. Install one version everywhere."
        raise FrameError(message, "version")
    return head


class Message:
    """Base of the messages: a frame of a ``kind``, whose head has the protocol version and the fields of the dataclass.
    `wire_field`, `value_field` and `mapping_field` declare how a field is read."""

    __slots__ = ()
    kind: ClassVar[str]

    def to_bytes(self) -> bytes:
        """Encode the message as one frame."""
        blobs, head = Blobs(), {"protocol": PROTOCOL}
        for entry in fields(self):  # type: ignore[arg-type]
            head[entry.name] = entry.metadata["write"](getattr(self, entry.name), blobs)
        return pack(self.kind, head, blobs.blobs)

    @classmethod
    def from_bytes(cls, data: Blob, *, limit: int | None = None) -> Self:
        """Read a frame of at most ``limit`` bytes, or raise `FrameError`."""
        frame = unpack(data, cls.kind, limit=limit)
        head = check_protocol(frame.head)
        with reading(cls.kind):
            values = {
                entry.name: entry.metadata["read"](head[entry.name], frame)
                for entry in fields(cls)  # type: ignore[arg-type]
            }
            message = cls(**values)
            message.check_columns()
            return message

    def check_columns(self) -> None:
        """Raise for fields that were read and do not fit each other."""


def wire_field(read: Callable[[Any, Frame], Any], write: Callable[[Any, Blobs], Any], **options: Any) -> Any:
    """Return a field of a message with its functions for reading and writing the head of a frame and its blobs."""
    return field(metadata={"read": read, "write": write}, **options)


def value_field(read: Callable[[Any], Any], write: Callable[[Any], Any] = lambda value: value, **options: Any) -> Any:
    """Return a field of a message that is a value in the head."""
    return wire_field(lambda value, frame: read(value), lambda value, blobs: write(value), **options)


def mapping_field(
    key: Callable[[Any], Any], value: Callable[[Any], Any], write: Callable[[Any], Any] = lambda value: value,
    **options: Any,
) -> Any:  # fmt: skip
    """Return a field of a message that is an object in the head."""
    return value_field(
        lambda entry: {key(name): value(item) for name, item in entry.items()},
        lambda entry: {str(name): write(item) for name, item in entry.items()},
        **options,
    )


def optional(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reader or a writer of values that may be None."""
    return lambda value, *more: None if value is None else function(value, *more)
