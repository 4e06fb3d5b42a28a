"""The server's post: a SuperLink of Flower's, and the relay app that runs on it for as long as we do."""

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
from hansa.federation import processes
from hansa.federation.certificates import ServerKeys
from hansa.federation.flower_transport import Arrival
from hansa.federation.relay import APP
from hansa.federation.relay.hansa_relay import pipe

log = logging.getLogger("hansa")

WHO = b"hansa: who is there?"  # as in hansa_relay.siteside
START = 180.0  # seconds for the SuperLink and its app to be at work
_NAME = "hansa"
_LARGEST = 1 << 40


class SuperLink:
    """A SuperLink on ``host:port``. With keys it speaks TLS and admits the nodes whose public keys it knows; without,
    anybody can be any site. When it, or the app on it, ends, both are started again: the sites come back by themselves.
    """

    def __init__(
        self, sites: Sequence[str], keys: ServerKeys | None, *, host: str = "127.0.0.1", port: int = 0,
        limit: int = 1 << 32,
    ) -> None:  # fmt: skip
        self.sites, self.keys, self.host, self.limit = tuple(sites), keys, host, limit
        self.port = port or processes.free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="hansa-link-")
        self._home = Path(self._folder.name)
        self._home.chmod(0o700)
        self._names = {} if keys is None else {keys.public_bytes(site): site for site in self.sites}
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._nodes: dict[str, str] = {}  # of a site
        self._asked: dict[int, str] = {}  # tickets of who is there, to their nodes
        self._under_way: dict[int, tuple[str, str]] = {}  # tickets, to their sites and nodes
        self._lock = threading.Lock()
        self._link: processes.Program | None = None
        self._relay: socket.socket | None = None
        self._life = 0
        self._open()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def send(self, site: str, ticket: int, data: bytes, ttl: float) -> None:
        node = self._nodes.get(site)
        if node is None:
            self._arrivals.put(Arrival(site, ticket, b"", "is not there"))
        else:
            self._under_way[ticket] = (site, node)
            self._say(site, ticket, node, data, ttl)

    def receive(self, timeout: float) -> list[Arrival]:
        if self._relay is None or self._link is None or not self._link.running:
            self._again()
        found: list[Arrival] = []
        with suppress(queue.Empty):
            found.append(self._arrivals.get(timeout=timeout))
            while True:
                found.append(self._arrivals.get_nowait())
        return found

    def online(self) -> frozenset[str]:
        return frozenset(self._nodes)

    def close(self) -> None:
        """End the app and the SuperLink."""
        self._shut()
        self._folder.cleanup()

    def _open(self) -> None:
        self._life += 1
        env = processes.environment(self._home / "flwr")
        (self._home / "flwr").mkdir(exist_ok=True)
        command = ["flower-superlink", "--host", self.host, "--port", str(self.port)]
        if self.keys is None:
            command.append("--insecure")
        else:
            command += [
                "--ssl-ca-certfile", str(self.keys.authority), "--ssl-certfile", str(self.keys.certificate),
                "--ssl-keyfile", str(self.keys.private), "--enable-supernode-auth",
            ]  # fmt: skip
        self._link = processes.Program(command, env, self._home / "superlink.log")
        reached = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        processes.wait_for_port(reached, self.port, self._link, START)
        secure = "insecure = true" if self.keys is None else f'root-certificates = "{self.keys.authority}"'
        text = f'[superlink]\ndefault = "{_NAME}"\n\n[superlink.{_NAME}]\naddress = "{reached}:{self.port}"\n{secure}\n'
        (self._home / "flwr" / "config.toml").write_text(text, encoding="utf-8")
        if self.keys is not None:
            for site in self.sites:
                self._flwr(env, "supernode", "register", str(self.keys.public(site)), _NAME, "--name", site)
        path = self._home / f"relay-{self._life}"
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(path))
            path.chmod(0o600)
            door.listen(1)
            door.settimeout(START)
            self._flwr(env, "run", str(APP), _NAME, "--run-config", f'socket="{path}"')
            try:
                relay, _ = door.accept()
            except TimeoutError:
                raise HansaError(f"the relay app did not start: {self._link.last_words(10)}") from None
        pipe.check_owner(relay)
        relay.setblocking(True)
        self._relay = relay
        threading.Thread(target=self._listen, args=(relay,), daemon=True).start()

    def _flwr(self, env: dict[str, str], *words: str) -> None:
        """A command to the SuperLink; its exit code says little, its JSON everything."""
        done = subprocess.run(
            [processes.find("flwr"), *words, "--format", "json"], env=env, capture_output=True, text=True, timeout=START,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        try:
            answer = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            answer = {}
        if not answer.get("success"):
            told = answer.get("error-message") or done.stdout[-500:] + done.stderr[-500:]
            raise HansaError(f"flwr {' '.join(words[:2])}: {str(told).strip()}")

    def _again(self) -> None:
        """Start SuperLink and app again; what was under way is told to have failed."""
        log.warning("the SuperLink or its app has ended; it is started again")
        self._shut()
        self._open()

    def _shut(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            with suppress(OSError):
                relay.shutdown(socket.SHUT_RDWR)
            relay.close()
        self._nodes = {}
        if self._link is not None:
            self._link.stop()

    def _say(self, site: str, ticket: int, node: str, data: bytes, ttl: float) -> None:
        relay = self._relay
        try:
            if relay is None:
                raise pipe.Closed("the relay app has ended")
            with self._lock:
                pipe.send(relay, {"op": "send", "node": node, "ticket": ticket, "ttl": ttl}, data)
        except pipe.Closed as error:
            self._arrivals.put(Arrival(site, ticket, b"", str(error)))

    def _listen(self, relay: socket.socket) -> None:
        """Hear the relay until it ends."""
        try:
            while True:
                head, body = pipe.receive(relay, self.limit)
                if head["op"] == "nodes":
                    self._met(head["nodes"])
                elif head["op"] == "reply":
                    self._replied(str(head["node"]), int(head["ticket"]), str(head["error"]), body)
        except (pipe.Closed, KeyError, ValueError) as error:
            log.debug("the relay app has ended: %s", error)
        if self._relay is relay:
            self._relay = None
        for ticket, (site, _) in list(self._under_way.items()):
            if self._under_way.pop(ticket, None) is not None:
                self._arrivals.put(Arrival(site, ticket, b"", "the link was lost"))

    def _met(self, nodes: Sequence[Sequence[str]]) -> None:
        """Who is online; a node is a site by its key, or on trials by its own word."""
        there = {node: key for node, _, status, key in nodes if status == "online"}
        if self.keys is not None:
            self._nodes = {self._names[key]: node for node, key in there.items() if key in self._names}
            return
        self._nodes = {site: node for site, node in self._nodes.items() if node in there}
        for node in there.keys() - set(self._nodes.values()) - set(self._asked.values()):
            ticket = -2 - len(self._asked) - int(time.monotonic() * 1000)
            self._asked[ticket] = node
            self._say("", ticket, node, WHO, 60.0)

    def _replied(self, node: str, ticket: int, error: str, body: bytes) -> None:
        if ticket in self._asked:
            asked = self._asked.pop(ticket)
            site = body.decode("utf-8", "replace")
            if not error and site in self.sites:
                self._nodes[site] = asked
            return
        site, expected = self._under_way.pop(ticket, ("", ""))
        if site and node == expected:
            self._arrivals.put(Arrival(site, ticket, body, error))
