"""Augmentations, data and a model of one's own, as users write them in a module."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import hansa
from hansa.data import from_arrays


@hansa.component
def noisy(batch, generator, sigma: float = 0.1):
    return batch + sigma * torch.randn(batch.shape, generator=generator)


@hansa.component
def careless(batch, generator):
    """Draws from torch's common generator, which is seeded from the same key."""
    return batch + 0.1 * torch.randn_like(batch)


class Net(nn.Module):
    """Dropout, BatchNorm, a frozen block and a forward() of its own."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.stem.requires_grad_(False)
        self.norm = nn.BatchNorm2d(4)
        self.body = nn.Conv2d(4, 6, 3)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        return self.head(self.drop(torch.relu(self.body(x)).mean((2, 3))))


@hansa.component
def stack():
    """What native code trains."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3))


@hansa.component
def images(sizes=(5, 9, 14, 7)):
    draw = np.random.default_rng(1)
    x = draw.normal(size=(sum(sizes), 3, 8, 8)).astype(np.float32)
    y = draw.integers(0, 3, len(x))
    owners = np.repeat(np.arange(len(sizes)), sizes)
    return from_arrays(x, y, clients=owners, test=(x[:11], y[:11]))
