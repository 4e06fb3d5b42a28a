"""Any nn.Module, any loss: the task against plain PyTorch written out by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hansa
from hansa import HansaError, presets
from hansa.training.trainer import batch_stream
from training.shards import Shards


def images(sizes=(5, 12, 7)):
    return Shards.of((2, 6, 6), 3, sizes)


def convolutional():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def normalised():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


class Viewed(nn.Module):
    """A view after a convolution, whose result may not be channels-last."""

    def __init__(self):
        super().__init__()
        self.convolution, self.head = nn.Conv2d(2, 4, 3), nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.convolution(x).relu().view(len(x), -1))


def by_hand(task, algorithm, seed, rounds, lr, batch):
    """FedAvg with torch.optim on deep copies, batches from the same addresses."""
    key = hansa.Key(seed)
    model = task.module(task.start(key, torch.float64)).double()
    data = task.data
    for r in range(rounds):
        chosen = algorithm.sampler.select(r, task.population, key)
        states = []
        for client in chosen:
            local = copy.deepcopy(model)
            local.train()
            optimizer = torch.optim.SGD(local.parameters(), lr=lr)
            work = algorithm.local.steps.draw(client, data.samples(client), batch, key)
            order = batch_stream(
                data.samples(client), work.steps * work.batch_size, key.child("local", r, client, "batch")
            )
            for rows in data.rows(client)[torch.from_numpy(order)].view(work.steps, -1):
                optimizer.zero_grad()
                cross_entropy(local(data.inputs[rows].double()), data.targets[rows]).backward()
                optimizer.step()
            states.append(local.state_dict())
        average = {name: torch.stack([s[name].double() for s in states]).mean(0) for name in states[0]}
        model.load_state_dict(average)
    return model


@pytest.mark.parametrize("factory", [convolutional, normalised, Viewed], ids=["conv", "batchnorm", "view"])
def test_fedavg_equals_plain_pytorch_buffers_included(factory):
    task = hansa.Task(factory, cross_entropy, images())
    assert task.layout.channels_last == (factory is not Viewed)
    algorithm = presets.fedavg(local_lr=0.1, epochs=1.5, batch_size=4, participation=0.67)
    run = hansa.run(algorithm, task, rounds=4, seed=3, dtype=torch.float64)
    expected = by_hand(task, algorithm, 3, 4, 0.1, 4).state_dict()
    found = task.layout.unpack(run.params, run.state.vectors.get("buffers"))
    assert set(expected) - set(found) <= {"1.num_batches_tracked"}  # a counter, which is not averaged
    for name, tensor in ((name, expected[name]) for name in found):
        assert torch.allclose(found[name].double(), tensor.double(), atol=1e-10), name


def test_buffers_are_averaged_and_never_stepped_by_the_server():
    task = hansa.Task(normalised, cross_entropy, images())
    words = {"local_lr": 0.1, "steps": 2, "batch_size": 4}
    plain = hansa.run(presets.fedavg(**words), task, rounds=1)
    adaptive = hansa.run(presets.fedadam(server_lr=0.5, **words), task, rounds=1)
    assert torch.equal(plain.state.vectors["buffers"], adaptive.state.vectors["buffers"])
    assert not torch.equal(plain.params, adaptive.params)


def test_a_module_without_buffers_has_no_channel_for_them():
    run = hansa.run(presets.fedavg(steps=1), hansa.Task(convolutional, cross_entropy, images()), rounds=1)
    assert list(run.algorithm.channels) == ["model"]


def test_unused_parameters_are_left_where_they_are():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = convolutional()
            self.spare = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return self.used(x)

    task = hansa.Task(Idle, cross_entropy, images())
    run = hansa.run(presets.fedavg(local_lr=0.1, steps=2), task, rounds=2)
    assert task.layout.unpack(run.params)["spare"].tolist() == [1.0, 1.0]


def test_a_module_object_in_place_of_a_factory_is_refused():
    with pytest.raises(HansaError, match="expected a function that returns the model"):
        hansa.Task(convolutional(), cross_entropy, images())


def test_a_client_without_samples_is_named():
    data = images((5, 0, 12))
    with pytest.raises(HansaError, match="client 1 has no samples"):
        hansa.Task(convolutional, cross_entropy, data)
