"""Native training of several clients in one call: draw batches, take steps, check the deltas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from ctypes import byref, c_int64
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hansa.core import native
from hansa.core.errors import HansaError
from hansa.core.native import abi
from hansa.core.native.network import SLICE, AffineStep, Network, Workspace, check_code, check_tensor
from hansa.core.vectors.kernels import CsrWeights

Array = np.ndarray[Any, Any]
CLIENT = abi.record(abi.Client)
_MANY = 128  # clients from which on columns of losses are faster than one client after the other


def mean_losses(losses: Array, ends: Array) -> list[float]:
    """Return each client's mean of float32 losses, whose exact sum is rounded once, as by `math.fsum`.

    Args:
        losses: The losses of all clients, one client after the other.
        ends: The end of each client's losses.

    >>> mean_losses(np.float32([1, 2, 4, 5]), np.array([2, 4]))
    [1.5, 4.5]
    """
    steps = int(ends[0])
    if len(ends) >= _MANY and np.array_equal(ends, steps * np.arange(1, len(ends) + 1)):  # all take as many steps
        columns = losses.reshape(-1, steps).T.astype(np.float64)
        total, exact = columns[0], True
        with np.errstate(all="ignore"):
            for count, column in enumerate(columns[1:], 2):
                previous, total = total, total + column
                added = total - previous
                rounding = (previous - (total - added)) + (column - added)
                exact = exact and (count == steps or not rounding.any())  # NaN counts as a rounding
        if exact and np.isfinite(total).all():
            means: list[float] = (total / steps).tolist()
            return means
    numbers, stops = losses.tolist(), ends.tolist()
    pieces = zip([0, *stops[:-1]], stops, strict=True)
    return [math.fsum(numbers[first:stop]) / (stop - first) for first, stop in pieces]


class ClientKernel:
    """A network on one set of examples, for one thread. ``stop`` interrupts a running call with an error."""

    def __init__(self, network: Network, inputs: Tensor, labels: Tensor) -> None:
        self.network, self.stop = network, False
        self.use(inputs, labels)
        self._workspace: Workspace | None = None
        self._scratch = torch.empty(0)

    def use(self, inputs: Tensor, labels: Tensor) -> None:
        """Continue with other examples of the same shape."""
        self.data = self.network.examples(inputs, labels)

    def train_rows(
        self,
        x: Tensor,
        y: Tensor,
        changes: Tensor,
        index: Tensor,
        spans: Array,
        works: Array,
        keys: Sequence[bytes],
        step: AffineStep,
    ) -> list[float] | None:
        """Train clients from one model ``x``, each into a row of ``changes``, on batches drawn with its key. Return the
        mean loss of each, or None if a change is not finite.

        ``spans`` and ``works`` have a row per client: first and stop in the index, steps and batch size.
        """
        self.network.check_vector("x", x)
        self.network.check_vector("y", y)
        check_tensor("changes", changes, torch.float32, len(keys), self.network.dim)
        check_tensor("index", index, torch.int64, -1)
        _refuse_dropout(self.network)
        samples = spans[:, 1] - spans[:, 0]
        if spans.min() < 0 or samples.min() < 1 or spans.max() > index.numel():
            raise HansaError(f"native: clients' rows are out of range: there are {index.numel()}.")
        update, table, ends = self._step_structure(step, x), np.zeros(len(keys), CLIENT), works[:, 0].cumsum()
        losses = np.empty(int(ends[-1]), np.float32)
        table["x"], table["y"], table["own"] = x.data_ptr(), y.data_ptr(), index.data_ptr() + 8 * spans[:, 0]
        table["delta"] = changes.data_ptr() + 4 * self.network.dim * np.arange(len(keys))
        table["samples"], table["steps"], table["batch"] = samples, works[:, 0], works[:, 1]
        table["key"] = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)
        table["losses"] = losses.ctypes.data + 4 * (ends - works[:, 0])
        workspace, trained = self.workspace(int(works[:, 1].max())), c_int64()
        while trained.value < len(table):
            code = workspace.kernels.train_clients(
                workspace.handle, byref(self.data), byref(update), table.ctypes.data, len(table), byref(trained), SLICE
            )
            self._check(code, index[slice(*spans[min(trained.value, len(spans) - 1)])])
        return mean_losses(losses, ends) if table["finite"].all() else None

    def _check(self, code: int, index: Tensor) -> None:
        """Raise the error of a return code, or if the kernel was stopped."""
        check_code(code, self.network, self.data, index)
        if self.stop:
            raise HansaError("native: stopped.")

    def steps(self, y: Tensor, index: Tensor, step: AffineStep, keep: Tensor | None = None) -> Tensor:
        """Take a step in place on each row of ``index`` [steps, batch]; return the loss of each. ``keep`` has the
        dropout factors, as in `Network.train`."""
        self.network.check_vector("y", y)
        batches = self.network.batch_index(index, keep)
        workspace = self.workspace(batches.batch)
        losses, done = torch.empty(batches.steps), c_int64()
        call, handle = workspace.kernels.train, workspace.handle
        structures = byref(self.data), byref(batches), byref(self._step_structure(step, step.anchor))
        while done.value < batches.steps:
            code = call(handle, y.data_ptr(), *structures, losses.data_ptr(), byref(done), SLICE)
            self._check(code, index)
        return losses

    def workspace(self, batch: int) -> Workspace:
        """Return a reusable workspace for batches of this size."""
        if self._workspace is None or self._workspace.batch < batch:
            self._workspace = Workspace(self.network, batch)
        return self._workspace

    def scratch(self, entries: int) -> Tensor:
        """Return reusable memory of at least so many floats, for what need not outlive a call."""
        if self._scratch.numel() < entries:
            self._scratch = torch.empty(entries)
        return self._scratch

    def _step_structure(self, step: AffineStep, anchor: Tensor | None) -> abi.StepParameters:
        if step.momentum and step.velocity is None:
            raise HansaError("native: momentum needs a velocity to keep it in.")
        return self.network.step_structure(step, anchor, step.velocity if step.momentum else None)


TURN = abi.record(abi.Turn)
"""A turn: the step of a row on ``batch`` examples whose numbers are at the address ``index``; or, with a row below 0,
an operation on all rows (`hansa.core.native.abi`: MIX, AVERAGE, SETTLE, PULL, SIGNS)."""
GROUP = 16  # the largest number of models computed together


def _refuse_dropout(network: Network) -> None:
    if network.dropout_numbers:
        raise HansaError("native: the network has dropout, which is drawn batch by batch. Use ClientKernel.steps.")


class CohortKernel:
    """The rows [n, d] of a cohort, changed in place, for one thread.

    With ``after_exchange`` the next exchange adds the steps to the rows (combine-then-adapt). With ``start`` rows and
    public copies are initialized to it on first use; their contents are undefined before.
    """

    def __init__(
        self,
        clients: ClientKernel,
        rows: Tensor,
        step: AffineStep,
        *,
        after_exchange: bool = False,
        start: Tensor | None = None,
    ) -> None:
        network = clients.network
        _refuse_dropout(network)
        check_tensor("rows", rows, torch.float32, -1, network.dim)
        n, bits = len(rows), -(-network.dim // 512) * 64
        self._clients, self._update = clients, network.step_structure(step, step.anchor, None)
        self._scratch = clients.scratch(n * abi.CUT + n + n * bits // 4)
        per_row = np.zeros((4, n), np.int64)
        self._stepped, self._reach, self._delta_addresses = per_row[0], per_row[2].view(np.float64), per_row[3]
        address = per_row.ctypes.data
        self._cohort = abi.DenseCohort(
            rows=n, seconds=SLICE, rate=1.0, stepped=address, reach=address + 16 * n, scratch=self._scratch.data_ptr()
        )
        self._later = torch.empty_like(rows) if after_exchange else None
        if self._later is not None:
            self._cohort.later = self._later.data_ptr()
        self._owners: dict[str, Any] = {"step": step}
        if start is not None:
            network.check_vector("start", start)
            self._owners["start"] = start
            self._cohort.start, self._cohort.begun = start.data_ptr(), address + 8 * n
        self.rows = rows
        self.dropped: int | None = None
        """The row whose step became non-finite and ended the call, if any."""

    def set_deltas(self, origin: Tensor, deltas: Mapping[int, Tensor]) -> None:
        """Let the call that ends the turns compute `squared_spread` of the rows with links, in the pass of the last
        exchange. ``deltas`` maps rows to the vectors that receive x_i - origin."""
        for vector in (origin, *deltas.values()):
            self._clients.network.check_vector("delta", vector)
        self._owners["deltas"] = (origin, deltas)
        self._delta_addresses.fill(0)
        for row, vector in deltas.items():
            self._delta_addresses[row] = vector.data_ptr()
        self._cohort.origin, self._cohort.deltas = origin.data_ptr(), self._cohort.stepped + 24 * len(self.rows)

    @property
    def spread(self) -> float:
        """The spread requested by `set_deltas`, once all turns are done."""
        return float(self._cohort.spread)

    def prepare(
        self,
        turns: Array,
        links: CsrWeights,
        copies: Tensor | None = None,
        rate: float = 1.0,
        velocities: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Get turns ready for `run`.

        Args:
            turns: The turns.
            links: W; rows without links do not change.
            copies: The public copies of compressed gossip, X <- X + rate (W - I) copies.
            rate: The rate of compressed gossip.
            velocities: The velocities of the stepping rows, for momentum; they are updated in place.
        """
        cohort, n = self._cohort, len(self.rows)
        if turns.dtype != TURN or len(links.starts) != n + 1:
            raise HansaError(f"native: turns with links of {len(links.starts) - 1} rows for {n}.")
        if copies is not None:
            check_tensor("public copies", copies, torch.float32, *self.rows.shape)
            cohort.public_copies, cohort.rate = copies.data_ptr(), rate
        pointers = _addresses(self._clients, velocities or {}, n)
        cohort.velocities = pointers.ctypes.data if velocities else None
        cohort.starts, cohort.links, cohort.weights = (array.ctypes.data for array in links)
        losses = np.zeros(len(turns), np.float32)
        self._turns = (turns, losses, int(turns["batch"].max(initial=1)))
        self._owners["prepared"] = (links, copies, pointers, velocities)
        if self._later is None:
            self._stepped.fill(0)
        self._reach.fill(-1)
        cohort.x, cohort.turns, cohort.losses = self.rows.data_ptr(), turns.ctypes.data, losses.ctypes.data
        cohort.count, cohort.done, cohort.dropped = len(turns), 0, -1

    def run(self) -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
        """Run the prepared turns up to the first non-finite step; return the loss of each and the number of turns
        done. ``dropped`` is then the row of that step."""
        _, losses, batch = self._turns
        workspace = self._clients.workspace(batch)
        self.dropped = _run_turns(self._clients, workspace.kernels.run_cohort, workspace, self._update, self._cohort)
        return losses, int(self._cohort.done)


