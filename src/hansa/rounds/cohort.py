"""A gossiping cohort's round: its schedule run natively or step by step, and the updates of its reporters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hansa.algorithm import LocalPhase
from hansa.compress import Packet
from hansa.core.errors import add_step
from hansa.core.protocols import with_defaults
from hansa.core.types import BUFFERS, MODEL, Vector, Vectors
from hansa.core.vectors.arithmetic import all_finite
from hansa.gossip.rows import Mixer
from hansa.local.cohort import Cohort, CohortOutcome, CohortSchedule
from hansa.local.step import LocalStep
from hansa.local.trainer import BaseTrainer, ClientJob, LocalResult, Trainer, draw_batches, take_step
from hansa.local.work import Work
from hansa.rounds.messages import DroppedClient, LocalUpdate, WorkOrder, scoped
from hansa.server import BaseServerTransform


@dataclass(slots=True, eq=False)
class CohortResult:
    """The training of one work order: the reporters' updates, and what happened to the cohort."""

    updates: dict[int, LocalUpdate] = field(default_factory=dict)
    dropped: list[DroppedClient] = field(default_factory=list)
    peer_bytes: Counter[int] = field(default_factory=Counter)
    exchanges: int = 0
    info: dict[str, float] = field(default_factory=dict)
    mean: Vector | None = None
    alive: int = 0


@torch.no_grad()
def train_cohorts(
    phase: LocalPhase,
    orders: Sequence[WorkOrder],
    received: Sequence[Vectors],
    trainer: Trainer,
    samples: Sequence[int],
) -> list[CohortResult]:
    """Train cohorts: at every step the active clients take a local step and all exchange, in the mixing's order.

    The trainer's fast path gets all cohorts at once. Those whose final rows are read later are trained one by one, so
    that the rows of only one are in memory.
    """
    cohorts = [_new_cohort(phase, order, got, trainer, samples) for order, got in zip(orders, received, strict=True)]
    _share_common_step(cohorts, orders, received)
    fast = with_defaults(trainer, BaseTrainer).train_cohorts
    together = not any(cohort.keeps_rows for cohort in cohorts)
    outcomes = fast(cohorts) if together else [None] * len(cohorts)
    results = []
    for cohort, order, got, trained in zip(cohorts, orders, received, outcomes, strict=True):
        outcome = trained if together else fast([cohort])[0]
        if outcome is None and defers_checks(trainer.y.device):
            outcome = _DeferredExecutor(cohort, trainer).run_if_finite()
            if outcome is None:  # a model became non-finite: once more, to drop its client at the step where it did
                cohort = _new_cohort(phase, order, got, trainer, samples)
        if outcome is None:
            outcome = _EagerExecutor(cohort, trainer).run()
        results.append(_result(cohort, outcome, order, phase, samples))
    return results


def _share_common_step(cohorts: Sequence[Cohort], orders: Sequence[WorkOrder], received: Sequence[Vectors]) -> None:
    """Let cohorts that start from the same vectors without memory have one common step."""
    steps: dict[tuple[int, int], LocalStep] = {}
    for cohort, order, got in zip(cohorts, orders, received, strict=True):
        if not order.memory:
            known = steps.get((order.round, id(got)))
            steps[order.round, id(got)] = cohort.use_common_step(known)


def _result(
    cohort: Cohort, outcome: CohortOutcome, order: WorkOrder, phase: LocalPhase, samples: Sequence[int]
) -> CohortResult:
    """Return the result of a cohort that has trained."""
    result = CohortResult(exchanges=outcome.exchanges)
    if not cohort.mixing.keep_local_models:
        alive = len(cohort.mixer.positions) + len(outcome.dropped)
        result.peer_bytes = _forwarded_bytes(order, alive, cohort.start)
    result.peer_bytes.update(outcome.peer_bytes)
    for client, step in outcome.dropped:
        detail = f"its parameters became non-finite at step {step}; its cluster continued without it"
        result.dropped.append(DroppedClient(client, "non-finite", detail))
    if cohort.mixer.positions:
        _add_updates(cohort, outcome, order, result, phase, samples)
    return result


