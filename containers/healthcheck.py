"""Exit with 0 if the server of this container accepts connections: `healthcheck.py [PORT]`."""

from __future__ import annotations

import socket
import sys


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    try:
        socket.create_connection(("127.0.0.1", int(arguments[0]) if arguments else 8443), 3.0).close()
    except OSError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
