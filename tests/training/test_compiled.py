"""execution="compiled": the model that eager training has, through torch.compile, never unless it is the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hansa
from hansa import HansaError, presets
from hansa.config import build, from_yaml
from hansa.engine.auto import auto_engine
from hansa.runs.driver import Run
from hansa.runs.experiment import config_digest
from hansa.runs.provenance import changed_kinds, provenance_of
from hansa.training import execution_mode as compiled
from training.shards import Shards

ALGORITHM = presets.fedavg(
    local_lr=0.05, steps=3, batch_size=4, local_momentum=0.5, weight_decay=0.01, max_grad_norm=1.0
)
NEEDS_COMPILER = pytest.mark.skipif(
    compiled.missing_compiler() is not None, reason=f"torch.compile: {compiled.missing_compiler()}"
)


def clients():
    """Targets that are no classes."""
    draw = torch.Generator().manual_seed(0)
    return Shards(torch.randn(21, 6, generator=draw), torch.randn(21, 2, generator=draw))


class Net(nn.Module):
    """Statistics that travel, dropout, a residual sum."""

    def __init__(self):
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.out(self.drop(x + torch.tanh(self.norm(self.into(x)))))


class Decides(Net):
    def forward(self, x):
        return super().forward(x if x.mean() > 0 else -x)


class Prints(Net):
    def forward(self, x):
        print(end="")
        return super().forward(x)


def task(model=Net, **options):
    return hansa.Task(model, F.mse_loss, clients(), **options)


@pytest.fixture
def traced(monkeypatch):
    """The same without C++: what is traced, backwards too, run by torch's own operations."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setattr(compiled, "missing_compiler", lambda: None)
    yield
    torch._dynamo.reset()


@NEEDS_COMPILER
def test_compiled_is_eager_to_rounding_and_the_same_bits_for_any_number_of_workers_and_after_a_resume():
    made = task(execution="compiled")
    whole = hansa.run(ALGORITHM, made, rounds=3, workers=1)
    eager = hansa.run(ALGORITHM, task(), rounds=3, workers=1)
    assert torch.allclose(whole.params, eager.params, atol=1e-6)
    begun = hansa.run(ALGORITHM, made, rounds=1, workers=1)
    resumed = Run(ALGORITHM, task(execution="compiled"), store=begun.store, engine=auto_engine(2, 2, "process"))
    resumed.restore(begun.checkpoint_state(), begun.history)
    resumed.advance(2)
    assert torch.equal(resumed.params, whole.params)
    assert torch.equal(resumed.state.vectors["buffers"], whole.state.vectors["buffers"])
    trainer = made.trainer(torch.float32, torch.device("cpu"))
    trainer.load(whole.params, whole.state.vectors["buffers"])
    trainer.seed(hansa.Key(0))
    found = trainer.gradient(0, torch.arange(4))
    assert len(trainer.compiled._compared) == 1
    assert torch.isfinite(found[0])


def test_each_form_of_batch_is_compiled_apart_and_every_client_equals_eager(traced):
    algorithm = presets.fedavg(local_lr=0.05, steps=2, batch_size=None)
    made = task(execution="compiled")
    ours, eager = (hansa.run(algorithm, one, rounds=2, workers=1) for one in (made, task()))
    assert torch.allclose(ours.params, eager.params, atol=1e-6)
    trainer = made.trainer(torch.float32, torch.device("cpu"))
    for rows in (5, 9, 5, 7):
        trainer.gradient(0, torch.arange(rows))
    assert len(trainer.compiled._compared) == 3


def test_float64_and_steps_that_look_ahead_are_compiled_too(traced):
    algorithm = presets.fedavg(local_lr=0.05, steps=2, batch_size=4).with_local(solver=hansa.local.sam(0.05))
    runs = [
        hansa.run(algorithm, one, rounds=2, workers=1, dtype=torch.float64)
        for one in (task(execution="compiled"), task())
    ]
    assert torch.allclose(runs[0].params, runs[1].params, atol=1e-12)


class Batch:
    """A batch as torch_geometric's: an object with tensors."""

    def __init__(self, some):
        self.x = torch.tensor(some).float()[:, None]


class OfObjects(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)

    def forward(self, batch):
        return super().forward(batch.x)[:, 0]


REFUSED = {"control flow": (Decides, "Unsupported"), "graph break": (Prints, "Unsupported")}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_as_a_whole_is_refused_with_the_reason(name, traced):
    model, why = REFUSED[name]
    with pytest.raises(HansaError, match=f"execution='compiled'.*{why}"):
        task(model, execution="compiled")


def test_batches_that_are_no_tensors_are_refused(traced):
    items = hansa.data.from_items(range(6), lambda some: (Batch(some), torch.zeros(len(some))), clients=2)
    with pytest.raises(HansaError, match="cannot be compiled: its batches have values that are not tensors"):
        hansa.Task(OfObjects, nn.functional.mse_loss, items, execution="compiled")


def test_without_a_compiler_one_sentence_says_so_in_workers_too(traced, monkeypatch):
    made = task(execution="compiled")
    monkeypatch.setattr(compiled, "missing_compiler", lambda: "there is no C++ compiler on the path")
    for attempt in (lambda: task(execution="compiled"), lambda: made.trainer(torch.float32, torch.device("cpu"))):
        with pytest.raises(HansaError, match=r"execution='compiled'.*there is no C\+\+ compiler"):
            attempt()


@pytest.mark.parametrize(
    ("wrong", "why"), [(lambda x: 1.01 * x, "loss is"), (lambda x: x.detach() + 0 * x, "gradient")]
)
def test_a_compiled_form_that_is_not_the_same_is_refused(wrong, why, traced, monkeypatch):
    made, true = task(execution="compiled"), compiled._compile
    monkeypatch.setattr(compiled, "_compile", lambda whole, backend: lambda x, y: wrong(whole(x, y)))
    with pytest.raises(HansaError, match=rf"cannot be compiled: .*{why}"):
        hansa.run(ALGORITHM, made, rounds=1, workers=1)
    assert true is not compiled._compile


def test_a_file_says_it_and_a_compiled_run_is_another_run(traced):
    text = "data: {clients: 5}\nmodel: {name: logistic, execution: %s}\nrounds: 1"
    with_it, without = from_yaml(text % "compiled"), from_yaml(text % "auto")
    assert (
        config_digest(with_it)
        != config_digest(without)
        == config_digest(from_yaml("data: {clients: 5}\nmodel: {name: logistic}"))
    )
    assert build.build_task(without, build.load_data(without)).execution == "auto"
    runs = [hansa.run(ALGORITHM, one, rounds=1, workers=1) for one in (task(execution="compiled"), task())]
    assert changed_kinds(*map(provenance_of, runs)) == ["model"]
