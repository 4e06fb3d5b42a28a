"""Any nn.Module, any loss: the task against plain PyTorch written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hansa
from hansa import HansaError, presets
from training.shards import Shards


def images(sizes=(5, 12, 7)):
    return Shards.of((2, 6, 6), 3, sizes)


def convolutional():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


class Viewed(nn.Module):
    """A view after a convolution, whose result may not be channels-last."""

    def __init__(self):
        super().__init__()
        self.convolution, self.head = nn.Conv2d(2, 4, 3), nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.convolution(x).relu().view(len(x), -1))


def test_convolutions_lie_channels_last_but_not_before_a_view():
    for factory in (convolutional, Viewed):
        task = hansa.Task(factory, cross_entropy, images(), execution="eager")
        assert task.layout.channels_last == (factory is convolutional)
        hansa.run(presets.fedavg(steps=1), task, rounds=1)


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
