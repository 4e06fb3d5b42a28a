"""Reported numbers are those of all test rows, for any loss: each case was wrong once."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.nn import functional as F

import hansa
from hansa import HansaError, losses, presets
from hansa.core import native
from hansa.core.keys import Key
from hansa.core.types import MODEL
from hansa.data import from_arrays, from_items
from hansa.rounds.measures import heterogeneity
from mistakes import refused
from training.evaluation_tasks import Focal, Net, check, check_heterogeneity, problems

DRAW = torch.Generator().manual_seed(3)
X = torch.randn(2400, 3, generator=DRAW)
Y = torch.randint(0, 3, (2400,), generator=DRAW).sort().values
OWNERS = torch.arange(2400).remainder(3)
WEIGHT = torch.tensor([0.1, 1.0, 7.0])
CPU = torch.device("cpu")


def evaluated(task, vectors=None):
    """The reported numbers at the initial model, and the model's outputs for all test rows."""
    vectors = task.start(Key(0), torch.float32) if vectors is None else vectors
    with torch.no_grad():
        output = task.module(vectors).eval()(task.data.test_inputs)
    return task.evaluate(task.trainer(torch.float32, CPU), vectors), output


TASKS = int(os.environ.get("HANSA_TASKS", "40"))
"""How many random tasks are tried; ``make fuzz`` tries thousands of others."""


@settings(max_examples=TASKS, deadline=None, derandomize=TASKS == 40, suppress_health_check=list(HealthCheck))
@given(problems())
def test_any_task_agrees_with_a_plain_loop_in_float64(problem):
    check(problem)
    if TASKS > 40 and problem.kind != "ragged":
        check_heterogeneity(problem)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(problems(kinds=("class", "regression", "sequence", "coupled")))
def test_heterogeneity_is_that_of_all_rows_of_a_client(problem):
    check_heterogeneity(problem)


