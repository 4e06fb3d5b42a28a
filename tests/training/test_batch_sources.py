"""Inputs that are dicts, tuples, sequences of any length, or made on demand train like any other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hansa
from hansa import HansaError, presets
from hansa.data import from_arrays
from hansa.training.losses import cross_entropy
from mistakes import refused
from training import language_models

pytestmark = pytest.mark.usefixtures("shared_workers")

OPTIONS = {"local_lr": 0.2, "steps": 3, "batch_size": 4}


def trained(task, workers=1, rounds=2, **more):
    return hansa.run(presets.fedavg(**OPTIONS, **more), task, rounds=rounds, workers=workers)


@pytest.mark.parametrize("make", [language_models.tokenized, language_models.ragged], ids=["dict", "collated"])
def test_a_language_model_on_what_a_tokenizer_gives(make):
    data = make()
    task = hansa.Task(language_models.Talker, cross_entropy(class_axis="last"), data)
    assert [entry.name for entry in task.layout.parameters].count("head.weight") == 0  # tied: one parameter
    one, two = trained(task), trained(task, workers=2)
    assert torch.equal(one.params, two.params)
    module = one.model.eval()
    assert module.head.weight is module.embed.weight
    inputs, labels = data.fetch_test(torch.arange(7)) if hasattr(data, "fetch_test") else (
        data.test_inputs, data.test_targets)  # fmt: skip
    with torch.no_grad():
        output = module(**inputs)
    counted = labels != -100
    assert not bool(counted.all())
    loss = F.cross_entropy(output[counted], labels[counted])
    assert one.history[-1]["test_loss"] == pytest.approx(float(loss), rel=1e-5)
    hits = int((output.argmax(-1) == labels)[counted].sum())
    assert one.history[-1]["test_accuracy"] == pytest.approx(hits / int(counted.sum()), rel=1e-12)


def test_targets_may_be_several():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 4)

        def forward(self, x):
            return {"size": self.a(x), "kind": self.b(x)}

    def both(output, target):
        return F.mse_loss(output["size"], target["size"]) + F.cross_entropy(output["kind"], target["kind"])

    x = np.random.default_rng(3).normal(size=(20, 3))
    y = {"size": x[:, :1], "kind": np.arange(20) % 4}
    data = from_arrays(x, y, clients=[0] * 6 + [1] * 14, test=(x, y))
    run = trained(hansa.Task(Two, both, data))
    assert "test_accuracy" not in run.history[-1]
    with torch.no_grad():
        wanted = both(run.model.eval()(data.test_inputs), data.test_targets)
    assert run.history[-1]["test_loss"] == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("execution", ["native", "eager"])
def test_clients_by_function_equal_the_same_rows_in_memory(execution):
    made = language_models.crowd(12)
    rows = [language_models.rows_of_client(client) for client in range(12)]
    owners = np.repeat(np.arange(12), [len(y) for _, y in rows])
    held = from_arrays(np.concatenate([x for x, _ in rows]), np.concatenate([y for _, y in rows]), clients=owners)
    found = []
    for data in (made, held):
        task = hansa.Task(lambda: nn.Linear(5, 2), F.cross_entropy, data, execution=execution)
        found.append(trained(task, participation=0.5, rounds=3).params)
    assert torch.equal(*found)


def test_clients_by_function_for_1_2_3_workers_and_across_a_resume(tmp_path):
    task = hansa.Task(
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)), F.cross_entropy, language_models.crowd()
    )
    algorithm = presets.scaffold(participation=0.2, **OPTIONS)
    runs = [hansa.run(algorithm, task, rounds=3, workers=workers) for workers in (1, 2, 3)]
    assert all(torch.equal(run.params, runs[0].params) for run in runs)
    hansa.run(algorithm, task, rounds=1, workers=1, out=tmp_path / "run")
    assert torch.equal(hansa.run(algorithm, task, rounds=3, workers=1, out=tmp_path / "run").params, runs[0].params)


def test_a_million_clients_cost_what_takes_part():
    asked = []

    def make(client):
        asked.append(client)
        return language_models.rows_of_client(4 * client)

    data = hansa.data.from_function(make, clients=1_000_000, samples=3)
    task = hansa.Task(lambda: nn.Linear(5, 2), F.cross_entropy, data)
    run = trained(task, sampler=hansa.sample.uniform(count=5), rounds=4)
    chosen = {client for record in run.history for client in record["clients"]}
    assert len(chosen) == 20
    assert set(asked) == {0} | chosen
    assert len(asked) <= 3 + 20 + 2


test_functions_that_do_not_keep_their_word_are_told = refused(
    (lambda client: (np.random.rand(3, 2), np.zeros(3)), "returned different rows in a second call"),  # noqa: NPY002
    (lambda client: np.zeros(3), "expected a pair"),
    (lambda client: (np.zeros((2, 2)), np.zeros(2)), "client 0: 2 rows, but samples is 3"),
    by=lambda make: hansa.data.from_function(make, clients=4, samples=3),
)


def test_data_that_does_not_fit_is_told_with_shapes_before_any_round():
    data = from_arrays(np.zeros((6, 5)), np.arange(6) % 3, clients=2)
    with pytest.raises(HansaError, match=r"Linear cannot take a batch of the data, inputs float32 \[6, 5\].*4"):
        hansa.Task(lambda: nn.Linear(4, 3), F.cross_entropy, data)
    with pytest.raises(HansaError, match=r"loss mse_loss cannot take outputs float32 \[6, 4\] and targets int64 \[6\]"):
        hansa.Task(lambda: nn.Linear(5, 4), F.mse_loss, data)
    rare = from_arrays(np.zeros((90, 5)), (np.arange(90) == 1) * 2, clients=2)  # no row that is looked at
    with pytest.raises(HansaError, match=r"targets go up to 2, the model has 2 outputs"):
        hansa.Task(lambda: nn.Linear(5, 2), F.cross_entropy, rare)


class Graphs:
    """A collated batch as PyG's: it has no rows, and its length and items are those of something else."""

    def __init__(self, nodes, graph):
        self.nodes, self.graph = nodes, graph

    def __len__(self):
        return 2

    def __getitem__(self, name):
        return getattr(self, name)

    def to(self, *to, **named):
        return Graphs(self.nodes.to(*to, **named), self.graph)


class GraphNet(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

    def forward(self, batch):
        sums = torch.zeros(int(batch.graph.max()) + 1, 3, dtype=batch.nodes.dtype)
        return super().forward(sums.index_add(0, batch.graph, batch.nodes))


def test_collated_graphs_train_and_are_evaluated_without_an_index_by_rows():
    chance = torch.Generator().manual_seed(0)
    items = [(torch.randn(2 + number % 4, 3, generator=chance), number % 2) for number in range(24)]

    def collate(some):
        graph = torch.cat([torch.full((len(nodes),), place) for place, (nodes, _) in enumerate(some)])
        return Graphs(torch.cat([nodes for nodes, _ in some]), graph), torch.tensor([label for _, label in some])

    data = hansa.data.from_items(items, collate, clients=4, test=items)
    task = hansa.Task(GraphNet, nn.functional.cross_entropy, data)
    runs = [hansa.run(hansa.presets.fedavg(steps=2, batch_size=4), task, rounds=2, workers=n) for n in (1, 2)]
    assert torch.equal(runs[0].params, runs[1].params)
    outputs = runs[0].model(collate(items)[0])
    accuracy = float((outputs.argmax(1) == torch.tensor([label for _, label in items])).double().mean())
    assert runs[0].history[-1]["test_accuracy"] == pytest.approx(accuracy)
