"""A round: ``open_round`` makes work orders, ``client_round`` turns orders into reports, ``close_round`` aggregates the
reports. The three are pure: engines only carry orders and reports between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from hansa.algorithm import Algorithm
from hansa.compress import Packet, ServerBroadcast
from hansa.core.errors import add_step
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.types import BUFFERS, MODEL, Population, Vector, Vectors
from hansa.core.vectors.arithmetic import computes_on, vectors_to, where_computed
from hansa.core.vectors.fingerprint import fingerprint
from hansa.gossip.executors import CohortResult, train_cohorts
from hansa.gossip.mixing import Mixing
from hansa.local.trainer import BaseTrainer, ClientJob, LocalResult, Trainer, draw_batches, train, train_by_steps
from hansa.pace.clock import RoundTiming
from hansa.rounds.aggregation import ClosedRound, RoundAggregation, ServerState, expected_upload
from hansa.rounds.many_clients import OrderColumns, ReportColumns, train_columns
from hansa.rounds.messages import Broadcast, DroppedClient, LocalUpdate, Report, Upload, WorkOrder, scoped
from hansa.rounds.scale_warning import warn_of_dominated_scale
from hansa.rounds.validation import repeated_senders


class OpenedRound(NamedTuple):
    """Work orders, each channel's broadcast, the server's state after it, and the bytes each client was sent.

    Rounds on a virtual clock also have their timing, and the clients whose updates come too late.
    """

    orders: Sequence[WorkOrder]
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
        copies = _HostCopies()
        orders: Sequence[WorkOrder]
        if isinstance(self.orders, OrderColumns):
            orders = replace(self.orders, broadcasts=copies.broadcasts(self.orders.broadcasts))
        else:
            orders = tuple(replace(order, broadcasts=copies.broadcasts(order.broadcasts)) for order in self.orders)
        sent = {name: copies.server_broadcast(broadcast) for name, broadcast in self.broadcasts.items()}
        return self._replace(orders=orders, broadcasts=sent)


class _HostCopies:
    """Copies of what is sent on the CPU, one of each vector; what was shared stays shared."""

    def __init__(self) -> None:
        self._vectors: dict[int, Vector] = {}
        self._broadcasts: dict[int, Mapping[str, Broadcast]] = {}

    def vector(self, x: Vector) -> Vector:
        if id(x) not in self._vectors:
            self._vectors[id(x)] = x.cpu()
        return self._vectors[id(x)]

    def packets(self, packets: Sequence[Packet]) -> tuple[Packet, ...]:
        return tuple(
            Packet.of(self.vector(packet.content), packet.kind) if isinstance(packet.content, torch.Tensor) else packet
            for packet in packets
        )

    def broadcasts(self, sent: Mapping[str, Broadcast]) -> Mapping[str, Broadcast]:
        if id(sent) not in self._broadcasts:
            self._broadcasts[id(sent)] = {
                name: each._replace(packets=self.packets(each.packets)) for name, each in sent.items()
            }
        return self._broadcasts[id(sent)]

    def server_broadcast(self, sent: ServerBroadcast) -> ServerBroadcast:
        messages = {client: self.packets(packets) for client, packets in sent.messages.items()}
        return replace(sent, vector=self.vector(sent.vector), messages=messages)


def open_round(algorithm: Algorithm, state: ServerState, population: Population, run: str, key: Key) -> OpenedRound:
    """Select the participants, draw their work and make the broadcasts."""
    clients = algorithm.sampler.select(state.round, state.population_with_stats(population), key)
    broadcasts, after, sizes = {}, {}, list[dict[int, int]]()
    for name, channel in algorithm.channels.items():
        x = where_computed(channel.downlink, state.vectors[name])
        broadcasts[name], after[name] = channel.downlink.broadcast(
            x, state.downlink[name], clients, state.round, key.child("downlink", name, state.round)
        )
        sizes.append(dict.fromkeys(clients, 0) if algorithm.serverless else broadcasts[name].sizes(clients))
    sent = sizes[0] if len(sizes) == 1 else {client: sum(each[client] for each in sizes) for client in clients}
    whole = {name: Broadcast.whole(broadcast.vector, broadcast.version) for name, broadcast in broadcasts.items()}
    base = fingerprint(broadcasts[MODEL].vector)
    phase = algorithm.local
    after_broadcast = replace(state, downlink=after)
    if phase.mixing is None:
        works = phase.draw_works(clients, population.samples, key.child("work", state.round))
        columns = OrderColumns(run, state.round, base, whole, key, tuple(clients), works)
        return OpenedRound(columns, broadcasts, after_broadcast, sent)
    orders = []
    for cohort, members, reporters in _clusters(phase.mixing, clients):
        # one number of steps for all; the batch size is the largest drawn, capped per client by its sample count
        draw = key.child("work", state.round, members[0])
        most = max(population.samples[client] for client in members)
        work = phase.draw_work(members[0], most, draw)
        orders.append(WorkOrder(run, state.round, cohort, members, reporters, work, base, whole, key))
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
    """Decode the broadcasts, train the cohort of each order and return the reports.

    Clients that train alone go to the trainer in one call: Python code between native steps is slow, since the steps
    evict it from the cache. The result is bit-identical to one order at a time. A client whose model becomes
    non-finite drops out.

    Args:
        algorithm: The method, bound to the model.
        orders: The work orders; shared broadcasts are decoded once.
        trainer: Where the clients train.
        population: The clients' sample counts.
        base_vectors: By channel, the vector of the broadcasts' base version, if they have one.
    """
    decoded: dict[tuple[int, bytes], Vectors | None] = {}
    for order in orders:
        place = id(order.broadcasts), order.base
        if place not in decoded:
            decoded[place] = decode_broadcasts(algorithm, order, base_vectors or {})
    received = [decoded[id(order.broadcasts), order.base] for order in orders]
    able = [order for order, got in zip(orders, received, strict=True) if got is not None]
    vectors = [got for got in received if got is not None]
    trained = _train(algorithm, able, vectors, trainer, population) if able else []
    if able and able[0].round == 0:
        warn_of_dominated_scale(algorithm, able[0].run, trained[0].updates, getattr(trainer, "layout", None))
    results = iter(trained)
    return [
        _undecodable(order) if got is None else _report(algorithm, order, got, next(results))
        for order, got in zip(orders, received, strict=True)
    ]


def client_round_columns(algorithm: Algorithm, orders: OrderColumns, trainer: Trainer) -> ReportColumns | None:
    """`client_round` of many clients at once; None if they have to be trained with single orders.

    Args:
        algorithm: The method, bound to the model; see `report_as_columns` for which methods.
        orders: The work orders.
        trainer: Where the clients train.
    """
    got = decode_broadcasts(algorithm, orders[0], {})
    if got is None or trainer.y.device.type != "cpu" or not got[MODEL].is_cpu:
        return None
    return train_columns(trainer, orders, _job(algorithm, orders[0], got))


def _undecodable(order: WorkOrder) -> Report:
    detail = "the broadcast does not decode to the model that was sent"
    return Report(order.cohort, dropped=tuple(DroppedClient(client, "base", detail) for client in order.reporters))


def _report(algorithm: Algorithm, order: WorkOrder, got: Vectors, result: CohortResult) -> Report:
    """Make the report of a cohort that has trained."""
    uploads, memory = [], {}
    for client, update in result.updates.items():
        try:
            upload, memory[client] = _upload(algorithm, order, got, client, update)
        except Exception as error:
            add_step(error, client)
            raise
        uploads.append(upload)
    return Report(
        order.cohort,
        tuple(uploads),
        memory,
        tuple(result.dropped),
        dict(result.peer_bytes),
        result.exchanges,
        result.info,
        result.mean,
        result.alive,
    )


def _train(
    algorithm: Algorithm,
    orders: Sequence[WorkOrder],
    received: Sequence[Vectors],
    trainer: Trainer,
    population: Population,
) -> list[CohortResult]:
    """Train on the trainer's device. ``received`` has the vectors of each order; the updates return to where these are:
    on the CPU, or on the server's device."""
    device, home = trainer.y.device, received[0][MODEL].device
    if device.type == home.type == "cpu":
        return _train_there(algorithm, orders, received, trainer, population)
    orders, received = to_device(device, orders, received)
    return [bring_home(result, home) for result in _train_there(algorithm, orders, received, trainer, population)]