def _new_cohort(
    phase: LocalPhase, order: WorkOrder, received: Vectors, trainer: Trainer, samples: Sequence[int]
) -> Cohort:
    assert phase.mixing is not None
    mixing, model, buffers = phase.mixing, received[MODEL], received.get(BUFFERS)
    schedule = CohortSchedule(mixing, order.round, order.work.steps, order.clients, order.reporters, order.key)
    mixer = Mixer(mixing.topology.of_cluster(order.cohort), len(order.clients))
    mixer.drop(*(schedule.position(client) for client in order.absent))

    def new_step(client: int) -> LocalStep:
        memory = order.memory.get(client, {})
        step = phase.local_step(order.round, model, phase.solver.correction(received, scoped(memory, "solver")))
        if mixing.keep_local_models:
            step.restore(scoped(memory, "local/optimizer"), model)
        return step

    def work_of(client: int) -> Work:
        """Return the work of a client: no batch is larger than its dataset."""
        return Work(order.work.steps, min(order.work.batch_size, samples[client]))

    def batches(client: int) -> Any:
        """Draw a client's batches of the round."""
        work = work_of(client)
        key, place = order.key.child("local", order.round, client, "batch"), phase.place(order.memory.get(client, {}))
        return draw_batches(trainer, phase.division, client, samples[client], work, key, order.key, place)

    sizes = [work_of(client).batch_size for client in order.clients]
    return Cohort(
        schedule,
        mixer,
        model if buffers is None else torch.cat([model, buffers]),
        model.numel(),
        new_step,
        batches,
        lambda client, name: order.memory.get(client, {}).get(name),
        with_defaults(phase.optimizer, BaseServerTransform).shared,
        order.attack,
        order.mean or mixing.keep_local_models,
        sizes if phase.division.is_default else None,
    )


def defers_checks(device: torch.device) -> bool:
    """Return whether models are checked at the end of a round and not after every step: reading a device stalls it."""
    return device.type != "cpu"


class _EagerExecutor:
    """Runs a schedule one step and one client at a time, and drops clients whose models become non-finite."""

    def __init__(self, cohort: Cohort, trainer: Trainer) -> None:
        self.cohort, self.trainer, self.fast = cohort, trainer, with_defaults(trainer, BaseTrainer)
        self.outcome = cohort.new_rows()
        self.batches: dict[int, Any] = {}
        self.taken: Counter[int] = Counter()

    def run(self) -> CohortOutcome:
        self.outcome.taken = self.taken
        for step in range(self.cohort.schedule.steps):
            moves = self._take_steps(step)
            if not self.cohort.mixer.positions:
                break
            self.cohort.exchange(self.outcome, step)
            for position, before, after in moves:
                self.outcome.rows.shift(position, before, after)
        return self.outcome

    def _take_steps(self, step: int) -> list[tuple[int, Vector, Vector]]:
        """Take the active clients' steps; return those that are added only after the exchange."""
        cohort, rows = self.cohort, self.outcome.rows
        positions, late = cohort.active(step), cohort.schedule.steps_after_exchange
        moves: list[tuple[int, Vector, Vector]] = []
        if not positions:
            return moves
        models = list(rows.read(positions)) if late else rows.models(positions)
        for position, before in zip(positions, models, strict=True):
            client = cohort.clients[position]
            try:
                loss, after = self._take_step(client, before)
            except Exception as error:
                add_step(error, client, step)
                raise
            if not self._accept(loss, after):
                cohort.drop(self.outcome, position, step)
                continue
            if late:
                moves.append((position, before, after))
            else:
                rows.write(position, before, after)
        return moves

    def _accept(self, loss: float | torch.Tensor, after: Vector) -> bool:
        """Record the loss of a step; return False, with nothing recorded, if the new model is not finite."""
        finite = all_finite(after)
        if finite:
            self.outcome.losses.append(float(loss))
        return finite

    def _train_natively(self, job: ClientJob) -> list[LocalResult] | None:
        return self.fast.train_clients([job])

    def _take_step(self, client: int, row: Vector) -> tuple[float | torch.Tensor, Vector]:
        """Take one client's next step from its row, natively where the trainer can; return the loss and the new row."""
        cohort, trainer, dim = self.cohort, self.trainer, self.cohort.dim
        if client not in self.batches:
            self.batches[client] = cohort.batches(client)
        rows, step, taken = self.batches[client], cohort.local_step(client), self.taken[client]
        self.taken[client] += 1
        key = cohort.schedule.key.child("local", cohort.schedule.round, client)
        model, buffers = row[:dim], row[dim:] if row.numel() > dim else None
        results = None
        if rows is not None:
            batch = rows[taken : taken + 1]
            job = ClientJob(model, client, Work(1, 1), step, key, buffers, keep_model=True, batches=batch)
            results = self._train_natively(job)
        if results is None:
            trainer.load(model, buffers)
            batch = None if rows is None else rows[taken]
            loss: float | torch.Tensor = take_step(trainer, client, batch, step, key.child("noise", taken))
        else:
            (loss,) = results[0].losses
        buffers = trainer.read_buffers()
        return loss, trainer.y.clone() if buffers is None else torch.cat([trainer.y, buffers])


