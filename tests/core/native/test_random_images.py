"""Networks on images of random shape against autograd in float64: convolutions, group norms, sums, pools."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from core.native.models import distance, flatten, logits_of, parameters_of, reference, smooth, train
from core.native.sets import in_each_set
from hansa.core import native
from hansa.core.native import abi
from hansa.core.native.network import AffineStep, Network
from hansa.core.native.tracing import stages_of

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.unavailable_reason()}")

ACTIVATIONS = [nn.ReLU, nn.ReLU, nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid, lambda: nn.LeakyReLU(0.2), lambda: nn.ELU(0.7)]
POOLS = [
    lambda: nn.MaxPool2d(2),
    lambda: nn.AvgPool2d(2),
    lambda: nn.MaxPool2d(3, stride=2),
    lambda: nn.AvgPool2d(3, 1),
]


def norm(draw: random.Random, channels: int) -> nn.Module:
    groups = draw.choice([count for count in range(1, channels + 1) if channels % count == 0])
    return nn.GroupNorm(groups, channels, eps=draw.choice([1e-5, 1e-2]), affine=draw.random() < 0.7)


class Level(nn.Module):
    """Six operations on images of one shape, each on one or two of those so far. What nothing took is added."""

    def __init__(self, draw: random.Random, channels: int, drop: float) -> None:
        super().__init__()
        self.layers, self.afters, self.takes = nn.ModuleList(), nn.ModuleList(), []
        for number in range(6):
            kind = draw.choice(["convolution", "norm", "norm", "add", "add"])
            self.takes.append([draw.randrange(number + 1), number if kind == "add" or draw.random() < 0.8 else -1])
            layers: list[nn.Module] = []
            if kind == "convolution":
                side = draw.choice([1, 3, 5])
                layers.append(nn.Conv2d(channels, channels, side, padding=side // 2, bias=draw.random() < 0.5))
            elif kind == "norm":
                layers.append(norm(draw, channels))
            after = draw.choice([*ACTIVATIONS, nn.Identity, nn.Identity])()
            dropped = nn.Dropout(drop) if number < 5 and draw.random() < 0.3 and drop else nn.Identity()
            self.layers.append(nn.Sequential(*layers))
            self.afters.append(nn.Sequential(after, dropped))

    def forward(self, x: Tensor) -> Tensor:
        values, taken = [x], set()
        for layer, after, (earlier, latest) in zip(self.layers, self.afters, self.takes, strict=True):
            if isinstance(layer, nn.Sequential) and len(layer):
                chosen = latest if latest >= 0 else earlier
                values.append(after(layer(values[chosen])))
                taken.add(chosen)
            else:
                values.append(after(values[earlier] + values[latest]))
                taken |= {earlier, latest}
        total = values[-1]
        for number, value in enumerate(values[:-1]):
            if number not in taken:
                total = total + value
        return total


class RandomImages(nn.Module):
    """A convolution, a level, a pool or a stride with a shortcut, a level, and a head on what is left or its mean."""

    def __init__(self, seed: int, drop: float = 0.0) -> None:
        super().__init__()
        draw = random.Random(seed)
        first, second = draw.choice([1, 3, 5, 8, 16, 20]), draw.choice([2, 6, 8, 17, 33])
        self.shape = (draw.choice([1, 2, 3]), draw.randint(7, 11), draw.randint(7, 11))
        self.stem = nn.Conv2d(self.shape[0], first, 3, stride=draw.choice([1, 1, 2]), padding=1)
        self.before, self.after = Level(draw, first, drop), Level(draw, second, drop)
        self.pool = draw.choice(POOLS)() if draw.random() < 0.4 and self.stem.stride[0] == 1 else nn.Identity()
        stride = draw.choice([1, 2])
        self.down = nn.Sequential(nn.Conv2d(first, second, 3, stride=stride, padding=1, bias=False), norm(draw, second))
        self.short = nn.Conv2d(first, second, 1, stride=stride)
        self.last = draw.choice([nn.AdaptiveAvgPool2d(1), nn.Identity()])
        with torch.no_grad():
            features = self.features(torch.zeros(1, *self.shape)).shape[1]
        self.head = nn.Linear(features, draw.randint(2, 6))

    def features(self, x: Tensor) -> Tensor:
        x = self.pool(self.before(self.stem(x)))
        x = torch.relu(self.down(x) + self.short(x))
        return self.last(self.after(x)).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def network(seed: int, drop: float = 0.0) -> tuple[Network, nn.Module, Tensor, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = RandomImages(seed, drop)
        for parameter in module.parameters():  # norms of ones and zeros would hide their parameters
            if parameter.ndim == 1:
                nn.init.normal_(parameter, 0.5, 0.5)
        module, inputs, labels = smooth(module, module.shape, 7, seed)
        stages = stages_of(module, module.shape)
    assert {abi.GROUP_NORM, abi.IMAGE_ADD} <= {stage.kind for stage in stages}
    return Network(stages, module.shape), module, parameters_of(module), inputs, labels


@in_each_set
@pytest.mark.parametrize("seed", range(40))
def test_loss_and_gradient_are_autograds(seed: int) -> None:
    stack, module, y, inputs, labels = network(seed)
    loss, gradient = stack.gradient(y, inputs, labels, torch.arange(7))
    wanted, true = reference(module, inputs, labels, torch.float64)
    eager_loss, eager = reference(module, inputs, labels, torch.float32)
    assert abs(loss - wanted) <= 4e-6 * abs(wanted) + 2 * abs(eager_loss - wanted)
    assert distance(gradient, true) < 4e-6 + 4 * distance(eager, true)


@in_each_set
@pytest.mark.parametrize("seed", range(8))
def test_dropout_drops_what_torch_drops(seed: int) -> None:
    stack, module, y, inputs, labels = network(seed, drop=0.3)
    generator, keep = torch.Generator().manual_seed(7), torch.empty(7 * stack.dropout_numbers)
    stack.draw(7, generator, keep)
    losses, gradients = [], []
    for dtype in (torch.float64, torch.float32):
        twin = copy.deepcopy(module).to(dtype).to(memory_format=torch.channels_last)
        images = inputs.to(dtype).contiguous(memory_format=torch.channels_last)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            loss = cross_entropy(twin(images), labels)
        losses.append(float(loss.detach()))
        gradients.append(flatten(list(torch.autograd.grad(loss, list(twin.parameters())))))
    loss_here, gradient = stack.gradient(y, inputs, labels, torch.arange(7), keep=keep if len(keep) else None)
    assert loss_here == pytest.approx(losses[0], rel=1e-5)
    assert distance(gradient, gradients[0]) < 4e-6 + 4 * distance(gradients[1], gradients[0])


@in_each_set
@pytest.mark.parametrize("seed", range(6))
def test_batches_of_other_sizes_leave_nothing_behind(seed: int) -> None:
    """A workspace that held a larger batch, or another model, gives the bits of a new one."""
    stack, _, y, inputs, labels = network(seed)
    rows, fresh = torch.arange(4), network(seed)[0]
    stack.gradient(-2 * y, 1e3 * inputs, labels, torch.arange(7))
    assert torch.equal(stack.gradient(y, inputs, labels, rows)[1], fresh.gradient(y, inputs, labels, rows)[1])
    stepped = y.clone()
    train(stack, stepped, inputs, labels, rows[None], AffineStep(0.125))
    torch.testing.assert_close(stepped, y - 0.125 * stack.gradient(y, inputs, labels, rows)[1], rtol=3e-7, atol=1e-7)


@in_each_set
@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_group_norms_are_exact_where_the_mean_is_large(shift: float) -> None:
    """A convolution that adds a constant: mean and variance are taken in two passes."""
    layer = nn.Conv2d(4, 4, 1)
    module = nn.Sequential(layer, nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4 * 36, 3))
    nn.init.dirac_(layer.weight)
    nn.init.constant_(layer.bias, shift)
    stack = Network(stages_of(module, (4, 6, 6)), (4, 6, 6))
    inputs = torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    logits = logits_of(stack, parameters_of(module), inputs, torch.arange(3))
    with torch.no_grad():
        true, eager = module.double()(inputs.double()), module.float()(inputs)
    assert distance(logits, true) < 1e-6 + 2 * distance(eager, true)


@in_each_set
def test_what_is_not_a_number_stays_within_its_image() -> None:
    stack, _, y, inputs, labels = network(3)
    wanted = logits_of(stack, y, inputs, torch.arange(7))
    inputs[2, 0, 3, 3] = float("nan")
    logits = logits_of(stack, y, inputs, torch.arange(7))
    assert logits[2].isnan().all()
    others = torch.tensor([0, 1, 3, 4, 5, 6])
    assert torch.equal(logits[others], wanted[others])
    assert torch.isnan(torch.tensor(stack.gradient(y, inputs, labels, torch.arange(7))[0]))
