"""Five clients of unequal sizes and a model as people write them: what engines and protocols are tried on."""

from __future__ import annotations

import torch
from torch import nn

import hansa

SIZES = (4, 17, 9, 23, 12)
OWNERS = [client for client, size in enumerate(SIZES) for _ in range(size)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


def task(tested: int = 0):
    """Their task; the first so many rows are also for testing."""
    draw = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(sum(SIZES), 6, generator=draw), torch.randint(3, (sum(SIZES),), generator=draw)
    test = (inputs[:tested], targets[:tested]) if tested else None
    held = hansa.data.from_arrays(inputs, targets, clients=OWNERS, test=test)
    return hansa.Task(Net, nn.functional.cross_entropy, held)
