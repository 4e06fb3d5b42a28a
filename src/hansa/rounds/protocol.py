"""The story of a round: ``open_round`` makes orders, ``client_round`` turns an order into a report, ``close_round``
folds the reports. The three are pure: engines only carry orders and reports between them."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from hansa.aggregate import diversity, mean
from hansa.aggregate.base import weighted_sum
from hansa.algorithm import Algorithm
from hansa.keys import Key
from hansa.local import Shell, descend, effective_steps
from hansa.measures.base import Measure, Probe, measured
from hansa.rounds.admission import Expected, Refused, admit, repeated, sender
from hansa.rounds.cohort import Mixed, train_together
from hansa.rounds.messages import Lost, Order, Report, Trained, Upload, scoped
from hansa.types import BUFFERS, MODEL, Packed, Population, RoundContext, RowReader, State, Update, Vector, Vectors
from hansa.vectors import allocate
from hansa.vectors.arithmetic import all_finite, norm


@dataclass(frozen=True, slots=True, eq=False)
class ServerState:
    """All that the server knows between rounds, as plain trees. States are keyed by channel."""

    round: int
    vectors: Vectors
    server: State
    aggregate: State
    downlink: State

    @classmethod
    def start(cls, algorithm: Algorithm, vectors: Vectors, population: int) -> ServerState:
        """The state before the first round; channels that a solver adds start at zero."""
        x = vectors[MODEL]
        vectors = {name: vectors.get(name, torch.zeros_like(x)) for name in algorithm.channels}
        parts = algorithm.channels.items()
        return cls(
            round=0,
            vectors=vectors,
            server={name: channel.server.init(vectors[name]) for name, channel in parts},
            aggregate={name: channel.aggregate.init(vectors[name].numel(), population) for name, channel in parts},
            downlink={name: channel.downlink.init(vectors[name]) for name, channel in parts},
        )

    def tree(self) -> State:
        """The state as one plain tree, for a checkpoint."""
        return {name: getattr(self, name) for name in self.__slots__}


class Opened(NamedTuple):
    """Orders, the server's state with the broadcast made, and the bytes each client was sent."""

    orders: tuple[Order, ...]
    state: ServerState
    down_bytes: dict[int, int]


