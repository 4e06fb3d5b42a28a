"""The serial engine as a network would have it: every message goes through bytes, every client has its own copy.

For tests of own links and parts, and to see that what travels is enough: results equal the serial engine's to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hansa.algorithm import Algorithm
from hansa.core.types import Vector, Vectors
from hansa.engine.requests import Recall, as_it_is, blamed
from hansa.rounds import OpenedRound, client_round
from hansa.rounds.messages import Report, WorkOrder
from hansa.rounds.round import received
from hansa.training import TaskLike


class Loopback:
    """Orders, mail and reports as bytes. Each client holds the vectors it was last sent, by channel and version."""

    def __init__(self, algorithm: Algorithm, task: TaskLike, dtype: torch.dtype, device: torch.device) -> None:
        self.algorithm, self.task = algorithm, task
        self.shell = task.shell(dtype, device)
        self.sent = 0
        self._start = task.start
        self._held: dict[int, dict[str, dict[int, Vector]]] = {}
        self._public: Vectors = {}
        self._opened: OpenedRound | None = None

    def opened(self, opened: OpenedRound, oldest: int = 0) -> None:
        """Hear what the round's messages really are before its orders come."""
        if not self._public:
            self._public = {name: made.vector.clone() for name, made in opened.broadcasts.items()}
        self._opened = opened

    def run(self, orders: Sequence[WorkOrder], recall: Recall = as_it_is) -> Iterator[Report]:
        assert self._opened is not None, "a loopback engine hears `opened` first"
        for order in orders:
            data = recall(self._opened.addressed(order)).to_bytes()
            self.sent += len(data)
            arrived = WorkOrder.from_bytes(data)
            try:
                report = client_round(self.algorithm, arrived, self.shell, self.task.population, self._holding(arrived))
                self._keep(arrived)
            except Exception as error:
                raise blamed(order, error) from error
            yield Report.from_bytes(report.to_bytes())

    def _holding(self, order: WorkOrder) -> Vectors:
        """What the receiver holds of the versions that its mail builds upon; version 0 is public."""
        held = self._held.get(order.reporters[0], {})
        found = {}
        for name, sent in order.broadcasts.items():
            if sent.base is not None:
                found[name] = self._public[name] if sent.base == 0 else held[name][sent.base]
        return found

    def _keep(self, order: WorkOrder) -> None:
        got = received(self.algorithm, order, self._holding(order))
        assert got is not None
        for client in order.reporters:
            mine = self._held.setdefault(client, {})
            for name, vector in got.items():
                mine.setdefault(name, {})[order.broadcasts[name].version] = vector.clone()

    def evaluate(self, vectors: Vectors) -> dict[str, float]:
        return self.task.evaluate(self.shell, vectors)

    def close(self) -> None:
        return None
