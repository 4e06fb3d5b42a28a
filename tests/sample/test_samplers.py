from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import hansa
from hansa import Key, presets, sample
from hansa.aggregate import Combined
from hansa.aggregate.base import sum_updates
from hansa.core.types import ClientStats, Population
from hansa.testing import check
from mistakes import refused
from runs.people import task_of
from same_runs import assert_same_run

TEN = Population((1,) * 10)


@pytest.mark.parametrize(("fraction", "size"), [(0.1, 1), (0.25, 3), (0.01, 1), (1.0, 10), (0.34, 3)])
def test_a_fraction_becomes_the_nearest_number_and_at_least_one(fraction, size):
    assert len(sample.uniform(fraction).select(0, TEN, Key(0))) == size


def test_explore_visits_everybody_before_anybody_again():
    sampler = sample.explore(0.3)
    for lap in range(3):
        visited = [c for turn in range(4) for c in sampler.select(4 * lap + turn, TEN, Key(0))]
        assert sorted(visited) == list(range(10))


def test_explore_then_uniform_is_uniform_after_the_first_lap():
    sampler, plain = sample.explore(0.5, then="uniform"), sample.uniform(count=5)
    assert [sampler.select(r, TEN, Key(0)) for r in range(2, 6)] == [plain.select(r, TEN, Key(0)) for r in range(2, 6)]


def test_availability_takes_only_those_who_are_there_and_cycles():
    sampler = sample.availability([[0, 1, 2, 3], [7]], count=2)
    assert set(sampler.select(2, TEN, Key(0))) <= {0, 1, 2, 3}
    assert sampler.select(3, TEN, Key(0)) == (7,)


test_wrong_arguments_are_named = refused(
    (lambda: sample.uniform(1.5), r"uniform\(participation=1.5\): expected 0 < participation <= 1"),
    (lambda: sample.uniform(0.0), "participation=0.0"),
    (lambda: sample.uniform(), "expected one of the two"),
    (lambda: sample.uniform(0.1, 3), "expected one of the two"),
    (lambda: sample.uniform(count=0), "count=0"),
    (lambda: sample.uniform(count=11).check(10), "count=11.*<= 10"),
    (lambda: sample.weighted((1.0, -1.0), count=1), r"weights\[1\]=-1.0"),
    (lambda: sample.weighted((1.0, 0.0), count=2).check(2), "only 1 have a weight above 0"),
    (lambda: sample.weighted((1.0,), count=1).check(2), "1 numbers for 2 clients"),
    (lambda: sample.weighted("size", count=1), "weights='size'"),
    (lambda: sample.explore(0.1, then="later"), "then='later'"),
    (lambda: sample.varying(2, 4).check(3), "<= 3"),
    (lambda: sample.varying(4, 2), "high"),
    (lambda: sample.replay([]), "at least one round"),
    (lambda: sample.replay([[1], []]), "at least one client"),
    (lambda: sample.replay([[1, 1]]), "twice in round 0"),
    (lambda: sample.replay([[1], [12]]).check(10), "round 1 names client 12, the population has clients 0 to 9"),
    (lambda: sample.replay([[-1]]).check(10), "names client -1"),
)


@pytest.mark.parametrize("reporters", [2, 0.5])
def test_reporters_of_each_cluster_are_numpys_draws_with_its_own_address(reporters):
    """Half of three and half of four clients are two."""
    clusters, ten = ((4, 0, 9), (1, 2, 3, 8), (7, 5, 6)), Population((1,) * 10)
    for round in range(20):
        expected = []
        for cluster in clusters:
            draw = Key(3).child("sample", round, "cluster", min(cluster)).numpy()
            expected += [cluster[i] for i in draw.choice(len(cluster), 2, replace=False, shuffle=False)]
        assert sample.per_cluster(reporters, clusters).select(round, ten, Key(3)) == tuple(sorted(expected))


@dataclass(frozen=True, slots=True)
class power_of_choice:
    """Of some candidates those with the highest last loss; who never took part comes first (Cho et al. 2020)."""

    count: int = 2
    candidates: int = 5
    needs_client_stats = True

    def select(self, round, population, key):
        drawn = key.child("candidates", round).numpy().choice(population.count, self.candidates, replace=False)
        losses = population.losses.nan_to_num(nan=np.inf).numpy()
        return tuple(sorted(sorted(drawn.tolist(), key=lambda client: (-losses[client], client))[: self.count]))


