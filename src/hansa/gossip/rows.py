"""The models of a cohort as rows of a matrix, X <- W X, stored densely or as combinations of changes.

Mixing is linear. If few clients compute at a step, each row is the common start plus a known combination of the changes
so far. Rows of idle clients are never materialized, and the cost does not grow with their number.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import scipy
import torch

from hansa.core.devices import copy_to_device, index_on_device, on_host, where_float64
from hansa.core.native.clients import combine_changes, gram, squared_spread
from hansa.core.types import Vector
from hansa.core.vectors import allocator, kernels
from hansa.core.vectors.arithmetic import native_fits
from hansa.gossip.topology import Topology, over_survivors

SPAN = 1 << 12  # coordinates whose products are summed in the dtype of the changes
SMALL = 256  # clients up to which coefficients are always dense
FULL = 0.05  # fraction of nonzeros above which a sparse matrix costs more than a dense one


@lru_cache(maxsize=64)
def _weights(topology: Topology, n: int) -> tuple[Any, Any]:
    """Return the mixing matrix of a topology and its degrees, cached because large random graphs are slow to build."""
    weights = topology.sparse(n)
    return weights, neighbour_counts(weights)


def neighbour_counts(weights: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the number of neighbours that each client receives from."""
    off = weights.copy()
    off.setdiag(0)
    off.eliminate_zeros()
    return np.bincount(off.indices, minlength=weights.shape[0])


class Mixer:
    """The mixing matrix of a cohort, rebuilt over the survivors, doubly stochastic, when a client drops out."""

    def __init__(self, topology: Topology, n: int) -> None:
        self.topology, self.alive = topology, [True] * n
        self._build()

    def drop(self, *positions: int) -> None:
        for position in positions:
            self.alive[position] = False
        if positions:
            self._build()

    def _build(self) -> None:
        self.positions = [i for i, alive in enumerate(self.alive) if alive]
        n = len(self.positions)
        self.uniform = self.topology.averages
        if self.uniform or n < 2:
            # W = 11'/n is represented symbolically: as a matrix it would be dense
            self.weights: Any = None
            self.degrees = np.full(n, n - 1, dtype=np.int64)
            return
        if n == len(self.alive):
            self.weights, self.degrees = _weights(self.topology, n)
        else:
            self.weights = over_survivors(self.topology, self.alive)
            self.degrees = neighbour_counts(self.weights)

    @property
    def isolated(self) -> bool:
        """Whether W = I."""
        return self.topology.isolates or len(self.alive) == 1

    @property
    def nonzero(self) -> int:
        """Number of nonzero entries of W."""
        return len(self.positions) if self.weights is None else int(self.weights.nnz)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return W over the survivors as a tensor."""
        n = len(self.positions)
        if self.weights is None:
            return torch.full((n, n), 1.0 / n, dtype=torch.float64).to(dtype)
        return torch.from_numpy(self.weights.toarray()).to(dtype)


class Rows(ABC):
    """The models of a cohort by position. Implementations differ in what they keep in memory."""

    @abstractmethod
    def read(self, positions: Sequence[int]) -> torch.Tensor:
        """Return copies of these rows, [positions, d]."""

    def models(self, positions: Sequence[int]) -> Sequence[Vector]:
        """Return these rows, valid until the next change; views if they are in memory."""
        return list(self.read(positions))

    @abstractmethod
    def write(self, position: int, old: Vector, new: Vector) -> None:
        """Write the local step of a row that has not changed since ``old`` was read."""

    @abstractmethod
    def shift(self, position: int, old: Vector, new: Vector) -> None:
        """Add the step from old to new to a row that was mixed in the meantime."""

    @abstractmethod
    def mix(self, mixer: Mixer) -> None:
        """Set X <- W X over the survivors."""

    @abstractmethod
    def average(self, mixer: Mixer) -> None:
        """Replace every survivor's row by their mean."""

    @abstractmethod
    def mean(self, mixer: Mixer) -> Vector:
        """Return the mean of the survivors' rows, in float64."""

    @abstractmethod
    def spread(self, mixer: Mixer, dim: int) -> float:
        """Return sqrt(mean_i ||x_i - mean||^2) over the survivors' first ``dim`` entries: the consensus distance."""

    def deltas(self, mixer: Mixer, dim: int, start: Vector, positions: Sequence[int]) -> tuple[list[Vector], float]:
        """Return row - start at these positions, and the spread."""
        rows = self.read(positions) if positions else ()
        deltas = [torch.sub(row, start, out=allocator.empty_like(start)) for row in rows]
        return deltas, self.spread(mixer, dim)


