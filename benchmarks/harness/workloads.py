"""The workloads that everyone runs, as arrays in files: one partition, one first model, one number of steps for all.

W1 and W2 are this project's own. W3 and W4 are other projects' benchmarks:

- W3 is the CIFAR-10 benchmark of pfl-research (benchmarks/image_classification/configs/baseline.yaml and
  benchmarks/model/pytorch/cnn.py of github.com/apple/pfl-research): 1,000 users with 50 images each, dealt at random, a
  cohort of 50, one epoch in batches of 10 at rate 0.1, two convolutions and dropout, equal weights. Its 1,500 rounds
  are cut to a few.
- W4 is lr_mnist of FLUTE (README.md and experiments/cv_lr_mnist of github.com/microsoft/msrflute): logistic regression
  on MNIST, 1,000 clients, 10 a round, one epoch in batches of 10 at rate 0.03, all of its 100 rounds. Its clients hold
  two digits each and unequal numbers of images; here every client has 60 images, so that all contenders do the same
  work and weights by samples are equal. It also evaluates every 20 rounds, and its class has a sigmoid before the loss.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
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
    Updates count equally. ``rounds`` are those of a repeat; a repeat goes on where the last one ended, unless
    ``whole``: then each is the whole job, from the first model.
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
    whole: bool = False
    dataset: str = "fashion-mnist"
    rows: int = 60_000
    source: str = ""

    @property
    def steps_a_round(self) -> int:
        return self.cohort * self.steps

    def module(self) -> nn.Module:
        return modules.module(self.model)

    def __str__(self) -> str:
        repeats = f"{self.repeats} times {self.rounds}" if self.whole else f"{self.repeats * self.rounds}"
        return (
            f"{self.source}{self.model}, {self.clients} clients, {self.cohort} a round, {self.steps} steps of "
            f"{self.batch}, lr {self.lr}, {repeats} rounds"
        )


W1 = Workload("W1", "cnn_29k", clients=100, cohort=10, steps=24, batch=50, partition=data.dirichlet(0.6, min_size=50))
W2 = Workload("W2", "mlp", clients=1000, cohort=50, steps=10, batch=20, partition=data.dirichlet(0.6, min_size=20))
W3 = Workload(
    "W3", "pfl_cnn", clients=1000, cohort=50, steps=5, batch=10, lr=0.1, rounds=2, repeats=2, dataset="cifar10",
    rows=50_000, partition=data.iid(), source="pfl-research's CIFAR-10 benchmark, of 1,500 rounds: ",
)  # fmt: skip
W4 = Workload(
    "W4", "logistic", clients=1000, cohort=10, steps=6, batch=10, lr=0.03, rounds=100, repeats=2, whole=True,
    dataset="mnist", partition=data.shards(2000, 2), source="FLUTE's lr_mnist: ",
)  # fmt: skip
OWN = {workload.name: workload for workload in (W1, W2)}
OTHERS = {workload.name: workload for workload in (W3, W4)}
WORKLOADS = {**OWN, **OTHERS}

TITLES = {"fashion-mnist": "Fashion-MNIST", "mnist": "MNIST", "cifar10": "CIFAR-10"}


def load(name: str) -> tuple[data.Dataset, str]:
    """A data set if its files are there, else the embedded part of Fashion-MNIST in its shape; and a note on which."""
    if data.is_present(name):
        found = data.load(name)
        return found, f"{TITLES[name]} ({len(found.targets):,} images)"
    note = (
        f"fashion-mini, the embedded 10,000 images of Fashion-MNIST, in place of {TITLES[name]}, each dealt several "
        "times, since the full set is not in the data folder: the work is the same, accuracies are others. "
        f"`hansa data get {name}` fetches it"
    )
    found = data.load("fashion-mini")
    if name == "cifar10":
        found = replace(found, inputs=_coloured(found.inputs), test_inputs=_coloured(found.test_inputs))
    return found, note


def fashion() -> tuple[data.Dataset, str]:
    """Fashion-MNIST if its files are there, else the embedded part of it; and a note that says which."""
    return load("fashion-mnist")


def _coloured(images: torch.Tensor) -> torch.Tensor:
    """Grey images of 28 x 28 as 32 x 32 in three channels."""
    return F.pad(images, (2, 2, 2, 2), value=float(images.min())).expand(-1, 3, -1, -1).contiguous()


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
