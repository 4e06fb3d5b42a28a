"""The server's connections over Flower: a SuperLink and the relay app that runs on it."""

from __future__ import annotations

import json
import logging
import queue
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hansa.core.errors import HansaError
from hansa.federation import flower_processes
from hansa.federation.certificates import ServerKeys
from hansa.federation.relay import APP
from hansa.federation.relay.hansa_relay import sockets
from hansa.federation.transport import Reply

log = logging.getLogger("hansa")

IDENTITY_REQUEST = b"hansa: who is there?"  # as in hansa_relay.client_app
START_SECONDS = 180.0  # for the SuperLink and its app
_NAME = "hansa"


class SuperLink:
    """Runs a SuperLink on ``host:port``. It is restarted together with its app when either ends.

    Args:
        sites: The names of the sites.
        keys: TLS keys and the sites' public keys; without them any node can claim to be any site.
        host: The address to listen on.
        port: The port to listen on; 0 uses a free one.
        limit: The largest accepted reply in bytes.
    """

    def __init__(
        self, sites: Sequence[str], keys: ServerKeys | None, *, host: str = "127.0.0.1", port: int = 0,
        limit: int = 1 << 32,
    ) -> None:  # fmt: skip
        self.sites, self.keys, self.host, self.limit = tuple(sites), keys, host, limit
        self.port = port or flower_processes.free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="hansa-link-")
        self._home = Path(self._folder.name)
        self._home.chmod(0o700)
        self._names = {} if keys is None else {keys.public_bytes(site): site for site in self.sites}
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._nodes: dict[str, str] = {}  # by site
        self._identifying: dict[int, str] = {}  # nodes by the ticket of their identity request
        self._in_flight: dict[int, tuple[str, str]] = {}  # sites and nodes by ticket
        self._lock = threading.Lock()
        self._link: flower_processes.ManagedProcess | None = None
        self._relay: socket.socket | None = None
        self._starts = 0
        self._start()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def send(self, site: str, ticket: int, data: bytes, ttl: float) -> None:
        node = self._nodes.get(site)
        if node is None:
            self._replies.put(Reply(site, ticket, b"", "is offline"))
        else:
            self._in_flight[ticket] = (site, node)
            self._send(site, ticket, node, data, ttl)

    def receive(self, timeout: float) -> list[Reply]:
        if self._relay is None or self._link is None or not self._link.running:
            self._restart()
        replies: list[Reply] = []
        with suppress(queue.Empty):
            replies.append(self._replies.get(timeout=timeout))
            while True:
                replies.append(self._replies.get_nowait())
        return replies

    def online(self) -> frozenset[str]:
        return frozenset(self._nodes)

    def close(self) -> None:
        """End the app and the SuperLink."""
        self._stop()
        self._folder.cleanup()

    def _start(self) -> None:
        self._starts += 1
        env = flower_processes.flower_environment(self._home / "flwr")
        (self._home / "flwr").mkdir(exist_ok=True)
        command = ["flower-superlink", "--host", self.host, "--port", str(self.port)]
        if self.keys is None:
            command.append("--insecure")
        else:
            command += [
                "--ssl-ca-certfile", str(self.keys.authority), "--ssl-certfile", str(self.keys.certificate),
                "--ssl-keyfile", str(self.keys.private), "--enable-supernode-auth",
            ]  # fmt: skip
        self._link = flower_processes.ManagedProcess(command, env, self._home / "superlink.log")
        local_host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        flower_processes.wait_for_port(local_host, self.port, self._link, START_SECONDS)
        secure = "insecure = true" if self.keys is None else f'root-certificates = "{self.keys.authority}"'
        address = f'address = "{local_host}:{self.port}"'
        text = f'[superlink]\ndefault = "{_NAME}"\n\n[superlink.{_NAME}]\n{address}\n{secure}\n'
        (self._home / "flwr" / "config.toml").write_text(text, encoding="utf-8")
        if self.keys is not None:
            for site in self.sites:
                self._flwr(env, "supernode", "register", str(self.keys.public(site)), _NAME, "--name", site)
        path = self._home / f"relay-{self._starts}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(1)
            listener.settimeout(START_SECONDS)
            self._flwr(env, "run", str(APP), _NAME, "--run-config", f'socket="{path}"')
            try:
                relay, _ = listener.accept()
            except TimeoutError:
                raise HansaError(f"the relay app did not start: {self._link.log_tail(10)}") from None
        sockets.check_owner(relay)
        relay.setblocking(True)
        self._relay = relay
        threading.Thread(target=self._listen, args=(relay,), daemon=True).start()

    def _flwr(self, env: dict[str, str], *arguments: str) -> None:
        """Run a command of Flower's CLI; success is in its JSON output, not in its exit code."""
        done = subprocess.run(
            [flower_processes.find_program("flwr"), *arguments, "--format", "json"], env=env, capture_output=True,
            text=True, timeout=START_SECONDS, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        try:
            answer = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            answer = {}
        if not answer.get("success"):
            message = answer.get("error-message") or done.stdout[-500:] + done.stderr[-500:]
            raise HansaError(f"flwr {' '.join(arguments[:2])}: {str(message).strip()}")

    def _restart(self) -> None:
        """Restart the SuperLink and its app; messages in flight fail."""
        log.warning("the SuperLink or its app has ended; restarting")
        self._stop()
        self._start()

    def _stop(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            with suppress(OSError):
                relay.shutdown(socket.SHUT_RDWR)
            relay.close()
        self._nodes = {}
        if self._link is not None:
            self._link.stop()

    def _send(self, site: str, ticket: int, node: str, data: bytes, ttl: float) -> None:
        relay = self._relay
        try:
            if relay is None:
                raise sockets.ConnectionClosed("the relay app has ended")
            with self._lock:
                sockets.send(relay, {"op": "send", "node": node, "ticket": ticket, "ttl": ttl}, data)
        except sockets.ConnectionClosed as error:
            self._replies.put(Reply(site, ticket, b"", str(error)))

    def _listen(self, relay: socket.socket) -> None:
        """Receive from the relay until it ends."""
        try:
            while True:
                head, body = sockets.receive(relay, self.limit)
                if head["op"] == "nodes":
                    self._update_nodes(head["nodes"])
                elif head["op"] == "reply":
                    self._handle_reply(str(head["node"]), int(head["ticket"]), str(head["error"]), body)
        except (sockets.ConnectionClosed, KeyError, ValueError) as error:
            log.debug("the relay app has ended: %s", error)
        if self._relay is relay:
            self._relay = None
        for ticket, (site, _) in list(self._in_flight.items()):
            if self._in_flight.pop(ticket, None) is not None:
                self._replies.put(Reply(site, ticket, b"", "the connection was lost"))

    def _update_nodes(self, nodes: Sequence[Sequence[str]]) -> None:
        """Update the nodes of the sites. A node is known by its key, or in trials by the name that it states."""
        online = {node: key for node, _, status, key in nodes if status == "online"}
        if self.keys is not None:
            self._nodes = {self._names[key]: node for node, key in online.items() if key in self._names}
            return
        self._nodes = {site: node for site, node in self._nodes.items() if node in online}
        for node in online.keys() - set(self._nodes.values()) - set(self._identifying.values()):
            ticket = -2 - len(self._identifying) - int(time.monotonic() * 1000)
            self._identifying[ticket] = node
            self._send("", ticket, node, IDENTITY_REQUEST, 60.0)

    def _handle_reply(self, node: str, ticket: int, error: str, body: bytes) -> None:
        if ticket in self._identifying:
            identified = self._identifying.pop(ticket)
            site = body.decode("utf-8", "replace")
            if not error and site in self.sites:
                self._nodes[site] = identified
            return
        site, expected = self._in_flight.pop(ticket, ("", ""))
        if site and node == expected:
            self._replies.put(Reply(site, ticket, body, error))
