"""What a user of a federation brings: a model class with its own forward(), and data with unequal clients."""

from __future__ import annotations

import torch
from torch import nn

import hansa

SIZES = (4, 17, 9, 23, 12, 6, 14, 8)


class Net(nn.Module):
    def __init__(self, hidden: int = 5) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


@hansa.component
def data():
    draw = torch.Generator().manual_seed(0)
    owners = [client for client, size in enumerate(SIZES) for _ in range(size)]
    inputs, targets = torch.randn(len(owners), 6, generator=draw), torch.randint(3, (len(owners),), generator=draw)
    return hansa.data.from_arrays(inputs, targets, clients=owners, test=(inputs[:20], targets[:20]))
