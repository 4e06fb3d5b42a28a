"""Small stacks of plain layers, which native code trains."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from hansa.core.errors import HansaError, check_integer

Shape = tuple[int, ...]


def image_shape(part: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """A shape of three axes, or a clear refusal."""
    if len(shape) != 3:
        raise HansaError(
            f"{part}(shape={tuple(shape)!r}): expected images, (channels, height, width). Try mlp or logistic."
        )
    channels, height, width = shape
    return channels, height, width


def logistic(*, classes: int, shape: Sequence[int]) -> nn.Sequential:
    """Logistic regression: one linear layer.

    >>> logistic(classes=10, shape=(1, 28, 28))[-1]
    Linear(in_features=784, out_features=10, bias=True)
    """
    check_integer("logistic", "classes", classes)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def mlp(*, classes: int, shape: Sequence[int], hidden: int | Sequence[int] = 200) -> nn.Sequential:
    """Linear layers with ReLU between: 784-200-10 has 159,010 parameters. ``hidden`` may be several widths.

    >>> sum(p.numel() for p in mlp(classes=10, shape=(1, 28, 28), hidden=(64, 32)).parameters())
    52650
    """
    check_integer("mlp", "classes", classes)
    widths = [hidden] if isinstance(hidden, int) else list(hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    last = math.prod(shape)
    for width in widths:
        check_integer("mlp", "hidden", width)
        layers += [nn.Linear(last, width), nn.ReLU()]
        last = width
    return nn.Sequential(*layers, nn.Linear(last, classes))


def cnn_29k(*, classes: int = 10, shape: Sequence[int] = (1, 28, 28)) -> nn.Sequential:
    """The CNN of [HAFED] F.3: 5 x 5 convolutions of 16 and 32 channels, each with ReLU and 2 x 2 max-pool, then linear.

    28,938 parameters at 1 x 28 x 28 and 10 classes.

    >>> sum(p.numel() for p in cnn_29k().parameters())
    28938
    """
    check_integer("cnn_29k", "classes", classes)
    channels, height, width = image_shape("cnn_29k", shape)
    if min(height, width) < 4:
        raise HansaError(f"cnn_29k(shape={tuple(shape)!r}): expected images of 4 x 4 or more, which two poolings need.")
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), classes),
    )


def cifar_cnn(*, classes: int = 10, shape: Sequence[int] = (3, 32, 32)) -> nn.Sequential:
    """The CIFAR CNN of [AWARE]: 3 x 3 convolutions of 32, 64, 64 channels, the first two pooled, linear 1024-64-10.

    122,570 parameters at 3 x 32 x 32 and 10 classes.

    >>> sum(p.numel() for p in cifar_cnn().parameters())
    122570
    """
    check_integer("cifar_cnn", "classes", classes)
    channels, height, width = image_shape("cifar_cnn", shape)
    sides = [((side - 2) // 2 - 2) // 2 - 2 for side in (height, width)]
    if min(sides) < 1:
        raise HansaError(f"cifar_cnn(shape={tuple(shape)!r}): expected images of 18 x 18 or more.")
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * sides[0] * sides[1], 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )
