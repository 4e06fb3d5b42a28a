"""Gossip by native turns is the loop over clients and steps, and rows made of changes are the rows themselves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import hansa
from golden import problems
from golden.cases import CASES
from hansa.core import native
from hansa.engine.requests import BatchSizer
from hansa.gossip import complete, executors, ring, star
from hansa.gossip.rows import DenseRows, LazyRows, Mixer, Rows
from hansa.training.trainer import ModuleTrainer
from same_runs import assert_same_run

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.unavailable_reason()}")


def is_native(case) -> bool:
    """Whether clients of a golden case gossip, with plain steps on a model of native stages."""
    local = case.method().local
    plain = local.mixing is not None and local.optimizer is None and local.solver.ascent_offset is None
    return plain and case.task in ("mlp", "spoilt", "spoilt late") and case.stop is None


GOSSIP = {name: case for name, case in CASES.items() if not name.startswith("fed") and is_native(case)}
"""Runs by every graph, order, compressor and activity; in some a client leaves the numbers, at once or later."""

IDLE = [name for name in GOSSIP if "idle" in name]


def run(name, method=None, task=None, **options):
    case = GOSSIP[name]
    options = {"keep_params": True, "evaluate_every": 0, **options}
    return hansa.run(method or case.method(), problems.task(task or case.task), rounds=case.rounds, **options)


def lazily(monkeypatch, answer):
    monkeypatch.setattr("hansa.gossip.cohort.lazy_pays", lambda *_: answer)


@pytest.mark.parametrize("name", ["compressed gossip: sign", "compressed gossip: all hear all", "graph: unbalanced"])
def test_every_graph_of_few_clients_is_mixed_natively(name, monkeypatch):
    def slow(*_):
        raise AssertionError("an exchange outside the native call")

    monkeypatch.setattr("hansa.gossip.cohort.Cohort.exchange", slow)
    assert len(run(f"{name} / mlp").history) == 4


@pytest.mark.parametrize("name", GOSSIP)
def test_native_turns_are_the_loop_over_clients_and_steps(name, monkeypatch):
    """Also where models are made from changes in place of rows that are held, and where a client leaves the numbers."""
    called, real = [], executors.LazyCohortKernel
    monkeypatch.setattr(executors, "LazyCohortKernel", lambda *words: called.append(1) or real(*words))
    if name in IDLE:
        lazily(monkeypatch, True)
    marched = run(name)
    assert called or name not in IDLE
    monkeypatch.setattr(ModuleTrainer, "native_steps", lambda self: None)
    lazily(monkeypatch, False)
    walked = run(name)
    assert "spoilt" not in name or sum(record["lost"] for record in walked.history) > 0
    assert list(marched.dropped_clients) == list(walked.dropped_clients)
    torch.testing.assert_close(marched.trajectory, walked.trajectory, rtol=0, atol=3e-6)
    assert not torch.equal(marched.trajectory[0], marched.trajectory[1])
    for found, expected in zip(marched.history, walked.history, strict=True):
        assert found["train_loss"] == pytest.approx(expected["train_loss"], abs=1e-6, nan_ok=True)
        assert found["consensus"] == pytest.approx(expected["consensus"], rel=1e-3, abs=1e-6)
        for exact in ("peer_bytes", "up_bytes", "clients", "lost"):
            assert found[exact] == expected[exact], exact


@pytest.mark.parametrize(
    "name",
    [
        *("gossip: bernoulli", "compressed gossip: sign", "compressed gossip: all hear all", "serverless: momentum"),
        *("choco: sign", "idle: one of all", "idle: momentum, decay, clip", "idle: combine first"),
    ],
)
def test_any_number_of_workers_gives_the_same_bits(name, monkeypatch):
    if "idle" in name:
        lazily(monkeypatch, True)
    assert_same_run(*(run(f"{name} / mlp", workers=workers) for workers in (1, 2)))


@pytest.mark.parametrize("task", ["mlp", "spoilt", "spoilt late"])
@pytest.mark.parametrize("name", ["ha_fed", "idle", "sign", "top_k", "dsgd", "gossip_pga"])
def test_cohorts_planned_together_are_those_trained_alone_to_the_bit(name, task, monkeypatch):
    """Clusters of five share memory, that of four has its own, and one loses a client."""
    method = GOSSIP[f"overflow: {name} / spoilt"].method()
    mixing = method.local.mixing
    clusters = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13]]
    method = method.with_local(mixing=replace(mixing, clusters=clusters))
    sizes = []
    real = executors.train_natively
    monkeypatch.setattr(
        executors, "train_natively", lambda cohorts, trainer: sizes.append(len(cohorts)) or real(cohorts, trainer)
    )
    together = run(f"overflow: {name} / spoilt", method, task)
    assert (max(sizes) > 1) != mixing.keep_local_models
    monkeypatch.setattr(BatchSizer, "size", lambda *_: 1)
    sizes.clear()
    alone = run(f"overflow: {name} / spoilt", method, task)
    assert max(sizes) == 1
    assert task == "mlp" or sum(record["lost"] for record in alone.history) > 0
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
