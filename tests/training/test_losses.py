"""The test loss is that of all test rows, whatever the loss makes of a batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hansa
from hansa import HansaError, config, losses, presets
from hansa.data import from_arrays
from hansa.training.losses import WeightedTargets
from mistakes import refused

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


test_a_loss_that_cannot_be_trained_is_refused_with_a_sentence = refused(
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
    by=lambda loss: hansa.Task(Net, loss, DATA),
)


def test_parameters_that_the_model_does_not_list_are_refused_unless_they_are_frozen():
    with pytest.raises(HansaError, match=r"Unlisted and the loss cross_entropy use parameters of shape .*Register"):
        hansa.Task(Unlisted, F.cross_entropy, DATA)
    other = nn.Linear(3, 3).requires_grad_(False)
    hansa.Task(Net, lambda output, target: F.cross_entropy(other(output), target), DATA)


def truth(output):
    return float((output.argmax(1) == Y).double().mean())


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


test_metrics_without_a_proper_name_or_value_are_refused = refused(
    ({"metrics": {"loss": hansa.higher(Share())}}, "expected an identifier"),
    ({"metrics": {"a b": hansa.higher(Share())}}, "expected an identifier"),
    ({"metrics": {"auc": 3}}, "a function of"),
    (
        {"metrics": {"logits": hansa.higher(lambda output, target: output)}},
        r"logits returned float32 \[12, 3\]",
    ),
    ({"metric": lambda output, target: output}, "expected one number for all rows"),
    ({"metric": lambda output, target: (target >= 0).sum()}, "expected one value per row, or one number up to 1"),
    by=lambda words: hansa.Task(Net, F.cross_entropy, DATA, **words),
)


LABELS = (X[:, 0] > 0.9).long()  # a fifth are 1


def test_one_output_of_an_unknown_loss_has_no_guessed_accuracy(caplog):
    data = from_arrays(X, LABELS, clients=OWNERS, test=(X, LABELS))
    task = hansa.Task(
        lambda: nn.Linear(4, 1), lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y.float()), data
    )
    assert task.metric is None
    assert "may be a logit or a probability" in caplog.text


@torch.no_grad()
def test_a_row_of_weight_two_is_the_row_twice_and_one_of_weight_zero_is_none():
    model, x, y = nn.Linear(3, 3), X[:3, :3], torch.tensor([0, 2, 1])
    for loss, target in ((losses.cross_entropy([1.0, 5.0, 0.5]), y), (losses.mse(), x), (losses.bce(2.0), x.sigmoid())):
        weighted = loss(model(x), WeightedTargets(target, torch.tensor([2.0, 1.0, 0.0])))
        again = torch.tensor([0, 0, 1])
        assert float(weighted) == pytest.approx(float(loss(model(x[again]), target[again])), rel=1e-6)
    assert float(losses.cross_entropy()(model(x), torch.full((3,), -100))) == 0  # nothing counts: no loss, not NaN
    for smoothing in (0.0, 0.1):
        ours = losses.cross_entropy([1.0, 5.0, 0.5], label_smoothing=smoothing)
        total, weight = ours.sums(model(x), y)
        theirs = F.cross_entropy(model(x), y, torch.tensor([1.0, 5.0, 0.5]), label_smoothing=smoothing)
        assert float(total / weight) == pytest.approx(float(theirs), rel=1e-6)
    assert float(losses.cross_entropy([1.0, 5.0, 0.5])(model(x), y)) == pytest.approx(
        float(F.cross_entropy(model(x), y, torch.tensor([1.0, 5.0, 0.5]))), rel=1e-6
    )


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
