"""The native executor of a cohort's schedule: all turns in one call, on dense or lazy rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import scipy
import torch

from hansa.compress import sign
from hansa.core.native import abi
from hansa.core.native.client_kernel import ClientKernel
from hansa.core.native.cohort_kernel import GROUP, TURN, ChangeSums, CohortKernel, LazyCohortKernel, MixingLinks
from hansa.core.types import Vector
from hansa.gossip.rows import DenseRows, LazyRows, Mixer
from hansa.gossip.topology import Topology
from hansa.local.cohort import Cohort, CohortOutcome

Array: TypeAlias = np.ndarray[Any, Any]
Turn: TypeAlias = tuple[int, int, int]
"""The fields of `TURN`."""
MOST_EVEN = 1024  # clients up to which the n^2 links of compressed gossip on a complete graph are made
LINKS = 64  # links per client up to which sums over links are faster than a matrix product


def train_cohort_natively(cohort: Cohort, clients: ClientKernel) -> CohortOutcome | None:
    """Run a cohort's schedule natively; None if its rows are separate or its exchange has no native form."""
    if cohort.judges_messages:
        return None
    storage = cohort.storage(native=True)
    if storage == "lazy":
        return _run_lazy(cohort, clients)
    if storage == "separate" or (cohort.schedule.steps_after_exchange and not _exchanges_natively(cohort)):
        return None
    return _DenseRun(cohort, clients).run()


class _TurnBatches:
    """The turns of the clients' steps: the address of each client's next batch, and the number taken."""

    def __init__(self, cohort: Cohort) -> None:
        self._cohort = cohort
        self._batches: dict[int, Any] = {}
        self._turns: dict[int, list[tuple[int, int]]] = {}
        self.taken = [0] * len(cohort.clients)

    def turns(self, positions: Sequence[int]) -> list[Turn]:
        """Return the next turn of each position."""
        turns = []
        for position in positions:
            if position not in self._turns:
                batches = self._batches[position] = self._cohort.batches(self._cohort.clients[position])
                self._turns[position] = _widths_and_addresses(batches)
            turns.append((position, *self._turns[position][self.taken[position]]))
            self.taken[position] += 1
        return turns

    def taken_by_client(self) -> Counter[int]:
        """Return the steps that each client took."""
        return Counter(dict(zip(self._cohort.clients, self.taken, strict=True)))

    def rewind(self, taken: Sequence[int], rows: Array) -> None:
        """Return to an earlier ``taken``, with the given steps taken since."""
        self.taken = (np.array(taken) + np.bincount(rows, minlength=len(taken))).tolist()


def _widths_and_addresses(batches: Any) -> list[tuple[int, int]]:
    """Return the size and the address of each batch."""
    runs = [batches] if isinstance(batches, torch.Tensor) else batches.runs
    return [(run.shape[1], run.data_ptr() + 8 * run.shape[1] * step) for run in runs for step in range(len(run))]


def _as_array(turns: Sequence[Turn]) -> Array:
    """Return turns in the native layout; addresses are below 2^63."""
    return np.array(turns, np.int64).reshape(-1, 3).view(TURN).ravel()


def _velocities(cohort: Cohort, positions: Sequence[int]) -> dict[int, Vector]:
    """Return the velocities of the stepping clients."""
    return {position: cohort.local_step(cohort.clients[position]).init_velocity() for position in positions}


class _DenseTurns(NamedTuple):
    """Turns of several steps, the step that each belongs to, and which of them are exact averages."""

    turns: Array
    steps: Array
    averages: Array

    def exchanges(self, done: int) -> tuple[int, int]:
        """Count the gossips and the exact averages among the first ``done`` turns."""
        kinds, averages = self.turns["row"][:done], self.averages[:done]
        return int(((kinds < 0) & (kinds != abi.SETTLE) & ~averages).sum()), int(averages.sum())

    def remaining(self, done: int) -> list[int]:
        """Return the rows that have not yet stepped in the step of the last of ``done`` turns."""
        same = self.steps[done:] == self.steps[done - 1]
        return [int(row) for row in self.turns["row"][done:][same] if row >= 0]


