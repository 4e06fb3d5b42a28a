"""Class weights and sample weights in the loss: the right step, and the right test loss however batches fall."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hansa
from hansa import HansaError, config, presets
from hansa.data import from_arrays
from hansa.training import losses
from hansa.training.losses import WeightedTargets

DRAW = np.random.default_rng(4)
X, Y = DRAW.normal(size=(730, 3)).astype(np.float32), DRAW.integers(0, 3, 730)
W = DRAW.uniform(0, 4, 730).astype(np.float32)
OWNERS = np.repeat([0, 1, 2], [100, 230, 400])
CLASSES = [1.0, 5.0, 0.5]


def run_of(loss, data, outputs=3, **words):
    task = hansa.Task(lambda: nn.Linear(3, outputs), loss, data)
    return hansa.run(presets.fedavg(local_lr=0.1, steps=2, batch_size=9, **words), task, rounds=1, workers=1)


def output_of(run):
    with torch.no_grad():
        return run.model(torch.from_numpy(X))


def test_class_weights_step_and_test_as_torchs():
    data = from_arrays(X, Y, clients=OWNERS, test=(X, Y))
    run = run_of(losses.cross_entropy(class_weights=CLASSES), data)
    theirs = run_of(nn.CrossEntropyLoss(weight=torch.tensor(CLASSES)), data)
    assert torch.allclose(run.params, theirs.params, atol=1e-6)
    wanted = F.cross_entropy(output_of(run), torch.from_numpy(Y), weight=torch.tensor(CLASSES))
    assert run.history[-1]["test_loss"] == pytest.approx(float(wanted), rel=1e-5)


@torch.no_grad()
def test_a_row_of_weight_two_is_the_row_twice_and_one_of_weight_zero_is_none():
    model, x = nn.Linear(3, 3), torch.from_numpy(X[:3])
    y = torch.from_numpy(Y[:3])
    for loss, target in ((losses.cross_entropy(CLASSES), y), (losses.mse(), x), (losses.bce(2.0), x.sigmoid())):
        weighted = loss(model(x), WeightedTargets(target, torch.tensor([2.0, 1.0, 0.0])))
        again = torch.tensor([0, 0, 1])
        assert float(weighted) == pytest.approx(float(loss(model(x[again]), target[again])), rel=1e-6)
    assert float(losses.cross_entropy()(model(x), torch.full((3,), -100))) == 0  # nothing counts: no loss, not NaN


def test_a_file_says_it():
    text = "data: {name: synthetic, clients: 4, options: {largest: 60}}\nmodel: {loss: {kind: cross_entropy, %s}}"
    asked = config.from_yaml(text % "class_weights: [1, 2, 3, 1, 1, 1, 1, 1, 1, 1]", ["model.loss.label_smoothing=0.1"])
    task = config.build.build_task(asked, config.build.load_data(asked))
    assert task.loss == losses.cross_entropy([1, 2, 3, 1, 1, 1, 1, 1, 1, 1], label_smoothing=0.1)
    for wrong, message in (
        ("class_weight: [1]", "cross_entropy has no 'class_weight'"),
        ("ignore_index: x", "ignore_index"),
        ("class_weights: [1, -1]", "class_weights=-1"),
    ):
        with pytest.raises(HansaError, match=rf"model.loss.*{message}"):
            config.from_yaml(text % wrong)
