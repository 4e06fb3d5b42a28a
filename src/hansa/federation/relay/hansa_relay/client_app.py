"""The ClientApp: relays a message to the site's agent, and the agent's answer back."""

from __future__ import annotations

import os
import sys
import time

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from hansa_relay import records, sockets

app = ClientApp()

WAITING_FILE = "HANSA_WAITING_FILE"  # as in run_site_node
IDENTITY_REQUEST = b"hansa: who is there?"
"""Sent in trials without keys, where nodes have no identity: the answer is the name of the site."""


@app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """Relay one record to the agent and its answer back."""
    began, since = time.monotonic(), _seconds_since_arrival()
    try:
        answer = _answer(records.unwrap(message.content), context)
    except Exception as error:  # Flower sends the text of an exception to the server
        print(f"no answer from the agent: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise NoAnswer from None
    return Message(records.wrap(answer, {"start": since, "work": time.monotonic() - began}), reply_to=message)


def _seconds_since_arrival() -> float:
    """Return the seconds since the node has the message; the node touches a file then."""
    try:
        return max(0.0, time.time() - os.stat(os.environ[WAITING_FILE]).st_mtime)
    except (KeyError, OSError):
        return 0.0


class NoAnswer(Exception):
    """The agent did not answer; nothing else is said of it."""


def _answer(request: bytes, context: Context) -> bytes:
    if request == IDENTITY_REQUEST:
        return str(context.node_config["site"]).encode()
    with sockets.connect(str(context.node_config["agent"])) as agent:
        sockets.send(agent, {"op": "frame"}, request)
        answer: bytes = sockets.receive(agent, int(context.node_config["limit"]))[1]
        return answer
