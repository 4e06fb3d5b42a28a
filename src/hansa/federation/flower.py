"""The two ends of a federation over Flower: a SuperLink at the server, and a client of its Fleet API at each site.

A frame travels as the content of a Flower message. `SuperLink` starts ``flower-superlink`` with process isolation, and
is itself the process of the one app that runs there; `SiteNode` pulls the messages of its site and pushes the answers.
Neither asks Flower for an app bundle: no code of one party can run at another.

Both are crash-only. What another attempt cannot mend ends the command with a sentence. Whoever started it starts it
again, and it continues from what is on disk.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hansa.core.errors import HansaError
from hansa.federation.certificates import Keys, trial_key
from hansa.federation.messages import Refusal, Reply

log = logging.getLogger("hansa")

ENVIRONMENT = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
"""No telemetry, no check for updates."""
START_SECONDS = 120.0  # for the SuperLink to listen
SILENT_SECONDS = 60.0  # in which the SuperLink does not answer the server, or refuses a site
POLL_SECONDS = 0.2  # between requests of the server for replies, and of a site for messages during a run
IDLE_SECONDS = 1.0  # between requests for the nodes that are online, and of a site for messages otherwise
ACTIVE_SECONDS = 30.0  # after a message, in which a site expects another
HEARTBEAT_SECONDS = 15.0  # a site counts as offline after twice this time; it sends three times as often
SMALL_BYTES = 1 << 20  # a larger frame is an array, which Flower sends in chunks
ENVELOPE_BYTES = 1 << 16  # of the records around a frame
STATUS_FILES = "hansa-serve-*.json"
APP = {
    "pyproject.toml": """[project]
name = "hansa"
version = "1.0.0"
[tool.flwr.app]
publisher = "hansa"
[tool.flwr.app.components]
serverapp = "hansa:none"
clientapp = "hansa:none"
"""
}
"""The files of the bundle that a run of Flower must have: no code."""
_END_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class _Node(NamedTuple):
    """A site's node in Flower, and when it became active: what was sent to it before then is lost."""

    number: int
    activated: str


