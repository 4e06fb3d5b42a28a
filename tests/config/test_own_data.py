"""Data, models, losses and metrics of one's own, named in a file."""

from __future__ import annotations

import pytest
import torch

from hansa.config import build, from_yaml, to_yaml
from hansa.core.errors import HansaError
from hansa.runs.experiment import open_run

OWN = """
import torch
from torch import nn
import hansa
from hansa import data

@hansa.component
def whole(rows=90):
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))
    return data.Dataset("mine", x, (x.sum(1) > 0).long(), x[:20], (x[:20].sum(1) > 0).long(), classes=2)

@hansa.component
def dealt(rows=60):
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))
    owners = torch.repeat_interleave(torch.arange(4), torch.tensor([5, 10, 15, rows - 30]))
    return data.from_arrays(x, x.sum(1), clients=owners, test=(x[:20], x[:20].sum(1)))

class Line(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, 1)

    def forward(self, x):
        return self.layer(x).squeeze(1)

@hansa.component
def quartic(output, target):
    return ((output - target) ** 4).mean()

@hansa.component
def near(output, target):
    return (output - target).abs() < 0.5

@hansa.component
def worst(output, target):
    return (output - target).abs().max()

@hansa.component
def double():
    return Line().double()

number = 3
"""
SMALL = "rounds: 3\nworkers: 1\nlocal: {steps: 2, batch_size: 4, lr: 0.01}\n"


@pytest.fixture
def own(write_module):
    return write_module("data_of_mine", OWN)


REGRESSION = f"""{SMALL}
data: {{factory: data_of_mine:dealt, options: {{rows: 70}}}}
model: {{factory: data_of_mine:Line, loss: data_of_mine:quartic, metric: data_of_mine:near,
        metrics: {{worst: {{function: data_of_mine:worst, better: lower}}}}}}
"""


def test_everything_of_ones_own_runs_is_written_down_and_resumed_exactly(own):
    config = from_yaml(SMALL + "data: {factory: data_of_mine:whole, clients: 5, partition: iid}\nmodel: logistic")
    held = build.load_data(config)
    assert (held.classes, [held.samples(client) for client in range(5)]) == (2, [18] * 5)
    config = from_yaml(REGRESSION)
    assert from_yaml(to_yaml(config)) == config
    whole = open_run(config, own / "whole")
    whole.execute()
    last = whole.run.history[-1]
    held = build.load_data(config)
    model = whole.run.model
    with torch.no_grad():
        apart = (model(held.test_inputs) - held.test_targets).abs()
    assert last["test_loss"] == pytest.approx(float((apart**4).mean()), rel=1e-5)
    assert last["test_accuracy"] == pytest.approx(float((apart < 0.5).double().mean()))
    assert last["test_worst"] == pytest.approx(float(apart.max()), rel=1e-5)
    assert held.population == 4
    assert [held.samples(client) for client in range(4)] == [5, 10, 15, 40]
    part = open_run(config, own / "part")
    part.execute([lambda run, record: record["round"] == 1])
    again = open_run(None, own / "part")
    again.execute()
    assert torch.equal(again.run.params, whole.run.params)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data: {factory: data_of_mine:hole}", "data.factory: 'data_of_mine:hole': .* Did you mean whole"),
        ("data: {factory: data_of_mine:number}", "data.factory: .*number': expected a component: .*found 3"),
        ("data: {factory: data_of_mine:quartic}", "data.factory: data_of_mine:quartic: .*missing 2 required"),
        ("data: {factory: data_of_mine:Line}", "(?s)returns Line.*expected data, as from hansa.data.from_arrays"),
        ("data: {factory: data_of_mine:dealt, clients: 3}", "returns data that has its clients: leave out"),
        ("data: {factory: data_of_mine:whole, clients: 5}\nmodel: {loss: msee}", "loss: no 'msee'. Did"),
        ("model: {metric: data_of_mine:neer}", "model.metric: .* Did you mean near"),
        ("model: {metrics: {bad: data_of_mine:number}}", "model.metrics.bad: .*expected a component"),
    ],
)
def test_what_is_wrong_is_told_with_its_key(own, text, said):
    config = from_yaml(SMALL + text)
    with pytest.raises(HansaError, match=said):
        build.build_task(config, build.load_data(config))


def test_a_double_model_asks_for_double_arithmetic(own):
    text = SMALL + "data: {factory: data_of_mine:dealt}\nmodel: {factory: data_of_mine:double}"
    held = build.load_data(from_yaml(text))
    with pytest.raises(HansaError, match=r"float64 parameters.*Set dtype: float64, or remove \.double\(\) from"):
        build.build_task(from_yaml(text), held)
    assert build.build_task(from_yaml(text, ["dtype=float64"]), held).dtype == torch.float64
    assert build.build_task(from_yaml(REGRESSION, ["dtype=float64"]), held).dtype == torch.float32
