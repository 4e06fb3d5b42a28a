"""A million clients whose data a function makes: what the population costs to build, and a round of 100 of them.

Prints CPU seconds and megabytes of building the data, the task and the run, then CPU milliseconds a round, beside those
of the same run with a thousand clients. A round should cost the same whatever the population.

Run: python benchmarks/studies/million.py [--clients 1000000] [--rounds 100] [--preset fedavg] [--out runs/million]
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import numpy as np
import torch
from torch import nn

import hansa

SAMPLES, FEATURES, CLASSES = 8, 10, 3
TRUE = np.random.default_rng(0).normal(size=(FEATURES, CLASSES))


def rows(client: int) -> tuple[Any, Any]:
    """The rows of one client: a shifted Gaussian, labelled by one linear rule."""
    draw = np.random.default_rng(client)
    x = draw.normal(draw.normal(size=FEATURES) * 0.3, 1.0, (SAMPLES, FEATURES)).astype(np.float32)
    return x, np.argmax(x @ TRUE, axis=1)


class Classifier(nn.Module):
    """As users write theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def megabytes() -> float:
    """The largest that the process has been."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def built(clients: int) -> hansa.Task:
    """The task over so many clients."""
    test = tuple(map(np.concatenate, zip(*(rows(10**9 + i) for i in range(64)), strict=True)))
    data = hansa.data.by_function(rows, clients=clients, samples=SAMPLES, test=test)
    return hansa.Task(Classifier, nn.functional.cross_entropy, data)


def measured(clients: int, rounds: int, preset: str, out: str | None) -> dict[str, float]:
    """CPU seconds to build, and a round."""
    size, began = megabytes(), time.process_time()
    task = built(clients)
    make = getattr(hansa.presets, preset)
    sampler = hansa.sample.uniform(count=100)
    method = make(local_lr=0.1, steps=2, batch_size=4, sampler=sampler)
    built_in = time.process_time() - began
    began = time.process_time()
    run = hansa.run(method, task, rounds=rounds, workers=1, evaluate_every=0, out=out)
    spent = time.process_time() - began
    return {
        "clients": clients,
        "build_seconds": built_in,
        "build_megabytes": megabytes() - size,
        "milliseconds_a_round": 1e3 * spent / rounds,
        "peak_megabytes": megabytes(),
        "test_accuracy": run.history[-1]["test_accuracy"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--preset", default="fedavg")
    parser.add_argument("--out", help="a folder that keeps the runs, with checkpoints")
    asked = parser.parse_args()
    for clients in (1000, asked.clients):
        out = None if asked.out is None else f"{asked.out}/{clients}"
        found = measured(clients, asked.rounds, asked.preset, out)
        print(", ".join(f"{name} {value:.4g}" for name, value in found.items()))


if __name__ == "__main__":
    main()
