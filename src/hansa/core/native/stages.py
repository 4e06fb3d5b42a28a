"""What a stage of a native stack is: a convolution or linear layer, with the ReLU, pool and dropout that follow it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hansa.core.native import abi


@dataclass(frozen=True, slots=True)
class Pool:
    """The maximum or the mean (``kind``) of windows of ``size``, ``step`` apart; both are (height, width).

    >>> Pool(abi.MAX, (3, 3), (2, 2)).of((8, 8))
    (3, 3)
    """

    kind: int
    size: tuple[int, int]
    step: tuple[int, int]

    def output_sides(self, image: tuple[int, int]) -> tuple[int, int]:
        """The sides that an image has after it."""
        high, wide = ((side - w) // s + 1 for side, w, s in zip(image, self.size, self.step, strict=True))
        return high, wide


@dataclass(frozen=True, slots=True)
class Drop:
    """Dropout with probability ``p``: of values, of values already flattened, or of whole channels (``kind``)."""

    kind: int
    p: float


@dataclass(frozen=True, slots=True)
class LayerStage:
    """One convolution or linear layer with what follows it. ``shape`` is its input as (channels, height, width),
    ``weight`` and ``bias`` are where its parameters begin in the flat vector; -1 is no bias. ``late`` says that ReLU
    follows a mean over windows, ``planar`` that images and the weights of a convolution lie as torch has them,
    (out, in, height, width), and not channels-last."""

    kind: int
    shape: tuple[int, int, int]
    out: int
    kernel: int = 0
    padding: int = 0
    relu: bool = False
    pool: Pool | None = None
    weight: int = 0
    bias: int = -1
    planar: bool = False
    stride: int = 1
    relu_after_pool: bool = False
    drop: Drop | None = None

    @property
    def out_shape(self) -> tuple[int, int, int]:
        if self.kind == abi.LINEAR:
            return self.out, 1, 1
        high, wide = ((side + 2 * self.padding - self.kernel) // self.stride + 1 for side in self.shape[1:])
        return self.out, *((high, wide) if self.pool is None else self.pool.output_sides((high, wide)))

    @property
    def dim(self) -> int:
        inputs = self.kernel**2 * self.shape[0] if self.kind == abi.CONV else math.prod(self.shape)
        return self.out * (inputs + (self.bias >= 0))

    @property
    def dropout_numbers(self) -> int:
        """How many numbers its dropout draws for a row."""
        if self.drop is None:
            return 0
        return self.out if self.drop.kind == abi.DROP_CHANNELS else math.prod(self.out_shape)

    def write_to(self, place: abi.Stage) -> None:
        """The same for C."""
        place.kind, place.out, place.kernel, place.padding = self.kind, self.out, self.kernel, self.padding
        place.channels, place.height, place.width = self.shape
        place.relu, place.planar, place.stride = self.relu + (self.relu and self.relu_after_pool), self.planar, self.stride
        place.weight, place.bias, place.drop = self.weight, self.bias, 0 if self.drop is None else self.drop.kind
        if self.pool is not None:
            place.pool, (place.pool_h, place.pool_w) = self.pool.kind, self.pool.size
            place.step_h, place.step_w = self.pool.step

    def draw(self, rows: int, generator: torch.Generator, out: Tensor) -> None:
        """What its dropout multiplies by, drawn as eager torch draws it for as many rows: the generator's numbers in
        the order in which the values lie in memory there, 0 or 1 / (1 - p). ``out`` is flat, in the kernels' order."""
        assert self.drop is not None
        if self.kind == abi.LINEAR or self.drop.kind != abi.DROP:
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
