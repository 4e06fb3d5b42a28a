"""Millions of clients whose data a function makes: what the population costs to build, and a round of 100 of them.

Prints CPU seconds and megabytes of building the data and the task, then CPU milliseconds a round, beside those of the
same run with a thousand clients; each population in a process of its own. A round should cost the same whatever the
population. ``--out`` keeps the runs with their checkpoints, ``--save`` the numbers as JSON.

Run: python benchmarks/studies/million.py [--clients 1000000 10000000] [--rounds 100] [--preset fedavg] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hansa

SAMPLES, FEATURES, CLASSES, COHORT = 8, 10, 3, 100
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


def peak() -> float:
    """The largest that the process has been, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident() -> float:
    """Megabytes of the process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / (1 << 20)


def built(clients: int) -> hansa.Task:
    """The task over so many clients."""
    test = tuple(map(np.concatenate, zip(*(rows(10**9 + i) for i in range(64)), strict=True)))
    data = hansa.data.from_function(rows, clients=clients, samples=SAMPLES, test=test)
    return hansa.Task(Classifier, nn.functional.cross_entropy, data)


def measured(clients: int, rounds: int, preset: str, out: str | None) -> dict[str, float]:
    """CPU seconds to build, and a round."""
    torch.set_num_threads(1)
    built(10)  # what is imported and compiled once is not the population's
    size, began = resident(), time.process_time()
    task = built(clients)
    make = getattr(hansa.presets, preset)
    sampler = hansa.sample.uniform(count=COHORT)
    method = make(local_lr=0.1, steps=2, batch_size=4, sampler=sampler)
    built_in, held = time.process_time() - began, resident() - size
    began = time.process_time()
    run = hansa.run(method, task, rounds=rounds, workers=1, evaluate_every=0, out=out)
    spent = time.process_time() - began
    return {
        "clients": clients,
        "build_seconds": built_in,
        "build_megabytes": held,
        "milliseconds_a_round": 1e3 * spent / rounds,
        "peak_megabytes": peak(),
        "folder_megabytes": 0.0 if out is None else sum(f.stat().st_size for f in Path(out).rglob("*")) / (1 << 20),
        "up_bytes_a_participant": run.ledger.up_bytes / (rounds * COHORT),
        "down_bytes_a_participant": run.ledger.down_bytes / (rounds * COHORT),
        "test_accuracy": run.history[-1]["test_accuracy"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--clients", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--preset", default="fedavg")
    parser.add_argument("--out", help="a folder that keeps the runs, with checkpoints")
    parser.add_argument("--save", type=Path, help="a file for the numbers, as JSON")
    asked = parser.parse_args()
    rows = []
    for clients in (1000, *asked.clients):
        out = None if asked.out is None else f"{asked.out}/{clients}"
        with multiprocessing.get_context("spawn").Pool(1) as alone:
            rows.append(alone.apply(measured, (clients, asked.rounds, asked.preset, out)))
        print(", ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    if asked.save is not None:
        told = {"preset": asked.preset, "rounds": asked.rounds, "participants": COHORT, "rows": rows}
        asked.save.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
