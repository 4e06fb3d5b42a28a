"""Native training of several clients in one call: draw batches, take steps, check the deltas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from ctypes import byref, c_int64
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hansa.core import native
from hansa.core.errors import HansaError
from hansa.core.native import abi
from hansa.core.native.network import SLICE, AffineStep, Network, Workspace, check_code, fill_update

CLIENT = abi.record(abi.Client)
_MANY = 128  # clients from which on columns of losses are faster than one client after the other


def mean_losses(losses: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> list[float]:
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
            for place, column in enumerate(columns[1:], 2):
                before, total = total, total + column
                added = total - before
                rounding = (before - (total - added)) + (column - added)
                exact = exact and (place == steps or not rounding.any())  # NaN counts as a rounding
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
        self.update = abi.StepParameters()
        self._workspace: Workspace | None = None
        self._scratch = torch.empty(0)

    def use(self, inputs: Tensor, labels: Tensor) -> None:
        """Continue with other examples of the same shape."""
        self.data = self.network.examples(inputs, labels, None)

    def train_rows(
        self,
        x: Tensor,
        y: Tensor,
        changes: Tensor,
        index: Tensor,
        spans: np.ndarray[Any, Any],
        works: np.ndarray[Any, Any],
        keys: Sequence[bytes],
        step: AffineStep,
    ) -> list[float] | None:
        """Train clients from one model ``x``, each into a row of ``changes``, on batches drawn with its key. Return the
        mean loss of each, or None if a change is not finite.

        ``spans`` and ``works`` have a row per client: first and stop in the index, steps and batch size.
        """
        for name, vector in (("x", x), ("y", y), ("delta", changes[0]), ("delta", changes[-1])):
            self.network.check_vector(name, vector)
        if changes.shape != (len(keys), x.numel()) or not changes.is_contiguous():
            raise HansaError(
                f"ClientKernel: changes are {list(changes.shape)}, expected contiguous [{len(keys)}, {x.numel()}]."
            )
        if index.dtype != torch.int64 or not index.is_contiguous() or index.device.type != "cpu" or not index.numel():
            raise HansaError(
                f"ClientKernel: index is {index.dtype} {list(index.shape)}: expected contiguous int64 row numbers."
            )
        if self.network.dropout_numbers:
            raise HansaError(
                "ClientKernel.train_rows: the network has dropout, which it does not draw. Use steps() with keep=."
            )
        first, table = spans[:, 0], np.zeros(len(keys), CLIENT)
        table["samples"] = spans[:, 1] - first
        if first.min() < 0 or table["samples"].min() < 1 or int(spans[:, 1].max()) > index.numel():
            raise HansaError(
                f"ClientKernel.train_rows: clients' rows lie outside of the {index.numel()} that there are."
            )
        table["x"], table["y"], table["own"] = x.data_ptr(), y.data_ptr(), index.data_ptr() + 8 * first
        table["delta"] = changes.data_ptr() + changes.stride(0) * changes.element_size() * np.arange(len(keys))
        table["steps"], table["batch"] = works[:, 0], works[:, 1]
        table["key"] = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)
        ends = table["steps"].cumsum()
        losses = np.empty(int(ends[-1]), np.float32)
        table["losses"] = losses.ctypes.data + 4 * (ends - table["steps"])
        update = abi.StepParameters()
        self._fill(update, step, x)
        workspace, at = self.workspace(int(table["batch"].max())), c_int64()
        while at.value < len(table):
            code = workspace.kernels.train_clients(
                workspace.handle, byref(self.data), byref(update), table.ctypes.data, len(table), byref(at), SLICE
            )
            if code:
                own = index[slice(*spans[at.value])]
                check_code(code, "ClientKernel.train_rows", self.network, self.data, own[None])
            if self.stop:
                raise HansaError("ClientKernel.train_rows: stopped.")
        return mean_losses(losses, ends) if table["finite"].all() else None

    def steps(self, y: Tensor, index: Tensor, step: AffineStep, keep: Tensor | None = None) -> Tensor:
        """Take a step in place on each row of ``index`` [steps, batch]; return the loss of each. ``keep`` has the
        dropout factors, as in `Network.train`."""
        self.network.check_vector("y", y)
        batches = self.network.batch_index(index, None, "train", keep)
        self._fill(self.update, step, step.anchor)
        workspace = self.workspace(batches.batch)
        losses, done = torch.empty(batches.steps), c_int64()
        call, handle = workspace.kernels.train, workspace.handle
        structures = byref(self.data), byref(batches), byref(self.update)
        while done.value < batches.steps:
            code = call(handle, y.data_ptr(), *structures, losses.data_ptr(), byref(done), SLICE)
            check_code(code, "ClientKernel.steps", self.network, self.data, index)
            if self.stop:
                raise HansaError("ClientKernel.steps: stopped.")
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

    def use_step(self, step: AffineStep) -> None:
        """Set the step of later calls; velocities are passed separately."""
        fill_update(self.network, self.update, step, step.anchor, None)

    def _fill(self, update: abi.StepParameters, step: AffineStep, anchor: Tensor | None) -> None:
        if step.momentum and step.velocity is None:
            raise HansaError("ClientKernel: momentum needs a velocity to keep it in.")
        fill_update(self.network, update, step, anchor, step.velocity if step.momentum else None)


def shuffled_batches(
    key: bytes, samples: int, length: int, isa: str = "", own: Tensor | None = None
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return ``length`` positions from consecutive permutations of 0..samples-1, shuffled as by NumPy's Philox with
    this key; or the entries of ``own``, int64 [samples], at these positions.

    >>> sorted(shuffled_batches(bytes(16), 3, 6)[:3].tolist())
    [0, 1, 2]
    """
    if own is not None and (own.dtype != torch.int64 or own.shape != (samples,) or own.device.type != "cpu"):
        raise HansaError(
            f"shuffled_batches: own is {own.dtype} {list(own.shape)}, expected {samples} int64 on the CPU."
        )
    own = None if own is None else own.contiguous()
    first = None if own is None else np.array([own.data_ptr()], np.uint64)
    return _shuffled([key], first, np.array([samples]), np.array([length]), isa)


