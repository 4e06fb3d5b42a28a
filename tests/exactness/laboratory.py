"""One heterogeneous problem, seen by the product and by the references."""

from __future__ import annotations

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


def followed(
    preset: Any, reference: Any, mine: dict[str, Any], theirs: dict[str, Any], tolerance: float = 1e-10, **more: Any
) -> tuple[hansa.Run, Any]:
    """A run of a preset that agrees with its reference, and the reference's last state; their arguments differ."""
    lab, rate = problem(), theirs.pop("local_lr", LOCAL_LR)
    expected, state = reference(lab, np.zeros(DIM), participants(), STEPS, rate, **theirs)
    run = hansa.run(preset(**words(**mine)), task(lab), rounds=ROUNDS, dtype=torch.float64, keep_params=True, **more)
    assert_agree(run, expected, tolerance)
    return run, state
