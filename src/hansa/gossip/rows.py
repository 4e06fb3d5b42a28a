"""The models of a cohort as rows of a matrix, X <- W X: held as they are, or as combinations of what has changed.

Mixing is linear. With few clients computing at a step, a client's row is the common start plus a known combination of
the changes made so far: rows of idle clients need never exist, and the cost does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from scipy import sparse

from hansa.gossip.topology import Topology, complete, over_survivors
from hansa.types import Vector


class Mixer:
    """The mixing matrix of a cohort, rebuilt doubly stochastic over the survivors when a client is lost."""

    def __init__(self, topology: Topology, n: int) -> None:
        self.topology, self.alive = topology, [True] * n
        self._build()

    def lose(self, position: int) -> None:
        self.alive[position] = False
        self._build()

    def _build(self) -> None:
        self.positions = [i for i, alive in enumerate(self.alive) if alive]
        n = len(self.positions)
        self.uniform = isinstance(self.topology, complete)
        if self.uniform or n < 2:
            # W = 11'/n is kept as that fact: as a matrix it would be the one dense one among sparse ones
            self.weights = None
            self.degrees = np.full(n, n - 1, dtype=np.int64)
            return
        whole = n == len(self.alive)
        self.weights = self.topology.sparse(n) if whole else over_survivors(self.topology, self.alive)
        off = self.weights.copy()
        off.setdiag(0)
        off.eliminate_zeros()
        self.degrees = np.bincount(off.indices, minlength=n)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """W over the survivors as a tensor."""
        n = len(self.positions)
        if self.weights is None:
            return torch.full((n, n), 1.0 / n, dtype=torch.float64).to(dtype)
        return torch.from_numpy(self.weights.toarray()).to(dtype)


class Rows(Protocol):
    """Rows by position in the cohort."""

    def read(self, positions: Sequence[int]) -> torch.Tensor: ...

    def write(self, position: int, before: Vector, after: Vector) -> None: ...

    def mix(self, mixer: Mixer) -> None: ...

    def average(self, mixer: Mixer) -> None: ...


class DenseRows:
    """Every row in memory, in two buffers that swap."""

    def __init__(self, start: torch.Tensor) -> None:
        self.rows, self.spare = start, torch.empty_like(start)
        self._weights: tuple[Mixer, int, torch.Tensor] | None = None

    def read(self, positions: Sequence[int]) -> torch.Tensor:
        return self.rows[list(positions)]

    def write(self, position: int, before: Vector, after: Vector) -> None:
        self.rows[position] = after

    def mix(self, mixer: Mixer) -> None:
        self.apply(self._matrix(mixer), mixer)

    def average(self, mixer: Mixer) -> None:
        n = len(mixer.positions)
        self.apply(self.rows.new_full((n, n), 1.0 / n), mixer)

    def apply(self, weights: torch.Tensor, mixer: Mixer) -> None:
        if len(mixer.positions) == len(self.rows):
            torch.mm(weights, self.rows, out=self.spare)
            self.rows, self.spare = self.spare, self.rows
        else:
            self.rows[mixer.positions] = weights @ self.rows[mixer.positions]

    def _matrix(self, mixer: Mixer) -> torch.Tensor:
        count = len(mixer.positions)
        if self._weights is None or self._weights[:2] != (mixer, count):
            self._weights = (mixer, count, mixer.dense(self.rows.dtype).to(self.rows.device))
        return self._weights[2]


class LazyRows:
    """X = 1 start' + C U: the changes U made so far, and the coefficients C that gossip carries, C <- W C."""

    def __init__(self, start: Vector, n: int, changes: int) -> None:
        self.start, self.n = start, n
        self.changes = start.new_empty(changes, start.numel())
        self.count = 0
        self.coefficients: sparse.csr_array = sparse.csr_array((n, 0), dtype=np.float64)
        self._new: list[int] = []

    def read(self, positions: Sequence[int]) -> torch.Tensor:
        self._settle()
        if not self.count:
            return self.start.repeat(len(positions), 1)
        chosen = self.coefficients[list(positions)].toarray()
        needed = np.flatnonzero(chosen.any(axis=0))
        weights = torch.from_numpy(chosen[:, needed]).to(self.changes)
        used = self.changes[: self.count] if len(needed) == self.count else self.changes[torch.from_numpy(needed)]
        return torch.addmm(self.start, weights, used)

    def write(self, position: int, before: Vector, after: Vector) -> None:
        if self.count == len(self.changes):
            self.changes = torch.cat([self.changes, torch.empty_like(self.changes[:1]).expand(self.count + 1, -1)])
        torch.sub(after, before, out=self.changes[self.count])
        self.count += 1
        self._new.append(position)

    def mix(self, mixer: Mixer) -> None:
        self._settle()
        if mixer.weights is None:
            self.average(mixer)
        elif len(mixer.positions) == self.n:
            self.coefficients = sparse.csr_array(mixer.weights @ self.coefficients)
        else:
            self._over_survivors(mixer, mixer.weights @ self.coefficients[mixer.positions])

    def average(self, mixer: Mixer) -> None:
        self._settle()
        common = self.coefficients[mixer.positions].sum(axis=0) / len(mixer.positions)
        self._over_survivors(mixer, np.tile(common, (len(mixer.positions), 1)))

    def _over_survivors(self, mixer: Mixer, mixed: Any) -> None:
        place = sparse.csr_array(
            (np.ones(len(mixer.positions)), (mixer.positions, np.arange(len(mixer.positions)))),
            shape=(self.n, len(mixer.positions)),
        )
        self.coefficients = sparse.csr_array(place @ sparse.csr_array(mixed))

    def _settle(self) -> None:
        """A column for each change made since the last look, all of it still at the client that made it."""
        if self._new:
            columns = sparse.csr_array(
                (np.ones(len(self._new)), (self._new, np.arange(len(self._new)))), shape=(self.n, len(self._new))
            )
            self.coefficients = sparse.csr_array(sparse.hstack([self.coefficients, columns]))
            self._new = []


def lazy_pays(n: int, active: Sequence[int], mixes: int) -> bool:
    """The cost rule, in passes over one row, a product of matrices costing a sixteenth of a pass an entry.

    Dense rows: each mixing reads and writes all n rows. Lazy rows: each step combines all changes so far for those who
    compute.

    >>> lazy_pays(100, [5] * 24, 24), lazy_pays(8, [8] * 48, 48)
    (True, False)
    """
    dense = mixes * (3 * n + n * n / 16)
    lazy, changes = 0.0, 0
    for count in active:
        lazy += changes * (1 + count / 16)
        changes += count
    return lazy < dense
