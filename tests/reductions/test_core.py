"""Where two methods coincide on paper they coincide here: to the last bit where the arithmetic is the same."""

from __future__ import annotations

import pytest
import torch

import hansa
from exactness.laboratory import problem, task, words
from hansa import presets


def final(algorithm, dtype=torch.float64):
    return hansa.run(algorithm, task(problem()), rounds=25, dtype=dtype, keep_params=True).trajectory


FEDAVG = presets.fedavg(**words())
OFF = words(local_momentum=0.0, weight_decay=0.0, max_grad_norm=None)
EQUAL = words(steps=3, weights="samples")
EQUAL_METHODS = {
    "prox(0) is SGD": (presets.fedprox(**words(mu=0.0)), FEDAVG),
    "nova with equal steps is the mean": (presets.fednova(**words(steps=3)), presets.fedavg(**words(steps=3))),
    "nova with equal steps is the mean by samples": (presets.fednova(**EQUAL), presets.fedavg(**EQUAL)),
    "AMS is AMSGrad without eps": (
        presets.fedams(**words(eps=0.0, server_lr=0.1)), presets.fedamsgrad(**words(eps=0.0, server_lr=0.1)),
    ),
    "momentum 0 is FedAvg": (presets.fedavgm(**words(momentum=0.0)), FEDAVG),
    "local options that are off change nothing": (presets.fedavg(**OFF), FEDAVG),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", EQUAL_METHODS)
def test_methods_that_coincide_on_paper_have_the_same_bits(name, dtype):
    one, other = EQUAL_METHODS[name]
    assert torch.equal(final(one, dtype), final(other, dtype))


def test_clipping_above_every_gradient_changes_nothing():
    assert torch.allclose(final(presets.fedavg(**words(max_grad_norm=1e9))), final(FEDAVG), atol=1e-14)


def test_samples_weights_with_equal_samples_are_uniform():
    A, b = torch.randn(4, 3, 2, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    same = hansa.training.quadratic(A, b)
    runs = [hansa.run(presets.fedavg(steps=2, weights=w), same, rounds=5).params for w in ("uniform", "samples")]
    assert torch.equal(*runs)
