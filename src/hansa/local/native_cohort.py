"""The native executor of cohorts' schedules: all turns in one call, on dense or lazy rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import scipy
import torch

from hansa.compress import sign
from hansa.core.keys import Key
from hansa.core.native import abi
from hansa.core.native.client_kernel import ClientKernel
from hansa.core.native.cohort_kernel import GROUP, TURN, ChangeSums, CohortKernel, LazyCohortKernel, MixingLinks
from hansa.core.types import Vector
from hansa.core.vectors import allocator
from hansa.gossip.rows import DenseRows, LazyRows, Mixer
from hansa.gossip.topology import Topology
from hansa.local.cohort import Cohort, CohortOutcome

Array: TypeAlias = np.ndarray[Any, Any]
Turn: TypeAlias = tuple[int, int, int]
"""The fields of `TURN`."""
DrawRows: TypeAlias = Callable[[Sequence[int], Sequence[bytes], Array], Array]
"""From clients, the keys of their batches and the rows that each needs: the row numbers, one client after the other."""
MOST_EVEN = 1024  # clients up to which the n^2 links of compressed gossip on a complete graph are made
LINKS = 64  # links per client up to which sums over links are faster than a matrix product


def train_cohorts_natively(
    cohorts: Sequence[Cohort], clients: ClientKernel, draw_rows: DrawRows | None = None
) -> list[CohortOutcome | None]:
    """Run cohorts' schedules natively; None for one whose rows are separate or whose exchange has no native form.

    All schedules are planned before the first step, because Python code between native steps is slow: the steps evict
    it from the cache. Cohorts that keep no rows run in the same memory, one after the other. ``draw_rows`` draws the
    batches of several clients in one call, where these are the trainer's own.
    """
    able = [cohort for cohort in cohorts if _runs_natively(cohort)]
    drawn = _draw_all(able, draw_rows)
    memory: dict[int, _RowMemory] = {}
    runs: list[_DenseRun | _LazyRun] = []
    for cohort in able:
        batches = _TurnBatches(cohort, drawn.get(id(cohort), {}))
        if cohort.storage(native=True) == "lazy":
            runs.append(_LazyRun(cohort, clients, batches))
        else:
            runs.append(_DenseRun(cohort, clients, batches, memory))
    for run in runs:
        run.run()
    outcomes = {id(run.cohort): run.result() for run in runs}
    return [outcomes.get(id(cohort)) for cohort in cohorts]


def _runs_natively(cohort: Cohort) -> bool:
    if cohort.judges_messages:
        return False
    storage = cohort.storage(native=True)
    if storage == "lazy":
        return True
    return storage == "dense" and (not cohort.schedule.steps_after_exchange or _exchanges_natively(cohort))


def _draw_all(cohorts: Sequence[Cohort], draw_rows: DrawRows | None) -> dict[int, dict[int, _Drawn]]:
    """Draw the batches of all cohorts' stepping clients in one call; by cohort and position."""
    drawn: dict[int, dict[int, _Drawn]] = {}
    wanted: dict[Key, list[tuple[dict[int, _Drawn], int, int, int, int]]] = {}
    for cohort in cohorts if draw_rows is not None else ():
        sizes, clients, schedule = cohort.batch_sizes, cohort.clients, cohort.schedule
        if sizes is None:
            continue
        batches = drawn[id(cohort)] = {}
        own = wanted.setdefault(schedule.key.child("local", schedule.round), [])
        for position, count in Counter(chain.from_iterable(cohort.active_from(0))).items():
            own.append((batches, position, clients[position], sizes[position], count))
    members = list(chain.from_iterable(wanted.values()))
    if draw_rows is not None and members:
        keys = [digest for key, own in wanted.items() for digest in key.digests([each[2] for each in own], "batch")]
        lengths = [size * count for *_, size, count in members]
        rows = draw_rows([each[2] for each in members], keys, np.array(lengths, np.int64))
        address = rows.ctypes.data
        for (batches, position, _, size, _), length in zip(members, lengths, strict=True):
            batches[position] = _Drawn(rows, size, address)
            address += 8 * length
    return drawn


