"""Weights on the simplex: projection within bounds, and the Frank-Wolfe of FedAWARE's code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 1000
STILL = 1e-5  # L1 change of the weights at which the iteration stops


def pairwise_frank_wolfe(gram: Tensor) -> tuple[Tensor, int]:
    """Return the weights lambda and the number of steps of at most 1000 Frank-Wolfe steps.

    A step is lambda <- c lambda + (1-c) e_t, t = argmin (G lambda)_t, with the c that gives the shortest point. It
    starts at the pair whose segment comes nearest to zero. If an end of a segment is nearest, c is 0.999 or 0.001
    (Sener and Koltun 2018, the origin of the code).

    >>> weights, steps = pairwise_frank_wolfe(torch.tensor([[1.0, 0.0], [0.0, 3.0]], dtype=torch.float64))
    >>> weights.tolist(), steps
    ([0.75, 0.25], 0)
    """
    size = len(gram)
    weights = torch.zeros(size, dtype=gram.dtype)
    if size == 1:
        return weights + 1, 0
    first, second, share = _best_pair(gram)
    weights[first], weights[second] = share, 1 - share
    if size == 2:
        return weights, 0
    for step in range(STEPS):
        gradient = gram @ weights
        corner = int(gradient.argmin())
        keep = _share(float(weights @ gradient), float(gradient[corner]), float(gram[corner, corner]))
        moved = keep * weights
        moved[corner] += 1 - keep
        if float((moved - weights).abs().sum()) < STILL:
            return weights, step
        weights = moved
    return weights, STEPS


def _share(aa: float, ab: float, bb: float) -> float:
    """Return the c that minimizes ||c a + (1-c) b||, from the three inner products."""
    if ab >= aa:
        return 0.999
    if ab >= bb:
        return 0.001
    return (bb - ab) / (aa + bb - 2 * ab)


def _best_pair(gram: Tensor) -> tuple[int, int, float]:
    """Return the first pair i < j whose segment comes nearest to zero, and the weight of i."""
    square = gram.diagonal()
    aa, bb = square[:, None], square[None, :]
    inside = (gram < aa) & (gram < bb)
    share = torch.where(inside, (bb - gram) / (aa + bb - 2 * gram), 0.0)
    value = torch.where(inside, bb + share * (gram - bb), torch.minimum(aa, bb))
    value[torch.ones_like(gram, dtype=torch.bool).tril()] = torch.inf
    first, second = divmod(int(value.argmin()), len(gram))
    return first, second, _share(float(square[first]), float(gram[first, second]), float(square[second]))


def project_to_simplex(x: Tensor, low: Tensor, high: Tensor, total: float) -> Tensor:
    """Return the nearest point to x with sum ``total`` within the bounds: clip(x - t, low, high)."""
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
    if bool(inside.any()):  # correct the rounding error of the sum
        nearest = nearest + torch.where(inside, (total - nearest.sum()) / inside.sum(), 0.0)
    return torch.minimum(torch.maximum(nearest, low), high)
