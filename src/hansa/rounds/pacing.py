"""Rounds on the virtual clock: synchronous ones with stragglers, and the server steps of asynchronous methods."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hansa.algorithm import Algorithm, check_enough_updates
from hansa.compress import Packet
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


def open_paced_round(
    algorithm: Algorithm,
    state: ServerState,
    population: Population,
    run: str,
    key: Key,
    clock: VirtualClock | None = None,
    machines: Any = None,
) -> OpenedRound:
    """Open a round of any pace. Without a clock it is that of `open_round`.

    Args:
        algorithm: The method, bound to the population.
        state: The server's state.
        population: The clients' sample counts.
        run: The run's identifier.
        key: The run's key.
        clock: The virtual clock; asynchronous paces need one.
        machines: An engine whose jobs run on real machines, instead of the clock: `hansa.federation.server.Federation`.
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
    requested = [pair for order in opened.orders for pair in zip(order.clients, order.works, strict=True)]
    for client, work in requested:
        start = clock.device(client).next_start(begin)
        down = opened.down_bytes[client]
        jobs[client] = clock.job(client, state.round, start, work, down_bytes=down, up_bytes=up)
    arrivals = sorted((job.arrival - begin, client) for client, job in jobs.items())
    count, seconds = algorithm.pace.first_arrivals(arrivals)
    late = {client for _, client in arrivals[count:]}
    end = begin + seconds
    occupied = math.fsum(max(0.0, min(job.arrival, end) - job.start) for job in jobs.values())
    detail = f"the round closed after {seconds:g} s of virtual time"

    def in_time(order: WorkOrder) -> WorkOrder:
        return order.part([index for index, client in enumerate(order.clients) if client not in late])

    dropped = tuple(DroppedClient(client, "late", detail) for client in sorted(late))
    return opened._replace(
        orders=tuple(map(in_time, opened.orders)) if late else opened.orders,
        state=replace(state, pace={"now": end}),
        timing=RoundTiming(begin, end, jobs, max(1, len(jobs)), occupied),
        dropped=dropped,
    )


@dataclass(slots=True, eq=False)
class _ServerStep:
    """One server step of an asynchronous method: arrivals, the jobs started meanwhile, and the versions kept."""

    algorithm: Algorithm
    pace: buffered
    state: ServerState
    population: Population
    run: str
    key: Key
    clock: VirtualClock
    machines: Any
    versions: State = field(default_factory=dict)
    """The digest and the vectors of each version in flight, and of the present one."""
    _sent: dict[int, tuple[bytes, Mapping[str, Broadcast]]] = field(default_factory=dict)
    _bytes: dict[str, int] = field(default_factory=dict)
    """The bytes of a job's messages down and up, as the clock names them."""

    def open(self) -> OpenedRound:
        state, pace, version, machines = self.state, self.pace, self.state.round, self.machines
        queue = state.pace or self._first_queue()
        slots = int(queue["vacant"]) + len(queue["jobs"])
        down = sum(Packet.of(vector, "whole").nbytes for vector in state.vectors.values())
        self._bytes = {"down_bytes": down, "up_bytes": upload_bytes(self.algorithm, state.vectors)}
        current = {"base": fingerprint(state.vectors[MODEL]).hex(), "vectors": dict(state.vectors)}
        self.versions = {**queue.get("versions", {}), str(version): current}
        if machines is not None:
            self._restart(queue, machines)
        arrivals = collect_arrivals(
            queue,
            version,
            size=pace.updates(slots),
            max_staleness=pace.max_staleness,
            population=self.population.count,
            select=self._select,
            device=self.clock.device,
            start=self._start,
            wait=None if machines is None else machines.next_arrival,
            group=self.clock.group if machines is None else machines.group_of,
        )
        orders = tuple(self._order(job) for job in arrivals.jobs)
        oldest = -math.inf if pace.max_staleness is None else version + 1 - pace.max_staleness
        needed = {str(number) for number in versions_in_flight(arrivals.queue) if number >= oldest}
        kept_versions = {number: entry for number, entry in self.versions.items() if number in needed}
        detail = "trained from a version {} steps old; max_staleness is {}"
        refused = tuple(
            DroppedClient(job.client, "stale", detail.format(version - job.version, pace.max_staleness))
            for job in arrivals.refused
        )
        jobs = {job.client: job for job in (*arrivals.jobs, *arrivals.refused)}
        broadcasts = {}
        for name, channel in self.algorithm.channels.items():
            x = where_computed(channel.downlink, state.vectors[name])
            broadcasts[name], _ = channel.downlink.broadcast(x, state.downlink[name], sorted(jobs), version, self.key)
        nbytes = sum(v.nbytes for entry in kept_versions.values() for v in entry["vectors"].values())
        facts = (jobs, slots, arrivals.occupied, len(kept_versions), nbytes, machines is not None)
        timing = RoundTiming(arrivals.begin, arrivals.end, *facts)
        new_state = replace(state, pace={**arrivals.queue, "versions": kept_versions})
        return OpenedRound(orders, broadcasts, new_state, dict.fromkeys(sorted(jobs), down), timing, refused)

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
        return [clients[index] for index in order.tolist()]

    def _start(self, client: int, time: float) -> TimedJob:
        version = self.state.round
        address = self.key.child("work", version, client)
        work = self.algorithm.local.draw_work(client, self.population.samples[client], address)
        if self.machines is None:
            return self.clock.job(client, version, time, work, **self._bytes)
        job = TimedJob(math.inf, client, version, time, 0.0, math.inf, 0.0, *work)
        self.machines.start_job(self._order(job))
        return job

    def _restart(self, queue: State, machines: Any) -> None:
        """Resend the jobs that an earlier process had in flight."""
        for job in map(TimedJob._make, queue["jobs"]):
            if machines.has_job(job.client):
                continue
            if str(job.version) in self.versions:
                machines.start_job(self._order(job))
            else:  # its update would be refused
                machines.lose_job(job.client)

    def _order(self, job: TimedJob) -> WorkOrder:
        """Return the order of a job; those of one version share its broadcasts."""
        number = job.version
        if number not in self._sent:
            entry = self.versions[str(number)]
            broadcasts = {name: Broadcast.whole(vector, number) for name, vector in entry["vectors"].items()}
            self._sent[number] = bytes.fromhex(entry["base"]), broadcasts
        work = Work(job.steps, job.batch_size)
        return WorkOrder(self.run, number, (job.client,), (work,), *self._sent[number], self.key)


def upload_bytes(algorithm: Algorithm, vectors: Vectors) -> int:
    """Return the bytes of an upload: exact where the length of packets does not depend on the data, else the bound."""
    total = 0
    for name, channel in algorithm.channels.items():
        if channel.follows is None:
            vector, compressor = vectors[name], getattr(channel.uplink, "compressor", None)
            bound = None if compressor is None else int(compressor.max_nbytes(vector.numel(), vector.dtype))
            total += Packet.of(vector).nbytes if bound is None else bound
    return total


def check_profile(algorithm: Algorithm) -> None:
    """Raise for methods whose rounds a device profile does not model."""
    if algorithm.local.mixing is not None:
        raise HansaError(
            f"{algorithm.name}: a device profile does not model exchanges between clients. Use links, with "
            "peer_bandwidth and peer_latency.",
            component="run", argument="profile",
        )  # fmt: skip
