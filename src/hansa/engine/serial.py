"""The serial engine: one client after the other, in this process. The others must equal it bit for bit."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch

from hansa.algorithm import Algorithm
from hansa.core.types import Vectors
from hansa.engine.requests import Bundle, Recall, RecallExam, as_it_is, blamed
from hansa.rounds import OpenedRound, client_round, client_rounds
from hansa.rounds.messages import Report, WorkOrder
from hansa.training import TaskLike
from hansa.training.client_evaluation import Exam, Marks, marks

log = logging.getLogger("hansa")


class Engine(Protocol):
    """Carries orders to where clients are and reports back, in any order; also evaluates.

    ``recall`` gives an order what its clients remember; it is called, in the run's own thread, when the order is about
    to be carried out.
    """

    def run(self, orders: Sequence[WorkOrder], recall: Recall = as_it_is) -> Iterator[Report]: ...

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

    def opened(self, opened: OpenedRound, oldest: int = 0) -> None: ...


@runtime_checkable
class Metered(Protocol):
    """An engine that counts what travels to and from each site, and what stays inside: it says so once a round."""

    def site_bytes(self) -> dict[str, dict[str, int]]: ...


class Serial:
    """Every cohort in turn on one shell."""

    def __init__(self, algorithm: Algorithm, task: TaskLike, dtype: torch.dtype, device: torch.device) -> None:
        self.algorithm, self.task = algorithm, task
        self.shell = task.shell(dtype, device)
        self.bundle = Bundle(self.shell)

    def run(self, orders: Sequence[WorkOrder], recall: Recall = as_it_is) -> Iterator[Report]:
        at = 0
        while at < len(orders):
            some = orders[at : at + self.bundle.size(orders[at])]
            began = time.perf_counter()
            reports = self._together([recall(order) for order in some])
            self.bundle.note(len(some), time.perf_counter() - began)
            at += len(some)
            yield from reports

    def _together(self, orders: Sequence[WorkOrder]) -> Iterable[Report]:
        """The reports of some orders at once, or of each as it is asked for where one of them fails."""
        if len(orders) > 1:
            try:
                return client_rounds(self.algorithm, orders, self.shell, self.task.population)
            except Exception as error:
                log.debug("%d orders one by one after %s", len(orders), error)
        return self._alone(orders)

    def _alone(self, orders: Sequence[WorkOrder]) -> Iterator[Report]:
        for order in orders:
            try:
                report = client_round(self.algorithm, order, self.shell, self.task.population)
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
