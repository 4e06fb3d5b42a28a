"""The form a model runs in: as people write models, native where proven the same, eager for all else."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hansa
from core.native.models import words_of
from core.native.written import WRITTEN, LeNet5, TwoNN
from hansa import HansaError, local, presets, server
from hansa.core import native
from hansa.core.native.network import Network
from hansa.core.native.tracing import NotEligible
from hansa.engine.auto import auto_engine
from hansa.runs.driver import Run
from hansa.training import execution_mode, random_state
from training.shards import Shards

pytestmark = pytest.mark.usefixtures("shared_workers")

WITH_NATIVE = pytest.mark.skipif(
    not native.available() or native.instruction_set() == "base", reason="no native kernels with vector units"
)


def made(name, **options):
    model, loss, shape, classes = WRITTEN[name]
    return hansa.Task(model, loss, Shards.of(shape, classes, words=words_of(model())), **options)


ALGORITHM = presets.fedavg(
    local_lr=0.05, steps=3, batch_size=4, local_momentum=0.5, weight_decay=0.01, max_grad_norm=1.0
)


@WITH_NATIVE
@pytest.mark.parametrize("name", WRITTEN)
def test_what_people_write_is_recognised_and_native_equals_eager_to_rounding(name):
    task = made(name, execution="native")
    ours = hansa.run(ALGORITHM, task, rounds=2, workers=1)
    eager = hansa.run(ALGORITHM, made(name, execution="eager"), rounds=2, workers=1)
    scale = float((eager.params - task.start(hansa.Key(0), torch.float32)["model"]).norm())
    assert float((ours.params - eager.params).norm()) < 1e-3 * scale
    assert ours.history[-1]["test_loss"] == pytest.approx(eager.history[-1]["test_loss"], rel=1e-4)
    assert ours.history[-1]["train_loss"] == pytest.approx(eager.history[-1]["train_loss"], rel=1e-4)
    assert torch.equal(ours.params, hansa.run(ALGORITHM, task, rounds=2, workers=2).params)


@WITH_NATIVE
def test_worker_processes_use_the_form_that_the_task_found():
    run = Run(ALGORITHM, made("LeNet-5"), engine=auto_engine(2, 2, "process"))
    assert torch.equal(run.advance(2).params, hansa.run(ALGORITHM, made("LeNet-5"), rounds=2, workers=1).params)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def variant(forward):
    """The network with another forward()."""
    return type("Variant", (Net,), {"forward": forward})


class Warm:
    steps = 0


WARM, STEPS = Warm(), 0


class Carries(Net):
    """Has an object, a list, a buffer and parameters beside its layers."""

    def __init__(self):
        super().__init__()
        self.warm, self.seen = Warm(), []


class CountsInAnObject(Carries):
    def forward(self, x):
        self.warm.steps += 1
        return super().forward(x if self.warm.steps < 20 else -x)


class Remembers(Carries):
    def forward(self, x):
        self.seen.append(len(x))
        return super().forward(x)


class CountsInAGlobalObject(Net):
    def forward(self, x):
        WARM.steps += 1
        return super().forward(x)


class CountsInAGlobal(Net):
    def forward(self, x):
        global STEPS
        STEPS += 1
        return super().forward(x)


class Counts(Net):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Jumps(Net):
    """Drops what the first layer gave."""

    def forward(self, x):
        self.fc1(x)
        return self.fc2(x)


class Chance(Net):
    def forward(self, x):
        random.random()
        np.random.rand()  # noqa: NPY002
        return super().forward(x)


class HalfFrozen(Net):
    def forward(self, x):
        with torch.no_grad():
            x = F.relu(self.fc1(x))
        return self.fc2(x)


def hooked(register):
    def make():
        module = Net()
        register(module)
        return module

    return make


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.relu()

    @staticmethod
    def backward(ctx, g):
        return g


def plain(output, target):
    return F.cross_entropy(output, target)


REFUSED = {
    "forward hook": (hooked(lambda m: m.fc1.register_forward_hook(lambda *_: None)), plain, "hook"),
    "backward hook": (hooked(lambda m: m.fc2.register_full_backward_hook(lambda *_: None)), plain, "hook"),
    "hook of a weight": (hooked(lambda m: m.fc1.weight.register_hook(lambda g: 2 * g)), plain, "fc1.weight has a hook"),
    "counts in an object": (CountsInAnObject, plain, r"writes to CountsInAnObject.warm.steps"),
    "counts in a global object": (CountsInAGlobalObject, plain, "an object that is a global"),
    "counts in a global": (CountsInAGlobal, plain, "writes to the global STEPS"),
    "counts": (Counts, plain, "writes to Counts.calls"),
    "remembers": (Remembers, plain, "writes to Remembers.seen"),
    "leaves a layer out": (Jumps, plain, "computes something that it does not use"),
    "chance": (Chance, plain, "random numbers"),
    "half frozen": (HalfFrozen, plain, "_set_grad_enabled"),
    "spare parameters": (hooked(lambda m: m.add_module("spare", nn.Linear(2, 2))), plain, "does not use"),
    "buffers": (hooked(lambda m: m.register_buffer("mean", torch.zeros(12))), plain, "buffers"),
    "other loss": (Net, lambda out, y: F.multi_margin_loss(out, y), "multi_margin_loss"),
    "no log_softmax": (Net, F.nll_loss, "does not end in log_softmax"),
    "loss with a penalty": (Net, lambda out, y: F.cross_entropy(out, y) + 0.01 * out.square().mean(), "square"),
}
FORWARDS = {
    "control flow": (lambda m, x: Net.forward(m, x if x.mean() > 0 else -x), "torch.Tensor.mean"),
    "control flow by batch": (lambda m, x: Net.forward(m, x if x.shape[0] < 100 else -x), "size of the batch"),
    "control flow by a product": (lambda m, x: Net.forward(m, x if 2 * x.size(0) <= 16 else -x), "size of the batch"),
    "training differs": (lambda m, x: m.fc2(F.relu(m.fc1(x)) if m.training else m.fc1(x)), "another one in training"),
    "scaled": (lambda m, x: Net.forward(m, x) * 2, "torch.Tensor.mul"),
    "detached": (lambda m, x: m.fc2(F.relu(m.fc1(x)).detach()), "detach"),
    "mixes rows": (lambda m, x: m.fc2(F.relu(m.fc1(x)).flatten(0).view(12, -1).t()), "mixes the rows"),
    "own backward": (lambda m, x: m.fc2(BadBackward.apply(m.fc1(x))), ""),
}
REFUSED |= {name: (variant(forward), plain, why) for name, (forward, why) in FORWARDS.items()}


@WITH_NATIVE
@pytest.mark.parametrize("name", REFUSED)
def test_what_native_code_would_do_otherwise_is_eager_bit_for_bit_and_says_why(name, caplog):
    make, loss, why = REFUSED[name]
    with caplog.at_level(logging.INFO, logger="hansa"):
        task = hansa.Task(make, loss, Shards.of((12,), 3))
    assert task.network is None
    said = [record.message for record in caplog.records if "eager PyTorch" in record.message]
    assert len(said) == 1
    assert why in said[0]
    with pytest.raises(HansaError, match="has no native form"):
        hansa.Task(make, loss, Shards.of((12,), 3), execution="native")
    eager = hansa.Task(make, loss, Shards.of((12,), 3), execution="eager")
    runs = [hansa.run(ALGORITHM, one, rounds=2, workers=1).params for one in (task, eager)]
    assert torch.equal(*runs)


@WITH_NATIVE
def test_a_wide_residual_network_stays_eager_bit_for_bit_and_says_why(caplog, monkeypatch):
    monkeypatch.setattr(execution_mode, "_WIDE", 8 * 8 * 9)  # the convolutions have a bias too
    with caplog.at_level(logging.INFO, logger="hansa"):
        tasks = [made("small ResNet", execution=choice) for choice in ("auto", "eager")]
    assert tasks[0].network is None
    assert "trained by eager PyTorch: PyTorch is faster for residual networks with 576 weights" in caplog.text
    runs = [hansa.run(ALGORITHM, one, rounds=2, workers=1).params for one in tasks]
    assert torch.equal(*runs)
    assert made("small ResNet", execution="native").network is not None
    assert made("LeNet-5").network is not None  # a chain of convolutions is native at any width


@WITH_NATIVE
@pytest.mark.parametrize("execution", ["native", "eager"])
def test_a_token_that_the_table_does_not_have_is_an_error_in_training_and_evaluation(execution):
    data = Shards.of((11,), 4, sizes=(30, 30, 30), words=300)
    data.test_inputs, data.test_targets = data.inputs[:40].clone(), data.targets[:40]
    data.test_inputs[33, 2] = 300
    model, loss, _, _ = WRITTEN["bag of words"]
    with pytest.raises((HansaError, IndexError, RuntimeError), match=r"out of range|valid range"):
        hansa.run(ALGORITHM, hansa.Task(model, loss, data, execution=execution), rounds=1)
    data.test_inputs[33, 2], data.inputs[[31, 62, 88], 7] = 299, -1
    with pytest.raises((HansaError, IndexError, RuntimeError), match=r"out of range|valid range"):
        hansa.run(presets.fedavg(steps=8), hansa.Task(model, loss, data, execution=execution), rounds=1)


class OnDemand(Shards):
    """Rows that are cut to the longest of each batch, as a function that collates text does."""

    def fetch(self, client, rows):
        inputs = self.inputs[rows]
        return inputs[:, : 5 + int(rows[0]) % 6], self.targets[rows]


@WITH_NATIVE
def test_tokens_whose_length_may_change_are_trained_eagerly():
    data = OnDemand.of((11,), 4, words=300)
    model, loss, _, _ = WRITTEN["bag of words"]
    task = hansa.Task(model, loss, data)
    assert task.network is None
    assert "may differ in length" in task.eager_reason
    assert hansa.run(ALGORITHM, task, rounds=1).params.isfinite().all()
    assert hansa.Task(model, loss, Shards.of((11,), 4, words=300)).network is not None


@WITH_NATIVE
@pytest.mark.parametrize("form", [lambda x: x[:, :7].contiguous(), lambda x: x.int()])
def test_test_rows_of_another_length_or_dtype_are_evaluated_eagerly(form):
    data, model = Shards.of((11,), 4, words=300), WRITTEN["bag of words"][0]
    data.test_inputs = form(data.test_inputs)
    runs = [
        hansa.run(ALGORITHM, hansa.Task(model, F.cross_entropy, data, execution=n), rounds=1)
        for n in ("native", "eager")
    ]
    assert runs[0].history[-1]["test_loss"] == pytest.approx(runs[1].history[-1]["test_loss"], rel=1e-5)


@WITH_NATIVE
def test_a_wrong_native_form_does_not_pass_the_proof():
    """The forms are compared on real batches: a stack without its ReLU, or with another order of layers, is caught."""
    model, loss, shape, classes = WRITTEN["2NN"]
    data = Shards.of(shape, classes)
    task = hansa.Task(model, loss, data)
    stages = list(task.network.stages)
    stages[1] = replace(stages[1], relu=False)
    trial = task.trial(torch.float32, torch.device("cpu"))
    with pytest.raises(NotEligible, match=r"native (loss|gradient)"):
        execution_mode._compare_native(Network(tuple(stages), shape), trial, data.inputs, data.targets)


@WITH_NATIVE
def test_a_metric_of_ones_own_is_measured_eagerly_while_training_stays_native():
    data = Shards.of((1, 28, 28), 10)
    within_two = lambda out, y: (out.topk(2).indices == y[:, None]).any(1)  # noqa: E731
    task = hansa.Task(TwoNN, F.cross_entropy, data, metric=within_two)
    assert task.network is not None
    run = hansa.run(ALGORITHM, task, rounds=2)
    with torch.no_grad():
        output = run.model.eval()(data.test_inputs)
    assert run.history[-1]["test_accuracy"] == float(within_two(output, data.test_targets).double().mean())
    assert run.history[-1]["test_loss"] == pytest.approx(float(F.cross_entropy(output, data.test_targets)), rel=1e-5)
    assert torch.equal(run.params, hansa.run(ALGORITHM, hansa.Task(TwoNN, F.cross_entropy, data), rounds=2).params)


@WITH_NATIVE
def test_targets_that_the_loss_leaves_out_keep_to_eager():
    data = Shards.of((3, 32, 32), 10)
    data.targets[3] = -100
    task = hansa.Task(LeNet5, nn.CrossEntropyLoss(), data)
    assert task.network is None
    hansa.run(ALGORITHM, task, rounds=1)


@WITH_NATIVE
@pytest.mark.parametrize("name", ["the old MNIST example", "drops everywhere", "pre-activation of images"])
def test_native_dropout_keeps_the_very_values_that_eager_dropout_keeps(name, monkeypatch):
    """Of ones, dropout leaves what it multiplies by: as a worker draws it for its third step, as torch draws it."""
    task, key = made(name, execution="native"), hansa.Key(3).child("noise", 2)
    trainer = task.trainer(torch.float32, torch.device("cpu"))
    trainer.seed(key)
    keep = trainer._draw_dropout(4)
    eager, drop, drop2d = [], F.dropout, F.dropout2d
    monkeypatch.setattr(F, "dropout", lambda x, *a, **k: eager.append(drop(torch.ones_like(x), *a, **k)) or x)
    monkeypatch.setattr(F, "dropout2d", lambda x, *a, **k: eager.append(drop2d(torch.ones_like(x), *a, **k)) or x)
    with random_state.preserve_rng():
        random_state.seed_all(key, torch.device("cpu"))
        trainer.module(trainer.batch(0, torch.arange(4)).inputs)
    stages = [stage for stage in task.network.stages if stage.drop is not None]
    assert len(eager) == len(stages)
    for stage, piece, wanted in zip(stages, keep.split([4 * s.dropout_numbers for s in stages]), eager, strict=True):
        if wanted.ndim == 4 and stage.dropout_numbers == stage.out:
            wanted = wanted[:, :, 0, 0]
        elif wanted.ndim == 4:
            wanted = wanted.permute(0, 2, 3, 1)
        assert torch.equal(piece, wanted.reshape(-1))
        assert {0.0, 1.0} != set(piece.tolist()) != {0.0}


AUGMENT = [hansa.augment.crop(1), hansa.augment.flip()]


@WITH_NATIVE
def test_dropout_of_augmented_batches_is_native_and_equals_eager_to_rounding():
    runs = [
        hansa.run(ALGORITHM, made("drops everywhere", execution=choice, augment=AUGMENT), rounds=2, workers=1)
        for choice in ("native", "eager")
    ]
    assert torch.allclose(runs[0].params, runs[1].params, atol=1e-5)


@WITH_NATIVE
def test_an_augmentation_of_ones_own_draws_before_dropout_and_keeps_to_eager(caplog):
    with caplog.at_level(logging.INFO, logger="hansa"):
        task = made("drops everywhere", augment=[lambda batch, _: batch + 0.1 * torch.randn_like(batch)])
    assert task.network is None
    assert "user-defined augmentation" in caplog.text


@WITH_NATIVE
def test_many_steps_of_dropout_are_drawn_piece_by_piece_with_the_same_bits(monkeypatch):
    whole = hansa.run(ALGORITHM, made("drops everywhere"), rounds=1, workers=1).params
    monkeypatch.setattr("hansa.training.trainer._DROPOUT_NUMBERS", 1)
    assert torch.equal(hansa.run(ALGORITHM, made("drops everywhere"), rounds=1, workers=1).params, whole)


@WITH_NATIVE
def test_momentum_that_is_kept_from_round_to_round_is_kept_by_native_code_too():
    algorithm = replace(ALGORITHM, local=replace(ALGORITHM.local, optimizer_state="kept"))
    ours, eager = (
        hansa.run(algorithm, made("2NN", execution=choice), rounds=3, workers=1) for choice in ("native", "eager")
    )
    fresh = hansa.run(ALGORITHM, made("2NN", execution="native"), rounds=3, workers=1)
    assert torch.allclose(ours.params, eager.params, atol=1e-5)
    assert not torch.allclose(ours.params, fresh.params, atol=1e-4)


WORK = {"local_lr": 0.05, "steps": 3, "batch_size": 4}
METHODS = {
    "fedprox": presets.fedprox(mu=0.5, **WORK, local_momentum=0.5, weight_decay=0.01),
    "clipped": presets.fedavg(**WORK).with_local(max_grad_norm=0.1),
    "adam": presets.fedavg(**{**WORK, "local_lr": 0.01}).with_local(optimizer=server.adam()),
    "sharpness-aware": presets.fedavg(**WORK).with_local(solver=local.sam(0.05)),
    "scaffold": presets.scaffold(**WORK),
    "feddyn": presets.feddyn(**WORK),
    "ha_fed": presets.ha_fed(**WORK, clusters=1, reporters=2),
    "choco": presets.choco_sgd(**WORK),
}


@WITH_NATIVE
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["pre-activation blocks", "tabular residual network", "drops everywhere"])
def test_models_are_native_under_any_method_and_equal_eager_to_rounding(name, method):
    algorithm = METHODS[method]
    ours, eager = (hansa.run(algorithm, made(name, execution=e), rounds=2, workers=1) for e in ("native", "eager"))
    scale = float((eager.params - made(name).start(hansa.Key(0), torch.float32)["model"]).norm())
    assert float((ours.params - eager.params).norm()) < (2e-2 if method == "adam" else 1e-3) * scale
    two = hansa.run(algorithm, made(name, execution="native"), rounds=2, workers=2)
    assert torch.equal(ours.params, two.params)


@pytest.mark.parametrize(("norm", "last"), [("batch", True), ("group", False)])
def test_group_normalisation_keeps_the_layout_in_which_it_is_fast(norm, last) -> None:
    images, labels = torch.randn(8, 3, 8, 8), torch.arange(8) % 3
    dealt = hansa.data.FederatedData(images, labels, torch.arange(8), torch.tensor([0, 3, 8]), classes=3, name="noise")
    task = hansa.Task(
        lambda: hansa.models.build("convmixer", classes=3, shape=(3, 8, 8), width=8, depth=1, norm=norm, groups=4),
        F.cross_entropy,
        dealt,
    )
    assert task.layout.channels_last is last
