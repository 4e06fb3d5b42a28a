"""One heterogeneous problem, seen by the product and by the references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import hansa
from oracle.quadratic import Quadratics, heterogeneous

CLIENTS, DIM, ROUNDS = 7, 5, 50
ROWS = [3, 4, 6, 6, 8, 9, 14]
STEPS = [1, 2, 3, 5, 4, 2, 8]
WEIGHTS = [0.5, 1.0, 2.0, 0.25, 3.0, 1.5, 1.0]
LOCAL_LR = 0.05


def participants(seed: int = 5, count: int = 3) -> list[list[int]]:
    """Partial participation, a different number of clients in some rounds, unsorted as logs are."""
    draw = np.random.default_rng(seed)
    return [draw.permutation(CLIENTS)[: count + (t % 2)].tolist() for t in range(ROUNDS)]


def problem(seed: int = 3) -> Quadratics:
    return heterogeneous(seed, CLIENTS, ROWS, DIM)


def task(reference: Quadratics) -> hansa.training.quadratic:
    return hansa.training.quadratic(
        [torch.from_numpy(a) for a in reference.A], [torch.from_numpy(b) for b in reference.b]
    )


def trajectory(algorithm: hansa.Algorithm, reference: Quadratics, rounds: int = ROUNDS, **more: Any) -> hansa.Run:
    return hansa.run(algorithm, task(reference), rounds=rounds, dtype=torch.float64, keep_params=True, **more)


def assert_agree(run: hansa.Run, expected: np.ndarray, tolerance: float = 1e-10) -> None:
    """Every round agrees, and the reference really moved: an idle method cannot pass."""
    found = run.trajectory.numpy()
    assert found.shape == expected.shape
    travelled = np.abs(np.diff(expected, axis=0)).max()
    assert travelled > 1e-3
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


def words(**more: object) -> dict[str, object]:
    """The preset arguments of the laboratory: partial participation, unequal steps."""
    return {
        "local_lr": LOCAL_LR,
        "steps": hansa.local.fixed(STEPS),
        "sampler": hansa.sample.replay(participants()),
        **more,
    }


def zeros(count: Sequence[int] | int = DIM) -> np.ndarray:
    return np.zeros(count)
