"""The server's connections over Flower: a supervised SuperLink and the relay app that runs on it."""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from hansa.core.errors import HansaError
from hansa.federation import flower_processes
from hansa.federation.certificates import ServerKeys
from hansa.federation.deliveries import Deliveries, Node
from hansa.federation.owned_folders import OwnedFolder, remove_stale, write_status
from hansa.federation.relay import APP
from hansa.federation.relay.hansa_relay import sockets
from hansa.federation.transport import Reply
from hansa.federation.watchdog import CHECK_SECONDS, Watchdog

log = logging.getLogger("hansa")

IDENTITY_REQUEST = b"hansa: who is there?"  # as in hansa_relay.client_app
START_SECONDS = 180.0  # for the SuperLink, and for its app
SILENT_SECONDS = 30.0  # without a sign of the app, which sends one every second
RESTARTS = 10  # attempts to restart before the server gives up
PROBE_TTL = 3600.0
_NAME = "hansa"
Result = TypeVar("Result")


class SuperLink:
    """Runs a SuperLink on ``host:port`` and an app on it that relays messages.

    Both are supervised: a stopped process is continued within seconds (`Watchdog`); an app that ended or is silent, and
    a SuperLink or executor that ended, are restarted. A message that was lost on the way is reported as an error, and
    the transport sends it again (`Deliveries`).

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
        remove_stale()
        _check_port(self.local_host, self.port)
        self._folder = OwnedFolder("hansa-link-")
        self._home = self._folder.path
        self._names = {} if keys is None else {keys.public_bytes(site): site for site in self.sites}
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._nodes: dict[str, Node] = {}  # by site
        self._identifying: dict[int, Node] = {}  # nodes by the ticket of their identity request
        self._deliveries = Deliveries()
        self._lock = threading.Lock()
        self._link: flower_processes.ManagedProcess | None = None
        self._relay: socket.socket | None = None
        self._stuck: str | None = None
        self._seen = time.monotonic()  # when the app last gave a sign
        self._apps = 0
        self._facts: dict[str, Any] = {}
        self._status: dict[str, Any] = {}
        try:
            self._restart(None)
        except BaseException:  # also of a signal
            self.close()
            raise

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def local_host(self) -> str:
        """The address by which this machine reaches the SuperLink."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host

    def send(self, site: str, ticket: int, data: bytes, ttl: float) -> None:
        node = self._nodes.get(site)
        if node is None:
            self._replies.put(Reply(site, ticket, b"", "is offline"))
        else:
            self._deliveries.add(ticket, site, node, time.monotonic())
            self._send(site, ticket, node, data, ttl)

    def receive(self, timeout: float) -> list[Reply]:
        reason = self._failure()
        if reason is not None:
            self._restart(reason)
        self._find_lost()
        self._write_status()
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
        self._folder.remove()

    def _failure(self) -> str | None:
        """Return why SuperLink or app must be restarted, or None."""
        if self._link is None or not self._link.running:
            return "flower-superlink has ended"
        if self._stuck is not None:
            return self._stuck
        if self._relay is None:
            return "its app has ended"
        silent = time.monotonic() - self._seen
        if silent > SILENT_SECONDS:
            time.sleep(2.0)  # this process may have been stopped, and the signs are still unread
            silent = time.monotonic() - self._seen
        return f"its app gave no sign for {silent:.0f} s" if silent > SILENT_SECONDS else None

    def describe(self, **facts: Any) -> None:
        """Add facts, such as the run and its round, to what `hansa serve --status` shows; a function is called."""
        self._facts.update(facts)
        self._write_status()

    def _write_status(self) -> None:
        """Write what `hansa serve --status` shows, if it has changed."""
        waiting = {site: count for site, count in self._deliveries.by_site().items() if site}
        sites = {
            site: "offline" if site not in self._nodes else "at work" if site in waiting else "online"
            for site in self.sites
        }
        facts = {name: fact() if callable(fact) else fact for name, fact in self._facts.items()}
        status = {"address": self.address, "tls": self.keys is not None, "sites": sites, **facts}
        if status != self._status:
            self._status = status
            with suppress(OSError):
                write_status(self._home, status)

    def _find_lost(self) -> None:
        """Report lost messages, and probe the sites that have not answered for some time."""
        now = time.monotonic()
        for ticket, site, reason in self._deliveries.lost(dict(self._nodes), now):
            self._replies.put(Reply(site, ticket, b"", reason))
        for probe, node in self._deliveries.probes(now):
            self._send("", probe, node, IDENTITY_REQUEST, PROBE_TTL)

    def _restart(self, reason: str | None) -> None:
        """Restart the app, or if that is not enough the SuperLink as well; messages in flight fail."""
        for attempt in range(1, RESTARTS + 1):
            if reason is not None:
                log.warning("the server's SuperLink: %s; restarting (attempt %d of %d)", reason, attempt, RESTARTS)
            try:
                link = self._link
                silent = time.monotonic() - self._seen > SILENT_SECONDS
                if attempt > 1 or link is None or not link.running or self._stuck is not None or silent:
                    self._stop()
                    self._start_link()
                self._start_app()
            except (HansaError, OSError, subprocess.SubprocessError) as error:
                if attempt == RESTARTS or (reason is None and attempt == 3):
                    self._stop()
                    raise HansaError(f"the SuperLink did not start in {attempt} attempts: {error}") from error
                log.warning("the server's SuperLink did not start: %s", error)
                time.sleep(min(5.0, attempt))
            else:
                return

    def _start_link(self) -> None:
        env = self._environment()
        (self._home / "flwr").mkdir(exist_ok=True)
        command = ["flower-superlink", "--host", self.host, "--port", str(self.port)]
        if self.keys is None:
            command.append("--insecure")
        else:
            command += [
                "--ssl-ca-certfile", str(self.keys.authority), "--ssl-certfile", str(self.keys.certificate),
                "--ssl-keyfile", str(self.keys.private), "--enable-supernode-auth",
            ]  # fmt: skip
        self._stuck = None
        self._link = link = flower_processes.ManagedProcess(command, env, self._home / "superlink.log")
        threading.Thread(target=self._watch, args=(link,), daemon=True).start()
        flower_processes.wait_for_port(self.local_host, self.port, link, START_SECONDS)
        secure = "insecure = true" if self.keys is None else f'root-certificates = "{self.keys.authority}"'
        address = f'address = "{self.local_host}:{self.port}"'
        text = f'[superlink]\ndefault = "{_NAME}"\n\n[superlink.{_NAME}]\n{address}\n{secure}\n'
        (self._home / "flwr" / "config.toml").write_text(text, encoding="utf-8")
        if self.keys is not None:
            for site in self.sites:
                self._flwr("supernode", "register", str(self.keys.public(site)), _NAME, "--name", site)

    def _watch(self, link: flower_processes.ManagedProcess) -> None:
        """Supervise the processes of one SuperLink until it ends or is replaced."""
        watchdog = Watchdog(self._home / "flwr", "the server")
        while link.running and self._link is link and self._stuck is None:
            reason = watchdog.check()
            if reason is not None and self._link is link:
                self._stuck = reason
            time.sleep(CHECK_SECONDS)

    def _start_app(self) -> None:
        self._apps += 1
        path = self._home / f"relay-{self._apps}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(1)
            listener.settimeout(0.5)
            self._flwr("run", str(APP), _NAME, "--run-config", f'socket="{path}"')
            relay = self._wait_for(lambda: _accept(listener), "the relay app")
        sockets.check_owner(relay)
        relay.setblocking(True)
        self._relay, self._seen = relay, time.monotonic()
        threading.Thread(target=self._listen, args=(relay,), daemon=True).start()

    def _wait_for(self, attempt: Callable[[], Result | None], what: str) -> Result:
        """Repeat an attempt until it has a result, for as long as the SuperLink runs."""
        end = time.monotonic() + START_SECONDS
        while (result := attempt()) is None:
            if self._link is None or not self._link.running or self._stuck is not None or time.monotonic() > end:
                detail = self._stuck or ("" if self._link is None else self._link.log_tail(10))
                raise HansaError(f"{what} did not start: {detail}")
        return result

    def _environment(self) -> dict[str, str]:
        slow = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1.0"}  # it has one task, the app
        return {**flower_processes.flower_environment(self._home / "flwr"), **slow}

    def _flwr(self, *arguments: str) -> None:
        """Run a command of Flower's CLI; success is in its JSON output, not in its exit code."""
        output = self._home / "flwr.out"
        with open(output, "wb") as file:
            process = subprocess.Popen(
                [flower_processes.find_program("flwr"), *arguments, "--format", "json"], env=self._environment(),
                stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        try:
            self._wait_for(lambda: _ended(process), f"flwr {arguments[0]}")
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, 9)
            process.wait()
        text = output.read_text(encoding="utf-8", errors="replace")
        try:
            answer = json.JSONDecoder().raw_decode(text[text.index("{") :])[0]
        except ValueError:
            answer = {}
        if not answer.get("success"):
            message = answer.get("error-message") or text[-500:] or f"exit code {process.returncode}"
            raise HansaError(f"flwr {' '.join(arguments[:2])}: {str(message).strip()}")

    def _stop(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            with suppress(OSError):
                relay.shutdown(socket.SHUT_RDWR)
            relay.close()
        self._nodes = {}
        link, self._link = self._link, None
        if link is not None:
            link.stop(0.0 if self._stuck is not None else 2.0)

    def _send(self, site: str, ticket: int, node: Node, data: bytes, ttl: float) -> None:
        relay = self._relay
        try:
            if relay is None:
                raise sockets.ConnectionClosed("the relay app has ended")
            with self._lock:
                sockets.send(relay, {"op": "send", "node": node.number, "ticket": ticket, "ttl": ttl}, data)
        except sockets.ConnectionClosed as error:
            if site and self._deliveries.answered(ticket, node.number) is not None:
                self._replies.put(Reply(site, ticket, b"", str(error)))

    def _listen(self, relay: socket.socket) -> None:
        """Receive from the relay until it ends."""
        try:
            while True:
                head, body = sockets.receive(relay, self.limit)
                self._seen = time.monotonic()
                if head["op"] == "nodes":
                    self._update_nodes(head["nodes"])
                elif head["op"] == "reply":
                    seconds = [float(head.get(name, 0.0)) for name in ("start_seconds", "work_seconds")]
                    self._handle_reply(str(head["node"]), int(head["ticket"]), str(head["error"]), body, *seconds)
        except (sockets.ConnectionClosed, KeyError, ValueError) as error:
            log.debug("the relay app has ended: %s", error)
        if self._relay is relay:
            self._relay = None
            self._nodes = {}
        for ticket, site in self._deliveries.clear():
            self._replies.put(Reply(site, ticket, b"", "the connection was lost"))

    def _update_nodes(self, nodes: Sequence[Sequence[str]]) -> None:
        """Update the nodes of the sites. A node is known by its key, or in trials by the name that it states."""
        online = {Node(number, since): key for number, _, status, key, since in nodes if status == "online"}
        if self.keys is not None:
            self._nodes = {self._names[key]: node for node, key in online.items() if key in self._names}
            return
        self._nodes = {site: node for site, node in self._nodes.items() if node in online}
        for node in online.keys() - set(self._nodes.values()) - set(self._identifying.values()):
            ticket = self._deliveries.next_ticket()
            self._identifying[ticket] = node
            self._send("", ticket, node, IDENTITY_REQUEST, 60.0)

    def _handle_reply(
        self, number: str, ticket: int, error: str, body: bytes, start: float = 0.0, work: float = 0.0
    ) -> None:
        if ticket in self._identifying:
            identified = self._identifying.pop(ticket)
            site = body.decode("utf-8", "replace")
            if not error and site in self.sites:
                self._nodes = {**self._nodes, site: identified}
        elif not self._deliveries.probe_answered(ticket, time.monotonic(), failed=bool(error)):
            answered = self._deliveries.answered(ticket, number)
            if answered is not None:
                self._replies.put(Reply(answered, ticket, body, error, start, work))


def _accept(listener: socket.socket) -> socket.socket | None:
    try:
        return listener.accept()[0]
    except TimeoutError:
        return None


def _ended(process: subprocess.Popen[bytes]) -> bool | None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.2)
        return True
    return None


def _check_port(host: str, port: int) -> None:
    """Raise if another program listens on the port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            problem = f"port {port} of {host}: {error.strerror}."
            raise HansaError(f"{problem} Use another --port, or end the program that uses it.") from error
