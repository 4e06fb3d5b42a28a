"""A cohort takes nothing from its first member: batches are each client's own, and so is the re-sampling's number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hansa
from gossip.laboratory import DIM, SIZES, RecordedLeastSquares, owners_and_sizes, problem, regression
from hansa import HansaError, presets
from hansa.algorithm import Mixing
from hansa.compress import sign
from hansa.config import build_algorithm, from_yaml
from hansa.gossip import consensus_amsgrad, everyone, resample, ring, selected
from hansa.sample import per_cluster, replay, uniform
from mistakes import refused
from oracle import gossip

WORDS = {"local_lr": 0.05, "steps": 3, "server_lr": 0.05, "b1": 0.8, "b2": 0.95, "eps": 1e-4}
GROUPS = [[0, 1, 2], [3]]


def run(method, rounds=3):
    task = regression(problem())
    task.trainer(torch.float64, torch.device("cpu"))  # the first one tries the model out
    RecordedLeastSquares.log.clear()
    options = {"dtype": torch.float64, "keep_params": True, "evaluate_every": 0, "workers": 1}  # none probes a step
    return hansa.run(method, task, rounds=rounds, **options)


def computing(method):
    """How many clients computed at each step of a round of three steps."""
    run(method, rounds=1)
    return len(RecordedLeastSquares.log) / 3


@pytest.mark.parametrize(
    ("method", "count"),
    [
        (presets.cafga(clusters=1, reporters=per_cluster(2), **WORDS), 2),
        (presets.cafga(clusters=1, reporters=per_cluster(0.75), **WORDS), 3),
        (presets.cafga(clusters=2, reporters=per_cluster(1), **WORDS), 2),
        (presets.cafga(clusters=1, reporters=uniform(count=3), **WORDS), 3),
        (presets.cafga(clusters=1, reporters=replay([[0, 2, 3]]), **WORDS), 3),
        (presets.afga(reporters=per_cluster(0.5), **WORDS), 2),
        (presets.afga(reporters=3, **WORDS), 3),
        (presets.afga(participation=0.5, **WORDS), 2),
    ],
    ids=["count", "share", "two-clusters", "uniform", "replay", "afga-share", "afga-count", "afga"],
)
def test_as_many_are_drawn_afresh_as_report_whatever_sampler_chose_them(method, count):
    assert method.local.mixing.active == resample()
    assert computing(method) == count


def test_what_is_drawn_afresh_is_not_the_reporters():
    run(presets.cafga(clusters=1, reporters=replay([[1]]), **{**WORDS, "steps": 30}), rounds=1)
    assert {client for client, _ in owners_and_sizes(RecordedLeastSquares.log)} == {0, 1, 2, 3}
    run(presets.cafga(clusters=1, reporters=replay([[1]]), active=selected(), **WORDS), rounds=1)
    assert {client for client, _ in owners_and_sizes(RecordedLeastSquares.log)} == {1}


def test_a_number_and_its_sampler_are_the_same_method():
    by_number = run(presets.cafga(clusters=2, reporters=1, **WORDS)).trajectory
    assert torch.equal(by_number, run(presets.cafga(clusters=2, reporters=per_cluster(1), **WORDS)).trajectory)
    assert torch.equal(by_number, run(presets.cafga(clusters=2, reporters=1, active=resample(1), **WORDS)).trajectory)


def test_the_yaml_form_re_samples_too():
    said = "algorithm: {}\ngossip: {{reporters: {{kind: per_cluster, reporters: 2}}}}"
    for name in ("afga", "cafga"):
        assert build_algorithm(from_yaml(said.format(name))) == presets.get(name, reporters=per_cluster(2))
    assert build_algorithm(from_yaml("algorithm: ha_fed\ngossip: {active: resample}")).local.mixing.active == resample()


def test_words_that_contradict_each_other_are_refused():
    with pytest.raises(HansaError, match=r"afga\(participation=0.2, reporters=per_cluster.*expected one of the two"):
        presets.afga(participation=0.2, reporters=per_cluster(0.3))
    with pytest.raises(HansaError, match=r"Mixing\(reporters_only=True\): expected False with active=resample\(m=2\)"):
        presets.cafga(reporters_only=True, active=resample(2))
    assert presets.cafga(reporters_only=True).local.mixing.active == everyone()


SERVERLESS = Mixing(ring(), keep_local_models=True)


test_what_would_quietly_compute_something_else_is_refused = refused(
    (lambda: presets.fedavg(steps=1, participation=0.5).with_local(mixing=SERVERLESS), "all clients participate"),
    (lambda: presets.fedams(steps=1).with_local(mixing=SERVERLESS), "there is no server.*expected scale"),
    (lambda: presets.fedavg(steps=1, weights="samples").with_local(mixing=SERVERLESS), "expected mean.*'uniform'"),
    (lambda: presets.fedavg(steps=1, compressor=sign()).with_local(mixing=SERVERLESS), r"expected direct\(\)"),
    (lambda: presets.fedprox(steps=1).with_local(mixing=SERVERLESS), r"prox.*receive no model for a proximal term"),
    (lambda: presets.dsgd(gossip_compressor=sign(), order="combine-then-adapt"), "expected order='adapt-then-"),
    (lambda: presets.dsgd(consensus_rate=0.5), r"consensus_rate=0.5\): expected 1 without a compressor"),
    (lambda: presets.dsgd(order="adapt"), r"order='adapt'\): expected 'adapt-then-combine' or"),
    (lambda: presets.d_amsgrad(second_moment="none"), r"second_moment='none'\): expected 'gossip' or 'local'"),
    (lambda: presets.choco_sgd().with_local(optimizer=consensus_amsgrad()), "gossips uncompressed only"),
    (lambda: run(presets.fedavg(sampler=per_cluster(1))), r"there are no clusters. Give them"),
    (lambda: run(presets.fedavg(weights="clusters")), r"weights='clusters'.*has no clusters"),
    (lambda: run(presets.fedavg().with_local(optimizer=consensus_amsgrad())), r"clients do not gossip"),
    (
        lambda: run(presets.cafga(clusters=2, reporters=per_cluster(1, ((0,), (1, 2, 3))), **WORDS)),
        r"its clusters are not those that gossip",
    ),
)


def test_a_sampler_may_know_the_clusters_that_gossip():
    named = per_cluster(1, ((0, 1, 2), (3,)))
    assert torch.equal(
        run(presets.cafga(clusters=GROUPS, reporters=named, **WORDS)).trajectory,
        run(presets.cafga(clusters=GROUPS, reporters=1, **WORDS)).trajectory,
    )


def test_a_round_in_which_nobody_of_a_cluster_computes_changes_nothing():
    nobody = [[[0, 3], [1]], [[], []], [[2], [3]]]
    for execution in ("auto", "eager"):
        draw = np.random.default_rng(0)
        x = draw.standard_normal((40, 4)).astype(np.float32)
        rows = hansa.data.from_arrays(x, (x[:, 0] > 0).astype(np.int64), clients=np.arange(40) % 4)
        net = lambda: torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))  # noqa: E731
        task = hansa.Task(net, torch.nn.functional.cross_entropy, rows, execution=execution)
        options = {"clusters": 2, "reporters": 1, "batch_size": 4, **WORDS, "steps": 2, "b1": 0.0}
        done = hansa.Run(presets.ha_fed(active=hansa.gossip.replay(nobody), **options), task, keep_params=True)
        done.advance(3)
        assert torch.equal(done.trajectory[0], done.trajectory[1])
        assert not torch.equal(done.trajectory[1], done.trajectory[2])
        assert np.isnan(done.history[1]["train_loss"])


@pytest.mark.parametrize("gossip_every", [1, 2, 3])
@pytest.mark.parametrize("order", ["adapt-then-combine", "combine-then-adapt"])
@pytest.mark.parametrize("topology", [hansa.gossip.isolated(), ring()], ids=str)
@pytest.mark.parametrize("keep", [False, True])
def test_exact_averages_come_when_they_should_and_are_not_overwritten(topology, order, gossip_every, keep):
    """Against a dense loop: an average at every second step of the run, whatever the gossip's interval is."""
    reference, n, lr = problem(), len(SIZES), 0.05
    mixing = Mixing(topology, gossip_every=gossip_every, average_every=2, order=order, keep_local_models=keep)
    base = presets.fedavg(local_lr=lr, steps=3, batch_size=None)
    found = run(base.with_local(mixing=mixing), rounds=4)
    w = gossip.ring(n) if topology == ring() else np.eye(n)
    x, count, trail = np.zeros((n, DIM)), 0, []
    for _ in range(4):
        for step in range(3):
            count += 1
            moved = x - lr * np.stack([reference.grad(i, x[i]) for i in range(n)])
            every = count if keep else step + 1
            matrix = np.full((n, n), 1 / n) if count % 2 == 0 else w if every % gossip_every == 0 else np.eye(n)
            x = matrix @ moved if order == "adapt-then-combine" else matrix @ x + (moved - x)
        trail.append(x.mean(axis=0))
        if not keep:
            x = np.tile(trail[-1], (n, 1))
    np.testing.assert_allclose(found.trajectory.numpy(), np.stack(trail), atol=1e-10)
