"""The training of gossiping cohorts in a round: by native code if it supports all parts, otherwise step by step.

Native code plans a schedule first and then runs all its turns in one call, on dense or lazy rows. If a model becomes
non-finite there, the round is repeated step by step, which drops the client at that step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import scipy
import torch

from hansa.algorithm import LocalPhase
from hansa.compress import Packet, sign
from hansa.core.errors import add_step
from hansa.core.keys import Key
from hansa.core.native import abi
from hansa.core.native.clients import (
    GROUP,
    TURN,
    ChangeSums,
    ClientKernel,
    CohortKernel,
    LazyCohortKernel,
)
from hansa.core.protocols import with_defaults
from hansa.core.types import BUFFERS, MODEL, Vector, Vectors
from hansa.core.vectors import allocator
from hansa.core.vectors.arithmetic import all_finite, native_fits
from hansa.core.vectors.kernels import CsrWeights
from hansa.gossip.cohort import Cohort, CohortOutcome
from hansa.gossip.rows import DenseRows, LazyRows, Mixer
from hansa.gossip.topology import Topology
from hansa.local.trainer import BaseTrainer, ClientJobs, DrawRows, Trainer, take_step
from hansa.local.work import Work
from hansa.rounds.messages import DroppedClient, Report, WorkOrder


@torch.no_grad()
def train_cohorts(
    phase: LocalPhase,
    orders: Sequence[WorkOrder],
    received: Sequence[Vectors],
    trainer: Trainer,
    samples: Sequence[int],
) -> list[Report]:
    """Train cohorts: at every step the active clients take a local step and all exchange, in the mixing's order.

    Native code gets all cohorts at once. Those whose final rows are read later are trained one by one, so that the rows
    of only one are in memory.
    """
    make, pairs = partial(Cohort, common_steps={}), list(zip(orders, received, strict=True))
    cohorts = [make(phase, order, vectors, trainer, samples) for order, vectors in pairs]
    together = not any(cohort.keeps_rows for cohort in cohorts)
    outcomes = train_natively(cohorts, trainer) if together else [None] * len(cohorts)
    results = []
    for cohort, (order, vectors), trained in zip(cohorts, pairs, outcomes, strict=True):
        outcome = trained if together else train_natively([cohort], trainer)[0]
        if outcome is None and defers_checks(trainer.y.device):
            outcome = _EagerExecutor(cohort, trainer, deferred=True).run()
        if outcome is None:
            if cohort.started:  # a model became non-finite: repeat the round to drop its client at that step
                cohort = Cohort(phase, order, vectors, trainer, samples)
            outcome = _EagerExecutor(cohort, trainer).run()
            assert outcome is not None
        results.append(_result(cohort, outcome))
    return results


def _result(cohort: Cohort, outcome: CohortOutcome) -> Report:
    """Return the report of a cohort that has trained, with the surviving reporters' updates as vectors, the consensus
    distance and, if requested, the mean model."""
    order = cohort.order
    detail = "its parameters became non-finite at step {}; its cluster continued without it"
    dropped = [DroppedClient(client, "non-finite", detail.format(step)) for client, step in outcome.dropped]
    peer_bytes = Counter[int]()
    if not cohort.mixing.keep_local_models:
        peer_bytes = _forwarded_bytes(order, len(cohort.mixer.positions) + len(dropped), cohort.start)
    peer_bytes.update(outcome.peer_bytes)
    report = Report.on(order, dropped=tuple(dropped), peer_bytes=dict(peer_bytes), exchanges=outcome.exchanges)
    if not cohort.mixer.positions:
        return report
    dim, positions = cohort.dim, cohort.reporting_positions()
    clients = [cohort.clients[position] for position in positions]
    outcome.finish(cohort)
    deltas = outcome.deltas or []
    rows = {MODEL: deltas}
    if cohort.start.numel() > dim:
        rows = {MODEL: [delta[:dim] for delta in deltas], BUFFERS: [delta[dim:] for delta in deltas]}
    memory: dict[int, Vectors] = {}
    for position, client in zip(positions, clients, strict=True):
        if client_memory := _memory(cohort, outcome, client, position):
            memory[client] = client_memory | cohort.position_memory(client, outcome.steps_taken[client])
    loss = math.fsum(outcome.losses) / len(outcome.losses) if outcome.losses else None
    losses, info = [loss] * len(clients), {"consensus": outcome.spread}
    report = replace(report, clients=clients, rows=rows, losses=losses, memory=memory, info=info)
    if order.mean:
        mean, trained = outcome.rows.mean(cohort.mixer).to(cohort.start), len(cohort.mixer.positions)
        report = replace(report, mean=mean, trained=trained)
    return report


def defers_checks(device: torch.device) -> bool:
    """Return whether models are checked at the end of a round and not after every step: reading a device stalls it."""
    return device.type != "cpu"


class _EagerExecutor:
    """Runs a schedule one step and one client at a time, and drops clients whose models become non-finite.

    With ``deferred`` it runs as if no model became non-finite; losses and checks stay on the device until the end.
    """

    def __init__(self, cohort: Cohort, trainer: Trainer, deferred: bool = False) -> None:
        self.cohort, self.trainer, self.deferred = cohort, trainer, deferred
        self.native_trainer = with_defaults(trainer, BaseTrainer)
        self.outcome = cohort.new_rows()
        cohort.started = True
        self.batches: dict[int, Any] = {}
        self.steps_taken = self.outcome.steps_taken
        self.losses: list[torch.Tensor] = []
        self.finite: list[torch.Tensor] = []

    def run(self) -> CohortOutcome | None:
        """Return the outcome; None if a deferred check failed, even if an error followed from it."""
        try:
            for step in range(self.cohort.steps):
                moves = self._take_steps(step)
                if not self.cohort.mixer.positions:
                    break
                self.cohort.exchange(self.outcome, step)
                for position, old, new in moves:
                    self.outcome.rows.shift(position, old, new)
        except Exception:
            if self._all_finite():
                raise
        if not self._all_finite():
            return None
        self.outcome.losses += torch.stack(self.losses).tolist() if self.losses else []
        return self.outcome

    def _all_finite(self) -> bool:
        return not self.finite or bool(torch.stack(self.finite).all())

    def _take_steps(self, step: int) -> list[tuple[int, Vector, Vector]]:
        """Take the active clients' steps; return those that are added only after the exchange."""
        cohort, rows = self.cohort, self.outcome.rows
        positions, late = cohort.active(step), cohort.steps_after_exchange
        moves: list[tuple[int, Vector, Vector]] = []
        if not positions:
            return moves
        models = list(rows.read(positions)) if late else rows.models(positions)
        for position, old in zip(positions, models, strict=True):
            client = cohort.clients[position]
            try:
                loss, new = self._take_step(client, old)
            except Exception as error:
                add_step(error, client, step)
                raise
            if not self._accept(loss, new):
                cohort.drop(self.outcome, position, step)
                continue
            if late:
                moves.append((position, old, new))
            else:
                rows.write(position, old, new)
        return moves

    def _accept(self, loss: float | torch.Tensor, model: Vector) -> bool:
        """Record the loss of a step; return False, with nothing recorded, if the new model is not finite."""
        if self.deferred:
            self.losses.append(torch.as_tensor(loss))
            self.finite.append(torch.isfinite(model).all())
            return True
        finite = all_finite(model)
        if finite:
            self.outcome.losses.append(float(loss))
        return finite

    def _take_step(self, client: int, row: Vector) -> tuple[float | torch.Tensor, Vector]:
        """Take one client's next step from its row, natively where the trainer can; return the loss and the new row."""
        cohort, trainer, dim = self.cohort, self.trainer, self.cohort.dim
        if client not in self.batches:
            self.batches[client] = cohort.batches(client)
        rows, step, steps_taken = self.batches[client], cohort.local_step(client), self.steps_taken[client]
        self.steps_taken[client] += 1
        model, buffers = row[:dim], row[dim:] if row.numel() > dim else None
        if rows is not None and not self.deferred:  # native results are on the host
            columns = {} if buffers is None else {"buffers": (buffers,)}
            jobs = ClientJobs.of(
                model, client, Work(1, 1), step, cohort.key, batches=(rows[steps_taken : steps_taken + 1],),
                keep_models=True, first_step=steps_taken, **columns,
            )  # fmt: skip
            if (results := self.native_trainer.train_clients(jobs)) is not None:
                return results.losses[0], torch.cat([*results.models, *results.buffers])
        trainer.load(model, buffers)
        batch = None if rows is None else rows[steps_taken]
        loss = take_step(trainer, client, batch, step, cohort.key.child(client, "noise", steps_taken))
        buffers = trainer.read_buffers()
        return loss, trainer.y.clone() if buffers is None else torch.cat([trainer.y, buffers])


