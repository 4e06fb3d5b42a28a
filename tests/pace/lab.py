"""Nine clients of unequal sizes with a linear model, trained on mini-batches, seen by the product and by the
references: a profile with different speeds, and the candidates, batches and durations as plain data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

import hansa
from hansa.local import Work

SIZES = (5, 17, 9, 23, 12, 4, 15, 8, 11)
DIM, BATCH, LOCAL_LR, SEED = 4, 3, 0.05, 7
STEP_SECONDS = (0.5, 1.0, 0.25, 2.0, 4.0, 0.5, 9.0, 1.5, 0.125)
LATENCY = (0.1, 0.2, 0.3, 0.15, 0.25, 0.35, 0.05, 0.12, 0.22)
BANDWIDTH = (800.0, 100.0, 500.0, 250.0, 400.0, 1000.0, 125.0, 640.0, 320.0)
PACKET_BYTES = 24 + 8 * DIM


class Line(nn.Module):
    """y = w x, written as users write their models."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -0.25, 1.0, 0.75]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, targets and owners: every client has a line of its own."""
    draw = np.random.default_rng(11)
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    inputs = draw.normal(size=(len(owners), DIM)) * draw.uniform(0.5, 1.5, size=DIM)
    own = draw.normal(size=(len(SIZES), DIM)) * 2.0
    targets = (inputs * own[owners]).sum(1) + 0.1 * draw.normal(size=len(owners))
    inputs, targets = (array.astype(np.float32).astype(np.float64) for array in (inputs, targets))  # as data is stored
    return inputs, targets, owners


def task() -> hansa.Task:
    inputs, targets, owners = arrays()
    clients = hansa.data.from_arrays(torch.from_numpy(inputs), torch.from_numpy(targets), clients=owners.tolist())
    return hansa.Task(lambda: Line().double(), nn.functional.mse_loss, clients)


def table(folder: Path) -> hansa.pace.device_table:
    """The devices as a file, one row a client."""
    columns = zip(STEP_SECONDS, LATENCY, BANDWIDTH, BANDWIDTH, strict=True)
    rows = [f"{client},{','.join(map(str, row))}" for client, row in enumerate(columns)]
    path = folder / "devices.csv"
    path.write_text("\n".join(["client,step_seconds,latency,down_bandwidth,up_bandwidth", *rows]) + "\n")
    return hansa.pace.device_table(str(path))


def steps(client: int) -> int:
    """One pass over the client's rows."""
    return max(1, SIZES[client] // BATCH)


def seconds(client: int, version: int = 0) -> float:
    """The length of a job: latency, download, one pass over the rows, upload."""
    travel = PACKET_BYTES / BANDWIDTH[client]
    return LATENCY[client] + travel + steps(client) * STEP_SECONDS[client] + travel


class Waves:
    """The candidates of a run: what its sampler selects, in the order of its key."""

    def __init__(self, sampler: hansa.sample.Sampler, clients: int, seed: int = SEED) -> None:
        self.sampler, self.key = sampler, hansa.Key(seed)
        self.population = hansa.core.types.Population((1,) * clients)

    def __call__(self, wave: int) -> list[int]:
        chosen = self.sampler.select(wave, self.population, self.key)
        return [chosen[i] for i in self.key.child("wave", wave).numpy().permutation(len(chosen))]


class Local:
    """Local training in NumPy on the batches that the run draws."""

    def __init__(self, problem: hansa.Task, prox: float = 0.0) -> None:
        self.inputs, self.targets, _ = arrays()
        self.trainer, self.prox = problem.trainer(torch.float64, torch.device("cpu")), prox

    def __call__(self, client: int, x: np.ndarray, version: int) -> np.ndarray:
        address = hansa.Key(SEED).child("local", version, client).child("batch")
        y = x.copy()
        for rows in self.trainer.batches(client, Work(steps(client), min(BATCH, SIZES[client])), address).numpy():
            A, b = self.inputs[rows], self.targets[rows]
            y = y - LOCAL_LR * (2 * A.T @ (A @ y - b) / len(rows) + self.prox * (y - x))
        return y


START = np.array([0.5, -0.25, 1.0, 0.75])
