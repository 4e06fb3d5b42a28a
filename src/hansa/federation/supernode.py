"""A site's connection over Flower: a supervised SuperNode, and the local socket of the site's agent."""

from __future__ import annotations

import logging
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hansa.federation import flower_processes
from hansa.federation.certificates import SiteKeys
from hansa.federation.relay.hansa_relay import sockets

log = logging.getLogger("hansa")

MAX_RESTART_SECONDS = 15.0  # before a node that ended is restarted


class SuperNode:
    """Runs a SuperNode that joins ``address`` and passes every frame to ``handle``.

    A SuperLink refuses a killed node for about a minute, so the node is restarted until it is accepted. Its tasks run
    Hansa's relay, never code from the server (`flower_processes.write_task_programs`).

    Args:
        site: The name of the site.
        address: The address of the SuperLink.
        keys: The site's keys; None connects without TLS.
        handle: Returns the answer to a frame.
        limit: The largest accepted frame in bytes.
    """

    def __init__(
        self, site: str, address: str, keys: SiteKeys | None, handle: Callable[[bytes], bytes], *, limit: int
    ) -> None:
        flower_processes.find_program("flower-supernode")  # fails here rather than in a thread
        self.site, self.address, self.keys, self.handle, self.limit = site, address, keys, handle, limit
        self._folder = tempfile.TemporaryDirectory(prefix="hansa-node-")
        self._home = Path(self._folder.name)
        self._home.chmod(0o700)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._home / "agent"))
        (self._home / "agent").chmod(0o600)
        self._listener.listen(4)
        self._closed = threading.Event()
        self._node: flower_processes.ManagedProcess | None = None
        threading.Thread(target=self._serve, daemon=True).start()
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)
        self._supervisor.start()

    @property
    def process(self) -> int | None:
        """The process id of the node."""
        return None if self._node is None else self._node.process.pid

    def close(self) -> None:
        """End the node and stop answering."""
        self._closed.set()
        self._supervisor.join()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._folder.cleanup()

    def _supervise(self) -> None:
        """Start the node, and restart it whenever it ends, until the site closes."""
        pause = 1.0
        while not self._closed.is_set():
            start = time.monotonic()
            self._node = self._start()
            while self._node.running and not self._closed.wait(0.5):
                pass
            if time.monotonic() - start > 60.0:  # it had been accepted
                pause = 1.0
            if not self._closed.is_set():
                log.warning("site %s: its node ended and is restarted: %s", self.site, self._node.log_tail(2))
                self._node.stop()
                self._closed.wait(pause)
                pause = min(MAX_RESTART_SECONDS, 2 * pause)
        if self._node is not None:
            self._node.stop()

    def _start(self) -> flower_processes.ManagedProcess:
        env = flower_processes.flower_environment(
            self._home / "flwr", flower_processes.write_task_programs(self._home / "bin")
        )
        (self._home / "flwr").mkdir(exist_ok=True)
        node_config = f'site="{self.site}" agent="{self._home / "agent"}" limit={self.limit}'
        command = [
            "flower-supernode", "--superlink", self.address, "--host", "127.0.0.1", "--port",
            str(flower_processes.free_port()), "--node-config", node_config,
        ]  # fmt: skip
        if self.keys is None:
            command.append("--insecure")
        else:
            command += ["--root-certificates", str(self.keys.authority)]
            command += ["--auth-supernode-private-key", str(self.keys.private)]
        return flower_processes.ManagedProcess(command, env, self._home / "supernode.log")

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        """Answer one record. A peer of another user, or a record that is too large, gets no answer."""
        with connection:
            try:
                sockets.check_owner(connection)
                _, request = sockets.receive(connection, self.limit)
                sockets.send(connection, {"op": "frame"}, self.handle(request))
            except (sockets.ConnectionClosed, ValueError) as error:
                log.warning("site %s: a relay got no answer: %s", self.site, error)