def _forwarded_bytes(order: WorkOrder, alive: int, start: Vector) -> Counter[int]:
    """Count the bytes that the reporters send when they forward the received model inside the cluster."""
    reporters, size = order.reporters, Packet.of(start).nbytes
    share, more = divmod(alive - len(reporters), len(reporters))
    shares = {client: share + (index < more) for index, client in enumerate(reporters)}
    return Counter({client: size * share for client, share in shares.items() if share})


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


Array: TypeAlias = np.ndarray[Any, Any]
Turn: TypeAlias = tuple[int, int, int]
"""The fields of `TURN`."""
MAX_UNIFORM = 1024  # clients up to which the n^2 links of compressed gossip on a complete graph are made
LINKS = 64  # links per client up to which sums over links are faster than a matrix product


def train_natively(cohorts: Sequence[Cohort], trainer: Trainer) -> list[CohortOutcome | None]:
    """Run cohorts' schedules natively; None for one without a native form, or if one of its models became non-finite.

    All schedules are planned before the first step, because Python code between native steps is slow: the steps evict
    it from the cache. Cohorts that keep no rows run in the same memory, one after the other.
    """
    native = with_defaults(trainer, BaseTrainer).native_steps()
    if native is None:
        return [None] * len(cohorts)
    planned = {id(cohort): _TurnBatches(cohort) for cohort in cohorts if _runs_natively(cohort)}
    if native.draw_rows is not None:
        _draw_all(planned.values(), native.draw_rows)
    memory: Memory = {}
    runs: list[_DenseRun | _LazyRun] = []
    for batches in planned.values():
        batches.cohort.started = True
        if batches.cohort.storage(native=True) == "lazy":
            runs.append(_LazyRun(batches, native.kernel))
        else:
            runs.append(_DenseRun(batches, native.kernel, memory))
    for run in runs:
        run.run()
    outcomes = {id(run.cohort): run.result() for run in runs}
    return [outcomes.get(id(cohort)) for cohort in cohorts]


