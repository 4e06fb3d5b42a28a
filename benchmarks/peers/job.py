"""What every contender is given and gives back. Needs nothing but NumPy, so that it loads in every environment.

    python with_PEER.py JOB.json

The job names the workload's arrays, the model to start from, where the trained one goes, and the numbers of the
workload. The answer is the time at which each round ended; whoever asked judges the model.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Job:
    data: str
    start: str
    save: str
    answer: str
    model: str
    clients: int
    cohort: int
    steps: int
    batch: int
    lr: float
    rounds: int
    seed: int
    variant: str = ""

    @classmethod
    def given(cls) -> Job:
        """The job named on the command line, or in ``BENCH_JOB`` for processes that have another one."""
        return cls(**json.loads(Path(os.environ.get("BENCH_JOB") or sys.argv[1]).read_text()))


class Arrays:
    """Inputs [n, channels, height, width], targets [n], and each client's rows of them."""

    def __init__(self, job: Job) -> None:
        with np.load(job.data) as held:
            self.inputs: Array = held["inputs"]
            self.targets: Array = held["targets"]
            self._index: Array = held["index"]
            self._offsets: Array = held["offsets"]

    def rows(self, client: int) -> Array:
        return self._index[self._offsets[client] : self._offsets[client + 1]]


def start(job: Job) -> dict[str, Array]:
    """The first model, by the names of ``nn.Sequential``."""
    with np.load(job.start) as held:
        return {name: held[name] for name in held.files}


def passes(rows: Array, steps: int, batch: int, draw: np.random.Generator) -> Array:
    """Row numbers [steps, batch]: pass after pass over a client's rows, each shuffled anew."""
    needed = -(-steps * batch // len(rows))
    return np.concatenate([draw.permutation(rows) for _ in range(needed)])[: steps * batch].reshape(steps, batch)


class Clock:
    """The ends of rounds. The first round is a warm-up: it may compile, start workers and fill caches."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.ends: list[float] = []

    def tick(self) -> None:
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        return [end - start for start, end in zip([self.began, *self.ends], self.ends, strict=False)]


def finish(job: Job, clock: Clock, weights: Mapping[str, Array], **more: Any) -> None:
    """Hand in the trained model and the times."""
    if len(clock.ends) != job.rounds:
        raise SystemExit(f"{len(clock.ends)} rounds were run, {job.rounds} were asked for")
    named: dict[str, Any] = {name: np.asarray(value) for name, value in weights.items()}
    np.savez(job.save, **named)
    Path(job.answer).write_text(json.dumps({"seconds": clock.seconds, **more}))