class SuperLink:
    """Runs a SuperLink on ``host:port`` and carries messages over it.

    Args:
        sites: The names of the sites.
        keys: TLS keys and the sites' public keys; without them any node can claim to be any site.
        host: The address to listen on.
        port: The port to listen on; 0 uses a free one.
        verbose: Whether the SuperLink writes its log to standard error.
    """

    def __init__(
        self, sites: Sequence[str], keys: Keys | None, *, host: str = "127.0.0.1", port: int = 0,
        verbose: bool = False,
    ) -> None:  # fmt: skip
        _find_superlink()  # Flower is installed
        self.sites, self.keys, self.host, self.port = tuple(sites), keys, host, port or free_port()
        public = {site: trial_key(site).public_key() if keys is None else keys.public_key(site) for site in self.sites}
        self._keys = {_pem(key): site for site, key in public.items()}
        self._nodes: dict[str, _Node] = {}  # by site
        self._asked_at = 0.0  # for nodes
        self._sent: dict[str, tuple[str, int, _Node]] = {}  # site, ticket and node of messages without a reply
        self._failed: list[Reply] = []
        self._facts: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        self._open = ExitStack()
        _check_port(self.local_host, self.port)
        try:
            self._status = self._open.enter_context(_StatusFile())
            self._log = None if verbose else self._open.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            self._start()
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
        from flwr.app import Message
        from flwr.proto.runtime_pb2 import PushAppMessagesRequest

        node = self._nodes.get(site)
        if node is None:
            self._failed.append(Reply(site, ticket, b"", "is offline"))
            return
        message = Message(_pack(data), node.number, "train", ttl=ttl, group_id=str(ticket))
        number = self._call(_push, self._client, self._own, self._run, message, PushAppMessagesRequest)
        self._sent[number] = (site, ticket, node)

    def receive(self, timeout: float) -> list[Reply]:
        end = time.monotonic() + timeout
        while not (replies := self._collect()) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        return replies

    def online(self) -> frozenset[str]:
        return frozenset(self._nodes)

    def describe(self, **facts: Any) -> None:
        """Add facts, such as the run and its round, to what `hansa serve --status` shows; a function is called."""
        self._facts.update(facts)
        self._write_status()

    def close(self) -> None:
        """End the SuperLink."""
        self._closed.set()
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(2.0)
            self._process.kill()
            self._process.wait()
        self._open.close()

    def _start(self) -> None:
        """Start the SuperLink, register the sites' keys, submit a run and take its task."""
        secret = secrets.token_bytes(32)  # without it nobody can take the task
        reading, writing = os.pipe()
        os.write(writing, secret)
        os.close(writing)
        command = [_find_superlink(), "--host", self.host, "--port", str(self.port), "--isolation", "process"]
        command += ["--superexec-auth-secret-file", f"/dev/fd/{reading}"]
        if self.keys is None:
            command.append("--insecure")
        else:
            files = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}
            command += [f"--ssl-{option}={self.keys.path(name)}" for option, name in files.items()]
            command.append("--enable-supernode-auth")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("FLWR_", "PYTHONPATH"))}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _END_WITH_PARENT, str(os.getpid()), *command], env={**inherited, **ENVIRONMENT},
            pass_fds=[reading], stdin=subprocess.DEVNULL, stdout=self._log or sys.stderr, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        os.close(reading)
        self._wait_for_port()
        self._call(self._take_task, secret)
        threading.Thread(target=self._beat, daemon=True).start()

    def _wait_for_port(self) -> None:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection((self.local_host, self.port), 1.0).close()
                return
            except OSError as error:
                self._check_process()
                if time.monotonic() > end:
                    problem = f"the SuperLink does not listen on {self.address}."
                    raise HansaError(problem + self._last_lines()) from error
                time.sleep(POLL_SECONDS)

    def _take_task(self, secret: bytes) -> None:
        from flwr.common.constant import SUPERLINK_NODE_ID
        from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
        from flwr.proto.fab_pb2 import Fab
        from flwr.proto.node_pb2 import Node
        from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
        from flwr.supercore.constant import TaskType
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, SuperExecAuthHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient
        from flwr.supercore.task_identity import TaskIdentity

        authority = None if self.keys is None else self.keys.path("ca.crt").read_bytes()
        address = f"{self.local_host}:{self.port}"
        connect = partial(_client, address=address, authority=authority, seconds=SILENT_SECONDS)
        control = self._open.enter_context(connect(ControlHttpClient, "flwr"))
        if self.keys is not None:
            for public, site in self._keys.items():
                control.RegisterNode(RegisterNodeRequest(public_key=public, name=site))
        bundle = io.BytesIO()
        with zipfile.ZipFile(bundle, "w") as archive:
            for name, text in APP.items():
                archive.writestr(name, text)
        self._run = control.StartRun(StartRunRequest(fab=Fab(content=bundle.getvalue()))).run_id
        methods = ["/flwr.proto.Runtime/AcquireTask"]
        signed = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=methods)
        executor = self._open.enter_context(connect(RuntimeHttpClient, "SuperExec", signed))
        while True:  # until it is the task of our run, and not of one that somebody else submitted
            taken = executor.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
            if taken.task.run_id == self._run:
                break
        token = RuntimeTokenHttpInterceptor(taken.token)
        self._client = self._open.enter_context(connect(RuntimeHttpClient, "flwr-serverapp", token))
        self._client.PullTaskInput(PullTaskInputRequest())  # it starts the run
        self._own = Node(node_id=SUPERLINK_NODE_ID)
        TaskIdentity.task_id, TaskIdentity.run_id = taken.task.task_id, self._run
        TaskIdentity.node_id = SUPERLINK_NODE_ID

    def _beat(self) -> None:
        """Tell the SuperLink that the task is alive. If that fails, the next call fails too, and says why."""
        from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

        while not self._closed.wait(HEARTBEAT_SECONDS / 3):
            with suppress(Exception):
                self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    def _collect(self) -> list[Reply]:
        """Return replies that have arrived, and those in place of lost messages."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        self._check_process()
        if time.monotonic() > self._asked_at + IDLE_SECONDS:
            self._update_nodes()
        replies, self._failed = self._failed, []
        for number, (site, ticket, node) in list(self._sent.items()):
            if not number or self._nodes.get(site, node) != node:
                replies.append(Reply(site, ticket, b"", "its node was restarted" if number else "not accepted"))
                del self._sent[number]
        if not self._sent:
            return replies
        found = self._call(self._client.PullMessages, PullAppMessagesRequest(message_ids=list(self._sent)))
        for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            sent = self._sent.pop(message.metadata.reply_to_message_id, None)
            if sent is None:
                continue
            site, ticket, _ = sent
            try:
                data, work = _pull(self._client, self._own, self._run, tree)
                replies.append(Reply(site, ticket, data, work_seconds=work))
            except Exception as error:  # a reply that did not arrive as a whole, or an error in its place
                replies.append(Reply(site, ticket, b"", f"{type(error).__name__}: {error}"))
            confirmed = ConfirmMessageReceivedRequest(
                node=self._own, run_id=self._run, message_object_id=tree.object_id
            )
            self._call(self._client.ConfirmMessageReceived, confirmed)
        return replies

    def _update_nodes(self) -> None:
        from flwr.proto.runtime_pb2 import GetNodesRequest

        nodes = self._call(self._client.GetNodes, GetNodesRequest()).nodes
        self._nodes = {
            self._keys[node.public_key]: _Node(node.node_id, node.last_activated_at)
            for node in nodes
            if node.status == "online" and node.public_key in self._keys
        }
        self._asked_at = time.monotonic()
        self._write_status()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the SuperLink; a failure is an error that ends the server."""
        try:
            return function(*arguments)
        except Exception as error:
            self._check_process()
            raise HansaError(
                f"the SuperLink on {self.address} does not answer ({type(error).__name__}: {error}). Start the server "
                "again with --resume."
            ) from error

    def _check_process(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            raise HansaError(
                f"the SuperLink has ended with code {self._process.returncode}. Start the server again with --resume."
                f"{self._last_lines()}"
            )

    def _last_lines(self, count: int = 5) -> str:
        """Return the end of the SuperLink's log, without INFO lines if there are others."""
        if self._log is None:
            return ""
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").splitlines()
        important = [line for line in lines if line.strip() and "INFO" not in line]
        return " Its last lines: " + " | ".join((important or lines)[-count:])

    def _write_status(self) -> None:
        """Write what `hansa serve --status` shows."""
        waiting = {site for site, _, _ in self._sent.values()}
        sites = {
            site: "offline" if site not in self._nodes else "at work" if site in waiting else "online"
            for site in self.sites
        }
        facts = {name: fact() if callable(fact) else fact for name, fact in self._facts.items()}
        self._status.write({"address": self.address, "process": os.getpid(), "sites": sites, **facts})


class _StatusFile(AbstractContextManager["_StatusFile"]):
    """A file about this process, locked for as long as it runs: another process removes a file that is not."""

    def __init__(self) -> None:
        import fcntl

        prefix, _, suffix = STATUS_FILES.partition("*")
        self._file = tempfile.NamedTemporaryFile("w", prefix=prefix, suffix=suffix)  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._written = ""
        running_statuses()  # removes the files of processes that were killed

    def write(self, status: dict[str, Any]) -> None:
        text = json.dumps(status)
        if text != self._written and not self._file.closed:
            self._written = text
            self._file.seek(0)
            self._file.truncate()
            self._file.write(text)
            self._file.flush()

    def __exit__(self, *error: object) -> None:
        self._file.close()


def running_statuses() -> list[dict[str, Any]]:
    """Return what the servers of this user do, and remove the files of those that were killed."""
    import fcntl

    statuses = []
    for path in sorted(Path(tempfile.gettempdir()).glob(STATUS_FILES)):
        with suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                statuses.append(json.load(file))
            else:
                path.unlink()
    return statuses


class SiteNode:
    """Joins the SuperLink at ``address`` and answers its messages, one after the other.

    Args:
        site: The name of the site.
        address: The address of the SuperLink.
        keys: The site's keys; None connects without TLS.
        limit: The largest accepted frame in bytes.
    """

    def __init__(self, site: str, address: str, keys: Keys | None, *, limit: int) -> None:
        _find_superlink()  # Flower is installed
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        if not re.fullmatch(r"\S+:[0-9]{1,5}", address):
            raise HansaError(f"{address!r}: expected HOST:PORT, such as fl.example.org:8443.")
        self.site, self.address, self.keys, self.limit = site, address, keys, limit
        private = trial_key(site) if keys is None else keys.private_key()
        authority = None if keys is None else keys.path("ca.crt").read_bytes()
        self._public = _pem(private.public_key())
        signed = NodeAuthHttpInterceptor(private, private.public_key())
        self._client = _client(
            FleetHttpClient, "SuperNode", signed, address=address, authority=authority, problem=self._tell
        )
        self._node: Any = None
        self._told = ""
        self._refused_at: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def run(self, handle: Callable[[bytes], bytes], is_over: Callable[[], bool]) -> None:
        """Answer messages until ``is_over``. A connection that breaks is made anew, and the server sends again what it
        has no answer to; one that is never accepted is an error."""
        active = -ACTIVE_SECONDS
        while not is_over():
            if self._node is None:
                self._connect()
                continue
            try:
                answered = self._answer(handle)
            except Exception as error:  # of Flower: the agent's own errors are answers
                self._tell(error)
                self._disconnect()
                continue
            active = time.monotonic() if answered else active
            if not answered:
                time.sleep(POLL_SECONDS if time.monotonic() < active + ACTIVE_SECONDS else IDLE_SECONDS)

    def close(self) -> None:
        """Leave, so that the server knows at once."""
        self._closed.set()
        self._disconnect()
        self._client.close()

    def _connect(self) -> None:
        """Become the active node of the site's key, or raise if the server refuses that for some time."""
        import httpx
        from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
        from flwr.proto.node_pb2 import Node

        try:
            if self.keys is None:
                with suppress(httpx.HTTPStatusError):  # it is registered
                    self._client.RegisterNode(RegisterNodeFleetRequest(public_key=self._public))
            request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT_SECONDS)
            self._node = Node(node_id=self._client.ActivateNode(request).node_id)
        except httpx.HTTPStatusError as error:
            now = time.monotonic()
            self._refused_at = self._refused_at or now
            self._tell(error)
            if now > self._refused_at + SILENT_SECONDS:
                raise HansaError(f"{self.address}: {describe(error)}") from error
            time.sleep(IDLE_SECONDS)
        except httpx.TransportError as error:  # that another attempt does not mend
            raise HansaError(f"{self.address}: {describe(error)}") from error
        else:
            self._refused_at, self._told = None, ""
            log.info("site %s has joined %s", self.site, self.address)

    def _disconnect(self) -> None:
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest

        node, self._node = self._node, None
        if node is not None:
            with suppress(Exception):
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))

    def _answer(self, handle: Callable[[bytes], bytes]) -> bool:
        """Answer a message, if there is one."""
        from flwr.app import Message
        from flwr.common.serde import message_from_proto
        from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        found = self._client.PullMessages(PullMessagesRequest(node=self._node))
        if not found.messages_list:
            return False
        message, tree = message_from_proto(found.messages_list[0]), found.message_object_trees[0]
        run = message.metadata.run_id
        try:
            request, _ = _pull(self._client, self._node, run, tree, self.limit)
        except _OversizeError:
            request = None
        confirmed = ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=tree.object_id)
        self._client.ConfirmMessageReceived(confirmed)
        began = time.monotonic()
        answer = Refusal("oversize").to_bytes() if request is None else handle(request)
        reply = Message(_pack(answer, time.monotonic() - began), reply_to=message)
        _push(self._client, self._node, run, reply, partial(PushMessagesRequest, node=self._node))
        return True

    def _beat(self) -> None:
        """Tell the SuperLink that this node is alive; if that fails, the next request says why."""
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

        while not self._closed.wait(HEARTBEAT_SECONDS / 3):
            beat = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_SECONDS)
            with suppress(Exception):
                if self._node is not None:
                    self._client.SendNodeHeartbeat(beat)

    def _tell(self, error: Exception) -> None:
        """Log once why the server cannot be reached or refuses the site."""
        text = describe(error)
        if text != self._told:
            self._told = text
            log.warning("%s: %s; trying again", self.address, text)


