"""The client of the Flower contender, in a module of its own: Ray's actors import it once and keep data and model."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from job import Job
from modules import Batches, first_module
from torch import nn
from torch.nn.functional import cross_entropy

app = ClientApp()


@cache
def kept() -> tuple[Job, Batches, nn.Module]:
    """What an actor makes once: the data in memory and a model to load weights into."""
    torch.set_num_threads(1)
    job = Job.given()
    return job, Batches(job), first_module(job)


@app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    job, batches, model = kept()
    client = int(context.node_config["partition-id"])
    batches.draw = np.random.default_rng([job.seed, client, int(message.content["config"]["server-round"])])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=job.lr)
    for inputs, targets in batches.of(client):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    reply = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 1})})
    return Message(content=reply, reply_to=message)
