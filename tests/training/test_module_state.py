"""Models with memory, randomness or buffers of their own: what travels, what is put back, whoever trained before."""

from __future__ import annotations

import itertools
import logging
import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hansa
from hansa import HansaError, presets
from hansa.data import from_arrays
from hansa.runs.folder import _tensors
from hansa.training import random_state
from hansa.training.modules import fresh

pytestmark = pytest.mark.usefixtures("shared_workers")

DRAW = torch.Generator().manual_seed(2)
X = torch.randn(40, 4, generator=DRAW)
Y = torch.arange(40) % 3
DATA = from_arrays(X, Y, clients=[0] * 5 + [1] * 9 + [2] * 12 + [3] * 14, test=(X[:7], Y[:7]))
OPTIONS = {"local_lr": 0.1, "steps": 2, "batch_size": 4}


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.begin()

    def begin(self):
        pass


class Hidden(Base):
    """A hidden state that is carried from batch to batch, from nothing at first."""

    def begin(self):
        self.state = None

    def forward(self, x):
        self.state = x.mean() if self.state is None else 0.5 * self.state.detach() + x.mean()
        return self.layer(x) + self.state


class Scratch(Base):
    """A buffer that is not saved, and a tensor that is no buffer, written to in place."""

    def begin(self):
        self.register_buffer("level", torch.zeros(1), persistent=False)
        self.other = torch.zeros(2)

    def forward(self, x):
        self.level.mul_(0.9).add_(x.mean())
        self.other += 1
        return self.layer(x) + self.level * self.other.sum()


class Remembering(Base):
    """Lists, dicts and sets that grow."""

    def begin(self):
        self.seen, self.facts, self.kinds = [], {"calls": 0, "last": torch.zeros(1)}, {0}

    def forward(self, x):
        self.seen.append(float(x.mean()))
        self.facts["calls"] += 1
        self.facts["last"] += 1
        self.kinds.add(len(self.seen))
        scale = len(self.seen) + self.facts["calls"] + float(self.facts["last"]) + len(self.kinds)
        return self.layer(x) * scale


class Drawing(Base):
    """Draws from every generator there is."""

    def forward(self, x):
        noise = random.random() + np.random.rand() + float(torch.rand(()))  # noqa: NPY002
        return self.layer(x) * (1 + noise if self.training else 1)


class Own(Base):
    """Generators of its own, of every kind."""

    def begin(self):
        self.torch, self.python = torch.Generator(), random.Random(4)
        self.numpy, self.old = np.random.default_rng(0), np.random.RandomState(0)

    def forward(self, x):
        chance = self.numpy.random() + self.old.rand() + self.python.random()
        return self.layer(x) + torch.rand(3, generator=self.torch) + chance


MODELS = [Hidden, Scratch, Remembering, Drawing, Own]


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("model", MODELS)
def test_a_round_does_not_depend_on_who_trained_before(model, caplog):
    task = hansa.Task(model, cross_entropy, DATA)
    for algorithm in (presets.fedavg(participation=1.0, **OPTIONS), presets.ha_fed(clusters=2, reporters=1, **OPTIONS)):
        whole = hansa.run(algorithm, task, rounds=2, seed=3, workers=1)
        random.seed(5)
        np.random.seed(6)  # noqa: NPY002
        torch.manual_seed(7)
        again = hansa.run(algorithm, task, rounds=2, seed=3, workers=1)
        assert torch.equal(whole.params, again.params)
        assert whole.history[-1]["test_loss"] == again.history[-1]["test_loss"]
    assert not warnings_of(caplog)


def test_a_run_leaves_every_generator_as_it_was():
    task = hansa.Task(Drawing, cross_entropy, DATA)

    def draw():
        return random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002

    def seeded():
        random.seed(11)
        np.random.seed(11)  # noqa: NPY002
        torch.manual_seed(11)

    seeded()
    expected, threads = draw(), torch.get_num_threads()
    seeded()
    run = hansa.run(presets.fedavg(**OPTIONS), task, rounds=1)
    task.evaluate(task.trainer(torch.float32, torch.device("cpu")), run.state.vectors)
    hansa.Task(Drawing, cross_entropy, DATA)
    assert draw() == expected
    assert torch.get_num_threads() == threads


OUTSIDE = itertools.count(1)


class Outside(Base):
    def forward(self, x):
        return self.layer(x) * next(OUTSIDE)


class Replacing(Base):
    """Replaces a parameter by another one after some batches."""

    def begin(self):
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 1:
            self.layer.weight = nn.Parameter(self.layer.weight.detach() / 2)
        return self.layer(x)


def test_a_parameter_replaced_by_another_one_is_refused_by_name():
    task = hansa.Task(Replacing, cross_entropy, DATA)
    with pytest.raises(hansa.HansaError, match=r"layer.weight: training replaced .*change it in place"):
        hansa.run(presets.fedavg(**OPTIONS), task, rounds=1, workers=1)


