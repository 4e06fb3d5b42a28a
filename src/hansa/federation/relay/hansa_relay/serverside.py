"""The ServerApp: it pushes what ``hansa serve`` gives it, each message with a time to live, and hands replies back."""

from __future__ import annotations

import threading
import time
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from hansa_relay import parcel, pipe

app = ServerApp()

POLL = 0.25  # seconds between looks for a reply
NODES = 1.0  # seconds between looks at who is there
LARGEST = 1 << 40


@app.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Work until ``hansa serve`` closes the socket."""
    Relay(grid, str(context.run_config["socket"])).run()


class Relay:
    """A thread a message, so that one slow upload holds up nobody else's."""

    def __init__(self, grid: Grid, path: str) -> None:
        self.grid, self.connection = grid, pipe.connect(path)
        self.lock, self.over = threading.Lock(), threading.Event()

    def run(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            while True:
                head, body = pipe.receive(self.connection, LARGEST)
                threading.Thread(target=self._carry, args=(head, body), daemon=True).start()
        except pipe.Closed:
            self.over.set()

    def _carry(self, head: dict[str, Any], body: bytes) -> None:
        """One message out, its reply back; silence where its time to live runs out first."""
        ttl = float(head["ttl"])
        answer = {"op": "reply", "ticket": head["ticket"], "node": head["node"], "error": ""}
        try:
            end = time.monotonic() + ttl
            message = Message(
                parcel.wrap(body), dst_node_id=int(head["node"]), message_type=parcel.TYPE, ttl=ttl,
                group_id=str(head["ticket"]),
            )  # fmt: skip
            del body
            (number,) = self.grid.push_messages([message])
            del message
            while number and time.monotonic() < end and not self.over.wait(POLL):
                for reply in self.grid.pull_messages([number]):
                    if reply.has_error():
                        self._say({**answer, "error": f"{reply.error.code}: {reply.error.reason}"})
                    else:
                        self._say({**answer, "node": str(reply.metadata.src_node_id)}, parcel.unwrap(reply.content))
                    return
            self._say({**answer, "error": "time: no reply within its time to live" if number else "not accepted"})
        except Exception as error:
            self._say({**answer, "error": f"{type(error).__name__}: {error}"})

    def _watch(self) -> None:
        """Tell who is online, whenever that changes."""
        told: Any = None
        while not self.over.wait(NODES):
            try:
                nodes = [
                    [str(node.node_id), node.name, node.status, bytes(node.public_key).hex()]
                    for node in self.grid.get_nodes()
                ]
            except Exception as error:
                self._say({"op": "trouble", "error": f"{type(error).__name__}: {error}"})
                continue
            if sorted(nodes) != told:
                told = sorted(nodes)
                self._say({"op": "nodes", "nodes": told})

    def _say(self, head: dict[str, Any], body: bytes = b"") -> None:
        with self.lock:
            try:
                pipe.send(self.connection, head, body)
            except pipe.Closed:
                self.over.set()
