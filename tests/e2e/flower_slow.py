"""A model whose every step takes the seconds in SLOW_SECONDS, and three clients of unequal sizes, one for each site."""

from __future__ import annotations

import os
import time

import torch
from torch import nn

import hansa


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        if self.training:
            time.sleep(float(os.environ.get("SLOW_SECONDS", "0")))
        return self.last(torch.tanh(self.first(x)))


@hansa.component
def data():
    draw = torch.Generator().manual_seed(0)
    owners = [client for client, size in enumerate((14, 23, 9)) for _ in range(size)]
    inputs, targets = torch.randn(len(owners), 6, generator=draw), torch.randint(3, (len(owners),), generator=draw)
    return hansa.data.from_arrays(inputs, targets, clients=owners, test=(inputs[:20], targets[:20]))
