"""Parts that see losses: a sampler of one's own that prefers the worst served, an aggregator that weighs by loss."""

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
from runs.people import task_of


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
    again = hansa.resume(tmp_path / "x", method(), task_of(9), rounds=8)
    assert torch.equal(again.params, whole.params)
    assert [r["clients"] for r in again.history] == [r["clients"] for r in whole.history]
    for name, column in whole.state.heard.items():
        assert torch.equal(again.state.heard[name].nan_to_num(-1), column.nan_to_num(-1)), name


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