class _DeferredExecutor(_EagerExecutor):
    """Runs a schedule as if no model became non-finite; losses and checks stay on the device until the end."""

    def __init__(self, cohort: Cohort, trainer: Trainer) -> None:
        super().__init__(cohort, trainer)
        self._losses: list[torch.Tensor] = []
        self._finite: list[torch.Tensor] = []

    def run_if_finite(self) -> CohortOutcome | None:
        """Return the outcome; None if a model became non-finite, also if that was the cause of an error."""
        try:
            outcome = self.run()
        except Exception:
            if self._all_finite():
                raise
            return None
        if not self._all_finite():
            return None
        outcome.losses = torch.stack(self._losses).tolist() if self._losses else []
        return outcome

    def _all_finite(self) -> bool:
        return not self._finite or bool(torch.stack(self._finite).all())

    def _accept(self, loss: float | torch.Tensor, after: Vector) -> bool:
        self._losses.append(torch.as_tensor(loss))
        self._finite.append(torch.isfinite(after).all())
        return True

    def _train_natively(self, job: ClientJob) -> list[LocalResult] | None:
        return None  # its results are on the host


def _forwarded_bytes(order: WorkOrder, alive: int, start: Vector) -> Counter[int]:
    """Count the bytes that the reporters send when they forward the received model inside the cluster."""
    sent: Counter[int] = Counter()
    reporters, others, size = order.reporters, alive - len(order.reporters), Packet.of(start).nbytes
    for place, client in enumerate(reporters):
        share = others // len(reporters) + (place < others % len(reporters))
        if share:
            sent[client] += share * size
    return sent


def _add_updates(
    cohort: Cohort,
    outcome: CohortOutcome,
    order: WorkOrder,
    result: CohortResult,
    phase: LocalPhase,
    samples: Sequence[int],
) -> None:
    """Add the surviving reporters' updates, the consensus distance and, if requested, the mean model."""
    dim = cohort.dim
    loss = math.fsum(outcome.losses) / len(outcome.losses) if outcome.losses else None
    outcome.finish(cohort)
    for position, delta in zip(cohort.reporting_positions(), outcome.deltas or (), strict=True):
        client = cohort.clients[position]
        buffers = delta[dim:] if delta.numel() > dim else None
        memory = _memory(cohort, outcome, client, position)
        if memory:
            size = min(order.work.batch_size, samples[client])
            before = order.memory.get(client, {})
            memory |= phase.memory_of_place(samples[client], size, outcome.taken[client], before)
        result.updates[client] = LocalUpdate(delta if buffers is None else delta[:dim], buffers, loss, memory)
    result.info["consensus"] = outcome.spread
    if order.mean:
        result.mean = outcome.rows.mean(cohort.mixer).to(cohort.start)
        result.alive = len(cohort.mixer.positions)


def _memory(cohort: Cohort, outcome: CohortOutcome, client: int, position: int) -> Vectors:
    """Return the memory of a client that keeps its model: the model, its public copy, its optimizer state."""
    if not cohort.mixing.keep_local_models:
        return {}
    copies = outcome.public_copies
    memory = {"local/row": outcome.rows.read([position])[0]}
    if copies is not None:
        memory["local/public"] = copies[position].clone()
    if cohort.has_stepped(client):
        rows = cohort.local_step(client).memory_rows()
        memory |= {f"local/optimizer/{name}": row.clone() for name, row in rows.items()}
    return memory