def _train_there(
    algorithm: Algorithm,
    orders: Sequence[WorkOrder],
    received: Sequence[Vectors],
    trainer: Trainer,
    population: Population,
) -> list[CohortResult]:
    if algorithm.local.mixing is not None:
        return train_cohorts(algorithm.local, orders, received, trainer, population.samples)
    jobs = _with_batches(algorithm, orders, _jobs(algorithm, orders, received), trainer, population)
    keeps_model = algorithm.local.private_blocks is not None or any(order.mean for order in orders)
    results = None if keeps_model else with_defaults(trainer, BaseTrainer).train_clients(jobs)
    if results is None:
        train_one = train if keeps_model else train_by_steps  # there is no fast path for these jobs
        finished = [
            _finish_job(algorithm, order, job, train_one(trainer, job), trainer)
            for order, job in zip(orders, jobs, strict=True)
        ]
    else:
        triples = zip(orders, jobs, results, strict=True)
        finished = [_finish_job(algorithm, order, job, result, trainer) for order, job, result in triples]
    if algorithm.local.division.continued:
        for order, result in zip(orders, finished, strict=True):
            _add_places(algorithm, order, result, population)
    return finished


def _add_places(algorithm: Algorithm, order: WorkOrder, result: CohortResult, population: Population) -> None:
    """Add to the clients' memory where they are in their passes."""
    for client, update in result.updates.items():
        update.memory.update(
            algorithm.local.memory_of_place(
                population.samples[client], order.work.batch_size, order.work.steps, order.memory.get(client, {})
            )
        )


