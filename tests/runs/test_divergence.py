"""A run whose last measurements are not finite is ranked last and named; no table shows what it was before."""

from __future__ import annotations

import math

import pytest

from hansa.runs import metrics
from hansa.study.report import ReportEntry, rank
from hansa.study.report.page import comparability_warnings


def history(values, name="test_accuracy"):
    return [{"round": r, name: value, "up_bytes": r} for r, value in enumerate(values, 1) if value is not None]


GOOD, BAD = history([0.2, 0.4, 0.5]), history([0.6, 0.9, math.nan])


@pytest.mark.parametrize("last", [math.nan, math.inf, -math.inf])
def test_the_final_value_is_not_the_last_finite_one(last):
    curve = history([0.6, 0.9, last])
    summary = metrics.summarize(curve, 0.8)
    assert math.isnan(summary["test_accuracy"])
    assert math.isnan(metrics.last(curve))
    assert math.isnan(metrics.score(curve))
    assert (summary["best_test_accuracy"], summary["rounds_to_target"]) == (0.9, 2)
    assert metrics.diverged_at(curve, "test_accuracy") == 3


def test_a_curve_that_recovers_has_not_diverged_and_rounds_without_a_measurement_say_nothing():
    assert metrics.diverged_at(history([0.1, math.nan, 0.3]), "test_accuracy") is None
    curve = [*history([0.1, math.nan, math.nan]), {"round": 4}]
    assert metrics.diverged_at(curve, "test_accuracy") == 2
    empty = [
        {"round": 1, "train_loss": 0.5, "participants": 2},
        {"round": 2, "train_loss": math.nan, "participants": 0},
    ]
    assert metrics.diverged_at(empty, "train_loss") is None


@pytest.mark.parametrize("seeds", [1, 3])
def test_it_is_last_named_and_never_bold(seeds):
    def entry(name, curves):
        return ReportEntry.from_seeds(name, [ReportEntry(name, curve, seed=s) for s, curve in enumerate(curves)])

    entries = [
        entry("bad", [BAD, *[GOOD] * (seeds - 1)]),
        entry("good", [GOOD] * seeds),
        entry("none", [history([None])]),
    ]
    ranking = rank(entries, 0.4)
    assert [ranked.entry.name for ranked in ranking] == ["good", "none", "bad"]
    assert math.isnan(ranking[-1].numbers["test_accuracy"])
    columns = ranking.columns()
    assert not any(column.is_best(ranking[-1]) for column in columns)
    assert "diverged" in ranking[-1].cell(ranking.score, columns[0].write)
    assert any("bad diverged" in w and "from round 3" in w for w in comparability_warnings(entries, "test_accuracy"))
    (row,) = [line for line in ranking.latex().splitlines() if line.startswith("bad")]
    assert "diverged" in row
    assert "textbf" not in row
    assert all(tile.ranked.entry.name != "bad" for tile in ranking.tiles())


def test_show_says_it(capsys):
    from hansa.cli.show import show_numbers

    show_numbers(rank([ReportEntry("a", BAD)]))
    text = capsys.readouterr().out
    assert "accuracy, final  diverged" in text
    assert "accuracy, best   90.0%" in text
