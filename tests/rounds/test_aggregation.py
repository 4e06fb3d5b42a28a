"""The fold: as reports arrive in client order, few of them alive, with the bits of folding them all at once."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch

import hansa
from contracts.small import NAMES, small
from contracts.small import bowls as small_bowls
from hansa import presets
from hansa.aggregate import Combined
from hansa.core.types import in_client_order
from hansa.core.vectors import allocator
from hansa.engine import Serial
from hansa.engine.pool import _block_size
from hansa.rounds import open_round
from hansa.runs.driver import Run
from hansa.runs.store import ClientStore, DiskStore
from hansa.testing import check

task = partial(small_bowls, dim=4)


class Watched(np.ndarray):
    """Memory that tells when nobody looks at it any more."""


def updates_alive(algorithm, monkeypatch) -> int:
    """The most changes of clients that were in memory at a time, in a round of 100."""
    living, most = 0, 0

    def ended() -> None:
        nonlocal living
        living -= 1

    def watched(x: torch.Tensor) -> torch.Tensor:
        nonlocal living, most
        memory = np.empty(x.numel()).view(Watched)
        weakref.finalize(memory, ended)
        living += 1
        most = max(most, living)
        return torch.from_numpy(memory)

    monkeypatch.setattr(allocator, "empty_like", watched)
    Run(algorithm, task(100), evaluate_every=0).advance(1)
    return most


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_a_mean_is_folded_while_its_updates_arrive(weights, monkeypatch):
    assert updates_alive(presets.fedavg(steps=1, weights=weights), monkeypatch) <= 20


@pytest.mark.parametrize("name", NAMES)
def test_observation_changes_nothing(name):
    """With measures all updates are kept and folded at once; without, as they arrive."""
    seen = []
    runs = [
        hansa.run(small(name), task(), rounds=3, workers=1, measures=measures)
        for measures in ([], [lambda probe: seen.append(probe) or {"seen": 1.0}])
    ]
    assert torch.equal(runs[0].params, runs[1].params)
    assert runs[0].store.digest() == runs[1].store.digest()
    assert len(seen) == 3
    assert runs[1].history[0]["seen"] == 1.0
    for without, with_it in zip(*(run.history for run in runs), strict=True):
        added = {"seconds": 0, "seen": 1.0}
        assert repr(sorted({**without, **added}.items())) == repr(sorted({**with_it, **added}.items()))


def opened_round(algorithm):
    run = Run(algorithm, task())
    opened = open_round(run.algorithm, run.state, run.task.population, "run", run.key)
    reports = list(Serial(run.algorithm, run.task, torch.float64, torch.device("cpu")).run(opened.orders))
    return run, opened, reports


def test_a_round_below_its_quorum_leaves_no_memory_behind(tmp_path):
    for store in (ClientStore(), DiskStore(tmp_path)):
        before = store.digest()
        run = Run(presets.fedcams(steps=1), task(), store=store, quorum=6, evaluate_every=0).advance(1)
        assert not run.history[0]["moved"]
        assert store.digest() == before
        assert store.generation == 1
        run.options = replace(run.options, quorum=1)
        run.advance(1)
        assert store.clients() == [0, 1, 2, 3, 4]
        store.close()


def test_a_round_that_is_left_in_the_midst_leaves_nothing_behind(tmp_path):
    class Breaking(Serial):
        broken = True

        def run(self, orders, recall):
            for place, report in enumerate(super().run(orders, recall)):
                if place == 3 and Breaking.broken:
                    Breaking.broken = False
                    raise KeyboardInterrupt
                yield report

    method = presets.fedcams(steps=1)
    with DiskStore(tmp_path) as store:
        run = Run(method, task(), store=store, engine=Breaking, evaluate_every=0)
        with pytest.raises(KeyboardInterrupt):
            run.advance(2)
        assert (run.state.round, store.clients()) == (0, [])
        run.advance(2)
        whole = Run(method, task(), evaluate_every=0).advance(2)
        assert torch.equal(run.params, whole.params)
        assert store.digest() == whole.store.digest()


def test_large_reports_are_begun_nearly_in_order_and_small_ones_longest_first():
    _, opened, _ = opened_round(presets.fedavg(steps=1))
    assert _block_size(opened.orders, 2) > 10**6
    big = open_round(
        *(lambda run: (run.algorithm, run.state, run.task.population, "run", run.key))(
            Run(
                presets.fedavg(steps=1),
                hansa.training.function(lambda i, x: x.sum(), clients=3, x0=torch.zeros(1 << 24)),
            )
        )
    )
    assert _block_size(big.orders, 2) == 8


@dataclass(frozen=True, slots=True)
class noisy_sum:
    """What a private method adds up: a sum with noise, also where nobody was selected."""

    min_updates: ClassVar[int] = 0

    def init(self, dim, population):
        return {"dim": dim, "rounds": 0}

    def combine(self, updates, state, ctx):
        noise = torch.randn(state["dim"], generator=ctx.key.child("noise", ctx.round).torch("cpu"))
        total = sum((update.vector for update in in_client_order(updates)), torch.zeros(state["dim"]))
        return Combined(total + noise.to(total), {**state, "rounds": state["rounds"] + 1}, {})


@dataclass(frozen=True, slots=True)
class nobody_in_round_one:
    def select(self, round, population, key):
        return () if round == 1 else (0, 2)


def bowls():
    return hansa.training.quadratic(torch.eye(2).expand(3, 2, 2), torch.ones(3, 2))


def noisy(seed, **options):
    method = hansa.Algorithm("noisy", nobody_in_round_one(), channels={"model": hansa.Channel(aggregate=noisy_sum())})
    return hansa.run(method, bowls(), rounds=3, seed=seed, keep_params=True, dtype=torch.float64, **options)


def test_noise_of_an_aggregator_differs_by_seed_and_round_and_a_round_of_nobody_is_aggregated():
    check(noisy_sum())
    run = noisy(1)
    assert torch.equal(run.trajectory, noisy(1, workers=2).trajectory)
    assert not torch.equal(run.trajectory[0], noisy(2).trajectory[0])
    assert run.state.aggregate["model"]["rounds"] == 3
    assert [record["moved"] for record in run.history] == [True, True, True]
    assert not torch.equal(run.trajectory[0], run.trajectory[1]), "the noise of the round that nobody took part in"
    plain = hansa.Algorithm("plain", nobody_in_round_one())
    assert [record["moved"] for record in hansa.run(plain, bowls(), rounds=3).history] == [True, False, True]


@dataclass(frozen=True, slots=True)
class halved:
    def init(self, dim, population):
        return {}

    def combine(self, updates, state, ctx):
        updates = [replace(update, vector=update.vector / 2) for update in updates]
        return hansa.aggregate.mean().combine(updates, state, ctx)


@pytest.mark.parametrize("uplink", [hansa.compress.direct(), hansa.compress.error_feedback(hansa.compress.top_k(0.5))])
def test_an_aggregator_replaces_the_vectors_of_updates(uplink):
    method = presets.fedavg(local_lr=0.5, steps=1, participation=1.0).on("model", uplink=uplink)
    found = hansa.run(method.on("model", aggregate=halved()), bowls(), rounds=1)
    expected = hansa.run(method.on("model", server=hansa.server.scale(0.5)), bowls(), rounds=1)
    torch.testing.assert_close(found.params, expected.params)


def test_a_model_that_follows_another_channel_is_refused_when_composed():
    channels = {"model": hansa.Channel(follows="buffers"), "buffers": hansa.Channel()}
    with pytest.raises(hansa.core.errors.HansaError, match=r"'model' follows 'buffers'.*Omit follows"):
        hansa.Algorithm(channels=channels)