def _run_turns(clients: ClientKernel, kernel: Any, workspace: Workspace, update: Any, cohort: Any) -> int | None:
    """Run the turns of a cohort in several calls; return the row whose step became non-finite, if any."""
    while True:
        code = kernel(workspace.handle, byref(clients.data), byref(update), byref(cohort))
        if code == abi.BAD_SUM:
            raise HansaError(
                f"sign.encode: cannot send the difference of row {cohort.dropped} to its public copy: it overflows. "
                "The sender diverged; lower its learning rate."
            )
        if code:
            raise HansaError(f"native: {abi.REFUSALS[code]}.")
        if clients.stop:
            raise HansaError("native: stopped.")
        if cohort.dropped >= 0:
            return int(cohort.dropped)
        if cohort.done >= cohort.count:
            return None


class ChangeSums(NamedTuple):
    """Sums of changes: the i-th sums ``weights`` times the changes at ``indices``, from starts[i] to starts[i+1].

    >>> ChangeSums.of([np.array([[0.5, 0.0], [0.0, 0.25]])]).indices.tolist()
    [0, 1]
    """

    starts: Array
    indices: Array
    weights: Array

    @classmethod
    def of(cls, coefficients: list[Array]) -> ChangeSums:
        """Convert matrices [sums, changes], without zeros; a matrix may have fewer changes than the next."""
        counts: list[Array] = [np.zeros(1, np.int64)]
        indices: list[Array] = [np.empty(0, np.int64)]
        weights: list[Array] = [np.empty(0)]
        for matrix in coefficients:
            rows, columns = matrix.nonzero()
            counts.append(np.bincount(rows, minlength=len(matrix)))
            indices.append(columns)
            weights.append(matrix[rows, columns])
        return cls(
            np.cumsum(np.concatenate(counts)), np.concatenate(indices), np.concatenate(weights).astype(np.float32)
        )


