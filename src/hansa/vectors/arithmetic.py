"""Passes over whole vectors, by native code where it is there and fits, otherwise by torch.

Which of the two it is depends on the machine and the vector alone, so equal runs stay equal to the bit. The two agree
to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hansa import native
from hansa.types import Vector
from hansa.vectors import kernels


def fits(*vectors: Vector) -> bool:
    """Whether native kernels can take these vectors: alike, dense and on the CPU."""
    first = vectors[0]
    return (
        first.dtype in (torch.float32, torch.float64)
        and all(v.dtype == first.dtype and v.is_contiguous() and v.device.type == "cpu" for v in vectors)
        and native.available()
    )


def norm(x: Vector) -> float:
    """The Euclidean length; NaN or infinite where an entry is, or where its square is beyond float64.

    >>> norm(torch.tensor([3.0, 4.0]))
    5.0
    """
    if fits(x):
        return math.sqrt(kernels.squared_norm(x)[0])
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def all_finite(x: Vector) -> bool:
    """Whether no entry is NaN or infinite, in one pass without a vector of answers.

    >>> all_finite(torch.tensor([1.0, 3e38])), all_finite(torch.tensor([1.0, math.nan]))
    (True, False)
    """
    if fits(x):
        return kernels.squared_norm(x)[1]
    return math.isfinite(float(torch.linalg.vector_norm(x))) or bool(torch.isfinite(x).all())


def weighted_sum(rows: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """sum w_i row_i, folded left to right entry by entry.

    >>> weighted_sum([torch.tensor([1.0]), torch.tensor([3.0])], [0.5, 0.5])
    tensor([2.])
    """
    if fits(*rows):
        return kernels.weighted_sum(rows, weights)
    total = rows[0] * weights[0]
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        total.add_(row, alpha=weight)
    return total
