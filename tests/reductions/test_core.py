"""Where two methods coincide on paper they coincide here: to the last bit where the arithmetic is the same."""

from __future__ import annotations

import pytest
import torch

import hansa
from exactness.laboratory import problem, task, words
from hansa import presets

ROUNDS = 25


def final(algorithm, dtype=torch.float64, rounds=ROUNDS, **more):
    return hansa.run(algorithm, task(problem()), rounds=rounds, dtype=dtype, keep_params=True, **more).trajectory


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_prox_zero_is_sgd(dtype):
    assert torch.equal(final(presets.fedprox(**words(mu=0.0)), dtype), final(presets.fedavg(**words()), dtype))


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_nova_with_equal_steps_is_the_mean(weights):
    same = words(steps=3, weights=weights)
    assert torch.equal(final(presets.fednova(**same)), final(presets.fedavg(**same)))


def test_ams_and_amsgrad_coincide_without_eps():
    assert torch.equal(
        final(presets.fedams(**words(eps=0.0, server_lr=0.1))),
        final(presets.fedamsgrad(**words(eps=0.0, server_lr=0.1))),
    )


def test_momentum_zero_is_fedavg():
    assert torch.equal(final(presets.fedavgm(**words(momentum=0.0))), final(presets.fedavg(**words())))


def test_local_options_that_are_off_change_nothing():
    off = words(local_momentum=0.0, weight_decay=0.0, max_grad_norm=None)
    assert torch.equal(final(presets.fedavg(**off)), final(presets.fedavg(**words())))


def test_clipping_above_every_gradient_changes_nothing():
    assert torch.allclose(
        final(presets.fedavg(**words(max_grad_norm=1e9))), final(presets.fedavg(**words())), atol=1e-14
    )


def test_samples_weights_with_equal_samples_are_uniform():
    A, b = torch.randn(4, 3, 2, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    same = hansa.training.quadratic(A, b)
    runs = [hansa.run(presets.fedavg(steps=2, weights=w), same, rounds=5).params for w in ("uniform", "samples")]
    assert torch.equal(*runs)
