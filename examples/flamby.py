"""FLamby's benchmarks with FLamby's own batches: its published numbers come out of Hansa's presets, digit for digit.

    python examples/flamby.py                                   # four hospitals, six strategies, seed 42
    python examples/flamby.py --seeds 42 43 44 45 46            # all published seeds
    python examples/flamby.py fed-tcga-brca --data FOLDER       # six regions; FOLDER/flamby has FLamby's two files

FLamby's definitions, each by a word: means weighted by samples (`weights="samples"`), last batches of a pass that are
shorter, and passes that continue in the next round (`batching("short", continued=True)`), SCAFFOLD weighted by
samples. `flamby_order` shuffles as its DataLoaders did, and the first model is the one that its seed gives.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hansa
from hansa.core.keys import Key
from hansa.local.work import PassOrder, batching
from hansa.study.recipes import flamby
from hansa.training.metrics import c_index

# rounds, batch size, and FLamby's tuned rates: local, server, mu
SETTINGS: dict[str, dict[str, Any]] = {
    "fed-heart-disease": {
        "rounds": 15, "batch_size": 4, "workers": False,
        "FedAvg": {"local_lr": 0.001},
        "FedProx": {"local_lr": 0.001, "mu": 0.01},
        "Scaffold": {"local_lr": 0.001},
        "FedAdam": {"local_lr": 0.01, "server_lr": 0.01},
        "FedYogi": {"local_lr": 0.003162, "server_lr": 0.01},
        "FedAdagrad": {"local_lr": 0.003162, "server_lr": 0.316228},
    },
    "fed-tcga-brca": {
        "rounds": 5, "batch_size": 8, "workers": True,
        "FedAvg": {"local_lr": 0.1},
        "FedProx": {"local_lr": 0.1, "mu": 0.1},
        "Scaffold": {"local_lr": 0.01},
        "FedAdam": {"local_lr": 0.01, "server_lr": 0.1},
        "FedYogi": {"local_lr": 0.01, "server_lr": 0.1},
        "FedAdagrad": {"local_lr": 0.01, "server_lr": 1.0},
    },
}  # fmt: skip
STRATEGIES = ("FedAvg", "FedProx", "Scaffold", "FedAdam", "FedYogi", "FedAdagrad")
STEPS = 100


@dataclass(frozen=True, slots=True)
class flamby_order(PassOrder):
    """The passes that FLamby's DataLoaders draw in one run of its benchmark.

    A DataLoader draws two numbers from PyTorch's global generator for each pass, the second of which seeds the
    permutation. Without worker processes the second is drawn at the first batch of the pass, with them when the pass
    begins, and then the first pass of a strategy begins before the benchmark sets the seed again: its order continues
    the draws of the strategy before it in the same process.

    Args:
        sizes: The training rows of each client.
        batch_size: Rows per batch.
        steps: Local steps per round.
        rounds: The number of rounds.
        seed: The benchmark's seed.
        workers: Whether the loaders had worker processes.
        inputs: The model's inputs, whose initial weights are drawn before the first strategy of a process.
        before: The strategy before it in the same process: "all" if all clients took part in every round, "cycle" for
            FLamby's Cyclic, None for none.
    """

    sizes: tuple[int, ...]
    batch_size: int
    steps: int
    rounds: int
    seed: int
    workers: bool = False
    inputs: int = 1
    before: str | None = None

    def permutation(self, client: int, samples: int, number: int, key: Key) -> Sequence[int]:
        """Return FLamby's order of the rows in a pass of a client."""
        return _draw_passes(self)[client][number]


class _Loader:
    """The draws of a DataLoader that shuffles, and the permutations of its passes."""

    def __init__(self, rows: int, batch_size: int, workers: bool) -> None:
        self.rows, self.batches, self.workers = rows, math.ceil(rows / batch_size), workers
        self.passes: list[tuple[int, ...]] = []
        self.begin()

    def begin(self) -> None:
        _draw()
        self.left = 0 if self.workers else None
        if self.workers:
            self._shuffle()

    def _shuffle(self) -> None:
        generator = torch.Generator()
        generator.manual_seed(_draw())
        self.passes.append(tuple(torch.randperm(self.rows, generator=generator).tolist()))
        self.left = self.batches

    def batch(self) -> None:
        if self.left is None:
            self._shuffle()
        elif self.left == 0:
            self.begin()
            if self.left is None:
                self._shuffle()
        assert self.left is not None
        self.left -= 1


def _draw() -> int:
    return int(torch.empty((), dtype=torch.int64).random_().item())