class LazyCohortKernel:
    """Changes [capacity, d], one added per step, each from a model start + a sum of earlier changes; one thread."""

    def __init__(self, clients: ClientKernel, start: Tensor, step: AffineStep) -> None:
        _refuse_dropout(clients.network)
        clients.network.check_vector("start", start)
        self._clients, self._step, self._start = clients, step, start
        self._models = start.new_empty(0)
        self.dropped: int | None = None
        """The row whose step became non-finite and ended the call, if any."""

    def run(
        self,
        changes: Tensor,
        count: int,
        turns: Array,
        sums: ChangeSums,
        velocities: Mapping[int, Tensor] | None = None,
    ) -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
        """Run groups of turns up to the first non-finite step, whose change is discarded.

        A group is a turn with the row GATHER and the number of steps, at most GROUP, followed by the steps. ``sums``
        are their models; ``count`` changes exist. Returns the loss of each turn and the number of turns done.
        """
        clients, dim = self._clients, self._clients.network.dim
        gathers = turns["row"] == abi.GATHER
        largest = int(turns["batch"][gathers].max(initial=0))
        fits = turns.dtype == TURN and len(sums.starts) == len(turns) + 1 and bool(gathers[:1].all())
        if not fits or largest > GROUP or (len(sums.indices) and sums.indices.max() >= count + int((~gathers).sum())):
            raise HansaError(f"native: sums or groups that are not those of {len(turns)} turns.")
        check_tensor("changes", changes, torch.float32, -1, dim)
        if self._models.numel() < largest * dim:
            self._models = self._start.new_empty(largest * dim)
        velocities = velocities or {}
        pointers = _addresses(clients, velocities, max(velocities, default=-1) + 1)
        losses = np.zeros(len(turns), np.float32)
        workspace = clients.workspace(int(turns["batch"][~gathers].max(initial=1)))
        update = clients.network.step_structure(self._step, self._step.anchor, None)
        arrays = (sums.starts.astype(np.int64), sums.indices.astype(np.int64), sums.weights.astype(np.float32))
        cohort = abi.LazyCohort(
            self._start.data_ptr(), self._models.data_ptr(), changes.data_ptr(), len(changes), count, turns.ctypes.data,
            *(array.ctypes.data for array in arrays), len(turns), 0, -1, losses.ctypes.data,
            pointers.ctypes.data if velocities else None, SLICE,
        )  # fmt: skip
        self.dropped = _run_turns(clients, workspace.kernels.run_lazy_cohort, workspace, update, cohort)
        return losses, int(cohort.done)


