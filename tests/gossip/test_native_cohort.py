"""Gossip by native turns is the loop over clients and steps, and rows made of changes are the rows themselves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hansa
from hansa import presets
from hansa.algorithm import Mixing
from hansa.compress import random_k, sign, top_k
from hansa.core import native
from hansa.data.federated import FederatedData
from hansa.engine.requests import BatchSizer
from hansa.gossip import bernoulli, complete, executors, isolated, resample, ring, star, unbalanced_complete
from hansa.gossip.rows import DenseRows, LazyRows, Mixer, Rows
from hansa.training.trainer import ModuleTrainer
from same_runs import assert_same_run

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.unavailable_reason()}")

SIZES = (5, 40, 17, 9, 23, 12, 31, 7)
WORDS = {"local_lr": 0.1, "steps": 5, "batch_size": 8}
SERVED = {**WORDS, "clusters": [[0, 1, 2, 3, 4], [5, 6, 7]], "reporters": 2, "server_lr": 0.05, "eps": 1e-2}
LONE = {**WORDS, "clusters": [[0, 1, 2, 3, 4], [5, 6, 7]]}


class Own(nn.Module):
    """A class as users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 9), nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x.view(len(x), -1))))


def task(spoilt: int | None = None, **words) -> hansa.Task:
    draw = torch.Generator().manual_seed(1)
    offsets = torch.tensor([0, *torch.tensor(SIZES).cumsum(0).tolist()])
    rows = int(offsets[-1])
    inputs, targets = torch.randn(rows, 12, generator=draw), torch.randint(0, 3, (rows,), generator=draw)
    if spoilt is not None:  # its very last row overflows the first time it is met
        inputs[offsets[spoilt + 1] - 1] = 3e38
    held = FederatedData(inputs, targets, torch.arange(rows), offsets, classes=3, name="own")
    return hansa.Task(Own, cross_entropy, held, **words)


def run(method, rounds=3, **words):
    options = {key: words.pop(key) for key in ("workers",) if key in words}
    return hansa.run(method, task(**words), rounds=rounds, keep_params=True, evaluate_every=0, **options)


METHODS = {
    "ha_fed": lambda: presets.ha_fed(**SERVED),
    "momentum, decay, clip": lambda: presets.ha_fed(**SERVED).with_local(
        momentum=0.8, weight_decay=0.1, max_grad_norm=0.7
    ),
    "prox": lambda: presets.ha_fed(**SERVED).with_local(solver=hansa.local.prox(0.5)),
    "every second step": lambda: presets.ha_fed(**{**SERVED, "gossip_every": 2}),
    "bernoulli": lambda: presets.ha_fed(**{**SERVED, "active": bernoulli(0.5)}),
    "complete": lambda: presets.ha_fed(**{**SERVED, "topology": complete()}),
    "cafga": lambda: presets.cafga(**{**SERVED, "active": resample(2)}),
    "adapted": lambda: presets.cafga(**{**SERVED, "reporters_only": True, "reporters": 3}),
    "sign": lambda: presets.ha_fed(**SERVED, gossip_compressor=sign(), consensus_rate=0.3),
    "sign, all hear all": lambda: presets.ha_fed(
        **{**SERVED, "topology": complete()}, gossip_compressor=sign(), consensus_rate=0.3
    ),
    "sign, weighted links to all": lambda: presets.ha_fed(
        **{**SERVED, "topology": unbalanced_complete()}, gossip_compressor=sign(), consensus_rate=0.3
    ),
    "star": lambda: presets.cafga(**{**SERVED, "topology": star(), "active": resample(2)}),
    "weighted links to all": lambda: presets.ha_fed(**{**SERVED, "topology": unbalanced_complete()}),
    "top_k": lambda: presets.ha_fed(**SERVED, gossip_compressor=top_k(0.1), consensus_rate=0.2),
    "random_k": lambda: presets.ha_fed(**SERVED, gossip_compressor=random_k(0.2), consensus_rate=0.2),
    "dsgd": lambda: presets.dsgd(**LONE),
    "dsgd, adapt first": lambda: presets.dsgd(**LONE, order="adapt-then-combine"),
    "dsgd, momentum": lambda: presets.dsgd(**LONE).with_local(momentum=0.8),
    "dsgd, every third": lambda: presets.dsgd(**LONE).with_local(
        mixing=Mixing(
            ring(), [[0, 1, 2, 3, 4], [5, 6, 7]], keep_local_models=True, gossip_every=3, order="combine-then-adapt"
        )
    ),
    "gossip_pga": lambda: presets.gossip_pga(**LONE, period=3),
    "gossip_pga, combine first": lambda: presets.gossip_pga(**LONE, period=3, order="combine-then-adapt"),
    "choco_sgd": lambda: presets.choco_sgd(**LONE),
}


