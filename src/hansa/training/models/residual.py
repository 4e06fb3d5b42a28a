"""ResNet-18 with the stem for small images, and ConvMixer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.training.models.plain import image_shape

Norm = Callable[[int], nn.Module]


def _norm(part: str, kind: str, groups: int, widths: Sequence[int]) -> Norm:
    if kind == "batch":
        return nn.BatchNorm2d
    if kind != "group":
        raise invalid_argument(part, "norm", kind, "'batch' or 'group'")
    check_integer(part, "groups", groups)
    for width in widths:
        if width % groups:
            raise invalid_argument(part, "groups", groups, f"a divisor of {width} channels")
    return lambda channels: nn.GroupNorm(groups, channels)


class Block(nn.Module):
    """Two 3 x 3 convolutions around a shortcut (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            norm(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            norm(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18(
    *, classes: int = 10, shape: Sequence[int] = (3, 32, 32), norm: str = "batch", groups: int = 32
) -> nn.Sequential:
    """ResNet-18 with the CIFAR stem, a 3 x 3 convolution without pooling: 11,173,962 parameters at 10 classes.

    ``norm="group"`` puts GroupNorm in place of BatchNorm, with as many parameters and no running statistics.

    >>> sum(p.numel() for p in resnet18().parameters())
    11173962
    """
    check_integer("resnet18", "classes", classes)
    channels, _, _ = image_shape("resnet18", shape)
    make = _norm("resnet18", norm, groups, (64, 128, 256, 512))
    layers: list[nn.Module] = [nn.Conv2d(channels, 64, 3, padding=1, bias=False), make(64), nn.ReLU()]
    last = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(last, width, stride, make), Block(width, width, 1, make)]
        last = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


class Residual(nn.Module):
    """x + body(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.body(x)
        return x + mixed


def convmixer(
    *,
    classes: int = 10,
    shape: Sequence[int] = (3, 32, 32),
    width: int = 256,
    depth: int = 8,
    kernel: int = 5,
    patch: int = 2,
    norm: str = "batch",
    groups: int = 32,
) -> nn.Sequential:
    """ConvMixer (Trockman and Kolter 2022): patches, then depthwise and pointwise convolutions, GELU, normalisation.

    ConvMixer-256-8 with kernel 5 and patch 2 has 594,186 parameters at 3 channels and 10 classes.

    >>> sum(p.numel() for p in convmixer().parameters())
    594186
    """
    for argument, value in (
        ("classes", classes),
        ("width", width),
        ("depth", depth),
        ("kernel", kernel),
        ("patch", patch),
    ):
        check_integer("convmixer", argument, value)
    if kernel % 2 == 0:
        raise invalid_argument("convmixer", "kernel", kernel, "an odd number, so that the image keeps its size")
    channels, height, breadth = image_shape("convmixer", shape)
    if min(height, breadth) < patch:
        raise HansaError(f"convmixer(patch={patch}): larger than the image, {height} x {breadth}.")
    make = _norm("convmixer", norm, groups, (width,))
    layers: list[nn.Module] = [nn.Conv2d(channels, width, patch, stride=patch), nn.GELU(), make(width)]
    for _ in range(depth):
        depthwise = nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width)
        layers += [
            Residual(depthwise, nn.GELU(), make(width)),
            nn.Conv2d(width, width, 1),
            nn.GELU(),
            make(width),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
