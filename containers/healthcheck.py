"""Exit with 0 if the server accepts connections (`server [PORT]`), or if the site's Flower node runs (`site`)."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

NODES = (b"flower-supernode", b"run_site_node.py")  # Flower's program, and Hansa's script that runs it


def server(port: int = 8443) -> bool:
    """Return whether something listens on a port of this container."""
    try:
        socket.create_connection(("127.0.0.1", port), 3.0).close()
    except OSError:
        return False
    return True


def site(processes: Path = Path("/proc")) -> bool:
    """Return whether a Flower node runs in this container; a site listens on no port that could be asked."""
    for process in processes.glob("[0-9]*/cmdline"):
        try:
            arguments = process.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if any(argument.rpartition(b"/")[2] in NODES for argument in arguments):
            return True
    return False


def main(arguments: list[str]) -> int:
    """Run the check that the arguments name and return the exit code."""
    role, *rest = arguments or [""]
    if role == "server":
        return 0 if server(*(int(port) for port in rest)) else 1
    if role == "site" and not rest:
        return 0 if site() else 1
    print("usage: healthcheck.py server [PORT] | site", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