def _runs_natively(cohort: Cohort) -> bool:
    plain = cohort.start.numel() == cohort.dim and native_fits(cohort.start)
    if not plain or not cohort.common_step.is_affine or cohort.combines_each_message:
        return False
    storage = cohort.storage(native=True)
    late = storage == "dense" and cohort.steps_after_exchange
    return storage != "separate" and (not late or _exchanges_natively(cohort))


class _TurnBatches:
    """The turns of the clients' steps: the address of each client's next batch, and the number taken.

    Batches that were not drawn for all clients in one call are drawn when they are needed.
    """

    def __init__(self, cohort: Cohort) -> None:
        self.cohort = cohort
        self.steps_taken = [0] * len(cohort.clients)
        self.drawn: dict[int, tuple[int, int]] = {}
        """The rows per batch and the address of the first batch, of batches that lie one after the other."""
        self.owners: list[Any] = []
        """The arrays that the addresses point into."""
        self._turns: dict[int, list[tuple[int, int]]] = {}
        """The size and the address of each of the other batches."""

    def turns(self, positions: Sequence[int]) -> list[Turn]:
        """Return the next turn of each position."""
        turns = []
        for position in positions:
            steps_taken = self.steps_taken[position]
            self.steps_taken[position] = steps_taken + 1
            if position in self.drawn:
                size, address = self.drawn[position]
                turns.append((position, size, address + 8 * size * steps_taken))
                continue
            if position not in self._turns:
                self.owners.append(self.cohort.batches(self.cohort.clients[position]))
                self._turns[position] = [(len(rows), rows.data_ptr()) for rows in self.owners[-1]]
            turns.append((position, *self._turns[position][steps_taken]))
        return turns

    def steps_by_client(self) -> Counter[int]:
        """Return the steps that each client took."""
        return Counter(dict(zip(self.cohort.clients, self.steps_taken, strict=True)))


def _draw_all(planned: Iterable[_TurnBatches], draw_rows: DrawRows) -> None:
    """Draw the batches of all cohorts' stepping clients in one call."""
    requests: dict[Key, list[tuple[_TurnBatches, int, int, int]]] = {}
    for batches in planned:
        cohort = batches.cohort
        if cohort.phase.division.is_default:
            entries = requests.setdefault(cohort.key, [])
            for position, count in Counter(chain.from_iterable(cohort.active_from(0))).items():
                client = cohort.clients[position]
                entries.append((batches, position, client, cohort.batch_size(client) * count))
    all_entries = list(chain.from_iterable(requests.values()))
    if not all_entries:
        return
    keys = [digest for key, group in requests.items() for digest in key.digests([entry[2] for entry in group], "batch")]
    _, _, clients, lengths = zip(*all_entries, strict=True)
    rows = draw_rows(clients, keys, np.array(lengths, np.int64))
    address = rows.ctypes.data
    for batches, position, client, length in all_entries:
        batches.owners[:] = [rows]
        batches.drawn[position] = batches.cohort.batch_size(client), address
        address += 8 * length