@pytest.mark.parametrize("name", ["sign", "sign, all hear all", "sign, weighted links to all", "weighted links to all"])
def test_every_graph_of_few_clients_is_mixed_natively(name, monkeypatch):
    def slow(*_):
        raise AssertionError("an exchange outside the native call")

    monkeypatch.setattr("hansa.gossip.cohort.Cohort.exchange", slow)
    assert len(run(METHODS[name]()).history) == 3


def test_gossip_over_oneself_is_training_alone_to_the_bit():
    apart = presets.fedavg(**WORDS, participation=1.0)
    expected = run(apart).trajectory
    for mixing in (Mixing(isolated()), Mixing(ring(), [[i] for i in range(8)])):
        assert torch.equal(run(apart.with_local(mixing=mixing)).trajectory, expected)


FEW = {**SERVED, "reporters": 1}
IDLE = {
    "cafga": lambda: presets.cafga(**{**SERVED, "active": resample(2)}),
    "cafga, momentum": lambda: presets.cafga(**FEW).with_local(momentum=0.8, weight_decay=0.1, max_grad_norm=0.7),
    "cafga, prox, every second": lambda: presets.cafga(**FEW, gossip_every=2).with_local(solver=hansa.local.prox(0.5)),
    "everyone": lambda: presets.ha_fed(**SERVED),
    "bernoulli": lambda: presets.ha_fed(**{**SERVED, "active": bernoulli(0.4)}),
    "complete": lambda: presets.cafga(**{**FEW, "topology": complete()}),
    "combine first": lambda: presets.cafga(**FEW).with_local(
        mixing=Mixing(ring(), [[0, 1, 2, 3, 4], [5, 6, 7]], resample(2), order="combine-then-adapt")
    ),
}


def lazily(monkeypatch, answer):
    monkeypatch.setattr("hansa.gossip.cohort.lazy_pays", lambda *_: answer)


TURNS = [
    *[(name, None, False) for name in METHODS],
    *[
        (name, client, False)
        for name in ("ha_fed", "bernoulli", "sign", "top_k", "gossip_pga", "dsgd")
        for client in (1, 5)
    ],
    *[(name, client, True) for name in IDLE for client in (None, 1, 5)],
]


def method_of(name, from_changes):
    return (IDLE if from_changes else METHODS)[name]()


@pytest.mark.parametrize(("name", "spoilt", "from_changes"), TURNS)
def test_native_turns_are_the_loop_over_clients_and_steps(name, spoilt, from_changes, monkeypatch):
    """Also where models are made from changes in place of rows that are held, and where a client leaves the numbers."""
    method, rounds = method_of(name, from_changes), 12 if from_changes else 3
    method = method if spoilt is None else method.with_local(batch_size=4)
    called, real = [], executors.LazyCohortKernel
    monkeypatch.setattr(executors, "LazyCohortKernel", lambda *words: called.append(1) or real(*words))
    if from_changes:
        lazily(monkeypatch, True)
    marched = run(method, spoilt=spoilt, rounds=rounds)
    assert called or not from_changes
    monkeypatch.setattr(ModuleTrainer, "native_steps", lambda self: None)
    lazily(monkeypatch, False)
    walked = run(method, spoilt=spoilt, rounds=rounds)
    assert spoilt is None or sum(record["lost"] for record in walked.history) > 0
    assert list(marched.dropped_clients) == list(walked.dropped_clients)
    torch.testing.assert_close(marched.trajectory, walked.trajectory, rtol=0, atol=3e-6)
    assert not torch.equal(marched.trajectory[0], marched.trajectory[1])
    for found, expected in zip(marched.history, walked.history, strict=True):
        assert found["train_loss"] == pytest.approx(expected["train_loss"], abs=1e-6, nan_ok=True)
        assert found["consensus"] == pytest.approx(expected["consensus"], rel=1e-3, abs=1e-6)
        for exact in ("peer_bytes", "up_bytes", "clients", "lost"):
            assert found[exact] == expected[exact], exact


