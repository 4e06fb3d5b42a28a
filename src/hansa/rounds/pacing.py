"""Rounds on the virtual clock: synchronous ones with stragglers, and the server steps of asynchronous methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from hansa.algorithm import Algorithm, check_enough_updates
from hansa.compress import Packet, Uplink
from hansa.core.errors import HansaError, invalid_argument
from hansa.core.keys import Key
from hansa.core.types import MODEL, Population, State, Vectors
from hansa.core.vectors.arithmetic import where_computed
from hansa.core.vectors.fingerprint import fingerprint
from hansa.local.work import Work
from hansa.pace import buffered
from hansa.pace.events import (
    RoundTiming,
    TimedJob,
    VirtualClock,
    collect_arrivals,
    empty_queue,
    versions_in_flight,
)
from hansa.rounds.aggregation import ServerState
from hansa.rounds.messages import Broadcast, DroppedClient, WorkOrder
from hansa.rounds.round import OpenedRound, open_round


@runtime_checkable
class ArrivalEngine(Protocol):
    """An engine whose jobs run on real machines: asynchronous rounds start them one by one, and wait for arrivals."""

    def begin_step(self, state: ServerState, load_memory: Callable[[WorkOrder], WorkOrder], oldest: int) -> None:
        """Prepare for a server step; ``oldest`` is the oldest round that the server could resume from."""
        ...

    def start_job(self, order: WorkOrder) -> None:
        """Send the order of one client."""
        ...

    def has_job(self, client: int) -> bool:
        """Whether this engine has started the client's job; those of an earlier process are sent again."""
        ...

    def lose_job(self, client: int) -> None:
        """Let the client's job end without an update."""
        ...

    def next_arrival(self) -> tuple[int, float]:
        """Wait for a job to end, and return its client and the time."""
        ...

    def group_of(self, client: int) -> Hashable:
        """Return the site of a client, which executes one job at a time."""
        ...


def open_paced_round(
    algorithm: Algorithm,
    state: ServerState,
    population: Population,
    run: str,
    key: Key,
    clock: VirtualClock | None = None,
    machines: ArrivalEngine | None = None,
) -> OpenedRound:
    """Open a round of any pace. Without a clock it is that of `open_round`.

    Args:
        algorithm: The method, bound to the population.
        state: The server's state.
        population: The clients' sample counts.
        run: The run's identifier.
        key: The run's key.
        clock: The virtual clock; asynchronous paces need one.
        machines: Real machines, instead of the clock.
    """
    if isinstance(algorithm.pace, buffered):
        clock = VirtualClock(None, population.samples, key) if clock is None else clock
        return _ServerStep(algorithm, algorithm.pace, state, population, run, key, clock, machines).open()
    opened = open_round(algorithm, state, population, run, key)
    return opened if clock is None else _without_stragglers(algorithm, opened, clock)


def _without_stragglers(algorithm: Algorithm, opened: OpenedRound, clock: VirtualClock) -> OpenedRound:
    """Return the round with the clients that arrive in time, and its timing."""
    state = opened.state
    begin, up = float(state.pace.get("now", 0.0)), upload_bytes(algorithm, state.vectors)
    jobs: dict[int, TimedJob] = {}
    asked = [pair for order in opened.orders for pair in zip(order.clients, order.works, strict=True)]
    for client, work in asked:
        start = clock.device(client).next_start(begin)
        down = opened.down_bytes[client]
        jobs[client] = clock.job(client, state.round, start, work, down_bytes=down, up_bytes=up)
    arrivals = sorted((job.arrival - begin, client) for client, job in jobs.items())
    count, seconds = algorithm.pace.first_arrivals(arrivals)
    late = {client for _, client in arrivals[count:]}
    end = begin + seconds
    occupied = math.fsum(max(0.0, min(job.arrival, end) - job.start) for job in jobs.values())
    detail = f"the round closed after {seconds:g} s of virtual time"
    dropped = tuple(DroppedClient(client, "late", detail) for client in sorted(late))
    return opened._replace(
        orders=tuple(_without(order, late) for order in opened.orders) if late else opened.orders,
        state=replace(state, pace={"now": end}),
        timing=RoundTiming(begin, end, jobs, max(1, len(jobs)), occupied),
        dropped=dropped,
    )


