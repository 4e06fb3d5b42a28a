"""A cohort most of whose clients are idle, natively: the changes made so far, and models only for those who step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hansa.core import native
from hansa.core.errors import HansaError
from hansa.core.native import abi
from hansa.core.native.client_kernel import Settings, Solo
from hansa.core.native.cohort_kernel import TURN
from hansa.core.native.network import SLICE

Array = np.ndarray[Any, Any]
GROUP = 16  # models that are made together, at most


class Terms(NamedTuple):
    """Sums of changes, one after the other: ``weights`` times the changes at ``places``, from starts[i] to starts[i+1].

    >>> Terms.of([np.array([[0.5, 0.0], [0.0, 0.25]])]).places.tolist()
    [0, 1]
    """

    starts: Array
    places: Array
    weights: Array

    @classmethod
    def of(cls, coefficients: list[Array]) -> Terms:
        """Of matrices [sums, changes], zeros left out; a matrix may have fewer changes than the next."""
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


class Trail:
    """Changes [room, d] that steps add to, each from a model start + a sum of the changes before it, for one thread."""

    def __init__(self, solo: Solo, start: Tensor, settings: Settings, anchor: Tensor) -> None:
        if solo.stack.keeps:
            raise HansaError("Trail: the stack drops out, and turns draw nothing: step row by row.")
        solo.stack.expect("start", start)
        self._solo, self._settings, self._start, self._anchor = solo, settings, start, anchor
        self._models = start.new_empty(0)
        self.lost: int | None = None
        """The row whose last step left the numbers, where one did: the call ended there."""

    def run(
        self, changes: Tensor, made: int, turns: Array, terms: Terms, velocities: Mapping[int, Tensor] | None = None
    ) -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
        """Groups of turns (`hansa.core.native.cohort_kernel.TURN`): one with the row GATHER and how many follow, at most GROUP,
        and those; ``terms`` are each turn's. ``made`` changes are there. Gives the loss of each turn, and how many were
        made: up to a step that left the numbers, whose change is then not kept."""
        solo, dim = self._solo, self._solo.stack.dim
        gathers = turns["row"] == abi.GATHER
        most = int(turns["batch"][gathers].max(initial=0))
        fits = turns.dtype == TURN and len(terms.starts) == len(turns) + 1 and bool(gathers[:1].all())
        if not fits or most > GROUP or (len(terms.places) and terms.places.max() >= made + int((~gathers).sum())):
            raise HansaError(f"Trail.run: terms or groups that are not those of {len(turns)} turns.")
        if changes.ndim != 2 or changes.shape[1] != dim or not changes.is_contiguous():
            raise HansaError(f"Trail.run: changes are {list(changes.shape)}, expected contiguous [room, {dim}].")
        if self._models.numel() < most * dim:
            self._models = self._start.new_empty(most * dim)
        velocities = velocities or {}
        held = [
            velocities[row].data_ptr() if row in velocities else 0 for row in range(max(velocities, default=-1) + 1)
        ]
        pointers, losses = np.array(held, np.uint64), np.zeros(len(turns), np.float32)
        space = solo.space(int(turns["batch"][~gathers].max(initial=1)))
        solo.settle(self._settings, self._anchor)
        arrays = (terms.starts.astype(np.int64), terms.places.astype(np.int64), terms.weights.astype(np.float32))
        trail = abi.Trail(
            self._start.data_ptr(), self._models.data_ptr(), changes.data_ptr(), len(changes), made, turns.ctypes.data,
            *(array.ctypes.data for array in arrays), len(turns), 0, -1, losses.ctypes.data,
            pointers.ctypes.data if velocities else None, SLICE,
        )  # fmt: skip
        while trail.done < trail.count and trail.lost < 0:
            code = space.kernels.trail(space.handle, solo.data, solo.update, trail)
            if code:
                raise HansaError(f"Trail.run: {abi.REFUSALS[code]}.")
            if solo.stop:
                raise HansaError("Trail.run: stopped.")
        self.lost = None if trail.lost < 0 else int(trail.lost)
        return losses, int(trail.done)


def carried(start: Tensor, changes: Tensor, coefficients: Array, isa: str = "") -> Tensor:
    """start + coefficients changes, [rows, d], zeros left out.

    >>> carried(torch.ones(2), torch.tensor([[1.0, 2.0], [9.0, 9.0]]), np.array([[0.5, 0.0]])).tolist()
    [[1.5, 2.0]]
    """
    fine = changes.ndim == 2 and changes.shape[1] == start.numel() and coefficients.shape[1] <= len(changes)
    if not fine or any(t.dtype != torch.float32 or not t.is_contiguous() or t.is_cuda for t in (start, changes)):
        raise HansaError(f"carried: {list(coefficients.shape)} times {list(changes.shape)}, expected float32.")
    terms, out = Terms.of([coefficients]), start.new_empty(len(coefficients), start.numel())
    native.load(isa).carried(
        start.data_ptr(), changes.data_ptr(), terms.starts.ctypes.data, terms.places.ctypes.data,
        terms.weights.ctypes.data, len(coefficients), start.numel(), out.data_ptr(),
    )  # fmt: skip
    return out


def gram(rows: Tensor, dim: int, isa: str = "") -> Array:
    """The products of all pairs of rows over their first ``dim`` entries.

    >>> gram(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), 2).tolist()
    [[5.0, 3.0], [3.0, 9.0]]
    """
    if rows.ndim != 2 or rows.dtype != torch.float32 or not rows.is_contiguous() or not 0 <= dim <= rows.shape[1]:
        raise HansaError(f"gram: {dim} entries of {rows.dtype} {list(rows.shape)}, expected contiguous float32 rows.")
    out = np.empty((len(rows), len(rows)))
    native.load(isa).gram(rows.data_ptr(), len(rows), dim, rows.shape[1], out.ctypes.data)
    return out