def _addresses(clients: ClientKernel, velocities: Mapping[int, Tensor], rows: int) -> Array:
    """Return the address of each row's velocity, 0 for none."""
    for vector in velocities.values():
        clients.network.check_vector("velocity", vector)
    return np.array([velocities[row].data_ptr() if row in velocities else 0 for row in range(rows)], np.uint64)


def squared_spread(
    rows: Tensor,
    chosen: Sequence[int],
    dim: int,
    *,
    start: Tensor | None = None,
    deltas: Mapping[int, Tensor] | None = None,
) -> float:
    """Return sum_i ||x_i - mean||^2 over the first ``dim`` entries of the chosen rows.

    Up to 16 rows it is accurate to about seven digits, above that computed in float64. ``deltas`` maps rows to vectors
    that receive x_i - start in the same pass.

    >>> squared_spread(torch.tensor([[1.0, 0.0], [3.0, 0.0], [9.0, 9.0]]), [0, 1], 2)
    2.0
    """
    check_tensor("rows", rows, torch.float32, -1, -1)
    positions, deltas = np.array(chosen, np.int64), deltas or {}
    if not len(positions) or positions.min() < 0 or positions.max() >= len(rows) or not 0 <= dim <= rows.shape[1]:
        raise HansaError(f"squared_spread: {len(positions)} rows and {dim} entries of {list(rows.shape)}.")
    for x in [] if start is None else [start, *deltas.values()]:
        check_tensor("a delta", x, torch.float32, rows.shape[1])
    if not set(deltas) <= set(chosen) or (deltas and start is None):
        raise HansaError(f"squared_spread: rows {sorted(deltas)} move from a start, and are chosen ones.")
    pointers = np.array([deltas[row].data_ptr() if row in deltas else 0 for row in chosen], np.uint64)
    outputs = (start.data_ptr(), pointers.ctypes.data) if start is not None and deltas else (None, None)
    call = native.load().squared_spread
    return float(call(rows.data_ptr(), positions.ctypes.data, len(positions), dim, rows.shape[1], *outputs))


def combine_changes(start: Tensor, changes: Tensor, coefficients: Array) -> Tensor:
    """Return start + coefficients @ changes, [rows, d], skipping zeros.

    >>> combine_changes(torch.ones(2), torch.tensor([[1.0, 2.0], [9.0, 9.0]]), np.array([[0.5, 0.0]])).tolist()
    [[1.5, 2.0]]
    """
    check_tensor("start", start, torch.float32, -1)
    check_tensor("changes", changes, torch.float32, -1, start.numel())
    if coefficients.shape[1] > len(changes):
        raise HansaError(f"combine_changes: {list(coefficients.shape)} times {list(changes.shape)}.")
    terms, out = ChangeSums.of([coefficients]), start.new_empty(len(coefficients), start.numel())
    native.load().combine_changes(
        start.data_ptr(), changes.data_ptr(), terms.starts.ctypes.data, terms.indices.ctypes.data,
        terms.weights.ctypes.data, len(coefficients), start.numel(), out.data_ptr(),
    )  # fmt: skip
    return out


def gram(rows: Tensor, dim: int) -> Array:
    """Return the inner products of all pairs of rows over their first ``dim`` entries.

    >>> gram(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), 2).tolist()
    [[5.0, 3.0], [3.0, 9.0]]
    """
    check_tensor("rows", rows, torch.float32, -1, -1)
    if not 0 <= dim <= rows.shape[1]:
        raise HansaError(f"gram: {dim} entries of {list(rows.shape)}.")
    out = np.empty((len(rows), len(rows)))
    native.load().gram(rows.data_ptr(), len(rows), dim, rows.shape[1], out.ctypes.data)
    return out