@lru_cache(maxsize=64)
def _draw_passes(order: flamby_order) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return the permutations by client and pass. PyTorch's global generator is left as it was."""
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(order.seed)
        nn.Linear(order.inputs, 1)
        if order.before is not None:
            _run_loaders(order, _visits(order))
            for _ in range(len(order.sizes) + 1):  # every evaluation of a test set draws once
                _draw()
        return tuple(
            tuple(loader.passes) for loader in _run_loaders(order, [list(range(len(order.sizes)))] * order.rounds)
        )
    finally:
        torch.random.set_rng_state(state)


def _run_loaders(order: flamby_order, visits: Sequence[Sequence[int]]) -> list[_Loader]:
    loaders = [_Loader(size, order.batch_size, order.workers) for size in order.sizes]
    torch.manual_seed(order.seed)
    for clients in visits:
        for client in clients:
            for _ in range(order.steps):
                loaders[client].batch()
    return loaders


def _visits(order: flamby_order) -> list[list[int]]:
    """Return the clients of each round of the strategy before."""
    clients = len(order.sizes)
    if order.before == "all":
        return [list(range(clients))] * order.rounds
    cycle: list[Any] = []
    generator = np.random.default_rng(order.seed)
    while len(cycle) < order.rounds:
        cycle += generator.permutation(clients).tolist()
    return [[client] for client in cycle[: order.rounds]]


def read_published() -> dict[tuple[str, str, int], list[float]]:
    """FLamby's numbers by benchmark, strategy and seed: each client's test rows, then the pooled ones."""
    published: dict[tuple[str, str, int], list[float]] = {}
    with open(Path(__file__).with_name("flamby_published.csv"), newline="") as file:
        for line in csv.DictReader(row for row in file if not row.startswith("#")):
            key = line["benchmark"], line["strategy"], int(line["seed"])
            published.setdefault(key, []).append(float(line["metric"]))
    return published


def train(name: str, strategy: str, seed: int, benchmark: flamby.Benchmark) -> list[float]:
    """Train one strategy and return its metric on each client's test rows and on the pooled ones."""
    setting = SETTINGS[name]
    heart = name == "fed-heart-disease"
    inputs = benchmark.test_inputs.shape[1]
    before = None
    alone = strategy == "Scaffold" and seed == 42  # the others ran in one process, in alphabetical order
    if setting["workers"] and not alone:
        before = "cycle" if strategy == "FedAdagrad" else "all"
    sizes = tuple(len(rows.targets) for rows in benchmark.sites.values())
    order = flamby_order(
        sizes, setting["batch_size"], STEPS, setting["rounds"], seed, setting["workers"], inputs, before
    )

    def model() -> nn.Module:
        torch.manual_seed(seed)
        return flamby.LogisticModel(inputs) if heart else flamby.LinearModel(inputs)

    options: dict[str, Any] = dict(setting[strategy])
    if strategy in ("FedAdam", "FedYogi", "FedAdagrad"):
        options |= {"b1": 0.9, "eps": 1e-8}
    if strategy in ("FedAdam", "FedYogi"):
        options["b2"] = 0.999
    algorithm = getattr(hansa.presets, strategy.lower())(
        steps=STEPS,
        batch_size=setting["batch_size"],
        batches=batching("short", continued=True, order=order),
        weights="samples",
        **options,
    )
    loss = flamby.binary_cross_entropy if heart else flamby.cox_loss
    task = hansa.Task(model, loss, benchmark.federated(name))
    trained = hansa.run(algorithm, task, rounds=setting["rounds"], seed=seed, workers=1).model
    tests = [(rows.test_inputs, rows.test_targets) for rows in benchmark.sites.values()]
    with torch.no_grad():
        outputs = [(trained(x), y) for x, y in (*tests, (benchmark.test_inputs, benchmark.test_targets))]
    if heart:
        return [int(((output > 0.5) == (y > 0.5)).sum()) / len(y) for output, y in outputs]
    values = [c_index(output, y) for output, y in outputs]
    return [0.5 if math.isnan(value) else value for value in values]  # where no pair is comparable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", nargs="?", default="fed-heart-disease", choices=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--data", help="the data folder; by default that of HANSA_DATA")
    chosen = parser.parse_args()
    heart = chosen.benchmark == "fed-heart-disease"
    benchmark = flamby.read_heart_disease() if heart else flamby.read_tcga_brca(chosen.data)
    published = read_published()
    differing = 0
    for strategy in chosen.strategies:
        for seed in chosen.seeds:
            ours = train(chosen.benchmark, strategy, seed, benchmark)
            theirs = published.get((chosen.benchmark, strategy, seed))
            far = max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) if theirs else float("nan")
            differing += far > 1e-12
            print(f"{strategy:10} seed {seed}: pooled {ours[-1]:.6f}, largest difference from FLamby {far:.1e}")
    print(f"{differing} of {len(chosen.strategies) * len(chosen.seeds)} runs differ from FLamby's published numbers")


if __name__ == "__main__":
    main()
