"""The cost of asynchronous rounds: processor time per update at the minimum cost of training, one step on four rows.

    python benchmarks/asynchronous.py REPEATS ANSWER.json

Runs take turns, a few server steps each, so that a busy machine slows all of them alike: buffered(100, 1000) with 10^3
and with 10^6 clients, and synchronous rounds of 100 participants of 10^6 clients, with the same device profile and
without. Synchronous rounds are measured as columns, which one worker uses for such clients, and with single work
orders and reports, as asynchronous steps, pools and other methods have them. Ratios are medians over the turns.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import hansa
from hansa import data, pace, presets
from hansa.engine import Serial
from hansa.runs.driver import Run

SIZE, SLOTS, ROWS, STEPS = 100, 1000, 4, 5
DEVICES = pace.devices(step_seconds=hansa.local.lognormal(1.0, 1.0), latency=0.1)


class SingleOrders(Serial):
    """One worker that trains one client after the other."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.batch_sizer.size = lambda order: 1  # type: ignore[method-assign]


def task(clients: int) -> hansa.Task:
    draw = np.random.default_rng(0)
    inputs = torch.from_numpy(draw.standard_normal((2000, 20), dtype=np.float32))
    rows = torch.from_numpy(draw.integers(0, 2000, clients * ROWS))
    offsets = torch.arange(clients + 1) * ROWS
    held = data.FederatedData(inputs, (inputs[:, 0] > 0).long(), rows, offsets, classes=2, name="rows")
    return hansa.Task(lambda: hansa.models.build("logistic", classes=2, shape=(20,)), cross_entropy, held)


def started(clients: int, asynchronous: bool, timed: bool = True, engine: type[Serial] = Serial) -> Run:
    work = {"steps": 1, "batch_size": ROWS, "local_lr": 0.1}
    if asynchronous:
        method = presets.fedbuff(size=SIZE, concurrency=SLOTS, sampler=hansa.sample.uniform(count=SIZE), **work)
    else:
        method = presets.fedavg(sampler=hansa.sample.uniform(count=SIZE), **work)
    options = {"profile": DEVICES} if timed else {}
    run = Run(method, task(clients), evaluate_every=0, engine=engine, **options)
    return run.advance(3 * SLOTS // SIZE)  # every slot has been filled, and devices are drawn


def turn(run: Run) -> float:
    """Processor seconds per update of a few server steps."""
    began = time.process_time()
    run.advance(STEPS)
    return (time.process_time() - began) / (STEPS * SIZE)


def main() -> None:
    repeats = int(sys.argv[1])
    torch.set_num_threads(1)
    runs = {
        "synchronous, 10^6 clients": started(10**6, False),
        "synchronous without a clock": started(10**6, False, timed=False),
        "synchronous, single orders": started(10**6, False, engine=SingleOrders),
        "synchronous without a clock, single orders": started(10**6, False, timed=False, engine=SingleOrders),
        "buffered, 10^3 clients": started(10**3, True),
        "buffered, 10^6 clients": started(10**6, True),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(turn(run))
    plain, untimed, single, single_untimed, small, large = times.values()
    answer = {name: {"update": statistics.median(each)} for name, each in times.items()}
    for name, one, other, target in (
        ("10^6 clients against 10^3", large, small, 1.1),
        ("against synchronous rounds with a clock", large, plain, 1.3),
        ("against synchronous rounds without a clock", large, untimed, None),
        ("against synchronous rounds of single orders with a clock", large, single, 1.3),
        ("against synchronous rounds of single orders without a clock", large, single_untimed, None),
    ):
        answer[name] = {"ratio": statistics.median(a / b for a, b in zip(one, other, strict=True)), "target": target}
    Path(sys.argv[2]).write_text(json.dumps(answer))
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
