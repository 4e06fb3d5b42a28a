"""Bytes in Flower's records: small ones in one object, large ones in an array, which Flower cuts into pieces."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

SMALL = 1 << 20
TYPE = "train"


def wrap(data: bytes) -> RecordDict:
    """Bytes as the content of a message."""
    if len(data) <= SMALL:
        return RecordDict({"frame": ConfigRecord({"bytes": data})})
    return RecordDict({"frame": ArrayRecord({"bytes": Array("uint8", (len(data),), "raw", data)})})


def unwrap(content: RecordDict) -> bytes:
    """What `wrap` took; of anything else nothing."""
    record = content.get("frame")
    if isinstance(record, ConfigRecord):
        value = record.get("bytes", b"")
        return value if isinstance(value, bytes) else b""
    if isinstance(record, ArrayRecord) and "bytes" in record:
        return bytes(record["bytes"].data)
    return b""
