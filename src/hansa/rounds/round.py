"""A round: ``open_round`` makes work orders, ``client_round`` turns orders into reports, ``close_round`` aggregates the
reports. The three are pure: engines only carry orders and reports between them.

Rounds on the virtual clock: synchronous ones with stragglers, and the server steps of asynchronous methods.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from hansa.algorithm import Algorithm, LocalPhase, check_enough_updates
from hansa.compress import Packet, ServerBroadcast, direct
from hansa.compress.links import partial
from hansa.core.errors import HansaError, invalid_argument, naming_client
from hansa.core.keys import Key
from hansa.core.types import BUFFERS, MODEL, Population, State, Vector, Vectors
from hansa.core.vectors.arithmetic import computes_on, fingerprint, tree_to, where_computed
from hansa.gossip.executors import train_cohorts
from hansa.gossip.mixing import Mixing
from hansa.local.loops import LoopResult, train_by_loop
from hansa.local.solvers import BaseSolver
from hansa.local.trainer import ClientJobs, LocalStep, Trainer, draw_batches, train
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
from hansa.rounds.aggregation import ClosedRound, RoundAggregation, ServerState
from hansa.rounds.messages import Broadcast, DroppedClient, Report, WorkOrder, in_client_order, scoped


class OpenedRound(NamedTuple):
    """Work orders, each channel's broadcast, the server's state after it, and the bytes each client was sent.

    Rounds on a virtual clock also have their timing, and the clients whose updates come too late.
    """

    orders: tuple[WorkOrder, ...]
    broadcasts: Mapping[str, ServerBroadcast]
    state: ServerState
    down_bytes: dict[int, int]
    timing: RoundTiming | None = None
    dropped: tuple[DroppedClient, ...] = ()

    def for_receiver(self, order: WorkOrder) -> WorkOrder:
        """Return the order with the packets that its first reporter is sent over a network."""
        if order.round != self.state.round:
            return order  # an older version: its broadcasts are whole
        receiver = order.reporters[0]
        packets = {
            name: Broadcast(sent.version, sent.bases[receiver], tuple(sent.packets(receiver)))
            for name, sent in self.broadcasts.items()
        }
        return replace(order, broadcasts=packets)

    def on_host(self) -> OpenedRound:
        """Return the round with every vector that is sent on the CPU, for clients that do not train on the server's
        device."""
        moved: dict[int, Any] = {}  # by identity: shared objects stay shared

        def host(item: Any) -> Any:
            if id(item) not in moved:
                moved[id(item)] = copy(item)
            return moved[id(item)]

        def copy(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return item.cpu()
            if isinstance(item, Packet):
                return Packet.of(host(item.content), item.kind) if isinstance(item.content, torch.Tensor) else item
            if isinstance(item, Broadcast):
                return item._replace(packets=tuple(map(host, item.packets)))
            if isinstance(item, ServerBroadcast):
                messages = {client: tuple(map(host, packets)) for client, packets in item.messages.items()}
                return replace(item, vector=host(item.vector), messages=messages)
            return {name: host(value) for name, value in item.items()}

        orders = tuple(replace(order, broadcasts=host(order.broadcasts)) for order in self.orders)
        return self._replace(orders=orders, broadcasts=host(self.broadcasts))


def open_round(algorithm: Algorithm, state: ServerState, population: Population, run: str, key: Key) -> OpenedRound:
    """Select the participants, draw their work and make the broadcasts."""
    clients = algorithm.sampler.select(state.round, state.population_with_stats(population), key)
    broadcasts, downlink_states, sizes = {}, {}, list[dict[int, int]]()
    for name, channel in algorithm.channels.items():
        x = where_computed(channel.downlink, state.vectors[name])
        broadcasts[name], downlink_states[name] = channel.downlink.broadcast(
            x, state.downlink[name], clients, state.round, key.child("downlink", name, state.round)
        )
        sizes.append(dict.fromkeys(clients, 0) if algorithm.serverless else broadcasts[name].sizes(clients))
    sent = sizes[0] if len(sizes) == 1 else {client: sum(nbytes[client] for nbytes in sizes) for client in clients}
    packets = {name: Broadcast.whole(broadcast.vector, broadcast.version) for name, broadcast in broadcasts.items()}
    base = fingerprint(broadcasts[MODEL].vector)
    phase = algorithm.local
    after_broadcast = replace(state, downlink=downlink_states)
    if phase.mixing is None:
        works = phase.draw_works(clients, population.samples, key.child("work", state.round))
        order = WorkOrder(run, state.round, tuple(clients), works, base, packets, key)
        return OpenedRound((order,) if clients else (), broadcasts, after_broadcast, sent)
    orders = []
    for cohort, members, reporters in _clusters(phase.mixing, clients):
        # one number of steps for all; the batch size is the largest drawn, capped per client by its sample count
        draw = key.child("work", state.round, members[0])
        largest = max(population.samples[client] for client in members)
        work = phase.draw_work(members[0], largest, draw)
        works = (work,) * len(members)
        orders.append(WorkOrder(run, state.round, members, works, base, packets, key, cohort, reporters))
    return OpenedRound(tuple(orders), broadcasts, after_broadcast, sent)


def _clusters(mixing: Mixing, clients: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield each gossiping cluster's number, clients and reporters."""
    chosen = set(clients)
    for cohort, cluster in enumerate(mixing.cluster_lists()):
        reporters = tuple(sorted(chosen.intersection(cluster)))
        if reporters:  # a cluster without reporters has no effect
            yield cohort, reporters if mixing.reporters_only else cluster, reporters


