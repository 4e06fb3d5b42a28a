"""Augmentations of images: batches of shape [B, C, H, W], however they lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from hansa.core.errors import HansaError, check_finite, check_integer, invalid_argument
from hansa.training.augment.base import Augmentation


@dataclass(frozen=True, slots=True)
class crop(Augmentation):
    """Each image padded by ``padding`` pixels of ``fill`` on every side, and cut to its old size at a random place.

    ``fill`` is one number or one a channel. Images that are normalised already are padded with what black became,
    -mean / std, to equal torchvision's RandomCrop before its Normalize.

    >>> crop(padding=1)(torch.ones(2, 3, 8, 8), torch.Generator()).shape
    torch.Size([2, 3, 8, 8])
    """

    padding: int = 4
    fill: float | Sequence[float] = 0.0

    def __post_init__(self) -> None:
        check_integer("crop", "padding", self.padding)
        if isinstance(self.fill, Sequence):
            object.__setattr__(self, "fill", _numbers("crop", "fill", self.fill))
        else:
            check_finite("crop", "fill", self.fill)

    def __call__(self, batch: Any, generator: torch.Generator) -> torch.Tensor:
        images = _images("crop", batch)
        count, _, height, width = images.shape
        wide = self._padded(images)
        y, x = torch.randint(2 * self.padding + 1, (2, count, 1), generator=generator).to(images.device)
        rows, columns = y + torch.arange(height, device=y.device), x + torch.arange(width, device=x.device)
        each = torch.arange(count, device=y.device)[:, None, None]
        cut = wide.permute(0, 2, 3, 1)[each, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        return _like(cut, images)

    def _padded(self, images: torch.Tensor) -> torch.Tensor:
        edges = (self.padding,) * 4
        if not isinstance(self.fill, tuple):
            return torch.nn.functional.pad(images, edges, value=float(self.fill))  # type: ignore[arg-type]
        fill = _per_channel("crop", "fill", self.fill, images)
        wide = torch.nn.functional.pad(images, edges)
        wide[:] = fill
        wide[:, :, self.padding : -self.padding, self.padding : -self.padding] = images
        return wide


@dataclass(frozen=True, slots=True)
class flip(Augmentation):
    """Each image mirrored, left to right, with probability ``p``.

    >>> flip(p=1.0)(torch.tensor([[[[1.0, 2.0]]]]), torch.Generator()).tolist()
    [[[[2.0, 1.0]]]]
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        if isinstance(self.p, bool) or not isinstance(self.p, (int, float)) or not 0 <= self.p <= 1:
            raise invalid_argument("flip", "p", self.p, "0 <= p <= 1", "0.5 mirrors every other image.")

    def __call__(self, batch: Any, generator: torch.Generator) -> torch.Tensor:
        images = _images("flip", batch)
        mirrored = torch.rand(len(images), generator=generator).to(images.device) < self.p
        return _like(torch.where(mirrored[:, None, None, None], images.flip(3), images), images)


@dataclass(frozen=True, slots=True)
class normalize(Augmentation):
    """(x - mean) / std, channel by channel; of test rows too.

    >>> normalize(mean=[0.5], std=[0.25])(torch.ones(1, 1, 1, 2), torch.Generator()).tolist()
    [[[[2.0, 2.0]]]]
    """

    mean: Sequence[float]
    std: Sequence[float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", _numbers("normalize", "mean", self.mean))
        object.__setattr__(self, "std", _numbers("normalize", "std", self.std))
        if len(self.mean) != len(self.std) or not all(value > 0 for value in self.std):
            raise invalid_argument(
                "normalize", "std", self.std, f"{len(self.mean)} numbers above 0, as there are means"
            )

    @property
    def on_test(self) -> bool:
        return True

    def __call__(self, batch: Any, generator: torch.Generator) -> torch.Tensor:
        images = _images("normalize", batch)
        mean, std = (_per_channel("normalize", "mean", values, images) for values in (self.mean, self.std))
        return (images - mean) / std


def _images(part: str, batch: Any) -> torch.Tensor:
    if not isinstance(batch, torch.Tensor) or batch.ndim != 4 or not batch.is_floating_point():
        found = f"{batch.dtype} {list(batch.shape)}" if isinstance(batch, torch.Tensor) else type(batch).__name__
        raise HansaError(
            f"augment: {part} takes images, float [B, C, H, W], found {found}. Write a function of (batch, generator) "
            "for other inputs."
        )
    return batch


def _like(made: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """The new images in the memory order of the old: sums over them round alike then."""
    if images.is_contiguous():
        return made.contiguous()
    return made.contiguous(memory_format=torch.channels_last)


def _numbers(part: str, name: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise invalid_argument(part, name, values, "one number a channel")
    for value in values:
        check_finite(part, name, value)
    return tuple(map(float, values))


def _per_channel(part: str, name: str, values: Sequence[float], images: torch.Tensor) -> torch.Tensor:
    if len(values) != images.shape[1]:
        raise HansaError(f"augment: {part}({name}={list(values)}): the images have {images.shape[1]} channels.")
    return _column(tuple(values), images.dtype, images.device)


@lru_cache(maxsize=32)
def _column(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device).view(1, -1, 1, 1)
