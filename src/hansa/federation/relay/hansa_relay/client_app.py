"""The ClientApp: relays a message to the site's agent, and the agent's answer back."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from hansa_relay import records, sockets

app = ClientApp()

IDENTITY_REQUEST = b"hansa: who is there?"
"""Sent in trials without keys, where nodes have no identity: the answer is the name of the site."""


@app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """Relay one record to the agent and its answer back."""
    request = records.unwrap(message.content)
    if request == IDENTITY_REQUEST:
        answer = str(context.node_config["site"]).encode()
    else:
        with sockets.connect(str(context.node_config["agent"])) as agent:
            sockets.send(agent, {"op": "frame"}, request)
            _, answer = sockets.receive(agent, int(context.node_config["limit"]))
    return Message(records.wrap(answer), reply_to=message)
