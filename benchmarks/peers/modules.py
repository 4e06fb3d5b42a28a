"""The models as PyTorch users write them, for all contenders but FedJAX and Hansa, which has its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from job import Arrays, Job, passes, start
from torch import nn


def module(name: str) -> nn.Sequential:
    """A model by name."""
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))
    if name == "cnn_29k":
        return nn.Sequential(
            *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(1568, 10)),
        )
    raise ValueError(name)


def first_module(job: Job) -> nn.Sequential:
    """The model of the job with the weights it starts from."""
    made = module(job.model)
    made.load_state_dict({name: torch.from_numpy(value) for name, value in start(job).items()})
    return made


def weights_of(made: nn.Module) -> dict[str, Any]:
    return {name: value.detach().cpu().numpy() for name, value in made.state_dict().items()}


class Batches:
    """All data as two tensors; a client's batches are gathered from them, which is far faster than a DataLoader."""

    def __init__(self, job: Job) -> None:
        self.job, self.arrays = job, Arrays(job)
        self.inputs = torch.from_numpy(self.arrays.inputs)
        self.targets = torch.from_numpy(self.arrays.targets)
        self.draw = np.random.default_rng(job.seed)

    def of(self, client: int) -> Any:
        """As many batches as a client does steps, as (inputs, targets)."""
        rows = passes(self.arrays.rows(client), self.job.steps, self.job.batch, self.draw)
        for batch in torch.from_numpy(rows):
            yield self.inputs[batch], self.targets[batch]
