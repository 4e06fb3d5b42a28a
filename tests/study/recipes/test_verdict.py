"""The rule of agreement, against cases worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hansa.study.recipes.recipe import Measure, Recipe
from hansa.study.recipes.verdict import compare, reading


def history(*accuracies: float) -> list[dict[str, Any]]:
    return [
        {"round": place, "test_accuracy": value, "up_bytes": 10, "down_bytes": 30, "simulated_seconds": 360.0}
        for place, value in enumerate(accuracies, start=1)
    ]


def recipe(published: dict[str, Any], judged: str = "numbers", **more: Any) -> Recipe:
    rows = {name: {"published": {"": {"accuracy": value}}} for name, value in published.items()}
    body = {"name": "x", "paper": "p", "where": "Table 1", "says": "s", "rows": rows, "settings": {}}
    measures = {"accuracy": {"read": "last", "within": 1.0}}
    return Recipe.model_validate({**body, "measures": measures, "scales": {"cpu": {"judged": judged}}, **more})


def verdicts(asked: Recipe, ours: dict[str, list[float]]) -> dict[str, str]:
    found, _ = compare(asked, "cpu", {(row, ""): [history(value) for value in runs] for row, runs in ours.items()})
    return {one.cell.row: one.verdict for one in found}


def test_numbers_within_the_rule_agree_and_others_keep_their_order_or_not() -> None:
    asked = recipe({"a": 80.0, "b": 70.0, "c": 60.0})
    assert verdicts(asked, {"a": [0.809], "b": [0.691], "c": [0.60]}) == dict.fromkeys("abc", "agrees")
    assert verdicts(asked, {"a": [0.50], "b": [0.40], "c": [0.30]}) == dict.fromkeys("abc", "same order")
    assert verdicts(asked, {"a": [0.50], "b": [0.55], "c": [0.30]}) == {
        "a": "differs",
        "b": "differs",
        "c": "same order",
    }


def test_spread_widens_the_rule() -> None:
    # 2 sqrt(s^2 + 1.5^2) + 1 with s = 1: 4.606; the means are 4.5 apart, then 5
    assert verdicts(recipe({"a": [80.0, 1.5]}), {"a": [0.745, 0.755, 0.765]}) == {"a": "agrees"}
    assert verdicts(recipe({"a": [80.0, 1.5]}), {"a": [0.74, 0.75, 0.76]}) == {"a": "differs"}


def test_an_order_within_the_spread_is_no_other_order() -> None:
    asked = recipe({"a": 80.0, "b": 70.0})
    assert verdicts(asked, {"a": [0.49, 0.51], "b": [0.50, 0.52]}) == {"a": "same order", "b": "same order"}
    close = recipe({"a": [80.0, 6.0], "b": [79.0, 6.0]}, judged="order")
    assert verdicts(close, {"a": [0.3], "b": [0.4]}) == {"a": "not comparable", "b": "not comparable"}


def test_what_a_scale_cannot_judge() -> None:
    assert verdicts(recipe({"a": 80.0, "b": 70.0}, "nothing"), {"a": [0.8], "b": [0.7]}) == dict.fromkeys(
        "ab", "not comparable"
    )
    assert verdicts(recipe({"a": 80.0, "b": 70.0}, "order"), {"a": [0.8], "b": [0.7]}) == dict.fromkeys(
        "ab", "same order"
    )


def test_not_reached_agrees_with_not_reached() -> None:
    asked = recipe(
        {"a": "500+", "b": 100},
        measures={"accuracy": {"read": "rounds_to", "target": 0.5, "times": 1, "within": 0.2, "relative": True}},
    )
    assert verdicts(asked, {"a": [0.4], "b": [0.4]}) == {"a": "agrees", "b": "not comparable"}


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ({"read": "best"}, 40.0),
        ({"read": "last"}, 30.0),
        ({"read": "last5"}, 25.0),
        ({"read": "mean", "times": 1}, 0.25),
        ({"read": "best", "smaller": True}, 10.0),
        ({"read": "rounds_to", "target": 0.2, "times": 1}, 2.0),
        ({"read": "rounds_to", "target": 0.9, "times": 1}, None),
        ({"read": "hours_to", "target": 0.4, "times": 1}, 0.3),
        ({"read": "per_round", "metric": "server_bits", "times": 500}, 500 * 320.0),
    ],
)
def test_readings(measure: dict[str, Any], expected: float | None) -> None:
    assert reading(history(0.1, 0.2, 0.4, 0.3), Measure(**measure)) == pytest.approx(expected)


def test_a_round_is_told_by_the_last_since_the_first_may_send_less() -> None:
    rounds = [{"round": 1, "up_bytes": 10, "down_bytes": 0}, {"round": 2, "up_bytes": 10, "down_bytes": 10}]
    measure = Measure(read="per_round", metric="server_bits", times=500)
    assert reading(rounds, measure) == 500 * 160
    assert reading(rounds[:1], measure) == 500 * 80
    assert reading([], measure) is None


def test_claims_hold_fail_or_are_undecided() -> None:
    claims = [
        {"says": "a first", "measure": "accuracy", "order": ["a", "b"]},
        {"says": "b first", "measure": "accuracy", "order": ["b", "a"]},
        {"says": "b before c", "measure": "accuracy", "order": ["c", "b"]},
        {"says": "alike", "measure": "accuracy", "near": ["b", "c"], "within": 2.0},
    ]
    asked = recipe({"a": 1, "b": 1, "c": 1}, claims=claims)
    ours = {"a": [0.8, 0.8], "b": [0.50, 0.54], "c": [0.49, 0.53]}
    _, held = compare(asked, "cpu", {(row, ""): [history(value) for value in runs] for row, runs in ours.items()})
    assert [one.holds for one in held] == [True, False, None, True]
