"""Clients' rounds one after the other in one native call: batches drawn, steps taken, the change and whether it is
finite. All that stays the same from client to client is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_int64
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hansa.core import native
from hansa.core.errors import HansaError
from hansa.core.native import abi
from hansa.core.native.network import SLICE, Stack, Workspace, check_code


class Settings(NamedTuple):
    """A local step: y <- y - lr d, with d = g + weight_decay y + a (y - x) + s, through momentum, g clipped first."""

    lr: float
    prox_weight: float = 0.0
    shift: Tensor | None = None
    weight_decay: float = 0.0
    momentum: float = 0.0
    max_grad_norm: float | None = None
    velocity: Tensor | None = None


_ADDRESS, _WHOLE = np.uint64, np.int64
CLIENT = np.dtype(
    [
        *((name, _ADDRESS) for name in ("x", "y", "change", "own")),
        *((name, _WHOLE) for name in ("samples", "steps", "batch")),
        ("key", np.uint64, 2),
        ("losses", _ADDRESS),
        *((name, _WHOLE) for name in ("done", "finite", "keep")),
    ]
)
"""`abi.Client` as rows of a table."""


class Errand(NamedTuple):
    """What a client is to do: steps on batches of its own rows, which are those of the index from first to stop, drawn
    by the key; ``change`` becomes how far it came."""

    change: Tensor
    first: int
    stop: int
    steps: int
    batch: int
    key: bytes


class Solo:
    """A stack on one set of examples, for one thread. ``stop`` ends a call that is under way within a moment."""

    def __init__(self, stack: Stack, inputs: Tensor, labels: Tensor) -> None:
        self.stack, self.stop = stack, False
        self.use(inputs, labels)
        self.update = abi.Update()
        self._space: Workspace | None = None

    def use(self, inputs: Tensor, labels: Tensor) -> None:
        """Go on with other examples of the same shape."""
        self.data, self._labels, self._rows = self.stack.examples(inputs, labels, None), labels, len(inputs)

    def run(
        self, x: Tensor, y: Tensor, change: Tensor, own: Tensor, steps: int, batch: int, key: bytes, settings: Settings
    ) -> tuple[list[float], bool]:
        """The steps from ``x`` on shuffled batches of the rows ``own``, in ``y``; ``change`` becomes y - x. Gives the
        loss of each step and whether all of the change is finite."""
        return self.runs(x, y, own, [Errand(change, 0, own.numel(), steps, batch, key)], settings, keep=True)[0]

    def runs(
        self,
        x: Tensor,
        y: Tensor,
        index: Tensor,
        errands: Sequence[Errand],
        settings: Settings,
        *,
        keep: bool = False,
    ) -> list[tuple[list[float], bool]]:
        """The same for one client after the other, all of them from ``x``; unless it is to be kept, what the last one
        leaves in ``y`` is not its model, since the last step goes to the change at once."""
        self.stack.expect("x", x)
        self.stack.expect("y", y)
        if index.dtype != torch.int64 or not index.is_contiguous() or index.device.type != "cpu" or not index.numel():
            raise HansaError(
                f"Solo.run: own is {index.dtype} {list(index.shape)}: expected contiguous int64 row numbers."
            )
        if self.stack.keeps:
            raise HansaError("Solo.run: the stack drops out, and one call draws nothing: take steps() with keep=.")
        _need_velocity(settings)
        update = abi.Update()
        self._fill(update, settings, x)
        table, losses, ends = self._table(x, y, index, errands)
        table["keep"] = keep
        self._go(table, update, index, errands)
        found, starts, finite = losses.tolist(), [0, *ends[:-1]], table["finite"].tolist()
        return [(found[a:b], fine != 0) for a, b, fine in zip(starts, ends, finite, strict=True)]

    def _table(
        self, x: Tensor, y: Tensor, index: Tensor, errands: Sequence[Errand]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], list[int]]:
        """The errands as native code reads them, where the losses will be, and where those of each end."""
        table = np.zeros(len(errands), CLIENT)
        for errand in errands:
            self.stack.expect("change", errand.change)
        table["x"], table["y"] = x.data_ptr(), y.data_ptr()
        table["change"] = [errand.change.data_ptr() for errand in errands]
        first = np.array([errand.first for errand in errands])
        table["samples"] = np.array([errand.stop for errand in errands]) - first
        if first.min() < 0 or table["samples"].min() < 1 or int((first + table["samples"]).max()) > index.numel():
            raise HansaError(f"Solo.run: clients' rows lie outside of the {index.numel()} that there are.")
        table["own"] = index.data_ptr() + 8 * first
        table["steps"], table["batch"] = zip(*((errand.steps, errand.batch) for errand in errands), strict=True)
        table["key"] = np.frombuffer(b"".join(errand.key for errand in errands), "<u8").reshape(-1, 2)
        ends = table["steps"].cumsum()
        losses = np.empty(int(ends[-1]), np.float32)
        table["losses"] = losses.ctypes.data + 4 * (ends - table["steps"])
        return table, losses, ends.tolist()

    def _go(self, table: np.ndarray[Any, Any], update: abi.Update, index: Tensor, errands: Sequence[Errand]) -> None:
        space, at, count = self.space(int(table["batch"].max())), c_int64(), len(table)
        while at.value < count:
            code = space.kernels.clients(space.handle, self.data, update, table.ctypes.data, count, at, SLICE)
            if code:
                own = index[errands[at.value].first : errands[at.value].stop]
                check_code(code, "Solo.run", self.stack, own[None], None, self._labels, self._rows)
            if self.stop:
                raise HansaError("Solo.run: stopped.")

    def steps(
        self, y: Tensor, index: Tensor, settings: Settings, anchor: Tensor | None, keep: Tensor | None = None
    ) -> Tensor:
        """A step in place on each row of ``index`` [steps, batch]; gives the loss of each. ``keep`` is what dropout
        multiplies by, as `Stack.train` has it."""
        self.stack.expect("y", y)
        batches = self.stack.batches(index, None, "train", keep)
        _need_velocity(settings)
        self.settle(settings, anchor)
        space = self.space(batches.batch)
        losses, done = torch.empty(batches.steps), c_int64()
        call, handle = space.kernels.train, space.handle
        while done.value < batches.steps:
            code = call(handle, y.data_ptr(), self.data, batches, self.update, losses.data_ptr(), done, SLICE)
            check_code(code, "Solo.steps", self.stack, index, None, self._labels, self._rows)
            if self.stop:
                raise HansaError("Solo.steps: stopped.")
        return losses

    def space(self, batch: int) -> Workspace:
        """A workspace for batches of this size, kept."""
        if self._space is None or self._space.batch < batch:
            self._space = Workspace(self.stack, batch)
        return self._space

    def settle(self, settings: Settings, x: Tensor | None) -> None:
        """Make the settings those of the calls to come."""
        self._fill(self.update, settings, x)

    def _fill(self, update: abi.Update, settings: Settings, x: Tensor | None) -> None:
        s, velocity = settings.shift, settings.velocity
        for name, vector in (("s", s), ("velocity", velocity)):
            if vector is not None:
                self.stack.expect(name, vector)
        update.momentum = velocity.data_ptr() if velocity is not None else None
        if settings.prox_weight and x is None:
            raise HansaError("Solo: a pull needs the anchor that it pulls to.")
        update.anchor = x.data_ptr() if settings.prox_weight and x is not None else None
        update.shift = None if s is None else s.data_ptr()
        update.lr, update.pull = settings.lr, settings.prox_weight
        update.decay, update.mu = settings.weight_decay, settings.momentum
        update.clip = math.inf if settings.max_grad_norm is None else settings.max_grad_norm


def _need_velocity(settings: Settings) -> None:
    if settings.momentum and settings.velocity is None:
        raise HansaError("Solo.run: momentum needs a velocity to keep it in.")


def draws(
    key: bytes, samples: int, length: int, isa: str = "", own: Tensor | None = None
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """``length`` positions: permutations of 0..samples-1 one after the other, as NumPy's Philox with this key shuffles;
    or the entries of ``own``, int64 and as many as there are samples, at these positions.

    >>> sorted(draws(bytes(16), 3, 6)[:3].tolist())
    [0, 1, 2]
    """
    if own is not None and (own.dtype != torch.int64 or own.shape != (samples,) or own.device.type != "cpu"):
        raise HansaError(f"draws: own is {own.dtype} {list(own.shape)}, expected {samples} int64 on the CPU.")
    own = None if own is None else own.contiguous()
    words, order, out = np.frombuffer(key, "<u8").copy(), np.empty(samples, np.int64), np.empty(length, np.int64)
    address = None if own is None else own.data_ptr()
    native.load(isa).draw(words.ctypes.data, address, samples, length, order.ctypes.data, out.ctypes.data)
    return out


@cache
def shuffles_like_numpy() -> bool:
    """Whether this NumPy shuffles as the native code does, which follows NumPy 1.17 to 2.x."""
    key = bytes(range(16))
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key, "<u8")))
    wanted = np.concatenate([generator.permutation(1000) for _ in range(3)])
    return bool(np.array_equal(wanted, draws(key, 1000, 3000)))
