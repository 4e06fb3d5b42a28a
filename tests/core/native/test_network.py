"""Native stacks against autograd: gradients, the whole local phase, evaluation, repeatability, bad input."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from core.native.models import (
    STACKS,
    cast,
    compile_network,
    distance,
    exact,
    flatten,
    logits_of,
    parameters_of,
    pieces,
    reference,
    smooth,
    train,
)
from core.native.sets import in_each_set
from hansa.core import native
from hansa.core.errors import HansaError
from hansa.core.native import network as network_module
from hansa.core.native.network import AffineStep, Network

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.unavailable_reason()}")
ROWS = 12


def compiled(module: nn.Module, shape: tuple[int, ...]) -> Network:
    stack = compile_network(module, shape)
    assert stack is not None
    return stack


def case(name: str, kind: Any = exact) -> tuple[Network, nn.Module, Tensor, Tensor, Tensor]:
    make, shape = STACKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, inputs, labels = kind(make(), shape, ROWS)
    return compiled(module, shape), module, parameters_of(module), inputs, labels


@in_each_set
@pytest.mark.parametrize("name", STACKS)
def test_loss_and_gradient_are_autograds_layer_by_layer(name: str) -> None:
    stack, module, y, inputs, labels = case(name, smooth if name.startswith(("activations", "images")) else exact)
    rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[:7]
    loss, gradient = stack.gradient(y, inputs, labels, rows)
    wanted, exact_gradient = reference(module, inputs[rows], labels[rows], torch.float64)
    _, eager = reference(module, inputs[rows], labels[rows], torch.float32)
    assert loss == pytest.approx(wanted, rel=2e-6)
    assert stack.dim == y.numel()
    for place, ours, true, plain in zip(
        module.state_dict(), *(pieces(module, g) for g in (gradient, exact_gradient, eager)), strict=True
    ):
        assert distance(ours, true) < 1e-5, place
        assert distance(ours, plain) < 1e-5, place


@in_each_set
@pytest.mark.parametrize("channels", [1, 2, 16])
@pytest.mark.parametrize("columns", [[1.0, 2.0, 5.0, 1.0], [1.0, 2.0, 5.0, 3.0, 7.0, 1.0]], ids=["3x3", "5x5"])
def test_equal_maxima_go_to_the_first_as_in_torch(columns: list[float], channels: int) -> None:
    """Columns 1 2 5 1 under a kernel of ones: the four sums that the pool compares are equal, their windows are not,
    and the weights' gradient is a multiple of the first window, 1 2 5."""
    kernel = len(columns) - 1
    module = nn.Sequential(nn.Conv2d(channels, 1, kernel), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1, 2))
    with torch.no_grad():
        module[0].weight.fill_(1)
        module[0].bias.fill_(1 - kernel * sum(columns[1:]) * channels)  # so that the output is 1
        module[4].weight.copy_(torch.tensor([[0.5], [-0.5]]))
    row = torch.tensor(columns)
    stack, inputs = compiled(module, (channels, kernel + 1, kernel + 1)), row.repeat(1, channels, kernel + 1, 1)
    _, gradient = stack.gradient(parameters_of(module), inputs, torch.tensor([1]), torch.tensor([0]))
    dw = gradient[: kernel * kernel * channels].view(kernel, kernel, channels)
    ratio = dw / row[:kernel, None]
    assert float(ratio[0, 0, 0]) > 0.1
    torch.testing.assert_close(ratio, ratio[0, 0, 0].expand_as(ratio))
    assert distance(gradient, reference(module, inputs, torch.tensor([1]), torch.float32)[1]) < 1e-6


def eager_phase(
    module: nn.Module, y: Tensor, inputs: Tensor, labels: Tensor, batches: list[Tensor], options: dict[str, Any]
) -> tuple[Tensor, list[float]]:
    """The local phase in float64, from its equation."""
    y, anchor, s = y.double(), options.get("anchor"), options.get("shift")
    velocity, losses = torch.zeros_like(y), []
    twin = type(module)(*module).double()
    for rows in batches:
        with torch.no_grad():
            for parameter, piece in zip(twin.parameters(), pieces(twin, y), strict=True):
                if parameter.ndim == 4:
                    o, i, h, w = parameter.shape
                    piece = piece.view(o, h, w, i).permute(0, 3, 1, 2)
                parameter.copy_(piece.view(parameter.shape))
        loss = cross_entropy(twin(cast(inputs[rows], torch.float64)), labels[rows])
        g = flatten(list(torch.autograd.grad(loss, list(twin.parameters()))))
        clip = options.get("max_grad_norm")
        if clip is not None and g.norm() > clip:
            g = g * (clip / g.norm())
        d = g + options.get("weight_decay", 0.0) * y
        if anchor is not None:
            d = d + options.get("prox_weight", 0.0) * (y - anchor.double())
        if s is not None:
            d = d + s.double()
        velocity = options.get("momentum", 0.0) * velocity + d
        y = y - options["lr"] * velocity
        losses.append(float(loss.detach()))
    return y, losses