class Closed(NamedTuple):
    """The state after a round, the client memory to commit with it, and what is worth reporting."""

    state: ServerState
    memory: dict[int, Vectors]
    outcome: Outcome


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What happened in a round. ``moved`` is False where fewer than the quorum survived: then nothing changed."""

    round: int
    moved: bool
    admitted: tuple[int, ...]
    lost: tuple[Lost, ...]
    up_bytes: dict[int, int]
    peer_bytes: dict[int, int]
    exchanges: int
    train_loss: float
    update_norm: float
    diversity: float
    info: dict[str, Any]


def open_round(algorithm: Algorithm, state: ServerState, population: Population, run: str, key: Key) -> Opened:
    """Choose the participants, draw their work, make the broadcast."""
    clients = algorithm.sampler.select(state.round, population, key)
    got, after, sent = {}, {}, dict.fromkeys(clients, 0)
    for name, channel in algorithm.channels.items():
        broadcast, after[name] = channel.downlink.broadcast(
            state.vectors[name], state.downlink[name], clients, state.round, key.child("downlink", name, state.round)
        )
        got[name] = broadcast.vector
        for client in clients:
            sent[client] += 0 if _serverless(algorithm) else broadcast.nbytes(client)
    base = fingerprint(got[MODEL])
    phase = algorithm.local
    orders = []
    for cohort, members, reporters in _cohorts(algorithm, clients):
        # one number of steps for all; the batch is the largest anybody takes, and each takes at most its own samples
        draw = key.child("work", state.round, members[0])
        most = max(population.samples[client] for client in members)
        work = phase.steps.draw(members[0], most, phase.batch_size, draw)
        orders.append(Order(run, state.round, cohort, members, reporters, work, base, got, key))
    return Opened(tuple(orders), replace(state, downlink=after), sent)


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
            yield cohort, reporters if mixing.adapted else cluster, reporters


def client_round(algorithm: Algorithm, order: Order, shell: Shell, population: Population) -> Report:
    """Train a cohort and make its report. A client whose model is no longer finite is lost, not reported."""
    if algorithm.local.mixing is None:
        mixed = _train_alone(algorithm, order, shell)
    else:
        mixed = train_together(algorithm.local, order, shell, population.samples)
    uploads, memory = [], {}
    for client, trained in mixed.trained.items():
        upload, memory[client] = _upload(algorithm, order, client, trained)
        uploads.append(upload)
    return Report(
        order.cohort, tuple(uploads), memory, tuple(mixed.lost), dict(mixed.peer), mixed.exchanges, mixed.info
    )


def close_round(
    algorithm: Algorithm,
    state: ServerState,
    orders: Sequence[Order],
    reports: Iterable[Report],
    population: Population,
    *,
    quorum: int = 1,
    rows: RowReader | None = None,
    gone: Sequence[Lost] = (),
    max_norm: float = 1e12,
    measures: Sequence[Measure] = (),
) -> Closed:
    """Admit what came back, aggregate it in client order, let each channel's server step, commit the memories.

    ``state`` is the one `open_round` gave. If fewer than ``quorum`` updates are admitted nothing moves: same model,
    same moments, same memories. ``rows`` are those the server keeps of every client, ``gone`` the clients that no order
    reached.
    """
    reports = sorted(reports, key=lambda report: report.cohort)
    door = _Door(algorithm, state, orders, max_norm)
    door.lost += gone
    door.take(reports)
    admitted = tuple(sorted(door.vectors))
    needed = max(quorum, _least(algorithm, len(door.orders)))
    if len(admitted) < needed:
        door.lost += [Lost(client, "quorum", f"{len(admitted)} of {needed} needed") for client in admitted]
        return Closed(replace(state, round=state.round + 1), {}, door.outcome((), math.nan, {}))

    ctx = RoundContext(state.round, population, admitted, rows)
    vectors, server, aggregate, downlink, info = {}, {}, {}, {}, {}
    memory = {client: dict(door.memory[client]) for client in admitted if door.memory.get(client)}
    spread = math.nan
    for name, channel in algorithm.channels.items():
        updates = door.updates(name, admitted, population)
        combined = channel.aggregate.combine(updates, state.aggregate[name], ctx)
        step, server[name] = channel.server.update(combined.vector, state.server[name], ctx)
        vectors[name] = torch.add(state.vectors[name], step, out=allocate.like(state.vectors[name]))
        aggregate[name] = combined.state
        for client, kept in combined.rows.items():
            memory.setdefault(client, {}).update(kept)
        downlink[name] = channel.downlink.acknowledge(state.downlink[name], admitted, state.round)
        if name == MODEL:
            info = combined.info
            average = (
                combined.vector
                if channel.aggregate == mean()
                else weighted_sum(updates, [1 / len(updates)] * len(updates))
            )
            spread = _diversity(door, admitted, average)
    if measures:
        before = {client: door.orders[client].memory.get(client, {}) for client in admitted}
        received = {client: {name: decode() for name, decode in door.vectors[client].items()} for client in admitted}
        probe = Probe(state.round, algorithm, orders[0].key, orders[0].got, received, before, memory)
        info = {**info, **measured(measures, probe)}
    after = ServerState(state.round + 1, vectors, server, aggregate, downlink)
    return Closed(after, memory, door.outcome(admitted, spread, info))


def _least(algorithm: Algorithm, asked: int) -> int:
    """The updates that every aggregator can work with; where not even so many were asked for, it says so itself."""
    return max(min(getattr(channel.aggregate, "least", 1), asked) for channel in algorithm.channels.values())


def _serverless(algorithm: Algorithm) -> bool:
    """Whether clients keep their own models, so that the server only looks on."""
    return algorithm.local.mixing is not None and algorithm.local.mixing.persistent


def fingerprint(vector: Vector) -> bytes:
    """A digest of a model, so that an update made from another one is noticed."""
    return hashlib.blake2b(vector.detach().cpu().numpy().tobytes(), digest_size=16).digest()


def _train_alone(algorithm: Algorithm, order: Order, shell: Shell) -> Mixed:
    """A cohort of one: plain local training from the received model."""
    (client,) = order.clients
    phase, x, buffers = algorithm.local, order.got[MODEL], order.got.get(BUFFERS)
    shell.load(x, buffers)
    correction = phase.solver.correction(order.got, scoped(order.memory.get(client, {}), "solver"))
    descent = phase.descent(order.round, x, correction)
    losses = descend(shell, client, order.work, descent, order.key.child("local", order.round, client))
    change, now = torch.sub(shell.y, x, out=allocate.like(x)), shell.read_buffers()
    if all_finite(change):
        moved = None if now is None or buffers is None else now - buffers
        return Mixed({client: Trained(change, moved, math.fsum(losses.tolist()) / len(losses))})
    broken = (~torch.isfinite(losses)).nonzero()
    when = f"the loss was {float(losses[broken[0, 0]])} at step {int(broken[0, 0])}" if len(broken) else "an overflow"
    return Mixed(lost=[Lost(client, "non-finite", f"{when}; a smaller local rate or clip= may help")])


def _upload(algorithm: Algorithm, order: Order, client: int, trained: Trained) -> tuple[Upload, Vectors]:
    """Finish the solver's round and send each channel's vector through its uplink."""
    before = order.memory.get(client, {})
    phase = algorithm.local
    finished = phase.solver.finish(
        trained.change, order.work.steps, phase.lr_at(order.round), order.got, scoped(before, "solver")
    )
    outgoing = {MODEL: trained.change, **finished.reports}
    if trained.buffers is not None:
        outgoing[BUFFERS] = trained.buffers
    memory = {**trained.memory, **{f"solver/{name}": row for name, row in finished.memory.items()}}
    packets = {}
    for name, channel in algorithm.channels.items():
        scope = f"uplink/{name}"
        key = order.key.child("uplink", name, order.round, client)
        packets[name], kept = channel.uplink.send(outgoing[name], scoped(before, scope), key)
        memory.update({f"{scope}/{row}": value for row, value in kept.items()})
    return Upload(order.run, order.round, order.base, client, packets, trained.loss), memory


class _Door:
    """Where reports arrive: what was admitted of them, and who was lost."""

    def __init__(self, algorithm: Algorithm, state: ServerState, orders: Sequence[Order], max_norm: float) -> None:
        self.algorithm, self.state = algorithm, state
        self.orders = {client: order for order in orders for client in order.reporters}
        first = orders[0]
        self.expected = Expected(
            first.run,
            first.round,
            first.base,
            {client: order.cohort for client, order in self.orders.items()},
            {name: channel.uplink for name, channel in algorithm.channels.items()},
            state.vectors,
            max_norm,
        )
        self.vectors: dict[int, dict[str, Callable[[], Vector]]] = {}
        self.norms: dict[int, float] = {}
        self.losses: dict[int, float | None] = {}
        self.memory: dict[int, Vectors] = {}
        self.up_bytes: dict[int, int] = {}
        self.peer_bytes: Counter[int] = Counter()
        self.exchanges = 0
        self.info: dict[str, list[float]] = {}
        self.lost: list[Lost] = []

    def take(self, reports: Sequence[Report]) -> None:
        several = repeated(reports, self.expected)
        for report in reports:
            self.lost += report.lost
            self.peer_bytes.update(report.peer)
            self.exchanges = max(self.exchanges, report.exchanges)
            for name, value in report.info.items():
                self.info.setdefault(name, []).append(value)
            for upload in report.uploads:
                try:
                    vectors, norms, nbytes = admit(upload, self.expected, report.cohort, several)
                except Refused as refusal:
                    self.lost.append(Lost(sender(upload), refusal.reason, refusal.detail))
                    continue
                client = upload.client
                self.vectors[client], self.norms[client], self.losses[client] = vectors, norms[MODEL], upload.loss
                self.memory[client] = report.memory.get(client, {})
                self.up_bytes[client] = 0 if _serverless(self.algorithm) else sum(nbytes.values())

    def updates(self, name: str, admitted: Sequence[int], population: Population) -> list[Update]:
        phase = self.algorithm.local
        lr = phase.lr_at(self.state.round)
        found: list[Update] = []
        for client in admitted:
            order = self.orders[client]
            steps = effective_steps(order.work.steps, lr, phase.momentum, phase.solver.pull)
            decode = self.vectors[client][name]
            found.append(Packed(client, order.cohort, decode, population.samples[client], steps))
        return found

    def outcome(self, admitted: tuple[int, ...], spread: float, info: dict[str, Any]) -> Outcome:
        count = len(admitted)
        losses = [loss for client in admitted if (loss := self.losses[client]) is not None]
        means = {name: math.fsum(values) / len(values) for name, values in self.info.items()}
        return Outcome(
            round=self.state.round,
            moved=count > 0,
            admitted=admitted,
            lost=tuple(sorted(self.lost, key=lambda lost: (lost.client, lost.reason))),
            up_bytes=self.up_bytes,
            peer_bytes=dict(self.peer_bytes),
            exchanges=self.exchanges,
            train_loss=math.fsum(losses) / len(losses) if losses else math.nan,
            update_norm=math.fsum(self.norms[c] for c in admitted) / count if count else math.nan,
            diversity=spread,
            info={**means, **info},
        )


def _diversity(door: _Door, admitted: Sequence[int], average: Vector) -> float:
    """D of the reported updates with equal weights."""
    squares = [door.norms[client] * door.norms[client] for client in admitted]  # as ** they would raise, not overflow
    length = norm(average)
    combined = length * length
    return diversity(squares, [1 / len(squares)] * len(squares), combined)