def _without(order: WorkOrder, late: set[int]) -> WorkOrder:
    return order.part([place for place, client in enumerate(order.clients) if client not in late])


class _ServerStep:
    """One server step of an asynchronous method: arrivals, the jobs started meanwhile, and the versions kept."""

    def __init__(
        self,
        algorithm: Algorithm,
        pace: buffered,
        state: ServerState,
        population: Population,
        run: str,
        key: Key,
        clock: VirtualClock,
        machines: ArrivalEngine | None,
    ) -> None:
        self.machines = machines
        self.algorithm, self.pace, self.state, self.population = algorithm, pace, state, population
        self.run, self.key, self.clock = run, key, clock
        self.down = sum(Packet.of(vector, "whole").nbytes for vector in state.vectors.values())
        self.up = upload_bytes(algorithm, state.vectors)

    def open(self) -> OpenedRound:
        state, pace, version = self.state, self.pace, self.state.round
        queue = state.pace or self._first_queue()
        slots = int(queue["vacant"]) + len(queue["jobs"])
        self.now = float(queue["now"])
        if self.machines is not None:
            self._restart(queue)
        arrivals = collect_arrivals(
            queue,
            version,
            size=pace.updates(slots),
            max_staleness=pace.max_staleness,
            population=self.population.count,
            select=self._select,
            device=self.clock.device,
            start=self._start,
            wait=None if self.machines is None else self._wait,
            group=self.clock.group if self.machines is None else self.machines.group_of,
        )
        versions: State = dict(queue.get("versions", {}))
        if arrivals.started:
            base = fingerprint(state.vectors[MODEL]).hex()
            versions[str(version)] = {"base": base, "vectors": dict(state.vectors)}
        orders = self._orders(arrivals.jobs, versions)
        oldest = -math.inf if pace.max_staleness is None else version + 1 - pace.max_staleness
        needed = {str(number) for number in versions_in_flight(arrivals.queue) if number >= oldest}
        kept_versions = {number: entry for number, entry in versions.items() if number in needed}
        refused = tuple(
            DroppedClient(
                job.client,
                "stale",
                f"trained from a version {version - job.version} steps old; max_staleness is {pace.max_staleness}",
            )
            for job in arrivals.refused
        )
        jobs = {job.client: job for job in (*arrivals.jobs, *arrivals.refused)}
        broadcasts = {
            name: channel.downlink.broadcast(
                where_computed(channel.downlink, state.vectors[name]),
                state.downlink[name],
                sorted(jobs),
                version,
                self.key,
            )[0]
            for name, channel in self.algorithm.channels.items()
        }
        nbytes = sum(v.nbytes for entry in kept_versions.values() for v in entry["vectors"].values())
        real = self.machines is not None
        facts = (jobs, slots, arrivals.occupied, len(kept_versions), nbytes, real)
        timing = RoundTiming(arrivals.begin, arrivals.end, *facts)
        after = replace(state, pace={**arrivals.queue, "versions": kept_versions})
        return OpenedRound(orders, broadcasts, after, dict.fromkeys(sorted(jobs), self.down), timing, refused)

    def _first_queue(self) -> State:
        slots = self.pace.concurrency
        if slots is None:
            slots = len(self._select(0))
            if slots < self.pace.updates(slots):
                raise invalid_argument(
                    "buffered", "size", self.pace.size, f"at most the {slots} clients that the sampler selects",
                    "Raise participation, or set concurrency.",
                )  # fmt: skip
        check_enough_updates(self.algorithm.name, self.pace, self.algorithm.channels, self.pace.updates(slots))
        return empty_queue(slots)

    def _select(self, wave: int) -> list[int]:
        """Return the sampler's clients of a wave, in random order."""
        population = self.state.population_with_stats(self.population)
        clients = self.algorithm.sampler.select(wave, population, self.key)
        order = self.key.child("wave", wave).numpy().permutation(len(clients))
        return [clients[place] for place in order.tolist()]

    def _start(self, client: int, at: float) -> TimedJob:
        version = self.state.round
        address = self.key.child("work", version, client)
        work = self.algorithm.local.draw_work(client, self.population.samples[client], address)
        if self.machines is not None:
            base, broadcasts = fingerprint(self.state.vectors[MODEL]), self._whole(self.state.vectors, version)
            self.machines.start_job(WorkOrder(self.run, version, (client,), (work,), base, broadcasts, self.key))
            return TimedJob(math.inf, client, version, at, 0.0, math.inf, 0.0, *work)
        return self.clock.job(client, version, at, work, down_bytes=self.down, up_bytes=self.up)

    def _restart(self, queue: State) -> None:
        """Send the jobs again that an earlier process had in flight."""
        assert self.machines is not None
        for entry in queue["jobs"]:
            job = TimedJob._make(entry)
            if self.machines.has_job(job.client):
                continue
            if str(job.version) not in queue["versions"]:  # its update would be refused
                self.machines.lose_job(job.client)
            else:
                version = queue["versions"][str(job.version)]
                base, broadcasts = bytes.fromhex(version["base"]), self._whole(version["vectors"], job.version)
                work = Work(job.steps, job.batch_size)
                order = WorkOrder(self.run, job.version, (job.client,), (work,), base, broadcasts, self.key)
                self.machines.start_job(order)

    def _wait(self) -> tuple[int, float]:
        assert self.machines is not None
        return self.machines.next_arrival()

    @staticmethod
    def _whole(vectors: Vectors, version: int) -> Mapping[str, Broadcast]:
        return {name: Broadcast.whole(vector, version) for name, vector in vectors.items()}

    def _orders(self, jobs: tuple[TimedJob, ...], versions: State) -> tuple[WorkOrder, ...]:
        """Return the work orders in the order of arrival; orders of one version share its broadcasts."""
        sent: dict[int, tuple[bytes, Mapping[str, Broadcast]]] = {}
        orders = []
        for job in jobs:
            number = job.version
            if number not in sent:
                entry = versions[str(number)]
                sent[number] = bytes.fromhex(entry["base"]), self._whole(entry["vectors"], number)
            base, broadcasts = sent[number]
            work = Work(job.steps, job.batch_size)
            orders.append(WorkOrder(self.run, number, (job.client,), (work,), base, broadcasts, self.key))
        return tuple(orders)


def upload_bytes(algorithm: Algorithm, vectors: Vectors) -> int:
    """Return the bytes of an upload: exact where the length of packets does not depend on the data, else the bound."""
    reported = ((name, channel.uplink) for name, channel in algorithm.channels.items() if channel.follows is None)
    return sum(_packet_bytes(uplink, vectors[name]) for name, uplink in reported)


def _packet_bytes(uplink: Uplink, vector: torch.Tensor) -> int:
    compressor = getattr(uplink, "compressor", None)
    if compressor is not None:
        return int(compressor.max_nbytes(vector.numel(), vector.dtype))
    return Packet.of(vector).nbytes


def check_profile(algorithm: Algorithm) -> None:
    """Raise for methods whose rounds have no time on a device profile."""
    if algorithm.local.mixing is not None:
        raise HansaError(
            f"{algorithm.name}: a device profile has no time for exchanges between clients. Use links, whose "
            "peer_bandwidth and peer_latency are those of gossip.",
            component="run", argument="profile",
        )  # fmt: skip
