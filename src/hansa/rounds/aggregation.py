"""Aggregation of a round: validate reports in cohort order, aggregate them, and step each channel's server."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from hansa.aggregate import BaseAggregator
from hansa.aggregate.base import Combined, Participants, RunningAggregate, RunningMean
from hansa.algorithm import Algorithm
from hansa.compress import Packet
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.types import (
    BUFFERS,
    MODEL,
    ClientStats,
    EncodedUpdate,
    Population,
    RoundContext,
    RowReader,
    State,
    Update,
    Vector,
    Vectors,
)
from hansa.core.vectors import allocator
from hansa.core.vectors.arithmetic import all_finite, computes_on, tree_to, where_computed
from hansa.local import effective_steps
from hansa.local.solvers import BaseSolver
from hansa.local.work import Work
from hansa.rounds.messages import DroppedClient, Report, WorkOrder
from hansa.rounds.validation import (
    ExpectedUpload,
    RefusedUpdate,
    repeated_senders,
    sender_of,
    validate_rows,
    validate_upload,
)

StageMemory = Callable[[int, Vectors], None]


@dataclass(frozen=True, slots=True, eq=False)
class ServerState:
    """The server's state between rounds, as plain trees keyed by channel."""

    round: int
    vectors: Vectors
    server: State
    aggregate: State
    downlink: State
    heard: State = field(default_factory=dict)
    """The last statistics of every client, where a component needs them."""
    pace: State = field(default_factory=dict)
    """The virtual clock, and for asynchronous methods the event queue and the versions of jobs in flight."""

    @classmethod
    def start(cls, algorithm: Algorithm, vectors: Vectors, population: int) -> ServerState:
        """Return the state before the first round; channels that a solver adds start at zero."""
        x = vectors[MODEL]
        vectors = {name: vectors.get(name, torch.zeros_like(x)) for name in algorithm.channels}
        parts = algorithm.channels.items()
        return cls(
            round=0,
            vectors=vectors,
            server={name: channel.server.init(vectors[name]) for name, channel in parts},
            aggregate={
                name: channel.aggregate.init(vectors[name].numel(), population)
                for name, channel in parts
                if channel.follows is None
            },
            downlink={name: channel.downlink.init(vectors[name]) for name, channel in parts},
            heard=ClientStats.empty(population)._asdict() if algorithm.needs_client_stats else {},
        )

    def population_with_stats(self, population: Population) -> Population:
        """Return the population as samplers and aggregators see it."""
        return replace(population, stats=ClientStats(**self.heard)) if self.heard else population

    def on_device(self, algorithm: Algorithm, device: torch.device) -> ServerState:
        """Return the state with the vectors on a device, and each component's state where the component computes."""

        def placed(states: State, component: str) -> State:
            components = ((name, getattr(algorithm.channels[name], component)) for name in states)
            return {name: tree_to(states[name], computes_on(part, device)) for name, part in components}

        return replace(
            self,
            vectors=tree_to(self.vectors, device),
            server=placed(self.server, "server"),
            aggregate=placed(self.aggregate, "aggregate"),
            downlink=placed(self.downlink, "downlink"),
            pace=tree_to(self.pace, device),
        )

    def tree(self) -> State:
        """Return the state as one plain tree, for a checkpoint."""
        names = self.__slots__ if self.pace else [name for name in self.__slots__ if name != "pace"]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The outcome of a round. ``applied`` is False if fewer valid updates than the quorum arrived; then nothing
    changed. Losses and norms are those of all valid uploads."""

    round: int
    applied: bool
    admitted: tuple[int, ...]
    dropped: tuple[DroppedClient, ...]
    up_bytes: dict[int, int]
    peer_bytes: dict[int, int]
    exchanges: int
    train_loss: float
    update_norm: float
    info: dict[str, Any]
    losses: Mapping[int, float | None]
    norms: Mapping[int, float]


class ClosedRound(NamedTuple):
    """The state after a round, the client memory to commit with it, the outcome, and the aggregation for diagnostics,
    None if no update was applied."""

    state: ServerState
    memory: dict[int, Vectors]
    outcome: Outcome
    aggregation: RoundAggregation | None


class RoundAggregation:
    """The aggregation of one round: `add` every report in the order of the clients, then `close`.

    Updates are aggregated as they arrive if the channel's aggregator supports it and ``keep_updates`` is False. If a
    report contains several uploads of one client, none is accepted; a duplicate in a later report is refused.

    Args:
        algorithm: The method, bound to the model.
        state: The server state that `open_round` returned.
        orders: The round's work orders, in the order of aggregation.
        population: The clients' sample counts.
        quorum: The smallest number of valid updates that changes the model.
        rows: Reads the rows that the server keeps per client.
        unreachable: Clients that received no order.
        max_norm: The largest accepted norm of an update.
        keep_updates: Keep all updates for diagnostics.
        stage_memory: Called with each accepted client's memory at once, instead of collecting it in
            `ClosedRound.memory`; commit it only if the round is applied.
        key: The run's key; by default that of the orders.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        state: ServerState,
        orders: Sequence[WorkOrder],
        population: Population,
        *,
        quorum: int = 1,
        rows: RowReader | None = None,
        unreachable: Sequence[DroppedClient] = (),
        max_norm: float = 1e12,
        keep_updates: bool = False,
        stage_memory: StageMemory | None = None,
        key: Key | None = None,
    ) -> None:
        self.algorithm, self.state, self.population = algorithm, state, population
        self.key = key or (orders[0].key if orders else Key(0))
        self.quorum, self.rows = quorum, rows
        self.orders = [order for order in orders if order.reporters]
        gossips = algorithm.local.mixing is not None
        clients = [client for order in orders for client in order.reporters]
        cohorts: Iterable[int] = range(len(clients))
        if gossips:
            cohorts = [order.cohort or 0 for order in orders for _ in order.reporters]
        self.cohorts = dict(zip(clients, cohorts, strict=True))
        self.dropped = list(unreachable)
        self.norms: dict[int, float] = {}
        self.losses: dict[int, float | None] = {}
        self.updates: dict[str, list[Update]] = {}
        """The updates of each channel that are not added as they arrive."""
        self.combined: dict[str, Combined] = {}
        self._stage_memory = stage_memory
        self._expected = expected_upload(algorithm, state, orders, max_norm) if orders else None
        self._running: dict[str, RunningAggregate] = {}
        for name, channel in algorithm.channels.items():
            start_running = with_defaults(channel.aggregate, BaseAggregator).running
            if channel.follows is not None:
                continue
            if start_running is None or keep_updates or gossips or not self.orders:
                self.updates[name] = []
            else:
                self._running[name] = start_running(Participants.of(sorted(clients), self.cohorts, population.samples))
        self._memory: dict[int, Vectors] = {}
        self._up: dict[int, int] = {}
        self._peer: Counter[int] = Counter()
        self._exchanges = 0
        self._steps: dict[tuple[int, int], float] = {}
        self._info: dict[str, list[float]] = {}
        self._models: tuple[Vector, int] | None = None  # the sum of local models, and their number

    @cached_property
    def _order_of(self) -> dict[int, tuple[WorkOrder, Work]]:
        """The order and the work of each reporter."""
        if self.algorithm.local.mixing is not None:
            return {client: (order, order.works[0]) for order in self.orders for client in order.reporters}
        return {
            client: (order, work)
            for order in self.orders
            for client, work in zip(order.clients, order.works, strict=True)
        }

    def add(self, report: Report) -> None:
        """Validate a report's uploads; add the valid ones and record why the others were refused.

        A matrix of uploads is added at once if all its rows are valid and the aggregate is a running mean.
        """
        self.dropped += report.dropped
        if report.peer_bytes:
            self._peer.update(report.peer_bytes)
        self._exchanges = max(self._exchanges, report.exchanges)
        for name, value in report.info.items():
            self._info.setdefault(name, []).append(value)
        self._add_models(report)
        if self._expected is None or not report.clients:
            return
        clients, running = report.clients, self._running.get(MODEL)
        if (
            isinstance(running, RunningMean)
            and (norms := validate_rows(report, self._expected, self.norms)) is not None
        ):
            changes = report.rows[MODEL]
            assert isinstance(changes, torch.Tensor)
            self.norms.update(zip(clients, norms, strict=True))
            self.losses.update(zip(clients, report.losses, strict=True))
            self._up.update(dict.fromkeys(clients, Packet.of(changes[0]).nbytes))
            for client, memory in report.memory.items():
                if client in self.norms:
                    self._store_memory(client, memory)
            running.add_rows(clients, changes)
            return
        repeated = repeated_senders(report, self._expected) if len(clients) > 1 else ()
        for index in range(len(clients)):
            self._add_upload(report, index, self._expected, repeated)

    def _add_models(self, report: Report) -> None:
        """Add the mean of a report's local models, requested for a measure; ignore one that is non-finite or has the
        wrong size."""
        mean, size = report.mean, sum(self.state.vectors[name].numel() for name in self._model_channels())
        if mean is not None and report.trained > 0 and mean.shape == (size,) and all_finite(mean):
            total, count = self._models or (torch.zeros_like(mean, dtype=torch.float64), 0)
            self._models = total + mean.double() * report.trained, count + report.trained

    def mean_model(self) -> Vectors | None:
        """Return w' = mean_i w_i over the final local models of all clients of all cohorts, if it was requested."""
        if self._models is None:
            return None
        total, count = self._models
        like = {name: self.state.vectors[name] for name in self._model_channels()}
        parts = torch.split(total / count, [vector.numel() for vector in like.values()])
        return {name: part.to(vector.dtype) for (name, vector), part in zip(like.items(), parts, strict=True)}

    def _model_channels(self) -> list[str]:
        return [name for name in (MODEL, BUFFERS) if name in self.state.vectors]

    def _add_upload(self, report: Report, index: int, expected: ExpectedUpload, repeated: Collection[int]) -> None:
        client, loss = report.clients[index], report.losses[index]
        try:
            vectors, norms, nbytes = validate_upload(report, index, expected, repeated)
            if client in self.norms:
                raise RefusedUpdate("duplicate", f"client {client} sent more than one update this round")
        except RefusedUpdate as refusal:
            self.dropped.append(DroppedClient(sender_of(client), refusal.reason, refusal.detail))
            return
        self.norms[client], self.losses[client] = norms[MODEL], loss
        self._up[client] = 0 if self.algorithm.serverless else sum(nbytes.values())
        self._store_memory(client, report.memory.get(client, {}))
        for name, decode in vectors.items():
            update = self._update(name, client, decode, loss)
            if name in self._running:
                self._running[name].add(update)
            else:
                self.updates[name].append(update)

    def _store_memory(self, client: int, memory: Vectors) -> None:
        if memory and self._stage_memory is not None:
            self._stage_memory(client, memory)
        elif memory:
            self._memory[client] = dict(memory)

    def _update(self, name: str, client: int, decode: Any, loss: float | None) -> Update:
        order, work = self._order_of[client]
        steps = self._steps.get((work.steps, order.round))
        if steps is None:
            phase = self.algorithm.local
            prox_weight = with_defaults(phase.solver, BaseSolver).prox_weight
            steps = effective_steps(work.steps, phase.lr_at(order.round), phase.momentum, prox_weight)
            self._steps[work.steps, order.round] = steps
        samples, cohort = self.population.samples[client], self.cohorts[client]
        if not self.algorithm.pace.asynchronous:
            return EncodedUpdate(client, cohort, decode, samples, steps, loss)
        staleness = self.state.round - order.round
        change: Any = partial(self._base_change, name, order) if staleness else None
        return EncodedUpdate(client, cohort, decode, samples, steps, loss, staleness, cohort, change)

    def _base_change(self, name: str, order: WorkOrder) -> Vector:
        """Return the version that an order started from minus the server's vector."""
        base, vector = order.broadcasts[name].packets[0].content, self.state.vectors[name]
        assert isinstance(base, torch.Tensor), "the server's own orders hold whole vectors"
        return where_computed(self.algorithm.channels[name].aggregate, base.to(vector.device) - vector)

    def close(self) -> ClosedRound:
        """Aggregate and step. Below the quorum neither the model nor the server state changes.

        A round without orders is aggregated if all aggregators accept no updates: ``min_updates`` is 0.
        """
        state = self.state
        admitted = tuple(sorted(self.norms))
        quorum = self.quorum if self.orders else 0
        needed = max(quorum, min_updates(self.algorithm, max(1, len(self.cohorts))))
        if len(admitted) < needed:
            self.dropped += [
                DroppedClient(client, "quorum", f"{len(admitted)} of {needed} needed") for client in admitted
            ]
            return ClosedRound(replace(state, round=state.round + 1), {}, self._outcome((), {}, applied=False), None)
        stale = self.algorithm.pace.asynchronous
        staleness = tuple(state.round - self._order_of[client][0].round for client in admitted) if stale else ()
        population = state.population_with_stats(self.population)
        ctx = RoundContext(state.round, population, admitted, self.rows, staleness, self.key)
        combined = self.combined = {name: self._combine(name, ctx) for name in (*self.updates, *self._running)}
        vectors, server, aggregate, downlink = {}, {}, dict(state.aggregate), {}
        for name, channel in self.algorithm.channels.items():
            vector, source = state.vectors[name], name if channel.follows is None else channel.follows
            change = where_computed(channel.server, combined[source].vector)
            result, server[name] = channel.server.update(change, state.server[name], ctx)
            result = result.to(vector.device)
            if channel.follows is not None:
                vectors[name] = result
            else:
                aggregate[name] = combined[name].state
                vectors[name] = torch.add(vector, result, out=allocator.empty_like(vector))
            downlink[name] = channel.downlink.acknowledge(state.downlink[name], admitted, state.round)
        for channel_result in combined.values():
            for client, rows in channel_result.rows.items():
                self._memory.setdefault(client, {}).update(tree_to(dict(rows), torch.device("cpu")))
        heard = ClientStats(**state.heard).updated(self.losses, self.norms)._asdict() if state.heard else {}
        new_state = ServerState(state.round + 1, vectors, server, aggregate, downlink, heard, state.pace)
        outcome = self._outcome(admitted, combined[MODEL].info, applied=True)
        return ClosedRound(new_state, self._memory, outcome, self if admitted else None)

    def _combine(self, name: str, ctx: RoundContext) -> Combined:
        state, device = self.state.aggregate[name], self.state.vectors[name].device
        if name in self._running:
            return Combined(self._running[name].vector().to(device), state, {})
        combined = self.algorithm.channels[name].aggregate.combine(self.updates[name], state, ctx)
        return combined if combined.vector.device == device else combined._replace(vector=combined.vector.to(device))

    def _outcome(self, admitted: tuple[int, ...], info: Mapping[str, Any], *, applied: bool) -> Outcome:
        losses = [loss for client in admitted if (loss := self.losses[client]) is not None]
        means = {name: math.fsum(values) / len(values) for name, values in self._info.items()}
        return Outcome(
            round=self.state.round,
            applied=applied,
            admitted=admitted,
            dropped=tuple(sorted(self.dropped, key=lambda lost: (lost.client, lost.reason))),
            up_bytes=self._up,
            peer_bytes=dict(self._peer),
            exchanges=self._exchanges,
            train_loss=math.fsum(losses) / len(losses) if losses else math.nan,
            update_norm=math.fsum(self.norms[c] for c in admitted) / len(admitted) if admitted else math.nan,
            info={**means, **info},
            losses=self.losses,
            norms=self.norms,
        )


def expected_upload(
    algorithm: Algorithm, state: ServerState, orders: Sequence[WorkOrder], max_norm: float
) -> ExpectedUpload:
    """Return the expectations that every upload of a round is validated against."""
    first, reporters = orders[0], dict[int, int | None]()
    for order in orders:
        reporters.update(dict.fromkeys(order.reporters, order.cohort))
    return ExpectedUpload(
        first.run,
        first.round,
        first.base,
        reporters,
        {name: channel.uplink for name, channel in algorithm.channels.items() if channel.follows is None},
        state.vectors,
        max_norm,
        {client: (order.round, order.base) for order in orders for client in order.reporters}
        if algorithm.pace.asynchronous
        else {},
        {name: computes_on(algorithm.channels[name].aggregate, x.device) for name, x in state.vectors.items()},
    )


def min_updates(algorithm: Algorithm, requested: int) -> int:
    """Return the number of updates that all aggregators need, at most the number requested."""
    needed: list[int] = [
        with_defaults(channel.aggregate, BaseAggregator).min_updates for channel in algorithm.channels.values()
    ]
    return max(min(least, requested) for least in needed)
