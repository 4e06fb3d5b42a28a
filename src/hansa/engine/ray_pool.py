"""An engine over actors of a Ray cluster: ``pip install 'hansa[ray]'``.

The algorithm and the task go to the cluster's object store once, and each round's vectors once per round: all actors of
a node read one copy. Orders of a failed actor or node are executed again elsewhere, with the same keys and so the same
bits. The cluster is one trust domain: anyone with access can run code on it.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hansa.algorithm import Algorithm
from hansa.core.devices import available_devices, check_dtype, device_name
from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.core.types import Vector, Vectors
from hansa.core.vectors import arithmetic
from hansa.engine.requests import (
    LoadEvaluationMemory,
    LoadMemory,
    NumericSettings,
    RemoteError,
    combine_evaluation,
    describe_request,
    divided,
    estimated_cost,
    evaluation_requests,
    execute,
    unchanged,
)
from hansa.engine.shared_memory import CodePacker, PackedObject, Packer, SharedMemory, TensorPlace, unpack_object
from hansa.engine.worker_group import Job
from hansa.rounds.messages import Report, WorkOrder
from hansa.training import TaskLike
from hansa.training.evaluation import ClientMetrics, EvaluationJob
from hansa.training.random_state import naming_the_remedy

log = logging.getLogger("hansa")

Bytes = NDArray[np.uint8]

_MAX_LOST_ACTORS = 3  # per order
_JOBS_PER_ACTOR = 2  # so that an actor never waits for the next
_WARN_SECONDS = 60.0  # without any started actor
_SMALL_BYTES = 1 << 16  # smaller tensors of a task are copied to each actor


class ObjectStoreMemory:
    """Memory of Ray's object store, as `unpack_object` reads it. It is shared and must not be written: with ``copy``
    all tensors are copied, otherwise only small ones."""

    def __init__(self, data: Bytes, *, copy: bool) -> None:
        self._data, self._copy = data, copy

    def mapped(self, size: int) -> ObjectStoreMemory:
        return self

    def __getitem__(self, part: slice) -> bytes:
        return self._data[part].tobytes()

    def tensor(self, place: TensorPlace) -> torch.Tensor:
        size = place.entries * place.dtype.itemsize
        if not size:
            return torch.empty(place.shape, dtype=place.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the array is read-only, which torch tensors cannot be
            flat = torch.from_numpy(self._data[place.offset : place.offset + size]).view(place.dtype)
        tensor = flat.as_strided(place.shape, place.stride)
        return tensor.clone() if self._copy or size < _SMALL_BYTES else tensor


def _as_array(memory: SharedMemory, packed: PackedObject) -> Bytes:
    """Return the packed bytes as an array, which Ray copies once."""
    return np.frombuffer(memory.mapped(sum(packed)), np.uint8, sum(packed))


class _ActorWorker:
    """The code of an actor: it holds the algorithm, the task and a trainer."""

    def __init__(self, packed: PackedObject, setup: Bytes, gpus: float | None) -> None:
        os.environ["HANSA_WORKER"] = "1"
        device = torch.device("cpu") if gpus is None else _assigned_accelerator(gpus)
        memory = ObjectStoreMemory(setup, copy=False)
        algorithm, task, dtype, settings = unpack_object(packed, [memory], copy=False)  # type: ignore[list-item]
        settings.apply_on(device)
        check_dtype(device, dtype)
        self.algorithm, self.task = algorithm, task
        self.trainer = task.trainer(dtype, device)
        self._device = device_name(device, numbered=False)
        self._buffer = SharedMemory()

    def execute(self, packed: PackedObject, own: Bytes, shared: Bytes) -> tuple[PackedObject, Bytes]:
        """Execute a request, given by its own data and the vectors it shares with others."""
        memories = [ObjectStoreMemory(own, copy=True), ObjectStoreMemory(shared, copy=False)]
        request = unpack_object(packed, memories, copy=False)  # type: ignore[arg-type]
        reply = Packer(self._buffer).pack(execute(request, self.algorithm, self.task, self.trainer))
        return reply, _as_array(self._buffer, reply)

    def device(self) -> str:
        """Return the name of the device that it trains on; an answer shows that the actor has started."""
        return self._device

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()


def _assigned_accelerator(gpus: float) -> torch.device:
    """Return the accelerator of an actor: the first, as Ray shows an actor only those that it was assigned."""
    accelerators = [device for device in available_devices() if device.type != "cpu"]
    if not accelerators:
        raise HansaError(
            f"engine.gpus={gpus:g}: Ray assigned a GPU to an actor on {socket.gethostname()}, and torch finds none "
            "there. Install torch with support for it on every node, or leave gpus out to train on CPUs."
        )
    return accelerators[0]


@dataclass(slots=True, eq=False)
class _Actor:
    """An actor, the future of its start (None once it has started), and its jobs by future."""

    handle: Any
    starting: Any
    jobs: dict[Any, Job] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _SharedVectors:
    """The vectors that all requests of a round share, in the object store. ``vectors`` keeps their ids valid."""

    data: Any
    placed: dict[int, TensorPlace]
    vectors: tuple[Vector, ...]


class RayPool:
    """An engine over the actors of a Ray cluster.

    A running cluster is used and left as it is; one that is started here ends with the run. Actors join as they start,
    so a cluster with fewer free CPUs, or one that has lost a node, uses those it has. Updates are aggregated in
    client order on this machine, on its CPU.

    Args:
        algorithm: The algorithm of the run.
        task: The task of the run.
        dtype: The dtype of the model.
        device: Must be a CPU, unless ``gpus`` is given: actors use the device that Ray assigns.
        workers: The number of actors; None uses one per CPU of the cluster, or as many as its GPUs have room for.
        address: The address of the cluster; None starts one on this machine.
        gpus: The fraction of a GPU that every actor reserves and trains on, such as 0.25 for four actors per GPU; None
            trains on CPUs. Ray counts the fractions and does not divide a GPU's memory.
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
        gpus: float | None = None,
    ) -> None:
        if workers is not None:
            check_integer("RayPool", "workers", workers)
        if gpus is not None and not 0 < gpus <= 1:
            raise invalid_argument("RayPool", "gpus", gpus, "0 < gpus <= 1", "0.25 lets four actors share a GPU.")
        if device.type != "cpu" and gpus is None:
            raise HansaError(
                f"RayPool(device={device}): expected cpu. Set gpus (engine.gpus) to the fraction of a GPU of each "
                f"actor, or use `Pool` with kind='thread' for {device}."
            )
        self.ray = ray = _import_ray()
        self.task = task
        self._owns_cluster = not ray.is_initialized()
        if self._owns_cluster:
            _connect(ray, workers, address)
        self._buffer, setup = SharedMemory(), SharedMemory()
        packed = CodePacker(setup).pack((algorithm, task, dtype, NumericSettings.current()))
        self._setup = packed, ray.put(_as_array(setup, packed)), gpus
        self._gpus = gpus
        count = workers or _fitting_actors(ray.cluster_resources(), gpus)
        reserved: dict[str, float] = {"num_cpus": 1} if gpus is None else {"num_cpus": 1, "num_gpus": gpus}
        self._remote = ray.remote(**reserved, max_restarts=0)(_ActorWorker)
        self._actors = [self._spawn() for _ in range(count)]
        self._pending: deque[Job] = deque()
        self._devices: set[str] = set()
        self._aggregators = arithmetic.parallel_sums(os.cpu_count() or 1)

    def _spawn(self) -> _Actor:
        handle = self._remote.remote(*self._setup)
        return _Actor(handle, handle.device.remote())

    def wait_until_ready(self) -> RayPool:
        """Wait until all actors have started; only timing needs this."""
        self.ray.get([actor.starting for actor in self._actors if actor.starting is not None])
        return self

    def device_names(self) -> list[str]:
        """Return the names of the devices of all actors that have trained."""
        return sorted(self._devices)

    def run(self, orders: Sequence[WorkOrder], load_memory: LoadMemory = unchanged) -> Iterator[Report]:
        """Yield the reports in the order of completion."""
        if not orders:
            return
        sent = (broadcast for order in orders for broadcast in order.broadcasts.values())
        shared = self._publish(broadcast.packets[0].content for broadcast in sent)
        parts = (part for order in orders for part in divided(self.task, order, len(self._actors)))
        requests = sorted(parts, key=estimated_cost, reverse=True)
        for _, answer in self._execute([Job(request, load_memory=load_memory) for request in requests], shared):
            yield answer

    def evaluate(self, vectors: Vectors) -> dict[str, float]:
        """Evaluate on all actors."""
        detached = {name: vector.detach() for name, vector in vectors.items()}
        jobs = [Job(request) for request in evaluation_requests(self.task, detached)]
        answers = {id(job): answer for job, answer in self._execute(jobs, self._publish(detached.values()))}
        return combine_evaluation(self.task, [answers[id(job)] for job in jobs])

    def evaluate_clients(
        self, requests: Sequence[EvaluationJob], load_memory: LoadEvaluationMemory
    ) -> Iterator[list[ClientMetrics]]:
        """Yield the clients' results, request by request."""
        if not requests:
            return
        jobs = [Job(request, load_memory=load_memory) for request in requests]
        answers = self._execute(jobs, self._publish(requests[0].vectors.values()))
        results = {id(job.request): metrics for job, metrics in answers}
        yield from (results[id(request)] for request in requests)

    def _publish(self, content: Iterable[Any]) -> _SharedVectors:
        """Put vectors into the object store, each once."""
        vectors: tuple[Vector, ...] = tuple({id(vector): vector for vector in content}.values())
        memory = SharedMemory()
        packer = Packer(memory)
        placed = {id(vector): packer.write_tensor(vector, memory=1) for vector in vectors}
        return _SharedVectors(self.ray.put(_as_array(memory, PackedObject(packer.end, 0))), placed, vectors)

    def _execute(self, jobs: Sequence[Job], shared: _SharedVectors) -> Iterator[tuple[Job, Any]]:
        """Yield each job with its answer; the jobs of a failed actor are executed again."""
        self._pending = deque(jobs)
        left = len(jobs)
        try:
            while left:
                self._assign(shared)
                running = {future: actor for actor in self._actors for future in actor.jobs}
                starting = {actor.starting: actor for actor in self._actors if actor.starting is not None}
                timeout = None if running else _WARN_SECONDS
                done, _ = self.ray.wait([*running, *starting], num_returns=1, timeout=timeout)
                if not done:
                    self._warn_waiting()
                for future in done:
                    actor = running[future] if future in running else starting[future]
                    try:
                        result = self.ray.get(future)
                    except self.ray.exceptions.RayError as error:
                        self._replace(actor, error)
                        break
                    if future in starting:
                        actor.starting = None
                        self._devices.add(result)
                        continue
                    job = actor.jobs.pop(future)
                    packed, data = result
                    answer = unpack_object(packed, [ObjectStoreMemory(data, copy=True)], copy=False)  # type: ignore[list-item]
                    if isinstance(answer, RemoteError):
                        with naming_the_remedy():
                            raise answer.to_exception()
                    left -= 1
                    yield job, answer
        finally:
            self._pending.clear()
            for actor in self._actors:
                actor.jobs.clear()

    def _assign(self, shared: _SharedVectors) -> None:
        """Give jobs to started actors: a first one to each before a second one to any."""
        for load in range(_JOBS_PER_ACTOR):
            for actor in self._actors:
                if self._pending and actor.starting is None and len(actor.jobs) <= load:
                    job = self._pending.popleft()
                    packed = Packer(self._buffer, placed=shared.placed).pack(job.load_request())
                    own = _as_array(self._buffer, packed)  # Ray copies it before this returns
                    actor.jobs[actor.handle.execute.remote(packed, own, shared.data)] = job

    def _warn_waiting(self) -> None:
        free = self.ray.available_resources()
        gpus = (
            "" if self._gpus is None else f" and {free.get('GPU', 0):g} free GPUs, of which each needs {self._gpus:g}"
        )
        shown = f"{free.get('CPU', 0):g} free CPUs{gpus}"
        log.warning("no actor has started: the cluster has %s for %d; waiting", shown, len(self._actors))

    def _replace(self, actor: _Actor, error: Exception) -> None:
        """Replace a failed actor and execute its jobs again. The oldest job counts as the cause."""
        message = str(error).strip() or type(error).__name__
        if actor.starting is not None and getattr(error, "actor_init_failed", False):
            raise HansaError(f"RayPool: an actor could not start: {message.splitlines()[-1]}") from error
        jobs = list(actor.jobs.values())
        cause = message.splitlines()[0]
        if jobs:
            jobs[0].crashes += 1
            request = describe_request(jobs[0].request)
            log.warning("%s: the actor was lost (%s); the work is repeated", request, cause)
            if jobs[0].crashes >= _MAX_LOST_ACTORS:
                raise HansaError(f"{request}: {_MAX_LOST_ACTORS} actors in a row were lost executing it: {cause}")
        actor.jobs.clear()
        self._actors[self._actors.index(actor)] = self._spawn()
        self._pending.extendleft(reversed(jobs))

    def close(self) -> None:
        """End the actors, and the cluster if it was started for this run."""
        self._aggregators.close()
        for actor in self._actors:
            self.ray.kill(actor.handle)
        self._actors = []
        if self._owns_cluster:
            self.ray.shutdown()


def _fitting_actors(resources: dict[str, float], gpus: float | None) -> int:
    """Return how many actors a cluster has room for, at least one; each needs a CPU, and the fraction of one GPU.

    >>> _fitting_actors({"CPU": 16.0, "GPU": 2.0}, 0.25), _fitting_actors({"CPU": 16.0, "GPU": 2.0}, 0.4)
    (8, 4)
    """
    room = int(resources.get("CPU", 1))
    if gpus is not None:
        room = min(room, int(resources.get("GPU", 0)) * int(1 / gpus + 1e-9))
    return max(1, room)


def _connect(ray: Any, workers: int | None, address: str | None) -> None:
    """Join the cluster at an address, or start one on this machine; never join an unnamed running one."""
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
            f"engine.address={address!r}: no Ray cluster answers there ({cause}). Start one with `ray start --head`, "
            "which prints its address, or leave the address out to start one here for the run."
            if address
            else f"Ray could not be started on this machine: {cause}"
        ) from error


def _import_ray() -> Any:
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):  # no telemetry, no hints
        os.environ.setdefault(name, "0")
    try:
        import ray
    except ImportError as error:
        raise HansaError("the Ray engine needs ray: pip install 'hansa[ray]'.") from error
    return ray
