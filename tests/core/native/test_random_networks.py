"""Networks of random shape against autograd in float64: linear layers, activations, layer norms, sums, embeddings."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from core.native.models import distance, logits_of, parameters_of, reference, smooth, words_of
from core.native.sets import in_each_set
from hansa.core import native
from hansa.core.native.network import Network
from hansa.core.native.tracing import stages_of

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.unavailable_reason()}")

SMOOTH = [nn.Sigmoid, nn.Tanh, nn.SiLU, nn.GELU, lambda: nn.GELU("tanh"), lambda: nn.ELU(0.6)]
KINKED = [nn.ReLU, lambda: nn.LeakyReLU(0.1)]


class Tokens(nn.Module):
    """The mean or the sum of embeddings, from a table with or without a row that has no gradient, or a bag of them."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        words, self.mode = draw.randint(1, 60), draw.choice(["mean", "sum"])
        if draw.random() < 0.3:
            self.table: nn.Module = nn.EmbeddingBag(words, width, mode=self.mode)
        else:
            self.table = nn.Embedding(words, width, padding_idx=draw.choice([None, 0, -1, words // 2]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        if x.ndim == 2:
            return x
        return x.mean(dim=1) if self.mode == "mean" else torch.sum(x, -2, keepdim=True).squeeze(1)


class RandomNetwork(nn.Module):
    """Twelve operations, each on one or two of the values so far; then a head. Values that nothing took are added."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        width, self.features = draw.randint(1, 50), draw.randint(1, 40)
        stem = draw.random()
        self.shape: tuple[int, ...] = (2, 6, 5) if stem < 0.3 else (self.features,)
        self.stem: nn.Module = nn.Identity()
        if stem < 0.3:
            self.stem, self.features = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten()), 36
        elif stem > 0.7:
            self.stem, self.features = Tokens(random.Random(seed), width), width
        self.first = nn.Identity() if stem > 0.85 else nn.Linear(self.features, width)
        self.layers, self.takes = nn.ModuleList(), []
        for number in range(12):
            kind = draw.choice(["linear", "smooth", "smooth", "kinked", "norm", "add", "add"])
            self.takes.append([draw.randrange(number + 1), number if kind == "add" or draw.random() < 0.8 else -1])
            if kind == "linear":
                layer: nn.Module = nn.Linear(width, width, bias=draw.random() < 0.7)
            elif kind == "norm":
                layer = nn.LayerNorm(width, draw.choice([1e-5, 1e-2]), draw.random() < 0.8, draw.random() < 0.8)
            else:
                layer = {"add": nn.Identity, "smooth": draw.choice(SMOOTH), "kinked": draw.choice(KINKED)}[kind]()
            self.layers.append(layer)
        self.head, self.last = nn.Linear(width, draw.randint(2, 9)), draw.choice([nn.Identity, *SMOOTH])()

    def forward(self, x: Tensor) -> Tensor:
        values, taken = [self.first(self.stem(x))], set()
        for layer, (earlier, latest) in zip(self.layers, self.takes, strict=True):
            if isinstance(layer, nn.Identity):
                values.append(values[earlier] + values[latest])
                taken |= {earlier, latest}
            else:
                chosen = latest if latest >= 0 else earlier
                values.append(layer(values[chosen]))
                taken.add(chosen)
        total = values[-1]
        for number, value in enumerate(values[:-1]):
            if number not in taken:
                total = total + value
        return self.last(self.head(total))


def network(seed: int) -> tuple[Network, nn.Module, Tensor, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = RandomNetwork(seed)
        for parameter in module.parameters():  # layer norms of ones and zeros would hide their parameters
            if parameter.ndim == 1:
                nn.init.normal_(parameter, 0.5, 0.5)
        module, inputs, labels = smooth(module, module.shape, 11, seed)
        return (
            Network(stages_of(module, module.shape, tokens=words_of(module) > 0), module.shape),
            module,
            parameters_of(module),
            inputs,
            labels,
        )


@in_each_set
@pytest.mark.parametrize("seed", range(40))
def test_loss_and_gradient_are_autograds(seed: int) -> None:
    stack, module, y, inputs, labels = network(seed)
    loss, gradient = stack.gradient(y, inputs, labels, torch.arange(11))
    wanted, true = reference(module, inputs, labels, torch.float64)
    eager_loss, eager = reference(module, inputs, labels, torch.float32)
    assert abs(loss - wanted) <= 2e-6 * abs(wanted) + 2 * abs(eager_loss - wanted)
    assert distance(gradient, true) < 2e-6 + 4 * distance(eager, true)


ACTIVATIONS: dict[str, nn.Module] = {
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "SiLU": nn.SiLU(),
    "GELU": nn.GELU(),
    "GELU by tanh": nn.GELU("tanh"),
    "LeakyReLU": nn.LeakyReLU(0.1),
    "ELU": nn.ELU(0.6),
}


@in_each_set
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_exact_to_a_few_units_in_the_last_place(name: str) -> None:
    """Behind a layer that changes nothing, from tiny to huge inputs; 1e-8 absolute in the tails that vanish."""
    width = 48
    layer = nn.Linear(width, width)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    stack = Network(stages_of(nn.Sequential(layer, ACTIVATIONS[name]), (width,)), (width,))
    ends = torch.logspace(-6, 2, 40 * width // 2)
    inputs = torch.cat([torch.linspace(-12, 12, 200 * width), ends, -ends]).view(-1, width)
    found = logits_of(stack, parameters_of(layer), inputs, torch.arange(len(inputs))).double()
    true, eager = ACTIVATIONS[name](inputs.double()), ACTIVATIONS[name](inputs).double()
    allowed = 4 * 2.0**-23 * true.abs() + (eager - true).abs() + 1e-8 * (inputs < -1)
    assert bool(((found - true).abs() <= allowed).all())
    assert float((found - true).abs().max()) < 1e-5
