"""Two tables of ratios in processor time, measured in alternation in one process on one thread.

    python ratios.py gossip TURNS ANSWER.json    a gossiping client-step against one of FedAvg on the same model
    python ratios.py scale TURNS ANSWER.json     many clients, many participants, many parameters

The data are noise of Fashion-MNIST's shape: the cost of a step does not depend on the values.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hansa
from hansa import compress, data
from hansa.engine.serial import Serial
from hansa.gossip import Topology, complete, erdos_renyi, ring, star, torus
from hansa.runs.driver import Run
from hansa.training import models

CLIENTS, CLUSTERS, REPORTERS, HELD = 20, 4, 2, 100
SHAPE = (1, 28, 28)


class Kept(Serial):
    """Stays from turn to turn."""

    def close(self) -> None:
        """Nothing ends yet."""


class Turns:
    """A run that goes on a round at a time, with its engine kept; ``steps`` are the client-steps of a round."""

    def __init__(self, algorithm: hansa.Algorithm, task: hansa.Task, steps: int) -> None:
        self.steps, self.seconds = steps, list[float]()
        held: list[Kept] = []

        def engine(*given: Any) -> Kept:
            if not held:
                held.append(Kept(*given))
            return held[0]

        self.run = Run(algorithm, task, evaluate_every=0, engine=engine)

    def turn(self) -> None:
        began = time.process_time()
        self.run.advance(1)
        self.seconds.append((time.process_time() - began) / self.steps)

    @property
    def step(self) -> float:
        return statistics.median(self.seconds[1:])


def noise(clients: int, held: int, shape: tuple[int, ...] = SHAPE, rows: int = 2000) -> data.FederatedData:
    draw = hansa.Key(0).child("noise").numpy()
    inputs = torch.from_numpy(draw.standard_normal((rows, *shape), dtype="float32"))
    targets = torch.from_numpy(draw.integers(0, 10, rows))
    index = torch.arange(clients * held) % rows
    return data.FederatedData(inputs, targets, index, torch.arange(clients + 1) * held, classes=10, name="noise")


GRAPHS: dict[str, Topology] = {"": ring(), ", complete": complete(), ", star": star(), ", random": erdos_renyi(0.5)}
"""The graphs of a cluster; the ring is the default."""


def gossiping(model: str, task: hansa.Task, steps: int, batch: int) -> dict[str, Turns]:
    """The methods of a table; one that says nothing else gossips on rings of 5."""
    presets, everyone, few = hansa.presets, CLIENTS * steps, CLUSTERS * REPORTERS * steps
    words: dict[str, Any] = {"steps": steps, "batch_size": batch, "local_lr": 0.05}
    grouped = {**words, "clusters": CLUSTERS, "reporters": REPORTERS, "server_lr": 0.01}
    signs = {"gossip_compressor": compress.sign(), "consensus_rate": 0.1}
    runs = {
        "FedAvg": Turns(presets.fedavg(participation=1.0, **words), task, everyone),
        "CAFGA adapted, 2 of 2 step": Turns(presets.cafga(reporters_only=True, **grouped), task, few),
    }
    for name, graph in GRAPHS.items() if model == "mlp" else [("", ring())]:
        runs |= {
            f"HA-Fed, all step{name}": Turns(presets.ha_fed(topology=graph, **grouped), task, everyone),
            f"CAFGA, 2 of 5 step{name}": Turns(presets.cafga(topology=graph, **grouped), task, few),
            f"HA-Fed, gossip by sign{name}": Turns(presets.ha_fed(topology=graph, **grouped, **signs), task, everyone),
        }
    if model == "mlp":
        whole = {**grouped, "clusters": 1, "topology": torus()}
        runs["HA-Fed, all step, torus of 20"] = Turns(presets.ha_fed(**whole), task, everyone)
        runs["HA-Fed, gossip by sign, torus of 20"] = Turns(presets.ha_fed(**whole, **signs), task, everyone)
    return runs


def gossip(turns: int) -> dict[str, Any]:
    """Microseconds of a client-step, and in those of FedAvg's."""
    found: dict[str, Any] = {}
    for model, steps, batch in (("mlp", 10, 20), ("cnn_29k", 6, 50)):
        task = hansa.Task(partial(models.build, model, classes=10, shape=SHAPE), cross_entropy, noise(CLIENTS, HELD))
        runs = gossiping(model, task, steps, batch)
        for _ in range(turns + 1):
            for run in runs.values():
                run.turn()
        for name, run in runs.items():
            pairs = zip(run.seconds[1:], runs["FedAvg"].seconds[1:], strict=True)
            ratio = statistics.median(own / plain for own, plain in pairs)
            found[f"{model}, {name}"] = {"step": run.step, "ratio": ratio, "target": 1.3 if model == "mlp" else 1.05}
    return found


class Tiny(nn.Module):
    """A model whose steps cost next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(x)
        return logits


def resident() -> float:
    """Megabytes of this process in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20)


def two_workers(task: hansa.Task, turns: int) -> float:
    """Time of a run on two workers, in that of one; steps that take less than handing them over stay where they are."""
    algorithm = hansa.presets.fedavg(participation=1.0, steps=2, batch_size=2, local_lr=0.1)
    taken: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(min(turns, 3) + 1):
        for workers, times in taken.items():
            began = time.perf_counter()
            hansa.run(algorithm, task, rounds=20, workers=workers, evaluate_every=0)
            times.append(time.perf_counter() - began)
    return min(taken[2]) / min(taken[1])


def scale(turns: int) -> dict[str, Any]:
    """Seconds, and what is asked of them."""
    found: dict[str, Any] = {}
    before, began = resident(), time.process_time()
    dealt = noise(1_000_000, 4, (16,))
    task = hansa.Task(Tiny, cross_entropy, dealt)
    few = Turns(hansa.presets.fedavg(participation=1e-5, steps=2, batch_size=2, local_lr=0.1), task, 1)
    found["1,000,000 clients: built, s"] = {"value": time.process_time() - began, "target": 2.0}
    found["1,000,000 clients: memory, MB"] = {"value": resident() - before, "target": 300.0}
    small = hansa.Task(Tiny, cross_entropy, noise(1000, 4, (16,)))
    same = Turns(hansa.presets.fedavg(participation=1e-2, steps=2, batch_size=2, local_lr=0.1), small, 1)
    many = Turns(hansa.presets.fedavg(participation=1e-2, steps=2, batch_size=2, local_lr=0.1), task, 10_000)
    for _ in range(turns + 1):
        few.turn()
        same.turn()
    for _ in range(turns + 1):  # the median of two rounds would be half a garbage collection, if one has it
        many.turn()
    found["1,000,000 clients, 10 a round: x a round of 1,000"] = {"value": few.step / same.step, "target": 1.1}
    found["10,000 participants of a tiny model, us each"] = {"value": many.step * 1e6, "target": 15.0}
    workers = two_workers(small, turns)
    found["a tiny model, 1,000 clients a round: two workers, x the time of one"] = {"value": workers, "target": 1.05}
    return found


def main() -> None:
    torch.set_num_threads(1)
    what, turns, answer = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    answer.write_text(json.dumps({"gossip": gossip, "scale": scale}[what](turns)))


if __name__ == "__main__":
    main()
