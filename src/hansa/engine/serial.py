"""The engine protocol, the serial engine, and a loopback engine that sends every message as bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import torch

from hansa.algorithm import Algorithm
from hansa.core.types import Vector, Vectors
from hansa.engine.requests import (
    BatchSizer,
    LoadEvaluationMemory,
    LoadMemory,
    Request,
    RequestFailed,
    execute,
    single_orders,
    unchanged,
)
from hansa.rounds import OpenedRound, client_round
from hansa.rounds.messages import Report, WorkOrder
from hansa.rounds.round import decode_broadcasts
from hansa.training import TaskLike
from hansa.training.evaluation import ClientMetrics, EvaluationJob


class Engine(Protocol):
    """Executes the work orders of a round and evaluates. Results do not depend on the engine.

    ``load_memory`` adds the memory of its clients to an order. It is called in the run's own thread, just before the
    order is executed. Reports may come in any order, and several for the clients of one order.
    """

    def run(self, orders: Sequence[WorkOrder], load_memory: LoadMemory = unchanged) -> Iterator[Report]: ...

    def evaluate(self, vectors: Vectors) -> dict[str, float]: ...

    def close(self) -> None: ...


class BaseEngine:
    """The optional traits of engines, with their defaults."""

    has_sites: bool = False
    """Whether the clients are at sites, which evaluate them and do not send these results."""

    def evaluate_clients(
        self, requests: Sequence[EvaluationJob], load_memory: LoadEvaluationMemory
    ) -> Iterator[list[ClientMetrics]] | None:
        """Yield the results of each request's clients, in the order of the requests; None to let the run evaluate."""
        return None

    def round_opened(self, opened: OpenedRound, oldest: int = 0) -> None:
        """Receive a round's broadcasts before its orders, and the oldest round that the server could resume from:
        clients in another process or on another machine receive the broadcasts as packets."""
        return

    def device_names(self) -> list[str]:
        """Return the names of the devices on which workers have trained, if the run does not know them."""
        return []

    def site_columns(self) -> dict[str, Any]:
        """Return columns of a round's record since the last call; ``sites`` has each site's bytes and seconds."""
        return {}


class Serial(BaseEngine):
    """Executes one order after the other in this process. All other engines give the same results bit for bit."""

    def __init__(self, algorithm: Algorithm, task: TaskLike, dtype: torch.dtype, device: torch.device) -> None:
        self.algorithm, self.task = algorithm, task
        self.trainer = task.trainer(dtype, device)
        self.batch_sizer = BatchSizer(self.trainer)

    def run(self, orders: Sequence[WorkOrder], load_memory: LoadMemory = unchanged) -> Iterator[Report]:
        for batch in self.batch_sizer.batches(orders):
            start = time.perf_counter()
            reports = self._execute([load_memory(order) for order in batch])
            self.batch_sizer.record(batch, time.perf_counter() - start)
            yield from reports

    def _execute(self, requests: Sequence[Request]) -> list[Any]:
        answers = execute(requests, self.algorithm, self.task, self.trainer)
        for answer in answers:
            if isinstance(answer, RequestFailed):
                raise answer
        return answers

    def evaluate(self, vectors: Vectors) -> dict[str, float]:
        return self.task.evaluate(self.trainer, vectors)

    def evaluate_clients(
        self, requests: Sequence[EvaluationJob], load_memory: LoadEvaluationMemory
    ) -> Iterator[list[ClientMetrics]]:
        for request in requests:
            yield from self._execute([load_memory(request)])

    def close(self) -> None:
        return None


class Loopback(Serial):
    """The serial engine with every order, broadcast and report sent as bytes, and a copy of the vectors per client.

    It tests that custom links and components work over a network: results equal those of `Serial` bit for bit.
    """

    def __init__(self, algorithm: Algorithm, task: TaskLike, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(algorithm, task, dtype, device)
        self.sent = 0
        self._received: dict[int, dict[str, dict[int, Vector]]] = {}  # by client, channel and version
        self._start: Vectors = {}
        self._opened: OpenedRound | None = None

    def round_opened(self, opened: OpenedRound, oldest: int = 0) -> None:
        if not self._start:
            self._start = {name: broadcast.vector.clone() for name, broadcast in opened.broadcasts.items()}
        self._opened = opened

    def run(self, orders: Sequence[WorkOrder], load_memory: LoadMemory = unchanged) -> Iterator[Report]:
        assert self._opened is not None, "a loopback engine needs `round_opened` first"
        for order in chain.from_iterable(map(single_orders, orders)):
            data = load_memory(self._opened.for_receiver(order)).to_bytes()
            self.sent += len(data)
            received = WorkOrder.from_bytes(data)
            try:
                bases = self._bases(received)
                (report,) = client_round(self.algorithm, [received], self.trainer, self.task.population, bases)
                self._store(received, bases)
            except Exception as error:
                raise RequestFailed.of(order, error) from error
            yield Report.from_bytes(report.to_bytes())

    def _bases(self, order: WorkOrder) -> Vectors:
        """Return the vectors that the order's packets are relative to; version 0 is the public initial model."""
        vectors = self._received.get(order.reporters[0], {})
        return {
            name: self._start[name] if sent.base == 0 else vectors[name][sent.base]
            for name, sent in order.broadcasts.items()
            if sent.base is not None
        }

    def _store(self, order: WorkOrder, bases: Vectors) -> None:
        vectors = decode_broadcasts(self.algorithm, order, bases)
        assert vectors is not None
        for client in order.reporters:
            channels = self._received.setdefault(client, {})
            for name, vector in vectors.items():
                channels.setdefault(name, {})[order.broadcasts[name].version] = vector.clone()
