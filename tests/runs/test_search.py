"""A search proposes points, prunes those that lag, and goes on after any stop as if nothing had happened."""

from __future__ import annotations

import json

import pytest
import torch

import hansa
from hansa.runs.search import DONE, PRUNED, SEARCH, Search, parse_range, search_range
from hansa.training import quadratic

pytest.importorskip("optuna")
AXES = {"x": search_range(-2.0, 2.0), "kind": ["flat", "steep"], "n": search_range(1, 64, log=True)}


def value(point, round):
    steep = {"flat": 1.0, "steep": 3.0}[point["kind"]]
    return -steep * (point["x"] - 0.5) ** 2 - 0.01 * point["n"] - 1 / round


def play(search, trials, rounds=10, seeds=1):
    for asked in search.ask(trials):
        for _ in range(seeds):
            asked.next_seed()
            history = []
            for round in range(1, rounds + 1):
                history.append({"round": round, "score": value(asked.point, round)})
                if asked.report(history):
                    break
            if asked.pruned:
                break
        asked.finish()
    return search


def told(search):
    return [(trial.point, trial.status, trial.value, trial.steps) for trial in search.trials]


def test_a_search_that_is_broken_off_anywhere_is_the_search_in_one_piece(tmp_path):
    whole = play(Search(AXES, "score:higher", rounds=10), 14)
    assert {trial.status for trial in whole.trials} == {DONE, PRUNED}
    for stop in (1, 6, 13):
        play(Search(AXES, "score:higher", rounds=10, folder=tmp_path / str(stop)), stop)
        resumed = play(Search(AXES, "score:higher", rounds=10, folder=tmp_path / str(stop)), 14)
        assert told(resumed) == told(whole)
    assert whole.best == max((t for t in whole.trials if t.status == DONE), key=lambda t: t.value)
    assert all(isinstance(trial.point["n"], int) and 1 <= trial.point["n"] <= 64 for trial in whole.trials)


def test_a_trial_is_pruned_by_the_median_at_the_same_point_and_never_without_prune():
    pruned = play(Search(AXES, "score:higher", rounds=10), 14)
    cut = next(trial for trial in pruned.trials if trial.status == PRUNED)
    step = max(cut.steps)
    before = [t.steps[step] for t in pruned.trials[: cut.number] if step in t.steps]
    assert max(cut.steps.values()) < sorted(before)[len(before) // 2]
    assert step >= 2
    assert cut.value is None
    patient = play(Search(AXES, "score:higher", rounds=10, prune=False), 14)
    assert {trial.status for trial in patient.trials} == {DONE}


def test_seeds_are_averaged_and_a_loss_is_made_small():
    search = Search({"x": [1, 2]}, "test_loss", seeds=2, rounds=1, prune=False)
    for asked in search.ask(4):
        for seed in (0, 1):
            asked.next_seed()
            asked.report([{"round": 1, "test_loss": 10.0 * asked.point["x"] + seed}])
        asked.finish()
        assert search.trials[-1].value == 10.0 * asked.point["x"] + 0.5
    assert search.best.point == {"x": 1}


def test_another_search_and_a_damaged_file_are_refused(tmp_path):
    play(Search(AXES, "score:higher", rounds=10, folder=tmp_path), 2)
    with pytest.raises(
        hansa.HansaError, match=r"search.json: holds a search with another metric, rounds. Choose another"
    ):
        Search(AXES, "loss", rounds=3, folder=tmp_path)
    for damaged in ("{", json.dumps({"search": 1, "trials": [2]}), "[]"):
        (tmp_path / SEARCH).write_text(damaged)
        with pytest.raises(hansa.HansaError, match="not a search that can be resumed"):
            Search(AXES, "score:higher", rounds=10, folder=tmp_path)


@pytest.mark.parametrize(
    ("text", "message"), [("3..1", "more than low"), ("0..1:log", "more than 0 on a log scale"), ("1..inf", "finite")]
)
def test_a_range_that_cannot_be_is_refused_and_what_is_none_is_none(text, message):
    assert [parse_range(each) for each in ("0.1", "a..b", "0.1,0.2..0.3", "..3", "[1..2]")] == [None] * 5
    with pytest.raises(hansa.HansaError, match=message):
        parse_range(text)


def test_a_search_from_python_finds_the_rate_and_keeps_its_runs(tmp_path):
    generator = torch.Generator().manual_seed(0)
    sizes = (4, 7, 9)
    task = quadratic(
        [torch.randn(n, 3, generator=generator).double() for n in sizes],
        [torch.randn(n, generator=generator).double() for n in sizes],
    )
    axes = {"local_lr": hansa.search_range(1e-4, 3e-1, log=True), "steps": [1, 2]}
    words = {"rounds": 4, "metric": "loss", "seeds": 2, "workers": 1}
    found = hansa.search(hansa.presets.fedavg, task, axes, trials=7, **words)
    best = hansa.presets.fedavg(**found.best.point)
    losses = [hansa.run(best, task, rounds=4, seed=seed, workers=1).history for seed in (0, 1)]
    expected = sum(history[-1]["loss"] for history in losses) / 2  # four rounds: the final value, no mean of five
    assert found.best.value == pytest.approx(expected, rel=1e-12)
    assert "7 trials" in repr(found)
    hansa.search(hansa.presets.fedavg, task, axes, trials=3, out=tmp_path, **words)
    again = hansa.search(hansa.presets.fedavg, task, axes, trials=7, out=tmp_path, **words)
    assert told(again) == told(found)
    assert str(found.best.point["steps"]) in found.table()
