"""The serial engine: one client after the other, in this process. The others must equal it bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch

from hansa.algorithm import Algorithm
from hansa.engine.request import Recall, RecallExam, as_it_is, blamed
from hansa.rounds import Opened, client_round
from hansa.rounds.messages import Order, Report
from hansa.tasks import TaskLike
from hansa.tasks.exams import Exam, Marks, marks
from hansa.types import Vectors


class Engine(Protocol):
    """Carries orders to where clients are and reports back, in any order; also evaluates.

    ``recall`` gives an order what its clients remember; it is called, in the run's own thread, when the order is about
    to be carried out.
    """

    def run(self, orders: Sequence[Order], recall: Recall = as_it_is) -> Iterator[Report]: ...

    def evaluate(self, vectors: Vectors) -> dict[str, float]: ...

    def close(self) -> None: ...


@runtime_checkable
class Examining(Protocol):
    """An engine that tests clients one by one; for others the run does so itself."""

    def examine(self, exams: Sequence[Exam], recall: RecallExam) -> Iterator[list[Marks]]:
        """The marks of each exam's clients, in the order of the exams."""
        ...


@runtime_checkable
class Networked(Protocol):
    """An engine whose clients are elsewhere: it is told each round's broadcasts, which it carries as packets, and the
    oldest round that the server could go back to, so that clients keep what they need for that."""

    def opened(self, opened: Opened, oldest: int = 0) -> None: ...


@runtime_checkable
class Metered(Protocol):
    """An engine that counts what travels to and from each site, and what stays inside: it says so once a round."""

    def site_bytes(self) -> dict[str, dict[str, int]]: ...


class Serial:
    """Every cohort in turn on one shell."""

    def __init__(self, algorithm: Algorithm, task: TaskLike, dtype: torch.dtype, device: torch.device) -> None:
        self.algorithm, self.task = algorithm, task
        self.shell = task.shell(dtype, device)

    def run(self, orders: Sequence[Order], recall: Recall = as_it_is) -> Iterator[Report]:
        for order in orders:
            try:
                report = client_round(self.algorithm, recall(order), self.shell, self.task.population)
            except Exception as error:
                raise blamed(order, error) from error
            yield report

    def evaluate(self, vectors: Vectors) -> dict[str, float]:
        return self.task.evaluate(self.shell, vectors)

    def examine(self, exams: Sequence[Exam], recall: RecallExam) -> Iterator[list[Marks]]:
        for exam in exams:
            try:
                found = marks(self.algorithm, self.task, self.shell, recall(exam))
            except Exception as error:
                raise blamed(exam, error) from error
            yield found

    def close(self) -> None:
        return None
