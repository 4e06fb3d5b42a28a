"""The serial engine: one client after the other, in this process. The others must equal it bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from hansa.algorithm import Algorithm
from hansa.engine.request import blamed
from hansa.rounds import client_round
from hansa.rounds.messages import Order, Report
from hansa.tasks import TaskLike
from hansa.types import Vectors


class Engine(Protocol):
    """Carries orders to where clients are and reports back, in any order; also evaluates."""

    def run(self, orders: Sequence[Order]) -> Iterator[Report]: ...

    def evaluate(self, vectors: Vectors) -> dict[str, float]: ...

    def close(self) -> None: ...


class Serial:
    """Every cohort in turn on one shell."""

    def __init__(self, algorithm: Algorithm, task: TaskLike, dtype: torch.dtype, device: torch.device) -> None:
        self.algorithm, self.task = algorithm, task
        self.shell = task.shell(dtype, device)

    def run(self, orders: Sequence[Order]) -> Iterator[Report]:
        for order in orders:
            try:
                report = client_round(self.algorithm, order, self.shell, self.task.population)
            except Exception as error:
                raise blamed(order, error) from error
            yield report

    def evaluate(self, vectors: Vectors) -> dict[str, float]:
        return self.task.evaluate(self.shell, vectors)

    def close(self) -> None:
        return None
