"""Runs Flower's SuperNode with shorter intervals, and lets a node that was killed return at once.

Flower has no settings for them: a node asks for messages every 3 s, sends a heartbeat every 20 s, waits up to 20 s
before it tries again to connect, and is refused for 60 s after it was killed. Where a future version of Flower has
other names, the node runs with Flower's own intervals.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

POLL_SECONDS = 0.5  # between requests for messages
ACTIVE_POLL_SECONDS = 0.2  # the same for some time after a message: during a run
ACTIVE_SECONDS = 30.0
REPLY_SECONDS = 0.05  # between the first checks whether a task has answered; later, a twentieth of its seconds so far
HEARTBEAT_SECONDS = 10  # the shortest that a SuperLink accepts: a heartbeat every 4 s, offline after 20 s
RETRY_SECONDS = 2.0  # the longest pause before another attempt to connect
NODE_FILE = "HANSA_NODE_FILE"  # the file with the number of the node when it was last active
WAITING_FILE = "HANSA_WAITING_FILE"  # exists while the node waits for the answer of a task
PULL = "_pull_and_store_message"  # of flwr.supernode.start_client_internal


class ShortSleeps:
    """Stands in for the module ``time`` in the loop of the node."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep
        self._waiting_since: float | None = None
        self._last_message = -ACTIVE_SECONDS

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        now = time.monotonic()
        if seconds < 1.0:  # a task is at work
            self._waiting_since = now if self._waiting_since is None else self._waiting_since
            self._last_message = now
            self._sleep(min(seconds, max(REPLY_SECONDS, (now - self._waiting_since) / 20)))
        else:  # no message was there
            self._waiting_since = None
            active = now - self._last_message < ACTIVE_SECONDS
            self._sleep(min(seconds, ACTIVE_POLL_SECONDS if active else POLL_SECONDS))


def mark_arrivals(pull: Callable[..., Any], waiting: Path) -> Callable[..., Any]:
    """Return the node's function that asks for a message; a file exists from the arrival of one until it asks again."""

    def marked(*arguments: Any, **options: Any) -> Any:
        waiting.unlink(missing_ok=True)
        run = pull(*arguments, **options)
        if run is not None:
            waiting.touch()
        return run

    return marked


def replace_constant(module: ModuleType, name: str, value: float) -> None:
    """Set a constant of a module if it has it."""
    if hasattr(module, name):
        setattr(module, name, value)


def main() -> None:
    """Run the command line of ``flower-supernode``."""
    import flwr.supercore.heartbeat as heartbeat
    import flwr.supercore.retry.http_retry as http_retry
    import flwr.supernode.fleet_http_connection as connection
    import flwr.supernode.start_client_internal as node
    from flwr.supernode.cli import flower_supernode

    for module in (heartbeat, connection):
        replace_constant(module, "HEARTBEAT_DEFAULT_INTERVAL", HEARTBEAT_SECONDS)
    replace_constant(http_retry, "MAX_RETRY_DELAY", RETRY_SECONDS)
    if hasattr(node, "time"):
        node.time = ShortSleeps()
    if hasattr(node, PULL) and os.environ.get(WAITING_FILE):
        setattr(node, PULL, mark_arrivals(getattr(node, PULL), Path(os.environ[WAITING_FILE])))
    if os.environ.get(NODE_FILE):
        connection.FleetHttpClient = _returning_client(connection.FleetHttpClient, Path(os.environ[NODE_FILE]))
    flower_supernode()


def _returning_client(base: Any, path: Path) -> Any:
    """Return a client that takes over from the node of the same key that was active last and has not said goodbye."""
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from httpx import HTTPStatusError

    class ReturningClient(base):  # type: ignore[misc]
        def ActivateNode(self, request: Any) -> Any:
            try:
                response = super().ActivateNode(request)
            except HTTPStatusError:
                with suppress(OSError, ValueError, HTTPStatusError):
                    self.DeactivateNode(DeactivateNodeRequest(node_id=int(path.read_text())))
                response = super().ActivateNode(request)
            with suppress(OSError):
                path.write_text(str(response.node_id))
            return response

    return ReturningClient


if __name__ == "__main__":
    main()