def client_round(
    algorithm: Algorithm,
    orders: Sequence[WorkOrder],
    trainer: Trainer,
    population: Population,
    base_vectors: Mapping[str, Vector] | None = None,
) -> list[Report]:
    """Decode the broadcasts, train the clients of each order and return a report for each.

    The clients of an order go to the trainer in one call, and so do several gossiping cohorts: Python code between
    native steps is slow, since the steps evict it from the cache. The result is bit-identical to one client, or one
    cohort, at a time. A client whose model becomes non-finite drops out.

    Args:
        algorithm: The method, bound to the model.
        orders: The work orders; shared broadcasts are decoded once.
        trainer: Where the clients train.
        population: The clients' sample counts.
        base_vectors: By channel, the vector of the broadcasts' base version, if they have one.
    """
    decoded: dict[tuple[int, bytes], Vectors | None] = {}
    for order in orders:
        address = id(order.broadcasts), order.base
        if address not in decoded:
            decoded[address] = decode_broadcasts(algorithm, order, base_vectors or {})
    received = [decoded[id(order.broadcasts), order.base] for order in orders]
    usable = [(order, got) for order, got in zip(orders, received, strict=True) if got is not None]
    trained = iter(_train(algorithm, [order for order, _ in usable], [got for _, got in usable], trainer, population))
    detail = "the broadcast does not decode to the model that was sent"
    return [
        Report.without(order, "base", detail) if got is None else _encoded(algorithm, order, got, next(trained))
        for order, got in zip(orders, received, strict=True)
    ]


def _train(
    algorithm: Algorithm,
    orders: Sequence[WorkOrder],
    received: Sequence[Vectors],
    trainer: Trainer,
    population: Population,
) -> list[Report]:
    """Train on the trainer's device, and report the updates as vectors. ``received`` has the vectors of each order;
    the updates are on the device of these: the CPU or the server's device."""
    if not orders:
        return []
    device, server_device, phase = trainer.y.device, received[0][MODEL].device, algorithm.local
    moves_devices = not device.type == server_device.type == "cpu"
    if moves_devices:
        orders, received = _to_device(device, orders, received)
    if phase.mixing is not None:
        results = train_cohorts(phase, orders, received, trainer, population.samples)
    else:
        pairs = zip(orders, received, strict=True)
        results = [_train_alone(phase, order, got, trainer, population) for order, got in pairs]
    return [_to_server_device(result, server_device) for result in results] if moves_devices else results


