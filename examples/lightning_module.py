"""A Lightning module as the model: forward, training_step and validation_step are its own. Needs hansa[lightning]."""

import os
from typing import Any

import lightning
import torch
from torch import nn

import hansa


class LitNet(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
    """A module as it was written for Lightning's Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(784, 32), nn.Linear(32, 10)

    def forward(self, image: torch.Tensor) -> Any:
        return self.head(torch.relu(self.hidden(image.flatten(1))))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1], label_smoothing=0.1)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        best = self(batch[0]).topk(3).indices
        self.log("val_top3_accuracy", (best == batch[1][:, None]).any(1).float().mean())


clients = hansa.data.federate("fashion-mini", clients=10)  # of unequal size
task = hansa.training.from_lightning(LitNet, clients, better={"top3_accuracy": "higher"})
method = hansa.presets.fedams(local_lr=0.05, server_lr=0.05, epochs=1)  # the optimizers are the method's
run = hansa.run(method, task, rounds=int(os.environ.get("ROUNDS", "20")))
print(run.table("round", "test_loss", "test_accuracy", "test_top3_accuracy"))
