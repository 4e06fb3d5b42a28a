"""NIID-Bench's form of SCAFFOLD. Its settings and published numbers are in `test_papers`."""

from __future__ import annotations

import numpy as np
import torch
import yaml

import hansa
from hansa.config import allow_code, build_algorithm, from_yaml
from hansa.study.recipes import library


def test_scaffold_of_niid_bench_is_its_recursion() -> None:
    beta, lr, steps, parties, rounds = 0.9, 0.02, 5, 6, 7
    draw = np.random.default_rng(0)
    sizes = [3, 9, 4, 7, 5, 8]
    inputs = [draw.normal(size=(size, 3)).astype(np.float32).astype(np.float64) for size in sizes]  # as they are kept
    targets = [draw.normal(size=(size, 1)).astype(np.float32).astype(np.float64) for size in sizes]
    owners = np.repeat(np.arange(parties), sizes)
    data = hansa.data.from_arrays(np.concatenate(inputs), np.concatenate(targets), clients=owners)
    task = hansa.Task(lambda: torch.nn.Linear(3, 1, bias=False), torch.nn.functional.mse_loss, data)
    cells = library()["niid-cifar-10-parties"].cells("paper")
    document = next(cell.document for cell in cells if cell.row.startswith("SCAFFOLD, NIID"))
    settings = {"lr": lr, "epochs": steps, "batch_size": 9, "weight_decay": 0.0}
    with allow_code():
        words = [*(f"local.{key}={value}" for key, value in settings.items()), "sample.participation=0.5"]
        method = build_algorithm(from_yaml(yaml.safe_dump(document), words))
    run = hansa.Run(method, task, seed=0, dtype=torch.float64)
    x = run.state.vectors["model"].numpy().copy()
    run.advance(rounds)
    c, own = np.zeros(3), np.zeros((parties, 3))
    for record in run.history:
        chosen, models, changes = record["clients"], [], []
        for i in chosen:
            y, velocity = x.copy(), np.zeros(3)
            for _ in range(steps):
                residual = inputs[i] @ y - targets[i][:, 0]
                gradient = 2 * inputs[i].T @ residual / sizes[i]
                velocity = beta * velocity + gradient + (1 - beta) * (c - own[i])
                y = y - lr * velocity
            changes.append((x - y) / (steps * lr) - c)
            models.append(y)
        for i, change in zip(chosen, changes, strict=True):
            own[i] = own[i] + change
        c = c + np.mean(changes, axis=0)
        x = np.average(models, axis=0, weights=[sizes[i] for i in chosen])
    assert {client for record in run.history for client in record["clients"]} == set(range(parties))
    np.testing.assert_allclose(run.state.vectors["model"].numpy(), x, rtol=1e-10)
    np.testing.assert_allclose(run.state.vectors["control"].numpy(), c, rtol=1e-10)
