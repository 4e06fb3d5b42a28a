"""Data, models and tasks of the golden cases: tiny, with clients of unequal size and models as users write them.

All numbers come from NumPy's PCG64 and no value depends on the library under test.
"""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
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


@cache
def spoilt(client: int) -> Any:
    """Data in which the last row of a client overflows the first time that it is in a batch."""
    arrays = classes_by_client(VECTOR)
    row = int(np.flatnonzero(arrays["clients"] == client)[-1])
    arrays["x"][row] = 3e38
    return hansa.data.from_arrays(arrays["x"], arrays["y"], clients=arrays["clients"], test=arrays["test"])


@cache
def two_inputs() -> Any:
    """Inputs of two tensors a row, which a model takes by name."""
    arrays = classes_by_client(VECTOR, seed=8)
    parts = [{"left": x[:, :12], "right": x[:, 12:]} for x in (arrays["x"], arrays["test"][0])]
    return hansa.data.from_arrays(parts[0], arrays["y"], clients=arrays["clients"], test=(parts[1], arrays["test"][1]))


def dealt(how: Callable[[], Any], clients: int = 11) -> Any:
    """Rows dealt by a partition."""
    arrays = classes_by_client(VECTOR, seed=9)
    return hansa.data.from_arrays(
        arrays["x"], arrays["y"], clients=clients, partition=how(), seed=3, test=arrays["test"]
    )


def mapped() -> Any:
    """Arrays that stay on disk, in a folder that goes with the process; images as bytes."""
    folder = tempfile.mkdtemp(prefix="golden-mapped-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    arrays = classes_by_client(GREY, seed=10)
    pixels = np.clip(128 + 40 * arrays["x"], 0, 255).astype(np.uint8)
    for name, array in {"inputs": pixels, "targets": arrays["y"], "owners": arrays["clients"]}.items():
        np.save(f"{folder}/{name}.npy", array)
    return hansa.data.from_memmap(folder)


def collated() -> Any:
    """Items that are put together when a batch needs them."""
    arrays = classes_by_client(VECTOR, seed=11)
    items = list(zip(arrays["x"], arrays["y"].tolist(), strict=True))

    def collate(some: Any) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(np.stack([x for x, _ in some])), torch.tensor([y for _, y in some])

    return hansa.data.from_items(items, collate, clients=arrays["clients"], test=items[:20])


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
    """LayerNorm and tanh, trained by eager PyTorch here."""

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
    """Three real outputs, or one logit a row."""

    def __init__(self, width: int = 10, outputs: int = 3) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(20, width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        output = self.head(torch.tanh(self.first(x)))
        return output if self.head.out_features > 1 else output[:, 0]


class Bytes(nn.Module):
    """Images as bytes, which the model scales itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Cnn()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(self.inner.head.weight.dtype) / 64 - 2)


class Pair(nn.Module):
    """Two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(12, 7), nn.Linear(8, 7), nn.Linear(7, CLASSES)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(left) * self.second(right)))


