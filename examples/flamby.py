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
from pathlib import Path
from typing import Any

import torch

import hansa
from hansa.local.batching import batching
from hansa.study.recipes import flamby

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
    order = flamby.flamby_order(
        sizes, setting["batch_size"], STEPS, setting["rounds"], seed, setting["workers"], inputs, before
    )

    def model() -> torch.nn.Module:
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
    return [flamby.concordance(output, y) for output, y in outputs]


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
