"""Records on a local socket: a JSON head and a body of bytes, after the lengths of both."""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

_LENGTHS = struct.Struct("<IQ")
_MAX_HEAD = 1 << 20
_CHUNK = 1 << 20


class ConnectionClosed(Exception):
    """The peer has closed the connection, or is not permitted."""


def connect(path: str, timeout: float | None = 10.0) -> socket.socket:
    """Connect to the socket of a process of the same user."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    try:
        connection.connect(path)
        check_owner(connection)
    except OSError as error:
        connection.close()
        raise ConnectionClosed(f"{path}: {error}") from error
    except ConnectionClosed:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def check_owner(connection: socket.socket) -> None:
    """Raise if the peer runs as another user; root is permitted, since it can read the folder anyway."""
    if not hasattr(socket, "SO_PEERCRED"):
        return  # the folder of the socket is private
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", raw)
    if user not in (os.getuid(), 0):
        raise ConnectionClosed(f"the peer runs as user {user}, this side as {os.getuid()}")


def send(connection: socket.socket, head: dict[str, Any], body: bytes = b"") -> None:
    """Write one record."""
    text = json.dumps(head).encode()
    try:
        connection.sendall(_LENGTHS.pack(len(text), len(body)) + text)
        if body:
            connection.sendall(body)
    except OSError as error:
        raise ConnectionClosed(str(error)) from error


def receive(connection: socket.socket, limit: int) -> tuple[dict[str, Any], bytes]:
    """Read one record; a body over ``limit`` bytes is refused before it is read."""
    size, length = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size))
    if size > _MAX_HEAD or length > limit:
        raise ConnectionClosed(f"a record of {size} + {length} bytes, expected at most {_MAX_HEAD} + {limit}")
    head = json.loads(_exactly(connection, size))
    if not isinstance(head, dict):
        raise ConnectionClosed("a record without a head")
    return head, _exactly(connection, length)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            chunk = connection.recv(min(_CHUNK, size - len(data)))
        except OSError as error:
            raise ConnectionClosed(str(error)) from error
        if not chunk:
            raise ConnectionClosed("the peer has closed the connection")
        data += chunk
    return bytes(data)
