"""Every wrong argument gets an error that names the value and the remedy."""

# mypy: disable-error-code="call-arg"

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hansa
from contracts.small import bowls
from hansa import Algorithm, Channel, HansaError, aggregate, presets, server
from hansa.aggregate import krum, mean
from mistakes import refused


def lab(clients=4):
    return bowls(clients, dim=2)


def pairs():
    return hansa.data.from_arrays(torch.ones(6, 4), torch.arange(6) % 3, clients=2)


class Affine(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)


class Turned(Affine):
    """A model with a complex parameter."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))


test_wrong_parts_are_refused_where_they_are_made = refused(
    (lambda: presets.fedavg(local_lr=-0.1), "lr=-0.1.*lr > 0"),
    (lambda: presets.fedavg(local_lr=math.nan), "lr=nan"),
    (lambda: presets.fedavg(server_lr=0), "lr=0"),
    (lambda: presets.fedavg(participation=1.2), "participation=1.2"),
    (lambda: presets.fedavg(batch_size=0), "batch_size=0"),
    (lambda: presets.fedavg(steps=2, epochs=1), "steps=2, epochs=1.*one of the two"),
    (lambda: presets.fedavg(participation=0.1, sampler=hansa.sample.everyone()), "one of the two"),
    (lambda: presets.fedavg(weights="size"), "weights='size'.*Known|weights='size'"),
    (lambda: presets.fedavg(weights=[1.0, -2.0]), r"weights\[1\]=-2.0"),
    (lambda: presets.fedavg(local_momentum=1.0), "momentum=1.0.*0 <= momentum < 1"),
    (lambda: presets.fedavg(weight_decay=-1.0), "weight_decay=-1.0"),
    (lambda: presets.fedavg(max_grad_norm=0.0), "max_grad_norm=0.0"),
    (lambda: presets.fedavg(local_lrr=0.1), "local_lrr=0.1.*Did you mean local_lr"),
    (lambda: presets.fedadam(b1=1.0), r"adam\(b1=1.0\).*0 <= b1 < 1"),
    (lambda: presets.fedadam(b2=1), r"adam\(b2=1\)"),
    (lambda: presets.fedadam(eps=-1e-3), "eps=-0.001"),
    (lambda: presets.fedams(eps_inside=True), "eps_inside=True.*no such argument"),
    (lambda: presets.fedadam(betas=(0.9, 0.99)), "betas=.*no such argument"),
    (lambda: presets.fedavgm(momentum=1.0), "beta=1.0"),
    (lambda: presets.fedprox(mu=-0.1), "mu=-0.1"),
    (lambda: presets.feddyn(alpha=0), "alpha=0"),
    (lambda: presets.feddyn(server_lr=0.5), "server_lr=0.5"),
    (lambda: presets.feddyn(weights="samples"), "weights='samples'.*equal weights"),
    (lambda: presets.scaffold(weights="clusters"), r"participation_scale\(weights='clusters'\)"),
    (lambda: presets.scaffold().with_local(optimizer=hansa.server.adam()), r"scaffold\(optimizer=adam.*plain"),
    (lambda: presets.scaffold(local_momentum=0.9), "local_momentum=0.9"),
    (lambda: presets.fedmgda(epsilon=1.5), "epsilon=1.5"),
    (lambda: presets.fedmgda(weights="samples"), "FedMGDA. computes the weights itself"),
    (lambda: presets.get("fedadan"), "unknown preset 'fedadan'. Did you mean fedadam"),
    (lambda: presets.get("qwertz"), "Known: afga, ca2fl, cafga"),
    (lambda: Algorithm(channels={}), "lack 'model'"),
    (lambda: Algorithm(channels={"model": Channel(), "moddel": Channel()}), "nothing reports on channel 'moddel'"),
    (lambda: presets.fedavg().with_local(solver=hansa.local.scaffold()), "reports on channel 'control'"),
    (lambda: presets.fedavg().on("modle", uplink=None), "no channel 'modle'. Did you mean model"),
    (lambda: server.chain(), "at least one transform"),
    (lambda: aggregate.trimmed_mean(0.5), "trim=0.5"),
    (lambda: aggregate.krum(byzantine=-1), "byzantine=-1"),
    (lambda: aggregate.clipped(mean(), norm=0), "norm=0"),
    (lambda: hansa.Key(-1), "seed=-1"),
    (lambda: hansa.Key(0).child(1.5), "part=1.5"),
)


test_wrong_runs_are_refused = refused(
    ({"algorithm": presets.fedavg(sampler=hansa.sample.uniform(count=9))}, "count=9.*<= 4"),
    ({"algorithm": presets.fedavg(sampler=hansa.sample.replay([[7]]))}, "client 7"),
    ({"algorithm": presets.fedavg(weights=[1.0, 2.0])}, "2 weights for 4 clients"),
    ({"algorithm": "fedavg"}, "algorithm='fedavg'.*hansa.presets"),
    ({"rounds": 0}, "rounds=0"),
    ({"rounds": 2.5}, "rounds=2.5"),
    ({"seed": -3}, "seed=-3"),
    ({"dtype": torch.float16}, "dtype=torch.float16"),
    ({"workers": 0}, "workers=0"),
    ({"quorum": 0}, "quorum=0"),
    ({"algorithm": presets.fedavg().on("model", aggregate=krum(byzantine=3))}, "needs at least 6 updates.*has 4"),
    by=lambda words: hansa.run(**{"algorithm": presets.fedavg(steps=1), "task": lab(), "rounds": 1, **words}),
)


test_wrong_tasks_are_refused = refused(
    (lambda: hansa.training.quadratic([], []), "0 matrices"),
    (lambda: hansa.training.quadratic(torch.ones(2, 3, 2), torch.ones(3, 3)), "2 matrices A and 3 vectors b"),
    (lambda: hansa.training.quadratic(torch.ones(2, 3, 2), torch.ones(2, 4)), r"\(4,\): expected \(3,\)"),
    (lambda: hansa.training.quadratic([torch.ones(3, 2), torch.ones(3, 1)], torch.ones(2, 3)), r"A\[1\] has shape"),
    (lambda: hansa.training.quadratic(torch.full((1, 1, 1), math.nan), torch.ones(1, 1)), "client 0 has a NaN"),
    (lambda: hansa.training.quadratic(torch.ones(1, 2, 3), torch.ones(1, 2), x0=torch.ones(2)), r"expected \(3,\)"),
    (lambda: hansa.training.function(lambda i, x: x.sum(), clients=0, x0=torch.ones(2)), "clients=0"),
    (lambda: hansa.training.function(lambda i, x: x.sum(), clients=1, x0=torch.ones(2, 2)), "1-D float vector"),
    (lambda: hansa.Task("cnn_29k", cross_entropy, pairs()), "model='cnn_29k'.: expected a function that returns"),
    (lambda: hansa.Task(nn.Linear, cross_entropy, pairs()), "missing a required argument: 'in_features'"),
    (lambda: hansa.Task(Turned, cross_entropy, pairs()), r"complex64: only real .*view_as_real"),
    (lambda: hansa.Task(Affine, cross_entropy, pairs(), metric=nn.Linear), "expected an .* a function of .outputs"),
    (lambda: hansa.Task(Affine, cross_entropy, DataLoader([])), "Task.data=DataLoader.: expected federated"),
)


def test_the_trajectory_is_there_only_when_kept():
    run = hansa.run(presets.fedavg(steps=1), lab(), rounds=1)
    with pytest.raises(HansaError, match="keep_params=True"):
        _ = run.trajectory
    with pytest.raises(HansaError, match="not a module"):
        _ = run.model


def test_a_client_whose_loss_becomes_nan_is_left_out_and_the_run_says_so(caplog):
    def loss(client, x):
        return (x - 1).square().sum() * (math.nan if client == 1 else 1.0)

    task = hansa.training.function(loss, clients=3, x0=torch.zeros(2, dtype=torch.float64))
    healthy = hansa.training.function(
        lambda i, x: (x - 1).square().sum(), clients=3, x0=torch.zeros(2, dtype=torch.float64)
    )
    with caplog.at_level(logging.WARNING, logger="hansa"):
        run = hansa.run(presets.fedavg(steps=2), task, rounds=3)
    without = hansa.run(presets.fedavg(steps=2, sampler=hansa.sample.replay([[0, 2]])), healthy, rounds=3)
    assert torch.equal(run.params, without.params)
    assert [record["lost"] for record in run.history] == [1, 1, 1]
    assert run.history[0]["reasons"] == {"non-finite": 1}
    assert run.history[0]["clients"] == [0, 2]
    assert "3 client updates were left out of 3 rounds (non-finite 3); the last: client 1 in round 3" in caplog.text