class _Drawn(NamedTuple):
    """The batches of one client's steps: the array that they are in, the rows per batch, the address of the first."""

    owner: Array
    size: int
    address: int


class _TurnBatches:
    """The turns of the clients' steps: the address of each client's next batch, and the number taken.

    ``drawn`` has the batches of the steps that clients take if none drops out; others are drawn when they are needed.
    """

    def __init__(self, cohort: Cohort, drawn: dict[int, _Drawn]) -> None:
        self._cohort, self._drawn = cohort, drawn
        self._batches: dict[int, Any] = {}
        self._turns: dict[int, list[tuple[int, int]]] = {}
        self.taken = [0] * len(cohort.clients)

    def turns(self, positions: Sequence[int]) -> list[Turn]:
        """Return the next turn of each position."""
        turns = []
        for position in positions:
            taken = self.taken[position]
            self.taken[position] = taken + 1
            if position in self._drawn:
                _, size, address = self._drawn[position]
                turns.append((position, size, address + 8 * size * taken))
                continue
            if position not in self._turns:
                batches = self._batches[position] = self._cohort.batches(self._cohort.clients[position])
                self._turns[position] = _widths_and_addresses(batches)
            turns.append((position, *self._turns[position][taken]))
        return turns

    def taken_by_client(self) -> Counter[int]:
        """Return the steps that each client took."""
        return Counter(dict(zip(self._cohort.clients, self.taken, strict=True)))

    def rewind(self, taken: Sequence[int], rows: Sequence[int] | Array) -> None:
        """Return to an earlier ``taken``, with the given steps taken since. The survivors may take other steps now."""
        self.taken = (np.array(taken) + np.bincount(np.array(rows, np.int64), minlength=len(taken))).tolist()
        self._drawn = {}


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
    """Turns of several steps, the step that each belongs to, and the kind of exchange that each is, None for steps."""

    turns: list[Turn]
    steps: list[int]
    kinds: list[str | None]

    def exchanges(self, done: int) -> tuple[int, int]:
        """Count the gossips and the exact averages among the first ``done`` turns."""
        kinds = self.kinds[:done]
        return kinds.count("gossip"), kinds.count("average")

    def stepped(self, done: int) -> list[int]:
        """Return the places of the steps among the first ``done`` turns."""
        return [place for place, turn in enumerate(self.turns[:done]) if turn[0] >= 0]

    def remaining(self, done: int) -> list[int]:
        """Return the rows that have not yet stepped in the step of the last of ``done`` turns."""
        same = self.steps[done - 1]
        pairs = zip(self.turns[done:], self.steps[done:], strict=True)
        return [turn[0] for turn, step in pairs if step == same and turn[0] >= 0]


class _RowMemory(NamedTuple):
    """The rows, and the public copies of compressed gossip, in which cohorts run one after the other."""

    rows: torch.Tensor
    copies: torch.Tensor | None


