"""Stacks for the native tests, and the plain PyTorch they are compared with."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hansa.core import native
from hansa.core.native.clients import ClientKernel
from hansa.core.native.network import AffineStep, Network, Workspace
from hansa.core.native.tracing import NotEligible, stages_of

ReLU, Flatten, Sequential = nn.ReLU, nn.Flatten, nn.Sequential
Conv, Linear = nn.Conv2d, nn.Linear
Shape = tuple[int, ...]


def pool() -> nn.Module:
    return nn.MaxPool2d(2)


def cnn_29k() -> nn.Sequential:
    first = [Conv(1, 16, 5, padding=2), ReLU(), pool()]
    return Sequential(*first, Conv(16, 32, 5, padding=2), ReLU(), pool(), Flatten(), Linear(1568, 10))


def cifar() -> nn.Sequential:
    """Nested, as models with named parts are."""
    parts = [Sequential(Conv(i, o, 3, padding="same"), ReLU(), pool()) for i, o in ((3, 32), (32, 64), (64, 64))]
    return Sequential(Sequential(*parts), Sequential(Flatten(), Linear(1024, 64), ReLU(), Linear(64, 10)))


def odd_sides() -> nn.Sequential:
    """Channels that fill no vector, rows that the pool drops, ReLU after the pool, layers without ReLU or bias."""
    first = [Conv(3, 20, 3), pool(), ReLU(), Conv(20, 35, 5, padding=1), Conv(35, 7, 3, bias=False), ReLU(), pool()]
    return Sequential(*first, Flatten(), Linear(28, 33), ReLU(), Linear(33, 5, bias=False))


def large_kernels() -> nn.Sequential:
    first = [Conv(4, 8, 7, padding=3), ReLU(), pool(), Conv(8, 9, 7, padding=1), ReLU()]
    return Sequential(*first, Flatten(), Linear(9 * 16, 4))


def no_pool() -> nn.Sequential:
    first = [Conv(2, 8, 3, padding=1), ReLU(), Conv(8, 8, 3, padding=2), ReLU(), Conv(8, 24, 1), pool()]
    return Sequential(*first, Flatten(), Linear(24 * 36, 4))


def many_channels() -> nn.Sequential:
    return Sequential(Conv(17, 18, 3, padding=1), ReLU(), pool(), Flatten(), Linear(18 * 6, 4))


def grey_3x3() -> nn.Sequential:
    return Sequential(Conv(1, 33, 3), ReLU(), pool(), Conv(33, 8, 3), pool(), Flatten(), Linear(32, 3))


def mean_pools() -> nn.Sequential:
    """ReLU before and after the mean, and none; a mean of all that is left."""
    first = [Conv(1, 6, 5, padding=2), ReLU(), nn.AvgPool2d(2), Conv(6, 20, 3), nn.AvgPool2d(2), ReLU()]
    return Sequential(*first, Conv(20, 17, 3, padding=1), nn.AvgPool2d(2, stride=1), Flatten(), Linear(17 * 16, 5))


def strides() -> nn.Sequential:
    """Kernels larger and smaller than the stride, sides that leave a rest, a stride before a pool."""
    first = [Conv(3, 18, 3, stride=2, padding=1), ReLU(), Conv(18, 20, 1, stride=2), ReLU(), Conv(20, 9, 4, stride=3)]
    return Sequential(*first, ReLU(), Conv(9, 33, 3, stride=2, padding=2), ReLU(), pool(), Flatten(), Linear(33, 4))


def wide_strides() -> nn.Sequential:
    first = [Conv(2, 16, 5, stride=4, padding=1), ReLU(), Conv(16, 7, 5, stride=2, padding=3, bias=False), ReLU()]
    return Sequential(*first, Flatten(), Linear(7 * 16, 4))


def other_pools() -> nn.Sequential:
    """Windows that overlap, leave gaps, are not square, or take the whole image."""
    first = [Conv(3, 20, 3, padding=1), ReLU(), nn.MaxPool2d(3, stride=2), Conv(20, 8, 2), nn.MaxPool2d((1, 2)), ReLU()]
    last = [Conv(8, 18, 3, padding=1), ReLU(), nn.MaxPool2d(2, stride=3), Conv(18, 16, 2, padding=1), ReLU()]
    return Sequential(*first, *last, nn.AdaptiveAvgPool2d(1), Flatten(), Linear(16, 4))


class Residual(nn.Sequential):
    """x + f(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def image_activations() -> nn.Sequential:
    """Without a pool, before and after maxima and means, with the fast pool and others, at odd numbers of channels."""
    first = [Conv(3, 9, 3, padding=1), nn.SiLU(), Conv(9, 20, 3, padding=1), nn.Tanh(), pool(), Conv(20, 18, 3), pool()]
    then = [nn.GELU(), Conv(18, 7, 2), nn.ELU(0.5), nn.AvgPool2d(2, 1), Conv(7, 33, 1, bias=False), nn.AvgPool2d(2)]
    return Sequential(*first, *then, nn.Sigmoid(), Flatten(), nn.LeakyReLU(0.3), Linear(33, 5))


def layer_norms() -> nn.Sequential:
    """Of the inputs, of what a convolution gave, without parameters, without bias, of the logits."""
    first = [Conv(2, 5, 3, padding=1), ReLU(), Flatten(), nn.LayerNorm(60), Linear(60, 33), nn.LayerNorm(33, eps=1e-2)]
    then = [ReLU(), Linear(33, 20), nn.LayerNorm(20, elementwise_affine=False), nn.SiLU(), nn.LayerNorm(20, bias=False)]
    return Sequential(*first, *then, Linear(20, 6), nn.LayerNorm(6))


def residuals() -> nn.Sequential:
    """Sums with the inputs, within sums, with ReLU before and after."""
    inner = Residual(Linear(35, 35), ReLU(), Linear(35, 35, bias=False))
    outer = Residual(nn.LayerNorm(35), Linear(35, 35), nn.SiLU(), inner, Linear(35, 35))
    return Sequential(Residual(Linear(23, 23)), nn.LayerNorm(23), Linear(23, 35), ReLU(), outer, ReLU(), Linear(35, 4))


def group_norms() -> nn.Sequential:
    """Of one group, of one channel each, without parameters; before pools of both kinds, behind an activation."""
    first = [
        Conv(3, 6, 3, padding=1, bias=False),
        nn.GroupNorm(3, 6),
        ReLU(),
        pool(),
        Conv(6, 20, 3),
        nn.GroupNorm(1, 20),
    ]
    then = [nn.SiLU(), nn.AvgPool2d(2, 1), Conv(20, 5, 2), nn.GELU(), nn.GroupNorm(5, 5, affine=False), nn.Tanh()]
    return Sequential(
        *first, *then, Conv(5, 18, 1), nn.GroupNorm(2, 18, eps=0.1), nn.AvgPool2d(2), Flatten(), Linear(18, 4)
    )


def image_residuals() -> nn.Sequential:
    """Sums with ReLU before and behind, within sums, with a maximum behind, and a mean of all that is left."""
    inner = Residual(Conv(17, 17, 3, padding=1), ReLU())
    first = [Conv(2, 17, 3), ReLU(), Residual(Conv(17, 17, 3, padding=1), nn.GroupNorm(1, 17), inner), ReLU()]
    then = [Residual(nn.GroupNorm(1, 17), nn.ELU(), Conv(17, 17, 1)), pool(), Conv(17, 8, 3), Residual(Conv(8, 8, 1))]
    return Sequential(*first, *then, nn.AdaptiveAvgPool2d(1), Flatten(), Linear(8, 3))


class MeanOfTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def embeddings() -> nn.Sequential:
    """A table of more rows than a batch has tokens, one of them without a gradient, at a width that fills no vector."""
    first = [nn.Embedding(200, 37, padding_idx=3), MeanOfTokens(), Linear(37, 20), nn.Tanh()]
    return Sequential(*first, Linear(20, 5))


def embedding_bag() -> nn.Sequential:
    """Sums, and fewer rows than tokens: each is touched several times."""
    return Sequential(nn.EmbeddingBag(5, 16, mode="sum"), nn.LayerNorm(16), Residual(Linear(16, 16)), Linear(16, 3))


STACKS: dict[str, tuple[Callable[[], nn.Module], Shape]] = {
    "single linear layer": (lambda: Linear(37, 3), (37,)),
    "MLP": (lambda: Sequential(Flatten(), Linear(784, 200), ReLU(), Linear(200, 10)), (1, 28, 28)),
    "MLP on colour": (lambda: Sequential(Flatten(), Linear(60, 21), ReLU(), Linear(21, 2)), (3, 5, 4)),
    "CNN-29k": (cnn_29k, (1, 28, 28)),
    "CIFAR CNN": (cifar, (3, 32, 32)),
    "odd sides": (odd_sides, (3, 19, 18)),
    "large kernels": (large_kernels, (4, 16, 16)),
    "no pool": (no_pool, (2, 10, 10)),
    "many channels": (many_channels, (17, 4, 6)),
    "grey, 3x3": (grey_3x3, (1, 14, 14)),
    "mean pools": (mean_pools, (1, 24, 24)),
    "strides": (strides, (3, 32, 35)),
    "wide strides": (wide_strides, (2, 21, 25)),
    "other pools": (other_pools, (3, 19, 22)),
    "activations of images": (image_activations, (3, 26, 27)),
    "layer norms": (layer_norms, (2, 3, 4)),
    "residuals": (residuals, (23,)),
    "images, group norms": (group_norms, (3, 13, 14)),
    "images, residuals": (image_residuals, (2, 11, 12)),
    "embeddings": (embeddings, (9,)),
    "embedding bag": (embedding_bag, (7,)),
}


def flatten(tensors: list[Tensor]) -> Tensor:
    """Hansa's layout, written out: convolution weights as O, H, W, I, all else as it is."""
    return torch.cat([(t.permute(0, 2, 3, 1) if t.ndim == 4 else t).reshape(-1) for t in tensors])


def pieces(module: nn.Module, flat: Tensor) -> list[Tensor]:
    """A flat vector cut into the parameters' shares."""
    return list(flat.split([p.numel() for p in module.parameters()]))


def parameters_of(module: nn.Module) -> Tensor:
    return flatten([p.detach() for p in module.parameters()])


def exact(module: nn.Module, shape: Shape, rows: int, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """The module with whole-numbered convolution weights, with whole-numbered inputs and labels.

    Every sum before the first linear layer is then exact in float32 in any order, so that ReLU and pool decide the same
    way everywhere, and among small whole numbers equal maxima abound.
    """
    draw = torch.Generator().manual_seed(seed)
    bound = 3.0
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, Conv):
                taps = layer.weight[0].numel()
                keep = torch.rand(layer.weight.shape, generator=draw) < 24 / taps
                signs = torch.randint(0, 2, layer.weight.shape, generator=draw) * 2.0 - 1
                layer.weight.copy_(signs * keep)
                bound *= float(layer.weight.abs().sum(dim=(1, 2, 3)).max())
                if layer.bias is not None:
                    layer.bias.copy_(torch.randint(-2, 3, layer.bias.shape, generator=draw).float())
                    bound += 2
            elif isinstance(layer, Linear):
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=draw))
                layer.weight /= math.sqrt(layer.in_features) * max(1.0, bound / 8)
                if layer.bias is not None:
                    layer.bias.copy_(torch.randn(layer.bias.shape, generator=draw) / 4)
                bound = 1.0
    assert bound < 2**24
    inputs = torch.randint(0, words_of(module) or 4, (rows, *shape), generator=draw)
    inputs = inputs if words_of(module) else inputs.float()
    with torch.no_grad():
        classes = module(inputs[:1]).shape[1]
    return module, inputs, torch.randint(0, classes, (rows,), generator=draw)


