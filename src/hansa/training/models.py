"""Models by name. Each is a plain ``nn.Module``; its initial weights depend only on torch's generator."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hansa.core.errors import HansaError, check_decay, check_integer, invalid_argument, suggestion

__all__ = [
    "MODELS",
    "build",
    "cifar_cnn",
    "cnn_29k",
    "convmixer",
    "describe",
    "lenet",
    "logistic",
    "lstm",
    "mlp",
    "parameter_count",
    "resnet18",
]

Norm = Callable[[int], nn.Module]


def logistic(*, classes: int, shape: Sequence[int]) -> nn.Sequential:
    """Logistic regression: one linear layer.

    Args:
        classes: Number of outputs.
        shape: Shape of one input; inputs are flattened.

    >>> logistic(classes=10, shape=(1, 28, 28))[-1]
    Linear(in_features=784, out_features=10, bias=True)
    """
    check_integer("logistic", "classes", classes)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def mlp(*, classes: int, shape: Sequence[int], hidden: int | Sequence[int] = 200) -> nn.Sequential:
    """Linear layers with ReLU between: 784-200-10 has 159,010 parameters.

    Args:
        classes: Number of outputs.
        shape: Shape of one input; inputs are flattened.
        hidden: Width of the hidden layer, or the widths of several.

    >>> sum(p.numel() for p in mlp(classes=10, shape=(1, 28, 28), hidden=(64, 32)).parameters())
    52650
    """
    check_integer("mlp", "classes", classes)
    widths = [hidden] if isinstance(hidden, int) else list(hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    inputs = math.prod(shape)
    for width in widths:
        check_integer("mlp", "hidden", width)
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


def cnn_29k(*, classes: int = 10, shape: Sequence[int] = (1, 28, 28)) -> nn.Sequential:
    """The CNN of [HAFED] F.3: 5 x 5 convolutions of 16 and 32 channels, each with ReLU and 2 x 2 max-pool, then linear.

    28,938 parameters at 1 x 28 x 28 and 10 classes.

    Args:
        classes: Number of outputs.
        shape: (channels, height, width) of one image.

    >>> sum(p.numel() for p in cnn_29k().parameters())
    28938
    """
    channels, height, width = _image_shape("cnn_29k", classes, shape, smallest=4)
    layers = [*_convolution(channels, 16, 5, padding=2), *_convolution(16, 32, 5, padding=2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32 * (height // 4) * (width // 4), classes))


def cifar_cnn(*, classes: int = 10, shape: Sequence[int] = (3, 32, 32)) -> nn.Sequential:
    """The CIFAR CNN of [AWARE]: 3 x 3 convolutions of 32, 64, 64 channels, the first two pooled, linear 1024-64-10.

    122,570 parameters at 3 x 32 x 32 and 10 classes.

    Args:
        classes: Number of outputs.
        shape: (channels, height, width) of one image.

    >>> sum(p.numel() for p in cifar_cnn().parameters())
    122570
    """
    channels, height, width = _image_shape("cifar_cnn", classes, shape, smallest=18)
    sides = [((side - 2) // 2 - 2) // 2 - 2 for side in (height, width)]
    layers = [*_convolution(channels, 32, 3), *_convolution(32, 64, 3), *_convolution(64, 64, 3)[:-1], nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64 * sides[0] * sides[1], 64), nn.ReLU(), nn.Linear(64, classes))


def lenet(*, classes: int = 10, shape: Sequence[int] = (3, 32, 32)) -> nn.Sequential:
    """LeNet-5 with ReLU and max-pool, the simple-cnn of NIID-Bench: 5 x 5 convolutions of 6 and 16 channels, each
    pooled, then linear layers of 120 and 84.

    62,006 parameters at 3 x 32 x 32 and 10 classes.

    Args:
        classes: Number of outputs.
        shape: (channels, height, width) of one image.

    >>> sum(p.numel() for p in lenet().parameters())
    62006
    """
    channels, height, width = _image_shape("lenet", classes, shape, smallest=16)
    sides = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    layers = [*_convolution(channels, 6, 5), *_convolution(6, 16, 5), nn.Flatten()]
    layers += [nn.Linear(16 * sides[0] * sides[1], 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(84, classes))


class ResidualBlock(nn.Module):
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

    Args:
        classes: Number of outputs.
        shape: (channels, height, width) of one image.
        norm: "batch" for BatchNorm, or "group" for GroupNorm, which has no running statistics.
        groups: Groups of GroupNorm; a divisor of 64.

    >>> sum(p.numel() for p in resnet18().parameters())
    11173962
    """
    channels, _, _ = _image_shape("resnet18", classes, shape)
    make_norm = _norm("resnet18", norm, groups, (64, 128, 256, 512))
    layers: list[nn.Module] = [nn.Conv2d(channels, 64, 3, padding=1, bias=False), make_norm(64), nn.ReLU()]
    inputs = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [ResidualBlock(inputs, width, stride, make_norm), ResidualBlock(width, width, 1, make_norm)]
        inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


