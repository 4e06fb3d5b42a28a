"""Embeddings: tokens outside of the table, and rows of the table that no token names."""

from __future__ import annotations

import pytest
import torch

from core.native.models import smooth, train
from core.native.sets import each_set
from core.native.test_network import case
from hansa.core import native
from hansa.core.errors import HansaError
from hansa.core.native.network import AffineStep

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.unavailable_reason()}")


@pytest.mark.parametrize("bad", [-1, 200, 2**31, 2**62, -(2**63)])
def test_a_token_outside_of_the_table_is_named_and_nothing_is_read_or_changed(bad: int) -> None:
    stack, _, y, inputs, labels = case("embeddings")
    before, index = y.clone(), torch.tensor([[0, 1], [2, 3]])
    inputs[3, 8], message = bad, rf"token {bad} is out of range, there are 200"
    with pytest.raises(HansaError, match=message):
        train(stack, y, inputs, labels, index, AffineStep(1.0))
    with pytest.raises(HansaError, match=message):
        stack.gradient(y, inputs, labels, index[1])
    with pytest.raises(HansaError, match=message):
        stack.evaluate(y, inputs, labels)
    assert torch.equal(y, before)
    with pytest.raises(HansaError, match=r"inputs is torch.float32 .*expected contiguous torch.int64"):
        stack.gradient(y, inputs.float(), labels, index[0])


@pytest.mark.parametrize("isa", each_set())
def test_rows_of_a_table_that_no_token_names_have_a_zero_gradient_and_stay(isa: str) -> None:
    stack, _, y, inputs, labels = case("embeddings", isa, smooth)
    inputs[0, 0] = 3  # the row without a gradient, which is part of the mean
    table = slice(0, 200 * 37)
    _, gradient = stack.gradient(y, inputs, labels, torch.arange(2), out=torch.full_like(y, 7.0))
    used = torch.zeros(200, dtype=torch.bool).index_fill(0, inputs[:2].flatten(), True)
    used[3] = False
    rows = gradient[table].view(200, 37)
    assert torch.equal((rows != 0).any(1), used)
    assert not rows[~used].any()
    trained = y.clone()
    train(stack, trained, inputs, labels, torch.tensor([[0, 1]] * 3), AffineStep(0.1))
    moved = (trained != y)[table].view(200, 37)
    assert torch.equal(moved.any(1), used)
