"""Lower precision inside of the model: losses, steps, messages and the server stay in float32."""

from __future__ import annotations

from typing import Any, ClassVar

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


def test_a_run_learns_near_one_in_float32_with_the_same_bits_for_threads():
    method = hansa.presets.fedprox(mu=0.1, **WORK)
    plain, mixed = (hansa.Run(method, task(autocast)).advance(3).params for autocast in (None, "bfloat16"))
    distance = (mixed - plain).norm() / plain.norm()
    assert 1e-6 < distance < 2e-2
    threads = hansa.Run(
        method, task("bfloat16"), engine=lambda *each: hansa.engine.Pool(*each, workers=2, kind="thread")
    )
    assert torch.equal(threads.advance(3).params, mixed)


class Mixed(nn.Module):
    """As users write them: BatchNorm, LayerNorm, dropout, a constant of its own, a tied layer, one that is frozen."""

    seen: ClassVar[set[torch.dtype]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.layer = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.LayerNorm(12)
        self.fixed = nn.Linear(12, 12).requires_grad_(False)
        self.twice = self.first
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(12, 4)
        self.register_buffer("scale", torch.full((12,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(x))) + self.twice(x)
        Mixed.seen.add(hidden.dtype)
        return self.head(self.drop(self.layer(self.fixed(hidden) * self.scale)))  # type: ignore[no-any-return]


def low(model: type[nn.Module] = Mixed, **words) -> hansa.Task:
    return hansa.Task(model, cross_entropy, batched_models.data(), **{"param_dtype": "bfloat16", **words})


def test_parameters_are_bfloat16_and_what_steps_and_messages_hold_is_float32():
    mine = low()
    trainer = mine.trainer(torch.float32, CPU)
    trainer.load(**mine.start(hansa.Key(0), torch.float32))
    dtypes = {name: each.dtype for name, each in (*trainer.module.named_parameters(), *trainer.module.named_buffers())}
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}
    assert {dtypes[name] for name in ("first.weight", "fixed.weight", "layer.weight", "scale")} == {torch.bfloat16}
    Mixed.seen.clear()
    loss, gradients = trainer.gradient(0, trainer.batches(0, hansa.local.Work(1, 3), hansa.Key(0))[0])
    assert Mixed.seen == {torch.bfloat16}
    assert {each.dtype for each in (loss, trainer.y, *trainer.parameters, *gradients)} == {torch.float32}
    assert [each.shape for each in gradients] == [entry.shape for entry in mine.layout.parameters]

    run = hansa.Run(hansa.presets.scaffold(**WORK), mine, engine=Recording)
    run.advance(1)
    sent = [
        packet
        for report in Recording.reports
        for place in range(len(report.clients))
        for packet in report.packets(place).values()
    ]
    assert sent
    assert {packet.content.dtype for packet in sent} == {torch.float32}
    assert {vector.dtype for vector in run.state.vectors.values()} == {torch.float32}


class Recording(hansa.engine.Serial):
    """Keeps the reports."""

    reports: ClassVar[list[Any]] = []

    def run(self, *arguments: Any) -> Any:
        for report in super().run(*arguments):
            Recording.reports.append(report)
            yield report


def test_a_gradient_is_that_of_a_model_in_bfloat16():
    mine, rows = low(Watched), torch.arange(5)
    trainer = mine.trainer(torch.float32, CPU)
    trainer.load(mine.start(hansa.Key(0), torch.float32)["model"], None)
    _, gradients = trainer.gradient(0, rows)
    inputs, targets = trainer.batch(0, rows)
    half = [each.detach().to(torch.bfloat16).requires_grad_() for each in trainer.parameters]
    output = linear(torch.tanh(linear(inputs.to(torch.bfloat16), *half[:2])), *half[2:]).float()
    expected = torch.autograd.grad(cross_entropy(output, targets), half)
    assert all(torch.equal(a, b.float()) for a, b in zip(gradients, expected, strict=True))


def test_steps_that_bfloat16_would_round_away_add_up_in_the_master_weights():
    mine = low(Watched)
    trainer = mine.trainer(torch.float32, CPU)
    x = mine.start(hansa.Key(0), torch.float32)["model"]
    step = hansa.local.LocalStep(1e-5, x)
    trainer.load(x, None)
    hansa.local.take_steps(trainer, 4, hansa.local.Work(20, 8), step, hansa.Key(0))
    plain = hansa.Task(Watched, cross_entropy, batched_models.data(), execution="eager").trainer(torch.float32, CPU)
    plain.load(x, None)
    hansa.local.take_steps(plain, 4, hansa.local.Work(20, 8), hansa.local.LocalStep(1e-5, x), hansa.Key(0))
    assert (trainer.y - plain.y).norm() < 0.02 * (plain.y - x).norm()
    weight = trainer.module.first.weight
    assert (weight != mine.layout.unpack(x)["first.weight"].to(torch.bfloat16)).float().mean() < 0.1


LOW = {"autocast": {"autocast": "bfloat16", "param_dtype": None}, "bfloat16 parameters": {}}
PRESETS = {
    "fedadam, clip, momentum": hansa.presets.fedadam(**WORK, max_grad_norm=1.0, local_momentum=0.9),
    "sam": hansa.presets.fedavg(**WORK).with_local(solver=hansa.local.sam(0.05)),
    "gossip": hansa.presets.ha_fed(**WORK, clusters=3, topology=hansa.gossip.ring()),
}


@pytest.mark.parametrize("words", LOW)
@pytest.mark.parametrize("name", PRESETS)
def test_runs_learn_near_those_in_float32(name, words):
    plain = hansa.Run(PRESETS[name], low(param_dtype=None, execution="eager")).advance(3)
    mixed = hansa.Run(PRESETS[name], low(**LOW[words])).advance(3)
    start = plain.task.start(hansa.Key(0), torch.float32)["model"]
    assert 1e-7 < (mixed.params - plain.params).norm() < 0.1 * (plain.params - start).norm()


@pytest.mark.parametrize("words", LOW)
def test_bits_do_not_depend_on_workers_and_resumes(words, tmp_path):
    method = hansa.presets.scaffold(**WORK, participation=0.5)
    expected = hansa.Run(method, low(Smooth, **LOW[words])).advance(4)
    threads = hansa.Run(
        method, low(Smooth, **LOW[words]), engine=lambda *each: hansa.engine.Pool(*each, workers=3, kind="thread")
    )
    assert torch.equal(threads.advance(4).params, expected.params)
    hansa.run(method, low(Smooth, **LOW[words]), rounds=2, out=tmp_path / "run")
    resumed = hansa.resume(tmp_path / "run", method, low(Smooth, **LOW[words]), rounds=4)
    assert torch.equal(resumed.params, expected.params)
    with pytest.raises(HansaError, match="model"):  # the precision is part of what a run folder remembers
        hansa.resume(tmp_path / "run", method, low(Smooth, param_dtype=None, execution="eager"), rounds=5)


class Smooth(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()


def test_values_that_cannot_work_are_refused():
    with pytest.raises(HansaError, match=r"Task\(autocast='float8'\): expected 'bfloat16' or None"):
        task("float8")
    with pytest.raises(HansaError, match=r"Task\(param_dtype='float16'\): expected 'bfloat16' or None"):
        low(param_dtype="float16")
    with pytest.raises(HansaError, match=r"a model with bfloat16 parameters needs no autocast"):
        low(autocast="bfloat16")
    for words in ({"autocast": "bfloat16"}, {"param_dtype": "bfloat16"}):
        with pytest.raises(HansaError, match=r"the run is in torch.float64. This needs torch.float32"):
            hansa.Task(Watched, cross_entropy, batched_models.data(), **words).trainer(torch.float64, CPU)
