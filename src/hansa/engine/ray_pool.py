"""Actors of a Ray cluster as workers: more cores than one machine has, under one owner. ``pip install 'hansa[ray]'``.

The method and the task go once into the cluster's object store, and so do each round's vectors: a copy a node, which
all actors of that node look at in place. What clients remember, and what they report, goes by the object store too
where it is large. An actor or a node that is lost costs nothing but time: its orders are done again elsewhere, with the
same keys and so the same bits. One trust domain: whoever reaches the cluster can run code on it.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hansa.algorithm import Algorithm
from hansa.core.errors import HansaError, check_integer
from hansa.core.types import Vector, Vectors
from hansa.core.vectors import arithmetic
from hansa.engine.requests import (
    Arithmetic,
    Divisible,
    EvaluationRequest,
    Failure,
    Recall,
    RecallExam,
    Request,
    as_it_is,
    cost,
    describe,
    perform,
)
from hansa.engine.shared_memory import CodePacker, Memory, PackedObject, Packer, TensorPlace, unpack
from hansa.rounds.messages import Report, WorkOrder
from hansa.training import TaskLike
from hansa.training.client_evaluation import Exam, Marks

log = logging.getLogger("hansa")

Bytes = NDArray[np.uint8]

_DEATHS = 3  # an order may cost this many actors
_AHEAD = 2  # orders given to an actor at a time, so that it never waits for the next
_PATIENCE = 60.0  # seconds without any actor at work until it is said that the cluster has no room
_SMALL = 1 << 16  # bytes: smaller tensors of a task are an actor's own


class Lent:
    """Memory of the object store, as `unpack` reads it. It is everybody's, so nobody may write to it: with ``copy`` the
    tensors in it become the reader's own, otherwise the small ones do."""

    def __init__(self, data: Bytes, *, copy: bool) -> None:
        self._data, self._copy = data, copy

    def mapped(self, size: int) -> Lent:
        return self

    def __getitem__(self, part: slice) -> bytes:
        return self._data[part].tobytes()

    def tensor(self, place: TensorPlace) -> torch.Tensor:
        size = place.entries * place.dtype.itemsize
        if not size:
            return torch.empty(place.shape, dtype=place.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is lent is read-only, which torch cannot know
            flat = torch.from_numpy(self._data[place.offset : place.offset + size]).view(place.dtype)
        found = flat.as_strided(place.shape, place.stride)
        return found.clone() if self._copy or size < _SMALL else found


def _taken(memory: Memory, packed: PackedObject) -> Bytes:
    """All that was packed, as an array that Ray copies once and lends out after."""
    return np.frombuffer(memory.mapped(sum(packed)), np.uint8, sum(packed))


class _Worker:
    """What runs in an actor: the method, the task and a shell of its own."""

    def __init__(self, packed: PackedObject, setup: Bytes) -> None:
        os.environ["HANSA_WORKER"] = "1"
        algorithm, task, dtype, settings = unpack(packed, [Lent(setup, copy=False)], copy=False)  # type: ignore[list-item]
        settings.apply()
        self.algorithm, self.task = algorithm, task
        self.shell = task.shell(dtype, torch.device("cpu"))
        self._desk = Memory()

    def do(self, packed: PackedObject, own: Bytes, round: Bytes) -> tuple[PackedObject, Bytes]:
        """A request in, with what is its own and what is the round's; its answer out."""
        memories = [Lent(own, copy=True), Lent(round, copy=False)]
        request = unpack(packed, memories, copy=False)  # type: ignore[arg-type]
        reply = Packer(self._desk).pack(perform(request, self.algorithm, self.task, self.shell))
        return reply, _taken(self._desk, reply)

    def pid(self) -> int:
        """The process it runs in: that it answers says that it is at work."""
        return os.getpid()


@dataclass(slots=True, eq=False)
class _Job:
    request: Request
    recall: Recall | RecallExam | None = None
    deaths: int = 0

    def recalled(self) -> Request:
        """The request with what clients remember, read now."""
        recall: Any = self.recall
        found: Request = self.request if recall is None else recall(self.request)
        return found


@dataclass(slots=True, eq=False)
class _Actor:
    """An actor, the word that it has begun, and its jobs; None as that word means that it is at work."""

    handle: Any
    begun: Any
    waiting: dict[Any, _Job] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Round:
    """What all requests of a round share: where its vectors are, and the vectors, whose ids stand for them."""

    data: Any
    placed: dict[int, TensorPlace]
    vectors: tuple[Vector, ...]


class RayPool:
    """An engine over ``workers`` actors, by default one a CPU of the cluster at ``address``, or of this machine.

    A cluster that was there already is used and left as it is; one that had to be started ends with the run. Actors
    join in as they come up, so a cluster with fewer free CPUs than ``workers``, or one that has lost a node, does the
    work with those that there are. Updates are summed in client order on this machine, each core a range of
    coordinates.
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
            check_integer("RayPool", "workers", workers)
        if device.type != "cpu":
            raise HansaError(f"RayPool(device={device}): actors train on CPUs. Use the pool of threads for {device}.")
        self.ray = ray = _ray()
        self.task = task
        self._own = not ray.is_initialized()
        if self._own:
            _begin(ray, workers, address)
        self._desk, setup = Memory(), Memory()
        packed = CodePacker(setup).pack((algorithm, task, dtype, Arithmetic.here()))
        self._setup = packed, ray.put(_taken(setup, packed))
        count = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._remote = ray.remote(num_cpus=1, max_restarts=0)(_Worker)
        self._actors = [self._hire() for _ in range(count)]
        self._pending: deque[_Job] = deque()
        self._folders = arithmetic.split_among(os.cpu_count() or 1)

    def _hire(self) -> _Actor:
        handle = self._remote.remote(*self._setup)
        return _Actor(handle, handle.pid.remote())

    def ready(self) -> RayPool:
        """Wait until every actor has begun; a run needs no such wait, a clock does."""
        self.ray.get([actor.begun for actor in self._actors if actor.begun is not None])
        return self

    def run(self, orders: Sequence[WorkOrder], recall: Recall = as_it_is) -> Iterator[Report]:
        """The reports, in order of completion."""
        if not orders:
            return
        round = self._publish(sent.packets[0].content for sent in orders[0].broadcasts.values())
        jobs = [_Job(order, recall) for order in sorted(orders, key=cost, reverse=True)]
        for _, report in self._answers(jobs, round):
            yield report

    def evaluate(self, vectors: Vectors) -> dict[str, float]:
        """The task's evaluation, its pieces shared out to all actors."""
        pieces: Sequence[tuple[int, int] | None] = [None]
        if isinstance(self.task, Divisible):
            pieces = list(self.task.pieces())
            if not pieces:
                return self.task.total([])
        kept = {name: vector.detach() for name, vector in vectors.items()}
        jobs = [_Job(EvaluationRequest(kept, piece)) for piece in pieces]
        found: dict[tuple[int, int] | None, Any] = {}
        for job, answer in self._answers(jobs, self._publish(kept.values())):
            assert isinstance(job.request, EvaluationRequest)
            found[job.request.piece] = answer
        parts = [found[piece] for piece in pieces]
        return self.task.total(parts) if isinstance(self.task, Divisible) else dict(parts[0])

    def examine(self, exams: Sequence[Exam], recall: RecallExam) -> Iterator[list[Marks]]:
        """Clients' marks, exam by exam, shared out to all actors."""
        if not exams:
            return
        round = self._publish(exams[0].vectors.values())
        found = {id(job.request): marks for job, marks in self._answers([_Job(exam, recall) for exam in exams], round)}
        yield from (found[id(exam)] for exam in exams)

    def _publish(self, content: Any) -> _Round:
        """Put what all are sent into the object store, once."""
        vectors: tuple[Vector, ...] = tuple({id(vector): vector for vector in content}.values())
        memory = Memory()
        packer = Packer(memory)
        placed = {id(vector): packer.lay(vector, memory=1) for vector in vectors}
        return _Round(self.ray.put(_taken(memory, PackedObject(packer.end, 0))), placed, vectors)

    def _answers(self, jobs: Sequence[_Job], round: _Round) -> Iterator[tuple[_Job, Any]]:
        """Each job with its answer, done again where its actor was lost."""
        self._pending = deque(jobs)
        left = len(jobs)
        try:
            while left:
                self._share_out(round)
                owners = {future: actor for actor in self._actors for future in actor.waiting}
                coming = {actor.begun: actor for actor in self._actors if actor.begun is not None}
                done, _ = self.ray.wait([*owners, *coming], num_returns=1, timeout=None if owners else _PATIENCE)
                if not done:
                    self._complain()
                for future in done:
                    actor = owners[future] if future in owners else coming[future]
                    try:
                        answer = self.ray.get(future)
                    except self.ray.exceptions.RayError as error:
                        self._lost(actor, error)
                        break
                    if future in coming:
                        actor.begun = None
                        continue
                    job = actor.waiting.pop(future)
                    packed, data = answer
                    found = unpack(packed, [Lent(data, copy=True)], copy=False)  # type: ignore[list-item]
                    if isinstance(found, Failure):
                        raise found.error()
                    left -= 1
                    yield job, found
        finally:
            self._pending.clear()
            for actor in self._actors:
                actor.waiting.clear()

    def _share_out(self, round: _Round) -> None:
        """Give what is to be done to those that are at work, the first to all before the second to any."""
        for load in range(_AHEAD):
            for actor in self._actors:
                if self._pending and actor.begun is None and len(actor.waiting) <= load:
                    job = self._pending.popleft()
                    packed = Packer(self._desk, placed=round.placed).pack(job.recalled())
                    own = _taken(self._desk, packed)  # copied by Ray before this returns
                    actor.waiting[actor.handle.do.remote(packed, own, round.data)] = job

    def _complain(self) -> None:
        free = self.ray.available_resources().get("CPU", 0)
        log.warning("no actor is at work: the cluster has %g free CPUs for %d; still waiting", free, len(self._actors))

    def _lost(self, actor: _Actor, error: Exception) -> None:
        """An actor is gone: another one comes, and what it had is done again; the oldest is the one it was lost at."""
        told = str(error).strip() or type(error).__name__
        if actor.begun is not None and isinstance(error, self.ray.exceptions.RayTaskError):
            raise HansaError(f"RayPool: an actor could not begin: {told.splitlines()[-1]}") from error
        jobs = list(actor.waiting.values())
        cause = told.splitlines()[0]
        if jobs:
            first = jobs[0]
            first.deaths += 1
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
        self._folders.close()
        for actor in self._actors:
            self.ray.kill(actor.handle)
        self._actors = []
        if self._own:
            self.ray.shutdown()


def _begin(ray: Any, workers: int | None, address: str | None) -> None:
    """Join the cluster at an address, or start one on this machine: never whatever happens to run."""
    try:
        if address is None:
            ray.init(
                address="local", num_cpus=workers or os.cpu_count(), include_dashboard=False, log_to_driver=False,
                configure_logging=False,
            )  # fmt: skip
            return
        host, _, port = address.rpartition(":")
        if host and port.isdigit() and "/" not in host:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()  # Ray itself tries for minutes
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, ValueError, RuntimeError) as error:
        cause = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise HansaError(
            f"engine.address={address!r}: no Ray cluster answers there ({cause}). `ray start --head` starts one and "
            "prints its address; without an address one is started here for the run."
            if address
            else f"Ray could not be started on this machine: {cause}"
        ) from error


def _ray() -> Any:
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):  # nothing is sent; no tip is shown
        os.environ.setdefault(name, "0")
    try:
        import ray
    except ImportError as error:
        raise HansaError("the Ray engine needs ray: pip install 'hansa[ray]'.") from error
    return ray