def smooth(module: nn.Module, shape: Shape, rows: int, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """The module as PyTorch starts it, with normal inputs: no two entries of a window are equal."""
    draw = torch.Generator().manual_seed(seed)
    words = words_of(module)
    inputs = (
        torch.randint(0, words, (rows, *shape), generator=draw) if words else torch.randn(rows, *shape, generator=draw)
    )
    with torch.no_grad():
        classes = module(inputs[:1]).shape[1]
    return module, inputs, torch.randint(0, classes, (rows,), generator=draw)


def words_of(module: nn.Module) -> int:
    """The number of tokens that a module takes; 0 if it takes real numbers."""
    tables = [part for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag))]
    return tables[0].num_embeddings if tables else 0


def cast(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """The inputs in another dtype, but for tokens."""
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def reference(module: nn.Module, inputs: Tensor, labels: Tensor, dtype: torch.dtype) -> tuple[float, Tensor]:
    """Mean cross-entropy and its flat gradient by autograd."""
    twin = copy.deepcopy(module).to(dtype)
    loss = cross_entropy(twin(cast(inputs, dtype)), labels)
    return float(loss.detach()), flatten(list(torch.autograd.grad(loss, list(twin.parameters()))))


def distance(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b|| in float64."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300))


def compile_network(module: nn.Module, input_shape: Sequence[int]) -> Network | None:
    """The native form of a module on inputs of the given shape, (C, H, W) or (features,); None where it has none."""
    if not native.available():
        return None
    try:
        return Network(stages_of(module, input_shape, tokens=words_of(module) > 0), tuple(input_shape))
    except NotEligible:
        return None


def train(
    network: Network, y: Tensor, inputs: Tensor, labels: Tensor, index: Tensor, step: AffineStep,
    keep: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Take a step in place for each row of the index; momentum starts from zero if the step has no velocity."""
    if step.momentum and step.velocity is None:
        step = replace(step, velocity=torch.zeros_like(y))
    return ClientKernel(network, inputs, labels).steps(y, index, step, keep)


def logits_of(network: Network, y: Tensor, inputs: Tensor, rows: Tensor) -> Tensor:
    """What evaluation computes of some rows, as many at a time as there."""
    data = network.examples(inputs, torch.zeros(len(inputs), dtype=torch.int64))
    found = []
    for piece in torch.split(rows, network.evaluation_batch):
        space, out = Workspace(network, len(piece)), torch.empty(len(piece), network.classes)
        batches = network.batch_index(piece[None], torch.ones(1, len(piece) * network.dropout_numbers))
        code = space.kernels.logits(space.handle, y.data_ptr(), byref(data), byref(batches), out.data_ptr())
        assert code == 0, code
        found.append(out)
    return torch.cat(found)
