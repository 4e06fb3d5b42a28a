"""Studies of 24 small runs, one after the other and side by side, in turns.

    python side_by_side.py TURNS ANSWER.json

A model of the user's own, 20 clients of unequal size: one run uses one core. Two lengths: runs of about half a second,
and runs so short that what a study does once is a part of its time. Reports the wall time of a study and, for
a machine that is not quiet, the processor time of all processes; medians of turns that interleave.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import hansa

RUNS, WANTED = 24, 1.8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(20, 32), nn.LayerNorm(32), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.norm(self.first(x))))
        return out


def task() -> hansa.Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 20, generator=generator)
    y = (x @ torch.randn(20, 3, generator=generator)).argmax(1)
    data = hansa.data.from_arrays(x, y, clients=20, partition=hansa.data.dirichlet(0.5), test=(x[:200], y[:200]))
    return hansa.Task(Net, nn.functional.cross_entropy, data)


def processor() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


METHODS = {
    "FedAvg": hansa.presets.fedavg(local_lr=0.05, steps=8, batch_size=10),
    "FedAMS": hansa.presets.fedams(local_lr=0.05, steps=8, batch_size=10),
    "FedCAMS": hansa.presets.fedcams(local_lr=0.05, steps=8, batch_size=10),
}
SEEDS = RUNS // len(METHODS)
ROUNDS = (150, 30)
NAMES = {1: "one after the other", 2: "two side by side"}


def execute(study: hansa.Task, seeds: Sequence[int], parallel: int, rounds: int) -> list[torch.Tensor]:
    """Return the models of a study."""
    found = hansa.compare(METHODS, study, rounds=rounds, seeds=seeds, workers=1, parallel=parallel)
    return [run.params for runs in found.values() for run in runs]


def measure(study: hansa.Task, seeds: Sequence[int], turns: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the rows of the table for runs of so many rounds."""
    taken: dict[int, list[tuple[float, float]]] = {parallel: [] for parallel in NAMES}
    models: dict[int, list[torch.Tensor]] = {}
    for turn in range(turns):
        for parallel in list(NAMES)[:: 1 if turn % 2 == 0 else -1]:
            began, used = time.perf_counter(), processor()
            models[parallel] = execute(study, seeds, parallel, rounds)
            taken[parallel].append((time.perf_counter() - began, processor() - used))
        assert all(map(torch.equal, models[1], models[2])), "side by side gives other bits"
    rows: dict[str, dict[str, float]] = {}
    for parallel, name in NAMES.items():
        wall, used = (statistics.median(times) for times in zip(*taken[parallel], strict=True))
        rows[name] = {"wall": wall, "processor": used, "runs": RUNS / wall}
    rows[NAMES[2]] |= {"ratio": rows[NAMES[2]]["runs"] / rows[NAMES[1]]["runs"], "target": WANTED}
    return {f"{rounds} rounds, {name}": row for name, row in rows.items()}


def main() -> None:
    turns, answer = int(sys.argv[1]), Path(sys.argv[2])
    study, seeds = task(), range(SEEDS)
    execute(study, seeds[:1], 1, rounds=2)  # what a process does once is not part of a comparison
    rows: dict[str, dict[str, float]] = {}
    for rounds in ROUNDS:
        rows |= measure(study, seeds, turns, rounds)
    answer.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
