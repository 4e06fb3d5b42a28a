"""Actors of a Ray cluster as workers: more cores than one machine has, under one owner. ``pip install 'hansa[ray]'``.

Every message goes in its byte form; the round's vectors, the method and the task go once into the cluster's object
store, a copy a node. An actor or a node that is lost costs nothing but time: its orders are done again
elsewhere, with the same keys and so the same bits. One trust domain: whoever reaches the cluster can run code on it.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from hansa.algorithm import Algorithm
from hansa.engine.request import (
    Arithmetic,
    Divisible,
    EvaluationRequest,
    Failure,
    Recall,
    Request,
    as_it_is,
    cost,
    describe,
    perform,
)
from hansa.errors import HansaError, whole
from hansa.rounds.messages import Delivery, Order, Report
from hansa.tasks import TaskLike
from hansa.types import Vectors

log = logging.getLogger("hansa")

_DEATHS = 3  # an order may cost this many actors
_AHEAD = 2  # orders given to an actor at a time, so that it never waits for the next


class _Worker:
    """What runs in an actor: the method, the task and a shell of its own."""

    def __init__(self, algorithm: Algorithm, task: TaskLike, dtype: torch.dtype, arithmetic: Arithmetic) -> None:
        os.environ["HANSA_WORKER"] = "1"
        arithmetic.apply()
        self.algorithm, self.task = algorithm, task
        self.shell = task.shell(dtype, torch.device("cpu"))

    def train(self, data: bytes, arrays: dict[str, np.ndarray[Any, Any]]) -> bytes | Failure:
        """An order as bytes and the round's vectors in; a report as bytes out."""
        mail = {name: Delivery.whole(_tensor(array)) for name, array in arrays.items()}
        answer = perform(replace(Order.from_bytes(data), mail=mail), self.algorithm, self.task, self.shell)
        return answer if isinstance(answer, Failure) else bytes(answer.to_bytes())

    def evaluate(self, arrays: dict[str, np.ndarray[Any, Any]], piece: tuple[int, int] | None) -> Any:
        """One piece of an evaluation."""
        vectors = {name: _tensor(array) for name, array in arrays.items()}
        return perform(EvaluationRequest(vectors, piece), self.algorithm, self.task, self.shell)

    def pid(self) -> int:
        """The process it runs in."""
        return os.getpid()


@dataclass(slots=True, eq=False)
class _Job:
    request: Request
    order: Order | None = None
    recall: Recall = as_it_is
    deaths: int = 0


@dataclass(slots=True, eq=False)
class _Actor:
    handle: Any
    waiting: dict[Any, _Job] = field(default_factory=dict)


