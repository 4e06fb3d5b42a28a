"""Fault plans: each fault does what it says at the rate it says; and what methods promise holds under any loss."""

from __future__ import annotations

import logging
import math
from collections import Counter

import pytest
import torch

import hansa
from engine import problems
from hansa import faults, presets
from hansa.aggregate import clipped, krum
from hansa.compress import sign
from hansa.config import from_preset
from hansa.core.keys import Key
from hansa.engine import Serial
from hansa.runs.driver import Run
from hansa.runs.experiment import open_run
from hansa.runs.folder import RunFolder
from mistakes import refused
from torture import losses
from torture.disks import Hasty, use_disk
from torture.kill import sha

KINDS = ("before", "after", "upload", "nan", "scaled", "flipped", "stale")
ALL = faults(before=0.1, after=0.1, upload=0.1, nan=0.1, scaled=0.1, flipped=0.1, stale=0.1, factor=3.0)
CLIENTS = 6


def struck(plan, rounds, seed=0, clients=CLIENTS):
    return {(r, c): plan.draw(Key(seed), r, c) for r in range(rounds) for c in range(clients)}


def run(plan, algorithm=None, rounds=5, **words):
    algorithm = presets.fedavg(steps=2, local_lr=0.05, participation=1.0) if algorithm is None else algorithm
    return Run(algorithm, problems.bowls(), faults=plan, keep_params=True, **words).advance(rounds)


def test_every_fault_comes_at_its_rate_and_depends_on_the_seed():
    plan = faults(before=0.05, after=0.1, upload=0.02, nan=0.03, scaled=0.15, flipped=0.2, stale=0.25)
    found = struck(plan, 150, clients=100)
    counts, n = Counter(found.values()), len(found)
    for kind in (*KINDS, ""):
        rate = getattr(plan, kind) if kind else 0.2
        assert abs(counts[kind] - n * rate) < 5 * math.sqrt(n * rate * (1 - rate)), kind
    assert struck(plan, 9) == struck(plan, 9) != struck(plan, 9, seed=1)


def test_a_plan_without_faults_is_no_plan():
    assert sha(run(faults()).checkpoint_state()) == sha(run(None).checkpoint_state())
    assert set(struck(faults(), 30).values()) == {""}
    assert set(struck(faults(stale=1.0), 30).values()) == {"stale"}


test_impossible_plans_are_refused = refused(
    (lambda: faults(before=1.2), r"faults\(before=1.2\): expected 0 <= before <= 1"),
    (lambda: faults(nan=-0.1), r"nan=-0.1"),
    (lambda: faults(stale=math.nan), r"stale=nan"),
    (lambda: faults(before=0.6, flipped=0.6), "the rates sum to 1.2"),
    (lambda: faults(factor=0.0), "factor=0.0"),
)


def test_each_fault_has_its_reason_and_the_others_are_folded():
    """Who is left out of a round, and why, is what the plan drew; scaled and flipped updates pass the door."""
    found = run(ALL, rounds=12)
    drawn = struck(ALL, 12)
    reasons = {"before": "lost", "after": "lost", "upload": "lost", "nan": "non-finite", "stale": "round"}
    expected = {(r + 1, c): reasons[kind] for (r, c), kind in drawn.items() if kind in reasons}
    assert {(when, lost.client): lost.reason for when, lost in found.dropped_clients} == expected
    details = {(when, lost.client): lost.detail for when, lost in found.dropped_clients if lost.reason == "lost"}
    words = {"before": "before training", "after": "after training", "upload": "during upload"}
    assert details == {(r + 1, c): words[kind] for (r, c), kind in drawn.items() if kind in words}
    assert {"scaled", "flipped", *reasons} <= set(drawn.values())
    for record in found.history:
        assert record["clients"] == [c for c in range(CLIENTS) if (record["round"], c) not in expected]
        assert record["reasons"] == Counter(why for (when, _), why in expected.items() if when == record["round"])
        assert record["lost"] == sum(record["reasons"].values())


def test_scaled_and_flipped_updates_are_what_the_words_say():
    """One round of FedAvg by hand: x moves by the mean of factor D_i, -D_i and D_i over those who got through."""
    alone = [run(None, presets.fedavg(steps=2, local_lr=0.05, sampler=hansa.sample.replay([[c]])), 1) for c in range(6)]
    for seed in range(6):
        drawn = {c: ALL.draw(Key(seed), 0, c) for c in range(CLIENTS)}
        times = {"": 1.0, "scaled": 3.0, "flipped": -1.0}
        through = [times[drawn[c]] * alone[c].params for c in range(CLIENTS) if drawn[c] in times]
        torch.testing.assert_close(run(ALL, rounds=1, seed=seed).params, torch.stack(through).mean(0))


