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


class Moody(nn.Module):
    """Batch statistics and dropout: what a careless evaluation would leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.dropout(torch.relu(self.norm(self.inner(x))), 0.3, self.training))


def gini(output: torch.Tensor, target: torch.Tensor) -> float:
    """A metric that is no mean over rows, and of one class alone no number."""
    hit = (target == 0).numpy()
    if hit.all() or not hit.any():
        raise ValueError("one class alone")
    score = output[:, 0].numpy()
    return float((score[hit][:, None] > score[~hit][None]).mean())


def owned_task(clients: int, model: type[nn.Module] = Net, **words: object) -> hansa.Task:
    """The same with test rows of their own: the last client has none, some rows are nobody's."""
    x, y, owners = arrays(clients)
    whose = np.where(owners == clients - 1, -1, owners)[::-1][::2].copy()
    held = data.from_arrays(x, y, clients=owners, test=(x[::-1][::2].copy(), y[::-1][::2].copy()), test_clients=whose)
    return hansa.Task(model, cross_entropy, held, **words)
