"""Bytes as Flower records: small ones as one object, large ones as an array, which Flower sends in chunks."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

SMALL = 1 << 20
TYPE = "train"


def wrap(data: bytes) -> RecordDict:
    """Return the content of a message for some bytes."""
    if len(data) <= SMALL:
        return RecordDict({"frame": ConfigRecord({"bytes": data})})
    return RecordDict({"frame": ArrayRecord({"bytes": Array("uint8", (len(data),), "raw", data)})})


def unwrap(content: RecordDict) -> bytes:
    """Return the bytes that `wrap` took; for any other content return nothing."""
    record = content.get("frame")
    if isinstance(record, ConfigRecord):
        value = record.get("bytes", b"")
        return value if isinstance(value, bytes) else b""
    if isinstance(record, ArrayRecord) and "bytes" in record:
        return bytes(record["bytes"].data)
    return b""