def test_what_cannot_be_put_back_is_refused():
    task = hansa.Task(Outside, cross_entropy, DATA)
    with pytest.raises(
        hansa.HansaError, match=r"Outside: a client's result depends on who .*layer.weight.*global object"
    ):
        hansa.run(presets.fedavg(**OPTIONS), task, rounds=1, workers=1)


def test_modules_functions_and_settings_are_left_alone():
    class Mixed(Base):
        def begin(self):
            self.act, self.layers, self.size = torch.tanh, [self.layer], (3, "x")
            self.table = {"layer": self.layer}

        def forward(self, x):
            return self.act(self.layers[0](x))

    task = hansa.Task(Mixed, cross_entropy, DATA)
    trainer = task.trainer(torch.float32, torch.device("cpu"))
    layers = trainer.module.layers
    trainer.load(torch.zeros(trainer.y.numel()), None)
    assert trainer.module.layers is layers
    assert trainer.module.layers[0] is trainer.module.layer is trainer.module.table["layer"]
    assert trainer.module_state.unrestorable == []


class Slow(nn.Module):
    """Draws from all three generators, with time for others in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(4):
            time.sleep(0.001)
            self.layers.append(nn.Linear(3, 3))
        self.more = nn.Parameter(torch.tensor([random.random(), np.random.rand()]))  # noqa: NPY002


def made(seed: int) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in fresh(Slow, hansa.Key(seed)).parameters()])


def busy(seed: int) -> torch.Tensor:
    """What a run does to the generators beside making its model."""
    with random_state.fixed_arithmetic():
        random_state.seed_all(hansa.Key(100 + seed), torch.device("cpu"))
    return made(seed)


def test_models_made_in_threads_are_those_of_their_seeds() -> None:
    expected = [made(seed) for seed in range(12)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(busy, range(12)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


CHANCE = torch.Generator().manual_seed(0)
ROWS = torch.randn(30, 4, generator=CHANCE)
LABELS = torch.arange(30) % 3
THREE = from_arrays(ROWS, LABELS, clients=[0] * 5 + [1] * 9 + [2] * 16, test=(ROWS[:7], LABELS[:7]))
WORDS = {"local_lr": 0.1, "steps": 3, "batch_size": 4}
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
    "fedavg": presets.fedavg(**WORDS),
    "gossip": presets.ha_fed(clusters=1, reporters=2, **WORDS),
    "serverless": presets.dsgd(**WORDS),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_constant_whole_complex_and_infinite_buffers_keep_every_bit(name, dtype):
    task = hansa.Task(Odd, cross_entropy, THREE)
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
    task = hansa.Task(Odd, cross_entropy, THREE)
    for seed in (0, 5):
        first = task.module(task.start(hansa.Key(seed), torch.float32))
        assert torch.equal(first.start, first.first.weight)
        run = hansa.run(presets.fedavg(**WORDS), task, rounds=2, seed=seed)
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
    task = hansa.Task(Begun, cross_entropy, THREE)
    assert [entry.name for entry in task.layout.buffers] == ["begun", "steps", "left"]
    runs = [
        hansa.run(presets.fedavg(**WORDS), task, rounds=r, workers=w, dtype=dtype) for r, w in ((1, 1), (3, 1), (3, 2))
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
        sent = [entry.name for entry in hansa.Task(make, cross_entropy, THREE).layout.buffers]
        assert sent == ["1.running_mean", "1.running_var", *names]


def test_float64_runs_save_float64_models():
    task = hansa.Task(Odd, cross_entropy, THREE)
    run = hansa.run(presets.fedavg(**WORDS), task, rounds=1, dtype=torch.float64)
    saved = _tensors(run)
    assert saved["first.weight"].dtype == torch.float64
    assert torch.equal(saved["first.weight"], task.layout.unpack(run.params)["first.weight"])
    assert saved["norm.running_var"].dtype == torch.float64
    assert saved["seen"].dtype == torch.int64
    assert _tensors(hansa.run(presets.fedavg(**WORDS), task, rounds=1))["first.weight"].dtype == torch.float32


def test_a_double_model_trains_in_float64():
    task = hansa.Task(lambda: Odd().double(), cross_entropy, THREE)
    run = hansa.run(presets.fedavg(**WORDS), task, rounds=1)
    assert run.params.dtype == torch.float64
    assert run.model.last.bias.dtype == torch.float64
    same = hansa.run(presets.fedavg(**WORDS), hansa.Task(Odd, cross_entropy, THREE), rounds=1, dtype=torch.float64)
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
        hansa.run(presets.fedavg(**WORDS), hansa.Task(Late, cross_entropy, THREE), rounds=1, workers=1)
    run = hansa.run(presets.fedavg(**WORDS), hansa.Task(Own, cross_entropy, THREE), rounds=1, workers=1)
    assert float(run.model.level) == 0
