"""Native training of small networks with mean cross-entropy, in float32.

Stages are convolutions, ReLU and pools; means of embeddings; linear layers, activations, layer normalisation, residual
additions; dropout.

The flat vector has Hansa's layout: parameters in module order, convolution weights channels-last. Calls release the
GIL. Results agree with eager PyTorch to float rounding and are bit-reproducible on one instruction set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_float, c_int64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hansa.core import native
from hansa.core.errors import HansaError, check_positive, invalid_argument
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
    isa: str = ""
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

    def train(
        self,
        y: Tensor,
        inputs: Tensor,
        labels: Tensor,
        index: Tensor,
        step: AffineStep,
        *,
        sizes: Tensor | None = None,
        table: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Take a step in place for each row of ``index``; return the loss of each.

        The step's velocity is updated in place; without it momentum starts from zero. ``sizes`` gives the batch size of
        each step; the rest of its row is ignored. uint8 inputs need ``table`` [C, 256], the value of each byte. A
        network with dropout needs ``keep`` [steps, batch dropout_numbers], each row filled by `draw`.
        """
        data = self.examples(inputs, labels, table)
        self.check_vector("y", y)
        batches = self.batch_index(index, sizes, "train", keep)
        if step.max_grad_norm is not None:
            check_positive("AffineStep", "max_grad_norm", step.max_grad_norm)
        velocity = step.velocity if step.velocity is not None else torch.zeros_like(y) if step.momentum else None
        for name, vector in (("anchor", step.anchor if step.prox_weight else None), ("velocity", velocity)):
            if vector is not None:
                self.check_vector(name, vector)
                if vector.data_ptr() == y.data_ptr():
                    raise HansaError(f"Network.train: {name} is y itself, which changes at every step. Pass a copy.")
        update = abi.StepParameters()
        fill_update(self, update, step, step.anchor, velocity if step.momentum else None)
        structures = byref(data), byref(batches), byref(update)
        losses, done = torch.empty(len(index), dtype=torch.float32), c_int64()
        with self._workspace(batches.batch) as (kernels, handle):
            while done.value < len(index):
                code = kernels.train(handle, y.data_ptr(), *structures, losses.data_ptr(), byref(done), SLICE)
                check_code(code, "Network.train", self, data, index, sizes)
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
        """Return the mean loss over rows at y and its gradient, in ``out`` if given; ``keep`` is filled by `draw`."""
        data = self.examples(inputs, labels, table)
        self.check_vector("y", y)
        out = torch.empty_like(y) if out is None else out
        self.check_vector("out", out)
        batches = self.batch_index(rows[None], None, "gradient", None if keep is None else keep[None])
        loss = c_float()
        with self._workspace(batches.batch) as (kernels, handle):
            code = kernels.gradient(handle, y.data_ptr(), byref(data), byref(batches), out.data_ptr(), byref(loss))
        check_code(code, "Network.gradient", self, data, rows[None])
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
        """Return the summed loss and the number of correct predictions over rows start..stop."""
        stop = len(inputs) if stop is None else stop
        if not 0 <= start <= stop <= len(inputs):
            raise invalid_argument(
                "Network.evaluate", "start, stop", (start, stop), f"0 <= start <= stop <= {len(inputs)}"
            )
        data = self.examples(inputs, labels, table)
        self.check_vector("y", y)
        score = abi.Evaluation()
        with self._workspace(self.evaluation_batch) as (kernels, handle):
            code = kernels.evaluate(handle, y.data_ptr(), byref(data), start, stop, byref(score))
        index = torch.arange(start, stop)[None]
        check_code(code, "Network.evaluate", self, data, index)
        return score.loss, score.correct

    def logits(self, y: Tensor, inputs: Tensor, rows: Tensor, *, table: Tensor | None = None) -> Tensor:
        """Return the logits [rows, classes]."""
        data = self.examples(inputs, None, table)
        self.check_vector("y", y)
        out = torch.empty(len(rows), self.classes)
        most = self.evaluation_batch
        whole = len(rows) - len(rows) % most
        with self._workspace(most) as (kernels, handle):
            for piece, target in ((rows[:whole], out[:whole]), (rows[whole:], out[whole:])):
                if len(piece):
                    index = piece.view(-1, min(most, len(piece)))
                    batches = batch_index(index, None, "logits")
                    code = kernels.logits(handle, y.data_ptr(), byref(data), byref(batches), target.data_ptr())
                    check_code(code, "Network.logits", self, data, index)
        return out

    def draw(self, rows: int, generator: torch.Generator, out: Tensor) -> None:
        """Draw the dropout factors of a batch into ``out`` [rows dropout_numbers], in the order of the layers, as eager
        torch would from a generator in this state."""
        pieces = torch.split(out, [rows * stage.dropout_numbers for stage in self.stages])
        for stage, piece in zip(self.stages, pieces, strict=True):
            if stage.drop is not None:
                stage.draw(rows, generator, piece)

    def batch_index(self, index: Tensor, sizes: Tensor | None, where: str, keep: Tensor | None) -> abi.BatchIndex:
        """Return the C structure of batches and their dropout factors."""
        batches = batch_index(index, sizes, where)
        if keep is None and not self.dropout_numbers:
            return batches
        shape = (len(index), index.shape[1] * self.dropout_numbers)
        if keep is None or sizes is not None or keep.shape != shape or keep.dtype != torch.float32:
            shown = "missing" if keep is None else _describe(keep)
            raise HansaError(
                f"Network.{where}: dropout needs keep: it is {shown}, expected float32 {list(shape)} and no sizes."
            )
        keep = keep.contiguous()
        batches.keep, batches.owners = keep.data_ptr(), (*batches.owners, keep)
        return batches

    def __reduce__(self) -> tuple[Any, ...]:
        return Network, (self.stages, self.input_shape, self.isa)

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
        fits = vector.dtype == torch.float32 and vector.shape == (self.dim,) and vector.is_contiguous()
        if not fits or not vector.is_cpu:
            raise HansaError(
                f"Network: {name} is {_describe(vector)}, expected a contiguous float32 vector of {self.dim} on CPU."
            )

    def examples(self, inputs: Tensor, labels: Tensor | None, table: Tensor | None) -> abi.Data:
        """Return the C structure of the examples; it keeps the tensors alive."""
        if inputs.shape[1:] != self.input_shape or inputs.device.type != "cpu":
            wanted = _inside(self.input_shape)
            raise HansaError(f"Network: inputs are {_describe(inputs)}, expected [n, {wanted}] on the CPU.")
        channels = self.stages[0].shape[0]
        if self.takes_tokens:
            if inputs.dtype != torch.int64 or table is not None:
                raise HansaError(f"Network: inputs are {inputs.dtype}: expected int64 tokens, and no table.")
        elif inputs.dtype == torch.uint8:
            if table is None or table.shape != (channels, 256) or table.dtype != torch.float32 or table.is_cuda:
                raise HansaError(
                    f"Network: uint8 inputs need table=, float32 [{channels}, 256] with the value of each byte."
                )
            table = table.contiguous()
        elif inputs.dtype != torch.float32 or table is not None:
            extra = "" if table is None else " with a table"
            raise HansaError(f"Network: inputs are {inputs.dtype}{extra}: expected float32, or uint8 with table=.")
        planar = inputs.is_contiguous()
        if not planar and not (inputs.ndim == 4 and inputs.is_contiguous(memory_format=torch.channels_last)):
            raise HansaError("Network: inputs are neither contiguous nor channels-last. Call .contiguous() on them.")
        if labels is not None:
            fits = labels.dtype == torch.int64 and labels.shape == inputs.shape[:1] and labels.is_contiguous()
            if not fits or labels.device.type != "cpu":
                wanted = f"{len(inputs)} contiguous int64 on the CPU"
                raise HansaError(f"Network: labels are {_describe(labels)}, expected {wanted}.")
        pointers = (None if t is None else t.data_ptr() for t in (inputs, table, labels))
        data = abi.Data(*pointers, len(inputs), int(planar))
        data.owners = (inputs, table, labels)
        return data