def _train_alone(phase: LocalPhase, order: WorkOrder, got: Vectors, trainer: Trainer, population: Population) -> Report:
    """Train clients that do not gossip, from the received model with each one's private blocks."""
    keep_models = phase.private_blocks is not None or order.mean
    jobs = _jobs(phase, order, got, trainer, population, keep_models=keep_models)
    finished: list[LoopResult] = []
    if phase.loop is None:
        results = train(trainer, jobs)
    else:
        memory_rows = {client: scoped(rows, "loop") for client, rows in order.memory.items()}
        results, finished = train_by_loop(trainer, phase.loop, jobs, phase.lr_at(order.round), got, memory_rows)
    clients, changes, losses = order.clients, results.changes, results.losses
    indices: Sequence[int] = range(len(clients))
    if results.failures:
        indices = [index for index in indices if index not in results.failures]
        changes, losses = [changes[index] for index in indices], [losses[index] for index in indices]
    dropped = [DroppedClient(clients[index], "non-finite", reason) for index, reason in results.failures.items()]
    if phase.private_blocks is not None:
        changes = [phase.without_private_blocks(change) for change in changes]
    rows: dict[str, Any] = {MODEL: changes}
    if results.buffers and jobs.buffers is not None:
        moved = [results.buffers[index] - jobs.buffers[index] for index in indices]
        rows[BUFFERS] = [phase.without_private_blocks(change, of_buffers=True) for change in moved]
    for name in finished[0].reports if finished else ():
        rows[name] = [finished[index].reports[name] for index in indices]
    memory: dict[int, Vectors] = {}
    if phase.private_blocks is not None or phase.optimizer_state == "kept" or phase.division.continued or finished:
        for index in indices:
            client, work, y = clients[index], order.works[index], results.models[index] if keep_models else None
            buffers_after = results.buffers[index] if results.buffers else None
            memory_before = order.memory.get(client, {})
            memory[client] = {
                **phase.memory_after(jobs.steps[index], y, buffers_after),
                **phase.position_memory(population.samples[client], work.batch_size, work.steps, memory_before),
                **({f"loop/{name}": row for name, row in finished[index].memory.items()} if finished else {}),
            }
    report = Report.on(
        order,
        clients=[clients[index] for index in indices] if results.failures else clients,
        rows=rows,
        losses=losses,
        memory=memory,
        dropped=tuple(dropped),
    )
    if order.mean and indices:
        models = [torch.cat([results.models[index], *results.buffers[index : index + 1]]) for index in indices]
        mean = models[0] if len(models) == 1 else torch.stack(models).mean(0)
        report = replace(report, mean=mean, trained=len(models))
    return report


def _jobs(
    phase: LocalPhase,
    order: WorkOrder,
    got: Vectors,
    trainer: Trainer,
    population: Population,
    *,
    keep_models: bool,
) -> ClientJobs:
    """Return the jobs of an order; clients without memory and momentum share one local step."""
    clients, key = order.clients, order.key.child("local", order.round)
    shared = not phase.momentum and phase.optimizer is None and phase.optimizer_state == "fresh"
    models, buffers, steps = [got[MODEL]] * len(clients), [got[BUFFERS]] * len(clients) if BUFFERS in got else None, []
    common: LocalStep | None = None
    for index, client in enumerate(clients) if order.memory or not shared else ():
        memory = order.memory.get(client, {})
        models[index] = phase.client_start(models[index], memory)
        if buffers is not None:
            buffers[index] = phase.client_start(buffers[index], memory, of_buffers=True)
        step = common
        if step is None or memory:
            correction = phase.solver.correction(got, scoped(memory, "solver"))
            step = phase.local_step(order.round, models[index], correction, got, memory)
            common = step if shared and not memory else common
        steps.append(step)
    if not steps:
        step = phase.local_step(order.round, got[MODEL], phase.solver.correction(got, {}), got, {})
        steps = [step] * len(clients)
    batches = None
    if not phase.division.is_default:
        batches = [
            draw_batches(
                trainer, phase.division, client, population.samples[client], work, key.child(client, "batch"),
                order.key, phase.pass_position(order.memory.get(client, {})),
            )
            for client, work in zip(clients, order.works, strict=True)
        ]  # fmt: skip
    return ClientJobs(clients, order.works, models, steps, key, buffers, batches, keep_models)


def _to_device(
    device: torch.device, orders: Sequence[WorkOrder], received: Sequence[Vectors]
) -> tuple[list[WorkOrder], list[Vectors]]:
    """Copy the clients' received vectors, each once, and the memory that training reads to a device."""
    copied = []
    for order in orders:
        needed = {
            client: {name: row for name, row in rows.items() if not name.startswith("uplink/")}
            for client, rows in order.memory.items()
        }
        copied.append(replace(order, memory=tree_to(needed, device)))
    moved = {id(got): tree_to(got, device) for got in received}
    return copied, [moved[id(got)] for got in received]


