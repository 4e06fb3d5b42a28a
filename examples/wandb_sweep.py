"""A sweep that Weights & Biases drives. WANDB_MODE=offline runs one trial, without an account."""

import os
from typing import Any

import torch
import wandb
from torch import nn

import hansa
from hansa.study.wandb_sweeps import sweep_config, sweep_trial


class Net(nn.Module):
    """A model of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(784, 32), nn.Linear(32, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(image.flatten(1))))  # type: ignore[no-any-return]


clients = hansa.data.with_validation(hansa.data.federate("fashion-mini", clients=20), 0.1)  # rows to tune on
task = hansa.Task(Net, nn.functional.cross_entropy, clients)
metric = "validation/test_accuracy"
axes: dict[str, Any] = {
    "local_lr": hansa.search_range(1e-2, 0.3, log=True),
    "server_lr": hansa.search_range(1e-2, 0.3, log=True),
    "batch_size": [16, 32],
}
rounds = int(os.environ.get("ROUNDS", "20"))
if os.environ.get("WANDB_MODE") == "offline":  # a point of our own, in place of the sweep's
    init = {"config": {"local_lr": 0.1, "server_lr": 0.1, "batch_size": 32}, "project": "hansa"}
    print(metric, sweep_trial(hansa.presets.fedams, task, axes, rounds=rounds, metric=metric, init=init)())
else:
    identity = wandb.sweep(sweep_config(axes, metric), project="hansa")
    wandb.agent(identity, sweep_trial(hansa.presets.fedams, task, axes, rounds=rounds, metric=metric), count=20)
