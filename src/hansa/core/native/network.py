"""Native training of small networks with mean cross-entropy, in float32.

Stages are convolutions, ReLU and pools; means of embeddings; linear layers, activations, layer normalisation, residual
additions; dropout.

The flat vector has Hansa's layout: parameters in module order, convolution weights channels-last. Calls release the
GIL. Results agree with eager PyTorch to float rounding and are bit-reproducible on one instruction set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_float
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hansa.core import native
from hansa.core.errors import HansaError, invalid_argument
from hansa.core.native import abi

if TYPE_CHECKING:
    from torch import Tensor

_EVALUATION_BATCH = 64
_EVALUATION_NUMBERS = 1 << 25  # outputs of all stages in one evaluation batch, unless a single row has more
SLICE = 0.1  # seconds per call at most, plus one step, so that Ctrl-C is handled in between


@dataclass(slots=True, eq=False)
class AffineStep:
    """The native local step y <- y - lr d, with d = g + weight_decay y + prox_weight (y - anchor) + shift. With
    momentum d <- momentum d + that sum, stored in ``velocity``; g is first clipped to ``max_grad_norm``."""

    lr: float
    anchor: Tensor | None = None
    prox_weight: float = 0.0
    shift: Tensor | None = None
    weight_decay: float = 0.0
    momentum: float = 0.0
    max_grad_norm: float | None = None
    velocity: Tensor | None = None

    @property
    def numbers(self) -> tuple[float | None, ...]:
        return self.lr, self.prox_weight, self.weight_decay, self.momentum, self.max_grad_norm


@dataclass(frozen=True, slots=True)
class Network:
    """A sequence of native stages. It can be shared by threads and pickled: each call has its own workspace."""

    stages: tuple[LayerStage, ...]
    input_shape: tuple[int, ...]
    _idle: list[Workspace] = field(default_factory=list, init=False, repr=False, compare=False)

    dim: int = field(init=False, repr=False, compare=False)
    """The length of the flat parameter vector."""

    dropout_numbers: int = field(init=False, repr=False, compare=False)
    """The number of dropout factors per row; 0 without dropout."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", sum(stage.dim for stage in self.stages))
        object.__setattr__(self, "dropout_numbers", sum(stage.dropout_numbers for stage in self.stages))

    @property
    def evaluation_batch(self) -> int:
        """Rows that are evaluated at a time."""
        numbers = sum(math.prod(stage.out_shape) for stage in self.stages)
        return max(1, min(_EVALUATION_BATCH, _EVALUATION_NUMBERS // numbers))

    @property
    def takes_tokens(self) -> bool:
        """Whether its inputs are int64 tokens."""
        return self.stages[0].kind == abi.EMBED

    @property
    def classes(self) -> int:
        return self.stages[-1].out

    def gradient(
        self,
        y: Tensor,
        inputs: Tensor,
        labels: Tensor,
        rows: Tensor,
        *,
        out: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> tuple[float, Tensor]:
        """Return the mean loss over rows at y and its gradient, in ``out`` if given; ``keep`` is filled by `draw`."""
        data = self.examples(inputs, labels)
        self.check_vector("y", y)
        out = torch.empty_like(y) if out is None else out
        self.check_vector("out", out)
        batches = self.batch_index(rows[None], None if keep is None else keep[None])
        loss = c_float()
        with self._workspace(batches.batch) as (kernels, handle):
            code = kernels.gradient(handle, y.data_ptr(), byref(data), byref(batches), out.data_ptr(), byref(loss))
        check_code(code, self, data, rows[None])
        return loss.value, out

    def evaluate(
        self,
        y: Tensor,
        inputs: Tensor,
        labels: Tensor,
        start: int = 0,
        stop: int | None = None,
    ) -> tuple[float, int]:
        """Return the summed loss and the number of correct predictions over rows start..stop."""
        stop = len(inputs) if stop is None else stop
        if not 0 <= start <= stop <= len(inputs):
            raise invalid_argument(
                "Network.evaluate", "start, stop", (start, stop), f"0 <= start <= stop <= {len(inputs)}"
            )
        data = self.examples(inputs, labels)
        self.check_vector("y", y)
        score = abi.Evaluation()
        with self._workspace(self.evaluation_batch) as (kernels, handle):
            code = kernels.evaluate(handle, y.data_ptr(), byref(data), start, stop, byref(score))
        index = torch.arange(start, stop)[None]
        check_code(code, self, data, index)
        return score.loss, score.correct

    def draw(self, rows: int, generator: torch.Generator, out: Tensor) -> None:
        """Draw the dropout factors of a batch into ``out`` [rows dropout_numbers], in the order of the layers, as eager
        torch would from a generator in this state."""
        pieces = torch.split(out, [rows * stage.dropout_numbers for stage in self.stages])
        for stage, piece in zip(self.stages, pieces, strict=True):
            if stage.drop is not None:
                stage.draw(rows, generator, piece)

    def batch_index(self, index: Tensor, keep: Tensor | None) -> abi.BatchIndex:
        """Return the C structure of batches, whose rows are ``index`` [steps, batch], and their dropout factors."""
        index = index.contiguous()
        check_tensor("index", index, torch.int64, -1, -1)
        if not index.numel():
            raise HansaError("native: index is empty.")
        batches = abi.BatchIndex(index.data_ptr(), None, *index.shape)
        if self.dropout_numbers:
            keep = torch.empty(0) if keep is None else keep
            expected = len(index), index.shape[1] * self.dropout_numbers
            check_tensor("keep, the dropout factors,", keep, torch.float32, *expected)
            batches.keep = keep.data_ptr()
        batches.owners = (index, keep)
        return batches

    def step_structure(self, step: AffineStep, anchor: Tensor | None, velocity: Tensor | None) -> abi.StepParameters:
        """Return the C structure of a step."""
        for name, vector in (("shift", step.shift), ("velocity", velocity)):
            if vector is not None:
                self.check_vector(name, vector)
        if step.prox_weight and anchor is None:
            raise HansaError(f"AffineStep(prox_weight={step.prox_weight}): expected an anchor with it.")
        vectors = velocity, anchor if step.prox_weight else None, step.shift
        limit = math.inf if step.max_grad_norm is None else step.max_grad_norm
        numbers = step.lr, step.prox_weight, step.weight_decay, step.momentum, limit
        return abi.StepParameters(*(None if vector is None else vector.data_ptr() for vector in vectors), *numbers)

    def __reduce__(self) -> tuple[Any, ...]:
        return Network, (self.stages, self.input_shape)

    @contextmanager
    def _workspace(self, batch: int) -> Iterator[tuple[Any, int]]:
        """Borrow a workspace for at least the given batch size. List pop and append are atomic."""
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

    def check_vector(self, name: str, vector: Tensor) -> None:
        """Raise unless ``vector`` is a flat vector of the network."""
        check_tensor(name, vector, torch.float32, self.dim)

    def examples(self, inputs: Tensor, labels: Tensor) -> abi.Data:
        """Return the C structure of the examples; it keeps the tensors alive."""
        planar, shape, stored = inputs.is_contiguous() or inputs.ndim != 4, self.input_shape, inputs
        if not planar:
            shape, stored = (*shape[1:], shape[0]), inputs.permute(0, 2, 3, 1)
        check_tensor("inputs", stored, torch.int64 if self.takes_tokens else torch.float32, -1, *shape)
        check_tensor("labels", labels, torch.int64, len(inputs))
        data = abi.Data(inputs.data_ptr(), None, labels.data_ptr(), len(inputs), int(planar))
        data.owners = (inputs, labels)
        return data


def check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Raise unless a tensor is contiguous on the CPU and has this dtype and shape; -1 is any size."""
    fits = tensor.dtype == dtype and tensor.is_contiguous() and tensor.is_cpu and tensor.ndim == len(shape)
    if not fits or any(size not in (actual, -1) for size, actual in zip(shape, tensor.shape, strict=True)):
        expected = ", ".join("n" if size < 0 else str(size) for size in shape)
        raise HansaError(
            f"native: {name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, expected contiguous {dtype} "
            f"[{expected}] on the CPU."
        )


class Workspace:
    """Buffers for one network and up to ``batch`` examples, for one call at a time."""

    def __init__(self, network: Network, batch: int) -> None:
        self.kernels, self.batch = native.load(), batch
        spec = (abi.Stage * len(network.stages))()
        for structure, stage in zip(spec, network.stages, strict=True):
            stage.write_to(structure)
        self.handle = self.kernels.network_new(byref(spec), len(spec), batch)
        if not self.handle:
            raise MemoryError(f"no memory for a native workspace of {batch} examples")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.kernels.network_free(self.handle)


def check_code(code: int, network: Network, data: abi.Data, index: Tensor) -> None:
    """Raise the error of a return code, with the value that caused it; the call changed nothing."""
    if code == abi.OK:
        return
    inputs, labels = data.owners
    if code == abi.BAD_ROW:
        name, numbers, count = "row", index, data.rows
    elif code == abi.BAD_TOKEN:
        name, numbers, count = "token", inputs[index.flatten()], network.stages[0].words
    else:
        name, numbers, count = "label", labels[index.flatten()], network.classes
    value = int(numbers[(numbers < 0) | (numbers >= count)][0])
    raise HansaError(f"native: {name} {value} is out of range, there are {count}.")


@dataclass(frozen=True, slots=True)
class PoolWindow:
    """The maximum or the mean (``kind``) of windows of ``size``, ``step`` apart; both are (height, width).

    >>> PoolWindow(abi.MAX, (3, 3), (2, 2)).output_sides((8, 8))
    (3, 3)
    """

    kind: int
    size: tuple[int, int]
    step: tuple[int, int]

    def output_sides(self, image: tuple[int, int]) -> tuple[int, int]:
        """Return the (height, width) of an image after the pool."""
        high, wide = ((side - w) // s + 1 for side, w, s in zip(image, self.size, self.step, strict=True))
        return high, wide


@dataclass(frozen=True, slots=True)
class DropoutKind:
    """Dropout with probability ``p``: of values, of values already flattened, or of whole channels (``kind``)."""

    kind: int
    p: float


_PLAIN_FIELDS = (
    "kind", "out", "kernel", "padding", "planar", "stride", "weight", "bias", "source", "addend", "activation", "alpha",
    "eps", "words", "skip", "groups",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerStage:
    """One convolution, group normalisation or addition of images with the activation, pool and dropout that follow it,
    or linear layer with ReLU and dropout; or an activation, a layer normalisation, an addition of two stages' outputs
    or a pooled embedding, with dropout.

    ``shape`` is its input as (channels, height, width). ``weight`` and ``bias`` are the offsets of its parameters in
    the flat vector; -1 is none. ``planar``: images and convolution weights are contiguous, not channels-last.
    ``source`` is the number of the stage whose output it takes, ``addend`` of the one whose output an addition adds;
    -1 is the network's input. ``alpha`` is the slope of LeakyReLU below 0, or the scale of ELU. An embedding's table
    has ``words`` rows, of which ``skip`` has no gradient; -1 is none.
    """

    kind: int
    shape: tuple[int, int, int]
    out: int
    kernel: int = 0
    padding: int = 0
    relu: bool = False
    pool: PoolWindow | None = None
    weight: int = 0
    bias: int = -1
    planar: bool = False
    stride: int = 1
    relu_after_pool: bool = False
    drop: DropoutKind | None = None
    source: int = -1
    addend: int = -1
    activation: int = 0
    activation_after_pool: bool = False
    alpha: float = 0.0
    eps: float = 0.0
    words: int = 0
    skip: int = -1
    groups: int = 1

    @property
    def on_images(self) -> bool:
        """Whether its output is an image, which may be flattened."""
        return self.kind in abi.ON_IMAGES

    @property
    def out_shape(self) -> tuple[int, int, int]:
        if not self.on_images:
            return self.out, 1, 1
        high, wide = ((side + 2 * self.padding - self.kernel) // self.stride + 1 for side in self.shape[1:])
        return self.out, *((high, wide) if self.pool is None else self.pool.output_sides((high, wide)))

    @property
    def dim(self) -> int:
        rows = {abi.CONV: self.kernel**2 * self.shape[0], abi.LINEAR: math.prod(self.shape), abi.EMBED: self.words}
        inputs = rows.get(self.kind, 1)
        return self.out * (inputs * (self.weight >= 0) + (self.bias >= 0))

    @property
    def inputs(self) -> tuple[int, ...]:
        """The numbers of the stages whose output it takes; -1 is the network's input."""
        return (self.source, self.addend) if self.kind in (abi.ADD, abi.IMAGE_ADD) else (self.source,)

    @property
    def dropout_numbers(self) -> int:
        """The number of dropout factors for one example."""
        if self.drop is None:
            return 0
        return self.out if self.drop.kind == abi.DROP_CHANNELS else math.prod(self.out_shape)

    def write_to(self, target: abi.Stage) -> None:
        """Write the stage into its C structure."""
        for name in _PLAIN_FIELDS:
            setattr(target, name, getattr(self, name))
        target.channels, target.height, target.width = self.shape
        target.relu = 2 if self.relu and self.relu_after_pool else int(self.relu)
        target.drop, target.after_pool = 0 if self.drop is None else self.drop.kind, self.activation_after_pool
        if self.pool is not None:
            target.pool, (target.pool_h, target.pool_w) = self.pool.kind, self.pool.size
            target.step_h, target.step_w = self.pool.step

    def draw(self, rows: int, generator: torch.Generator, out: Tensor) -> None:
        """Draw the dropout factors, 0 or 1 / (1 - p), that eager torch draws for as many rows, in the order in which
        torch stores the values. ``out`` is flat, in the kernels' order."""
        assert self.drop is not None
        if not self.on_images or self.drop.kind != abi.DROP:
            _bernoulli(out, self.drop.p, generator)
            return
        channels, height, width = self.out_shape
        image = out.view(rows, height, width, channels).permute(0, 3, 1, 2)
        if self.planar:
            image.copy_(_bernoulli(torch.empty(image.shape), self.drop.p, generator))
        else:
            _bernoulli(image, self.drop.p, generator)


def _bernoulli(out: Tensor, p: float, generator: torch.Generator) -> Tensor:
    return out.bernoulli_(1 - p, generator=generator).div_(1 - p)
