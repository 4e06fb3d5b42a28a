"""Losses, metrics and tasks: any module and any loss, whatever the loss makes of a batch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy

import hansa
from hansa import HansaError, config, losses, presets
from hansa.data import from_arrays
from hansa.training.losses import WeightedTargets
from hansa.training.metrics import c_index, roc_auc
from mistakes import refused
from training.shards import Shards

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


def auc_by_pairs(scores, labels):
    positive = [s for s, y in zip(scores, labels, strict=True) if y]
    negative = [s for s, y in zip(scores, labels, strict=True) if not y]
    wins = [(p > n) + 0.5 * (p == n) for p in positive for n in negative]
    return sum(wins) / len(wins) if wins else math.nan


def c_index_by_pairs(risk, event, time):
    """Harrell's definition, written from its text."""
    score, count = 0.0, 0
    for i, j in itertools.combinations(range(len(risk)), 2):
        if time[i] == time[j] and event[i] and event[j]:
            score, count = score + (1.0 if risk[i] == risk[j] else 0.5), count + 1
            continue
        if time[i] == time[j]:
            first, last = (i, j) if event[i] else (j, i)
        else:
            first, last = (i, j) if time[i] < time[j] else (j, i)
        if event[first]:
            score += 1.0 if risk[first] > risk[last] else 0.5 * (risk[first] == risk[last])
            count += 1
    return score / count if count else math.nan


ROWS = st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_the_area_is_the_share_of_ordered_pairs(rows):
    scores, labels = torch.tensor([float(s) for s, _ in rows]), torch.tensor([int(y) for _, y in rows])
    expected = auc_by_pairs(scores.tolist(), labels.tolist())
    for output in (scores, scores[:, None], torch.stack([-scores, torch.zeros_like(scores)], 1)):
        assert roc_auc(output, labels) == pytest.approx(expected, abs=1e-12, nan_ok=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 5)), min_size=2, max_size=25))
def test_the_concordance_index_is_harrells(rows):
    risk = torch.tensor([[float(r)] for r, _, _ in rows])
    target = torch.tensor([[float(e), float(t)] for _, e, t in rows])
    expected = c_index_by_pairs(*zip(*rows, strict=True))
    assert c_index(risk, target) == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_many_rows_are_compared_in_blocks():
    draw = torch.Generator().manual_seed(0)
    risk, time = torch.randn(1200, generator=draw), torch.rand(1200, generator=draw)
    target = torch.stack([torch.ones(1200), time], 1)
    ordered = (risk[:, None] > risk) & (time[:, None] < time)
    assert c_index(risk, target) == pytest.approx(int(ordered.sum()) / (1200 * 1199 / 2))


@pytest.mark.parametrize("fewest", [1, 5, 10])
@pytest.mark.parametrize("seed", range(4))
def test_sketches_bound_the_area_of_all_rows_and_have_no_small_count(fewest, seed):
    """Sites of unequal sizes and shares, whose scores differ in level; the estimate is near where cells are small."""
    draw = torch.Generator().manual_seed(seed)
    sites = []
    for rows, shift, share in ((90, 0.0, 0.3), (400, 1.5, 0.7), (60, -2.0, 0.5)):
        labels = (torch.rand(rows, generator=draw) < share).long()
        sites.append((torch.randn(rows, generator=draw) + labels * 1.2 + shift, labels))
    sketches = [roc_auc.sketch(*site, fewest=fewest) for site in sites]
    for sketch, (_, labels) in zip(sketches, sites, strict=True):
        counts = {name: [count for count, _ in sketch[name]] for name in sketch}
        assert min(min(each) for each in counts.values()) >= fewest
        assert (sum(counts["positive"]), sum(counts["negative"])) == (int(labels.sum()), int((1 - labels).sum()))
    found = roc_auc.combine(sketches)
    exact = roc_auc(torch.cat([s for s, _ in sites]), torch.cat([y for _, y in sites]))
    assert found.at_least <= exact <= found.at_most
    assert found.value == pytest.approx(exact, abs={1: 0.002, 5: 0.005, 10: 0.01}[fewest])
    assert found == pytest.approx(roc_auc.combine(sketches[::-1]))


