"""D and the norm of the aggregate in every round's record, for every way of weighing: by hand."""

from __future__ import annotations

import math

import pytest
import torch

import hansa
from hansa import aggregate, presets

SIZES = [1, 3, 4]


def task():
    """f_i = ||x - b_i||^2/2 at x = 0 with b = (2, 0), (0, 2), (-1, 0): one step of rate 1 reports Delta_i = b_i."""
    b = [(2.0, 0.0), (0.0, 2.0), (-1.0, 0.0)]

    def loss(client, x):
        return 0.5 * (x - torch.tensor(b[client], dtype=x.dtype)).square().sum()

    return hansa.training.function(loss, clients=3, x0=torch.zeros(2, dtype=torch.float64), samples=SIZES)


UNIFORM = math.sqrt((4 + 4 + 1) / 3 / ((1 / 3) ** 2 + (2 / 3) ** 2))  # mean (1/3, 2/3)
SAMPLES = math.sqrt((1 * 4 + 3 * 4 + 4 * 1) / 8 / ((-2 / 8) ** 2 + (6 / 8) ** 2))  # mean (-2, 6)/8


@pytest.mark.parametrize(
    ("method", "expected", "length"),
    [
        (presets.fedavg, UNIFORM, math.hypot(1 / 3, 2 / 3)),
        (lambda **w: presets.fedavg(weights="samples", **w), SAMPLES, math.hypot(-2 / 8, 6 / 8)),
        (lambda **w: presets.fednova(weights="samples", **w), SAMPLES, math.hypot(-2 / 8, 6 / 8)),
        (lambda **w: presets.fedavg(server_lr=0.1, **w), UNIFORM, math.hypot(1 / 3, 2 / 3)),
        (lambda **w: presets.fedavg(**w).on("model", aggregate=aggregate.median()), UNIFORM, 0.0),
        (lambda **w: presets.fedadam(weights="samples", **w), SAMPLES, math.hypot(-2 / 8, 6 / 8)),
    ],
    ids=["mean", "samples", "nova", "server rate", "median", "adam"],
)
def test_by_hand(method, expected, length):
    found = hansa.run(method(local_lr=1.0, steps=1), task(), rounds=1).history[0]
    assert found["diversity"] == pytest.approx(expected)
    assert found["aggregate_norm"] == pytest.approx(length, abs=1e-12)
    assert found["update_norm"] == pytest.approx((2 + 2 + 1) / 3)


def test_the_definitions_at_their_edges():
    assert hansa.measures.diversity([0.0, 0.0], [0.5, 0.5], 0.0) == 1.0
    assert hansa.measures.diversity([1.0, 1.0], [0.5, 0.5], 0.0) == math.inf
    assert hansa.measures.chi_square([1.0, 0.0], [0.0, 1.0]) == math.inf
    assert hansa.measures.chi_square([0.0, 1.0], [0.0, 1.0]) == 1.0
