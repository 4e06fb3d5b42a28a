"""Bytes as Flower records: small ones as one object, large ones as an array, which Flower sends in chunks."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

SMALL = 1 << 20
TYPE = "train"


def wrap(data: bytes, seconds: dict[str, float] | None = None) -> RecordDict:
    """Return the content of a message for some bytes, and for the seconds that they took."""
    content = RecordDict() if seconds is None else RecordDict({"seconds": ConfigRecord(dict(seconds))})
    if len(data) <= SMALL:
        content["frame"] = ConfigRecord({"bytes": data})
    else:
        content["frame"] = ArrayRecord({"bytes": Array("uint8", (len(data),), "raw", data)})
    return content


def seconds_of(content: RecordDict) -> dict[str, float]:
    """Return the seconds that came with some bytes."""
    record = content.get("seconds")
    known = record.items() if isinstance(record, ConfigRecord) else ()
    return {f"{name}_seconds": value for name, value in known if name in ("start", "work") and isinstance(value, float)}


def unwrap(content: RecordDict) -> bytes:
    """Return the bytes that `wrap` took; for any other content return nothing."""
    record = content.get("frame")
    if isinstance(record, ConfigRecord):
        value = record.get("bytes", b"")
        return value if isinstance(value, bytes) else b""
    if isinstance(record, ArrayRecord) and "bytes" in record:
        return bytes(record["bytes"].data)
    return b""
