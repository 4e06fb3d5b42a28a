"""Which modules are stacks: everything else must fall back to PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from core.native.models import Residual, cnn_29k, distance, parameters_of
from hansa.core.native.network import Network
from hansa.core.native.tracing import NotEligible, stages_of

SHAPE = (1, 8, 8)


def around(*layers: nn.Module, channels: int = 4, side: int = 4) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side * side, 2))


def conv(**options: object) -> nn.Conv2d:
    return nn.Conv2d(1, 4, 3, **{"padding": 1, **options})  # type: ignore[arg-type]


class DropsAlways(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x))


class MeanOfChannels(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = self[1](self[0](x).mean(1).flatten(1))
        return mean


class Calls(nn.Module):
    """A layer and a function that calls it."""

    def __init__(self, function: Callable[[nn.Linear, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(64, 2), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer, x)


class Calling(nn.Module):
    """A function of what comes in."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def conv_4() -> nn.Conv2d:
    return nn.Conv2d(4, 4, 3, padding=1)


class TwoScales(nn.Module):
    """Rows of an inner image and of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = conv(), conv_4(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(self.second(x).mean((2, 3)) + x.mean((2, 3)))


class TwoStems(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = conv(), conv(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.first(x) + self.second(x)).mean((2, 3)))


def drops_one_use(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    x = layer(x.flatten(1))
    return x.tanh() + nn.functional.dropout(x, 0.5, layer.training)


def changes_in_place(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    x = layer(x.flatten(1))
    before = x.view(-1, 2)
    x.relu_()
    return x + before


def frozen() -> nn.Module:
    module = around(conv(), nn.MaxPool2d(2))
    module[0].bias.requires_grad_(False)
    return module


def shared() -> nn.Module:
    layer = nn.Linear(64, 64)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer)


def tied() -> nn.Module:
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second)


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    module[1].register_forward_hook(lambda *_: None)
    return module


NOT_STACKS = {
    "dropout first": lambda: nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 2)),
    "dropout of everything": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.Dropout(1.0)),
    "dropout before a pool": lambda: around(conv(), nn.Dropout(), nn.MaxPool2d(2)),
    "alpha dropout": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.AlphaDropout()),
    "dropout in evaluation": lambda: DropsAlways(nn.Flatten(), nn.Linear(64, 2)),
    "batch norm": lambda: around(conv(), nn.BatchNorm2d(4), nn.MaxPool2d(2)),
    "other activation": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Softplus(), nn.Linear(3, 2)),
    "long stride": lambda: around(conv(stride=5), side=2),
    "even kernel, padding of the same": lambda: around(nn.Conv2d(1, 4, 4, padding="same"), side=8),
    "dilation": lambda: around(conv(dilation=2), side=6),
    "groups": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Flatten(), nn.Linear(256, 2)
    ),
    "oblong kernel": lambda: around(nn.Conv2d(1, 4, (3, 5), padding=(1, 2)), side=8),
    "reflected border": lambda: around(conv(padding_mode="reflect"), side=8),
    "padding beyond the kernel": lambda: around(conv(padding=3), side=12),
    "pool with a border": lambda: around(conv(), nn.MaxPool2d(2, padding=1), side=5),
    "mean by another divisor": lambda: around(conv(), nn.AvgPool2d(2, divisor_override=3)),
    "uneven windows": lambda: around(conv(), nn.AdaptiveAvgPool2d(3), side=3),
    "mean over channels": lambda: MeanOfChannels(conv(), nn.Linear(64, 2)),
    "pool rounded up": lambda: around(conv(padding=0), nn.MaxPool2d(2, ceil_mode=True), side=3),
    "pool first": lambda: nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 2)),
    "ReLU first": lambda: nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)),
    "no flatten": lambda: nn.Sequential(nn.Linear(8, 2)),
    "convolution last": lambda: nn.Sequential(conv(), nn.Flatten()),
    "wrong width": lambda: nn.Sequential(nn.Flatten(), nn.Linear(63, 2)),
    "wrong channels": lambda: around(nn.Conv2d(2, 4, 3, padding=1), side=8),
    "image eaten up": lambda: around(nn.Conv2d(1, 4, 9), side=1),
    "float64": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2)).double(),
    "sum of other shapes": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 1), Residual(nn.Linear(1, 3))),
    "sum of images and their mean": lambda: around(
        conv(), Calling(lambda x: x + nn.functional.avg_pool2d(x, 8)), side=8
    ),
    "sum of images and their channel": lambda: around(conv(), Calling(lambda x: x + x[:, :1]), side=8),
    "sum with the input": lambda: around(Residual(nn.Conv2d(1, 1, 3, padding=1)), channels=1, side=8),
    "sum of images with a factor": lambda: around(conv(), Calling(lambda x: torch.add(x, x, alpha=2)), side=8),
    "sum of images and a number": lambda: around(conv(), Calling(lambda x: x + 1), side=8),
    "ReLU of one of two uses of an image": lambda: around(conv(), Residual(nn.ReLU(), nn.Conv2d(4, 4, 1)), side=8),
    "activation of one of two uses of an image": lambda: around(conv(), Calling(lambda x: x + x.tanh()), side=8),
    "pool of one of two uses of an image": lambda: TwoScales(),
    "sum of flattened images": lambda: nn.Sequential(
        conv(),
        Calling(lambda x: x.flatten(1)),
        Residual(nn.Linear(256, 256)),
        Calling(lambda x: x.view(-1, 4, 8, 8)),
        conv_4(),
    ),
    "group norm of the input": lambda: around(nn.GroupNorm(1, 1), conv(), side=8),
    "group norm that is shared": lambda: (lambda norm: around(conv(), norm, conv_4(), norm, side=8))(
        nn.GroupNorm(2, 4)
    ),
    "group norm with weights of others": lambda: around(
        conv(), Calling(lambda x: nn.functional.group_norm(x, 2, torch.ones(4))), side=8
    ),
    "instance norm": lambda: around(conv(), nn.InstanceNorm2d(4), side=8),
    "two convolutions of the input": lambda: TwoStems(),
    "sum with a number": lambda: Calls(lambda layer, x: layer(x.flatten(1)) + 1.0),
    "sum with a weight": lambda: Calls(lambda layer, x: layer(x.flatten(1)) + layer.bias),
    "dropout of one of two uses": lambda: Calls(drops_one_use),
    "a view of what changes in place": lambda: Calls(changes_in_place),
    "a stage that is not used": lambda: Calls(lambda layer, x: (layer(x.flatten(1)), x.flatten(1)[:, :2])[1]),
    "two activations of an image": lambda: around(conv(), nn.SiLU(), nn.Tanh(), side=8),
    "ReLU of an activation of an image": lambda: around(conv(), nn.SiLU(), nn.ReLU(), side=8),
    "activation of a dropped image": lambda: around(conv(), nn.Dropout2d(), nn.Tanh(), side=8),
    "activation first, of an image": lambda: nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(64, 2)),
    "norm of images": lambda: around(conv(), nn.LayerNorm((4, 8, 8)), side=8),
    "norm of a part": lambda: nn.Sequential(nn.LayerNorm(8), nn.Flatten(), nn.Linear(64, 2)),
    "group norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.GroupNorm(2, 8), nn.Linear(8, 2)),
    "a module of its own": lambda: nn.Bilinear(2, 2, 2),
    "parametrised": lambda: nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(64, 2))),
    "frozen": frozen,
    "shared layer": shared,
    "tied weights": tied,
    "hooked": hooked,
    "empty": lambda: nn.Sequential(),
}


@pytest.mark.parametrize("name", NOT_STACKS)
def test_what_the_kernels_do_not_do_is_no_stack(name: str) -> None:
    with pytest.raises(NotEligible):
        stages_of(NOT_STACKS[name](), SHAPE)


class Tokens(nn.Module):
    """A table of embeddings, a layer, and a function of tokens that uses them."""

    def __init__(self, function: Callable[[nn.Embedding, nn.Linear, torch.Tensor], torch.Tensor], **options: object):
        super().__init__()
        self.table, self.layer, self.function = nn.Embedding(9, 6, **options), nn.Linear(6, 2), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.table, self.layer, x)


def mean_of(table: nn.Embedding, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return layer(table(x).mean(1))


class Bag(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.table, self.layer = nn.EmbeddingBag(9, 6, **options), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, **options: object) -> torch.Tensor:
        return self.layer(self.table(x, **options))


def over_all_rows(bag: nn.EmbeddingBag, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return layer(nn.functional.embedding_bag(x.flatten(), bag.weight, torch.arange(0, x.numel(), x.shape[1])))


NOT_TOKENS: dict[str, Callable[[], nn.Module]] = {
    "max_norm": lambda: Tokens(mean_of, max_norm=1.0),
    "scale_grad_by_freq": lambda: Tokens(mean_of, scale_grad_by_freq=True),
    "sparse": lambda: Tokens(mean_of, sparse=True),
    "mean over the width": lambda: Tokens(lambda table, layer, x: layer(table(x).mean(2))),
    "mean of everything": lambda: Tokens(lambda table, layer, x: layer(table(x).mean((1, 2)))),
    "mean twice": lambda: Tokens(lambda table, layer, x: layer(table(x).mean(1)).mean(1, keepdim=True)),
    "maximum": lambda: Tokens(lambda table, layer, x: layer(table(x).amax(1))),
    "flattened": lambda: Tokens(lambda table, layer, x: table(x).flatten(1)),
    "one position": lambda: Tokens(lambda table, layer, x: layer(table(x)[:, 0])),
    "activation of each": lambda: Tokens(lambda table, layer, x: layer(table(x).relu().mean(1))),
    "dropout of each": lambda: Tokens(lambda table, layer, x: layer(nn.functional.dropout(table(x)).mean(1))),
    "layer of each": lambda: Tokens(lambda table, layer, x: layer(table(x)).mean(1)),
    "layer of tokens": lambda: Tokens(lambda table, layer, x: layer(x.float()) + layer(table(x).mean(1))),
    "sum with tokens": lambda: Tokens(lambda table, layer, x: layer(table(x).mean(1) + x)),
    "used twice": lambda: Tokens(lambda table, layer, x: layer(table(x).mean(1) + table(x).sum(1))),
    "no gradient": lambda: Tokens(lambda table, layer, x: layer(table(x).detach().mean(1))),
    "other tokens": lambda: Tokens(lambda table, layer, x: layer(table(x + 1).mean(1))),
    "narrow tokens": lambda: Tokens(lambda table, layer, x: layer(table(x.int()).mean(1))),
    "tokens without embeddings": lambda: Tokens(lambda table, layer, x: layer(x)),
    "bag, maximum": lambda: Bag(mode="max"),
    "bag, padding": lambda: Bag(padding_idx=0),
    "bag, max_norm": lambda: Bag(max_norm=1.0),
    "bag, sparse": lambda: Bag(sparse=True),
    "bag with offsets": lambda: Tokens(over_all_rows),
}


@pytest.mark.parametrize("name", NOT_TOKENS)
def test_other_uses_of_embeddings_are_no_stack(name: str) -> None:
    with pytest.raises(NotEligible):
        stages_of(NOT_TOKENS[name](), (6,), tokens=True)


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_tokens_may_be_flattened_and_embedded_by_a_function(shape: tuple[int, ...]) -> None:
    """The last of several spellings; the row of the padding is counted from the end."""
    function = nn.functional.embedding
    module = Tokens(lambda t, layer, x: layer(torch.mean(function(x.long().view(len(x), -1), t.weight, -2), dim=-2)))
    (table, _) = stages_of(module, shape, tokens=True)
    assert (table.out, table.words, table.skip, table.shape) == (6, 9, 7, (1, 1, 6))
    with pytest.raises(NotEligible):
        stages_of(module, shape)  # real numbers


def test_layers_that_do_nothing_are_skipped_and_relu_twice_is_relu() -> None:
    plain = stages_of(cnn_29k(), (1, 28, 28))
    padded = nn.Sequential(nn.Identity(), *(part for layer in cnn_29k() for part in (layer, nn.Identity())))
    assert stages_of(padded, (1, 28, 28)) == plain
    twice = nn.Sequential(
        *(part for layer in cnn_29k() for part in ([layer, nn.ReLU()] if isinstance(layer, nn.ReLU) else [layer]))
    )
    assert stages_of(twice, (1, 28, 28)) == plain


def test_a_pooled_side_is_rounded_down() -> None:
    stages = stages_of(nn.Sequential(conv(padding=0), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2)), (1, 9, 8))
    assert stages[0].out_shape == (4, 3, 3)


def test_relu_is_merged_with_the_layer_before_unless_that_output_is_used_elsewhere() -> None:
    merged = stages_of(nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.ReLU()), SHAPE)
    assert [stage.relu for stage in merged] == [True]
    apart = stages_of(Calls(lambda layer, x: (lambda h: h + torch.relu(h))(layer(x.flatten(1)))), SHAPE)
    assert [(stage.relu, stage.source, stage.addend) for stage in apart] == [
        (False, -1, -1),
        (False, 0, -1),
        (False, 0, 1),
    ]


WRITINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": lambda x: torch.sigmoid(x),
    "sigmoid, method": lambda x: x.sigmoid(),
    "sigmoid, in place": lambda x: torch.sigmoid_(x),
    "tanh": lambda x: nn.functional.tanh(x),
    "tanh, in place": lambda x: x.tanh_(),
    "silu": lambda x: nn.functional.silu(x, inplace=True),
    "gelu": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "leaky": lambda x: nn.functional.leaky_relu_(x, 0.3),
    "elu": lambda x: nn.functional.elu(x, alpha=0.3),
    "sum in place": lambda x: x.add_(torch.tanh(x)),
    "sum of itself": lambda x: torch.add(x, x),
    "norm": lambda x: nn.functional.layer_norm(x, (2,), eps=0.1),
    "norm of torch": lambda x: torch.layer_norm(x, [2], eps=0.2),
}


@pytest.mark.parametrize("name", WRITINGS)
def test_functions_and_methods_are_stages_and_give_torchs_gradient(name: str) -> None:
    torch.manual_seed(0)
    module = Calls(lambda layer, x: WRITINGS[name](layer(x.flatten(1))))
    inputs, labels = torch.randn(5, *SHAPE), torch.tensor([0, 1, 1, 0, 1])
    network = Network(stages_of(module, SHAPE), SHAPE)
    _, gradient = network.gradient(parameters_of(module), inputs, labels, torch.arange(5))
    loss = nn.functional.cross_entropy(module(inputs), labels)
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
    assert distance(gradient, wanted) < 2e-6
