"""Own models and clients of unequal size for tests of clients that are trained together; workers import this module."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, silu

import hansa

SIZES = (3, 9, 24, 14, 31, 8, 19, 12, 27, 10, 16, 22)
"""Samples by client: some have fewer than a batch of 8."""


class Net(nn.Module):
    """LayerNorm, SiLU and dropout: nothing that native code trains."""

    def __init__(self, outputs: int = 4, drop: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, outputs)
        self.drop, self.scale = nn.Dropout(drop), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(silu(self.norm(self.first(x)))) * self.scale)  # type: ignore[no-any-return]


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__(drop=0.3)


class Regressor(Net):
    def __init__(self) -> None:
        super().__init__(outputs=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, 0]


class Words(nn.Module):
    """A mean of embeddings, and a factor that has no native form."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 5, **options), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(2 * self.words(x).mean(1)))  # type: ignore[no-any-return]


class Normed(nn.Module):
    """BatchNorm: its statistics are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class Noisy(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.from_numpy(np.random.normal(size=x.shape)).to(x))  # noqa: NPY002


class Branching(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Fragile(Net):
    """Fails on a row whose first number is large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch._C._functorch.is_batchedtensor(x):
            plain = torch._C._functorch.get_unwrapped(x)
        else:
            plain = x
        if bool((plain[..., 0] > 1e3).any()):
            raise ValueError("a row is out of range")
        return super().forward(x)


class Far(Net):
    """Overflows on a row whose first number is large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.exp(x))


def data(kind: str = "classes", sizes: tuple[int, ...] = SIZES, spoil: int | None = None) -> Any:
    """Rows of clients; ``spoil`` is a client with rows that are far away."""
    draw = np.random.default_rng(4)
    owners = draw.permutation(np.repeat(np.arange(len(sizes)), sizes))
    rows = len(owners) + 20
    x = draw.standard_normal((rows, 6))
    y = draw.integers(0, 4, rows) if kind != "numbers" else x @ draw.standard_normal(6)
    if kind == "words":
        x = draw.integers(0, 9, (rows, 7))
    elif spoil is not None:
        probed = torch.linspace(0, len(owners) - 1, 24).long().numpy()  # rows on which a task tries its model
        x[np.setdiff1d(np.flatnonzero(owners == spoil), probed), 0] += 1e4
    end = len(owners)
    kinds = {} if kind == "words" else {"dtype": torch.float64}
    return hansa.data.from_arrays(x[:end], y[:end], clients=owners, test=(x[end:], y[end:]), **kinds)


def task(model: Any = Net, kind: str = "classes", execution: Any = "vmap", **options: Any) -> hansa.Task:
    """A task of one of the models."""
    loss = mse_loss if kind == "numbers" else cross_entropy
    sizes = options.pop("sizes", SIZES)
    rows = data(kind, sizes, options.pop("spoil", None))
    return hansa.Task(model, loss, rows, execution=execution, **options)