def describe(error: Exception) -> str:
    """Return why a request to a SuperLink failed.

    >>> describe(ConnectionRefusedError(111, "Connection refused"))
    'the server cannot be reached: [Errno 111] Connection refused'
    """
    certificate = _certificate_error(error)
    if certificate is not None:
        return f"the server's certificate is not accepted: {certificate.verify_message}"
    response = getattr(error, "response", None)
    if response is None:
        return f"the server cannot be reached: {error or type(error).__name__}"
    if response.status_code == 412:
        return "the server does not know the key of this site, or another process uses it"
    if response.status_code == 401:
        return "the server was restarted, or the clock here differs from the server's"
    return f"the server refuses: HTTP {response.status_code}. Is it `hansa serve`?"


def _certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


class _OversizeError(Exception):
    """A frame is larger than accepted."""


def _client(
    kind: Any, name: str, *interceptors: Any, address: str, authority: bytes | None, seconds: float | None = None,
    problem: Callable[[Exception], None] | None = None,
) -> Any:  # fmt: skip
    """Return a client of one of the SuperLink's interfaces. It repeats requests that do not arrive, for some seconds.
    ``problem`` is called with each error before that."""
    import httpx
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.retry import RetryInvoker, exponential

    logging.getLogger("flwr").setLevel(logging.ERROR)
    retry = RetryInvoker(
        lambda: exponential(max_delay=5.0), httpx.TransportError, None, seconds,
        should_giveup=lambda error: _certificate_error(error) is not None,
        on_backoff=None if problem is None else lambda state: problem(state.exception),
    )  # fmt: skip
    try:
        versions = RuntimeVersionHttpInterceptor(component_name=name)
        return kind.from_server_address(
            address, authority is None, authority, [versions, *interceptors], retry_invoker=retry
        )
    except (ssl.SSLError, ValueError) as error:
        raise HansaError(f"the certificate of the authority cannot be read: {error}") from error


