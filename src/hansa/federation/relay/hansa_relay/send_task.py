"""Send a task to `run_site_app --serve`: ``python send_task.py SOCKET ARGUMENT ...``; run it here if nobody listens."""

from __future__ import annotations

import json
import os
import socket
import sys

KILLED = 137


def main() -> None:
    """Exit with the code of the task, or as one that was killed if there is none."""
    path, arguments = sys.argv[1], sys.argv[2:]
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        connection.sendall(json.dumps(arguments).encode() + b"\n")
    except OSError:
        runner = os.path.join(os.path.dirname(os.path.abspath(__file__)), "run_site_app.py")
        os.execv(sys.executable, [sys.executable, runner, *arguments])
    with connection, connection.makefile("rb") as lines:
        try:
            sys.exit(int(lines.readline()))
        except (OSError, ValueError):
            sys.exit(KILLED)


if __name__ == "__main__":
    main()