def _to_server_device(report: Report, device: torch.device) -> Report:
    """Copy the updates of a report to the device of the server's vectors, and the clients' memory to the CPU."""
    rows = {name: [vector.to(device) for vector in vectors] for name, vectors in report.rows.items()}
    cpu = torch.device("cpu")
    return replace(report, rows=rows, memory=tree_to(dict(report.memory), cpu), mean=tree_to(report.mean, cpu))


def decode_broadcasts(algorithm: Algorithm, order: WorkOrder, base_vectors: Mapping[str, Vector]) -> Vectors | None:
    """Decode the broadcast of each channel; None if the model's digest is not the order's ``base``."""
    got, carried = {}, False
    for name, channel in algorithm.channels.items():
        sent = order.broadcasts[name]
        got[name] = channel.downlink.apply(base_vectors.get(name), sent.packets)
        carried |= not (len(sent.packets) == 1 and isinstance(sent.packets[0].content, torch.Tensor))
    return got if not carried or fingerprint(got[MODEL]) == order.base else None


def close_round(
    algorithm: Algorithm,
    state: ServerState,
    orders: Sequence[WorkOrder],
    reports: Iterable[Report],
    population: Population,
    **options: Any,
) -> ClosedRound:
    """Validate the reports, aggregate them in client order as they arrive, and let each channel's server step.

    ``options`` are those of `RoundAggregation`. If a report contains several uploads of a client, none is accepted; a
    second one in a later report is refused.
    """
    aggregation = RoundAggregation(algorithm, state, orders, population, **options)
    missing = {dropped.client for dropped in options.get("unreachable", ())}
    for report in in_client_order(reports, orders, missing):
        aggregation.add(report)
    return aggregation.close()


def _encoded(algorithm: Algorithm, order: WorkOrder, got: Vectors, trained: Report) -> Report:
    """Finish the solver's round, and encode the vectors of each channel with its uplink."""
    phase, clients = algorithm.local, trained.clients
    outgoing: dict[str, Any] = {**trained.rows}
    memory = dict(trained.memory)
    if type(phase.solver).finish is not BaseSolver.finish:
        work_of = dict(zip(order.clients, order.works, strict=True))
        for client, change in zip(clients, outgoing.get(MODEL, ()), strict=True):
            with naming_client(client):
                _finish(phase, order, got, client, work_of[client], change, outgoing, memory)
    rows: dict[str, Any] = {}
    for name, channel in algorithm.channels.items():
        if channel.follows is not None:
            continue
        vectors, uplink, scope = outgoing.get(name, ()), channel.uplink, f"uplink/{name}"
        if type(uplink) is direct and isinstance(vectors, torch.Tensor):
            rows[name] = vectors
            continue
        packets = rows[name] = []
        keys = order.key.child("uplink", name, order.round)
        for client, vector in zip(clients, vectors, strict=True):
            with naming_client(client):
                old_rows = scoped(order.memory.get(client, {}), scope)
                packet, new_rows = uplink.send(where_computed(uplink, vector), old_rows, keys.child(client))
            packets.append(packet)
            if new_rows:
                memory.setdefault(client, {}).update({f"{scope}/{row}": value for row, value in new_rows.items()})
    return replace(trained, rows=rows, memory={client: stored for client, stored in memory.items() if stored})


def _finish(
    phase: LocalPhase,
    order: WorkOrder,
    got: Vectors,
    client: int,
    work: Work,
    change: Vector,
    outgoing: dict[str, Any],
    memory: dict[int, Vectors],
) -> None:
    """Add a client's reports on the solver's channels and the solver's memory."""
    solver_memory = scoped(order.memory.get(client, {}), "solver")
    if not change.is_cpu:
        device = computes_on(phase.solver, change.device)
        change, got, solver_memory = change.to(device), tree_to(got, device), tree_to(solver_memory, device)
    finished = phase.solver.finish(change, work.steps, phase.lr_at(order.round), got, solver_memory)
    for name, vector in finished.reports.items():
        outgoing.setdefault(name, []).append(vector)
    rows = {f"solver/{name}": row.to("cpu") for name, row in finished.memory.items()}
    memory.setdefault(client, {}).update(rows)


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
        channels = self.algorithm.channels.items()
        wholes = [Broadcast.whole(state.vectors[name], version, channel.downlink) for name, channel in channels]
        down = sum(whole.packets[0].nbytes for whole in wholes)
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
            link, vector = channel.uplink, vectors[name]
            if isinstance(link, partial):
                link, vector = link.link, vector[: link.entries]
            compressor = getattr(link, "compressor", None)
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