class Remembering(nn.Module):
    """State beside parameters and buffers: a count, a list, a tensor, and generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(20, 9), nn.Linear(9, CLASSES)
        self.calls, self.means, self.level = 0, [0.0], torch.zeros(9)
        self.torch_draw, self.numpy_draw = torch.Generator(), np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.training:
            self.calls += 1
            self.means.append(x.mean().item())
            self.level = 0.5 * self.level + x.detach().mean(0)
            noise = torch.randn(9, generator=self.torch_draw) + float(self.numpy_draw.standard_normal())
            x = x + 0.05 * noise + 0.1 * self.level + 0.01 * self.calls * self.means[-1]
        return self.head(x)


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


def first_half(output: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of whether a class is one of the first two."""
    return nn.functional.binary_cross_entropy_with_logits(output, (target < CLASSES // 2).to(output.dtype))


def total_loss(output: Tensor, target: Tensor) -> Tensor:
    """A sum over rows in place of a mean."""
    return cross_entropy(output, target, reduction="sum")


def bowl(client: int, x: Tensor) -> Tensor:
    """A function of a flat vector for each client."""
    return ((x - torch.linspace(-1, 1, len(x), dtype=x.dtype) * (client + 1)) ** 2).sum() / 9 + x.cos().sum()


VECTOR, GREY, COLOUR, LARGE = (20,), (1, 10, 10), (3, 12, 12), (1, 28, 28)
FEW = (9, 30, 13, 21)
MANY = tuple(2 + 7 * client % 5 for client in range(300))


def _shifts() -> list[Any]:
    return [hansa.augment.crop(2), hansa.augment.flip()]


NATIVE: dict[str, Callable[[], Any]] = {
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
        Mlp, cross_entropy, federated(VECTOR, owned=True), metrics={"margin": hansa.higher(margin)}
    ),
    "mlp, by function": lambda: hansa.Task(
        Mlp, cross_entropy, hansa.data.from_function(client_rows, clients=9, samples=[5 + 3 * i for i in range(9)])
    ),
    "spoilt": lambda: hansa.Task(Mlp, cross_entropy, spoilt(1)),
    "spoilt late": lambda: hansa.Task(Mlp, cross_entropy, spoilt(5)),
    "many": lambda: hansa.Task(Mlp, cross_entropy, federated(VECTOR, MANY)),
    "normalized": lambda: hansa.Task(
        Strided,
        nll_loss,
        federated(COLOUR),
        augment=[
            hansa.augment.normalize([0.1, 0.2, 0.3], [1.1, 1.2, 1.3]),
            hansa.augment.crop(1, fill=[0.1, 0.2, 0.3]),
        ],
    ),
    "dirichlet": lambda: hansa.Task(Mlp, cross_entropy, dealt(lambda: hansa.data.dirichlet(0.5))),
    "shards": lambda: hansa.Task(Mlp, cross_entropy, dealt(lambda: hansa.data.shards(22, 2))),
    "quantity skew": lambda: hansa.Task(Mlp, cross_entropy, dealt(lambda: hansa.data.quantity_skew(power=1.0))),
    "iid": lambda: hansa.Task(Mlp, cross_entropy, dealt(lambda: hansa.data.iid())),
    "synthetic": lambda: hansa.Task(
        partial(hansa.models.build, "logistic", classes=10, shape=(60,)),
        cross_entropy,
        hansa.data.federate("synthetic", clients=8, alpha=0.5, beta=0.5, largest=80),
    ),
    "fashion": lambda: hansa.Task(
        partial(hansa.models.build, "cnn_29k", classes=10, shape=(1, 28, 28)),
        cross_entropy,
        hansa.data.federate("fashion-mini", clients=15, seed=2),
    ),
    "hidden layers": lambda: built("mlp", GREY, hidden=(12, 7)),
}
"""Tasks that native stages train."""

TASKS: dict[str, Callable[[], Any]] = {
    **NATIVE,
    # eager PyTorch
    "mlp, eager": lambda: hansa.Task(Mlp, cross_entropy, federated(VECTOR), execution="eager"),
    "cnn, eager": lambda: hansa.Task(Cnn, cross_entropy, federated(GREY), execution="eager"),
    "colour, eager, augmented": lambda: hansa.Task(
        Colour, cross_entropy, federated(COLOUR), execution="eager", augment=_shifts()
    ),
    "norm": lambda: hansa.Task(Norm, cross_entropy, federated(VECTOR), execution="eager"),
    "norm, own loss": lambda: hansa.Task(Norm, smooth_l1_of_classes, federated(VECTOR)),
    "norm, tested by client": lambda: hansa.Task(Norm, cross_entropy, federated(VECTOR, owned=True), execution="eager"),
    "norm, weighted rows": lambda: hansa.Task(Norm, cross_entropy, weighted_rows(), execution="eager"),
    "double": lambda: hansa.Task(double, cross_entropy, federated(VECTOR, dtype=torch.float64)),
    "noisy": lambda: hansa.Task(Noisy, cross_entropy, federated(VECTOR)),
    "batch": lambda: hansa.Task(Batch, cross_entropy, federated(VECTOR)),
    "batch, images": lambda: hansa.Task(BatchImages, cross_entropy, federated(GREY)),
    "groups": lambda: hansa.Task(Groups, cross_entropy, federated(GREY)),
    "words": lambda: hansa.Task(Words, cross_entropy, sentences()),
    "regression": lambda: hansa.Task(Regression, mse_loss, numbers()),
    "spoilt, eager": lambda: hansa.Task(Mlp, cross_entropy, spoilt(1), execution="eager"),
    "pair": lambda: hansa.Task(Pair, cross_entropy, two_inputs()),
    "remembering": lambda: hansa.Task(Remembering, cross_entropy, federated(VECTOR)),
    "binary": lambda: hansa.Task(partial(Regression, 6, 1), first_half, federated(VECTOR)),
    "bytes, on disk": lambda: hansa.Task(Bytes, cross_entropy, mapped()),
    "collated": lambda: hansa.Task(Norm, cross_entropy, collated(), execution="eager"),
    "huber": lambda: hansa.Task(Regression, hansa.losses.huber(0.5), numbers()),
    "weighted classes": lambda: hansa.Task(
        Norm, hansa.losses.cross_entropy([1.0, 2.0, 0.5, 1.5], label_smoothing=0.1), federated(VECTOR)
    ),
    "torch weights": lambda: hansa.Task(
        Norm, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.5])), federated(VECTOR)
    ),
    "sum": lambda: hansa.Task(Norm, total_loss, federated(VECTOR), reduction="sum"),
    "convmixer": lambda: built("convmixer", COLOUR, width=8, depth=2, groups=4),
    "convmixer, groups": lambda: built("convmixer", COLOUR, width=8, depth=2, norm="group", groups=4),
    "resnet18": lambda: built("resnet18", (3, 8, 8)),
    # a function of a flat vector
    "quadratic": lambda: quadratic(),
    "function": lambda: hansa.training.function(bowl, clients=9, x0=torch.zeros(5), samples=[3 + i for i in range(9)]),
}


def built(name: str, shape: tuple[int, ...], **options: Any) -> Any:
    """A model of the catalogue."""
    make = partial(hansa.models.build, name, classes=CLASSES, shape=shape, **options)
    return hansa.Task(make, cross_entropy, federated(shape))


def quadratic() -> Any:
    """A quadratic a client, each with its own number of rows, in float64."""
    draw = np.random.default_rng(7)
    rows = [torch.from_numpy(draw.standard_normal((size, 6))) for size in SIZES]
    return hansa.training.quadratic(rows, [torch.from_numpy(draw.standard_normal(len(each))) for each in rows])


@cache
def task(name: str) -> Any:
    """A task by name, made once in a process."""
    return TASKS[name]()
