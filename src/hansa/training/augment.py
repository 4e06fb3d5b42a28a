"""Augmentation: functions that training batches of inputs pass through, with randomness from the run's keys."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import torch

from hansa.core.bounds import Checked, bound
from hansa.core.devices import copy_to_device
from hansa.core.errors import HansaError, check_finite, check_fraction, check_function, check_integer, invalid_argument
from hansa.core.keys import Key

__all__ = ["Augmentation", "Pipeline", "as_pipeline", "crop", "flip", "normalize"]


class Augmentation(Protocol):
    """A function of (batch, generator) that returns the inputs the model sees.

    All randomness comes from ``generator``, a torch generator on the CPU. It is seeded for every round, client, step
    and position in the list, so a result depends neither on the worker nor on earlier draws.
    """

    @abstractmethod
    def __call__(self, batch: Any, generator: torch.Generator) -> Any: ...

    @property
    def on_test(self) -> bool:
        """Whether test rows pass through it too, as for a normalisation."""
        return False


Augment: TypeAlias = "Augmentation | Callable[[Any, torch.Generator], Any]"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Augmentations applied one after the other.

    Args:
        parts: The augmentations, first to last.
    """

    parts: tuple[Augment, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.parts)

    @property
    def has_user_code(self) -> bool:
        """Whether it has user-defined functions, which may draw from other generators."""
        return any(type(part).__module__ != __name__ for part in self.parts)

    def test_pipeline(self) -> Pipeline:
        """Return the augmentations that test rows pass through."""
        return Pipeline(tuple(part for part in self.parts if getattr(part, "on_test", False)))

    def __call__(self, batch: Any, key: Key, generator: torch.Generator) -> Any:
        """Apply all augmentations, each with ``generator`` seeded from its own address below ``key``."""
        for position, part in enumerate(self.parts):
            seed = int.from_bytes(key.child("augment", position).digest(8), "little") >> 1
            batch = part(batch, generator.manual_seed(seed))
            if batch is None:
                raise HansaError(f"augment: {part!r} returned None: expected the batch. Does it return it?")
        return batch


def as_pipeline(parts: Sequence[Augment] | Augment) -> Pipeline:
    """Check one augmentation or a list of them and return it as a `Pipeline`.

    >>> as_pipeline([crop(padding=4), flip()])
    Pipeline(parts=(crop(padding=4, fill=0.0), flip(p=0.5)))
    """
    augments = tuple(parts) if isinstance(parts, (list, tuple)) else (parts,)
    for part in augments:
        check_function("Task", "augment", part, "batch", "generator")
    return Pipeline(augments)


