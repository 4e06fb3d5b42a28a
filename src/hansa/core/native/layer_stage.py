"""One native stage: a layer with what follows it, as Python describes it to the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hansa.core.native import abi

if TYPE_CHECKING:  # commands that only read files import this module without torch
    from torch import Tensor


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