@pytest.mark.parametrize("words", [{}, {"compressor": sign()}, {"compressor": hansa.compress.top_k(0.5)}])
@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (faults(nan=0.4), "non-finite"),
        (faults(scaled=0.4, factor=1e300), "non-finite"),
        (faults(scaled=0.5, factor=1e14), "norm"),
    ],
)
def test_what_is_not_finite_is_lost_on_every_kind_of_link_and_never_ends_the_run(words, plan, reason):
    algorithm = presets.scaffold(steps=2, local_lr=0.05, **words)
    found = run(plan, algorithm, dtype=torch.float32)
    assert {lost.reason for _, lost in found.dropped_clients} == {reason}
    assert len(found.dropped_clients) == sum(bool(kind) for kind in struck(plan, 5).values())
    assert bool(found.params.isfinite().all())


def test_who_is_lost_before_training_does_not_train_and_who_is_lost_later_does():
    trained = []

    class Watching(Serial):
        def run(self, orders, recall):
            trained.extend((order.round, client) for order in orders for client in order.clients)
            yield from super().run(orders, recall)

    plan = faults(before=0.3, after=0.3)
    run(plan, engine=Watching)
    assert set(trained) == {at for at, kind in struck(plan, 5).items() if kind != "before"}


@pytest.mark.parametrize("aggregate", [krum(byzantine=1), clipped(krum(byzantine=1), 10.0)])
def test_a_robust_rule_that_losses_leave_too_few_updates_leaves_the_round_without_effect(aggregate):
    algorithm = presets.fedavg(steps=2, local_lr=0.05).on("model", aggregate=aggregate)
    found = run(faults(before=0.5), algorithm, rounds=10)
    through = [
        sum(not kind for (r, _), kind in struck(faults(before=0.5), 10).items() if r == now) for now in range(10)
    ]
    assert [record["moved"] for record in found.history] == [count >= 4 for count in through]
    assert 0 < sum(count >= 4 for count in through) < 10


def test_the_summary_and_the_log_count_by_reason(tmp_path, caplog):
    changes = ["data.name=synthetic", "data.clients=8", "rounds=6", "local.steps=1", "workers=1"]
    config = from_preset("fedams", [*changes, "faults={before: 0.1, after: 0.1, nan: 0.2, stale: 0.2, scaled: 0.1}"])
    with use_disk(Hasty()), caplog.at_level(logging.WARNING, "hansa"):
        experiment = open_run(config, tmp_path / "run")
        summary = experiment.execute()
    counted = Counter(lost.reason for _, lost in experiment.run.dropped_clients)
    assert summary["lost_by_reason"] == dict(counted)
    assert set(counted) == {"lost", "non-finite", "round"}
    assert summary["lost"] == sum(counted.values())
    history = RunFolder(tmp_path / "run").history
    assert sum((Counter(record["reasons"]) for record in history), Counter()) == counted
    told = f"lost {counted['lost']}, non-finite {counted['non-finite']}, round {counted['round']}"
    assert f"{sum(counted.values())} client updates were left out of 6 rounds ({told})" in caplog.text


@pytest.mark.parametrize("case", losses.CASES)
def test_promises_hold_and_rows_of_others_stay_whatever_is_lost(case):
    for seed, rate in enumerate((0.2, 0.6, 0.9)):
        counts = losses.check(case, rate, seed, rounds=6)
        assert counts["lost"] > 0


@pytest.mark.parametrize("case", losses.MIXED)
def test_mixing_keeps_the_mean_of_those_who_are_left(case):
    for seed, rate in enumerate((0.0, 0.4, 0.8)):
        losses.check_mean(case, rate, seed)


def test_every_fault_comes_at_its_rate_independent_of_round_client_and_seed():
    plan = faults(before=0.05, after=0.1, upload=0.02, nan=0.03, scaled=0.15, flipped=0.2, stale=0.25)
    found = struck(plan, 150, clients=100)
    counts, n = Counter(found.values()), len(found)
    for kind in (*KINDS, ""):
        rate = getattr(plan, kind) if kind else 0.2
        assert abs(counts[kind] - n * rate) < 5 * math.sqrt(n * rate * (1 - rate)), kind
    # a client struck in one round is no likelier to be struck in the next, nor is its neighbour
    hit = {at: bool(kind) for at, kind in found.items()}
    for step in ((1, 0), (0, 1)):
        both = [hit[r, c] and hit[r + step[0], c + step[1]] for r in range(149) for c in range(99)]
        assert abs(sum(both) - len(both) * 0.64) < 5 * math.sqrt(len(both) * 0.64 * 0.36) * 1.5
    assert struck(plan, 9) == struck(plan, 9) != struck(plan, 9, seed=1)