class Workspace:
    """Buffers for one network and up to ``batch`` examples, for one call at a time."""

    def __init__(self, network: Network, batch: int) -> None:
        self.kernels, self.batch = native.load(network.isa), batch
        spec = (abi.Stage * len(network.stages))()
        for place, stage in zip(spec, network.stages, strict=True):
            stage.write_to(place)
        self.handle = self.kernels.network_new(byref(spec), len(spec), batch)
        if not self.handle:
            raise MemoryError(f"no memory for a native workspace of {batch} examples")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.kernels.network_free(self.handle)


def batch_index(index: Tensor, sizes: Tensor | None, where: str) -> abi.BatchIndex:
    if index.ndim != 2 or index.dtype != torch.int64 or index.device.type != "cpu" or not index.numel():
        raise HansaError(f"Network.{where}: rows are {_describe(index)}, expected int64 row numbers [steps, batch].")
    index = index.contiguous()
    if sizes is not None:
        if sizes.dtype != torch.int64 or sizes.shape != index.shape[:1] or sizes.device.type != "cpu":
            raise HansaError(f"Network.{where}: sizes are {_describe(sizes)}, expected int64 [{len(index)}].")
        sizes = sizes.contiguous()
    pointers = index.data_ptr(), None if sizes is None else sizes.data_ptr()
    batches = abi.BatchIndex(*pointers, *index.shape)
    batches.owners = (index, sizes)
    return batches