class DenseRows(Rows):
    """All rows in memory, double-buffered."""

    def __init__(self, start: torch.Tensor) -> None:
        self.rows = start
        self._spare: torch.Tensor | None = None
        self._weights: tuple[Mixer, int, torch.Tensor] | None = None
        self._sparse: tuple[Any, kernels.CsrWeights | None] | None = None

    @property
    def spare(self) -> torch.Tensor:
        """The second buffer, allocated on first use."""
        if self._spare is None:
            self._spare = torch.empty_like(self.rows)
        return self._spare

    def read(self, positions: Sequence[int]) -> torch.Tensor:
        return self.rows[list(positions)] if on_host(self.rows) else torch.stack(self.models(positions))

    def models(self, positions: Sequence[int]) -> list[Vector]:
        return [self.rows[position] for position in positions]

    def pull(self, mixer: Mixer, public: torch.Tensor, rate: float) -> None:
        """Set X <- X + rate (W - I) public over the survivors (compressed gossip)."""
        alive = index_on_device(self.rows.device, mixer.positions)
        self.rows[alive] += rate * (self.matrix(mixer) @ public[alive] - public[alive])

    def write(self, position: int, old: Vector, new: Vector) -> None:
        self.rows[position] = new

    def shift(self, position: int, old: Vector, new: Vector) -> None:
        self.rows[position] = new + (self.rows[position] - old)  # exactly ``new`` if nothing was mixed

    def mix(self, mixer: Mixer) -> None:
        links = self._links(mixer)
        if links is None:
            self.apply(self.matrix(mixer), mixer)
            return
        kernels.mix(self.rows, links, self.spare)
        self.rows, self._spare = self.spare, self.rows

    def _links(self, mixer: Mixer) -> kernels.CsrWeights | None:
        """Return W in CSR form if no client dropped out, native code supports the rows, and W is sparse."""
        n = len(self.rows)
        if mixer.weights is None or len(mixer.positions) != n or not native_fits(self.rows, self.spare):
            return None
        if self._sparse is None or self._sparse[0] is not mixer.weights:
            is_sparse = mixer.nonzero <= max(4, n // 2) * n
            self._sparse = (mixer.weights, kernels.CsrWeights.of(mixer.weights) if is_sparse else None)
        return self._sparse[1]

    def average(self, mixer: Mixer) -> None:
        n = len(mixer.positions)
        self.apply(self.rows.new_full((n, n), 1.0 / n), mixer)

    def mean(self, mixer: Mixer) -> Vector:
        rows = where_float64(self.rows)
        return rows[index_on_device(rows.device, mixer.positions)].mean(dim=0, dtype=torch.float64)

    def deltas(self, mixer: Mixer, dim: int, start: Vector, positions: Sequence[int]) -> tuple[list[Vector], float]:
        deltas = [allocator.empty_like(start) for _ in positions]
        if self.rows.dtype == torch.float32 and native_fits(self.rows, start):  # in one pass
            by_row = dict(zip(positions, deltas, strict=True))
            total = squared_spread(self.rows, mixer.positions, dim, start=start, deltas=by_row)
            return deltas, math.sqrt(total / len(mixer.positions))
        for position, delta in zip(positions, deltas, strict=True):
            torch.sub(self.rows[position], start, out=delta)
        return deltas, self.spread(mixer, dim)

    def spread(self, mixer: Mixer, dim: int) -> float:
        if self.rows.dtype == torch.float32 and native_fits(self.rows):
            return math.sqrt(squared_spread(self.rows, mixer.positions, dim) / len(mixer.positions))
        rows = where_float64(self.rows)
        total = torch.zeros((), dtype=torch.float64, device=rows.device)
        alive = index_on_device(rows.device, mixer.positions)
        for first in range(0, dim, SPAN):  # in float64, one cache-sized piece at a time
            models = rows[alive, first : min(first + SPAN, dim)].double()
            total += models.sub_(models.mean(dim=0)).square_().sum()
        return math.sqrt(float(total) / len(mixer.positions))

    def apply(self, weights: torch.Tensor, mixer: Mixer) -> None:
        if len(mixer.positions) == len(self.rows):
            torch.mm(weights, self.rows, out=self.spare)
            self.rows, self._spare = self.spare, self.rows
        else:
            alive = index_on_device(self.rows.device, mixer.positions)
            self.rows[alive] = weights @ self.rows[alive]

    def matrix(self, mixer: Mixer) -> torch.Tensor:
        """Return W over the survivors, cached."""
        count = len(mixer.positions)
        if self._weights is None or self._weights[:2] != (mixer, count):
            self._weights = (mixer, count, copy_to_device(mixer.dense(self.rows.dtype), self.rows.device))
        return self._weights[2]


class SeparateRows(Rows):
    """W = I: a row is stored once its client has changed it, and mixing does nothing."""

    def __init__(self, start: Vector) -> None:
        self.start = start
        self.changed: dict[int, Vector] = {}

    def read(self, positions: Sequence[int]) -> torch.Tensor:
        return torch.stack([self.changed.get(position, self.start) for position in positions])

    def write(self, position: int, old: Vector, new: Vector) -> None:
        self.changed[position] = new

    def shift(self, position: int, old: Vector, new: Vector) -> None:
        current = self.changed.get(position, self.start)
        unchanged = (current == old).all()  # False after an average
        self.changed[position] = torch.where(unchanged, new, new + (current - old))

    def mix(self, mixer: Mixer) -> None:
        return None

    def average(self, mixer: Mixer) -> None:
        mean = self.read(mixer.positions).mean(dim=0)
        self.changed.update(dict.fromkeys(mixer.positions, mean))

    def mean(self, mixer: Mixer) -> Vector:
        start = where_float64(self.start).double()
        return start + sum((row.double() - start for row in self._changed(mixer)), start * 0) / len(mixer.positions)

    def spread(self, mixer: Mixer, dim: int) -> float:
        mean, moved, n = self.mean(mixer)[:dim], self._changed(mixer), len(mixer.positions)
        rows = [*moved, where_float64(self.start)]
        distances = torch.stack([(row[:dim].double() - mean).square().sum() for row in rows]).tolist()
        return math.sqrt((math.fsum(distances[:-1]) + (n - len(moved)) * distances[-1]) / n)

    def _changed(self, mixer: Mixer) -> list[Vector]:
        return [where_float64(self.changed[position]) for position in mixer.positions if position in self.changed]


class LazyRows(Rows):
    """X = 1 start' + C U: the changes U so far and their coefficients C, which are mixed by C <- W C.

    In a small cohort C is dense. In a large one it starts sparse, because on a ring a change spreads by one client per
    step, and becomes dense once it fills up.
    """

    def __init__(self, start: Vector, n: int, changes: int) -> None:
        self.start, self.n, self.count = start, n, 0
        self.changes = allocator.empty(changes * start.numel(), start.dtype).view(changes, start.numel())
        if start.device.type != "cpu":
            self.changes = start.new_empty(changes, start.numel())
        self.coefficients: Any = np.zeros((n, 0)) if n <= SMALL else scipy.sparse.csr_array((n, 0), dtype=np.float64)
        self._new: list[int] = []
        self._weights: tuple[Any, Any] | None = None

    def read(self, positions: Sequence[int]) -> torch.Tensor:
        if not self.count:
            return self.start.repeat(len(positions), 1)
        chosen = self.coefficients_of(positions)
        if self.start.dtype == torch.float32 and native_fits(self.start, self.changes):
            return combine_changes(self.start, self.changes, chosen)
        needed = np.flatnonzero(chosen.any(axis=0))
        weights = copy_to_device(torch.from_numpy(chosen[:, needed]), self.changes.device, self.changes.dtype)
        used = self.changes[: self.count]
        if len(needed) < self.count:
            used = self.changes[index_on_device(self.changes.device, needed)]
        return torch.addmm(self.start, weights, used)

    def coefficients_of(self, positions: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return these rows of C, [positions, changes]."""
        self._add_columns()
        return _array(self.coefficients[list(positions)])

    def write(self, position: int, old: Vector, new: Vector) -> None:
        self.reserve(1)
        torch.sub(new, old, out=self.changes[self.count])
        self.add([position])

    def shift(self, position: int, old: Vector, new: Vector) -> None:
        self.write(position, old, new)

    def reserve(self, count: int) -> None:
        """Reserve memory for this many more changes."""
        if (missing := self.count + count - len(self.changes)) > 0:
            extra = self.changes.new_empty(self.count + missing, self.changes.shape[1])
            self.changes = torch.cat([self.changes, extra])

    def add(self, positions: Sequence[int]) -> None:
        """Register one change per position, already written to the reserved memory."""
        self.count += len(positions)
        self._new += positions

    def mix(self, mixer: Mixer) -> None:
        self._add_columns()
        if mixer.weights is None:
            self.average(mixer)
            return
        complete = len(mixer.positions) == self.n
        coefficients = self._weights_of(mixer) @ (self.coefficients if complete else self.coefficients[mixer.positions])
        self._set_coefficients(coefficients if complete else self._at_positions(mixer, coefficients))

    def _weights_of(self, mixer: Mixer) -> Any:
        """Return W, dense in a small cohort."""
        if self._weights is None or self._weights[0] is not mixer.weights:
            self._weights = (mixer.weights, mixer.weights.toarray() if self.n <= SMALL else mixer.weights)
        return self._weights[1]

    def average(self, mixer: Mixer) -> None:
        self._add_columns()
        common = self.coefficients[mixer.positions].sum(axis=0) / len(mixer.positions)
        self._set_coefficients(self._at_positions(mixer, np.tile(common, (len(mixer.positions), 1))))

    def mean(self, mixer: Mixer) -> Vector:
        self._add_columns()
        if not self.count:
            return where_float64(self.start).double()
        common = self.coefficients[mixer.positions].sum(axis=0) / len(mixer.positions)
        weights = torch.from_numpy(np.asarray(common, dtype=np.float64))
        weights = copy_to_device(weights, self.changes.device, self.changes.dtype)
        return where_float64(torch.addmv(self.start, self.changes[: self.count].T, weights)).double()

    def spread(self, mixer: Mixer, dim: int) -> float:
        """Compute from X - mean = (C - mean) U: the sum of squares is <(C - mean)'(C - mean), U U'>."""
        self._add_columns()
        if not self.count:
            return 0.0
        n, chosen = len(mixer.positions), self.coefficients[mixer.positions]
        common = np.asarray(chosen.sum(axis=0)).ravel() / n
        if isinstance(chosen, np.ndarray):
            covariance = (chosen - common).T @ (chosen - common) / n
        else:
            covariance = _array(chosen.T @ chosen) / n - np.outer(common, common)
        return math.sqrt(max(0.0, float((covariance * self._products(dim)).sum())))

    def _products(self, dim: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return U U' over the first ``dim`` coordinates."""
        changes = self.changes[: self.count]
        if changes.dtype == torch.float32 and native_fits(changes):
            return gram(changes, dim)
        products = where_float64(changes.new_zeros(self.count, self.count)).double()
        for first in range(0, dim, SPAN):
            block = changes[:, first : min(first + SPAN, dim)]
            products += where_float64(block @ block.T)
        array: np.ndarray[Any, np.dtype[np.float64]] = products.cpu().numpy()
        return array

    def _set_coefficients(self, mixed: Any) -> None:
        full = isinstance(mixed, np.ndarray) or mixed.nnz > FULL * mixed.shape[0] * mixed.shape[1]
        self.coefficients = _array(mixed) if full else scipy.sparse.csr_array(mixed)

    def _at_positions(self, mixer: Mixer, mixed: Any) -> Any:
        """Return the survivors' coefficients at their positions; those of dropped clients are discarded."""
        if len(mixer.positions) == self.n:
            return mixed
        placed = np.zeros((self.n, mixed.shape[1]))
        placed[mixer.positions] = _array(mixed)
        return placed

    def _add_columns(self) -> None:
        """Add a column for each new change, with coefficient one at the client that made it."""
        if not self._new:
            return
        added, width = len(self._new), self.coefficients.shape[1]
        if isinstance(self.coefficients, np.ndarray):
            wider = np.zeros((self.n, width + added))
            wider[:, :width] = self.coefficients
            wider[self._new, np.arange(width, width + added)] = 1.0
            self.coefficients = wider
        else:
            columns = scipy.sparse.csr_array((np.ones(added), (self._new, np.arange(added))), shape=(self.n, added))
            self.coefficients = scipy.sparse.csr_array(scipy.sparse.hstack([self.coefficients, columns]))
        self._new = []


def _array(matrix: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray(matrix if isinstance(matrix, np.ndarray) else matrix.toarray())


def lazy_pays(n: int, active: Sequence[int], gossip_every: int, links: int, dim: int, native: bool = False) -> bool:
    """Return whether lazy rows are estimated to be cheaper, with costs in passes over one row.

    A matrix product costs a sixteenth of a pass per entry. Dense rows: each mixing reads and writes all n rows. Lazy
    rows: each step combines all changes so far for the computing clients, and each mixing multiplies the coefficients
    of all changes by the ``links`` entries of W. ``native`` code mixes and combines in as many passes as there are rows
    and changes, and multiplies all pairs of changes at the end.

    >>> lazy_pays(100, [5] * 24, 1, 300, 30_000), lazy_pays(8, [8] * 48, 1, 24, 30_000)
    (True, False)
    >>> lazy_pays(20, [1] * 10, 1, 60, 160_000, native=True), lazy_pays(5, [2] * 10, 1, 15, 160_000, native=True)
    (True, False)
    """
    dense = lazy = 0.0
    changes = 0
    for step, count in enumerate(active):
        lazy += changes * (1 + count / 16)
        changes += count
        if (step + 1) % gossip_every == 0:
            dense += n if native else 3 * n + n * n / 16
            lazy += 0 if native and n <= SMALL else links * changes / dim
    return lazy + (changes * changes / 8 if native else 0) < dense
