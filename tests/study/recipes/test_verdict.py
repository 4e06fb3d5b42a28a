"""The rule of agreement, against cases worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hansa.study.recipes import library
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


def runs(ours: dict[str, list[float]]) -> dict[tuple[str, str], list[list[dict[str, Any]]]]:
    return {(row, ""): [history(value) for value in seeds] for row, seeds in ours.items()}


def verdicts(requested: Recipe, ours: dict[str, list[float]]) -> dict[str, str]:
    comparisons, _ = compare_with_paper(requested, "cpu", runs(ours))
    return {one.cell.row: one.verdict for one in comparisons}


def around(middle: float, spread: float = 0.001) -> list[float]:
    return [middle - spread, middle, middle + spread]


def test_numbers_within_the_rule_agree_and_others_keep_their_order_or_not() -> None:
    requested = recipe({"a": 80.0, "b": 70.0, "c": 60.0})
    assert verdicts(requested, {"a": [0.809], "b": [0.691], "c": [0.60]}) == dict.fromkeys("abc", "agrees")
    ours = {"a": around(0.5), "b": around(0.4), "c": around(0.3)}
    assert verdicts(requested, ours) == dict.fromkeys("abc", "same order")
    assert verdicts(requested, ours | {"b": around(0.55)}) == {"a": "differs", "b": "differs", "c": "same order"}


def test_one_or_two_seeds_decide_no_order_except_of_what_is_counted() -> None:
    counted = {"measures": {"accuracy": {"statistic": "last", "counted": True}}}
    for more, same, reversed in (({}, "undecided", "undecided"), (counted, "same order", "differs")):
        requested = recipe({"a": 80.0, "b": 70.0}, **more)
        assert verdicts(requested, {"a": [0.50], "b": [0.40]}) == dict.fromkeys("ab", same)
        assert verdicts(requested, {"a": [0.40, 0.41], "b": [0.50, 0.51]}) == dict.fromkeys("ab", reversed)


def test_spread_widens_the_rule() -> None:
    # 1 + 2 sqrt(1/3 + 1.5^2/9): 2.528; the means are 2.5 apart, then 2.6
    requested = recipe({"a": [80.0, 1.5]}, published_seeds=9)
    assert verdicts(requested, {"a": [0.765, 0.775, 0.785]}) == {"a": "agrees"}
    assert verdicts(requested, {"a": [0.764, 0.774, 0.784]}) == {"a": "differs"}


def test_a_published_standard_error_is_not_divided_again() -> None:
    ours = {"a": [0.758, 0.76, 0.762]}  # 1 + 2 sqrt(0.2^2/3 + 1.5^2): 4.01, with 1.5/3 in place of 1.5: 2.03
    assert verdicts(recipe({"a": [80.0, 1.5]}, published_seeds=9, spread="standard error"), ours) == {"a": "agrees"}
    assert verdicts(recipe({"a": [80.0, 1.5]}, published_seeds=9), ours) == {"a": "differs"}
    hafed = next(library()["hafed-table-1"].cells("cpu")).published["accuracy"]
    assert (hafed.spread, hafed.standard_error) == (0.16, 0.16)
    afga = next(library()["afga-table-1"].cells("cpu")).published["accuracy"]
    assert (afga.spread, afga.standard_error) == (1.69, 1.69 / math.sqrt(3))


def test_an_order_within_the_spread_is_undecided() -> None:
    requested = recipe({"a": 80.0, "b": 70.0})
    assert verdicts(requested, {"a": [0.49, 0.51, 0.53], "b": [0.50, 0.52, 0.48]}) == dict.fromkeys("ab", "undecided")
    assert verdicts(requested, {"a": [0.52, 0.51, 0.53], "b": [0.50, 0.52, 0.48]}) == dict.fromkeys("ab", "undecided")
    close = recipe({"a": [80.0, 6.0], "b": [79.0, 6.0]}, compares="order")
    assert verdicts(close, {"a": around(0.3), "b": around(0.4)}) == dict.fromkeys("ab", "not comparable")
    ours = {"a": around(0.8), "b": around(0.7)}
    for compares, verdict in (("nothing", "not comparable"), ("order", "same order")):
        assert verdicts(recipe({"a": 80.0, "b": 70.0}, compares), ours) == dict.fromkeys("ab", verdict)


ROUNDS = {"statistic": "rounds_to", "target": 0.5, "factor": 1, "tolerance": 0.2, "relative": True}


@pytest.mark.parametrize(
    ("published", "reached", "rounds", "expected"),
    [
        ("50+", [None, None, None], 50, "agrees"),
        ("50+", [None, None, None], 49, "not comparable"),  # nobody knows what the fiftieth would have been
        ("50+", [55, None, 60], 60, "agrees"),
        ("50+", [40, 41, 42], 60, "differs"),
        ("50+", [40], 60, "undecided"),
        ("50+", [40, None, 42], 60, "undecided"),
        (30, [None, None, None], 50, "differs"),
        (30, [None], 50, "undecided"),
        (30, [None, None, None], 36, "not comparable"),  # 30 + 20% had not passed
        (30, [30, None, 30], 50, "undecided"),
        (30, [29, 30, 31], 50, "agrees"),
    ],
)
def test_targets_that_somebody_did_not_reach(
    published: Any, reached: list[int | None], rounds: int, expected: str
) -> None:
    requested = recipe({"a": published}, measures={"accuracy": ROUNDS})
    ours = [history(*([0.1] * rounds if at is None else [0.1] * (at - 1) + [0.6])) for at in reached]
    (comparison,), _ = compare_with_paper(requested, "cpu", {("a", ""): ours})
    assert comparison.verdict == expected


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ({"statistic": "best"}, 40.0),
        ({"statistic": "last"}, 30.0),
        ({"statistic": "last5"}, 25.0),
        ({"statistic": "max", "smaller_is_better": True}, 40.0),
        ({"statistic": "jitter"}, 10.0),
        ({"statistic": "growth", "factor": 1}, 7 / 3),
        ({"statistic": "mean", "factor": 1}, 0.25),
        ({"statistic": "best", "smaller_is_better": True}, 10.0),
        ({"statistic": "rounds_to", "target": 0.2, "factor": 1}, 2.0),
        ({"statistic": "rounds_to", "target": 0.9, "factor": 1}, 4.0),
        ({"statistic": "hours_to", "target": 0.4, "factor": 1}, 0.3),
        ({"statistic": "per_round", "metric": "server_bits", "factor": 500}, 500 * 320.0),
    ],
)
def test_readings(measure: dict[str, Any], expected: float) -> None:
    assert read(history(0.1, 0.2, 0.4, 0.3), **measure) == (pytest.approx(expected), measure.get("target") != 0.9)


def read(rounds: list[dict[str, Any]], **measure: Any) -> tuple[float, bool] | None:
    return read_measure(rounds, RecipeMeasure(**measure))


def test_a_round_is_told_by_the_last_since_the_first_may_send_less() -> None:
    rounds = [{"round": 1, "up_bytes": 10, "down_bytes": 0}, {"round": 2, "up_bytes": 10, "down_bytes": 10}]
    measure = {"statistic": "per_round", "metric": "server_bits", "factor": 500}
    assert [read(rounds, **measure), read(rounds[:1], **measure)] == [(500 * 160, True), (500 * 80, True)]
    assert read([], **measure) is None


def claimed(ours: dict[str, list[float]], claim: dict[str, Any], **more: Any) -> bool | None:
    """Whether one claim about the accuracy holds."""
    claims = [{"statement": "s", "measure": "accuracy", **claim}]
    _, checks = compare_with_paper(recipe(dict.fromkeys(ours, 1), claims=claims, **more), "cpu", runs(ours))
    (check,) = checks
    return check.holds


APART = {"a": [0.80, 0.81, 0.82], "b": [0.50, 0.60, 0.55], "c": [0.49, 0.59, 0.541]}


CLOSE = {"a": [0.80, 0.81, 0.82], "b": [0.79, 0.83, 0.80]}  # differences 1, -2, 2 points
LEVEL = APART | {"d": [0.81, 0.80, 0.82]}
BOUNDED = {"a": [0.50, 0.51, 0.52], "b": [0.53, 0.55, 0.54]}
EQUAL = {"a": [0.1 + 0.2] * 3, "b": [0.3] * 3}  # up to rounding


@pytest.mark.parametrize(
    ("ours", "claim", "holds"),
    [
        (APART, {"order": ["a", "b"]}, True),
        (APART, {"order": ["b", "a"]}, False),
        # b and c are 5 points apart over the seeds, and always 1 point apart within a seed
        (APART, {"order": ["b", "c"]}, True),
        (APART, {"order": ["c", "b"]}, False),
        (APART, {"similar": ["b", "c"], "tolerance": 2.0}, True),
        (APART, {"similar": ["b", "c"], "tolerance": 0.5}, False),
        (APART, {"similar": ["b", "c"], "tolerance": 1.0}, None),
        (CLOSE, {"order": ["a", "b"]}, None),
        (CLOSE, {"order": ["b", "a"]}, None),
        ({row: values[:1] for row, values in APART.items()}, {"order": ["a", "b"]}, None),
        ({row: values[:2] for row, values in APART.items()}, {"order": ["b", "a"]}, None),
        # 0.1 ± 4.303 * 0.04 / sqrt(3): just clear of zero; with a little more spread it is not
        ({"a": [0.06, 0.10, 0.14], "b": [0.0, 0.0, 0.0]}, {"order": ["a", "b"]}, True),
        ({"a": [0.05, 0.10, 0.15], "b": [0.0, 0.0, 0.0]}, {"order": ["a", "b"]}, None),
        (APART, {"better": ["a"]}, True),
        (APART, {"better": ["b"]}, False),  # above c, below a
        (APART, {"better": ["a", "c"], "than": ["b"]}, False),
        (APART, {"better": ["a", "b"], "than": ["c"]}, True),
        (LEVEL, {"better": ["a"]}, None),
        (LEVEL, {"better": ["b"]}, False),
        (BOUNDED, {"at_most": 60.0}, True),
        (BOUNDED, {"at_most": 40.0}, False),
        (BOUNDED, {"at_most": 54.0}, None),
        (BOUNDED, {"at_most": 54.0, "rows": ["a"]}, True),
        ({"a": [0.5]}, {"at_most": 90.0}, None),
        (EQUAL, {"order": ["a", "b"]}, None),
        (EQUAL, {"order": ["b", "a"]}, None),
        (EQUAL, {"similar": ["a", "b"], "tolerance": 0.0}, True),
    ],
)
def test_claims_hold_fail_or_are_undecided(ours: dict[str, list[float]], claim: dict[str, Any], holds: Any) -> None:
    assert claimed(ours, claim) is holds


def test_what_was_not_run_leaves_a_claim_undecided_unless_the_rest_contradicts_it() -> None:
    only = {"cpu": {"compares": "order", "rows": ["a", "b", "c"]}}
    ours = APART | {"d": [0.1, 0.1, 0.1]}
    claims = [{"statement": "s", "measure": "accuracy", "better": [row]} for row in "ab"]
    _, checks = compare_with_paper(recipe(dict.fromkeys(ours, 1), claims=claims, scales=only), "cpu", runs(APART))
    assert [one.holds for one in checks] == [None, False]
    assert "no run of d" in checks[0].evidence


def test_claims_over_columns() -> None:
    claims = [{"statement": "s", "measure": "accuracy", "across": "columns", "order": ["easy", "hard"]}]
    requested = recipe({}, claims=claims, rows={"a": {}, "b": {}}, columns={"easy": {}, "hard": {}, "odd": {}})
    values = {("a", "easy"): 0.8, ("a", "hard"): 0.6, ("b", "easy"): 0.5, ("b", "hard"): 0.7, ("a", "odd"): 0.1}
    ours = {cell: [history(value) for value in around(middle)] for cell, middle in values.items()}
    _, checks = compare_with_paper(requested, "cpu", ours)
    assert [(one.row, one.holds) for one in checks] == [("a", True), ("b", False)]


def test_claims_over_curves() -> None:
    measures = {
        "accuracy": {"statistic": "jitter", "smaller_is_better": True},
        "growth": {"statistic": "growth", "factor": 1},
    }
    claims = [
        {"statement": "a is steadier", "measure": "accuracy", "order": ["a", "b"]},
        {"statement": "bounded", "measure": "growth", "at_most": 1.5},
    ]
    requested = recipe({"a": 1, "b": 1}, measures=measures, claims=claims)
    steady, wild = [0.5, 0.6, 0.7, 0.71, 0.72], [0.3, 0.4, 0.8, 0.5, 0.9]
    ours = {("a", ""): [history(*steady)] * 3, ("b", ""): [history(*wild[:4], last) for last in (0.8, 0.9, 0.85)]}
    comparisons, checks = compare_with_paper(requested, "cpu", ours)
    # the second half of five values are the last three
    assert comparisons[0].ours is not None
    assert comparisons[0].ours.mean == pytest.approx(1.0)
    assert [one.holds for one in checks] == [True, False]
    assert read(history(*wild), statistic="max") == (pytest.approx(90.0), True)


def test_rounds_to_a_target_that_some_do_not_reach() -> None:
    measures = {"accuracy": {"statistic": "rounds_to", "target": 0.5, "factor": 1, "smaller_is_better": True}}
    claims = [
        {"statement": "s", "measure": "accuracy", "order": ["a", "b"]},
        {"statement": "s", "measure": "accuracy", "order": ["b", "c"]},
    ]
    requested = recipe({"a": 1, "b": 1, "c": 1}, measures=measures, claims=claims)
    never = [history(*[0.1] * 30)] * 3
    ours = {("a", ""): [history(*[0.1] * late, 0.6) for late in (4, 5, 6)], ("b", ""): never, ("c", ""): never}
    comparisons, checks = compare_with_paper(requested, "cpu", ours)
    assert [one.holds for one in checks] == [True, None]
    assert "b over 30" in checks[0].evidence
    assert [None if one.ours is None else one.ours.mean for one in comparisons] == [6.0, None, None]


def test_a_run_that_ended_early_without_the_target_is_not_the_faster_one() -> None:
    claims = [{"statement": "s", "measure": "accuracy", "order": ["a", "b"]}]
    requested = recipe({"a": 1, "b": 1}, measures={"accuracy": {**ROUNDS, "smaller_is_better": True}}, claims=claims)
    ours = {("a", ""): [history(*[0.1] * late, 0.6) for late in (4, 5, 6)], ("b", ""): [history(0.1, 0.1)] * 3}
    _, (check,) = compare_with_paper(requested, "cpu", ours)
    assert check.holds is None
    assert "ended without the target" in check.evidence


@pytest.mark.parametrize("lost", [math.nan, math.inf, None])
@pytest.mark.parametrize("statistic", ["last", "last5", "mean", "max", "jitter", "growth"])
def test_a_run_that_diverges_is_not_judged_by_what_it_was_before(lost: float | None, statistic: str) -> None:
    measure = {"metric": "loss", "statistic": statistic, "factor": 1, "smaller_is_better": True}
    claims = [{"statement": "s", "measure": "accuracy", "order": ["a", "b"]}]
    requested = recipe({"a": 1, "b": 1}, measures={"accuracy": measure}, claims=claims)
    good = [[{"round": place, "loss": each} for place, each in enumerate((0.9, 0.8, 0.7, 0.6), 1)]] * 3
    bad = [{"round": place, "loss": each} for place, each in enumerate((0.3, 0.2, 0.1, lost), 1)]
    ours = {("a", ""): [*good[:2], bad], ("b", ""): good}
    comparisons, (check,) = compare_with_paper(requested, "cpu", ours)
    assert (comparisons[0].ours, check.holds) == (None, None)
    assert "a: run 3 of 3 has no finite loss in its last round" in check.evidence
    curve = [{"round": 1, "loss": 0.5}, {"round": 2, "loss": lost}]
    assert read(curve, metric="loss", statistic="best", factor=1, smaller_is_better=True) == (0.5, True)


def test_rows_with_different_numbers_of_seeds_are_not_paired() -> None:
    claims = [{"statement": "s", "measure": "accuracy", "order": ["a", "b"]}]
    ours = {"a": around(0.9), "b": [0.1, 0.2]}
    _, (check,) = compare_with_paper(recipe({"a": 1, "b": 1}, claims=claims), "cpu", runs(ours))
    assert (check.holds, "3 and 2 seeds" in check.evidence) == (None, True)


def test_a_bound_needs_every_row_and_every_target() -> None:
    only = {"cpu": {"compares": "order", "rows": ["a"]}}
    claims = [{"statement": "s", "measure": "accuracy", "at_most": 90.0}]
    _, (check,) = compare_with_paper(
        recipe({"a": 1, "b": 1}, claims=claims, scales=only), "cpu", runs({"a": [0.5] * 3})
    )
    assert check.holds is None
    assert "no run of b" in check.evidence
    never = {("a", ""): [history(*[0.1] * 30)] * 3}
    for claim, holds in (({"at_most": 40}, None), ({"at_most": 20}, False)):
        claims = [{"statement": "s", "measure": "accuracy", **claim}]
        _, (check,) = compare_with_paper(recipe({"a": 1}, measures={"accuracy": ROUNDS}, claims=claims), "cpu", never)
        assert check.holds is holds, claim
    counted = {"accuracy": {"statistic": "last", "counted": True}}
    assert claimed({"a": [0.5]}, {"at_most": 90.0}, measures=counted) is True


def test_a_target_of_other_data_is_left_out_and_its_claims_are_undecided() -> None:
    measures = {"accuracy": {"statistic": "last"}, "rounds": ROUNDS}
    claims = [{"statement": "s", "measure": "rounds", "order": ["a", "b"]}]
    paper = {"compares": "numbers", "set": {"data": {"name": "cifar10"}}}
    requested = recipe({"a": 50.0, "b": 40.0}, measures=measures, claims=claims)
    for name, targets, measured in (
        ("fashion-mnist", {}, ["accuracy"]),
        ("fashion-mnist", {"rounds": 0.8}, ["accuracy", "rounds"]),
        ("cifar10", {}, ["accuracy", "rounds"]),
    ):
        cpu = {"compares": "order", "set": {"data": {"name": name}}, "targets": targets}
        scaled = Recipe.model_validate({**requested.model_dump(), "scales": {"paper": paper, "cpu": cpu}})
        assert list(scaled.measured("cpu")) == measured
        comparisons, (check,) = compare_with_paper(scaled, "cpu", runs({"a": around(0.9), "b": around(0.7)}))
        assert {one.measure for one in comparisons} == set(measured)
        if "rounds" not in measured:
            assert (check.holds, check.evidence) == (None, "the target is for other data")
        same = name == "cifar10"
        assert [one.difference is not None for one in comparisons if one.measure == "accuracy"] == [same, same]


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ({}, "expected exactly one"),
        ({"at_most": 1.0, "across": "columns"}, "with claims across rows only"),
        ({"order": ["a"]}, "at least two names"),
        ({"order": ["a", "b"], "than": ["a"]}, "with better only"),
        ({"better": ["a"], "than": ["a", "b"]}, "a name is in both"),
        ({"order": ["a", "b"], "rows": ["a"]}, "claims across columns and with bounds only"),
        ({"across": "columns", "order": ["", "b"]}, "'b' is not known"),
        ({"across": "columns", "columns": [""], "order": ["x", "y"]}, "with claims across rows only"),
    ],
)
def test_a_claim_that_says_too_much_or_too_little(claim: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe({"a": 1, "b": 1}, claims=[{"statement": "s", "measure": "accuracy", **claim}])
