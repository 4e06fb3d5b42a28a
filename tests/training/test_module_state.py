"""Models with memory or randomness of their own: results depend on neither the workers nor who trained before."""

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
from hansa import presets
from hansa.data import from_arrays
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