def check_code(
    code: int, where: str, network: Network, data: abi.Data, index: Tensor, sizes: Tensor | None = None
) -> None:
    """Raise the error of a return code, with the value that caused it; the call changed nothing."""
    if code == abi.OK:
        return
    if code == abi.BAD_SIZE:
        raise HansaError(f"{where}: a batch size of {sizes} is not within 1..{index.shape[1]}.")
    if code == abi.BAD_ROW:
        bad = _first_outside(index, data.rows)
        raise HansaError(f"{where}: row {bad} does not exist, there are {data.rows}.")
    rows = index if sizes is None else torch.cat([row[:size] for row, size in zip(index, sizes.tolist(), strict=True)])
    inputs, _, labels = data.owners
    if code == abi.BAD_TOKEN:
        words = network.stages[0].words
        bad = _first_outside(inputs[rows.flatten()], words)
        raise HansaError(f"{where}: token {bad} is out of range, the embedding has {words} rows.")
    bad = _first_outside(labels[rows.flatten()], network.classes)
    raise HansaError(f"{where}: label {bad} does not exist, the network has {network.classes} classes.")


def _first_outside(numbers: Tensor, count: int) -> int:
    """Return the first number that is not within 0..count-1."""
    return int(numbers[(numbers < 0) | (numbers >= count)][0])


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} [{_inside(tensor.shape)}] on {tensor.device}"


def _inside(shape: Sequence[int]) -> str:
    return ", ".join(map(str, shape))


def fill_update(
    network: Network, update: abi.StepParameters, step: AffineStep, anchor: Tensor | None, velocity: Tensor | None
) -> None:
    """Write a step into its C structure."""
    for name, vector in (("shift", step.shift), ("velocity", velocity)):
        if vector is not None:
            network.check_vector(name, vector)
    if step.prox_weight and anchor is None:
        raise HansaError(f"AffineStep(prox_weight={step.prox_weight}): expected an anchor with it.")
    update.velocity = None if velocity is None else velocity.data_ptr()
    update.anchor = anchor.data_ptr() if step.prox_weight and anchor is not None else None
    update.shift = None if step.shift is None else step.shift.data_ptr()
    update.lr, update.prox_weight = step.lr, step.prox_weight
    update.weight_decay, update.momentum = step.weight_decay, step.momentum
    update.max_grad_norm = math.inf if step.max_grad_norm is None else step.max_grad_norm


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

    def write_to(self, place: abi.Stage) -> None:
        """Write the stage into its C structure."""
        place.kind, place.out, place.kernel, place.padding = self.kind, self.out, self.kernel, self.padding
        place.channels, place.height, place.width = self.shape
        place.relu = 2 if self.relu and self.relu_after_pool else int(self.relu)
        place.planar, place.stride = self.planar, self.stride
        place.weight, place.bias, place.drop = self.weight, self.bias, 0 if self.drop is None else self.drop.kind
        place.source, place.addend, place.activation = self.source, self.addend, self.activation
        place.alpha, place.eps, place.after_pool = self.alpha, self.eps, self.activation_after_pool
        place.words, place.skip, place.groups = self.words, self.skip, self.groups
        if self.pool is not None:
            place.pool, (place.pool_h, place.pool_w) = self.pool.kind, self.pool.size
            place.step_h, place.step_w = self.pool.step

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