def to_device(
    device: torch.device, orders: Sequence[WorkOrder], received: Sequence[Vectors]
) -> tuple[list[WorkOrder], list[Vectors]]:
    """Copy the clients' received vectors, each once, and the memory that training reads to a device."""

    def read_in_training(rows: Vectors) -> Vectors:
        return {name: row for name, row in rows.items() if not name.startswith("uplink/")}

    copied = [
        replace(
            order,
            memory={client: vectors_to(read_in_training(rows), device) for client, rows in order.memory.items()},
        )
        for order in orders
    ]
    once = {id(got): vectors_to(got, device) for got in received}
    return copied, [once[id(got)] for got in received]


def bring_home(result: CohortResult, home: torch.device) -> CohortResult:
    """Copy a training result to where the server's vectors came from, and the clients' memory to the CPU."""
    result.updates = {
        client: replace(
            update,
            delta=update.delta.to(home),
            buffers=None if update.buffers is None else update.buffers.to(home),
            memory=vectors_to(update.memory, torch.device("cpu")),
        )
        for client, update in result.updates.items()
    }
    result.mean = None if result.mean is None else result.mean.to("cpu")
    return result


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
    reports: Sequence[Report],
    population: Population,
    **options: Any,
) -> ClosedRound:
    """Validate the reports, aggregate them in client order, and let each channel's server step.

    A driver that receives reports one by one uses `RoundAggregation`, which has the same ``options``. If a client sent
    several uploads, none of them is accepted.
    """
    several = repeated_senders(reports, expected_upload(algorithm, state, orders, math.inf)) if orders else ()
    closing = RoundAggregation(algorithm, state, orders, population, repeated=several, **options)
    for report in sorted(reports, key=lambda report: report.cohort):
        closing.add(report)
    return closing.close()


def _jobs(algorithm: Algorithm, orders: Sequence[WorkOrder], received: Sequence[Vectors]) -> list[ClientJob]:
    """Make the job of each client; clients of one version without memory and momentum share one local step."""
    phase, jobs = algorithm.local, list[ClientJob]()
    alike = not phase.momentum and phase.optimizer is None and phase.optimizer_state == "fresh"
    common: dict[tuple[int, int], ClientJob] = {}
    for order, got in zip(orders, received, strict=True):
        same = None if order.memory else common.get((id(got), order.round))
        if same is None:
            jobs.append(_job(algorithm, order, got))
            if alike and not order.memory:
                common[id(got), order.round] = jobs[-1]
        else:
            (client,) = order.clients
            key = order.key.child("local", order.round, client)
            jobs.append(ClientJob(same.x, client, order.work, same.step, key, same.buffers))
    return jobs


