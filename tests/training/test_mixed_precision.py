"""Lower precision inside of the model: losses, steps, messages and the server stay in float32."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

import hansa
from hansa.core.errors import HansaError
from training import batched_models

CPU = torch.device("cpu")
WORK = {"local_lr": 0.1, "steps": 3, "batch_size": 8}


class Watched(nn.Module):
    """Records the dtype of its hidden layer and of its output."""

    seen: ClassVar[set[torch.dtype]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        Watched.seen.add(hidden.dtype)
        return self.head(torch.tanh(hidden))  # type: ignore[no-any-return]


def task(autocast: str | None, loss=cross_entropy) -> hansa.Task:
    return hansa.Task(Watched, loss, batched_models.data(), autocast=autocast)


def test_the_model_computes_in_bfloat16_and_everything_else_in_float32():
    losses = []

    def loss(output, target):
        losses.append(output.dtype)
        return cross_entropy(output, target)

    trainer = task("bfloat16", loss).trainer(torch.float32, CPU)
    assert trainer.network is None
    Watched.seen.clear()
    losses.clear()
    value, gradients = trainer.gradient(0, trainer.batches(0, hansa.local.Work(1, 3), hansa.Key(0))[0])
    assert Watched.seen == {torch.bfloat16}
    assert set(losses) == {torch.float32}
    assert {each.dtype for each in (value, *gradients, trainer.y)} == {torch.float32}


def test_a_gradient_is_that_of_products_of_bfloat16_numbers():
    trainer = task("bfloat16").trainer(torch.float32, CPU)
    rows = torch.arange(5)
    trainer.load(task(None).start(hansa.Key(0), torch.float32)["model"], None)
    _, gradients = trainer.gradient(0, rows)
    inputs, targets = trainer.batch(0, rows)
    first, bias, head, last = (each.detach().clone().requires_grad_() for each in trainer.parameters)
    half = torch.bfloat16
    hidden = torch.tanh(linear(inputs.to(half), first.to(half), bias.to(half)))
    output = linear(hidden, head.to(half), last.to(half)).float()
    expected = torch.autograd.grad(cross_entropy(output, targets), [first, bias, head, last])
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


class Mixed(nn.Module):
    """As users write them: BatchNorm, LayerNorm, dropout, a constant of its own, a tied layer, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.layer = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.LayerNorm(12)
        self.fixed = nn.Linear(12, 12).requires_grad_(False)
        self.twice = self.first
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(12, 4)
        self.register_buffer("scale", torch.full((12,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(x))) + self.twice(x)
        return self.head(self.drop(self.layer(self.fixed(hidden) * self.scale)))  # type: ignore[no-any-return]


def low(model: type[nn.Module] = Mixed, autocast: str | None = "bfloat16") -> hansa.Task:
    return hansa.Task(model, cross_entropy, batched_models.data(), autocast=autocast, execution="eager")


PRESETS = {
    "fedadam, clip, momentum": hansa.presets.fedadam(**WORK, max_grad_norm=1.0, local_momentum=0.9),
    "sam": hansa.presets.fedavg(**WORK).with_local(solver=hansa.local.sam(0.05)),
    "gossip": hansa.presets.ha_fed(**WORK, clusters=3, topology=hansa.gossip.ring()),
}


@pytest.mark.parametrize("name", PRESETS)
def test_runs_learn_near_those_in_float32(name):
    plain = hansa.Run(PRESETS[name], low(autocast=None)).advance(3)
    mixed = hansa.Run(PRESETS[name], low()).advance(3)
    start = plain.task.start(hansa.Key(0), torch.float32)["model"]
    assert 1e-7 < (mixed.params - plain.params).norm() < 0.1 * (plain.params - start).norm()


def test_bits_do_not_depend_on_workers_and_resumes(tmp_path):
    method = hansa.presets.scaffold(**WORK, participation=0.5)
    expected = hansa.Run(method, low(Smooth)).advance(4)
    threads = hansa.Run(method, low(Smooth), engine=lambda *each: hansa.engine.Pool(*each, workers=3, kind="thread"))
    assert torch.equal(threads.advance(4).params, expected.params)
    hansa.run(method, low(Smooth), rounds=2, out=tmp_path / "run")
    resumed = hansa.resume(tmp_path / "run", method, low(Smooth), rounds=4)
    assert torch.equal(resumed.params, expected.params)
    with pytest.raises(HansaError, match="model"):  # the precision is part of what a run folder remembers
        hansa.resume(tmp_path / "run", method, low(Smooth, autocast=None), rounds=5)


class Smooth(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()


def test_values_that_cannot_work_are_refused():
    with pytest.raises(HansaError, match=r"Task\(autocast='float8'\): expected 'bfloat16' or None"):
        task("float8")
    with pytest.raises(HansaError, match=r"the run is in torch.float64. This needs torch.float32"):
        task("bfloat16").trainer(torch.float64, CPU)
