"""A new method in a few lines: server momentum that restarts when it points away from the update."""

import os
from dataclasses import dataclass
from typing import Any, Unpack

import torch

import hansa
import hansa.testing
from hansa.core.types import RoundContext, State


@dataclass(frozen=True, slots=True)
class restarted:
    """m <- b m + Delta, or m <- Delta where <m, Delta> < 0 (O'Donoghue and Candes 2015); the step is lr m."""

    lr: float = 0.5
    b: float = 0.9

    def init(self, x: torch.Tensor) -> State:
        return {"m": torch.zeros_like(x)}

    def update(self, delta: torch.Tensor, state: State, ctx: RoundContext) -> tuple[torch.Tensor, State]:
        m = self.b * state["m"] + delta
        m = delta.clone() if torch.dot(m, delta) < 0 else m
        return self.lr * m, {"m": m}


@hansa.component  # so that a configuration may name it: algorithm: new_method:fed_restart
def fed_restart(lr: float = 0.5, **common: Unpack[hansa.presets.Common]) -> hansa.Algorithm:
    return hansa.presets.fedavg(**common).with_server(restarted(lr))


hansa.testing.check(restarted())  # checks the protocol: shapes, purity, state that can be saved
clients = hansa.data.federate("fashion-mini", clients=30)
task = hansa.Task(hansa.models.cnn_29k, torch.nn.functional.cross_entropy, clients)
common: dict[str, Any] = {"local_lr": 0.05, "steps": 5, "batch_size": 20, "participation": 0.2}
methods = {"FedAvg": hansa.presets.fedavg(**common), "restarted": fed_restart(**common)}
print(hansa.compare(methods, task, rounds=int(os.environ.get("ROUNDS", "40")), seeds=2))
