"""A Lightning module as the model: its loss and its metrics are functions that its steps and the task share."""

import os
from typing import Any

import lightning
import torch
from torch import nn

import hansa


class LitNet(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
    """A module for Lightning's Trainer. Here its optimizers and hooks are not used: local steps are the method's."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(784, 32), nn.Linear(32, 10)

    def forward(self, image: torch.Tensor) -> Any:
        return self.head(torch.relu(self.hidden(image.flatten(1))))

    @staticmethod
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, label_smoothing=0.1)

    @staticmethod
    def top3_accuracy(output: torch.Tensor, target: torch.Tensor) -> float:
        return float((output.topk(3).indices == target[:, None]).any(1).float().mean())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(self(batch[0]), batch[1])


clients = hansa.data.federate("fashion-mini", clients=10)  # of unequal size
task = hansa.Task(LitNet, LitNet.loss, clients, metrics={"top3_accuracy": hansa.higher(LitNet.top3_accuracy)})
method = hansa.presets.fedams(local_lr=0.05, server_lr=0.05, epochs=1)
run = hansa.run(method, task, rounds=int(os.environ.get("ROUNDS", "20")))
print(run.table("round", "test_loss", "test_accuracy", "test_top3_accuracy"))
