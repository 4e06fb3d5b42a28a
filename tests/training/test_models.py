"""Models: parameter counts by hand, shapes, determinism, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hansa.training.models import build, parameter_count
from mistakes import refused

CIFAR, DIGITS = (3, 32, 32), (1, 28, 28)


@pytest.mark.parametrize(
    ("name", "classes", "shape", "options", "expected"),
    [
        ("cnn_29k", 10, DIGITS, {}, 28_938),
        ("cnn_29k", 62, DIGITS, {}, 16 * 25 + 16 + 32 * 16 * 25 + 32 + 62 * (32 * 49 + 1)),
        ("cifar_cnn", 10, CIFAR, {}, 896 + 18_496 + 36_928 + 65_600 + 650),
        ("lenet", 10, CIFAR, {}, 456 + 2416 + 48_120 + 10_164 + 850),
        ("lenet", 10, DIGITS, {}, 156 + 2416 + 120 * 257 + 10_164 + 850),
        ("resnet18", 10, CIFAR, {}, 11_173_962),
        ("resnet18", 10, CIFAR, {"norm": "group"}, 11_173_962),
        ("resnet18", 100, CIFAR, {}, 11_173_962 + 90 * 513),
        ("convmixer", 10, CIFAR, {}, 3328 + 512 + 8 * (6656 + 512 + 65_792 + 512) + 2570),
        ("convmixer", 10, DIGITS, {"norm": "group"}, 1280 + 512 + 8 * (6656 + 512 + 65_792 + 512) + 2570),
        ("lstm", 80, (80,), {}, 6400 + 4 * 256 * (80 + 256 + 2) + 4 * 256 * (256 + 256 + 2) + 80 * 257),
        ("mlp", 10, DIGITS, {}, 159_010),
        ("mlp", 2, (2,), {"hidden": 10}, 52),
        ("mlp", 2, (2,), {"hidden": (4, 3)}, 12 + 15 + 8),
        ("logistic", 10, (60,), {}, 610),
    ],
)
def test_parameter_counts(
    name: str, classes: int, shape: tuple[int, ...], options: dict[str, Any], expected: int
) -> None:
    model = build(name, classes=classes, shape=shape, **options)
    assert parameter_count(model) == expected
    x = torch.randint(0, 80, (2, 80)) if name == "lstm" else torch.randn(2, *shape)
    assert model(x).shape == (2, classes)


def test_resnet18_keeps_the_image_until_its_second_stage() -> None:
    model = build("resnet18", classes=10, shape=CIFAR)
    assert isinstance(model, nn.Sequential)
    x, sides = torch.zeros(1, 3, 32, 32), []
    for layer in model[:-3]:  # type: ignore[attr-defined]
        x = layer(x)
        sides.append((x.shape[1], x.shape[2]))
    assert sides == [(64, 32)] * 5 + [(128, 16)] * 2 + [(256, 8)] * 2 + [(512, 4)] * 2


def test_group_norm_leaves_no_running_statistics() -> None:
    for name in ("resnet18", "convmixer"):
        assert list(build(name, classes=10, shape=CIFAR, norm="group").buffers()) == []
        assert list(build(name, classes=10, shape=CIFAR).buffers()) != []


def test_a_residual_block_with_zeroed_body_passes_its_input() -> None:
    model = build("resnet18", classes=10, shape=CIFAR)
    assert isinstance(model, nn.Sequential)
    block = model[3].eval()
    last = block.body[-1]
    assert isinstance(last, nn.BatchNorm2d)
    nn.init.zeros_(last.weight)
    x = torch.randn(2, 64, 8, 8).relu()
    assert torch.equal(block(x), x)


def test_lstm_equals_the_recurrence_written_out() -> None:
    torch.manual_seed(0)
    model = build("lstm", classes=80, shape=(80,), embedding=3, hidden=4, layers=1).double().eval()
    x = torch.randint(0, 80, (2, 5))
    w, u = model.lstm.weight_ih_l0, model.lstm.weight_hh_l0
    b = model.lstm.bias_ih_l0 + model.lstm.bias_hh_l0
    h, c = torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64)
    for step in range(5):
        i, f, g, o = (model.embedding.weight[x[:, step]] @ w.T + h @ u.T + b).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
    expected = h @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(x), expected)


test_wrong_names_options_and_images_are_refused = refused(
    (("resnet", {}), r"no model 'resnet'\. Did you mean resnet18"),
    (("transformer", {}), r"no model 'transformer'\. Known: cifar_cnn, cnn_29k"),
    (("mlp", {"hiden": 3}), r"mlp: no option 'hiden'\. Did you mean hidden"),
    (("logistic", {"hidden": 3}), r"logistic: no option 'hidden'\. It takes none"),
    (("mlp", {"hidden": 0}), r"mlp\(hidden=0\): expected a whole number >= 1"),
    (("resnet18", {"norm": "layer"}), r"resnet18\(norm='layer'\): expected 'batch' or 'group'"),
    (("resnet18", {"norm": "group", "groups": 7}), r"resnet18\(groups=7\): expected a divisor of 64"),
    (("convmixer", {"kernel": 4}), r"convmixer\(kernel=4\): expected an odd number"),
    (("convmixer", {"patch": 40}), "larger than the image, 32 x 32"),
    (("lstm", {}), r"lstm\(shape=\(3, 32, 32\)\): expected windows"),
    (("cnn_29k", {"shape": (784,)}), r"cnn_29k\(shape="),
    (("cnn_29k", {"shape": (1, 3, 28)}), r"cnn_29k\(shape="),
    (("cifar_cnn", {"shape": (3, 16, 32)}), r"cifar_cnn\(shape="),
    (("lenet", {"shape": (3, 15, 32)}), r"lenet\(shape="),
    by=lambda wrong: build(wrong[0], **{"classes": 10, "shape": CIFAR, **wrong[1]}),
)
