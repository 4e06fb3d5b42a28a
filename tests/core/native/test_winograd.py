"""Convolutions of 3x3 and 5x5 before a pool, which are made with fewer products than sums have terms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, max_pool2d

from core.native.models import compile_network, distance, logits_of, parameters_of
from core.native.sets import in_each_set
from hansa.core.native.network import Network

SHAPES = [(3, 16, 32, 14, 14), (5, 16, 32, 14, 14), (5, 9, 20, 11, 17), (3, 40, 7, 9, 8), (5, 64, 5, 36, 33)]


def pooled(
    kernel: int, channels: int, out: int, height: int, width: int, relu: bool = True
) -> tuple[Network, nn.Conv2d, Tensor]:
    """A stack whose logits are the pooled outputs of one convolution, and its parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        conv = nn.Conv2d(channels, out, kernel, padding=1)
        features = out * ((height + 3 - kernel) // 2) * ((width + 3 - kernel) // 2)
        last = nn.Linear(features, features, bias=False)
    nn.init.eye_(last.weight)
    module = nn.Sequential(conv, *[nn.ReLU()] * relu, nn.MaxPool2d(2), nn.Flatten(), last)
    stack = compile_network(module, (channels, height, width))
    assert stack is not None
    return stack, conv, parameters_of(module)


def images(channels: int, height: int, width: int) -> Tensor:
    return torch.randn(5, channels, height, width, generator=torch.Generator().manual_seed(1))


@in_each_set
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_are_those_of_the_plain_sum_to_rounding(shape: tuple[int, ...], relu: bool) -> None:
    kernel, channels, out, height, width = shape
    stack, conv, y = pooled(kernel, channels, out, height, width, relu)
    x = images(channels, height, width)
    assert conv.bias is not None
    exact = conv2d(x.double(), conv.weight.double(), conv.bias.double(), padding=1)
    exact = max_pool2d(exact.relu() if relu else exact, 2).detach()
    found = logits_of(stack, y, x, torch.arange(5)).view_as(exact)
    assert distance(found, exact) < 1.5e-6
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()


@in_each_set
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
@pytest.mark.parametrize("kernel", [3, 5])
def test_what_is_no_number_stays_in_its_window(kernel: int, value: float) -> None:
    """Where torch gives inf or NaN so does the native form, in those outputs alone and in no other image."""
    stack, conv, y = pooled(kernel, 16, 8, 12, 12, relu=False)
    x = images(16, 12, 12)
    clean = logits_of(stack, y, x, torch.arange(5))
    x[2, 5, 6, 6] = value
    found = logits_of(stack, y, x, torch.arange(5))
    wanted = max_pool2d(conv(x), 2).detach()[2].flatten()
    assert torch.equal(found[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    if torch.isfinite(wanted).all():
        assert distance(found[2], wanted) < 1e-5
    else:  # the last layer, a product with zeros, spreads it
        assert not torch.isfinite(found[2]).all()