def test_a_group_shows_its_mean_and_nothing_of_its_rows():
    """Two rows of a group that move in opposite directions change nothing that is sent."""
    labels = torch.tensor([0] * 8 + [1] * 8)
    shares = torch.linspace(0.1, 0.9, 16, dtype=torch.float64)
    moved = shares.clone()
    moved[[8, 11]] += torch.tensor([-0.02, 0.02], dtype=torch.float64)
    first, second = (roc_auc.sketch(torch.logit(each), labels, fewest=4) for each in (shares, moved))
    assert first == second
    assert [rows for rows, _ in first["positive"]] == [4, 4]
    assert first["positive"][0][1] == pytest.approx(float(shares[8:12].mean()), abs=1e-6)


def test_equal_scores_count_one_half():
    sketch = roc_auc.sketch(torch.zeros(40), torch.tensor([0, 1] * 20), fewest=5)
    assert roc_auc.combine([sketch, sketch]).value == pytest.approx(0.5)


def test_a_rare_class_has_no_sketch():
    labels = torch.tensor([0] * 20 + [1] * 4)
    assert roc_auc.smallest_group(labels) == 4
    assert roc_auc.sketch(torch.randn(24), labels, fewest=5) is None
    assert roc_auc.sketch(torch.randn(24), torch.zeros(24), fewest=1) is None
    assert c_index.smallest_group(torch.tensor([[1.0, 3.0], [0.0, 2.0], [1.0, 1.0]])) == 2


@pytest.mark.parametrize(
    "groups",
    [[], [[0, 0.5]], [[-3, 0.5]], [[5]], [[5, 0.5, 1]], [[2.5, 0.5]], [[5, -0.1]], [[5, 1.1]], [[5, 0.6], [5, 0.4]],
     [[1 << 50, 0.5]], [[5, 0.5]] * 201],
)  # fmt: skip
def test_impossible_sketches_are_refused(groups):
    good = [[5, 0.5]]
    assert roc_auc.combine([{"positive": good, "negative": good}]).value == pytest.approx(0.5)
    with pytest.raises(ValueError, match="group"):
        roc_auc.combine([{"positive": groups, "negative": good}])
    with pytest.raises(ValueError, match="group"):
        roc_auc.combine([{"positive": good, "negative": groups}])
    with pytest.raises(ValueError, match="two classes"):
        roc_auc.combine([{"positive": good}])


test_bad_outputs_and_targets_are_named = refused(
    (lambda: roc_auc(torch.randn(4, 3), torch.tensor([0, 1, 0, 1])), r"outputs of shape \(4, 3\), expected one or two"),
    (lambda: roc_auc(torch.randn(3), torch.tensor([0, 1, 2])), "expected 0 or 1"),
    (lambda: c_index(torch.randn(3), torch.ones(3)), r"expected \(rows, 2\): event and time"),
    (lambda: c_index(torch.randn(3, 2), torch.ones(3, 2)), r"outputs of shape \(3, 2\), expected one per row"),
)


def test_a_configuration_names_them_without_a_module(tmp_path):
    data = "rounds: 1\ndata: {name: heart-disease, options: {test: 0.25}}\n"
    text = data + "model: {name: logistic, metrics: {auc: NAME}}\n"
    config = hansa.config.from_yaml(text.replace("NAME", "roc_auc"))
    task = hansa.config.build.build_task(config, hansa.config.build.load_data(config))
    assert task.metrics == {"auc": roc_auc}
    assert task.directions == {"auc": "higher"}
    found = task.evaluate(task.trainer(torch.float32, torch.device("cpu")), task.start(hansa.Key(0), torch.float32))
    module = task.module(task.start(hansa.Key(0), torch.float32))
    with torch.no_grad():
        output = module(task.data.test_inputs)
    assert found["test_auc"] == roc_auc(output, task.data.test_targets)
    wrong = hansa.config.from_yaml(text.replace("NAME", "roc_auk"))
    with pytest.raises(HansaError, match=r"model\.metrics\.auc: no 'roc_auk'.*roc_auc"):
        hansa.config.build.build_task(wrong, hansa.config.build.load_data(wrong))


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