def vector(y: Tensor, seed: int) -> Tensor:
    return y + 0.01 * torch.randn(y.shape, generator=torch.Generator().manual_seed(seed))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prox": {"prox_weight": 0.3},
    "scaffold": {"shift": True},
    "dyn": {"prox_weight": 0.1, "shift": True},
    "weight decay": {"weight_decay": 0.05},
    "momentum": {"momentum": 0.9},
    "clip": {"max_grad_norm": 0.05},
    "clip that does not bind": {"max_grad_norm": 1e6},
    "everything": {"prox_weight": 0.2, "shift": True, "weight_decay": 0.02, "momentum": 0.5, "max_grad_norm": 0.2},
}


@in_each_set
@pytest.mark.parametrize(
    "name",
    [
        *("MLP on colour", "grey, 3x3", "residuals", "layer norms", "activations of images"),
        *("embeddings", "embedding bag", "images, group norms", "images, residuals"),
    ],
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_local_phase_follows_its_equation(name: str, options: dict[str, Any]) -> None:
    stack, module, y, inputs, labels = case(name, smooth)
    options = {"lr": 0.05, **options}
    if "prox_weight" in options:
        options["anchor"] = vector(y, 2)
    if options.pop("shift", None):
        options["shift"] = vector(torch.zeros_like(y), 3)
    index = torch.randint(0, ROWS, (4, 5), generator=torch.Generator().manual_seed(4))
    trained = y.clone()
    losses = train(stack, trained, inputs, labels, index, AffineStep(**options))
    wanted, wanted_losses = eager_phase(module, y, inputs, labels, list(index), options)
    assert float((trained - wanted).norm()) < 1e-5 * float((wanted - y).norm()) + 2e-7 * float(y.norm())
    assert losses.tolist() == pytest.approx(wanted_losses, rel=1e-5)


@pytest.mark.parametrize("name", ["MLP on colour", "CIFAR CNN", "many channels"])
def test_memory_format_changes_nothing(name: str) -> None:
    stack, _, y, inputs, labels = case(name)
    rows = torch.arange(ROWS)
    _, wanted = stack.gradient(y, inputs, labels, rows)
    for form in (torch.contiguous_format, torch.channels_last):
        assert torch.equal(stack.gradient(y, inputs.to(memory_format=form), labels, rows)[1], wanted)


@in_each_set
@pytest.mark.parametrize("name", ["MLP", "CNN-29k", "odd sides", "embeddings", "images, residuals"])
def test_evaluation_is_torchs(name: str) -> None:
    stack, module, y, inputs, labels = case(name)
    inputs, labels = torch.cat([inputs] * 12), labels.repeat(12)  # more than one workspace holds
    with torch.no_grad():
        output = module(inputs)
    loss, correct = stack.evaluate(y, inputs, labels, 3, 130)
    assert loss == pytest.approx(float(cross_entropy(output[3:130].double(), labels[3:130], reduction="sum")), rel=1e-5)
    assert correct == int((output.argmax(1) == labels)[3:130].sum())
    torch.testing.assert_close(logits_of(stack, y, inputs, torch.arange(len(inputs))), output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["CNN-29k", "images, residuals", "embeddings"])
def test_evaluation_in_smaller_batches_has_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the outputs of all stages for 64 rows would need much memory."""
    stack, _, y, inputs, labels = case(name)
    inputs, labels = torch.cat([inputs] * 12), labels.repeat(12)
    wanted, logits = stack.evaluate(y, inputs, labels), logits_of(stack, y, inputs, torch.arange(len(inputs)))
    monkeypatch.setattr(network_module, "_EVALUATION_NUMBERS", 1)
    fresh = case(name)[0]
    assert fresh.evaluation_batch == 1
    assert fresh.evaluate(y, inputs, labels) == wanted
    assert torch.equal(logits_of(fresh, y, inputs, torch.arange(len(inputs))), logits)


def test_a_stack_survives_the_trip_to_another_process() -> None:
    stack, _, y, inputs, labels = case("CNN-29k")
    wanted = stack.gradient(y, inputs, labels, torch.arange(4))[1]
    sent = pickle.loads(pickle.dumps(stack))  # noqa: S301
    assert sent == stack
    assert torch.equal(sent.gradient(y, inputs, labels, torch.arange(4))[1], wanted)


def test_bad_rows_labels_and_sizes_are_named_and_change_nothing() -> None:
    stack, _, y, inputs, labels = case("MLP on colour")
    before, good = y.clone(), torch.zeros(2, 3, dtype=torch.int64)
    for rows, message in (([0, 1, ROWS], f"row {ROWS} is out of range"), ([0, -1, 1], "row -1 is out of range")):
        index = good.clone()
        index[1] = torch.tensor(rows)
        with pytest.raises(HansaError, match=message):
            train(stack, y, inputs, labels, index, AffineStep(1.0))
    with pytest.raises(HansaError, match="label 2 is out of range, there are 2"):
        train(stack, y, inputs, torch.full_like(labels, 2), good, AffineStep(1.0))
    with pytest.raises(HansaError, match="label -1"):
        stack.evaluate(y, inputs, torch.full_like(labels, -1))
    assert torch.equal(y, before)


def test_a_stack_that_drops_out_wants_what_it_multiplies_by() -> None:
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))
    stack, inputs, labels = compiled(module, (6,)), torch.randn(4, 6), torch.tensor([0, 2, 1, 0])
    y, rows = parameters_of(module), torch.arange(4)
    with pytest.raises(HansaError, match=r"dropout factors, is .*expected contiguous torch.float32 \[1, 20\]"):
        stack.gradient(y, inputs, labels, rows)
    with pytest.raises(HansaError, match=r"is torch.float32 \[1, 19\]"):
        train(stack, y, inputs, labels, rows[None], AffineStep(0.1), keep=torch.ones(1, 19))
    plain = compiled(nn.Sequential(*module[:2], module[3]), (6,))
    assert torch.equal(
        stack.gradient(y, inputs, labels, rows, keep=torch.ones(20))[1], plain.gradient(y, inputs, labels, rows)[1]
    )
    assert stack.evaluate(y, inputs, labels) == plain.evaluate(y, inputs, labels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.zeros(3)}, r"y is torch.float32 \[3\]"),
        ({"y": torch.zeros(1325, dtype=torch.float64)}, "y is torch.float64"),
        ({"y": torch.zeros(2650)[::2]}, "expected contiguous"),
        ({"inputs": torch.zeros(4, 3, 5, 5)}, r"inputs is torch.float32 \[4, 3, 5, 5\]"),
        ({"inputs": torch.zeros(4, 3, 5, 4).half()}, "torch.float16"),
        ({"inputs": torch.zeros(4, 3, 4, 5).transpose(2, 3)}, "expected contiguous"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"labels is torch.int64 \[3\]"),
        ({"labels": torch.zeros(4)}, "labels is torch.float32"),
        ({"index": torch.zeros(4, dtype=torch.int64)}, r"index is torch.int64 \[4\]"),
        ({"index": torch.zeros(2, 2)}, "index is torch.float32"),
        ({"step": AffineStep(0.1, shift=torch.zeros(2))}, r"shift is torch.float32 \[2\]"),
        ({"step": AffineStep(0.1, prox_weight=0.1)}, "an anchor with it"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(change: dict[str, Any], message: str) -> None:
    stack = case("MLP on colour")[0]
    given: dict[str, Any] = {
        "y": torch.zeros(stack.dim),
        "inputs": torch.zeros(4, 3, 5, 4),
        "labels": torch.zeros(4, dtype=torch.int64),
        "index": torch.zeros(1, 2, dtype=torch.int64),
        "step": AffineStep(0.1),
    }
    with pytest.raises(HansaError, match=message):
        train(stack, **{**given, **change})


@pytest.mark.parametrize("bad", [-1, 200, 2**31, 2**62, -(2**63)])
def test_a_token_outside_of_the_table_is_named_and_nothing_is_read_or_changed(bad: int) -> None:
    stack, _, y, inputs, labels = case("embeddings")
    before, index = y.clone(), torch.tensor([[0, 1], [2, 3]])
    inputs[3, 8], message = bad, rf"token {bad} is out of range, there are 200"
    with pytest.raises(HansaError, match=message):
        train(stack, y, inputs, labels, index, AffineStep(1.0))
    with pytest.raises(HansaError, match=message):
        stack.gradient(y, inputs, labels, index[1])
    with pytest.raises(HansaError, match=message):
        stack.evaluate(y, inputs, labels)
    assert torch.equal(y, before)
    with pytest.raises(HansaError, match=r"inputs is torch.float32 .*expected contiguous torch.int64"):
        stack.gradient(y, inputs.float(), labels, index[0])
