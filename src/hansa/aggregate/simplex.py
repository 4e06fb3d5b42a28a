"""The nearest weights that are allowed: a simplex cut by bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def project(x: Tensor, low: Tensor, high: Tensor, total: float) -> Tensor:
    """The nearest point to x with sum ``total`` within the bounds: clip(x - t, low, high) for the one t that fits."""
    turns = torch.cat((x - high, x - low))
    order = torch.argsort(turns, stable=True)
    turns = turns[order]
    falling = torch.cat((torch.ones_like(x), -torch.ones_like(x)))[order].cumsum(0)
    fallen = torch.zeros_like(turns)
    fallen[1:] = (falling[:-1] * turns.diff()).cumsum(0)
    wanted = float(high.sum()) - total
    at = min(max(int(torch.searchsorted(fallen, wanted, right=True)) - 1, 0), len(turns) - 1)
    shift = turns[at] + ((wanted - fallen[at]) / falling[at] if float(falling[at]) > 0 else 0.0)
    nearest = torch.minimum(torch.maximum(x - shift, low), high)
    inside = (nearest > low) & (nearest < high)
    if bool(inside.any()):  # what rounding left of the sum
        nearest = nearest + torch.where(inside, (total - nearest.sum()) / inside.sum(), 0.0)
    return torch.minimum(torch.maximum(nearest, low), high)
