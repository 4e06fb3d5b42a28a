"""Compare HA-Fed on four gossip graphs, from isolated clients to a complete graph: rho, messages, accuracy."""

import os

import torch

import hansa
from hansa import gossip

rounds = int(os.environ.get("ROUNDS", "40"))
clients = hansa.data.federate("fashion-mini", clients=32)
task = hansa.Task(hansa.models.cnn_29k, torch.nn.functional.cross_entropy, clients)
graphs = {
    "silence": gossip.isolated(),
    "ring": gossip.ring(),
    "exponential": gossip.exponential(),
    "complete": gossip.complete(),
}
methods = {
    name: hansa.presets.ha_fed(topology=graph, clusters=4, reporters=2, local_lr=0.05, steps=10, batch_size=10)
    for name, graph in graphs.items()
}

result = hansa.compare(methods, task, rounds=rounds)
print("graph          rho    messages/step  accuracy")
for name, graph in graphs.items():
    weights = graph.weights(8)  # a cluster of eight
    print(f"{name:12} {gossip.rho(weights):5.3f} {4 * gossip.messages(weights):16} {result[name].last().mean:9.3f}")
result.plot("topologies.pdf")