class _DenseRun:
    """Runs all turns in one call, or one call per step if the exchange is not native; restarts after a dropout.

    ``memory`` has the memory of cohorts that keep no rows, by their number of clients.
    """

    def __init__(
        self, cohort: Cohort, clients: ClientKernel, batches: _TurnBatches, memory: dict[int, _RowMemory]
    ) -> None:
        self.cohort, self.schedule, self.batches = cohort, cohort.schedule, batches
        start = None if cohort.mixing.keep_local_models or not self.schedule.steps else cohort.start
        own = None if start is None or cohort.keeps_rows else memory.get(len(cohort.clients))
        if own is None:
            own = _RowMemory(*cohort.dense_rows())
        if start is None:
            cohort.fill(*own)
        elif not cohort.keeps_rows:
            memory[len(cohort.clients)] = own
        self.rows = DenseRows(own.rows)
        self.outcome = CohortOutcome(self.rows, own.copies)
        self.step = cohort.common_step
        late = self.schedule.steps_after_exchange
        self.kernel = CohortKernel(clients, own.rows, self.step, after_exchange=late, start=start)
        self._deltas: dict[int, Vector] = {}
        self._native = _exchanges_natively(cohort)
        if self._native:
            self._deltas = {position: allocator.empty_like(cohort.start) for position in cohort.reporting_positions()}
            self.kernel.set_deltas(cohort.start, self._deltas)
        self._plan = self._prepare(0, None) if self.schedule.steps and cohort.mixer.positions else None

    def run(self) -> None:
        """Run the schedule; the turns of the first call are prepared, and those of the last recorded by `result`."""
        step, pending = 0, None
        while step < self.schedule.steps and self.cohort.mixer.positions:
            plan = self._plan or self._prepare(step, pending)
            losses, done = self.kernel.run_prepared()
            if self._native and self.kernel.dropped is None:
                self._plan, self._losses = plan, losses
                break
            step, pending = self._record(plan, step, losses, done)
            self._plan = None
        if self._plan is None:
            self.outcome.finish(self.cohort)

    def result(self) -> CohortOutcome:
        """Return the outcome, with the turns since the last dropout."""
        cohort, outcome, plan = self.cohort, self.outcome, self._plan
        if plan is not None:
            outcome.losses += self._losses[plan.stepped(len(plan.turns))].tolist()
            cohort.count(outcome, *plan.exchanges(len(plan.turns)))
            outcome.deltas = [self._deltas[position] for position in cohort.reporting_positions()]
            outcome.spread = math.sqrt(self.kernel.spread / len(cohort.mixer.positions))
            outcome.finish(cohort)
        outcome.taken = self.batches.taken_by_client()
        return outcome

    def _record(self, plan: _DenseTurns, first: int, losses: Array, done: int) -> tuple[int, list[int] | None]:
        """Record the turns done: to the next dropout, or of one step if the exchange is not native. Return where to
        continue: the step, and its remaining rows if a dropout interrupted it."""
        cohort, outcome, stepped = self.cohort, self.outcome, plan.stepped(done)
        dropped, rows = self.kernel.dropped, [plan.turns[place][0] for place in stepped]
        outcome.losses += losses[stepped if dropped is None else stepped[:-1]].tolist()
        cohort.count(outcome, *plan.exchanges(done))
        if dropped is not None:
            self.batches.rewind(self._taken, rows)
            first = plan.steps[done - 1]
            cohort.drop(outcome, dropped, first)
            pending = plan.remaining(done)
            if self._native or pending:
                return first, pending
        if cohort.mixer.positions:
            cohort.exchange(outcome, first, self._pull if _has_few_links(cohort) else None)
        return first + 1, None

    def _prepare(self, first: int, pending: list[int] | None) -> _DenseTurns:
        """Plan the turns to the end, or of one step if the exchange is not native, and pass the current W, the public
        copies and the velocities of the stepping clients to the kernel. ``pending`` are the remaining rows of a first
        step that a dropout interrupted."""
        self._taken = self.batches.taken.copy()
        plan = self._turns(range(first, self.schedule.steps if self._native else first + 1), pending)
        copies = self.outcome.public_copies
        self.kernel.set_links(_links_of(self.cohort.mixer, uniform=copies is not None))
        if copies is not None:
            self.kernel.set_public_copies(copies, self.cohort.mixing.consensus_rate)
        if self.step.momentum:
            stepping = sorted({turn[0] for turn in plan.turns if turn[0] >= 0})
            self.kernel.set_velocities(_velocities(self.cohort, stepping))
        self.kernel.rows = self.rows.rows
        self.kernel.prepare(_as_array(plan.turns))
        return plan

    def _turns(self, steps: range, pending: list[int] | None) -> _DenseTurns:
        """Return the turns of some steps: for each, the stepping clients, then the exchange if it is native."""
        plan, active = _DenseTurns([], [], []), self.cohort.active_from(steps[0])[: len(steps)]
        turns, places, kinds = plan
        if pending is not None:
            active[0] = pending
        codes, exchange = self._exchange_codes() if self._native else {}, self.schedule.exchange
        for step, positions in zip(steps, active, strict=True):
            turns += self.batches.turns(positions)
            count, kind = len(positions), exchange(step)
            kinds += [None] * count
            if (code := codes.get(kind)) is not None:
                turns.append((code, 1, 0))
                kinds.append(kind)
                count += 1
            places += [step] * count
        return plan

    def _exchange_codes(self) -> dict[str | None, int]:
        """Return the native code of each kind of exchange."""
        codes: dict[str | None, int] = {"average": abi.AVERAGE}
        if self.cohort.mixing.compressor is not None:
            codes["gossip"] = abi.SIGNS
        else:
            codes["gossip"] = abi.AVERAGE if self.cohort.mixer.weights is None else abi.MIX
        return {**codes, None: abi.SETTLE} if self.schedule.steps_after_exchange else codes

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


