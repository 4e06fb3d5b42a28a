"""One client's round after another, each in one native call: batches drawn, steps taken, the change and whether it is
finite. All that stays the same from client to client is kept."""

from __future__ import annotations

import math
from ctypes import c_int64
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hansa import native
from hansa.errors import HansaError
from hansa.native import abi
from hansa.native.stack import SLICE, Stack, Workspace, check_code


class Settings(NamedTuple):
    """A local step: y <- y - lr d, with d = g + weight_decay y + a (y - x) + s, through momentum, g clipped first."""

    lr: float
    a: float = 0.0
    s: Tensor | None = None
    weight_decay: float = 0.0
    momentum: float = 0.0
    clip: float | None = None
    velocity: Tensor | None = None


class Ready(NamedTuple):
    """A client's round that is about to begin."""

    client: abi.Client
    update: abi.Update
    losses: np.ndarray[tuple[int], np.dtype[np.float32]]


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
        return self.go(self.ready(x, y, change, own, steps, batch, key, settings))

    def ready(
        self, x: Tensor, y: Tensor, change: Tensor, own: Tensor, steps: int, batch: int, key: bytes, settings: Settings
    ) -> Ready:
        """All that `go` needs for a `run`, checked, so that many can be gone through with little in between."""
        for name, vector in (("x", x), ("y", y), ("change", change)):
            self.stack.expect(name, vector)
        if own.dtype != torch.int64 or not own.is_contiguous() or own.device.type != "cpu" or not own.numel():
            raise HansaError(f"Solo.run: own is {own.dtype} {list(own.shape)}: expected contiguous int64 row numbers.")
        if self.stack.keeps:
            raise HansaError("Solo.run: the stack drops out, and one call draws nothing: take steps() with keep=.")
        _need_velocity(settings)
        update, losses = abi.Update(), np.empty(steps, np.float32)
        self._fill(update, settings, x)
        client = abi.Client(
            x=x.data_ptr(), y=y.data_ptr(), change=change.data_ptr(), own=own.data_ptr(), samples=own.numel(),
            steps=steps, batch=batch, losses=losses.ctypes.data, seconds=SLICE,
        )  # fmt: skip
        client.key[0], client.key[1] = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:16], "little")
        client.kept = (x, y, change, own, settings)
        return Ready(client, update, losses)

    def go(self, ready: Ready) -> tuple[list[float], bool]:
        """The steps that were made ready."""
        client, update, losses = ready
        space = self.space(client.batch)
        while client.done < client.steps:
            code = space.kernels.client(space.handle, self.data, update, client)
            if code:
                own = client.kept[3]
                check_code(code, "Solo.run", self.stack, own[None], None, self._labels, self._rows)
            if self.stop:
                raise HansaError("Solo.run: stopped.")
        return losses.tolist(), bool(client.finite)

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
        s, velocity = settings.s, settings.velocity
        for name, vector in (("s", s), ("velocity", velocity)):
            if vector is not None:
                self.stack.expect(name, vector)
        update.momentum = velocity.data_ptr() if velocity is not None else None
        if settings.a and x is None:
            raise HansaError("Solo: a pull needs the anchor that it pulls to.")
        update.anchor = x.data_ptr() if settings.a and x is not None else None
        update.shift = None if s is None else s.data_ptr()
        update.lr, update.pull = settings.lr, settings.a
        update.decay, update.mu = settings.weight_decay, settings.momentum
        update.clip = math.inf if settings.clip is None else settings.clip


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