def _pack(data: bytes, seconds: float = 0.0) -> Any:
    """Return a frame, and the seconds of work on it, as the content of a message."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    if len(data) <= SMALL_BYTES:
        frame: Any = ConfigRecord({"bytes": data})
    else:
        frame = ArrayRecord({"bytes": Array("uint8", (len(data),), "raw", data)})
    return RecordDict({"frame": frame, "work": ConfigRecord({"seconds": seconds})})


def _unpack(content: Any) -> tuple[bytes, float]:
    """Return what `_pack` took, or raise for any other content."""
    value, seconds = content["frame"]["bytes"], content["work"]["seconds"]
    data = getattr(value, "data", value)
    if not isinstance(data, bytes) or not isinstance(seconds, float):
        raise ValueError("a message without a frame")
    return data, seconds


def _push(client: Any, node: Any, run: int, message: Any, request: Callable[..., Any]) -> str:
    """Send a message and its objects, and return its id; nothing if it is not accepted."""
    from flwr.app.message import remove_content_from_message
    from flwr.common.serde import message_to_proto
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
    from flwr.supercore.inflatable.inflatable_utils import push_objects

    message.metadata.__dict__["_message_id"] = message.object_id
    with no_object_id_recompute():
        plain, tree = message_to_proto(remove_content_from_message(message)), get_object_tree(message)
        answer = client.PushMessages(request(messages_list=[plain], message_object_trees=[tree]))
        send = make_push_object_fn_protobuf(client.PushObject, node, run, answer.session_id)
        push_objects(get_all_nested_objects(message), send, object_ids_to_push=set(answer.objects_to_push))
    refused = "message_ids" in answer.DESCRIPTOR.fields_by_name and not answer.message_ids[0]
    return "" if refused else message.metadata.message_id


def _pull(client: Any, node: Any, run: int, tree: Any, limit: int | None = None) -> tuple[bytes, float]:
    """Return the frame of a message, and the seconds of work on it; at most ``limit`` bytes are fetched."""
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects

    fetch, fetched = make_pull_object_fn_protobuf(client.PullObject, node, run), [0]

    def bounded(number: str) -> bytes:
        content: bytes = fetch(number)
        fetched[0] += len(content)
        if limit is not None and fetched[0] > limit + ENVELOPE_BYTES:
            raise _OversizeError
        return content

    contents = pull_objects([each.object_id for each in iterate_object_tree(tree)], bounded)
    message: Any = inflate_object_from_contents(tree.object_id, contents)
    if message.has_error():
        raise ValueError(f"{message.error.code}: {message.error.reason}")
    return _unpack(message.content)


def require_posix() -> None:
    """Refuse a system on which federations are not supported: Windows."""
    if not hasattr(os, "killpg"):
        raise HansaError("a federation over Flower needs Linux, macOS, the Windows Subsystem for Linux or a container.")


def free_port() -> int:
    """Return a free port of the loopback device."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _check_port(host: str, port: int) -> None:
    """Raise if another program listens on the port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            problem = f"port {port} of {host}: {error.strerror}."
            raise HansaError(f"{problem} Use another --port, or end the program that uses it.") from error


def _find_superlink() -> str:
    """Return the path of ``flower-superlink``, beside this interpreter or on PATH."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    path = shutil.which("flower-superlink", path=os.pathsep.join(places))
    if path is None:
        other = Path(sys.prefix) / "flower" / "bin" / "hansa"  # where `make test-flower` installs it
        found = f", or run {other}, whose environment has it" if other.is_file() else ""
        raise HansaError(f"a federation over Flower needs flwr: pip install 'hansa[flower]'{found}.")
    return path


def _pem(public: Any) -> bytes:
    """Return a public key as Flower reports it."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
