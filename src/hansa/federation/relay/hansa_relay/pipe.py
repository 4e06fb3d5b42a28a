"""Records on a local socket: a head in JSON and a body of bytes, each with its length before it."""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

_LENGTHS = struct.Struct("<IQ")
_HEAD = 1 << 20
_PIECE = 1 << 20


class Closed(Exception):
    """The other side has gone, or may not be here."""


def connect(path: str, timeout: float | None = 10.0) -> socket.socket:
    """A connection to the socket of a program of the same user."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(timeout)
    try:
        made.connect(path)
        check_owner(made)
    except OSError as error:
        made.close()
        raise Closed(f"{path}: {error}") from error
    except Closed:
        made.close()
        raise
    made.settimeout(None)
    return made


def check_owner(connection: socket.socket) -> None:
    """Refuse a peer that runs as another user, root excepted: it can read the socket's folder anyway."""
    if not hasattr(socket, "SO_PEERCRED"):
        return  # the folder of the socket is closed to others
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", raw)
    if user not in (os.getuid(), 0):
        raise Closed(f"the peer runs as user {user}, this side as {os.getuid()}")


def send(connection: socket.socket, head: dict[str, Any], body: bytes = b"") -> None:
    """Write one record."""
    text = json.dumps(head).encode()
    try:
        connection.sendall(_LENGTHS.pack(len(text), len(body)) + text)
        if body:
            connection.sendall(body)
    except OSError as error:
        raise Closed(str(error)) from error


def receive(connection: socket.socket, limit: int) -> tuple[dict[str, Any], bytes]:
    """Read one record; ``limit`` bounds its body before any of it is read."""
    size, length = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size))
    if size > _HEAD or length > limit:
        raise Closed(f"a record of {size} + {length} bytes, at most {_HEAD} + {limit} are taken")
    head = json.loads(_exactly(connection, size))
    if not isinstance(head, dict):
        raise Closed("a record without a head")
    return head, _exactly(connection, length)


def _exactly(connection: socket.socket, size: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < size:
        try:
            piece = connection.recv(min(_PIECE, size - len(pieces)))
        except OSError as error:
            raise Closed(str(error)) from error
        if not piece:
            raise Closed("the other side has closed")
        pieces += piece
    return bytes(pieces)