class _DenseRun:
    """Runs all turns in one call, or one call per step if the exchange is not native; restarts after a dropout."""

    def __init__(self, cohort: Cohort, clients: ClientKernel) -> None:
        self.cohort, self.schedule, self.batches = cohort, cohort.schedule, _TurnBatches(cohort)
        rows, copies = cohort.dense_rows()
        self.rows = DenseRows(rows)
        self.outcome = CohortOutcome(self.rows, copies)
        start = None if cohort.mixing.keep_local_models or not self.schedule.steps else cohort.start
        if start is None:
            cohort.fill(rows, copies)
        self.step = cohort.new_step(cohort.clients[0])
        late = self.schedule.steps_after_exchange
        self.kernel = CohortKernel(clients, rows, self.step, after_exchange=late, start=start)

    def run(self) -> CohortOutcome:
        step, pending = 0, None
        while step < self.schedule.steps and self.cohort.mixer.positions:
            step, pending = self._run_from(step, pending)
        self.outcome.taken = self.batches.taken_by_client()
        return self.outcome

    def _run_from(self, first: int, pending: list[int] | None) -> tuple[int, list[int] | None]:
        """Run to the end, to the next dropout, or for one step if the exchange is not native; return where to continue.
        ``pending`` are the remaining rows of a first step that a dropout interrupted."""
        cohort, outcome = self.cohort, self.outcome
        native = _exchanges_natively(cohort)
        stop = self.schedule.steps if native else first + 1
        taken = self.batches.taken.copy()
        plan = self._turns(range(first, stop), pending, native)
        self._set_up(plan)
        losses, done = self.kernel.run(plan.turns)
        stepped = plan.turns["row"][:done] >= 0
        if self.kernel.dropped is not None:
            stepped[-1] = False
        outcome.losses += losses[:done][stepped].tolist()
        cohort.count(outcome, *plan.exchanges(done))
        if self.kernel.dropped is not None:
            rows = plan.turns["row"][:done]
            self.batches.rewind(taken, rows[rows >= 0])
            first = int(plan.steps[done - 1])
            cohort.drop(outcome, self.kernel.dropped, first)
            pending = plan.remaining(done)
            if native or pending:
                return first, pending
        if not native and cohort.mixer.positions:
            cohort.exchange(outcome, first, self._pull if _has_few_links(cohort) else None)
        return stop, None

    def _turns(self, steps: range, pending: list[int] | None, native: bool) -> _DenseTurns:
        """Return the turns of some steps: for each, the stepping clients, then the exchange if it is native."""
        turns: list[Turn] = []
        places: list[int] = []
        averages: list[bool] = []
        for step in steps:
            first = step == steps[0] and pending is not None
            turns += self.batches.turns(pending if first and pending is not None else self.cohort.active(step))
            averages += [False] * (len(turns) - len(averages))
            exchange = self._native_exchange(step) if native else None
            if exchange is not None:
                turns.append((exchange, 1, 0))
                averages.append(self.schedule.exchange(step) == "average")
            places += [step] * (len(averages) - len(places))
        return _DenseTurns(_as_array(turns), np.array(places), np.array(averages, bool))

    def _native_exchange(self, step: int) -> int | None:
        """Return the native code of the exchange after a step."""
        kind = self.schedule.exchange(step)
        if kind is None:
            return abi.SETTLE if self.schedule.steps_after_exchange else None
        if kind == "average":
            return abi.AVERAGE
        if self.cohort.mixing.compressor is not None:
            return abi.SIGNS
        return abi.AVERAGE if self.cohort.mixer.weights is None else abi.MIX

    def _set_up(self, plan: _DenseTurns) -> None:
        """Pass the current W, the public copies and the velocities of the stepping clients to the kernel."""
        copies = self.outcome.public_copies
        self.kernel.set_links(_links_of(self.cohort.mixer, uniform=copies is not None))
        if copies is not None:
            self.kernel.set_public_copies(copies, self.cohort.mixing.consensus_rate)
        if self.step.momentum:
            stepping = sorted({int(row) for row in plan.turns["row"] if row >= 0})
            self.kernel.set_velocities(_velocities(self.cohort, stepping))
        self.kernel.rows = self.rows.rows

    def _pull(self) -> None:
        self.kernel.run(np.array([(abi.PULL, 1, 0)], TURN))


def _exchanges_natively(cohort: Cohort) -> bool:
    """Return whether W has few links and the messages have a native form."""
    compressor = cohort.mixing.compressor
    return _has_few_links(cohort) and (compressor is None or isinstance(compressor, sign))


