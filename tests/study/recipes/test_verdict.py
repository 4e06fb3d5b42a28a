"""The rule of agreement, against cases worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hansa.study.recipes.recipe import Recipe, RecipeMeasure
from hansa.study.recipes.verdict import compare_with_paper, read_measure


def history(*accuracies: float) -> list[dict[str, Any]]:
    return [
        {"round": place, "test_accuracy": value, "up_bytes": 10, "down_bytes": 30, "simulated_seconds": 360.0}
        for place, value in enumerate(accuracies, start=1)
    ]


def recipe(published: dict[str, Any], compares: str = "numbers", **more: Any) -> Recipe:
    rows = {name: {"published": {"": {"accuracy": value}}} for name, value in published.items()}
    body = {"name": "x", "paper": "p", "reference": "Table 1", "summary": "s", "rows": rows, "settings": {}}
    measures = {"accuracy": {"statistic": "last", "tolerance": 1.0}}
    return Recipe.model_validate({**body, "measures": measures, "scales": {"cpu": {"compares": compares}}, **more})


def verdicts(requested: Recipe, ours: dict[str, list[float]]) -> dict[str, str]:
    comparisons, _ = compare_with_paper(
        requested, "cpu", {(row, ""): [history(value) for value in runs] for row, runs in ours.items()}
    )
    return {one.cell.row: one.verdict for one in comparisons}


def test_numbers_within_the_rule_agree_and_others_keep_their_order_or_not() -> None:
    requested = recipe({"a": 80.0, "b": 70.0, "c": 60.0})
    assert verdicts(requested, {"a": [0.809], "b": [0.691], "c": [0.60]}) == dict.fromkeys("abc", "agrees")
    assert verdicts(requested, {"a": [0.50], "b": [0.40], "c": [0.30]}) == dict.fromkeys("abc", "same order")
    assert verdicts(requested, {"a": [0.50], "b": [0.55], "c": [0.30]}) == {
        "a": "differs",
        "b": "differs",
        "c": "same order",
    }


def test_spread_widens_the_rule() -> None:
    # 2 sqrt(s^2 + 1.5^2) + 1 with s = 1: 4.606; the means are 4.5 apart, then 5
    assert verdicts(recipe({"a": [80.0, 1.5]}), {"a": [0.745, 0.755, 0.765]}) == {"a": "agrees"}
    assert verdicts(recipe({"a": [80.0, 1.5]}), {"a": [0.74, 0.75, 0.76]}) == {"a": "differs"}


def test_an_order_within_the_spread_is_no_other_order() -> None:
    requested = recipe({"a": 80.0, "b": 70.0})
    assert verdicts(requested, {"a": [0.49, 0.51], "b": [0.50, 0.52]}) == {"a": "same order", "b": "same order"}
    close = recipe({"a": [80.0, 6.0], "b": [79.0, 6.0]}, compares="order")
    assert verdicts(close, {"a": [0.3], "b": [0.4]}) == {"a": "not comparable", "b": "not comparable"}


def test_what_a_scale_cannot_judge() -> None:
    assert verdicts(recipe({"a": 80.0, "b": 70.0}, "nothing"), {"a": [0.8], "b": [0.7]}) == dict.fromkeys(
        "ab", "not comparable"
    )
    assert verdicts(recipe({"a": 80.0, "b": 70.0}, "order"), {"a": [0.8], "b": [0.7]}) == dict.fromkeys(
        "ab", "same order"
    )


def test_not_reached_agrees_with_not_reached() -> None:
    requested = recipe(
        {"a": "500+", "b": 100},
        measures={
            "accuracy": {"statistic": "rounds_to", "target": 0.5, "factor": 1, "tolerance": 0.2, "relative": True}
        },
    )
    assert verdicts(requested, {"a": [0.4], "b": [0.4]}) == {"a": "agrees", "b": "not comparable"}


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ({"statistic": "best"}, 40.0),
        ({"statistic": "last"}, 30.0),
        ({"statistic": "last5"}, 25.0),
        ({"statistic": "mean", "factor": 1}, 0.25),
        ({"statistic": "best", "smaller_is_better": True}, 10.0),
        ({"statistic": "rounds_to", "target": 0.2, "factor": 1}, 2.0),
        ({"statistic": "rounds_to", "target": 0.9, "factor": 1}, None),
        ({"statistic": "hours_to", "target": 0.4, "factor": 1}, 0.3),
        ({"statistic": "per_round", "metric": "server_bits", "factor": 500}, 500 * 320.0),
    ],
)
def test_readings(measure: dict[str, Any], expected: float | None) -> None:
    assert read_measure(history(0.1, 0.2, 0.4, 0.3), RecipeMeasure(**measure)) == pytest.approx(expected)


def test_a_round_is_told_by_the_last_since_the_first_may_send_less() -> None:
    rounds = [{"round": 1, "up_bytes": 10, "down_bytes": 0}, {"round": 2, "up_bytes": 10, "down_bytes": 10}]
    measure = RecipeMeasure(statistic="per_round", metric="server_bits", factor=500)
    assert read_measure(rounds, measure) == 500 * 160
    assert read_measure(rounds[:1], measure) == 500 * 80
    assert read_measure([], measure) is None


def test_claims_hold_fail_or_are_undecided() -> None:
    claims = [
        {"statement": "a first", "measure": "accuracy", "order": ["a", "b"]},
        {"statement": "b first", "measure": "accuracy", "order": ["b", "a"]},
        {"statement": "b before c", "measure": "accuracy", "order": ["c", "b"]},
        {"statement": "alike", "measure": "accuracy", "similar": ["b", "c"], "tolerance": 2.0},
    ]
    requested = recipe({"a": 1, "b": 1, "c": 1}, claims=claims)
    ours = {"a": [0.8, 0.8], "b": [0.50, 0.54], "c": [0.49, 0.53]}
    _, checks = compare_with_paper(
        requested, "cpu", {(row, ""): [history(value) for value in runs] for row, runs in ours.items()}
    )
    assert [one.holds for one in checks] == [True, False, None, True]
