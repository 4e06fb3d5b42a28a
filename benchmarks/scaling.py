"""One point of Hansa's scaling tables, in a separate process so that its memory can be measured.

    python scaling.py POINT.json ANSWER.json

Every client has 60 random images, so that the work per client does not depend on the number of clients.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import hansa
from hansa import data
from hansa.training import models

HELD = 60


@dataclass(frozen=True)
class Point:
    clients: int
    cohort: int
    model: str
    steps: int
    batch: int
    rounds: int
    workers: int | None = None
    images: str = ""  # an .npz with inputs and targets; without one, noise of CIFAR's shape


def federated(point: Point) -> data.FederatedData:
    if point.images:
        with np.load(point.images) as held:
            inputs, targets = torch.from_numpy(held["inputs"]), torch.from_numpy(held["targets"])
    else:
        draw = hansa.Key(0).child("images").numpy()
        inputs = torch.from_numpy(draw.standard_normal((2000, 3, 32, 32), dtype=np.float32))
        targets = torch.from_numpy(draw.integers(0, 10, 2000))
    rows = hansa.Key(0).child("rows").numpy().integers(0, len(targets), point.clients * HELD)
    offsets = torch.arange(point.clients + 1) * HELD
    return data.FederatedData(inputs, targets, torch.from_numpy(rows), offsets, classes=10, name="images")


def measure(algorithm: hansa.Algorithm, task: hansa.Task, point: Point) -> dict[str, Any]:
    """Seconds and processor seconds of each round after the first."""
    ended: list[float] = []

    def stamp(run: Any, record: Any) -> None:
        ended.append(time.process_time())

    run = hansa.run(
        algorithm, task, rounds=point.rounds + 1, workers=point.workers, evaluate_every=0, callbacks=[stamp]
    )
    seconds = [record["seconds"] for record in run.history[1:]]
    return {"seconds": seconds, "processor": np.diff(ended).tolist(), "dim": run.params.numel()}


def main() -> None:
    point = Point(**json.loads(Path(sys.argv[1]).read_text()))
    dealt = federated(point)
    factory = partial(models.build, point.model, classes=10, shape=dealt.shape)
    task = hansa.Task(factory, cross_entropy, dealt)
    algorithm = hansa.presets.fedavg(
        local_lr=0.05, steps=point.steps, batch_size=point.batch, participation=point.cohort / point.clients
    )
    Path(sys.argv[2]).write_text(json.dumps(measure(algorithm, task, point)))


if __name__ == "__main__":
    main()
