"""A site's connection over Flower: a supervised SuperNode, and the local socket of the site's agent."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hansa.federation import flower_processes
from hansa.federation.certificates import SiteKeys
from hansa.federation.owned_folders import OwnedFolder, remove_stale
from hansa.federation.relay import APP
from hansa.federation.relay.hansa_relay import run_site_node, sockets
from hansa.federation.watchdog import CHECK_SECONDS, Watchdog

log = logging.getLogger("hansa")

MAX_RESTART_SECONDS = 5.0  # before a node that ended is restarted


class SuperNode:
    """Runs a SuperNode that joins ``address`` and passes every frame to ``handle``.

    The node, its executor and its tasks are supervised (`Watchdog`): what is stopped is continued, and if one of them
    ends, all are restarted, until the SuperLink accepts the node. Its tasks run Hansa's relay, never code from the
    server (`flower_processes.write_task_programs`).

    Args:
        site: The name of the site.
        address: The address of the SuperLink.
        keys: The site's keys; None connects without TLS.
        handle: Returns the answer to a frame.
        limit: The largest accepted frame in bytes.
        folder: A durable folder of the site, for the number of its node; a node that knows it returns at once after it
            was killed.
    """

    def __init__(
        self,
        site: str,
        address: str,
        keys: SiteKeys | None,
        handle: Callable[[bytes], bytes],
        *,
        limit: int,
        folder: Path | None = None,
    ) -> None:
        flower_processes.find_program("flower-supernode")  # fails here rather than in a thread
        self.site, self.address, self.keys, self.handle, self.limit = site, address, keys, handle, limit
        remove_stale()
        self._folder = OwnedFolder("hansa-node-")
        self._home = self._folder.path
        self._node_file = (self._home if folder is None else folder).resolve() / "node"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._home / "agent"))
        (self._home / "agent").chmod(0o600)
        self._listener.listen(4)
        self._closed = threading.Event()
        self._node: flower_processes.ManagedProcess | None = None
        self._tasks: flower_processes.ManagedProcess | None = None
        self._env: dict[str, str] = {}
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
        self._folder.remove()

    def _supervise(self) -> None:
        """Start the node, and restart it whenever it ends or gets stuck, until the site closes."""
        pause = 1.0
        while not self._closed.is_set():
            start = time.monotonic()
            self._node = self._start()
            reason = self._watch(self._node)
            if time.monotonic() - start > 60.0:  # it had been accepted
                pause = 1.0
            if reason is not None:
                last = f": {self._node.log_tail(2)}" if flower_processes.SHOW_OUTPUT else ""
                log.warning("site %s: %s; its node is restarted in %.0f s%s", self.site, reason, pause, last)
                self._node.stop(0.0)
                self._reap_tasks()
                self._closed.wait(pause)
                pause = min(MAX_RESTART_SECONDS, 2 * pause)
        if self._node is not None:
            self._node.stop()
        self._reap_tasks()

    def _reap_tasks(self) -> None:
        """Wait for the relay, which ends with the node: both have the same folder."""
        if self._tasks is not None:
            self._tasks.stop(0.0)

    def _watch(self, node: flower_processes.ManagedProcess) -> str | None:
        """Return why the node must be restarted, or None when the site closes."""
        watchdog = Watchdog(self._home / "flwr", f"site {self.site}")
        while not self._closed.wait(CHECK_SECONDS):
            if not node.running:
                return f"flower-supernode (process {node.process.pid}) has ended"
            if self._tasks is not None and not self._tasks.running:
                log.warning(
                    "site %s: its relay (process %d) has ended and is restarted", self.site, self._tasks.process.pid
                )
                self._tasks = self._start_tasks()
            reason = watchdog.check()
            if reason is not None:
                return reason
        return None

    def _start(self) -> flower_processes.ManagedProcess:
        env = flower_processes.flower_environment(
            self._home / "flwr", flower_processes.write_task_programs(self._home / "bin")
        )
        (self._home / "flwr").mkdir(exist_ok=True)
        (self._home / flower_processes.LOST).unlink(missing_ok=True)
        env[run_site_node.NODE_FILE] = str(self._node_file)
        self._env = env
        env[run_site_node.WAITING_FILE] = str(self._home / flower_processes.WAITING)
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
        self._tasks = self._start_tasks()
        script = APP / "hansa_relay" / "run_site_node.py"
        return flower_processes.ManagedProcess(command, env, self._home / "supernode.log", script)

    def _start_tasks(self) -> flower_processes.ManagedProcess:
        """Start the process that runs the node's tasks."""
        command = ["relay", "--serve", str(self._home / flower_processes.TASKS)]
        script = APP / "hansa_relay" / "run_site_app.py"
        return flower_processes.ManagedProcess(command, self._env, self._home / "relay.log", script)

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
