"""A cohort's steps and gossip natively: many turns in one call, each client's model in its own row, nothing copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hansa.core import native
from hansa.core.errors import HansaError
from hansa.core.native import abi
from hansa.core.native.client_kernel import Settings, Solo
from hansa.core.native.network import SLICE

TURN = np.dtype([("row", np.int64), ("batch", np.int64), ("index", np.uint64)])
"""A turn: the step of a row on ``batch`` examples whose numbers lie at the address ``index``; or, with a row below 0,
something that all rows do (`hansa.core.native.abi`: MIX, AVERAGE, SETTLE, PULL, SIGNS)."""


class Links(NamedTuple):
    """W over ``rows`` rows by its links, looked at once: as native code reads them, and where that is."""

    rows: int
    arrays: tuple[np.ndarray[Any, Any], ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, rows: int, starts: Any, links: Any, weights: Any) -> Links:
        count = len(links)
        fits = starts.shape == (rows + 1,) and starts[0] == 0 and starts[-1] == count == len(weights)
        if not fits or np.any(np.diff(starts) < 0) or (count and not 0 <= links.min() <= links.max() < rows):
            raise HansaError(f"Together.weigh: links that are not those of {rows} rows.")
        arrays = (starts.astype(np.int64), links.astype(np.int64), weights.astype(np.float64))
        return cls(rows, arrays, tuple(array.ctypes.data for array in arrays))


class Together:
    """The rows [n, d] of a cohort, changed in place, for one thread.

    ``later`` says that steps are made apart, and moved into the rows by the next turn of all (combine-then-adapt). With
    ``start`` all rows, and their public copies, become that once they are needed: anything may be in them until a run.
    """

    def __init__(
        self,
        solo: Solo,
        rows: Tensor,
        settings: Settings,
        anchor: Tensor,
        *,
        later: bool = False,
        start: Tensor | None = None,
    ) -> None:
        stack = solo.stack
        if stack.keeps:
            raise HansaError("Together: the stack drops out, and turns draw nothing: step row by row.")
        if rows.ndim != 2 or not rows.is_contiguous():
            raise HansaError(f"Together: rows are {list(rows.shape)}, expected contiguous [clients, {stack.dim}].")
        stack.expect("a row", rows[0])
        self._solo, self._settings, self._anchor = solo, settings, anchor
        n, bits = len(rows), -(-stack.dim // 512) * 64
        self._cohort = abi.Cohort(rows=n, seconds=SLICE, rate=1.0)
        self._scratch = torch.empty(n * abi.CUT + n + n * bits // 4)
        self._cohort.scratch = self._scratch.data_ptr()
        self._later = torch.empty_like(rows) if later else None
        self._stepped = np.zeros(n, np.int64)
        self._cohort.stepped = self._stepped.ctypes.data
        self._reach = np.empty(n)
        self._cohort.reach = self._reach.ctypes.data
        if self._later is not None:
            self._cohort.later = self._later.data_ptr()
        self._kept: dict[str, Any] = {}
        if start is not None:
            stack.expect("start", start)
            begun = np.zeros(n, np.int64)
            self._kept["start"] = (start, begun)
            self._cohort.start, self._cohort.begun = start.data_ptr(), begun.ctypes.data
        self.rows = rows
        self.lost: int | None = None
        """The row whose last step left the numbers, where one did: the call ended there."""

    def weigh(self, starts: Any, links: Any, weights: Any) -> None:
        """W by its links; a row without any is left alone."""
        self.link(Links.of(len(self.rows), starts, links, weights))

    def link(self, links: Links) -> None:
        """The same, looked at before."""
        if links.rows != len(self.rows):
            raise HansaError(f"Together.link: links of {links.rows} rows for {len(self.rows)}.")
        self._kept["links"] = links
        self._cohort.starts, self._cohort.links, self._cohort.weights = links.places

    def publish(self, copies: Tensor, rate: float) -> None:
        """The public copies of compressed gossip, X <- X + rate (W - I) copies."""
        if copies.shape != self.rows.shape or not copies.is_contiguous() or copies.dtype != torch.float32:
            raise HansaError(f"Together.publish: copies are {list(copies.shape)}, expected {list(self.rows.shape)}.")
        self._kept["open"] = copies
        self._cohort.open, self._cohort.rate = copies.data_ptr(), rate

    def remember(self, velocities: Mapping[int, Tensor]) -> None:
        """The velocity of each row that steps, under momentum; they are changed in place."""
        for vector in velocities.values():
            self._solo.stack.expect("velocity", vector)
        held = [velocities[row].data_ptr() if row in velocities else 0 for row in range(len(self.rows))]
        pointers = np.array(held, np.uint64)
        self._kept["momenta"] = (pointers, dict(velocities))
        self._cohort.momenta = pointers.ctypes.data if velocities else None

    def run(self, turns: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
        """The turns one after the other, up to a step that left the numbers: the loss of each, and how many were made;
        `lost` then says whose step that was."""
        solo, cohort = self._solo, self._cohort
        if turns.dtype != TURN or (cohort.starts is None and np.any(turns["row"] < 0)):
            raise HansaError("Together.run: turns of all rows need the links of weigh().")
        space = solo.space(int(turns["batch"].max(initial=1)))
        solo.settle(self._settings, self._anchor)
        losses = np.zeros(len(turns), np.float32)
        self._reach.fill(-1)
        if self._later is None:
            self._stepped.fill(0)
        cohort.x, cohort.turns, cohort.losses = self.rows.data_ptr(), turns.ctypes.data, losses.ctypes.data
        cohort.count, cohort.done, cohort.lost = len(turns), 0, -1
        while True:
            code = space.kernels.cohort(space.handle, solo.data, solo.update, cohort)
            if code == abi.BAD_SUM:
                raise HansaError(
                    f"sign.encode: cannot send the difference of row {cohort.lost} to its public copy: it overflows. "
                    "The sender diverged; lower its learning rate."
                )
            if code:
                raise HansaError(f"Together.run: {abi.REFUSALS[code]}.")
            if solo.stop:
                raise HansaError("Together.run: stopped.")
            if cohort.done >= cohort.count or cohort.lost >= 0:
                break
        self.lost = None if cohort.lost < 0 else int(cohort.lost)
        return losses, int(cohort.done)


def spread(
    rows: Tensor,
    chosen: Sequence[int],
    dim: int,
    isa: str = "",
    *,
    start: Tensor | None = None,
    moved: Mapping[int, Tensor] | None = None,
) -> float:
    """sum_i ||x_i - mean||^2 over the first ``dim`` entries of the chosen rows: of up to 16 rows to about seven digits,
    in float64 throughout of more. ``moved`` has vectors that become x_i - start in the same pass, by row.

    >>> spread(torch.tensor([[1.0, 0.0], [3.0, 0.0], [9.0, 9.0]]), [0, 1], 2)
    2.0
    """
    if rows.ndim != 2 or rows.dtype != torch.float32 or not rows.is_contiguous() or rows.device.type != "cpu":
        raise HansaError(f"spread: rows are {rows.dtype} {list(rows.shape)}, expected contiguous float32 [n, d].")
    places, moved = np.array(chosen, np.int64), moved or {}
    if not len(places) or places.min() < 0 or places.max() >= len(rows) or not 0 <= dim <= rows.shape[1]:
        raise HansaError(f"spread: {len(places)} rows and {dim} entries of {list(rows.shape)}.")
    vectors = [] if start is None else [start, *moved.values()]
    fine = all(x.dtype == rows.dtype and x.shape == rows.shape[1:] and x.is_contiguous() for x in vectors)
    if not fine or not set(moved) <= set(chosen) or (moved and start is None):
        raise HansaError(f"spread: rows {sorted(moved)} move from a start, each into a vector of {rows.shape[1]}.")
    held = np.array([moved[row].data_ptr() if row in moved else 0 for row in chosen], np.uint64)
    given = (start.data_ptr(), held.ctypes.data) if start is not None and moved else (None, None)
    call = native.load(isa).spread
    return float(call(rows.data_ptr(), places.ctypes.data, len(places), dim, rows.shape[1], *given))
