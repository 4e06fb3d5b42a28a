"""The Ray engine against the pool: W1 on two actors and on two workers, and the overhead per order and per round.

    python benchmarks/cluster.py [--rounds 20] [--sizes 1000 1000000 11000000] [--address HOST:PORT]

Rounds of the engines alternate, so that both see the same machine load; medians are reported. The overhead is measured
with nearly idle clients, ``few`` and ``many`` per round: the difference is the overhead of orders, the rest that of a
round. The time of the serial engine is subtracted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parent))

import hansa
from hansa.engine import RayPool, Serial, auto_engine
from hansa.engine.auto import EngineFactory
from hansa.runs.driver import Run
from hansa.training import random_state
from harness.workloads import W1, deal, fashion

CPU = torch.device("cpu")
WARM = 2  # rounds of each before the clock
FEW, MANY = 2, 12


def alternate(method: hansa.Algorithm, task: Any, made: dict[str, EngineFactory], rounds: int) -> dict[str, float]:
    """Seconds of a round by engine, the median, of runs whose rounds are done in turn; nothing is evaluated."""
    seconds: dict[str, list[float]] = {name: [] for name in made}
    runs = {name: Run(method, task, evaluate_every=0) for name in made}
    with random_state.deterministic_arithmetic(), ExitStack() as stack:
        engines = {name: make(runs[name].algorithm, task, torch.float32, CPU) for name, make in made.items()}
        for engine in engines.values():
            stack.callback(engine.close)
            if isinstance(engine, RayPool):
                engine.wait_until_ready()
        for number in range(WARM + rounds):
            for name, run in runs.items():
                record = run._round(engines[name], final=False)
                if number >= WARM:
                    seconds[name].append(record["seconds"])
    first, *others = runs.values()
    assert all(torch.equal(first.params, run.params) for run in others), "the engines disagree"
    return {name: statistics.median(found) for name, found in seconds.items()}


def workload(rounds: int, address: str | None) -> None:
    found, note = fashion()
    task = hansa.Task(W1.module, cross_entropy, deal(found, W1))
    method = hansa.presets.fedavg(
        local_lr=W1.lr, steps=W1.steps, batch_size=W1.batch, participation=W1.cohort / W1.clients
    )
    made = {"pool": auto_engine(2, 10_000), "ray": partial(RayPool, workers=2, address=address)}
    took = alternate(method, task, made, rounds)
    print(f"W1 ({W1}; {note}), two workers, {rounds} rounds of each in turn, models equal:")
    for name, seconds in took.items():
        print(f"  {name:5s} {1e3 * seconds:8.1f} ms a round, {W1.steps_a_round / seconds:8.0f} client-steps/s")
    print(f"  ray takes {took['ray'] / took['pool']:.3f} times the pool's round (wanted: at most 1.15)")


def nothing(client: int, x: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is as little work as there can be."""
    return x[client].square()


def overhead(sizes: Sequence[int], rounds: int, address: str | None) -> None:
    print(
        f"overhead on two actors, beyond what the serial engine takes for the same ({FEW} and {MANY} orders a round):"
    )
    for size in sizes:
        beyond = {}
        for clients in (FEW, MANY):
            task = hansa.training.function(nothing, clients=clients, x0=torch.zeros(size))
            made = {"serial": Serial, "ray": partial(RayPool, workers=2, address=address)}
            took = alternate(hansa.presets.fedavg(steps=1), task, made, rounds)
            beyond[clients] = 1e3 * (took["ray"] - took["serial"])
        order = (beyond[MANY] - beyond[FEW]) / (MANY - FEW)
        print(f"  {size:9d} floats: {order:7.2f} ms an order, {beyond[FEW] - FEW * order:7.2f} ms a round")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1_000, 1_000_000, 11_000_000])
    parser.add_argument("--address", help="of a cluster; by default one is started here")
    given = parser.parse_args()
    workload(given.rounds, given.address)
    overhead(given.sizes, given.rounds, given.address)


if __name__ == "__main__":
    main()
