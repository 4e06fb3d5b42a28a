"""The ClientApp: it hands a message to the site's agent and the agent's answer back."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from hansa_relay import parcel, pipe

app = ClientApp()

WHO = b"hansa: who is there?"
"""Asked where nodes have no identity of their own, on trials: the answer is what the site calls itself."""


@app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """One record to the agent, one back."""
    asked = parcel.unwrap(message.content)
    if asked == WHO:
        answer = str(context.node_config["site"]).encode()
    else:
        with pipe.connect(str(context.node_config["agent"])) as agent:
            pipe.send(agent, {"op": "frame"}, asked)
            _, answer = pipe.receive(agent, int(context.node_config["limit"]))
    return Message(parcel.wrap(answer), reply_to=message)