def _has_few_links(cohort: Cohort) -> bool:
    """Return whether a sum over links is faster than a matrix product; a mean of all rows needs no product."""
    n = len(cohort.clients)
    if cohort.mixer.weights is None:
        return cohort.mixing.compressor is None or n <= MOST_EVEN
    return cohort.mixer.nonzero <= max(LINKS, n // 2) * n


def _links_of(mixer: Mixer, *, uniform: bool) -> MixingLinks:
    """Return the links of W over all positions, none at dropped ones. The links of W = 11'/n are made only with
    ``uniform``; otherwise each row has only the link to itself."""
    if len(mixer.positions) == len(mixer.alive):
        return _all_links(mixer.topology, len(mixer.alive), uniform)
    return _make_links(mixer, uniform)


@lru_cache(maxsize=64)
def _all_links(topology: Topology, n: int, uniform: bool) -> MixingLinks:
    return _make_links(Mixer(topology, n), uniform)


def _make_links(mixer: Mixer, uniform: bool) -> MixingLinks:
    positions, n = np.array(mixer.positions, np.int64), len(mixer.positions)
    if mixer.weights is not None:
        matrix = mixer.weights.tocsr()
    else:
        matrix = (
            scipy.sparse.csr_array(np.full((n, n), 1.0 / n)) if uniform else scipy.sparse.eye_array(n, format="csr")
        )
    counts = np.zeros(len(mixer.alive), np.int64)
    counts[positions] = np.diff(matrix.indptr)
    starts = np.concatenate([[0], np.cumsum(counts)])
    return MixingLinks.of(len(mixer.alive), starts, positions[matrix.indices], np.asarray(matrix.data, np.float64))


class _LazyTurns(NamedTuple):
    """Turns of several steps with the sums of their models, and the step of each turn, -1 for gathering turns."""

    turns: Array
    steps: Array
    sums: ChangeSums


class _BrokenStep(NamedTuple):
    """A step in which a client dropped out: the rows that have stepped, and the remaining ones."""

    stepped: list[int]
    pending: list[int]


def _run_lazy(cohort: Cohort, clients: ClientKernel) -> CohortOutcome:
    """Run all steps in one call; after a dropout, continue with another."""
    rows, batches, steps = cohort.lazy_rows(), _TurnBatches(cohort), cohort.schedule.steps
    step_of_all = cohort.new_step(cohort.clients[0])
    outcome, kernel = CohortOutcome(rows), LazyCohortKernel(clients, cohort.start, step_of_all)
    first, counted, broken = 0, 0, None
    while first < steps and cohort.mixer.positions:
        checkpoint, taken = rows.checkpoint(), batches.taken.copy()
        plan = _lazy_turns(cohort, range(first, steps), rows, batches, broken)
        rows.reserve(0)  # for all planned steps
        stepping = sorted({int(row) for row in plan.turns["row"][plan.steps >= 0]}) if step_of_all.momentum else []
        changes_before = checkpoint[1] + (len(broken.stepped) if broken else 0)
        losses, done = kernel.run(rows.changes, changes_before, plan.turns, plan.sums, _velocities(cohort, stepping))
        stepped = plan.steps[:done] >= 0
        if kernel.dropped is None:
            outcome.losses += losses[:done][stepped].tolist()
            break
        stepped[-1] = False
        outcome.losses += losses[:done][stepped].tolist()
        step = int(plan.steps[done - 1])
        turns = np.flatnonzero(plan.steps == step)
        before = plan.turns["row"][turns[turns < done - 1]].tolist()
        if broken and step == first:
            before = [*broken.stepped, *before]
        batches.rewind(taken, plan.turns["row"][:done][plan.steps[:done] >= 0])
        rows.rewind(checkpoint)
        for earlier in range(first, step):
            whole = broken or _BrokenStep([], cohort.active(earlier))
            _advance_coefficients(cohort, earlier, [*whole.stepped, *whole.pending], rows)
            broken = None
        broken, first = _BrokenStep(before, plan.turns["row"][turns[turns >= done]].tolist()), step
        _count_exchanges(cohort, outcome, range(counted, step))
        counted = step
        cohort.drop(outcome, kernel.dropped, step)
    if cohort.mixer.positions:
        _count_exchanges(cohort, outcome, range(counted, steps))
    outcome.taken = batches.taken_by_client()
    return outcome


def _lazy_turns(
    cohort: Cohort, steps: range, rows: LazyRows, batches: _TurnBatches, broken: _BrokenStep | None
) -> _LazyTurns:
    """Return the turns of some steps, the first of which may be broken; update ``rows`` as if all were taken."""
    turns: list[Turn] = []
    places: list[int] = []
    coefficients: list[Array] = []
    for step in steps:
        stepped, positions = broken or _BrokenStep([], cohort.active(step))
        chosen, broken = rows.coefficients_of(positions), None
        for first in range(0, len(positions), GROUP):
            group = positions[first : first + GROUP]
            turns += [(abi.GATHER, len(group), 0), *batches.turns(group)]
            places += [-1, *[step] * len(group)]
            coefficients += [np.zeros((1, 0)), chosen[first : first + GROUP]]
        _advance_coefficients(cohort, step, [*stepped, *positions], rows)
    return _LazyTurns(_as_array(turns), np.array(places, np.int64), ChangeSums.of(coefficients))


def _advance_coefficients(cohort: Cohort, step: int, positions: list[int], rows: LazyRows) -> None:
    """Update the coefficients for a step and its exchange."""
    late, exchange = cohort.schedule.steps_after_exchange, cohort.schedule.exchange(step)
    if not late:
        rows.add(positions)
    if exchange is not None:
        (rows.average if exchange == "average" else rows.mix)(cohort.mixer)
    if late:
        rows.add(positions)


def _count_exchanges(cohort: Cohort, outcome: CohortOutcome, steps: range) -> None:
    kinds = [cohort.schedule.exchange(step) for step in steps]
    cohort.count(outcome, kinds.count("gossip"), kinds.count("average"))
