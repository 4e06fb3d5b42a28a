"""Five clients of unequal sizes and a model as people write them: what engines and protocols are tried on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def task(tested: int = 0, sizes: Sequence[int] = SIZES, model: Callable[[], nn.Module] = Net):
    """The task of clients of these sizes; the first so many rows are also for testing."""
    draw = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(sum(sizes), 6, generator=draw), torch.randint(3, (sum(sizes),), generator=draw)
    test = (inputs[:tested], targets[:tested]) if tested else None
    owners = [client for client, size in enumerate(sizes) for _ in range(size)]
    return hansa.Task(
        model, nn.functional.cross_entropy, hansa.data.from_arrays(inputs, targets, clients=owners, test=test)
    )
