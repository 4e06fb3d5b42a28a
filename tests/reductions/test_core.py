"""Where two methods coincide on paper they coincide here: to the last bit where the arithmetic is the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hansa
from exactness.laboratory import CLIENTS, LOCAL_LR, ROWS, problem, task, words
from hansa import presets
from hansa.core.types import Population, RoundContext
from hansa.server import adagrad, adam, ams, amsgrad, chain, momentum, scale, yogi

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


def test_nova_with_unequal_steps_is_not_the_mean():
    assert not torch.allclose(final(presets.fednova(**words())), final(presets.fedavg(**words())))


def test_scaffold_with_everybody_and_one_step_is_gradient_descent():
    lab = problem()
    run = final(presets.scaffold(local_lr=0.1, steps=1, participation=1.0), rounds=10)
    x = np.zeros(lab.dim)
    for t in range(10):
        x = x - 0.1 * np.mean([lab.grad(i, x) for i in range(CLIENTS)], axis=0)
        np.testing.assert_allclose(run[t].numpy(), x, atol=1e-12)


def test_ams_and_amsgrad_coincide_without_eps():
    assert torch.equal(
        final(presets.fedams(**words(eps=0.0, server_lr=0.1))),
        final(presets.fedamsgrad(**words(eps=0.0, server_lr=0.1))),
    )


def test_ams_and_amsgrad_differ_with_eps():
    pair = [final(f(**words(eps=0.1, server_lr=0.1))) for f in (presets.fedams, presets.fedamsgrad)]
    assert not torch.allclose(*pair)


def test_momentum_zero_is_fedavg():
    assert torch.equal(final(presets.fedavgm(**words(momentum=0.0))), final(presets.fedavg(**words())))


def test_local_options_that_are_off_change_nothing():
    off = words(local_momentum=0.0, weight_decay=0.0, max_grad_norm=None)
    assert torch.equal(final(presets.fedavg(**off)), final(presets.fedavg(**words())))


def test_clipping_above_every_gradient_changes_nothing():
    assert torch.allclose(
        final(presets.fedavg(**words(max_grad_norm=1e9))), final(presets.fedavg(**words())), atol=1e-14
    )


def test_mgda_of_equal_unit_updates_without_freedom_is_their_mean():
    algorithm = presets.fedmgda(**words(epsilon=0.0, server_lr=0.1))
    reference = hansa.run(algorithm, task(problem()), rounds=1, dtype=torch.float64)
    chosen = algorithm.sampler.select(0, Population(tuple(ROWS)), hansa.Key(0))
    lab, steps = problem(), words()["steps"].steps  # type: ignore[attr-defined]
    units = []
    for i in chosen:
        change = lab.descend(i, np.zeros(lab.dim), steps[i], LOCAL_LR)
        units.append(change / np.linalg.norm(change))
    np.testing.assert_allclose(reference.params.numpy(), 0.1 * np.mean(units, axis=0), atol=1e-13)


CTX = RoundContext(0, Population((1, 1)), (0, 1))


def one_step(part, delta):
    return part.update(delta, part.init(delta), CTX)[0]


@pytest.mark.parametrize(
    "part", [adam(b1=0.0, b2=0.0, eps=0.0), amsgrad(b1=0.0, b2=0.0, eps=0.0), ams(b1=0, b2=0, eps=0)]
)
def test_an_adaptive_server_without_memory_steps_by_the_sign(part):
    delta = torch.tensor([3.0, -0.5, 0.0, 1e-3], dtype=torch.float64)
    assert torch.allclose(one_step(part, delta), torch.sign(delta), atol=1e-15)


def test_adagrad_first_step_is_the_sign_too():
    delta = torch.tensor([3.0, -0.5], dtype=torch.float64)
    assert torch.allclose(one_step(adagrad(eps=0.0), delta), torch.sign(delta))


def test_yogi_from_zero_is_adam_from_zero():
    delta = torch.randn(20, dtype=torch.float64)
    assert torch.equal(one_step(yogi(), delta), one_step(adam(), delta))


def test_adam_with_bias_correction_first_step_is_the_sign():
    delta = torch.randn(20, dtype=torch.float64)
    assert torch.allclose(one_step(adam(eps=0.0, bias_correction=True), delta), torch.sign(delta))


def test_a_chain_of_scales_multiplies():
    delta = torch.randn(5, dtype=torch.float64)
    assert torch.allclose(one_step(chain(scale(0.5), momentum(0.9), scale(4.0)), delta), 2 * delta)


def test_samples_weights_with_equal_samples_are_uniform():
    A, b = torch.randn(4, 3, 2, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    same = hansa.training.quadratic(A, b)
    runs = [hansa.run(presets.fedavg(steps=2, weights=w), same, rounds=5).params for w in ("uniform", "samples")]
    assert torch.equal(*runs)
