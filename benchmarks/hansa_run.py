"""Run the job of ``peers/job.py`` with Hansa, in a variant "workers=2 catalogue", "workers=2 own" or "... eager".

"own" is a user-defined class with forward(); "catalogue" is `hansa.models`; "eager" is without native code.

With "bare" in the variant, each round's steps are repeated without the engine; the difference in time is the engine's
overhead.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy

import hansa
from hansa import data
from hansa.local import ClientJobs, train
from hansa.local.solvers import Correction
from hansa.local.work import Work
from hansa.training import models

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from job import Clock, Job, finish


class OwnMLP(nn.Module):
    """W2's model as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(784, 200)
        self.out = nn.Linear(200, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(x.size(0), -1)
        x = F.relu(self.hidden(x))
        logits: torch.Tensor = self.out(x)
        return logits


class OwnCNN(nn.Module):
    """W1's model as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.pool = nn.MaxPool2d(2)
        self.out = nn.Linear(1568, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        logits: torch.Tensor = self.out(torch.flatten(x, 1))
        return logits


OWN: dict[str, type[nn.Module]] = {
    "mlp": OwnMLP,
    "cnn_29k": OwnCNN,
}


def first_model(name: str, start: str, own: bool) -> nn.Module:
    """The model with the weights it starts from; a class of one's own has them in the same order under other names."""
    module = OWN[name]() if own else models.build(name, classes=10, shape=(1, 28, 28))
    with np.load(start) as held, torch.no_grad():
        for parameter, stored in zip(module.parameters(), held.files, strict=True):
            parameter.copy_(torch.from_numpy(held[stored]))
    return module


def main() -> None:
    job = Job.given()
    words = job.variant.split()
    workers = next(int(word.removeprefix("workers=")) for word in words if word.startswith("workers="))
    with np.load(job.data) as held:
        arrays = {name: torch.from_numpy(held[name]) for name in held.files}
    dealt = data.FederatedData(**arrays, classes=10, name="bench")
    factory = partial(first_model, job.model, job.start, "own" in words)
    task = hansa.Task(factory, cross_entropy, dealt, execution="eager" if "eager" in words else "native")
    algorithm = hansa.presets.fedavg(
        local_lr=job.lr, steps=job.steps, batch_size=job.batch, participation=job.cohort / job.clients
    )
    clock = Clock()
    bare = Bare(job, task, algorithm, workers) if "bare" in words else None

    def round_ended(run: hansa.Run, record: dict[str, Any]) -> None:
        clock.tick()
        if bare is not None:
            bare.repeat(record)

    run = hansa.run(
        algorithm,
        task,
        rounds=job.rounds,
        seed=job.seed,
        workers=workers,
        evaluate_every=0,
        callbacks=[round_ended],
    )
    with np.load(job.start) as held:  # under the names of the workload
        named = {name: v.detach().numpy() for name, v in zip(held.files, run.model.parameters(), strict=True)}
    more = {} if bare is None else {"bare": bare.seconds, "round": bare.rounds}
    finish(job, clock, named, **more)


class Bare:
    """The same steps of the same clients on the same batches, in as many threads, and nothing else."""

    def __init__(self, job: Job, task: hansa.Task, algorithm: hansa.Algorithm, workers: int) -> None:
        self.job, self.algorithm = job, algorithm
        self.key = hansa.Key(job.seed)
        self.trainers = [task.trainer(torch.float32, torch.device("cpu")) for _ in range(workers)]
        self.start = task.start(self.key, torch.float32)["model"]
        self.seconds: list[float] = []
        self.rounds: list[float] = []

    def repeat(self, record: dict[str, Any]) -> None:
        """Time the steps of a round that has just ended; the batches are drawn before the clock starts. Each thread
        takes the next client when it is done with one, as the engine's workers do."""
        self.rounds.append(record["seconds"])
        work = Work(self.job.steps, self.job.batch)
        left: deque[tuple[int, Any, Any]] = deque()
        for client in record["clients"]:
            key = self.key.child("local", record["round"] - 1, client)
            rows = self.trainers[0].batches(client, work, key.child("batch"))
            left.append((client, rows, self.algorithm.local.local_step(0, self.start, Correction())))
        threads = [threading.Thread(target=self._steps, args=(trainer, left, work)) for trainer in self.trainers[1:]]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        self._steps(self.trainers[0], left, work)
        for thread in threads:
            thread.join()
        self.seconds.append(time.perf_counter() - began)

    def _steps(self, trainer: Any, left: deque[tuple[int, Any, Any]], work: Work) -> None:
        torch.set_num_threads(1)  # each thread has a number of its own
        while True:
            try:
                client, rows, step = left.popleft()
            except IndexError:
                return
            train(trainer, ClientJobs.of(self.start, client, work, step, self.key, batches=(rows,)))


if __name__ == "__main__":
    main()
