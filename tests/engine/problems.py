"""Small tasks that a worker process can import, some of them with accidents built in."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hansa
from contracts.small import bowls as small_bowls
from hansa.data.federated import FederatedData
from hansa.engine.requests import single_orders
from hansa.rounds import ServerState, open_round
from hansa.rounds.messages import Report, WorkOrder
from hansa.training import quadratic

CPU = torch.device("cpu")
CLIENTS = 6


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))


def convolution() -> nn.Module:
    """With BatchNorm, so that buffers travel."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )


def dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 3))


def data(clients: int = CLIENTS, test: int = 2300) -> FederatedData:
    """Images of 6 x 6 that lie channels-last, dealt unevenly."""
    draw = np.random.default_rng(7)
    sizes = [12 + 9 * i for i in range(clients)]
    rows = sum(sizes)

    def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.from_numpy(draw.integers(0, 3, count))
        x = torch.from_numpy(draw.normal(size=(count, 1, 6, 6)).astype(np.float32)) + 0.5 * y.view(-1, 1, 1, 1)
        return x.contiguous(memory_format=torch.channels_last), y

    offsets = torch.tensor(np.concatenate([[0], np.cumsum(sizes)]))
    index = torch.from_numpy(draw.permutation(rows))
    return FederatedData(*images(rows), index, offsets, *images(test), classes=3, name="images")


def task(model=perceptron, execution: Any = "auto") -> hansa.Task:
    """Perceptron, plain convolution and dropout have native steps unless ``execution`` is "eager"."""
    return hansa.Task(model, nn.functional.cross_entropy, data(), execution=execution)


def bowls() -> quadratic:
    return small_bowls(CLIENTS, 4)


def with_accident(loss, client: int) -> hansa.training.function:
    """Bowls around the client's number; what happens at ``client`` is up to ``loss``."""
    return hansa.training.function(partial(loss, client), clients=CLIENTS, x0=torch.zeros(3, dtype=torch.float64))


def _bowl(client: int, x: torch.Tensor) -> torch.Tensor:
    return ((x - client) ** 2).sum()


def diverging(bad: int, client: int, x: torch.Tensor) -> torch.Tensor:
    return _bowl(client, x) * (float("nan") if client == bad else 1.0)


def raising(bad: int, client: int, x: torch.Tensor) -> torch.Tensor:
    """Fails at the third step: at a rate of 0.1 each step shrinks the loss, 3 bad^2 at first, to 0.64 of it."""
    if client == bad and float(_bowl(client, x.detach())) < 3 * bad**2 * 0.5:
        raise ZeroDivisionError("the sextant is broken")
    return _bowl(client, x)


class dying:
    """Kills its worker at one client, the first time: that is while the file is there."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __call__(self, bad: int, client: int, x: torch.Tensor) -> torch.Tensor:
        if client == bad and os.path.exists(self.marker) and "HANSA_WORKER" in os.environ:
            os.unlink(self.marker)
            os.kill(os.getpid(), signal.SIGKILL)
        return _bowl(client, x)


def first_orders(algorithm: hansa.Algorithm, task, dtype: torch.dtype = torch.float64) -> tuple[WorkOrder, ...]:
    """The orders of a run's first round, one for each client that trains alone."""
    key = hansa.Key(0)
    state = ServerState.start(algorithm, task.start(key, dtype), task.population.count)
    orders = open_round(algorithm, state, task.population, "run", key).orders
    return tuple(single for order in orders for single in single_orders(order))


def vectors_of(order: WorkOrder) -> dict[str, torch.Tensor]:
    """What an order of this process brings."""
    return {name: sent.packets[0].content for name, sent in order.broadcasts.items()}


def reports_equal(left: Report, right: Report) -> bool:
    """Every number of two reports, bit for bit."""
    assert left.cohort == right.cohort
    assert left.dropped == right.dropped
    assert left.memory.keys() == right.memory.keys()
    assert (left.round, left.base, list(left.clients)) == (right.round, right.base, list(right.clients))
    assert list(left.losses) == list(right.losses)
    for place in range(len(left.clients)):
        one, other = left.packets(place), right.packets(place)
        assert {n: bytes(p.bytes) for n, p in one.items()} == {n: bytes(p.bytes) for n, p in other.items()}
    return all(
        rows.keys() == right.memory[client].keys()
        and all(torch.equal(r, right.memory[client][n]) for n, r in rows.items())
        for client, rows in left.memory.items()
    )


def settings(bad: int, client: int, x: torch.Tensor) -> torch.Tensor:
    """A loss that tells how numbers are made: 1 intra-op thread, and 100 more for high matmul precision."""
    threads = torch.get_num_threads() + 100 * (torch.get_float32_matmul_precision() == "high")
    return x.sum() * 0.0 + threads


def drawing(bad: int, client: int, x: torch.Tensor) -> torch.Tensor:
    """Draws from torch's generator, but not at the first step."""
    return _bowl(client, x) + (torch.rand(()) if client == bad and bool(x.any()) else 0.0)