class RayPool:
    """An engine over ``workers`` actors, by default one a CPU of the cluster at ``address``, or of this machine.

    A cluster that was there already is used and left as it is; one that had to be started ends with the run.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        task: TaskLike,
        dtype: torch.dtype,
        device: torch.device,
        *,
        workers: int | None = None,
        address: str | None = None,
    ) -> None:
        if workers is not None:
            whole("RayPool", "workers", workers)
        if device.type != "cpu":
            raise HansaError(f"RayPool(device={device}): actors train on CPUs. Use the pool of threads for {device}.")
        self.ray = ray = _ray()
        self.task = task
        self._own = not ray.is_initialized()
        if self._own:
            ray.init(
                address=address or "local", include_dashboard=False, log_to_driver=False, configure_logging=False,
                **({} if address else {"num_cpus": workers or os.cpu_count()}),
            )  # fmt: skip
        self._setup = [ray.put(part) for part in (algorithm, task)]
        self._rest = (dtype, Arithmetic.here())
        count = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._actors = [self._hire() for _ in range(count)]
        self._pending: deque[_Job] = deque()

    def _hire(self) -> _Actor:
        remote = self.ray.remote(num_cpus=1, max_restarts=0)(_Worker)
        return _Actor(remote.remote(*self._setup, *self._rest))

    def run(self, orders: Sequence[Order], recall: Recall = as_it_is) -> Iterator[Report]:
        """The reports, in order of completion."""
        if not orders:
            return
        carried = {name: sent.packets[0].content for name, sent in orders[0].mail.items()}
        vectors = self.ray.put({name: np.asarray(vector) for name, vector in carried.items()})
        jobs = [_Job(order, order, recall) for order in sorted(orders, key=cost, reverse=True)]
        for answer in self._carry_out(jobs, vectors):
            yield Report.from_bytes(answer)

    def evaluate(self, vectors: Vectors) -> dict[str, float]:
        """The task's evaluation, its pieces shared out to all actors."""
        held = self.ray.put({name: vector.detach().numpy() for name, vector in vectors.items()})
        pieces: Sequence[tuple[int, int] | None] = [None]
        if isinstance(self.task, Divisible):
            pieces = list(self.task.pieces())
        found: dict[tuple[int, int] | None, Any] = {}
        jobs = [_Job(EvaluationRequest({}, piece)) for piece in pieces]
        for job, answer in self._answers(jobs, held):
            assert isinstance(job.request, EvaluationRequest)
            found[job.request.piece] = answer
        parts = [found[piece] for piece in pieces]
        return self.task.total(parts) if isinstance(self.task, Divisible) else dict(parts[0])

    def _carry_out(self, jobs: Sequence[_Job], vectors: Any) -> Iterator[bytes]:
        for _, answer in self._answers(jobs, vectors):
            yield answer

    def _answers(self, jobs: Sequence[_Job], vectors: Any) -> Iterator[tuple[_Job, Any]]:
        """Each job with its answer, done again where its actor was lost."""
        self._pending = deque(jobs)
        left = len(jobs)
        try:
            while left:
                self._share_out(vectors)
                owners = {future: actor for actor in self._actors for future in actor.waiting}
                done, _ = self.ray.wait(list(owners), num_returns=1)
                for future in done:
                    actor = owners[future]
                    try:
                        answer = self.ray.get(future)
                    except self.ray.exceptions.RayError as error:
                        self._lost(actor, error)
                        break
                    job = actor.waiting.pop(future)
                    if isinstance(answer, Failure):
                        raise answer.error()
                    left -= 1
                    yield job, answer
        finally:
            self._pending.clear()
            for actor in self._actors:
                actor.waiting.clear()

    def _share_out(self, vectors: Any) -> None:
        for load in range(_AHEAD):
            for actor in self._actors:
                if self._pending and len(actor.waiting) <= load:
                    self._give(actor, self._pending.popleft(), vectors)

    def _give(self, actor: _Actor, job: _Job, vectors: Any) -> None:
        if job.order is not None:
            data = replace(job.recall(job.order), mail={}).to_bytes()
            future = actor.handle.train.remote(data, vectors)
        else:
            assert isinstance(job.request, EvaluationRequest)
            future = actor.handle.evaluate.remote(vectors, job.request.piece)
        actor.waiting[future] = job

    def _lost(self, actor: _Actor, error: Exception) -> None:
        """An actor is gone: another one comes, and what it had is done again; the oldest is the one it was lost at."""
        jobs = list(actor.waiting.values())
        first = jobs[0]
        first.deaths += 1
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        log.warning("%s: its actor was lost (%s); the work is done again", describe(first.request), cause)
        if first.deaths >= _DEATHS:
            raise HansaError(
                f"{describe(first.request)}: {_DEATHS} actors were lost at it, one after the other: {cause}"
            )
        actor.waiting.clear()
        self._actors[self._actors.index(actor)] = self._hire()
        self._pending.extendleft(reversed(jobs))

    def close(self) -> None:
        """End the actors, and the cluster where it was started for this run."""
        for actor in self._actors:
            self.ray.kill(actor.handle)
        self._actors = []
        if self._own:
            self.ray.shutdown()


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise HansaError("the Ray engine needs ray: pip install 'hansa[ray]'.") from error
    return ray


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A vector of the object store as a tensor of its own: what lies in the store is read-only, which torch would
    not know."""
    return torch.tensor(array)