def _as_array(turns: Sequence[Turn]) -> Array:
    """Return turns in the native layout; addresses are below 2^63."""
    return np.array(turns, np.int64).reshape(-1, 3).view(TURN).ravel()


def _velocities(cohort: Cohort, positions: Sequence[int]) -> dict[int, Vector]:
    """Return the velocities of the stepping clients."""
    return {position: cohort.local_step(cohort.clients[position]).init_velocity() for position in positions}


Memory: TypeAlias = dict[int, tuple[torch.Tensor, torch.Tensor | None]]
"""The rows and public copies in which cohorts run one after the other, by their number of clients."""


class _DenseRun:
    """Runs all turns in one call, or one call per step if the exchange is not native."""

    def __init__(self, batches: _TurnBatches, clients: ClientKernel, memory: Memory) -> None:
        cohort = self.cohort = batches.cohort
        self.batches = batches
        start = None if cohort.mixing.keep_local_models or not cohort.steps else cohort.start
        shares = start is not None and not cohort.keeps_rows
        reused = memory.get(len(cohort.clients)) if shares else None
        rows, copies = reused or cohort.dense_rows()
        if start is None:
            cohort.fill(rows, copies)
        elif shares:
            memory[len(cohort.clients)] = rows, copies
        self.rows = DenseRows(rows)
        self.outcome = CohortOutcome(self.rows, copies)
        self.step = cohort.common_step
        late = self.cohort.steps_after_exchange
        self.kernel = CohortKernel(clients, rows, self.step, after_exchange=late, start=start)
        self._deltas: dict[int, Vector] = {}
        self._native = _exchanges_natively(cohort)
        if self._native:
            self._deltas = {position: allocator.empty_like(cohort.start) for position in cohort.reporting_positions()}
            self.kernel.set_deltas(cohort.start, self._deltas)
        steps = cohort.steps if cohort.mixer.positions else 0
        self._calls = [range(steps)] if self._native and steps else [range(t, t + 1) for t in range(steps)]
        if self._calls:
            self._prepare(self._calls[0])

    def run(self) -> None:
        """Run the schedule; the turns of the first call are prepared, those of a single one recorded by `result`."""
        for steps in self._calls:
            if steps[0]:
                self._prepare(steps)
            self._losses, _ = self.kernel.run()
            if self.kernel.dropped is not None:
                return
            if not self._native:
                self._record_losses()
                self.cohort.exchange(self.outcome, steps[0], self._pull if _has_few_links(self.cohort) else None)
        if not self._native or not self._calls:
            self.outcome.finish(self.cohort)

    def result(self) -> CohortOutcome | None:
        """Return the outcome; None if a model became non-finite."""
        cohort, outcome = self.cohort, self.outcome
        if self.kernel.dropped is not None:
            return None
        if self._native and self._calls:
            self._record_losses()
            cohort.count(outcome, self._calls[0])
            outcome.deltas = [self._deltas[position] for position in cohort.reporting_positions()]
            outcome.spread = math.sqrt(self.kernel.spread / len(cohort.mixer.positions))
            outcome.finish(cohort)
        outcome.steps_taken = self.batches.steps_by_client()
        return outcome

    def _record_losses(self) -> None:
        self.outcome.losses += self._losses[self._turns["row"] >= 0].tolist()

    def _prepare(self, steps: range) -> None:
        """Pass the turns of some steps, W, the public copies and the velocities of stepping clients to the kernel."""
        turns, copies = self._turns_of(steps), self.outcome.public_copies
        self._turns = _as_array(turns)
        velocities = None
        if self.step.momentum:
            velocities = _velocities(self.cohort, sorted({turn[0] for turn in turns if turn[0] >= 0}))
        links = _links_of(self.cohort.mixer, uniform=copies is not None)
        self._exchange = links, copies, self.cohort.mixing.consensus_rate
        self.kernel.rows = self.rows.rows
        self.kernel.prepare(self._turns, *self._exchange, velocities)

    def _turns_of(self, steps: range) -> list[Turn]:
        """Return the turns of some steps: for each, the stepping clients, then the exchange if it is native."""
        turns: list[Turn] = []
        codes: dict[str | None, int] = {}
        if self._native:
            mixing = abi.AVERAGE if self.cohort.mixer.weights is None else abi.MIX
            gossip = mixing if self.cohort.mixing.compressor is None else abi.SIGNS
            codes = {"average": abi.AVERAGE, "gossip": gossip}
            codes |= {None: abi.SETTLE} if self.cohort.steps_after_exchange else {}
        for step, positions in zip(steps, self.cohort.active_from(steps[0])[: len(steps)], strict=True):
            turns += self.batches.turns(positions)
            if (code := codes.get(self.cohort.exchange_after(step))) is not None:
                turns.append((code, 1, 0))
        return turns

    def _pull(self) -> None:
        self.kernel.prepare(np.array([(abi.PULL, 1, 0)], TURN), *self._exchange)
        self.kernel.run()


