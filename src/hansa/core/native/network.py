"""Small stacks trained natively: convolutions, ReLU, pools, dropout, linear layers and mean cross-entropy, in float32.

One call runs a client's whole local phase with the interpreter lock released. The flat vector is Hansa's own layout:
parameters in module order, convolution weights channels-last. Results agree with eager PyTorch to float rounding and
repeat to the bit on one instruction set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_float, c_int64
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hansa.core import native
from hansa.core.errors import HansaError, check_positive, invalid_argument
from hansa.core.native import abi
from hansa.core.native.eligibility import Unfit
from hansa.core.native.stages import Stage
from hansa.core.native.tracing import stages_of

_EVALUATION_BATCH = 64
SLICE = 0.1  # seconds that a call lasts at most, plus one step, so that Ctrl-C is heard in between


def compile_stack(module: nn.Module, input_shape: Sequence[int], isa: str = "") -> Stack | None:
    """The native form of a module on inputs of the given shape, (C, H, W) or (features,); None where there is none.

    A stack is any module whose ``forward()`` amounts to square convolutions (stride 1 to 4), ReLU, pools by maximum or
    mean without a border, dropout, flattening and linear layers, ending in a linear one. Nothing else is, nor one with
    a frozen, shared or hooked layer.

    >>> compile_stack(nn.Sequential(nn.Linear(4, 2), nn.Tanh()), (4,)) is None
    True
    """
    if not native.available():
        return None
    try:
        return Stack(stages_of(module, input_shape), tuple(input_shape), isa)
    except Unfit:
        return None


@dataclass(frozen=True, slots=True)
class Stack:
    """A recognised stack. It may be shared by threads and sent to processes: each call takes a workspace of its own."""

    stages: tuple[Stage, ...]
    input_shape: tuple[int, ...]
    isa: str = ""
    _idle: list[Workspace] = field(default_factory=list, init=False, repr=False, compare=False)

    dim: int = field(init=False, repr=False, compare=False)
    """The length of the flat parameter vector."""

    keeps: int = field(init=False, repr=False, compare=False)
    """How many numbers dropout draws for a row; 0 where nothing drops out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", sum(stage.dim for stage in self.stages))
        object.__setattr__(self, "keeps", sum(stage.keeps for stage in self.stages))

    @property
    def classes(self) -> int:
        return self.stages[-1].out

    def train(
        self,
        y: Tensor,
        inputs: Tensor,
        labels: Tensor,
        index: Tensor,
        *,
        lr: float,
        a: float = 0.0,
        anchor: Tensor | None = None,
        s: Tensor | None = None,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        velocity: Tensor | None = None,
        clip: float | None = None,
        sizes: Tensor | None = None,
        table: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> Tensor:
        """y <- y - lr d in place for each row of ``index``, with d = g + weight_decay y + a (y - anchor) + s; under
        local momentum d <- momentum d + that sum. The raw gradient is clipped first. Returns the loss of each step.

        ``velocity`` is updated in place; without it momentum starts from zero. ``sizes`` gives each step's own batch
        size, the rest of its row being ignored. uint8 inputs need ``table`` [C, 256], the value of each byte. A stack
        that drops out needs ``keep`` [steps, batch keeps], of which each row is what `draw` fills.
        """
        data = self.examples(inputs, labels, table)
        self.expect("y", y)
        batches = self.batches(index, sizes, "train", keep)
        if a and anchor is None:
            raise invalid_argument(
                "Stack.train", "a", a, "an anchor with it", "Pass anchor=, the model that was received."
            )
        if clip is not None:
            check_positive("Stack.train", "clip", clip)
        if momentum and velocity is None:
            velocity = torch.zeros_like(y)
        for name, vector in (("anchor", anchor if a else None), ("s", s), ("velocity", velocity)):
            if vector is not None:
                self.expect(name, vector)
                if vector.data_ptr() == y.data_ptr():
                    raise HansaError(f"Stack.train: {name} is y itself, which changes at every step. Pass a copy.")
        update = abi.Update(
            velocity.data_ptr() if momentum and velocity is not None else None,
            anchor.data_ptr() if a and anchor is not None else None,
            s.data_ptr() if s is not None else None,
            lr,
            a,
            weight_decay,
            momentum,
            math.inf if clip is None else clip,
        )
        losses = torch.empty(len(index), dtype=torch.float32)
        done = c_int64()
        with self._workspace(batches.batch) as (kernels, handle):
            while done.value < len(index):
                code = kernels.train(handle, y.data_ptr(), data, batches, update, losses.data_ptr(), done, SLICE)
                check_code(code, "Stack.train", self, index, sizes, labels, len(inputs))
        return losses

    def gradient(
        self,
        y: Tensor,
        inputs: Tensor,
        labels: Tensor,
        rows: Tensor,
        *,
        out: Tensor | None = None,
        table: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> tuple[float, Tensor]:
        """The mean loss over the given rows at y, and its gradient (in ``out`` if given); ``keep`` is what `draw`
        fills."""
        data = self.examples(inputs, labels, table)
        self.expect("y", y)
        out = torch.empty_like(y) if out is None else out
        self.expect("out", out)
        batches = self.batches(rows[None], None, "gradient", None if keep is None else keep[None])
        loss = c_float()
        with self._workspace(batches.batch) as (kernels, handle):
            code = kernels.gradient(handle, y.data_ptr(), data, batches, out.data_ptr(), byref(loss))
        check_code(code, "Stack.gradient", self, rows[None], None, labels, len(inputs))
        return loss.value, out

    def evaluate(
        self,
        y: Tensor,
        inputs: Tensor,
        labels: Tensor,
        start: int = 0,
        stop: int | None = None,
        *,
        table: Tensor | None = None,
    ) -> tuple[float, int]:
        """The summed loss and the number of right answers over rows start..stop."""
        stop = len(inputs) if stop is None else stop
        if not 0 <= start <= stop <= len(inputs):
            raise invalid_argument(
                "Stack.evaluate", "start, stop", (start, stop), f"0 <= start <= stop <= {len(inputs)}"
            )
        data = self.examples(inputs, labels, table)
        self.expect("y", y)
        score = abi.Score()
        with self._workspace(_EVALUATION_BATCH) as (kernels, handle):
            code = kernels.evaluate(handle, y.data_ptr(), data, start, stop, byref(score))
        index = torch.arange(start, stop)[None]
        check_code(code, "Stack.evaluate", self, index, None, labels, len(inputs))
        return score.loss, score.correct

    def logits(self, y: Tensor, inputs: Tensor, rows: Tensor, *, table: Tensor | None = None) -> Tensor:
        """The outputs [rows, classes] for the given rows."""
        data = self.examples(inputs, None, table)
        self.expect("y", y)
        out = torch.empty(len(rows), self.classes)
        whole = len(rows) - len(rows) % _EVALUATION_BATCH
        with self._workspace(_EVALUATION_BATCH) as (kernels, handle):
            for piece, target in ((rows[:whole], out[:whole]), (rows[whole:], out[whole:])):
                if len(piece):
                    index = piece.view(-1, min(_EVALUATION_BATCH, len(piece)))
                    batches = batches_of(index, None, "logits")
                    code = kernels.logits(handle, y.data_ptr(), data, batches, target.data_ptr())
                    check_code(code, "Stack.logits", self, index, None, None, len(inputs))
        return out

    def draw(self, rows: int, generator: torch.Generator, out: Tensor) -> None:
        """What dropout multiplies a batch by, into ``out`` [rows keeps]: the numbers that eager torch would draw from a
        generator in this state, in the order of the layers."""
        pieces = torch.split(out, [rows * stage.keeps for stage in self.stages])
        for stage, piece in zip(self.stages, pieces, strict=True):
            if stage.drop is not None:
                stage.draw(rows, generator, piece)

    def batches(self, index: Tensor, sizes: Tensor | None, where: str, keep: Tensor | None) -> abi.Batches:
        """The C view of batches and of what dropout multiplies them by."""
        batches = batches_of(index, sizes, where)
        if keep is None and not self.keeps:
            return batches
        shape = (len(index), index.shape[1] * self.keeps)
        if keep is None or sizes is not None or keep.shape != shape or keep.dtype != torch.float32:
            given = "missing" if keep is None else _describe(keep)
            raise HansaError(
                f"Stack.{where}: the stack drops out: keep is {given}, expected float32 {list(shape)} and no sizes."
            )
        keep = keep.contiguous()
        batches.keep, batches.kept = keep.data_ptr(), (*batches.kept, keep)
        return batches

    def __reduce__(self) -> tuple[Any, ...]:
        return Stack, (self.stages, self.input_shape, self.isa)

    @contextmanager
    def _workspace(self, batch: int) -> Iterator[tuple[Any, int]]:
        """A workspace nobody else uses, for at least the given batch. Lists pop and append atomically."""
        try:
            space = self._idle.pop()
        except IndexError:
            space = None
        if space is None or space.batch < batch:
            space = Workspace(self, batch)
        try:
            yield space.kernels, space.handle
        finally:
            self._idle.append(space)

    def expect(self, name: str, vector: Tensor) -> None:
        """Refuse what is not a flat vector of this stack."""
        fits = vector.dtype == torch.float32 and vector.shape == (self.dim,) and vector.is_contiguous()
        if not fits or not vector.is_cpu:
            raise HansaError(
                f"Stack: {name} is {_describe(vector)}, expected a contiguous float32 vector of {self.dim} on the CPU."
            )

    def examples(self, inputs: Tensor, labels: Tensor | None, table: Tensor | None) -> abi.Data:
        """The C view of the examples, which keeps them alive."""
        if inputs.shape[1:] != self.input_shape or inputs.device.type != "cpu":
            wanted = _inside(self.input_shape)
            raise HansaError(f"Stack: inputs are {_describe(inputs)}, expected [n, {wanted}] on the CPU.")
        channels = self.stages[0].shape[0]
        if inputs.dtype == torch.uint8:
            if table is None or table.shape != (channels, 256) or table.dtype != torch.float32 or table.is_cuda:
                raise HansaError(
                    f"Stack: uint8 inputs need table=, a float32 tensor [{channels}, 256] with the value of each byte."
                )
            table = table.contiguous()
        elif inputs.dtype != torch.float32 or table is not None:
            extra = "" if table is None else " with a table"
            raise HansaError(f"Stack: inputs are {inputs.dtype}{extra}: expected float32, or uint8 with table=.")
        planar = inputs.is_contiguous()
        if not planar and not (inputs.ndim == 4 and inputs.is_contiguous(memory_format=torch.channels_last)):
            raise HansaError("Stack: inputs are neither contiguous nor channels-last. Call .contiguous() on them once.")
        if labels is not None:
            fits = labels.dtype == torch.int64 and labels.shape == inputs.shape[:1] and labels.is_contiguous()
            if not fits or labels.device.type != "cpu":
                wanted = f"{len(inputs)} contiguous int64 on the CPU"
                raise HansaError(f"Stack: labels are {_describe(labels)}, expected {wanted}.")
        pointers = (None if t is None else t.data_ptr() for t in (inputs, table, labels))
        data = abi.Data(*pointers, len(inputs), int(planar))
        data.kept = (inputs, table, labels)
        return data


class Workspace:
    """Buffers for one stack and up to ``batch`` examples, for one call at a time."""

    def __init__(self, stack: Stack, batch: int) -> None:
        self.kernels, self.batch = native.load(stack.isa), batch
        spec = (abi.Stage * len(stack.stages))()
        for place, stage in zip(spec, stack.stages, strict=True):
            stage.fill(place)
        self.handle = self.kernels.stack_new(spec, len(spec), batch)
        if not self.handle:
            raise MemoryError(f"no memory for a native workspace of {batch} examples")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.kernels.stack_free(self.handle)


def batches_of(index: Tensor, sizes: Tensor | None, where: str) -> abi.Batches:
    if index.ndim != 2 or index.dtype != torch.int64 or index.device.type != "cpu" or not index.numel():
        raise HansaError(f"Stack.{where}: rows are {_describe(index)}, expected int64 row numbers [steps, batch].")
    index = index.contiguous()
    if sizes is not None:
        if sizes.dtype != torch.int64 or sizes.shape != index.shape[:1] or sizes.device.type != "cpu":
            raise HansaError(f"Stack.{where}: sizes are {_describe(sizes)}, expected int64 [{len(index)}].")
        sizes = sizes.contiguous()
    pointers = index.data_ptr(), None if sizes is None else sizes.data_ptr()
    batches = abi.Batches(*pointers, *index.shape)
    batches.kept = (index, sizes)
    return batches


def check_code(
    code: int, where: str, stack: Stack, index: Tensor, sizes: Tensor | None, labels: Tensor | None, rows: int
) -> None:
    """Turn a refusal of the C side, which changed nothing, into an error that names the value."""
    if code == abi.OK:
        return
    if code == abi.BAD_SIZE:
        raise HansaError(f"{where}: a batch size of {sizes} is not within 1..{index.shape[1]}.")
    if code == abi.BAD_ROW:
        bad = index[(index < 0) | (index >= rows)]
        raise HansaError(f"{where}: row {int(bad[0])} does not exist, there are {rows}.")
    assert labels is not None
    found = labels[index.flatten()]
    bad = found[(found < 0) | (found >= stack.classes)]
    raise HansaError(f"{where}: label {int(bad[0])} does not exist, the stack has {stack.classes} classes.")


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} [{_inside(tensor.shape)}] on {tensor.device}"


def _inside(shape: Sequence[int]) -> str:
    return ", ".join(map(str, shape))
