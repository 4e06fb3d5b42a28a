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
from hansa.core.types import Vector
from hansa.engine.pool import Pool
from hansa.engine.requests import Event, Job, JobDone, WorkerExited, WorkerGroup, execute
from hansa.engine.shared_memory import PackedObject, Packer, SharedMemory, TensorSpan, unpack_object
from hansa.training import TaskLike
from hansa.training.random_state import NumericSettings, naming_the_remedy

log = logging.getLogger("hansa")

Bytes = NDArray[np.uint8]

_WARN_SECONDS = 60.0  # without any started actor
_SMALL_BYTES = 1 << 16  # smaller tensors of a task are copied to each actor


class ObjectStoreMemory(SharedMemory):
    """Memory of Ray's object store, as `unpack_object` reads it. It is shared and must not be written: with ``copy``
    all tensors are copied, otherwise only small ones."""

    def __init__(self, data: Bytes, *, copy: bool) -> None:
        self._data, self._copy = data.data, copy

    def mapped(self, size: int) -> memoryview:
        return self._data

    def tensor(self, span: TensorSpan) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the array is read-only, which torch tensors cannot be
            tensor = super().tensor(span)
        return tensor.clone() if self._copy or tensor.nbytes < _SMALL_BYTES else tensor


def _as_array(memory: SharedMemory, end: int) -> Bytes:
    """Return the first bytes of a memory as an array, which Ray copies once."""
    return np.frombuffer(memory.mapped(end), np.uint8, end)


class _ActorWorker:
    """The code of an actor: it holds the algorithm, the task and a trainer."""

    def __init__(self, packed: PackedObject, setup: Bytes, gpus: float | None) -> None:
        os.environ["HANSA_WORKER"] = "1"
        device = torch.device("cpu") if gpus is None else _assigned_accelerator(gpus)
        memories = [ObjectStoreMemory(setup, copy=False)]
        self.algorithm, self.task, dtype, settings = unpack_object(packed, memories, copy=False)
        settings.apply(device)
        check_dtype(device, dtype)
        self.trainer = self.task.trainer(dtype, device)
        self._device = device_name(device, numbered=False)
        self._buffer = SharedMemory()

    def execute(self, packed: PackedObject, request_data: Bytes, shared: Bytes) -> tuple[PackedObject, Bytes]:
        """Execute a request, given by its own data and the vectors it shares with others."""
        memories = [ObjectStoreMemory(request_data, copy=True), ObjectStoreMemory(shared, copy=False)]
        request = unpack_object(packed, memories, copy=False)
        reply = Packer(self._buffer).pack(execute([request], self.algorithm, self.task, self.trainer)[0])
        return reply, _as_array(self._buffer, sum(reply))

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
            f"engine.gpus={gpus:g}: Ray assigned a GPU to an actor on {socket.gethostname()}, but torch finds none "
            "there. Install torch with support for it on every node, or omit gpus to train on CPUs."
        )
    return accelerators[0]


@dataclass(slots=True, eq=False)
class RayActor:
    """An actor, the future of its start (None once it has started), and its jobs with their futures."""

    handle: Any
    starting: Any
    jobs: deque[Job] = field(default_factory=deque)
    futures: deque[Any] = field(default_factory=deque)

    @property
    def ready(self) -> bool:
        return self.starting is None


