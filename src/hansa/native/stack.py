"""Small stacks trained natively: Conv2d, ReLU, MaxPool2d(2), Flatten and Linear with mean cross-entropy, in float32.

One call runs a client's whole local phase with the interpreter lock released. The flat vector is Hansa's own layout:
parameters in module order, convolution weights channels-last. Results agree with eager PyTorch to float rounding and
repeat to the bit on one instruction set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_float
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hansa import native
from hansa.errors import HansaError, refuse
from hansa.native import abi

_EVALUATION_BATCH = 64


@dataclass(frozen=True, slots=True)
class Stage:
    """One convolution or linear layer with what follows it. ``shape`` is its input as (channels, height, width)."""

    kind: int
    shape: tuple[int, int, int]
    out: int
    kernel: int = 0
    padding: int = 0
    relu: bool = False
    pool: bool = False
    bias: bool = True

    @property
    def out_shape(self) -> tuple[int, int, int]:
        if self.kind == abi.LINEAR:
            return self.out, 1, 1
        height, width = (side + 2 * self.padding - self.kernel + 1 for side in self.shape[1:])
        return (self.out, height // 2, width // 2) if self.pool else (self.out, height, width)

    @property
    def dim(self) -> int:
        inputs = self.kernel**2 * self.shape[0] if self.kind == abi.CONV else math.prod(self.shape)
        return self.out * (inputs + self.bias)


def compile_stack(module: nn.Module, input_shape: Sequence[int], isa: str = "") -> Stack | None:
    """The native form of a module on inputs of the given shape, (C, H, W) or (features,); None where there is none.

    A stack is an ``nn.Sequential``, possibly nested, of stride-1 square ``Conv2d``, ``ReLU``, ``MaxPool2d(2)``,
    ``Flatten`` and ``Linear``, ending in a ``Linear``. Anything else, a frozen, shared or hooked layer included, is not.

    >>> compile_stack(nn.Sequential(nn.Linear(4, 2), nn.Dropout()), (4,)) is None
    True
    """
    if not native.available():
        return None
    stages = _stages(module, tuple(input_shape))
    return None if stages is None else Stack(stages, tuple(input_shape), isa)


@dataclass(frozen=True, slots=True)
class Stack:
    """A recognised stack. It may be shared by threads and sent to processes: each call takes a workspace of its own."""

    stages: tuple[Stage, ...]
    input_shape: tuple[int, ...]
    isa: str = ""
    _idle: list[_Workspace] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def dim(self) -> int:
        """The length of the flat parameter vector."""
        return sum(stage.dim for stage in self.stages)

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
    ) -> Tensor:
        """y <- y - lr d in place for each row of ``index``, with d = g + weight_decay y + a (y - anchor) + s; with local
        momentum d <- momentum d + that sum. The raw gradient is clipped first. Returns the loss of each step.

        ``velocity`` is updated in place; without it momentum starts from zero. ``sizes`` gives each step's own batch
        size, the rest of its row being ignored. uint8 inputs need ``table`` [C, 256], the value of each byte.
        """
        data, kept = self._data(inputs, labels, table)
        self._vector("y", y)
        batches, held = _batches(index, sizes, "train")
        if a and anchor is None:
            raise refuse("Stack.train", "a", a, "an anchor with it", "Pass anchor=, the model that was received.")
        if momentum and velocity is None:
            velocity = torch.zeros_like(y)
        for name, vector in (("anchor", anchor), ("s", s), ("velocity", velocity)):
            if vector is not None:
                self._vector(name, vector)
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
        with self._workspace(batches.batch) as (kernels, handle):
            code = kernels.train(handle, y.data_ptr(), data, batches, update, losses.data_ptr())
        _check(code, "Stack.train", self, index, sizes, labels, len(inputs))
        del kept, held
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
    ) -> tuple[float, Tensor]:
        """The mean loss over the given rows at y, and its gradient (in ``out`` if given)."""
        data, kept = self._data(inputs, labels, table)
        self._vector("y", y)
        out = torch.empty_like(y) if out is None else out
        self._vector("out", out)
        batches, held = _batches(rows[None], None, "gradient")
        loss = c_float()
        with self._workspace(batches.batch) as (kernels, handle):
            code = kernels.gradient(handle, y.data_ptr(), data, batches, out.data_ptr(), byref(loss))
        _check(code, "Stack.gradient", self, rows[None], None, labels, len(inputs))
        del kept, held
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
            raise refuse("Stack.evaluate", "start, stop", (start, stop), f"0 <= start <= stop <= {len(inputs)}")
        data, kept = self._data(inputs, labels, table)
        self._vector("y", y)
        score = abi.Score()
        with self._workspace(_EVALUATION_BATCH) as (kernels, handle):
            code = kernels.evaluate(handle, y.data_ptr(), data, start, stop, byref(score))
        index = torch.arange(start, stop)[None]
        _check(code, "Stack.evaluate", self, index, None, labels, len(inputs))
        del kept
        return score.loss, score.correct

    def logits(self, y: Tensor, inputs: Tensor, rows: Tensor, *, table: Tensor | None = None) -> Tensor:
        """The outputs [rows, classes] for the given rows."""
        data, kept = self._data(inputs, None, table)
        self._vector("y", y)
        out = torch.empty(len(rows), self.classes)
        whole = len(rows) - len(rows) % _EVALUATION_BATCH
        with self._workspace(_EVALUATION_BATCH) as (kernels, handle):
            for piece, target in ((rows[:whole], out[:whole]), (rows[whole:], out[whole:])):
                if len(piece):
                    index = piece.view(-1, min(_EVALUATION_BATCH, len(piece)))
                    batches, held = _batches(index, None, "logits")
                    code = kernels.logits(handle, y.data_ptr(), data, batches, target.data_ptr())
                    _check(code, "Stack.logits", self, index, None, None, len(inputs))
                    del held
        del kept
        return out

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
            space = _Workspace(self, batch)
        try:
            yield space.kernels, space.handle
        finally:
            self._idle.append(space)

    def _vector(self, name: str, vector: Tensor) -> None:
        fits = vector.dtype == torch.float32 and vector.shape == (self.dim,) and vector.is_contiguous()
        if not fits or vector.device.type != "cpu":
            raise HansaError(
                f"Stack: {name} is {_describe(vector)}, expected a contiguous float32 vector of {self.dim} on the CPU."
            )

    def _data(self, inputs: Tensor, labels: Tensor | None, table: Tensor | None) -> tuple[abi.Data, Any]:
        """The C view of the examples, and what must stay alive with it."""
        shape = tuple(inputs.shape[1:])
        if inputs.device.type != "cpu" or (shape != self.input_shape and math.prod(shape) != math.prod(self.input_shape)):
            raise HansaError(f"Stack: inputs are {_describe(inputs)}, expected [n, {_inside(self.input_shape)}] on the CPU.")
        channels = self.stages[0].shape[0]
        if inputs.dtype == torch.uint8:
            if table is None or table.shape != (channels, 256) or table.dtype != torch.float32 or table.is_cuda:
                raise HansaError(
                    f"Stack: uint8 inputs need table=, a float32 tensor [{channels}, 256] with the value of each byte."
                )
            table = table.contiguous()
        elif inputs.dtype != torch.float32 or table is not None:
            raise HansaError(
                f"Stack: inputs are {inputs.dtype}{' with a table' if table is not None else ''}: "
                f"expected float32, or uint8 with table=."
            )
        planar = inputs.is_contiguous()
        if not planar and not (inputs.ndim == 4 and inputs.is_contiguous(memory_format=torch.channels_last)):
            raise HansaError("Stack: inputs are neither contiguous nor channels-last. Call .contiguous() on them once.")
        if labels is not None and (
            labels.dtype != torch.int64 or labels.shape != (len(inputs),) or not labels.is_contiguous() or labels.is_cuda
        ):
            raise HansaError(f"Stack: labels are {_describe(labels)}, expected {len(inputs)} contiguous int64 on the CPU.")
        pointers = (
            inputs.data_ptr(),
            None if table is None else table.data_ptr(),
            None if labels is None else labels.data_ptr(),
        )
        return abi.Data(*pointers, len(inputs), int(planar)), (inputs, table, labels)


class _Workspace:
    """Buffers for one stack and up to ``batch`` examples, for one call at a time."""

    def __init__(self, stack: Stack, batch: int) -> None:
        self.kernels, self.batch = native.kernels(stack.isa), batch
        spec = (abi.Stage * len(stack.stages))()
        for place, stage in zip(spec, stack.stages, strict=True):
            place.kind, place.out, place.kernel, place.padding = stage.kind, stage.out, stage.kernel, stage.padding
            place.channels, place.height, place.width = stage.shape
            place.relu, place.pool, place.bias = stage.relu, stage.pool, stage.bias
        self.handle = self.kernels.stack_new(spec, len(spec), batch)
        if not self.handle:
            raise MemoryError(f"no memory for a native workspace of {batch} examples")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.kernels.stack_free(self.handle)


def _batches(index: Tensor, sizes: Tensor | None, where: str) -> tuple[abi.Batches, Any]:
    if index.ndim != 2 or index.dtype != torch.int64 or index.device.type != "cpu" or not index.numel():
        raise HansaError(f"Stack.{where}: rows are {_describe(index)}, expected int64 row numbers [steps, batch].")
    index = index.contiguous()
    if sizes is not None:
        if sizes.dtype != torch.int64 or sizes.shape != index.shape[:1] or sizes.device.type != "cpu":
            raise HansaError(f"Stack.{where}: sizes are {_describe(sizes)}, expected int64 [{len(index)}].")
        sizes = sizes.contiguous()
    pointers = index.data_ptr(), None if sizes is None else sizes.data_ptr()
    return abi.Batches(*pointers, *index.shape), (index, sizes)


def _check(
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


# Recognition ----------------------------------------------------------------------------------------------------------


def _stages(module: nn.Module, input_shape: tuple[int, ...]) -> tuple[Stage, ...] | None:
    """The module as stages, or None at the first thing that is not one."""
    layers = _layers(module)
    if layers is None or len(input_shape) not in (1, 3):
        return None
    parameters = [p for layer in layers for p in layer.parameters()]
    usable = all(p.requires_grad and p.dtype == torch.float32 and not p.is_cuda for p in parameters)
    if not usable or len({id(p) for p in parameters}) < len(parameters):
        return None
    flat = len(input_shape) == 1
    shape = (1, 1, input_shape[0]) if flat else (input_shape[0], input_shape[1], input_shape[2])
    stages: list[Stage] = []
    for layer in layers:
        last = stages[-1] if stages else None
        if type(layer) is nn.Identity:
            continue
        if type(layer) is nn.Flatten and layer.start_dim == 1 and layer.end_dim == -1:
            flat = True
        elif type(layer) is nn.Linear and flat and layer.in_features == math.prod(shape):
            stages.append(Stage(abi.LINEAR, shape, layer.out_features, bias=layer.bias is not None))
        elif type(layer) is nn.Conv2d and not flat and _plain_conv(layer) and layer.in_channels == shape[0]:
            padding = _padding(layer)
            stages.append(
                Stage(abi.CONV, shape, layer.out_channels, layer.kernel_size[0], padding, bias=layer.bias is not None)
            )
        elif type(layer) is nn.ReLU and last is not None:
            stages[-1] = replace(last, relu=True)
        elif type(layer) is nn.MaxPool2d and _plain_pool(layer) and _poolable(last) and not flat:
            assert last is not None
            stages[-1] = replace(last, pool=True)
        else:
            return None
        shape = stages[-1].out_shape if stages else shape
        if min(shape) < 1:
            return None
    return tuple(stages) if stages and stages[-1].kind == abi.LINEAR else None


def _layers(module: nn.Module) -> list[nn.Module] | None:
    """The layers of a possibly nested Sequential in order; None where hooks or another forward intervene."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return None
    if not isinstance(module, nn.Sequential):
        return [module]
    if type(module).forward is not nn.Sequential.forward:
        return None
    layers: list[nn.Module] = []
    for child in module:
        inner = _layers(child)
        if inner is None:
            return None
        layers += inner
    return layers


def _padding(layer: nn.Conv2d) -> int:
    if isinstance(layer.padding, str):
        return layer.kernel_size[0] // 2 if layer.padding == "same" else 0
    return int(layer.padding[0])


def _plain_conv(layer: nn.Conv2d) -> bool:
    size, padding = layer.kernel_size, layer.padding
    return (
        size[0] == size[1]
        and size[0] % 2 == 1
        and (isinstance(padding, str) or padding[0] == padding[1])
        and _padding(layer) < size[0]
        and layer.stride == (1, 1)
        and layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
    )


def _plain_pool(layer: nn.MaxPool2d) -> bool:
    sides = (layer.kernel_size, layer.stride)
    return (
        all(side in (2, (2, 2)) for side in sides)
        and layer.padding in (0, (0, 0))
        and layer.dilation in (1, (1, 1))
        and not layer.ceil_mode
        and not layer.return_indices
    )


def _poolable(stage: Stage | None) -> bool:
    return stage is not None and stage.kind == abi.CONV and not stage.pool
