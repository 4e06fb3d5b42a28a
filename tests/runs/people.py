"""A small task of unequal clients, with a model as users write it."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hansa
from hansa import data


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(x)))


def arrays(clients: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, labels and owners: client i has 5 + 3 i rows."""
    draw = np.random.default_rng(7)
    owners = np.repeat(np.arange(clients), 5 + 3 * np.arange(clients))
    x = draw.standard_normal((len(owners), 5)).astype(np.float32) + 0.1 * owners[:, None].astype(np.float32)
    return x, (x.sum(1) > x[:, 0]).astype(np.int64) + (x[:, 1] > 1), owners


def task_of(clients: int) -> hansa.Task:
    x, y, owners = arrays(clients)
    held = data.from_arrays(x, y, clients=owners, test=(x[::4], y[::4]))
    return hansa.Task(Net, cross_entropy, held)
