"""NIID-Bench's settings: its published table, its partitions by their definitions, and its form of SCAFFOLD."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
import yaml

import hansa
from hansa.config import allow_code, build_algorithm, from_yaml
from hansa.study.recipes import library

ROWS = ("FedAvg", "FedProx", "SCAFFOLD, NIID-Bench's form", "FedNova")
TEN = {
    "two labels": (49.8, 50.7, 49.1, 46.5),
    "Dirichlet 0.5": (68.2, 67.9, 69.8, 66.8),
    "noise 0.1": (68.9, 69.3, 70.1, 68.5),
    "sizes 0.5": (72.0, 71.2, 62.4, 10.0),
}
HUNDRED = {
    "two labels": (45.3, 39.3, 10.0, 48.0),
    "Dirichlet 0.5": (59.4, 58.8, 10.0, 60.0),
    "iid": (65.6, 66.0, 10.0, 66.1),
}
TABLES: dict[str, Mapping[str, tuple[float, ...]]] = {"niid-cifar-10": TEN, "niid-cifar-10-parties": HUNDRED}
"""The leader board of NIID-Bench's README, in the order of `ROWS`."""

PROXIMAL = {
    "niid-cifar-10": {"two labels": 0.01, "Dirichlet 0.5": 0.001, "noise 0.1": 0.01, "sizes 0.5": 0.01},
    "niid-cifar-10-parties": {"two labels": 0.001, "Dirichlet 0.5": 0.001, "iid": 0.01},
}


@pytest.mark.parametrize("name", TABLES)
def test_published_numbers_and_settings_are_those_of_the_leader_board(name: str) -> None:
    parties, share, rounds = (10, 1.0, 50) if name == "niid-cifar-10" else (100, 0.1, 500)
    published = {}
    for cell in library()[name].cells("paper"):
        if cell.published:
            published[cell.column, cell.row] = cell.published["accuracy"].value
        config = from_yaml(yaml.safe_dump(cell.document))
        assert (config.data.name, config.data.clients, config.rounds) == ("cifar10", parties, rounds)
        assert cell.document["sample"] == {"participation": share}
        assert (config.local.epochs, config.local.batch_size) == (10, 64)
        plain = cell.row == "SCAFFOLD"
        assert (config.local.lr, config.local.momentum) == ((0.1, 0) if plain else (0.01, 0.9))
        if cell.row == "FedProx":
            assert cell.document["algorithm"]["mu"] == PROXIMAL[name][cell.column]
    assert published == {
        (column, row): value for column, values in TABLES[name].items() for row, value in zip(ROWS, values, strict=True)
    }


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