SHARED = ("ha_fed", "bernoulli", "sign", "sign, all hear all", "dsgd, momentum", "choco_sgd")


@pytest.mark.parametrize(
    ("name", "from_changes"),
    [*[(name, False) for name in SHARED], *[(name, True) for name in ("cafga", "cafga, momentum", "combine first")]],
)
def test_any_number_of_workers_gives_the_same_bits(name, from_changes, monkeypatch):
    if from_changes:
        lazily(monkeypatch, True)
    one, two = (run(method_of(name, from_changes), workers=workers) for workers in (1, 2))
    assert_same_run(one, two)


@pytest.mark.parametrize("spoilt", [None, 1, 5])
@pytest.mark.parametrize("name", ["ha_fed", "cafga", "sign", "top_k", "momentum, decay, clip", "dsgd", "gossip_pga"])
def test_cohorts_planned_together_are_those_trained_alone_to_the_bit(name, spoilt, monkeypatch):
    """Clusters of three share memory, that of two has its own, and one loses a client."""
    method = METHODS[name]().with_local(batch_size=4)
    mixing = method.local.mixing
    assert mixing is not None
    method = method.with_local(mixing=replace(mixing, clusters=[[0, 1, 2], [5, 6, 7], [3, 4]]))
    sizes = []
    real = executors.train_natively
    monkeypatch.setattr(
        executors, "train_natively", lambda cohorts, trainer: sizes.append(len(cohorts)) or real(cohorts, trainer)
    )
    together = run(method, spoilt=spoilt)
    assert (max(sizes) > 1) != mixing.keep_local_models
    monkeypatch.setattr(BatchSizer, "size", lambda *_: 1)
    sizes.clear()
    alone = run(method, spoilt=spoilt)
    assert max(sizes) == 1
    assert spoilt is None or sum(record["lost"] for record in alone.history) > 0
    assert_same_run(together, alone)


DIM, PARAMETERS = 6000, 5000


def trained(rows: Rows, mixer: Mixer, lost: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    for step, active in enumerate([[0, 4], [2], [1, 3, 6], [5, 0]]):
        for position, row in zip(active, rows.read(active), strict=True):
            rows.write(position, row, row + torch.randn(DIM, generator=draw, dtype=row.dtype))
        if lost and step == 1:
            mixer.drop(2)
        rows.mix(mixer)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("topology", [ring(), star(), complete()], ids=repr)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_mean_and_spread_are_those_of_the_rows(topology, lost, dtype, close):
    start = torch.linspace(-1, 1, DIM, dtype=dtype)
    for rows in (DenseRows(start.repeat(7, 1)), LazyRows(start, 7, 8)):
        mixer = Mixer(topology, 7)
        assert rows.spread(mixer, PARAMETERS) < 1e-12
        assert torch.allclose(rows.mean(mixer), start.double(), atol=1e-6)
        trained(rows, mixer, lost)
        read = rows.read(mixer.positions).double()
        assert len(read) == 7 - lost
        assert torch.allclose(rows.mean(mixer), read.mean(dim=0), rtol=0, atol=close)
        models = read[:, :PARAMETERS]  # buffers are no part of it
        expected = math.sqrt(float((models - models.mean(dim=0)).square().sum() / len(models)))
        assert rows.spread(mixer, PARAMETERS) == pytest.approx(expected, rel=close, abs=close)
        assert expected > 1 or topology == complete()
