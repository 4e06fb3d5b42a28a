"""Sorting vectors coordinate by coordinate."""

from __future__ import annotations

import pytest
import torch

from hansa.core.vectors.arithmetic import sort_vectors


@pytest.mark.parametrize("count", [*range(1, 34), 63, 64, 65, 100])
def test_every_coordinate_is_sorted(count: int) -> None:
    values = torch.randn(count, 257, generator=torch.Generator().manual_seed(count))
    values[:, 0] = 1.0  # equal values
    values[: count // 2, 1] = float("inf")
    values[count // 2 :, 2] = -float("inf")
    before = values.clone()
    result = sort_vectors(list(values))
    assert torch.equal(torch.stack(result), values.sort(dim=0).values)
    assert torch.equal(values, before)


def test_every_input_of_zeros_and_ones_is_sorted() -> None:
    """A network of comparators that sorts these sorts everything (the 0-1 principle)."""
    count = 12
    inputs = (torch.arange(2**count)[None, :] >> torch.arange(count)[:, None] & 1).double()
    assert torch.equal(torch.stack(sort_vectors(list(inputs))), inputs.sort(dim=0).values)
