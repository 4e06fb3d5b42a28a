"""Native training of several clients in one call: draw batches, take steps, check the deltas."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


class NativeJob(NamedTuple):
    """One client's steps on batches drawn with the key from its rows, ``first`` to ``stop`` of the index. ``delta``
    receives y - x; ``y`` receives the model if ``keep_model``."""

    delta: Tensor
    first: int
    stop: int
    steps: int
    batch: int
    key: bytes
    keep_model: bool = False


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

    def train_clients(
        self, starts: Sequence[Tensor], y: Tensor, index: Tensor, jobs: Sequence[NativeJob], step: AffineStep
    ) -> list[tuple[list[float], bool]]:
        """Train clients one after the other in the vector ``y``, each from its own entry of ``starts``; the first is
        the anchor of the step. Return each client's losses and whether its delta is finite."""
        for each in {id(start): start for start in starts}.values():
            self.network.check_vector("x", each)
        for job in jobs:
            self.network.check_vector("delta", job.delta)
        table = np.zeros(len(jobs), CLIENT)
        table["x"] = [start.data_ptr() for start in starts]
        table["delta"] = [job.delta.data_ptr() for job in jobs]
        table["keep_model"] = [job.keep_model for job in jobs]
        spans = np.array([(job.first, job.stop) for job in jobs])
        works = np.array([(job.steps, job.batch) for job in jobs])
        losses, ends = self._train_table(table, y, index, spans, works, [job.key for job in jobs], step, starts[0])
        numbers, stops = losses.tolist(), ends.tolist()
        pieces = zip([0, *stops[:-1]], stops, table["finite"].tolist(), strict=True)
        return [(numbers[first:stop], fine != 0) for first, stop, fine in pieces]

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
        """Train clients from one model ``x``, each into a row of ``changes``. Return the mean loss of each, or None if
        a change is not finite.

        ``spans`` and ``works`` have a row per client: first and stop in the index, steps and batch size.
        """
        self.network.check_vector("x", x)
        for row in (changes[0], changes[-1]):
            self.network.check_vector("delta", row)
        if changes.shape != (len(keys), x.numel()) or not changes.is_contiguous():
            raise HansaError(
                f"ClientKernel: changes are {list(changes.shape)}, expected contiguous [{len(keys)}, {x.numel()}]."
            )
        table = np.zeros(len(keys), CLIENT)
        table["x"] = x.data_ptr()
        table["delta"] = changes.data_ptr() + changes.stride(0) * changes.element_size() * np.arange(len(keys))
        losses, ends = self._train_table(table, y, index, spans, works, keys, step, x)
        if not table["finite"].all():
            return None
        return mean_losses(losses, ends)

    def _train_table(
        self,
        table: np.ndarray[Any, Any],
        y: Tensor,
        index: Tensor,
        spans: np.ndarray[Any, Any],
        works: np.ndarray[Any, Any],
        keys: Sequence[bytes],
        step: AffineStep,
        anchor: Tensor,
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Complete the table of jobs, which has starts and deltas, and train. Return the losses of all steps, and the
        end of each client's."""
        self.network.check_vector("y", y)
        if index.dtype != torch.int64 or not index.is_contiguous() or index.device.type != "cpu" or not index.numel():
            raise HansaError(
                f"ClientKernel: index is {index.dtype} {list(index.shape)}: expected contiguous int64 row numbers."
            )
        if self.network.dropout_numbers:
            raise HansaError(
                "ClientKernel.train_clients: the network has dropout, which it does not draw. Use steps() with keep=."
            )
        update = abi.StepParameters()
        self._fill(update, step, anchor)
        losses, ends = self._fill_table(table, y, index, spans, works, keys)
        workspace, at = self.workspace(int(table["batch"].max())), c_int64()
        while at.value < len(table):
            code = workspace.kernels.train_clients(
                workspace.handle, byref(self.data), byref(update), table.ctypes.data, len(table), byref(at), SLICE
            )
            if code:
                own = index[slice(*spans[at.value])]
                check_code(code, "ClientKernel.train_clients", self.network, self.data, own[None])
            if self.stop:
                raise HansaError("ClientKernel.train_clients: stopped.")
        return losses, ends

    def _fill_table(
        self,
        table: np.ndarray[Any, Any],
        y: Tensor,
        index: Tensor,
        spans: np.ndarray[Any, Any],
        works: np.ndarray[Any, Any],
        keys: Sequence[bytes],
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Add rows, work and keys to the table of jobs; return the losses of all, and the end of each client's."""
        table["y"] = y.data_ptr()
        first = spans[:, 0]
        table["samples"] = spans[:, 1] - first
        if first.min() < 0 or table["samples"].min() < 1 or int((first + table["samples"]).max()) > index.numel():
            raise HansaError(
                f"ClientKernel.train_clients: clients' rows lie outside of the {index.numel()} that there are."
            )
        table["own"] = index.data_ptr() + 8 * first
        table["steps"], table["batch"] = works[:, 0], works[:, 1]
        table["key"] = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)
        ends = table["steps"].cumsum()
        losses = np.empty(int(ends[-1]), np.float32)
        table["losses"] = losses.ctypes.data + 4 * (ends - table["steps"])
        return losses, ends

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
