"""The ServerApp: sends the messages of ``hansa serve``, each with a time to live, and relays the replies."""

from __future__ import annotations

import threading
import time
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from hansa_relay import records, sockets

app = ServerApp()

POLL_SECONDS = 0.1  # between the first checks for a reply; later, a tenth of its seconds so far, up to the following
MAX_POLL_SECONDS = 0.5
NODES_SECONDS = 1.0  # between checks of the nodes
MAX_BYTES = 1 << 40


@app.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Relay until ``hansa serve`` closes the socket."""
    Relay(grid, str(context.run_config["socket"])).run()


class Relay:
    """Uses one thread per message, so that a slow upload does not delay others."""

    def __init__(self, grid: Grid, path: str) -> None:
        self.grid, self.connection = grid, sockets.connect(path)
        self.lock, self.stopped = threading.Lock(), threading.Event()

    def run(self) -> None:
        threading.Thread(target=self._report_nodes, daemon=True).start()
        try:
            while True:
                head, body = sockets.receive(self.connection, MAX_BYTES)
                threading.Thread(target=self._relay, args=(head, body), daemon=True).start()
        except sockets.ConnectionClosed:
            self.stopped.set()

    def _relay(self, head: dict[str, Any], body: bytes) -> None:
        """Send one message and relay its reply, or an error if its time to live ends first."""
        ttl = float(head["ttl"])
        answer = {"op": "reply", "ticket": head["ticket"], "node": head["node"], "error": ""}
        try:
            began = time.monotonic()
            end = began + ttl
            message = Message(
                records.wrap(body), dst_node_id=int(head["node"]), message_type=records.TYPE, ttl=ttl,
                group_id=str(head["ticket"]),
            )  # fmt: skip
            del body
            (number,) = self.grid.push_messages([message])
            del message
            while number and time.monotonic() < end and not self.stopped.wait(_pause(time.monotonic() - began)):
                for reply in self.grid.pull_messages([number]):
                    if reply.has_error():
                        self._send({**answer, "error": f"{reply.error.code}: {reply.error.reason}"})
                    else:
                        seconds = records.seconds_of(reply.content)
                        head = {**answer, **seconds, "node": str(reply.metadata.src_node_id)}
                        self._send(head, records.unwrap(reply.content))
                    return
            self._send({**answer, "error": "time: no reply within its time to live" if number else "not accepted"})
        except Exception as error:
            self._send({**answer, "error": f"{type(error).__name__}: {error}"})

    def _report_nodes(self) -> None:
        """Send the list of nodes every second: it is also the sign that SuperLink and app are alive."""
        while not self.stopped.wait(NODES_SECONDS):
            try:
                nodes = [
                    [str(node.node_id), node.name, node.status, bytes(node.public_key).hex(), node.last_activated_at]
                    for node in self.grid.get_nodes()
                ]
            except Exception as error:
                self._send({"op": "trouble", "error": f"{type(error).__name__}: {error}"})
                continue
            self._send({"op": "nodes", "nodes": sorted(nodes)})

    def _send(self, head: dict[str, Any], body: bytes = b"") -> None:
        with self.lock:
            try:
                sockets.send(self.connection, head, body)
            except sockets.ConnectionClosed:
                self.stopped.set()


def _pause(waited: float) -> float:
    """Return the seconds until the next check for a reply that was waited for so long: few for a short answer, and no
    burden for a long one."""
    return min(MAX_POLL_SECONDS, max(POLL_SECONDS, waited / 10))
