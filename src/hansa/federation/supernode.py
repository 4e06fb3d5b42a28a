"""A site's post: a SuperNode of Flower's, kept alive, and the local socket on which its relay finds the agent."""

from __future__ import annotations

import logging
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hansa.federation import processes
from hansa.federation.certificates import SiteKeys
from hansa.federation.relay.hansa_relay import pipe

log = logging.getLogger("hansa")

PATIENCE = 15.0  # seconds, at most, before a node that ended is started again


class SuperNode:
    """A SuperNode that joins ``address``, and hands every frame to ``handle``.

    A node that was killed is refused for about a minute when it comes back, and ends; it is started again until it is
    let in. Its tasks are done by our own relay, never by what the server sends (`processes.guarded`).
    """

    def __init__(
        self, site: str, address: str, keys: SiteKeys | None, handle: Callable[[bytes], bytes], *, limit: int
    ) -> None:
        processes.find("flower-supernode")  # here, where somebody hears it
        self.site, self.address, self.keys, self.handle, self.limit = site, address, keys, handle, limit
        self._folder = tempfile.TemporaryDirectory(prefix="hansa-node-")
        self._home = Path(self._folder.name)
        self._home.chmod(0o700)
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(self._home / "agent"))
        (self._home / "agent").chmod(0o600)
        self._door.listen(4)
        self._over = threading.Event()
        self._node: processes.Program | None = None
        threading.Thread(target=self._serve, daemon=True).start()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    @property
    def process(self) -> int | None:
        """The number of the node's process."""
        return None if self._node is None else self._node.process.pid

    def close(self) -> None:
        """End the node, and answer nobody any more."""
        self._over.set()
        self._keeper.join()
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self._folder.cleanup()

    def _keep(self) -> None:
        """Start the node, and again whenever it ended. The node lives as long as this thread."""
        pause = 1.0
        while not self._over.is_set():
            began = time.monotonic()
            self._node = self._start()
            while self._node.running and not self._over.wait(0.5):
                pass
            if time.monotonic() - began > 60.0:  # it had been let in
                pause = 1.0
            if not self._over.is_set():
                log.warning("site %s: its node ended and is started again: %s", self.site, self._node.last_words(2))
                self._node.stop()
                self._over.wait(pause)
                pause = min(PATIENCE, 2 * pause)
        if self._node is not None:
            self._node.stop()

    def _start(self) -> processes.Program:
        env = processes.environment(self._home / "flwr", processes.guarded(self._home / "bin"))
        (self._home / "flwr").mkdir(exist_ok=True)
        facts = f'site="{self.site}" agent="{self._home / "agent"}" limit={self.limit}'
        command = [
            "flower-supernode", "--superlink", self.address, "--host", "127.0.0.1", "--port",
            str(processes.free_port()), "--node-config", facts,
        ]  # fmt: skip
        if self.keys is None:
            command.append("--insecure")
        else:
            command += ["--root-certificates", str(self.keys.authority)]
            command += ["--auth-supernode-private-key", str(self.keys.private)]
        return processes.Program(command, env, self._home / "supernode.log")

    def _serve(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._door.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        """One record in, one out. A peer of another user, or a record that is too large, is not answered."""
        with connection:
            try:
                pipe.check_owner(connection)
                _, asked = pipe.receive(connection, self.limit)
                pipe.send(connection, {"op": "frame"}, self.handle(asked))
            except (pipe.Closed, ValueError) as error:
                log.warning("site %s: a relay was not answered: %s", self.site, error)
