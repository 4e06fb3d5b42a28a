"""Buffers: those that clients change are averaged, all others keep every bit, on the server and in the saved model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hansa
from hansa import HansaError, presets
from hansa.data import from_arrays
from hansa.runs.folder import _tensors

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(30, 4, generator=DRAW)
Y = torch.arange(30) % 3
DATA = from_arrays(X, Y, clients=[0] * 5 + [1] * 9 + [2] * 16, test=(X[:7], Y[:7]))
OPTIONS = {"local_lr": 0.1, "steps": 3, "batch_size": 4}
TABLE = torch.linspace(-1, 1, 7, dtype=torch.float64) / 3  # not exact in float32


class Odd(nn.Module):
    """A model as users write theirs, with buffers of every kind."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("seen", torch.tensor(16777217))
        self.register_buffer("wave", torch.tensor([1 + 2j, -3j]))
        self.register_buffer("mask", torch.tensor([0.0, 0.0, float("-inf")]))
        self.register_buffer("chosen", torch.tensor([True, False]))
        self.register_buffer("table", TABLE.clone())
        self.register_buffer("minus", torch.tensor([-0.0]))
        self.register_buffer("level", torch.zeros(1))
        self.register_buffer("start", self.first.weight.detach().clone())

    def forward(self, x):
        if self.training:
            self.seen += 1
            self.level.mul_(0.5).add_(x.mean())
        h = torch.relu(self.norm(self.first(x)))
        return self.last(h) + self.level + self.wave.imag.sum() * 0 + self.start.sum() * 0


ALGORITHMS = {
    "fedavg": presets.fedavg(**OPTIONS),
    "gossip": presets.ha_fed(clusters=1, reporters=2, **OPTIONS),
    "serverless": presets.dsgd(**OPTIONS),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_constant_whole_complex_and_infinite_buffers_keep_every_bit(name, dtype):
    task = hansa.Task(Odd, cross_entropy, DATA)
    assert [entry.name for entry in task.layout.buffers] == [
        "level", "start", "norm.running_mean", "norm.running_var"
    ]  # fmt: skip
    run = hansa.run(ALGORITHMS[name], task, rounds=3, dtype=dtype, workers=1)
    assert run.history[-1]["lost"] == 0
    assert all(record["moved"] for record in run.history)
    model = run.model
    assert (int(model.seen), model.seen.dtype) == (16777217, torch.int64)
    assert model.wave.tolist() == [1 + 2j, -3j]
    assert model.mask.tolist() == [0.0, 0.0, float("-inf")]
    assert (model.chosen.tolist(), int(model.norm.num_batches_tracked)) == ([True, False], 0)
    assert torch.equal(model.table, TABLE)
    assert torch.signbit(model.minus).all()
    assert float(model.level) != 0


def test_a_buffer_made_by_the_seed_is_that_of_the_run():
    task = hansa.Task(Odd, cross_entropy, DATA)
    for seed in (0, 5):
        first = task.module(task.start(hansa.Key(seed), torch.float32))
        assert torch.equal(first.start, first.first.weight)
        run = hansa.run(presets.fedavg(**OPTIONS), task, rounds=2, seed=seed)
        assert torch.equal(run.model.start, first.first.weight)


class Begun(nn.Module):
    """A flag and counters; tests/fuzz/fuzz_modules.py has layers that begin with the first batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("begun", torch.tensor(False))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("left", torch.tensor(100))
        self.register_buffer("place", torch.tensor([3, 1]))

    def forward(self, x):
        if self.training:
            self.begun.fill_(True)
            self.steps += 1
            self.left -= 1
            self.place.copy_(self.place.flip(0))  # wraps around: it belongs to the client
        return self.layer(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_counters_and_flags_travel(dtype):
    task = hansa.Task(Begun, cross_entropy, DATA)
    assert [entry.name for entry in task.layout.buffers] == ["begun", "steps", "left"]
    runs = [
        hansa.run(presets.fedavg(**OPTIONS), task, rounds=r, workers=w, dtype=dtype)
        for r, w in ((1, 1), (3, 1), (3, 2))
    ]
    first, last = runs[0].model, runs[1].model
    assert bool(first.begun)
    assert first.begun.dtype == torch.bool
    assert last.steps.dtype == torch.int64
    assert (int(first.steps), int(last.steps), int(last.left)) == (3, 9, 91)
    assert last.place.tolist() == [3, 1]
    assert torch.equal(runs[1].state.vectors["buffers"], runs[2].state.vectors["buffers"])


def test_batch_norms_count_of_batches_is_sent_only_where_it_is_used():
    for momentum, names in ((0.1, []), (None, ["1.num_batches_tracked"])):
        make = lambda m=momentum: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=m))  # noqa: E731
        sent = [entry.name for entry in hansa.Task(make, cross_entropy, DATA).layout.buffers]
        assert sent == ["1.running_mean", "1.running_var", *names]


def test_float64_runs_save_float64_models():
    task = hansa.Task(Odd, cross_entropy, DATA)
    run = hansa.run(presets.fedavg(**OPTIONS), task, rounds=1, dtype=torch.float64)
    saved = _tensors(run)
    assert saved["first.weight"].dtype == torch.float64
    assert torch.equal(saved["first.weight"], task.layout.unpack(run.params)["first.weight"])
    assert saved["norm.running_var"].dtype == torch.float64
    assert saved["seen"].dtype == torch.int64
    assert _tensors(hansa.run(presets.fedavg(**OPTIONS), task, rounds=1))["first.weight"].dtype == torch.float32


def test_a_double_model_trains_in_float64():
    task = hansa.Task(lambda: Odd().double(), cross_entropy, DATA)
    run = hansa.run(presets.fedavg(**OPTIONS), task, rounds=1)
    assert run.params.dtype == torch.float64
    assert run.model.last.bias.dtype == torch.float64
    same = hansa.run(presets.fedavg(**OPTIONS), hansa.Task(Odd, cross_entropy, DATA), rounds=1, dtype=torch.float64)
    assert not torch.equal(run.params, run.params.float().double())
    assert run.params.shape == same.params.shape


def test_a_buffer_that_changes_late_is_refused_by_name_and_one_of_the_clients_own_is_put_back():
    class Late(nn.Module):
        saved = True

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            self.register_buffer("level", torch.zeros(1), persistent=self.saved)

        def forward(self, x):
            self.steps += 1
            if self.steps > 2:
                self.level += x.mean()
            return self.layer(x) + self.level

    class Own(Late):
        saved = False

    with pytest.raises(HansaError, match="level was left unchanged by the first batch"):
        hansa.run(presets.fedavg(**OPTIONS), hansa.Task(Late, cross_entropy, DATA), rounds=1, workers=1)
    run = hansa.run(presets.fedavg(**OPTIONS), hansa.Task(Own, cross_entropy, DATA), rounds=1, workers=1)
    assert float(run.model.level) == 0