def _numbers(part: str, name: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise invalid_argument(part, name, values, "one number per channel")
    for value in values:
        check_finite(part, name, value)
    return tuple(map(float, values))


def _fill(part: str, name: str, value: Any) -> tuple[float, ...] | None:
    if isinstance(value, Sequence):
        return _numbers(part, name, value)
    check_finite(part, name, value)
    return None


class CheckedAugmentation(Checked, Augmentation):
    """The base class of Hansa's augmentations; so type checkers know what a list of several of them holds."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class crop(CheckedAugmentation):
    """Pad each image and cut it to its size at a random position, like torchvision's RandomCrop.

    Args:
        padding: Pixels added on every side.
        fill: Value of the added pixels, one number or one per channel. For images that are already normalised, use
            -mean / std, the value of black, to match torchvision's RandomCrop before its Normalize.

    >>> crop(padding=1)(torch.ones(2, 3, 8, 8), torch.Generator()).shape
    torch.Size([2, 3, 8, 8])
    """

    padding: int = field(default=4, metadata=bound(check_integer))
    fill: float | Sequence[float] = field(default=0.0, metadata=bound(_fill))

    def __call__(self, batch: Any, generator: torch.Generator) -> torch.Tensor:
        images = _check_images("crop", batch)
        count, _, height, width = images.shape
        padded = self._pad(images)
        offsets = torch.randint(2 * self.padding + 1, (2, count, 1), generator=generator)
        y, x = copy_to_device(offsets, images.device)
        rows, columns = y + torch.arange(height, device=y.device), x + torch.arange(width, device=x.device)
        index = torch.arange(count, device=y.device)[:, None, None]
        cut = padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        return _with_layout_of(images, cut)

    def _pad(self, images: torch.Tensor) -> torch.Tensor:
        edges = (self.padding,) * 4
        if not isinstance(self.fill, tuple):
            return torch.nn.functional.pad(images, edges, value=float(self.fill))  # type: ignore[arg-type]
        fill = _per_channel("crop", "fill", self.fill, images)
        padded = torch.nn.functional.pad(images, edges)
        padded[:] = fill
        padded[:, :, self.padding : -self.padding, self.padding : -self.padding] = images
        return padded


@dataclass(frozen=True, slots=True)
class flip(CheckedAugmentation):
    """Mirror each image left to right at random.

    Args:
        p: Probability of mirroring an image.

    >>> flip(p=1.0)(torch.tensor([[[[1.0, 2.0]]]]), torch.Generator()).tolist()
    [[[[2.0, 1.0]]]]
    """

    p: float = field(default=0.5, metadata=bound(check_fraction, "0.5 mirrors every other image.", above_zero=False))

    def __call__(self, batch: Any, generator: torch.Generator) -> torch.Tensor:
        images = _check_images("flip", batch)
        mirrored = copy_to_device(torch.rand(len(images), generator=generator), images.device) < self.p
        return _with_layout_of(images, torch.where(mirrored[:, None, None, None], images.flip(3), images))


@dataclass(frozen=True, slots=True)
class normalize(CheckedAugmentation):
    """(x - mean) / std for each channel, of training and test rows.

    Args:
        mean: One number per channel.
        std: One positive number per channel.

    >>> normalize(mean=[0.5], std=[0.25])(torch.ones(1, 1, 1, 2), torch.Generator()).tolist()
    [[[[2.0, 2.0]]]]
    """

    mean: Sequence[float] = field(metadata=bound(_numbers))
    std: Sequence[float] = field(metadata=bound(_numbers))

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if len(self.mean) != len(self.std) or not all(value > 0 for value in self.std):
            raise invalid_argument("normalize", "std", self.std, f"{len(self.mean)} numbers above 0, one for each mean")

    @property
    def on_test(self) -> bool:
        return True

    def __call__(self, batch: Any, generator: torch.Generator) -> torch.Tensor:
        images = _check_images("normalize", batch)
        mean, std = (_per_channel("normalize", "mean", values, images) for values in (self.mean, self.std))
        return (images - mean) / std


def _check_images(part: str, batch: Any) -> torch.Tensor:
    if not isinstance(batch, torch.Tensor) or batch.ndim != 4 or not batch.is_floating_point():
        actual = f"{batch.dtype} {list(batch.shape)}" if isinstance(batch, torch.Tensor) else type(batch).__name__
        raise HansaError(
            f"augment: {part} takes images, float [B, C, H, W], found {actual}. Write a function of (batch, generator) "
            "for other inputs."
        )
    return batch


def _with_layout_of(images: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Give the result the memory layout of the images, so that sums over it round alike."""
    if images.is_contiguous():
        return result.contiguous()
    return result.contiguous(memory_format=torch.channels_last)


def _per_channel(part: str, name: str, values: Sequence[float], images: torch.Tensor) -> torch.Tensor:
    if len(values) != images.shape[1]:
        raise HansaError(f"augment: {part}({name}={list(values)}): the images have {images.shape[1]} channels.")
    return _column(tuple(values), images.dtype, images.device)


@lru_cache(maxsize=32)
def _column(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device).view(1, -1, 1, 1)