class _LazyRun:
    """Runs all steps in one call; after a dropout, continues with another."""

    def __init__(self, cohort: Cohort, clients: ClientKernel, batches: _TurnBatches) -> None:
        self.cohort, self.batches = cohort, batches
        self.kernel = LazyCohortKernel(clients, cohort.start, cohort.common_step)

    def run(self) -> None:
        cohort, batches, kernel = self.cohort, self.batches, self.kernel
        rows, steps = cohort.lazy_rows(), cohort.schedule.steps
        self.outcome = outcome = CohortOutcome(rows)
        first, counted, broken = 0, 0, None
        while first < steps and cohort.mixer.positions:
            checkpoint, taken = rows.checkpoint(), batches.taken.copy()
            plan = _lazy_turns(cohort, range(first, steps), rows, batches, broken)
            rows.reserve(0)  # for all planned steps
            momentum = cohort.common_step.momentum
            stepping = sorted({int(row) for row in plan.turns["row"][plan.steps >= 0]}) if momentum else []
            before = checkpoint[1] + (len(broken.stepped) if broken else 0)
            losses, done = kernel.run(rows.changes, before, plan.turns, plan.sums, _velocities(cohort, stepping))
            stepped = plan.steps[:done] >= 0
            if kernel.dropped is None:
                outcome.losses += losses[:done][stepped].tolist()
                break
            stepped[-1] = False
            outcome.losses += losses[:done][stepped].tolist()
            step = int(plan.steps[done - 1])
            turns = np.flatnonzero(plan.steps == step)
            earlier_rows = plan.turns["row"][turns[turns < done - 1]].tolist()
            if broken and step == first:
                earlier_rows = [*broken.stepped, *earlier_rows]
            batches.rewind(taken, plan.turns["row"][:done][plan.steps[:done] >= 0])
            rows.rewind(checkpoint)
            for earlier in range(first, step):
                whole = broken or _BrokenStep([], cohort.active(earlier))
                _advance_coefficients(cohort, earlier, [*whole.stepped, *whole.pending], rows)
                broken = None
            broken, first = _BrokenStep(earlier_rows, plan.turns["row"][turns[turns >= done]].tolist()), step
            _count_exchanges(cohort, outcome, range(counted, step))
            counted = step
            cohort.drop(outcome, kernel.dropped, step)
        if cohort.mixer.positions:
            _count_exchanges(cohort, outcome, range(counted, steps))
        outcome.finish(cohort)

    def result(self) -> CohortOutcome:
        self.outcome.taken = self.batches.taken_by_client()
        return self.outcome


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
