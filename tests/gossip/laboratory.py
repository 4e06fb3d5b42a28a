"""Clients of very unequal sizes with a regression of their own, seen by the product and by the references."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import nn

import hansa
from hansa.data.federated import FederatedData
from oracle.quadratic import Quadratics, heterogeneous

SIZES = (4, 40, 17, 9)
DIM = 6


class Line(nn.Module):
    """A linear model that starts at zero and notes whose rows it saw, and how many: column 0 of a batch is the client
    times 1e-9, too small to matter and still legible."""

    seen: ClassVar[list[tuple[int, int]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((round(float(x[0, 0]) * 1e9), len(x)))
        return x[:, 1:] @ self.slope


def half_squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 0.5 * (output - target).square().mean()


def problem(seed: int = 4) -> Quadratics:
    return heterogeneous(seed, len(SIZES), list(SIZES), DIM)


def regression(reference: Quadratics) -> hansa.Task:
    """The reference's problem as data of clients and a module."""
    marked = [np.hstack([np.full((len(a), 1), i * 1e-9), a]) for i, a in enumerate(reference.A)]
    offsets = torch.tensor([0, *np.cumsum([len(a) for a in reference.A]).tolist()])
    rows = int(offsets[-1])
    held = FederatedData(
        torch.from_numpy(np.concatenate(marked)),
        torch.from_numpy(np.concatenate(reference.b)),
        torch.arange(rows),
        offsets,
        None,
        None,
        classes=None,
        name="lines",
    )
    return hansa.Task(Line, half_squares, held)