@dataclass(frozen=True, slots=True)
class by_loss:
    """Delta = sum_i F_i^q Delta_i / sum_i F_i^q, as q-FFL weighs."""

    q: float = 1.0

    def init(self, dim, population):
        return {}

    def combine(self, updates, state, ctx):
        ordered = sorted(updates, key=lambda update: update.client)
        raw = [max(0.0 if update.loss is None else update.loss, 1e-10) ** self.q for update in ordered]
        return Combined(sum_updates(ordered, [one / sum(raw) for one in raw]), state, {"heaviest": max(raw) / sum(raw)})


def method() -> hansa.Algorithm:
    made = presets.fedavg(local_lr=0.1, steps=3, batch_size=4)
    return replace(made, sampler=power_of_choice()).on("model", aggregate=by_loss(2.0))


def test_both_keep_their_contracts() -> None:
    check(power_of_choice())
    check(by_loss())


def test_the_sampler_sees_the_losses_that_were_reported_last() -> None:
    run = hansa.run(method(), task_of(9), rounds=8)
    rows = run.clients()
    last: dict[int, float] = {}
    for round in range(1, 9):
        drawn = Key(0).child("candidates", round - 1).numpy().choice(9, 5, replace=False).tolist()
        expected = sorted(sorted(drawn, key=lambda c: (-last.get(c, np.inf), c))[:2])
        here = rows.at_round(round)
        assert here["client"].tolist() == expected
        last.update(zip(here["client"].tolist(), here["loss"].tolist(), strict=True))
    assert run.state.heard["participations"].sum() == 16


def test_the_aggregator_weighs_by_the_losses_of_the_round() -> None:
    q, run = 2.0, hansa.run(method(), task_of(9), rounds=1)
    losses = run.clients()["loss"].astype(np.float64)
    assert run.history[0]["heaviest"] == pytest.approx(losses.max() ** q / (losses**q).sum(), rel=1e-6)
    plain = hansa.run(replace(method(), sampler=power_of_choice()).on("model", aggregate=hansa.aggregate.mean()),
                      task_of(9), rounds=1)  # fmt: skip
    assert not torch.equal(run.params, plain.params)


def test_a_resume_is_exact(tmp_path: Path) -> None:
    whole = hansa.run(method(), task_of(9), rounds=8)
    hansa.run(method(), task_of(9), rounds=4, out=tmp_path / "x", checkpoint_every=3)
    assert_same_run(hansa.resume(tmp_path / "x", method(), task_of(9), rounds=8), whole)


def test_a_wrapped_sampler_is_informed_too_and_others_carry_nothing() -> None:
    wrapped = replace(method(), sampler=sample.startup(power_of_choice()))
    run = hansa.run(wrapped, task_of(9), rounds=2)
    assert run.history[0]["participants"] == 9
    assert not run.state.heard["losses"].isnan().any()
    assert hansa.run(presets.fedavg(steps=1), task_of(9), rounds=1).state.heard == {}


def test_losses_that_nobody_asked_for_are_an_error_that_says_how() -> None:
    with pytest.raises(hansa.HansaError, match=r"population.losses.*`needs_client_stats = True`"):
        _ = Population((1, 2)).losses


def test_what_was_heard_is_not_changed_by_what_is_heard_next() -> None:
    first = ClientStats.empty(3).updated({1: 0.5}, {1: 2.0})
    second = first.updated({1: None, 2: 1.0}, {1: 3.0, 2: 4.0})
    assert first.losses.tolist()[1] == 0.5
    assert second.losses.isnan().tolist() == [True, True, False]
    assert second.participations.tolist() == [0, 2, 1]


def test_uniform_is_uniform():
    counts = np.zeros(10)
    for round in range(3000):
        counts[list(sample.uniform(0.3).select(round, TEN, Key(0)))] += 1
    # each count is hypergeometric with mean 900 and standard deviation about 25
    assert np.abs(counts - 900).max() < 110


def test_weighted_follows_its_weights_and_never_takes_a_zero():
    sampler, counts = sample.weighted((0.0, 1.0, 3.0), count=1), np.zeros(3)
    for round in range(2000):
        counts[list(sampler.select(round, Population((1, 1, 1)), Key(0)))] += 1
    assert counts[0] == 0
    assert abs(counts[2] / 2000 - 0.75) < 0.05
