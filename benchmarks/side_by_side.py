"""A study of 24 small runs, one after the other and side by side, in turns.

    python side_by_side.py TURNS ANSWER.json

A model of the user's own, 20 clients of unequal size: one run uses one core. Reports the wall time of a study and, for
a machine that is not quiet, the processor time of all processes; medians of turns that interleave.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
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


def main() -> None:
    turns, answer = int(sys.argv[1]), Path(sys.argv[2])
    methods = {
        "FedAvg": hansa.presets.fedavg(local_lr=0.05, steps=8, batch_size=10),
        "FedAMS": hansa.presets.fedams(local_lr=0.05, steps=8, batch_size=10),
        "FedCAMS": hansa.presets.fedcams(local_lr=0.05, steps=8, batch_size=10),
    }
    taken: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    models: dict[int, list[torch.Tensor]] = {}
    study = task()
    for turn in range(turns):
        for count in (1, 2) if turn % 2 == 0 else (2, 1):
            began, used = time.perf_counter(), processor()
            found = hansa.compare(methods, study, rounds=30, seeds=RUNS // len(methods), workers=1, parallel=count)
            taken[count].append((time.perf_counter() - began, processor() - used))
            models[count] = [run.params for runs in found.values() for run in runs]
        assert all(map(torch.equal, models[1], models[2])), "side by side gives other bits"
    rows = {}
    for count, name in ((1, "one after the other"), (2, "two side by side")):
        wall, used = (statistics.median(each) for each in zip(*taken[count], strict=True))
        rows[name] = {"wall": wall, "processor": used, "runs": RUNS / wall}
    rows["two side by side"] |= {"ratio": rows["two side by side"]["runs"] / rows["one after the other"]["runs"]}
    rows["two side by side"] |= {"target": WANTED}
    answer.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
