"""The workloads that everyone runs, as arrays in files: one partition, one first model, one number of steps for all."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from hansa import data
from hansa.core.keys import Key

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))

import modules


@dataclass(frozen=True, slots=True)
class Workload:
    """FedAvg: ``clients`` hold a share each, ``cohort`` of them a round do ``steps`` steps of ``batch``.

    Every client holds at least one batch, so that all batches are full and every contender does the same work.
    Updates count equally. ``rounds`` are those of a repeat; a repeat goes on where the last one ended.
    """

    name: str
    model: str
    clients: int
    cohort: int
    steps: int
    batch: int
    partition: data.Partition
    lr: float = 0.05
    rounds: int = 5
    repeats: int = 3
    rows: int = 60_000

    @property
    def steps_a_round(self) -> int:
        return self.cohort * self.steps

    def module(self) -> nn.Module:
        return modules.module(self.model)

    def __str__(self) -> str:
        return (
            f"{self.model}, {self.clients} clients, {self.cohort} a round, {self.steps} steps of "
            f"{self.batch}, lr {self.lr}, {self.repeats * self.rounds} rounds"
        )


W1 = Workload("W1", "cnn_29k", clients=100, cohort=10, steps=24, batch=50, partition=data.dirichlet(0.6, min_size=50))
W2 = Workload("W2", "mlp", clients=1000, cohort=50, steps=10, batch=20, partition=data.dirichlet(0.6, min_size=20))
WORKLOADS = {workload.name: workload for workload in (W1, W2)}


def fashion() -> tuple[data.Dataset, str]:
    """Fashion-MNIST if its files are there, else the embedded part of it; and a note that says which."""
    if data.is_present("fashion-mnist"):
        found = data.load("fashion-mnist")
        return found, f"Fashion-MNIST ({len(found.targets):,} images)"
    note = (
        "fashion-mini, the embedded 10,000 images of Fashion-MNIST, each dealt several times, for the full set is "
        "not there: the work is the same, accuracies are others. `hansa data get fashion-mnist` fetches it"
    )
    return data.load("fashion-mini"), note


def deal(found: data.Dataset, workload: Workload, seed: int = 0) -> data.FederatedData:
    """The set dealt to the workload's clients; a smaller set is dealt as if repeated to the full one's size."""
    times = -(-workload.rows // len(found.targets))
    labels = found.targets.repeat(times)
    split = workload.partition.split(labels, workload.clients, Key(seed).child("partition"))
    return data.apply_split(found, data.Split(split.index % len(found.targets), split.offsets))


def write(workload: Workload, found: data.Dataset, folder: Path, seed: int = 0) -> None:
    """The workload as plain arrays, images [n, c, h, w], and the first model under the names of its parameters."""
    dealt = deal(found, workload, seed)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(
        folder / f"{workload.name}.npz",
        inputs=dealt.inputs.contiguous().numpy(),
        targets=dealt.targets.numpy(),
        index=dealt.index.numpy(),
        offsets=dealt.offsets.numpy(),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        save_weights(folder / f"{workload.name}-start.npz", workload.module())


def save_weights(path: Path, module: nn.Module) -> None:
    named: dict[str, Any] = {name: value.detach().numpy() for name, value in module.named_parameters()}
    np.savez(path, **named)


def load_weights(path: Path, module: nn.Module) -> nn.Module:
    """The module with the parameters of a file."""
    with np.load(path) as held:
        module.load_state_dict({name: torch.from_numpy(held[name]) for name in held.files})
    return module


def judge(workload: Workload, weights: Path, found: data.Dataset) -> tuple[float, float]:
    """Test accuracy and mean cross-entropy of saved weights: one judge for all contenders."""
    assert found.test_inputs is not None
    assert found.test_targets is not None
    module = load_weights(weights, workload.module()).eval()
    hits, losses = 0, 0.0
    with torch.no_grad():
        for inputs, targets in zip(
            torch.split(found.test_inputs, 500), torch.split(found.test_targets, 500), strict=True
        ):
            logits = module(inputs)
            hits += int((logits.argmax(1) == targets).sum())
            losses += float(F.cross_entropy(logits, targets, reduction="sum"))
    return hits / len(found.test_targets), losses / len(found.test_targets)