def shuffled_rows(
    keys: Sequence[bytes], index: Tensor, spans: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], isa: str = ""
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return `shuffled_batches` of several clients, one after the other: ``lengths`` entries of each one's range
    ``spans`` [clients, 2] of the index.

    >>> drawn = shuffled_rows([bytes(16)] * 2, torch.arange(5), np.array([[0, 2], [2, 5]]), np.array([2, 3]))
    >>> sorted(drawn[:2].tolist()), sorted(drawn[2:].tolist())
    ([0, 1], [2, 3, 4])
    """
    samples = spans[:, 1] - spans[:, 0]
    fits = index.dtype == torch.int64 and index.is_contiguous() and index.device.type == "cpu"
    if not fits or len(keys) != len(samples) or spans.min() < 0 or samples.min() < 1 or spans.max() > index.numel():
        raise HansaError(
            f"shuffled_rows: {len(keys)} clients in {index.dtype} {list(index.shape)}: expected int64 row numbers."
        )
    return _shuffled(keys, (index.data_ptr() + 8 * spans[:, 0]).astype(np.uint64), samples, lengths, isa)


def _shuffled(
    keys: Sequence[bytes],
    own: np.ndarray[Any, Any] | None,
    samples: np.ndarray[Any, Any],
    lengths: np.ndarray[Any, Any],
    isa: str,
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    words, samples = np.frombuffer(b"".join(keys), "<u8").astype(np.uint64), samples.astype(np.int64)
    lengths, order = lengths.astype(np.int64), np.empty(int(samples.max()), np.int64)
    out = np.empty(int(lengths.sum()), np.int64)
    addresses = None if own is None else own.ctypes.data
    native.load(isa).draw(
        words.ctypes.data, addresses, samples.ctypes.data, lengths.ctypes.data, len(keys), order.ctypes.data,
        out.ctypes.data,
    )  # fmt: skip
    return out


@cache
def shuffles_like_numpy() -> bool:
    """Return whether this NumPy shuffles like the native code, which follows NumPy 1.17 to 2.x."""
    key = bytes(range(16))
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key, "<u8")))
    wanted = np.concatenate([generator.permutation(1000) for _ in range(3)])
    return bool(np.array_equal(wanted, shuffled_batches(key, 1000, 3000)))


Array = np.ndarray[Any, Any]
TURN = abi.record(abi.Turn)
"""A turn: the step of a row on ``batch`` examples whose numbers are at the address ``index``; or, with a row below 0,
an operation on all rows (`hansa.core.native.abi`: MIX, AVERAGE, SETTLE, PULL, SIGNS)."""
GROUP = 16  # the largest number of models computed together


class MixingLinks(NamedTuple):
    """The nonzero entries of W over ``rows`` rows, checked once: arrays in the native layout, and their addresses."""

    rows: int
    arrays: tuple[Array, ...]
    addresses: tuple[int, ...]

    @classmethod
    def of(cls, rows: int, starts: Any, links: Any, weights: Any) -> MixingLinks:
        count = len(links)
        fits = starts.shape == (rows + 1,) and starts[0] == 0 and starts[-1] == count == len(weights)
        if not fits or np.any(np.diff(starts) < 0) or (count and not 0 <= links.min() <= links.max() < rows):
            raise HansaError(f"MixingLinks.of: links that are not those of {rows} rows.")
        arrays = (starts.astype(np.int64), links.astype(np.int64), weights.astype(np.float64))
        return cls(rows, arrays, tuple(array.ctypes.data for array in arrays))


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
        if network.dropout_numbers:
            raise HansaError("CohortKernel: the network has dropout, and turns draw nothing. Step row by row.")
        if rows.ndim != 2 or not rows.is_contiguous():
            raise HansaError(
                f"CohortKernel: rows are {list(rows.shape)}, expected contiguous [clients, {network.dim}]."
            )
        network.check_vector("a row", rows[0])
        n, bits = len(rows), -(-network.dim // 512) * 64
        self._clients, self._update = clients, abi.StepParameters()
        fill_update(network, self._update, step, step.anchor, None)
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

    def set_links(self, links: MixingLinks) -> None:
        """Set W; rows without links do not change."""
        if links.rows != len(self.rows):
            raise HansaError(f"CohortKernel.set_links: links of {links.rows} rows for {len(self.rows)}.")
        self._owners["links"] = links
        self._cohort.starts, self._cohort.links, self._cohort.weights = links.addresses

    def set_public_copies(self, copies: Tensor, rate: float) -> None:
        """Set the public copies of compressed gossip, X <- X + rate (W - I) copies."""
        if copies.shape != self.rows.shape or not copies.is_contiguous() or copies.dtype != torch.float32:
            raise HansaError(
                f"CohortKernel.set_public_copies: copies are {list(copies.shape)}, expected {list(self.rows.shape)}."
            )
        self._owners["public"] = copies
        self._cohort.public_copies, self._cohort.rate = copies.data_ptr(), rate

    def set_velocities(self, velocities: Mapping[int, Tensor]) -> None:
        """Set the velocities of the stepping rows, for momentum; they are updated in place."""
        pointers = _addresses(self._clients, velocities, len(self.rows))
        self._owners["velocities"] = (pointers, dict(velocities))
        self._cohort.velocities = pointers.ctypes.data if velocities else None

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
        """The spread that `set_deltas` asked for, once all turns are done."""
        return float(self._cohort.spread)

    def run(self, turns: Array) -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
        """Run the turns up to the first non-finite step; return the loss of each and the number of turns done.
        ``dropped`` is then the row of that step."""
        self.prepare(turns)
        return self.run_prepared()

    def prepare(self, turns: Array) -> None:
        """Validate turns and get them ready for `run_prepared`."""
        cohort = self._cohort
        if turns.dtype != TURN or (cohort.starts is None and np.any(turns["row"] < 0)):
            raise HansaError("CohortKernel.run: turns of all rows need set_links().")
        losses = np.zeros(len(turns), np.float32)
        self._turns = (turns, losses, int(turns["batch"].max(initial=1)))
        if self._later is None:
            self._stepped.fill(0)
        self._reach.fill(-1)
        cohort.x, cohort.turns, cohort.losses = self.rows.data_ptr(), turns.ctypes.data, losses.ctypes.data
        cohort.count, cohort.done, cohort.dropped = len(turns), 0, -1

    def run_prepared(self) -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
        """Run the prepared turns, as in `run`."""
        clients, cohort = self._clients, self._cohort
        _, losses, batch = self._turns
        workspace = clients.workspace(batch)
        while True:
            code = workspace.kernels.run_cohort(
                workspace.handle, byref(clients.data), byref(self._update), byref(cohort)
            )
            if code == abi.BAD_SUM:
                raise HansaError(
                    f"sign.encode: cannot send the difference of row {cohort.dropped} to its public copy: it "
                    "overflows. The sender diverged; lower its learning rate."
                )
            if code:
                raise HansaError(f"CohortKernel.run: {abi.REFUSALS[code]}.")
            if clients.stop:
                raise HansaError("CohortKernel.run: stopped.")
            if cohort.done >= cohort.count or cohort.dropped >= 0:
                break
        self.dropped = None if cohort.dropped < 0 else int(cohort.dropped)
        return losses, int(cohort.done)


class ChangeSums(NamedTuple):
    """Sums of changes: the i-th sums ``weights`` times the changes at ``places``, from starts[i] to starts[i+1].

    >>> ChangeSums.of([np.array([[0.5, 0.0], [0.0, 0.25]])]).places.tolist()
    [0, 1]
    """

    starts: Array
    places: Array
    weights: Array

    @classmethod
    def of(cls, coefficients: list[Array]) -> ChangeSums:
        """Convert matrices [sums, changes], without zeros; a matrix may have fewer changes than the next."""
        counts: list[Array] = [np.zeros(1, np.int64)]
        places: list[Array] = [np.empty(0, np.int64)]
        weights: list[Array] = [np.empty(0)]
        for matrix in coefficients:
            rows, columns = matrix.nonzero()
            counts.append(np.bincount(rows, minlength=len(matrix)))
            places.append(columns)
            weights.append(matrix[rows, columns])
        return cls(
            np.cumsum(np.concatenate(counts)), np.concatenate(places), np.concatenate(weights).astype(np.float32)
        )


class LazyCohortKernel:
    """Changes [capacity, d], one added per step, each from a model start + a sum of earlier changes; one thread."""

    def __init__(self, clients: ClientKernel, start: Tensor, step: AffineStep) -> None:
        if clients.network.dropout_numbers:
            raise HansaError("LazyCohortKernel: the network has dropout, and turns draw nothing. Step row by row.")
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
        most = int(turns["batch"][gathers].max(initial=0))
        fits = turns.dtype == TURN and len(sums.starts) == len(turns) + 1 and bool(gathers[:1].all())
        if not fits or most > GROUP or (len(sums.places) and sums.places.max() >= count + int((~gathers).sum())):
            raise HansaError(f"LazyCohortKernel.run: sums or groups that are not those of {len(turns)} turns.")
        if changes.ndim != 2 or changes.shape[1] != dim or not changes.is_contiguous():
            raise HansaError(
                f"LazyCohortKernel.run: changes are {list(changes.shape)}, expected contiguous [capacity, {dim}]."
            )
        if self._models.numel() < most * dim:
            self._models = self._start.new_empty(most * dim)
        velocities = velocities or {}
        pointers = _addresses(clients, velocities, max(velocities, default=-1) + 1)
        losses = np.zeros(len(turns), np.float32)
        workspace = clients.workspace(int(turns["batch"][~gathers].max(initial=1)))
        clients.use_step(self._step)
        arrays = (sums.starts.astype(np.int64), sums.places.astype(np.int64), sums.weights.astype(np.float32))
        cohort = abi.LazyCohort(
            self._start.data_ptr(), self._models.data_ptr(), changes.data_ptr(), len(changes), count, turns.ctypes.data,
            *(array.ctypes.data for array in arrays), len(turns), 0, -1, losses.ctypes.data,
            pointers.ctypes.data if velocities else None, SLICE,
        )  # fmt: skip
        while cohort.done < cohort.count and cohort.dropped < 0:
            code = workspace.kernels.run_lazy_cohort(
                workspace.handle, byref(clients.data), byref(clients.update), byref(cohort)
            )
            if code:
                raise HansaError(f"LazyCohortKernel.run: {abi.REFUSALS[code]}.")
            if clients.stop:
                raise HansaError("LazyCohortKernel.run: stopped.")
        self.dropped = None if cohort.dropped < 0 else int(cohort.dropped)
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
    isa: str = "",
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
    if rows.ndim != 2 or rows.dtype != torch.float32 or not rows.is_contiguous() or rows.device.type != "cpu":
        raise HansaError(
            f"squared_spread: rows are {rows.dtype} {list(rows.shape)}, expected contiguous float32 [n, d]."
        )
    places, deltas = np.array(chosen, np.int64), deltas or {}
    if not len(places) or places.min() < 0 or places.max() >= len(rows) or not 0 <= dim <= rows.shape[1]:
        raise HansaError(f"squared_spread: {len(places)} rows and {dim} entries of {list(rows.shape)}.")
    vectors = [] if start is None else [start, *deltas.values()]
    fine = all(x.dtype == rows.dtype and x.shape == rows.shape[1:] and x.is_contiguous() for x in vectors)
    if not fine or not set(deltas) <= set(chosen) or (deltas and start is None):
        raise HansaError(
            f"squared_spread: rows {sorted(deltas)} move from a start, each into a vector of {rows.shape[1]}."
        )
    pointers = np.array([deltas[row].data_ptr() if row in deltas else 0 for row in chosen], np.uint64)
    outputs = (start.data_ptr(), pointers.ctypes.data) if start is not None and deltas else (None, None)
    call = native.load(isa).squared_spread
    return float(call(rows.data_ptr(), places.ctypes.data, len(places), dim, rows.shape[1], *outputs))


def combine_changes(start: Tensor, changes: Tensor, coefficients: Array, isa: str = "") -> Tensor:
    """Return start + coefficients @ changes, [rows, d], skipping zeros.

    >>> combine_changes(torch.ones(2), torch.tensor([[1.0, 2.0], [9.0, 9.0]]), np.array([[0.5, 0.0]])).tolist()
    [[1.5, 2.0]]
    """
    fine = changes.ndim == 2 and changes.shape[1] == start.numel() and coefficients.shape[1] <= len(changes)
    if not fine or any(t.dtype != torch.float32 or not t.is_contiguous() or t.is_cuda for t in (start, changes)):
        raise HansaError(f"combine_changes: {list(coefficients.shape)} times {list(changes.shape)}, expected float32.")
    terms, out = ChangeSums.of([coefficients]), start.new_empty(len(coefficients), start.numel())
    native.load(isa).combine_changes(
        start.data_ptr(), changes.data_ptr(), terms.starts.ctypes.data, terms.places.ctypes.data,
        terms.weights.ctypes.data, len(coefficients), start.numel(), out.data_ptr(),
    )  # fmt: skip
    return out


def gram(rows: Tensor, dim: int, isa: str = "") -> Array:
    """Return the inner products of all pairs of rows over their first ``dim`` entries.

    >>> gram(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), 2).tolist()
    [[5.0, 3.0], [3.0, 9.0]]
    """
    if rows.ndim != 2 or rows.dtype != torch.float32 or not rows.is_contiguous() or not 0 <= dim <= rows.shape[1]:
        raise HansaError(f"gram: {dim} entries of {rows.dtype} {list(rows.shape)}, expected contiguous float32 rows.")
    out = np.empty((len(rows), len(rows)))
    native.load(isa).gram(rows.data_ptr(), len(rows), dim, rows.shape[1], out.ctypes.data)
    return out
