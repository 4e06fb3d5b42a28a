"""Which modules are stacks: everything else must fall back to PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from core.native.models import STACKS, cnn_29k
from hansa.core.native.tracing import NotEligible, stages_of

SHAPE = (1, 8, 8)


def around(*layers: nn.Module, channels: int = 4, side: int = 4) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side * side, 2))


def conv(**options: object) -> nn.Conv2d:
    return nn.Conv2d(1, 4, 3, **{"padding": 1, **options})  # type: ignore[arg-type]


class Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class DropsAlways(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x))


class MeanOfChannels(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = self[1](self[0](x).mean(1).flatten(1))
        return mean


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
    "dropout twice": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.Dropout(), nn.Dropout()),
    "dropout of everything": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.Dropout(1.0)),
    "dropout before a pool": lambda: around(conv(), nn.Dropout(), nn.MaxPool2d(2)),
    "alpha dropout": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.AlphaDropout()),
    "dropout in evaluation": lambda: DropsAlways(nn.Flatten(), nn.Linear(64, 2)),
    "batch norm": lambda: around(conv(), nn.BatchNorm2d(4), nn.MaxPool2d(2)),
    "other activation": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Tanh(), nn.Linear(3, 2)),
    "long stride": lambda: around(conv(stride=5), side=2),
    "oblong stride": lambda: nn.Sequential(conv(stride=(1, 2)), nn.Flatten(), nn.Linear(128, 2)),
    "even kernel, padding of the same": lambda: around(nn.Conv2d(1, 4, 4, padding="same"), side=8),
    "dilation": lambda: around(conv(dilation=2), side=6),
    "groups": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Flatten(), nn.Linear(256, 2)
    ),
    "oblong kernel": lambda: around(nn.Conv2d(1, 4, (3, 5), padding=(1, 2)), side=8),
    "reflected border": lambda: around(conv(padding_mode="reflect"), side=8),
    "padding beyond the kernel": lambda: around(conv(padding=3), side=12),
    "pool with a border": lambda: around(conv(), nn.MaxPool2d(2, padding=1), side=5),
    "mean with a border": lambda: around(conv(), nn.AvgPool2d(2, padding=1), side=5),
    "mean by another divisor": lambda: around(conv(), nn.AvgPool2d(2, divisor_override=3)),
    "mean rounded up": lambda: around(conv(padding=0), nn.AvgPool2d(4, ceil_mode=True), side=2),
    "uneven windows": lambda: around(conv(), nn.AdaptiveAvgPool2d(3), side=3),
    "mean over channels": lambda: MeanOfChannels(conv(), nn.Linear(64, 2)),
    "pool rounded up": lambda: around(conv(padding=0), nn.MaxPool2d(2, ceil_mode=True), side=3),
    "two pools": lambda: around(conv(), nn.MaxPool2d(2), nn.MaxPool2d(2), side=2),
    "pool first": lambda: nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 2)),
    "ReLU first": lambda: nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)),
    "no flatten": lambda: nn.Sequential(nn.Linear(8, 2)),
    "convolution last": lambda: nn.Sequential(conv(), nn.Flatten()),
    "wrong width": lambda: nn.Sequential(nn.Flatten(), nn.Linear(63, 2)),
    "wrong channels": lambda: around(nn.Conv2d(2, 4, 3, padding=1), side=8),
    "image eaten up": lambda: around(nn.Conv2d(1, 4, 9), side=1),
    "float64": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2)).double(),
    "another forward": lambda: Residual(nn.Flatten(), nn.Linear(64, 2)),
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


@pytest.mark.parametrize("name", STACKS)
def test_stacks_are_recognised_with_as_many_parameters_as_the_module_has(name: str) -> None:
    make, shape = STACKS[name]
    module = make()
    stages = stages_of(module, shape)
    assert sum(stage.dim for stage in stages) == sum(p.numel() for p in module.parameters())


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
