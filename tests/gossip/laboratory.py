"""Clients of very unequal sizes with a regression of their own, seen by the product and by the references."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import nn

import hansa
from oracle.quadratic import Quadratics, heterogeneous

SIZES = (4, 40, 17, 9)
DIM = 6


class RecordedLeastSquares(nn.Module):
    """Linear regression that records the rows of every batch it is trained on; the first input is a row's number."""

    log: ClassVar[list[list[int]]] = []

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.log.append(x[:, 0].long().tolist())
        return x[:, 1:] @ self.weight


def half_squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 0.5 * (output - target).square().mean()


def problem(seed: int = 4) -> Quadratics:
    return heterogeneous(seed, len(SIZES), list(SIZES), DIM)


def regression(reference: Quadratics) -> hansa.Task:
    """The reference's problem as data of clients and a module."""
    A, b = np.concatenate(reference.A), np.concatenate(reference.b)
    inputs, owners = np.column_stack([np.arange(len(A)), A]), np.repeat(np.arange(reference.clients), reference.samples)
    data = hansa.data.from_arrays(inputs, b, clients=owners, test=(inputs[:1], b[:1]), dtype=torch.float64)
    return hansa.Task(partial(RecordedLeastSquares, A.shape[1]), half_squares, data, metric=None)


def owners_and_sizes(batches: list[list[int]]) -> list[tuple[int, int]]:
    """The client and the size of each recorded batch of `problem`."""
    return [(int(np.searchsorted(np.cumsum(SIZES), rows[0], side="right")), len(rows)) for rows in batches]