class RayGroup(WorkerGroup):
    """The actors of a run."""

    def __init__(self, ray: Any, setup: Any, workers: int, gpus: float | None) -> None:
        self.ray, self.gpus, self.devices = ray, gpus, set[str]()
        memory, self._buffer = SharedMemory(), SharedMemory()
        packed = Packer(memory).pack(setup)
        self._setup = packed, ray.put(_as_array(memory, sum(packed))), gpus
        self._spans: dict[int, TensorSpan] = {}
        self._shared: Any = None
        reserved: dict[str, float] = {"num_cpus": 1} if gpus is None else {"num_cpus": 1, "num_gpus": gpus}
        self._remote = ray.remote(**reserved, max_restarts=0)(_ActorWorker)
        self.workers: list[RayActor] = []
        for _ in range(workers):
            self.spawn()

    def spawn(self) -> None:
        handle = self._remote.remote(*self._setup)
        self.workers.append(RayActor(handle, handle.device.remote()))

    def stop(self, worker: RayActor) -> None:
        self.workers.remove(worker)

    def publish(self, vectors: Iterable[Vector]) -> None:
        """Put vectors into the object store, each once."""
        packer = Packer(SharedMemory())
        self._spans = packer.write_shared(vectors)
        self._shared = self.ray.put(_as_array(packer.memory, packer.end))

    def submit(self, worker: RayActor, job: Job) -> None:
        packed = Packer(self._buffer, spans=self._spans).pack(job.load_memory(job.request))
        request_data = _as_array(self._buffer, sum(packed))  # Ray copies it before this returns
        worker.jobs.append(job)
        worker.futures.append(worker.handle.execute.remote(packed, request_data, self._shared))

    def wait(self) -> list[Event]:
        running = {future: actor for actor in self.workers for future in actor.futures}
        starting = {actor.starting: actor for actor in self.workers if actor.starting is not None}
        timeout = None if running else _WARN_SECONDS
        finished, _ = self.ray.wait([*running, *starting], num_returns=1, timeout=timeout)
        if not finished:
            free = self.ray.available_resources()
            gpus = f" and {free.get('GPU', 0):g} GPUs" if self.gpus else ""
            cpus, count = free.get("CPU", 0), len(self.workers)
            log.warning("no actor has started: %g CPUs%s are free for %d actors; waiting", cpus, gpus, count)
            return []
        (future,) = finished
        actor = running[future] if future in running else starting[future]
        try:
            result = self.ray.get(future)
        except self.ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            cannot_start = actor.starting is not None and getattr(error, "actor_init_failed", False)
            return [WorkerExited(actor, lines[-1 if cannot_start else 0], cannot_start=cannot_start)]
        if future in starting:
            actor.starting = None
            self.devices.add(result)
            return []
        index = actor.futures.index(future)
        del actor.futures[index]
        packed, data = result
        answer = unpack_object(packed, [ObjectStoreMemory(data, copy=True)], copy=False)
        return [JobDone(actor, actor.jobs[index], answer)]

    def close(self) -> None:
        for actor in self.workers:
            self.ray.kill(actor.handle)
        self.workers = []


class RayPool(Pool):
    """An engine over the actors of a Ray cluster.

    A running cluster is used and stays up; one that is started here ends with the run. Actors join as they start, so a
    cluster with fewer free CPUs, or one that has lost a node, uses those it has. Updates are aggregated in
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
        ray = _import_ray()
        self._owns_cluster = not ray.is_initialized()
        if self._owns_cluster:
            _connect(ray, workers, address)
        count = workers or _fitting_actors(ray.cluster_resources(), gpus)
        self._actors = RayGroup(ray, (algorithm, task, dtype, NumericSettings.current()), count, gpus)
        self._use(task, self._actors)

    def device_names(self) -> list[str]:
        return sorted(self._actors.devices)

    def _execute(self, jobs: Sequence[Job], shared: Iterable[Vector]) -> Iterator[tuple[Job, Any]]:
        with naming_the_remedy():
            yield from super()._execute(jobs, shared)

    def close(self) -> None:
        """End the actors, and the cluster if it was started for this run."""
        super().close()
        if self._owns_cluster:
            self._actors.ray.shutdown()


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
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address is None:
        options |= {"num_cpus": workers or os.cpu_count(), "include_dashboard": False}
    try:
        host, _, port = (address or "").rpartition(":")
        if host and port.isdigit() and "/" not in host:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()  # Ray itself tries for minutes
        ray.init(address=address or "local", **options)
    except (OSError, ValueError, RuntimeError) as error:
        cause = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise HansaError(
            f"engine.address={address!r}: no Ray cluster answers there ({cause}). Start one with `ray start --head`, "
            "which prints its address, or omit the address to start one for the run."
        ) from error


def _import_ray() -> Any:
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):  # no telemetry, no hints
        os.environ.setdefault(name, "0")
    try:
        import ray
    except ImportError as error:
        raise HansaError("the Ray engine needs ray: pip install 'hansa[ray]'.") from error
    return ray
