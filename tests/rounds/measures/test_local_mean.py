"""The training loss at the mean of all local models: by hand, of clusters that report in part, on any path."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import hansa
from hansa.engine import Loopback
from hansa.rounds.measures import local_mean_loss

pytestmark = pytest.mark.usefixtures("shared_workers")

SIZES = [3, 9, 4, 6, 2]
CLUSTERS = [[0, 1], [2, 3, 4]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))[:, 0]


def module_task() -> hansa.Task:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(sum(SIZES), 2, generator=draw)
    owners = torch.repeat_interleave(torch.arange(5), torch.tensor(SIZES))
    return hansa.Task(Net, nn.functional.mse_loss, hansa.data.from_arrays(x, x.sum(dim=1) + owners, clients=owners))


def quadratics() -> hansa.training.quadratic:
    return hansa.training.quadratic([[[1.0]]] * 5, [[float(b)] for b in (0, 2, 7, 8, 13)], x0=[1.0])


def losses(method, task, rounds=3, **more):
    made = hansa.run(method, task, rounds=rounds, measures=[local_mean_loss(task)], dtype=torch.float64, **more)
    return [record["local_mean_loss"] for record in made.history]


def test_by_hand():
    """x = 1, one step of rate 1/2: w_i = (1 + b_i)/2, w' = (1 + 6)/2 = 3.5 at b = 0, 2, 7, 8, 13; not the server's."""
    task = quadratics()
    run = hansa.run(
        hansa.presets.fedavg(local_lr=0.5, steps=1, server_lr=0.1), task, rounds=1, measures=[local_mean_loss(task)]
    )
    expected = sum((3.5 - b) ** 2 for b in (0, 2, 7, 8, 13)) / 10
    assert run.history[0]["local_mean_loss"] == pytest.approx(expected)
    assert run.history[0]["loss"] != pytest.approx(expected)


@pytest.mark.parametrize("lazily", [False, True])
def test_clients_that_gossip_but_do_not_report_count_too(lazily, monkeypatch):
    """X <- W X keeps the mean, so w' follows from the steps alone: two steps, by hand."""
    import hansa.gossip.cohort as loop

    monkeypatch.setattr(loop, "lazy_pays", lambda *a: lazily)
    method = hansa.presets.ha_fed(clusters=CLUSTERS, reporters=1, local_lr=0.5, steps=2)
    targets = torch.tensor([0.0, 2.0, 7.0, 8.0, 13.0], dtype=torch.float64)
    X = torch.ones(5, dtype=torch.float64)
    for _ in range(2):
        X = X - 0.5 * (X - targets)
        for group in CLUSTERS:
            X[group] = X[group].mean()  # rings of two and of three average at once
    expected = float((X.mean() - targets).square().mean() / 2)
    assert losses(method, quadratics(), rounds=1)[0] == pytest.approx(expected, rel=1e-6)


def test_compression_does_not_touch_it():
    plain, signed = (
        {"steps": 2, "local_lr": 0.3, "batch_size": 2, **more} for more in ({}, {"compressor": hansa.compress.sign()})
    )
    first, second = (losses(hansa.presets.fedavg(**words), module_task(), rounds=1) for words in (plain, signed))
    assert first == second


def test_a_module_with_buffers_and_unequal_clients():
    """Against the received updates themselves: x + mean Delta_i and the mean of the buffers, on every client's rows."""
    task = module_task()
    seen = []
    method = hansa.presets.fedavg(steps=3, local_lr=0.2, batch_size=2, server_lr=0.5)
    run = hansa.run(method, task, rounds=2, measures=[local_mean_loss(task), lambda probe: seen.append(probe) or {}])
    for probe, record in zip(seen, run.history, strict=True):
        at = {
            name: probe.got[name] + torch.stack([sent[name] for sent in probe.received.values()]).mean(dim=0)
            for name in ("model", "buffers")
        }
        module = task.module(at).eval()
        with torch.no_grad():
            expected = nn.functional.mse_loss(module(task.data.inputs), task.data.targets)
        assert record["local_mean_loss"] == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("method", ["fedavg", "ha_fed", "dsgd"])
def test_the_same_on_every_engine_and_the_training_is_not_changed(method):
    words = {"ha_fed": {"clusters": CLUSTERS, "reporters": 1}}.get(method, {})
    made = hansa.presets.get(method, steps=2, local_lr=0.1, batch_size=2, **words)
    task = module_task()
    serial = hansa.run(made, task, rounds=2, workers=1, measures=[local_mean_loss(task)])
    wired = hansa.runs.driver.Run(made, task, measures=[local_mean_loss(task)], engine=Loopback).advance(2)
    others = [wired]
    if method == "ha_fed":  # processes take a while to start
        others.append(hansa.run(made, task, rounds=2, workers=2, measures=[local_mean_loss(task)]))
    found = [record["local_mean_loss"] for record in serial.history]
    assert all(math.isfinite(loss) for loss in found)
    plain = hansa.run(made, task, rounds=2, workers=1)
    for other in others:
        assert [record["local_mean_loss"] for record in other.history] == found
        assert torch.equal(plain.params, other.params)
    assert torch.equal(plain.params, serial.params)


def test_every_so_often_and_in_a_file(tmp_path):
    task = quadratics()
    run = hansa.run(hansa.presets.fedavg(steps=1), task, rounds=5, measures=[local_mean_loss(task, every=2)])
    assert ["local_mean_loss" in record for record in run.history] == [False, True, False, True, False]
    with pytest.raises(hansa.HansaError, match="every=0"):
        local_mean_loss(task, every=0)

    from hansa.config import from_yaml
    from hansa.runs.experiment import open_run

    said = """
    rounds: 2
    workers: 1
    model: logistic
    data: {name: fashion-mini, clients: 20}
    sample: {participation: 0.1}
    local: {steps: 1, batch_size: 8}
    evaluate: {every: 2, local_mean: true, train: true}
    """
    made = open_run(from_yaml(said), tmp_path / "run")
    made.execute()
    assert ["local_mean_loss" in record for record in made.run.history] == [False, True]
    # one step each from the same model: the mean of the local models is the server's next one
    last = made.run.history[-1]
    assert last["local_mean_loss"] == pytest.approx(last["global_loss"], rel=1e-5)
