"""Data, models and tasks of the golden cases: tiny, with clients of unequal size and models written as users write them.

All numbers come from NumPy's PCG64 and no value depends on the library under test.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, log_softmax, max_pool2d, mse_loss, nll_loss, relu

import hansa

SIZES = (5, 40, 17, 9, 23, 12, 31, 7, 14, 26, 8, 19, 36, 11)
"""Samples by client; no two clients hold equally many."""

CLASSES = 4
TEST_ROWS = 30


def classes_by_client(shape: tuple[int, ...], sizes: tuple[int, ...] = SIZES, seed: int = 0) -> dict[str, Any]:
    """Noisy class centres; a client holds two neighbouring classes. Rows are shuffled, so that owners matter."""
    draw = np.random.default_rng(seed)
    owners = draw.permutation(np.repeat(np.arange(len(sizes)), sizes))
    labels = (owners + draw.integers(0, 2, len(owners))) % CLASSES
    test_labels = draw.integers(0, CLASSES, TEST_ROWS)
    centres = draw.standard_normal((CLASSES, *shape))
    train, test = (centres[each] + draw.standard_normal((len(each), *shape)) for each in (labels, test_labels))
    return {
        "x": train.astype(np.float32),
        "y": labels,
        "clients": owners,
        "test": (test.astype(np.float32), test_labels),
        "test_owners": draw.integers(0, len(sizes), TEST_ROWS),
    }


@cache
def federated(
    shape: tuple[int, ...], sizes: tuple[int, ...] = SIZES, *, owned: bool = False, dtype: torch.dtype = torch.float32
) -> Any:
    """The same as federated data; ``owned``: test rows have owners, so that clients are evaluated one by one."""
    arrays = classes_by_client(shape, sizes)
    owners = arrays.pop("test_owners")
    extra = {"test_clients": owners} if owned else {}
    return hansa.data.from_arrays(arrays.pop("x"), arrays.pop("y"), **arrays, **extra, dtype=dtype)


@cache
def numbers() -> Any:
    """A regression: three real targets a row."""
    arrays = classes_by_client((20,), seed=1)
    draw = np.random.default_rng(2)
    slope = draw.standard_normal((20, 3)).astype(np.float32) / 4
    test = arrays["test"][0]
    return hansa.data.from_arrays(
        arrays["x"], arrays["x"] @ slope, clients=arrays["clients"], test=(test, test @ slope)
    )


@cache
def weighted_rows() -> Any:
    """Classes whose rows count differently in the loss."""
    arrays = classes_by_client((20,), seed=3)
    weights = 0.5 + np.random.default_rng(4).random(len(arrays["y"]))
    return hansa.data.from_arrays(
        arrays["x"], arrays["y"], clients=arrays["clients"], test=arrays["test"], weights=weights.astype(np.float32)
    )


@cache
def sentences() -> Any:
    """Whole numbers, seven a row."""
    draw = np.random.default_rng(5)
    owners = draw.permutation(np.repeat(np.arange(len(SIZES)), SIZES))
    words = draw.integers(0, 11, (len(owners) + TEST_ROWS, 7))
    labels = words.sum(axis=1) % CLASSES
    rows = len(owners)
    return hansa.data.from_arrays(words[:rows], labels[:rows], clients=owners, test=(words[rows:], labels[rows:]))


def client_rows(client: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What a client holds where data is a function of its number."""
    draw = np.random.default_rng([6, client])
    rows = 5 + 3 * client
    labels = (client + draw.integers(0, 2, rows)) % CLASSES
    return (draw.standard_normal((rows, 20)) + labels[:, None]).astype(np.float32), labels


class Mlp(nn.Module):
    """Linear layers of widths that fill no vector register; native code trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(20, 19), nn.Linear(19, 13), nn.Linear(13, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(relu(self.second(relu(self.first(x)))))


class Cnn(nn.Module):
    """Grey images, 3x3 kernels with a pool after the first; native code trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 7, 3, padding=1), nn.Conv2d(7, 10, 3)
        self.head = nn.Linear(90, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(relu(self.first(x)), 2)
        return self.head(relu(self.second(x)).flatten(1))


class Colour(nn.Module):
    """Colour images, 5x5 and 3x3 kernels before pools, channel and plain dropout; native code trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 12, 5, padding=2), nn.Conv2d(12, 20, 3, padding=1)
        self.channels, self.drop, self.head = nn.Dropout2d(0.2), nn.Dropout(0.3), nn.Linear(180, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.channels(max_pool2d(relu(self.first(x)), 2))
        x = max_pool2d(relu(self.second(x)), 2)
        return self.head(self.drop(x.flatten(1)))


class Strided(nn.Module):
    """Strides, mean pools and a layer without bias, ending in log_softmax; native code trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 9, 3, stride=2, padding=1, bias=False), nn.Conv2d(9, 17, 3, padding=1)
        self.head = nn.Linear(17, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = avg_pool2d(relu(self.first(x)), 2)
        return log_softmax(self.head(relu(self.second(x)).mean((2, 3))), dim=1)


class Digits(nn.Module):
    """19,524 parameters: vectors longer than the blocks that compressors, servers and digests work in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 5, padding=2), nn.Conv2d(16, 32, 5, padding=2)
        self.head = nn.Linear(1568, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(relu(self.first(x)), 2)
        return self.head(max_pool2d(relu(self.second(x)), 2).flatten(1))


class Long(nn.Module):
    """An MLP of 71,000 parameters: longer than a chunk of 65,536."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(784, 90), nn.Linear(90, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(relu(self.first(x.flatten(1))))


class Dropping(nn.Module):
    """An MLP with dropout; native code trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(20, 24), nn.Dropout(0.4), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(relu(self.first(x))))


class Norm(nn.Module):
    """LayerNorm and tanh, which no native stage computes: eager PyTorch trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(20, 15), nn.LayerNorm(15), nn.Linear(15, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.first(x))))


