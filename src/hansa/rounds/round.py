"""The story of a round: ``open_round`` makes orders, ``client_round`` turns an order into a report, ``close_round``
folds the reports. The three are pure: engines only carry orders and reports between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from hansa.algorithm import Algorithm
from hansa.compress import ServerBroadcast
from hansa.core.keys import Key
from hansa.core.protocols import declared
from hansa.core.types import BUFFERS, MODEL, Population, Vector, Vectors
from hansa.core.vectors.fingerprint import fingerprint
from hansa.local import ClientJob, LocalResult, Trainer, train
from hansa.rounds.aggregation import ClosedRound, RoundAggregation, expected
from hansa.rounds.cohort import train_together
from hansa.rounds.cohort_result import CohortResult
from hansa.rounds.device_transfer import away, home
from hansa.rounds.messages import Broadcast, DroppedClient, LocalUpdate, Report, Upload, WorkOrder, scoped
from hansa.rounds.state import ServerState
from hansa.rounds.validation import repeated


class OpenedRound(NamedTuple):
    """Orders, each channel's broadcast, the server's state with it made, and the bytes each client was sent."""

    orders: tuple[WorkOrder, ...]
    broadcasts: Mapping[str, ServerBroadcast]
    state: ServerState
    down_bytes: dict[int, int]

    def addressed(self, order: WorkOrder) -> WorkOrder:
        """The order with the packets that its first reporter is really sent, as a network would carry them."""
        receiver = order.reporters[0]
        mail = {
            name: Broadcast(sent.version, sent.bases[receiver], tuple(sent.packets(receiver)))
            for name, sent in self.broadcasts.items()
        }
        return replace(order, broadcasts=mail)


def open_round(algorithm: Algorithm, state: ServerState, population: Population, run: str, key: Key) -> OpenedRound:
    """Choose the participants, draw their work, make the broadcast."""
    clients = algorithm.sampler.select(state.round, state.seen(population), key)
    broadcasts, after, sent = {}, {}, dict.fromkeys(clients, 0)
    for name, channel in algorithm.channels.items():
        broadcasts[name], after[name] = channel.downlink.broadcast(
            state.vectors[name], state.downlink[name], clients, state.round, key.child("downlink", name, state.round)
        )
        for client in clients:
            sent[client] += 0 if algorithm.serverless else broadcasts[name].nbytes(client)
    mail = {name: Broadcast.whole(made.vector, made.version) for name, made in broadcasts.items()}
    base = fingerprint(broadcasts[MODEL].vector)
    phase = algorithm.local
    orders = []
    for cohort, members, reporters in _cohorts(algorithm, clients):
        # one number of steps for all; the batch is the largest anybody takes, and each takes at most its own samples
        draw = key.child("work", state.round, members[0])
        most = max(population.samples[client] for client in members)
        work = phase.steps.draw(members[0], most, phase.batch_size, draw)
        orders.append(WorkOrder(run, state.round, cohort, members, reporters, work, base, mail, key))
    return OpenedRound(tuple(orders), broadcasts, replace(state, downlink=after), sent)


def _cohorts(algorithm: Algorithm, clients: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Who trains with whom, and who of them reports: everybody alone, or clusters that gossip."""
    mixing = algorithm.local.mixing
    if mixing is None:
        yield from ((cohort, (client,), (client,)) for cohort, client in enumerate(clients))
        return
    chosen = set(clients)
    for cohort, cluster in enumerate(mixing.resolved()):
        reporters = tuple(sorted(chosen.intersection(cluster)))
        if reporters:  # what a cluster does that nobody reports of changes nothing
            yield cohort, reporters if mixing.reporters_only else cluster, reporters


def client_round(
    algorithm: Algorithm,
    order: WorkOrder,
    shell: Trainer,
    population: Population,
    held: Mapping[str, Vector] | None = None,
) -> Report:
    """Unpack the mail, train a cohort and make its report. A client whose model is no longer finite is lost.

    ``held`` has, by channel, the vector that the mail's packets build upon, where they build upon one.
    """
    got = received(algorithm, order, held or {})
    if got is None:
        lost = [
            DroppedClient(client, "base", "the mail does not make the model that was sent")
            for client in order.reporters
        ]
        return Report(order.cohort, dropped=tuple(lost))
    if (device := shell.y.device).type == "cpu":
        mixed = _trained(algorithm, order, got, shell, population)
    else:
        mixed = home(_trained(algorithm, *away(device, order, got), shell, population))
    return _report(algorithm, order, got, mixed)


def _report(algorithm: Algorithm, order: WorkOrder, got: Vectors, mixed: CohortResult) -> Report:
    """What a cohort sends after it has trained."""
    uploads, memory = [], {}
    for client, trained in mixed.trained.items():
        upload, memory[client] = _upload(algorithm, order, got, client, trained)
        uploads.append(upload)
    return Report(
        order.cohort,
        tuple(uploads),
        memory,
        tuple(mixed.lost),
        dict(mixed.peer),
        mixed.exchanges,
        mixed.info,
        mixed.mean,
        mixed.alive,
    )


def _trained(
    algorithm: Algorithm, order: WorkOrder, got: Vectors, shell: Trainer, population: Population
) -> CohortResult:
    if algorithm.local.mixing is None:
        return _train_alone(algorithm, order, got, shell)
    return train_together(algorithm.local, order, got, shell, population.samples)