class Residual(nn.Module):
    """x + body(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.body(x)
        return x + output


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

    Args:
        classes: Number of outputs.
        shape: (channels, height, width) of one image.
        width: Channels of every block.
        depth: Number of blocks.
        kernel: Side of the depthwise convolutions; odd.
        patch: Side of the patches.
        norm: "batch" for BatchNorm or "group" for GroupNorm.
        groups: Groups of GroupNorm; a divisor of ``width``.

    >>> sum(p.numel() for p in convmixer().parameters())
    594186
    """
    _check_integers("convmixer", classes=classes, width=width, depth=depth, kernel=kernel, patch=patch)
    if kernel % 2 == 0:
        raise invalid_argument("convmixer", "kernel", kernel, "an odd number, so that the image keeps its size")
    channels, height, breadth = _image_shape("convmixer", classes, shape)
    if min(height, breadth) < patch:
        raise HansaError(f"convmixer(patch={patch}): larger than the image, {height} x {breadth}.")
    make_norm = _norm("convmixer", norm, groups, (width,))
    layers: list[nn.Module] = [nn.Conv2d(channels, width, patch, stride=patch), nn.GELU(), make_norm(width)]
    for _ in range(depth):
        depthwise = nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width)
        layers.append(Residual(depthwise, nn.GELU(), make_norm(width)))
        layers += [nn.Conv2d(width, width, 1), nn.GELU(), make_norm(width)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


class NextCharacter(nn.Module):
    """Embedding, LSTM, dropout, linear: the logits of the character after the window."""

    def __init__(self, classes: int, embedding: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(x.long()))
        logits: torch.Tensor = self.head(self.dropout(states[:, -1]))
        return logits


def lstm(
    *,
    classes: int = 80,
    shape: Sequence[int] = (80,),
    embedding: int = 80,
    hidden: int = 256,
    layers: int = 2,
    dropout: float = 0.05,
) -> NextCharacter:
    """The next-character LSTM of [AFGA]: 899,408 parameters at 80 characters.

    Args:
        classes: Number of characters.
        shape: (length,) of one window of characters.
        embedding: Size of the embedding.
        hidden: Size of the hidden state.
        layers: Number of LSTM layers.
        dropout: Dropout probability before the linear layer.

    >>> sum(p.numel() for p in lstm().parameters())
    899408
    """
    _check_integers("lstm", classes=classes, embedding=embedding, hidden=hidden, layers=layers)
    check_decay("lstm", "dropout", dropout)
    if len(shape) != 1:
        raise HansaError(f"lstm(shape={tuple(shape)!r}): expected windows of characters, (length,).")
    return NextCharacter(classes, embedding, hidden, layers, dropout)


MODELS: dict[str, Callable[..., nn.Module]] = {
    model.__name__: model for model in (cifar_cnn, cnn_29k, convmixer, lenet, logistic, lstm, mlp, resnet18)
}


class ModelSummary(NamedTuple):
    """The size of a model for one shape of inputs: parameters and megabytes in float32, or why it does not fit."""

    name: str
    shape: tuple[int, ...]
    classes: int
    parameters: int | None
    megabytes: float | None
    error: str | None = None


def describe(name: str, shape: Sequence[int] | None = None, classes: int | None = None) -> ModelSummary:
    """Return the size of a model.

    Args:
        name: A key of `MODELS`.
        shape: Shape of one input; by default that of the model's paper, or 28 x 28 pixels.
        classes: Number of outputs; by default that of the model's paper, or 10.

    >>> describe("cnn_29k").parameters, describe("mlp", (20,), 2).parameters
    (28938, 4602)
    """
    defaults = {"shape": (1, 28, 28), "classes": 10, **(MODELS[name].__kwdefaults__ or {})}
    sizes = tuple(defaults["shape"] if shape is None else shape)
    outputs = int(defaults["classes"] if classes is None else classes)
    try:
        with torch.device("meta"):
            model = MODELS[name](classes=outputs, shape=sizes)
    except HansaError as error:
        return ModelSummary(name, sizes, outputs, None, None, str(error))
    count = parameter_count(model)
    return ModelSummary(name, sizes, outputs, count, 4 * count / 1e6)


def build(name: str, *, classes: int, shape: Sequence[int], **options: Any) -> nn.Module:
    """Return a new model by name; ``functools.partial(build, name, ...)`` is a factory for `Task`.

    Args:
        name: A key of `MODELS`.
        classes: Number of outputs.
        shape: Shape of one input.
        **options: Further arguments of the model.

    >>> parameter_count(build("cnn_29k", classes=10, shape=(1, 28, 28)))
    28938
    >>> build("cnn29k", classes=10, shape=(1, 28, 28))
    Traceback (most recent call last):
    hansa.core.errors.HansaError: no model 'cnn29k'. Did you mean cnn_29k?
    """
    factory = MODELS.get(name.replace("-", "_"))
    if factory is None:
        raise HansaError(f"no model {name!r}. {suggestion(name, MODELS)}")
    names = set(inspect.signature(factory).parameters) - {"classes", "shape"}
    for option in options.keys() - names:
        raise HansaError(f"{name}: no option {option!r}. {suggestion(option, names) if names else 'It takes none.'}")
    return factory(classes=classes, shape=tuple(shape), **options)


def parameter_count(model: nn.Module) -> int:
    """Return the number of trainable parameters.

    Args:
        model: Any module.

    >>> parameter_count(nn.Linear(3, 2))
    8
    """
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _convolution(inputs: int, outputs: int, kernel: int, padding: int = 0) -> list[nn.Module]:
    """Return a convolution with ReLU and 2 x 2 max-pool."""
    return [nn.Conv2d(inputs, outputs, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]


def _check_integers(part: str, **values: object) -> None:
    for argument, value in values.items():
        check_integer(part, argument, value)


def _image_shape(part: str, classes: int, shape: Sequence[int], smallest: int = 1) -> tuple[int, int, int]:
    check_integer(part, "classes", classes)
    if len(shape) != 3:
        raise HansaError(
            f"{part}(shape={tuple(shape)!r}): expected images, (channels, height, width). Try mlp or logistic."
        )
    channels, height, width = shape
    if min(height, width) < smallest:
        raise HansaError(f"{part}(shape={tuple(shape)!r}): expected images of {smallest} x {smallest} or more.")
    return channels, height, width


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