class Noisy(nn.Module):
    """Dropout and noise of its own in a model that eager PyTorch trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(20, 15), nn.Dropout(0.3), nn.Linear(15, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(self.drop(x + 0.1 * torch.randn_like(x) if self.training else x))


class Batch(nn.Module):
    """Batch normalization on vectors: running statistics are buffers that travel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn, self.head = nn.Linear(20, 12), nn.BatchNorm1d(12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(relu(self.bn(self.first(x))))


class BatchImages(nn.Module):
    """Batch normalization on images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn, self.head = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Linear(150, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(max_pool2d(relu(self.bn(self.first(x))), 2).flatten(1))


class Groups(nn.Module):
    """Group normalization, whose images stay channels-first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.Linear(150, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(max_pool2d(nn.functional.gelu(self.norm(self.first(x))), 2).flatten(1))


class Words(nn.Module):
    """An embedding and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.recur, self.head = nn.Embedding(11, 6), nn.GRU(6, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recur(self.embed(x))[0][:, -1])


class Regression(nn.Module):
    """Three real outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(20, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)))


def double() -> nn.Module:
    """A model of float64 parameters."""
    return Norm().double()


def brighter(batch: Tensor, generator: torch.Generator) -> Tensor:
    """An augmentation written by a user."""
    return batch * (0.8 + 0.4 * torch.rand(len(batch), 1, 1, 1, generator=generator))


def smooth_l1_of_classes(output: Tensor, target: Tensor) -> Tensor:
    """A loss written by a user."""
    return nn.functional.smooth_l1_loss(output, nn.functional.one_hot(target, CLASSES).to(output.dtype))


def margin(output: Tensor, target: Tensor) -> Tensor:
    """A metric written by a user: mean probability of the right class."""
    return output.softmax(dim=1).gather(1, target[:, None]).mean()


VECTOR, GREY, COLOUR, LARGE = (20,), (1, 10, 10), (3, 12, 12), (1, 28, 28)
FEW = (9, 30, 13, 21)


def _shifts() -> list[Any]:
    return [hansa.augment.crop(2), hansa.augment.flip()]


TASKS: dict[str, Callable[[], Any]] = {
    # native stages
    "mlp": lambda: hansa.Task(Mlp, cross_entropy, federated(VECTOR)),
    "cnn": lambda: hansa.Task(Cnn, cross_entropy, federated(GREY)),
    "colour": lambda: hansa.Task(Colour, cross_entropy, federated(COLOUR)),
    "colour, augmented": lambda: hansa.Task(Colour, cross_entropy, federated(COLOUR), augment=_shifts()),
    "colour, own augmentation": lambda: hansa.Task(Strided, nll_loss, federated(COLOUR), augment=[brighter]),
    "strided": lambda: hansa.Task(Strided, nll_loss, federated(COLOUR)),
    "digits": lambda: hansa.Task(Digits, cross_entropy, federated(LARGE, FEW)),
    "long": lambda: hansa.Task(Long, cross_entropy, federated(LARGE, FEW)),
    "dropping": lambda: hansa.Task(Dropping, cross_entropy, federated(VECTOR)),
    "mlp, tested by client": lambda: hansa.Task(
        Mlp, cross_entropy, federated(VECTOR, owned=True), metrics={"margin": margin}
    ),
    "mlp, by function": lambda: hansa.Task(
        Mlp, cross_entropy, hansa.data.by_function(client_rows, clients=9, samples=[5 + 3 * i for i in range(9)])
    ),
    # eager PyTorch
    "mlp, eager": lambda: hansa.Task(Mlp, cross_entropy, federated(VECTOR), native=False),
    "cnn, eager": lambda: hansa.Task(Cnn, cross_entropy, federated(GREY), native=False),
    "colour, eager, augmented": lambda: hansa.Task(
        Colour, cross_entropy, federated(COLOUR), native=False, augment=_shifts()
    ),
    "norm": lambda: hansa.Task(Norm, cross_entropy, federated(VECTOR)),
    "norm, own loss": lambda: hansa.Task(Norm, smooth_l1_of_classes, federated(VECTOR)),
    "norm, tested by client": lambda: hansa.Task(Norm, cross_entropy, federated(VECTOR, owned=True)),
    "norm, weighted rows": lambda: hansa.Task(Norm, cross_entropy, weighted_rows()),
    "double": lambda: hansa.Task(double, cross_entropy, federated(VECTOR, dtype=torch.float64)),
    "noisy": lambda: hansa.Task(Noisy, cross_entropy, federated(VECTOR)),
    "batch": lambda: hansa.Task(Batch, cross_entropy, federated(VECTOR)),
    "batch, images": lambda: hansa.Task(BatchImages, cross_entropy, federated(GREY)),
    "groups": lambda: hansa.Task(Groups, cross_entropy, federated(GREY)),
    "words": lambda: hansa.Task(Words, cross_entropy, sentences()),
    "regression": lambda: hansa.Task(Regression, mse_loss, numbers()),
    # a function of a flat vector
    "quadratic": lambda: quadratic(),
}


def quadratic() -> Any:
    """A quadratic a client, each with its own number of rows, in float64."""
    draw = np.random.default_rng(7)
    rows = [torch.from_numpy(draw.standard_normal((size, 6))) for size in SIZES]
    return hansa.tasks.quadratic(rows, [torch.from_numpy(draw.standard_normal(len(each))) for each in rows])


@cache
def task(name: str) -> Any:
    """A task by name, made once in a process."""
    return TASKS[name]()
