"""Compare two methods on embedded data: fifty clients with different label distributions, five in each round."""

import os
from typing import Any

import torch

import hansa

clients = hansa.data.federate("fashion-mini", clients=50)  # Dirichlet(0.3) partition; nothing is downloaded
task = hansa.Task(hansa.models.cnn_29k, torch.nn.functional.cross_entropy, clients)
common: dict[str, Any] = {"local_lr": 0.1, "steps": 10, "batch_size": 50, "participation": 0.1}
methods = {
    "FedAvg": hansa.presets.fedavg(**common),
    "FedAMS": hansa.presets.fedams(server_lr=0.1, **common),
}

result = hansa.compare(methods, task, rounds=int(os.environ.get("ROUNDS", "40")))
print(result)
result.report("quickstart.html")  # a self-contained HTML file