def test_workers_send_outputs_for_a_loss_of_all_rows():
    def spread(output, target):
        return output.std() + F.cross_entropy(output, target)

    task = hansa.Task(lambda: Net(3), spread, from_arrays(X, Y, clients=OWNERS, test=(X, Y)))
    run = hansa.run(presets.fedavg(local_lr=0.01, steps=1, batch_size=9), task, rounds=1, workers=2)
    with torch.no_grad():
        expected = float(spread(run.model.eval()(X), Y))
    assert run.history[-1]["test_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_loss_of_ones_own_gives_one_value_per_row_where_rows_have_weights():
    data = from_arrays(X[:60], Y[::40], clients=3, weights=torch.rand(60), test=(X[:60], Y[::40]))
    with pytest.raises(HansaError, match=r"Focal returned shape \[\] for \d+ weighted rows: expected one value"):
        hansa.Task(lambda: Net(3), Focal(), data)
    assert hansa.Task(lambda: Net(3), Focal(reduction="none"), data).loss_sums is not None


@pytest.mark.parametrize(
    "loss",
    [
        Focal(2.0),
        Focal(2.0, obeys=False),
        nn.CrossEntropyLoss(ignore_index=0),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(weight=WEIGHT),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        partial(F.cross_entropy, ignore_index=1),
        losses.cross_entropy(class_weights=[1.0, 1.0, 1.0]),
    ],
    ids=["focal", "focal mean", "ignore", "sum", "weight", "smooth", "partial", "ours"],
)
def test_native_code_takes_no_other_loss_for_plain_cross_entropy(loss):
    assert hansa.Task(lambda: Net(3), loss, from_arrays(X[:90], Y[:90], clients=3)).network is None
    if native.available() and native.instruction_set() != "base":
        plain = hansa.Task(lambda: Net(3), nn.CrossEntropyLoss(), from_arrays(X[:90], Y[:90], clients=3))
        assert plain.network is not None


@pytest.mark.parametrize("choice", ["auto", "eager"], ids=["native", "eager"])
def test_heterogeneity_is_without_dropout_in_native_models_too(choice):
    data = from_arrays(X[:300], Y[::8], clients=2)
    found = heterogeneity(hansa.Task(lambda: Net(3, dropout=0.6), F.cross_entropy, data, execution=choice))
    without = heterogeneity(hansa.Task(lambda: Net(3), F.cross_entropy, data, execution="eager"))
    assert found.gradient_norm == pytest.approx(without.gradient_norm, rel=1e-5)
    assert found.sigma_l == pytest.approx(without.sigma_l, rel=1e-5)


VOCABULARY = 7


class Reader(nn.Module):
    """A model of token numbers as users write theirs."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 5), nn.Linear(5, VOCABULARY)

    def forward(self, input_ids):
        return self.head(torch.tanh(self.embed(input_ids)))


def shifted(output, target):
    return F.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


class Reply:
    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


class OwnLoss(Reader):
    """A model that shifts labels itself and returns its loss, as those of transformer libraries do."""

    def forward(self, input_ids, labels):
        logits = super().forward(input_ids)
        return Reply(shifted(logits, labels), logits)


@torch.no_grad()
def test_a_language_model_that_shifts_labels_has_its_loss_and_no_guessed_accuracy(caplog):
    ids = torch.randint(0, VOCABULARY, (60, 6), generator=DRAW)
    data = from_arrays(ids, ids, clients=3, test=(ids, ids))
    found, output = evaluated(hansa.Task(Reader, shifted, data, evaluation_batch_size=7))
    assert found["test_loss"] == pytest.approx(float(shifted(output, ids)), rel=1e-5)
    assert "test_accuracy" not in found
    assert "no accuracy" in caplog.text
    assert "metric=" in caplog.text


@torch.no_grad()
def test_outputs_without_rows_need_a_stated_reduction():
    ids = torch.randint(0, VOCABULARY, (60, 6), generator=DRAW)
    inputs = {"input_ids": ids, "labels": ids}
    data = from_arrays(inputs, ids, clients=3, test=(inputs, ids))
    options = {"loss": lambda output, target: output.loss, "data": data, "evaluation_batch_size": 7}
    expected = r"Task\(loss\).*Reply with values that are not tensors.*Task\(reduction='mean'\)"
    with pytest.raises(HansaError, match=expected):
        hansa.Task(OwnLoss, **options)
    task = hansa.Task(OwnLoss, **options, reduction="mean")
    vectors = task.start(Key(0), torch.float32)
    found = task.evaluate(task.trainer(torch.float32, CPU), vectors)
    expected = float(task.module(vectors).eval()(**inputs).loss)
    assert found["test_loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(HansaError, match=r"reduction='average'.*'mean' or 'sum' or 'labels'"):
        hansa.Task(OwnLoss, **options, reduction="average")


def test_outputs_beyond_a_gigabyte_need_a_stated_reduction(monkeypatch):
    monkeypatch.setattr("hansa.training.evaluation._OUTPUT_BYTES", 2399 * 12)
    data = from_arrays(X, Y, clients=OWNERS, test=(X, Y))
    with pytest.raises(HansaError, match=r"take .* GiB for 2,400 rows.*reduction"):
        hansa.Task(lambda: Net(3, relu=False), Focal(), data)
    assert hansa.Task(lambda: Net(3, relu=False), Focal(), data, reduction="mean").loss_sums is not None


def test_the_evaluation_batch_follows_the_size_of_the_outputs():
    zeros = torch.zeros(6, 32, dtype=torch.int64)
    data = from_arrays(X[:6], zeros, clients=2, test=(X[:6], zeros))

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 32)

        def forward(self, x):
            return self.layer(x)[:, :, None].expand(-1, 32, 8192)

    task = hansa.Task(Wide, losses.cross_entropy(class_axis="last"), data)
    assert 1 <= task.evaluation_batch_size <= 256  # of 4 MB and more a row, not 500
    narrow = from_arrays(X, Y, clients=OWNERS, test=(X, Y))
    assert hansa.Task(lambda: Net(3), F.cross_entropy, narrow).evaluation_batch_size == 500
    task = hansa.Task(lambda: nn.Linear(3, 3), F.cross_entropy, narrow, evaluation_batch_size=64, execution="eager")
    found, output = evaluated(task)
    assert found["test_loss"] == pytest.approx(float(F.cross_entropy(output, Y)), rel=1e-5)
    with pytest.raises(HansaError, match=r"Task\(evaluation_batch_size=0\)"):
        hansa.Task(lambda: Net(3), F.cross_entropy, narrow, evaluation_batch_size=0)


def rows_with_ignored_labels(some):
    return torch.stack([X[i] for i in some]), torch.tensor(
        [-100 if i > 120 and i % 3 == 0 else int(Y[i]) for i in some]
    )


def test_ignored_labels_that_only_some_batches_have_train_natively_as_in_torch():
    """The probed rows, of the first client, have none."""
    items = [*range(30), *range(2000, 2090)]
    data = from_items(
        items, rows_with_ignored_labels, clients=[min(place // 30, 2) for place in range(120)], test=items
    )
    runs = []
    for choice in ("auto", "eager"):
        task = hansa.Task(lambda: Net(3), F.cross_entropy, data, execution=choice)
        algorithm = presets.fedavg(local_lr=0.1, local_momentum=0.5, steps=4, batch_size=7, participation=1.0)
        runs.append(hansa.run(algorithm, task, rounds=2, workers=1))
    assert torch.allclose(runs[0].params, runs[1].params, atol=1e-6)
    assert runs[0].history[-1]["test_loss"] == pytest.approx(runs[1].history[-1]["test_loss"], rel=1e-5)
    assert runs[0].history[-1]["participants"] == 3


class Own:
    """Data of a user's own class."""

    def __init__(self, data):
        self.inputs, self.targets, self.population = data.inputs, data.targets, data.population
        self.test_inputs, self.test_targets = data.test_inputs, data.test_targets
        self.rows, self.samples = data.rows, data.samples


def test_ignored_labels_of_test_rows_alone_do_not_count():
    data = Own(from_arrays(X, Y, clients=OWNERS, test=(X, Y)))
    data.test_targets = torch.where(torch.arange(2400) % 5 == 0, -100, Y)
    found, output = evaluated(hansa.Task(lambda: Net(3), F.cross_entropy, data))
    counted = data.test_targets >= 0
    assert found["test_loss"] == pytest.approx(float(F.cross_entropy(output, data.test_targets)), rel=1e-5)
    assert found["test_accuracy"] == pytest.approx(float((output.argmax(1) == Y)[counted].double().mean()))


def test_named_test_sets_are_reported_under_their_names():
    pooled, local = (X[:700], Y[:700]), (X[700:], Y[700:])
    data = from_arrays(X, Y, clients=OWNERS)
    task = hansa.Task(lambda: Net(3), F.cross_entropy, data, test={"pooled": pooled, "local": local})
    run = hansa.run(presets.fedavg(local_lr=0.1, steps=1, batch_size=9), task, rounds=2, workers=2)
    record, module = run.history[-1], run.model.eval()
    for name, (x, y) in (("pooled", pooled), ("local", local)):
        with torch.no_grad():
            output = module(x)
        assert record[f"{name}/test_loss"] == pytest.approx(float(F.cross_entropy(output, y)), rel=1e-5)
        assert record[f"{name}/test_accuracy"] == pytest.approx(float((output.argmax(1) == y).double().mean()))
    assert record["test_loss"] == record["pooled/test_loss"]  # the data has no test set: the first one counts

    own = from_arrays(X, Y, clients=OWNERS, test=local)
    both = hansa.Task(lambda: Net(3), F.cross_entropy, own, test={"pooled": from_arrays(X, Y, clients=3, test=pooled)})
    found = both.evaluate(both.trainer(torch.float32, CPU), {MODEL: run.params})
    assert found["test_loss"] == pytest.approx(record["local/test_loss"], rel=1e-6)
    assert found["pooled/test_loss"] == pytest.approx(record["pooled/test_loss"], rel=1e-6)


test_test_sets_unlike_the_data_are_refused = refused(
    ({"a b": (X, Y)}, "expected an identifier as the name of a test set"),
    ({"pooled": X}, "pooled is Tensor: expected a pair"),
    ({"pooled": (X[:, :2], Y)}, r"the inputs of pooled are float32 \[2400, 2\], those of the training data"),
    ({"pooled": (X, Y.float())}, "the targets of pooled are float32"),
    ({"pooled": (X[:5], Y)}, "not as many inputs as targets"),
    ((X, Y), r"Task\(test=tuple\): expected a dict of test sets by name"),
    by=lambda test: hansa.Task(lambda: Net(3), F.cross_entropy, from_arrays(X, Y, clients=OWNERS), test=test),
)
