"""Data without classes: targets that are floats, several a row, or sequences train like any other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import hansa
from hansa import HansaError, presets
from hansa.data import from_arrays
from hansa.gossip import by_labels

DRAW = np.random.default_rng(3)
X = DRAW.normal(size=(40, 5))
OWNERS = [0] * 6 + [1] * 13 + [2] * 21
OPTIONS = {"local_lr": 0.1, "steps": 3, "batch_size": 4}


class Head(nn.Module):
    """A model as users write theirs."""

    def __init__(self, outputs=1):
        super().__init__()
        self.body, self.head = nn.Linear(5, 7), nn.Linear(7, outputs)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def held(targets):
    return from_arrays(X, targets, clients=OWNERS, test=(X[:9], targets[:9]))


def test_regression_trains_with_and_without_clusters():
    task = hansa.Task(Head, mse_loss, held(X[:, :1] * 2))
    for algorithm in (presets.fedavg(**OPTIONS), presets.ha_fed(clusters=1, reporters=2, **OPTIONS)):
        run = hansa.run(algorithm, task, rounds=3, workers=1)
        assert run.history[-1]["test_loss"] < run.history[0]["test_loss"]


def test_a_clustering_by_labels_says_that_there_are_none():
    task = hansa.Task(Head, mse_loss, held(X[:, :1]))
    with pytest.raises(HansaError, match=r"by_labels\(k=2.*needs the label counts.*has no classes"):
        hansa.run(presets.ha_fed(clusters=by_labels(2), reporters=1, **OPTIONS), task, rounds=1)


def test_a_rule_of_ones_own_is_given_labels_where_there_are_any():
    seen = []

    class mine:
        def assign(self, population, key, labels):
            seen.append(None if labels is None else labels.shape)
            return [[0, 1], [2]]

    algorithm = presets.ha_fed(clusters=mine(), reporters=1, **OPTIONS)
    hansa.run(algorithm, hansa.Task(Head, mse_loss, held(X[:, :1])), rounds=1)
    hansa.run(algorithm, hansa.Task(lambda: Head(4), nn.CrossEntropyLoss(), held(np.arange(40) % 4)), rounds=1)
    assert seen == [None, (3, 4)]
