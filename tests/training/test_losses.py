"""The test loss is that of all test rows, whatever the loss makes of a batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hansa
from hansa import HansaError, losses, presets
from hansa.data import from_arrays

DRAW = torch.Generator().manual_seed(1)
X = torch.randn(1300, 4, generator=DRAW)  # more than two evaluation batches, more than one piece
Y = torch.randint(0, 3, (1300,), generator=DRAW).sort().values  # sorted: batches have other classes and weights
OWNERS = torch.arange(1300).remainder(7).clamp(max=2)
DATA = from_arrays(X, Y, clients=OWNERS, test=(X, Y))
OPTIONS = {"local_lr": 0.05, "steps": 2, "batch_size": 8}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def outcome(loss, data=DATA, model=Net, **options):
    """The test loss of a run, and the trained model's outputs for all test rows."""
    task = hansa.Task(model, loss, data, **options)
    run = hansa.run(presets.fedavg(**OPTIONS), task, rounds=1, workers=1)
    with torch.no_grad():
        return run.history[-1], run.model.eval()(data.test_inputs)


class Arc(nn.Module):
    """A loss with class centres of its own."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(3, 3))

    def forward(self, output, target):
        return ((output - self.centres[target]) ** 2).mean()


class Unlisted(nn.Module):
    """Layers in a plain list, which no optimizer sees."""

    def __init__(self):
        super().__init__()
        self.layer, self.others = nn.Linear(4, 3), [nn.Linear(3, 3)]

    def forward(self, x):
        return self.others[0](self.layer(x))


ARC = Arc()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda o, y: (F.cross_entropy(o, y), o), r"returned \(float32 \[\], float32 \[12, 3\]\): expected one real"),
        (lambda o, y: F.cross_entropy(o, y).item(), "returned float: expected one real number for a batch as a tensor"),
        (lambda o, y: F.cross_entropy(o, y).detach(), "has no gradient"),
        (lambda o, y: F.cross_entropy(o.detach(), y), "has no gradient"),
        (lambda o, y: torch.complex(o, o).sum(), r"returned complex64 \[\]: expected one real"),
        (ARC, r"the loss Arc use parameters of shape \[3, 3\] that are not the model's, so they would not be trained"),
        (ARC.forward, r"the loss forward use parameters of shape \[3, 3\]"),
        (lambda o, y: ARC(o, y), r"use parameters of shape \[3, 3\].*freeze them: requires_grad_"),
        (nn.CrossEntropyLoss, "expected a function of"),
        (nn.CrossEntropyLoss(reduction="none"), r"returned float32 \[12\]: expected one real number"),
    ],
    ids=["tuple", "float", "no gradient", "detached", "complex", "module", "method", "closure", "class", "every row"],
)
def test_a_loss_that_cannot_be_trained_is_refused_with_a_sentence(loss, message):
    with pytest.raises(HansaError, match=message):
        hansa.Task(Net, loss, DATA)


def test_parameters_that_the_model_does_not_list_are_refused_unless_they_are_frozen():
    with pytest.raises(HansaError, match=r"Unlisted and the loss cross_entropy use parameters of shape .*Register"):
        hansa.Task(Unlisted, F.cross_entropy, DATA)
    other = nn.Linear(3, 3).requires_grad_(False)
    hansa.Task(Net, lambda output, target: F.cross_entropy(other(output), target), DATA)


def truth(output):
    return float((output.argmax(1) == Y).double().mean())


def test_a_metric_that_counts_is_refused_with_the_remedy():
    with pytest.raises(HansaError, match="expected one value per row, or one number up to 1 such as their mean"):
        hansa.Task(Net, F.cross_entropy, DATA, metric=lambda output, target: (target >= 0).sum())


def auc(output, target):
    """The share of pairs of a row of class 0 and another that are in the right order."""
    first, rest = output[target == 0, 0], output[target != 0, 0]
    return (first[:, None] > rest[None, :]).double().mean()


class Share:
    """An object as those of torchmetrics: it compares by identity of its states, and keeps what it has seen."""

    higher_is_better = True

    def __init__(self):
        self.hits = self.rows = 0

    def __eq__(self, other):
        raise RuntimeError("metrics are not compared")

    __hash__ = None

    def reset(self):
        self.hits = self.rows = 0

    def update(self, preds, target):
        self.hits, self.rows = self.hits + int((preds.argmax(1) == target).sum()), self.rows + len(target)

    def compute(self):
        return torch.tensor(self.hits / self.rows)


def test_objects_with_update_and_compute_are_metrics():
    seen = Share()
    seen.update(torch.eye(3), torch.zeros(3, dtype=torch.int64))
    record, output = outcome(F.cross_entropy, metric=Share(), metrics={"share": seen, "miss": hansa.higher(Share())})
    for name in ("accuracy", "share", "miss"):
        assert record[f"test_{name}"] == pytest.approx(truth(output))


def test_functions_of_sklearn_are_called_in_their_order():
    def mean_pinball_loss(y_true, y_pred):
        assert type(y_true).__name__ == type(y_pred).__name__ == "ndarray"
        return ((y_true - y_pred).clip(0) * 2 + (y_pred - y_true).clip(0)).mean()

    mean_pinball_loss.__module__ = "sklearn.metrics._regression"
    numbers = X[:, 0].clone()
    data = from_arrays(X, numbers, clients=OWNERS, test=(X, numbers))
    task = hansa.Task(lambda: nn.Linear(4, 1), losses.mse(), data, metrics={"pinball": mean_pinball_loss})
    assert task.directions == {"pinball": "lower"}
    vectors = task.start(hansa.Key(0), torch.float32)
    with torch.no_grad():
        output = task.module(vectors)(X)[:, 0]
    found = task.evaluate(task.trainer(torch.float32, torch.device("cpu")), vectors)
    assert found["test_pinball"] == pytest.approx(mean_pinball_loss(numbers.numpy(), output.numpy()), rel=1e-5)


@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_outputs_that_are_not_finite_make_every_metric_nan(worst):
    class Broken(Net):
        def forward(self, x):
            return super().forward(x) + torch.where(x[:, :1] > 2.5, worst, 0.0) * (not self.training)

    metrics = {"ones": hansa.higher(lambda output, target: 1.0), "share": Share()}
    record, _ = outcome(F.cross_entropy, model=Broken, metrics=metrics)
    assert all(math.isnan(record[f"test_{name}"]) for name in ("accuracy", "ones", "share"))


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": auc}, "expected an identifier"),
        ({"a b": auc}, "expected an identifier"),
        ({"auc": 3}, "a function of"),
    ],
)
def test_metrics_without_a_proper_name_are_refused(metrics, message):
    with pytest.raises(HansaError, match=message):
        hansa.Task(Net, F.cross_entropy, DATA, metrics=metrics)


def test_a_metric_that_gives_no_number_is_refused():
    with pytest.raises(HansaError, match=r"logits returned float32 \[12, 3\]: expected one number"):
        outcome(F.cross_entropy, metrics={"logits": hansa.higher(lambda output, target: output)})
    with pytest.raises(HansaError, match="expected one number for all rows"):
        outcome(F.cross_entropy, metric=lambda output, target: output)


LABELS = (X[:, 0] > 0.9).long()  # a fifth are 1


def test_one_output_of_an_unknown_loss_has_no_guessed_accuracy(caplog):
    data = from_arrays(X, LABELS, clients=OWNERS, test=(X, LABELS))
    task = hansa.Task(
        lambda: nn.Linear(4, 1), lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y.float()), data
    )
    assert task.metric is None
    assert "may be a logit or a probability" in caplog.text