def _exchanges_natively(cohort: Cohort) -> bool:
    """Return whether W has few links and the messages have a native form."""
    compressor = cohort.mixing.compressor
    return _has_few_links(cohort) and (compressor is None or isinstance(compressor, sign))


def _has_few_links(cohort: Cohort) -> bool:
    """Return whether a sum over links is faster than a matrix product; a mean of all rows needs no product."""
    n = len(cohort.clients)
    if cohort.mixer.weights is None:
        return cohort.mixing.compressor is None or n <= MAX_UNIFORM
    return cohort.mixer.nonzero <= max(LINKS, n // 2) * n


def _links_of(mixer: Mixer, *, uniform: bool) -> CsrWeights:
    """Return the links of W over all positions, none at dropped ones. The links of W = 11'/n are made only with
    ``uniform``; otherwise each row has only the link to itself."""
    if len(mixer.positions) == len(mixer.alive):
        return _all_links(mixer.topology, len(mixer.alive), uniform)
    return _make_links(mixer, uniform)


@lru_cache(maxsize=64)
def _all_links(topology: Topology, n: int, uniform: bool) -> CsrWeights:
    return _make_links(Mixer(topology, n), uniform)


def _make_links(mixer: Mixer, uniform: bool) -> CsrWeights:
    positions, n, rows = np.array(mixer.positions, np.int64), len(mixer.positions), len(mixer.alive)
    if mixer.weights is not None:
        matrix = mixer.weights.tocsr()
    else:
        matrix = (
            scipy.sparse.csr_array(np.full((n, n), 1.0 / n)) if uniform else scipy.sparse.eye_array(n, format="csr")
        )
    counts = np.zeros(rows, np.int64)
    counts[positions] = np.diff(matrix.indptr)
    starts = np.concatenate([[0], np.cumsum(counts)])
    return CsrWeights.of(scipy.sparse.csr_array((matrix.data, positions[matrix.indices], starts), shape=(rows, rows)))


class _LazyRun:
    """Runs all steps in one call, on the changes of the models."""

    def __init__(self, batches: _TurnBatches, clients: ClientKernel) -> None:
        self.cohort, self.batches = batches.cohort, batches
        self.kernel = LazyCohortKernel(clients, self.cohort.start, self.cohort.common_step)

    def run(self) -> None:
        cohort, rows, steps = self.cohort, self.cohort.lazy_rows(), range(self.cohort.steps)
        self.outcome = CohortOutcome(rows)
        if steps and cohort.mixer.positions:
            turns, sums = self._turns(steps, rows)
            rows.reserve(0)  # for all planned steps
            is_step = turns["row"] >= 0
            stepping = sorted(set(turns["row"][is_step].tolist())) if cohort.common_step.momentum else []
            losses, _ = self.kernel.run(rows.changes, 0, turns, sums, _velocities(cohort, stepping))
            if self.kernel.dropped is not None:
                return
            self.outcome.losses += losses[is_step].tolist()
            cohort.count(self.outcome, steps)
        self.outcome.finish(cohort)

    def result(self) -> CohortOutcome | None:
        """Return the outcome; None if a model became non-finite."""
        self.outcome.steps_taken = self.batches.steps_by_client()
        return self.outcome if self.kernel.dropped is None else None

    def _turns(self, steps: range, rows: LazyRows) -> tuple[Array, ChangeSums]:
        """Return the turns of all steps and the sums of their models; update ``rows`` as if all were taken."""
        turns: list[Turn] = []
        coefficients: list[Array] = []
        for step, positions in zip(steps, self.cohort.active_from(0), strict=True):
            chosen = rows.coefficients_of(positions)
            for first in range(0, len(positions), GROUP):
                group = positions[first : first + GROUP]
                turns += [(abi.GATHER, len(group), 0), *self.batches.turns(group)]
                coefficients += [np.zeros((1, 0)), chosen[first : first + GROUP]]
            late, exchange = self.cohort.steps_after_exchange, self.cohort.exchange_after(step)
            if not late:
                rows.add(positions)
            if exchange is not None:
                (rows.average if exchange == "average" else rows.mix)(self.cohort.mixer)
            if late:
                rows.add(positions)
        return _as_array(turns), ChangeSums.of(coefficients)