def received(algorithm: Algorithm, order: WorkOrder, held: Mapping[str, Vector]) -> Vectors | None:
    """What the mail comes to on each channel; None where it is not the model that the order names."""
    got, carried = {}, False
    for name, channel in algorithm.channels.items():
        sent = order.broadcasts[name]
        got[name] = channel.downlink.apply(held.get(name), sent.packets)
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
    """Admit what came back, aggregate it in client order, let each channel's server step.

    It is the fold of all reports and nothing else; a driver that has them one by one uses `Closing`, which has the
    ``options`` and folds as they arrive. Of a client that sent several answers none is taken.
    """
    several = repeated(reports, expected(algorithm, state, orders, math.inf)) if orders else ()
    closing = RoundAggregation(algorithm, state, orders, population, several=several, **options)
    for report in sorted(reports, key=lambda report: report.cohort):
        closing.add(report)
    return closing.close()


def client_rounds(
    algorithm: Algorithm, orders: Sequence[WorkOrder], shell: Trainer, population: Population
) -> list[Report]:
    """`client_round` of several orders, to the bit. Where the shell can train one client after the other natively, all
    else is done before and after: what is interpreted runs slowly next to steps that take up the whole cache."""
    phase, found, started = algorithm.local, None, list[ClientJob]()
    alone = phase.mixing is None and phase.private_blocks is None and BUFFERS not in algorithm.channels
    if orders and alone and shell.y.device.type == "cpu" and not any(order.mean for order in orders):
        mail = orders[0].broadcasts
        got = received(algorithm, orders[0], {}) if all(order.broadcasts is mail for order in orders) else None
        if got is not None:
            started = _all_started(algorithm, orders, got)
            found = declared(shell, Trainer, "phases")(started)
    if found is None or got is None:
        return [client_round(algorithm, order, shell, population) for order in orders]
    return [
        _report(algorithm, order, got, _ended(algorithm, order, begun, moved, shell, None))
        for order, begun, moved in zip(orders, started, found, strict=True)
    ]


def _all_started(algorithm: Algorithm, orders: Sequence[WorkOrder], got: Vectors) -> list[ClientJob]:
    """`_started` of each; clients that remember nothing and build up no momentum have one descent in common."""
    phase, made = algorithm.local, list[ClientJob]()
    alike = not phase.momentum and phase.optimizer is None and phase.optimizer_state == "fresh"
    common: ClientJob | None = None
    for order in orders:
        if common is None or order.memory:
            made.append(_started(algorithm, order, got))
            if alike and not order.memory:
                common = made[-1]
        else:
            (client,) = order.clients
            key = order.key.child("local", order.round, client)
            made.append(ClientJob(common.x, client, order.work, common.descent, key))
    return made


def _started(algorithm: Algorithm, order: WorkOrder, got: Vectors) -> ClientJob:
    """A cohort of one about to train: from the received model, with its own private blocks in it."""
    (client,) = order.clients
    phase, memory = algorithm.local, order.memory.get(client, {})
    x = phase.client_start(got[MODEL], memory)
    correction = phase.solver.correction(got, scoped(memory, "solver"))
    descent = phase.local_step(order.round, x, correction, got, memory)
    return ClientJob(x, client, order.work, descent, order.key.child("local", order.round, client))


def _train_alone(algorithm: Algorithm, order: WorkOrder, got: Vectors, shell: Trainer) -> CohortResult:
    """A cohort of one: plain local training."""
    (client,) = order.clients
    buffers, memory = got.get(BUFFERS), order.memory.get(client, {})
    start = None if buffers is None else algorithm.local.client_start(buffers, memory, of_buffers=True)
    one = _started(algorithm, order, got)
    moved = train(shell, one.x, start, client, order.work, one.descent, one.key)
    return _ended(algorithm, order, one, moved, shell, start)


def _ended(
    algorithm: Algorithm, order: WorkOrder, one: ClientJob, moved: LocalResult, shell: Trainer, start: Vector | None
) -> CohortResult:
    """What a client's training came to; ``start`` are the buffers before it."""
    phase, client, (change, losses, finite) = algorithm.local, one.client, moved
    if finite:
        now = shell.read_buffers()
        apart = None if now is None or start is None else phase.without_private_blocks(now - start, of_buffers=True)
        loss = math.fsum(losses) / len(losses)
        made = CohortResult(
            {
                client: LocalUpdate(
                    phase.without_private_blocks(change), apart, loss, phase.memory_after(one.descent, shell.y, now)
                )
            }
        )
        if order.mean:
            made.mean, made.alive = shell.y.clone() if now is None else torch.cat([shell.y, now]), 1
        return made
    broken = next((t for t, loss in enumerate(losses) if not math.isfinite(loss)), None)
    when = "an overflow" if broken is None else f"the loss was {losses[broken]} at step {broken}"
    return CohortResult(lost=[DroppedClient(client, "non-finite", f"{when}; a smaller local rate or clip= may help")])


def _upload(
    algorithm: Algorithm, order: WorkOrder, got: Vectors, client: int, trained: LocalUpdate
) -> tuple[Upload, Vectors]:
    """Finish the solver's round and send each channel's vector through its uplink."""
    before = order.memory.get(client, {})
    phase = algorithm.local
    finished = phase.solver.finish(
        trained.change, order.work.steps, phase.lr_at(order.round), got, scoped(before, "solver")
    )
    outgoing = {MODEL: trained.change, **finished.reports}
    if trained.buffers is not None:
        outgoing[BUFFERS] = trained.buffers
    memory = {**trained.memory, **{f"solver/{name}": row for name, row in finished.memory.items()}}
    packets = {}
    for name, channel in algorithm.channels.items():
        if channel.follows is not None:
            continue
        scope = f"uplink/{name}"
        key = order.key.child("uplink", name, order.round, client)
        packets[name], kept = channel.uplink.send(outgoing[name], scoped(before, scope), key)
        memory.update({f"{scope}/{row}": value for row, value in kept.items()})
    return Upload(order.run, order.round, order.base, client, packets, trained.loss), memory