def _with_batches(
    algorithm: Algorithm, orders: Sequence[WorkOrder], jobs: list[ClientJob], trainer: Trainer, population: Population
) -> list[ClientJob]:
    """Add to the jobs the batches that trainers do not draw themselves."""
    phase = algorithm.local
    if phase.division.is_default:
        return jobs
    return [
        job._replace(
            batches=draw_batches(
                trainer,
                phase.division,
                job.client,
                population.samples[job.client],
                job.work,
                job.key.child("batch"),
                order.key,
                phase.place(order.memory.get(job.client, {})),
            )
        )
        for order, job in zip(orders, jobs, strict=True)
    ]


def _job(algorithm: Algorithm, order: WorkOrder, got: Vectors) -> ClientJob:
    """Make the job of a client that trains alone, from the received model with the client's private blocks."""
    (client,) = order.clients
    phase, memory = algorithm.local, order.memory.get(client, {})
    x, buffers = phase.client_start(got[MODEL], memory), got.get(BUFFERS)
    if buffers is not None:
        buffers = phase.client_start(buffers, memory, of_buffers=True)
    correction = phase.solver.correction(got, scoped(memory, "solver"))
    step = phase.local_step(order.round, x, correction, got, memory)
    return ClientJob(x, client, order.work, step, order.key.child("local", order.round, client), buffers)


def _finish_job(
    algorithm: Algorithm, order: WorkOrder, job: ClientJob, result: LocalResult, trainer: Trainer
) -> CohortResult:
    """Make the result of a client that trained alone."""
    phase, client, (delta, losses, finite) = algorithm.local, job.client, result
    if not finite:
        broken = next((t for t, loss in enumerate(losses) if not math.isfinite(loss)), None)
        when = "an overflow" if broken is None else f"the loss was {losses[broken]} at step {broken}"
        detail = f"{when}; a smaller local learning rate or max_grad_norm= may help"
        return CohortResult(dropped=[DroppedClient(client, "non-finite", detail)])
    after, change = trainer.read_buffers(), None
    if after is not None and job.buffers is not None:
        change = phase.without_private_blocks(after - job.buffers, of_buffers=True)
    memory = phase.memory_after(job.step, trainer.y, after)
    update = LocalUpdate(phase.without_private_blocks(delta), change, math.fsum(losses) / len(losses), memory)
    trained = CohortResult({client: update})
    if order.mean:
        trained.mean, trained.alive = trainer.y.clone() if after is None else torch.cat([trainer.y, after]), 1
    return trained


def _upload(
    algorithm: Algorithm, order: WorkOrder, got: Vectors, client: int, trained: LocalUpdate
) -> tuple[Upload, Vectors]:
    """Finish the solver's round and encode each channel's vector with its uplink."""
    before = order.memory.get(client, {})
    phase, delta, own = algorithm.local, trained.delta, scoped(before, "solver")
    if not delta.is_cpu:
        place = computes_on(phase.solver, delta.device)
        delta, got, own = delta.to(place), vectors_to(got, place), vectors_to(own, place)
    finished = phase.solver.finish(delta, order.work.steps, phase.lr_at(order.round), got, own)
    outgoing = {MODEL: trained.delta, **finished.reports}
    if trained.buffers is not None:
        outgoing[BUFFERS] = trained.buffers
    memory = {**trained.memory, **{f"solver/{name}": row.to("cpu") for name, row in finished.memory.items()}}
    packets = {}
    for name, channel in algorithm.channels.items():
        if channel.follows is not None:
            continue
        scope = f"uplink/{name}"
        key = order.key.child("uplink", name, order.round, client)
        x = where_computed(channel.uplink, outgoing[name])
        packets[name], link_memory = channel.uplink.send(x, scoped(before, scope), key)
        memory.update({f"{scope}/{row}": value for row, value in link_memory.items()})
    return Upload(order.run, order.round, order.base, client, packets, trained.loss), memory
