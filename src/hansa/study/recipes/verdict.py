"""What a recipe reads from runs, and its comparison with the paper: a rule for numbers and one for claims.

Both compare rows by paired differences over seeds. The rules are printed with every result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise, product
from typing import Any, Literal, NamedTuple, TypeAlias

from hansa.runs import metrics
from hansa.runs.metrics import MIN_SEEDS, MeanInterval, SeedStatistics, mean_interval, paired_interval, seed_statistics
from hansa.study.recipes.recipe import PaperClaim, PublishedValue, Recipe, RecipeCell, RecipeMeasure

History: TypeAlias = Sequence[Mapping[str, Any]]
Histories: TypeAlias = Mapping[tuple[str, str], Sequence[History]]
"""The histories of a cell's seeds, by row and column; all cells have the same seeds in the same order."""
Verdict: TypeAlias = Literal["agrees", "same order", "undecided", "differs", "not comparable"]

CLAIM_RULE = (
    "a claim holds, or does not hold, if the interval mean ± t s/sqrt(n) of the paired differences over seeds (95%, at "
    f"least {MIN_SEEDS} seeds) says so for every pair that it names, or for one the contrary; otherwise it is undecided"
)


class SeedValue(NamedTuple):
    """One run's number; with ``reached`` false a lower bound, what had passed when the run ended without its target."""

    value: float
    reached: bool = True


class CellComparison(NamedTuple):
    """A measured number and the published one; no ``difference`` between numbers of two data sets."""

    cell: RecipeCell
    measure: str
    ours: SeedStatistics | None
    published: PublishedValue | None
    difference: float | None
    verdict: Verdict


class ClaimCheck(NamedTuple):
    """A claim of the paper, whether it holds here (None: undecided), and the supporting numbers.

    ``column`` is that in which rows were compared, ``row`` that in which columns were.
    """

    claim: PaperClaim
    column: str
    row: str
    holds: bool | None
    evidence: str

    @property
    def setting(self) -> str:
        """The column or the row in which it was tested."""
        return self.row or self.column


def agreement_rule(measure: RecipeMeasure) -> str:
    """Return the rule of agreement as text.

    >>> agreement_rule(RecipeMeasure())
    'agrees: the means differ by at most 1 % + 2 sqrt(se^2 + se_published^2), se the standard error over seeds'
    """
    tolerance = f"{100 * measure.tolerance:g} % of it" if measure.relative else f"{measure.tolerance:g} {measure.unit}"
    if measure.counted:
        return f"agrees: the numbers differ by at most {tolerance.rstrip()}"
    return (
        f"agrees: the means differ by at most {tolerance.rstrip()} + 2 sqrt(se^2 + se_published^2), se the standard "
        "error over seeds"
    )


def read_measure(history: History, measure: RecipeMeasure) -> SeedValue | None:
    """Return one run's number in the unit of the paper; None if it was not measured.

    A curve that is not finite in the last round has no number, except its best: a run that diverges would otherwise be
    judged by what it was before.

    >>> rounds = [{"round": r, "test_accuracy": r / 10, "simulated_seconds": 1800.0} for r in (1, 2, 3)]
    >>> read_measure(rounds, RecipeMeasure())
    SeedValue(value=30.0, reached=True)
    >>> read_measure(rounds, RecipeMeasure(statistic="hours_to", target=0.9, factor=1))
    SeedValue(value=1.5, reached=False)
    """
    if not len(history):
        return None
    if measure.target is not None:
        value, reached = _time_to(history, measure, measure.target)
    else:
        value, reached = measure.factor * _statistic(history, measure), True
    return SeedValue(value, reached) if math.isfinite(value) else None


def _time_to(history: History, measure: RecipeMeasure, target: float) -> tuple[float, bool]:
    """Return the rounds or hours until the target, or until the end of a run that does not reach it."""
    at = metrics.rounds_to(history, target, measure.metric)
    totals = metrics.with_totals(history)
    record = next((record for record in totals if record["round"] == at), totals[-1])
    if measure.statistic == "rounds_to":
        return float(record["round"]), at is not None
    return float(record.get("simulated_total_seconds", math.nan)) / 3600, at is not None


def _statistic(history: History, measure: RecipeMeasure) -> float:
    """Return a statistic of a curve, or NaN."""
    if measure.statistic == "per_round":
        # the last round: the first one may send less, since all clients have the initial model
        totals = [float(record.get(measure.metric, math.nan)) for record in metrics.with_totals(history)]
        return totals[-1] - totals[-2] if len(totals) > 1 else totals[0]
    points = metrics.series(history, measure.metric)
    values = [value for _, value in points]
    if measure.statistic == "best":
        return (min if measure.smaller_is_better else max)(values, default=math.nan)
    if not values or points[-1][0] != int(history[-1]["round"]):
        return math.nan
    if measure.statistic == "max":
        return max(values)
    first, second = values[: len(values) // 2], values[len(values) // 2 :]
    if measure.statistic == "jitter":
        return _mean([abs(later - one) for one, later in pairwise(second if len(second) > 1 else values)])
    if measure.statistic == "growth":
        return _mean(second) / (_mean(first) or math.nan)
    return _mean(values[-{"last": 1, "last5": 5, "last10": 10, "mean": len(values)}[measure.statistic] :])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def seed_values(histories: Sequence[History], measure: RecipeMeasure) -> list[SeedValue] | None:
    """Return one number for each seed, in their order; None if some run does not have it."""
    values = [value for history in histories if (value := read_measure(history, measure)) is not None]
    return values if values and len(values) == len(histories) else None


def compare_with_paper(
    recipe: Recipe, scale: str, histories: Histories
) -> tuple[list[CellComparison], list[ClaimCheck]]:
    """Compare every cell that was run with its published number, and check every claim.

    A number within the rule `agrees`. Otherwise it has the `same order` if every pair of its column that the paper
    separates by more than its spread is in that order here, by the paired differences over seeds; it `differs` if one
    is reversed, and is `undecided` otherwise. The scale determines what is compared.
    """
    compares, same_data = recipe.at(scale).compares, recipe.same_data(scale)
    comparisons: list[CellComparison] = []
    for name, measure in recipe.measured(scale).items():
        cells = [
            _Measured(cell, seed_values(histories[cell.row, cell.column], measure), cell.published.get(name))
            for cell in recipe.cells(scale)
            if (cell.row, cell.column) in histories
        ]
        for one in cells:
            ours, shift = one.ours, None
            if ours is not None and one.published is not None and not one.published.exceeded:
                shift = ours.mean - one.published.value if same_data or measure.counted else None
            column = [other for other in cells if other.cell.column == one.cell.column]
            verdict = _verdict(measure, compares, one, column)
            comparisons.append(CellComparison(one.cell, name, ours, one.published, shift, verdict))
    return comparisons, list(check_claims(recipe, scale, histories))


class _Measured(NamedTuple):
    cell: RecipeCell
    seeds: Sequence[SeedValue] | None
    published: PublishedValue | None

    @property
    def ours(self) -> SeedStatistics | None:
        if self.seeds is None or not all(one.reached for one in self.seeds):
            return None
        return seed_statistics([one.value for one in self.seeds])


def _verdict(measure: RecipeMeasure, compares: str, one: _Measured, column: Sequence[_Measured]) -> Verdict:
    ours, published = one.ours, one.published
    if compares == "nothing" or published is None or one.seeds is None:
        return "not comparable"
    decided: Verdict = "differs" if measure.counted or len(one.seeds) >= MIN_SEEDS else "undecided"
    numbers = compares == "numbers"
    tolerance = measure.tolerance * abs(published.value) if measure.relative else measure.tolerance
    if numbers and published.exceeded:
        return _verdict_on_bound(one.seeds, published.value)
    if numbers and ours is not None:
        allowed = tolerance + 2 * math.hypot(ours.std / math.sqrt(len(one.seeds)), published.standard_error)
        if abs(ours.mean - published.value) <= allowed:
            return "agrees"
    signs = [sign for other in column if other is not one and (sign := _order(measure, one, other)) is not None]
    if -1 in signs:
        return "differs"
    if signs:
        return "same order" if all(sign == 1 for sign in signs) else "undecided"
    if not numbers:
        return "not comparable"
    if ours is None:  # the paper reached the target: it differs if all runs took longer
        if all(each.value > published.value + tolerance + 2 * published.standard_error for each in one.seeds):
            return decided
        return "undecided" if any(each.reached for each in one.seeds) else "not comparable"
    return decided


def _verdict_on_bound(seeds: Sequence[SeedValue], bound: float) -> Verdict:
    """Return the verdict on a target that the paper did not reach within ``bound``: agrees if no run did either."""
    within = [one.reached and one.value <= bound for one in seeds]
    if all(within):
        return "differs" if len(seeds) >= MIN_SEEDS else "undecided"
    if any(within):
        return "undecided"
    # a run that ended earlier without the target says nothing about the time until the bound
    return "agrees" if all(one.reached or one.value >= bound for one in seeds) else "not comparable"


def _order(measure: RecipeMeasure, one: _Measured, other: _Measured) -> int | None:
    """Return 1 if a pair is in the published order, -1 if it is reversed, 0 if neither is clear.

    None if the paper does not separate it by more than twice its standard error.
    """
    first, second = one.published, other.published
    if first is None or second is None or first.exceeded or second.exceeded:
        return None
    gap = first.value - second.value
    if abs(gap) <= 2 * math.hypot(first.standard_error, second.standard_error):
        return None
    interval, _ = difference(one.seeds, other.seeds, measure)
    return 0 if interval is None else interval.sign * (1 if gap > 0 else -1)


def difference(
    first: Sequence[SeedValue] | None, second: Sequence[SeedValue] | None, measure: RecipeMeasure
) -> tuple[MeanInterval | None, str]:
    """Return the interval of the paired differences, or None and the reason why there is none.

    A run that ended without its target counts with what had passed by then, where that is more than the other run took.
    """
    if first is None or second is None:
        return None, "not measured"
    if len(first) != len(second):
        return None, f"{len(first)} and {len(second)} seeds"
    for one, other in zip(first, second, strict=True):
        if not one.reached and not other.reached:
            return None, "neither reaches the target"
        if (not one.reached and one.value < other.value) or (not other.reached and other.value < one.value):
            return None, "a run ended without the target before the other one reached it"
    interval = paired_interval([one.value for one in first], [other.value for other in second])
    return interval._replace(half=0.0) if measure.counted else interval, ""


def check_claims(recipe: Recipe, scale: str, histories: Histories) -> Iterator[ClaimCheck]:
    """Test every claim in every column (or row) in which at least two of what it compares were run."""
    measures = recipe.measured(scale)
    for claim in recipe.claims:
        across_rows = claim.across == "rows"
        compared = recipe.rows if across_rows else recipe.columns
        settings = (claim.columns or recipe.columns) if across_rows else (claim.rows or recipe.rows)
        names = claim.named
        if claim.bound is not None:
            names = claim.rows or tuple(recipe.rows)
        elif claim.better and not claim.than:
            names = tuple(compared)
        for setting in settings:
            keys = {name: (name, setting) if across_rows else (setting, name) for name in names}
            runs = {name: histories[key] for name, key in keys.items() if key in histories}
            if len(runs) < (2 if claim.bound is None else 1):
                continue
            holds: bool | None = None
            if recipe.at(scale).compares == "nothing":
                evidence = "not compared at this scale"
            elif claim.measure not in measures:
                evidence = "the target is that of other data"
            else:
                check = _check_pairs if claim.bound is None else _check_bound
                parts = dict.fromkeys(check(claim, names, measures[claim.measure], runs))
                outcomes = {outcome for outcome, _ in parts}
                holds = False if -1 in outcomes else None if 0 in outcomes else True
                evidence = "; ".join(text for _, text in parts)
            yield ClaimCheck(claim, setting if across_rows else "", "" if across_rows else setting, holds, evidence)


Checks: TypeAlias = Iterator[tuple[int, str]]
"""1 if a part of a claim holds, -1 if it does not, 0 if that is open; and the evidence."""


def _check_pairs(
    claim: PaperClaim, names: Sequence[str], measure: RecipeMeasure, runs: Mapping[str, Sequence[History]]
) -> Checks:
    values = {name: seed_values(histories, measure) for name, histories in runs.items()}
    pairs: Iterator[tuple[str, str]] = product(
        claim.better, claim.than or tuple(name for name in names if name not in claim.better)
    )
    if claim.order or claim.similar:
        pairs = pairwise(claim.order) if claim.order else combinations(claim.similar, 2)
    for pair in pairs:
        if missing := [name for name in pair if name not in runs]:
            yield 0, f"no run of {missing[0]}"
            continue
        first, second = (values[name] for name in pair)
        interval, reason = difference(first, second, measure)
        unmeasured = [_unmeasured(name, runs[name], measure) for name in pair if values[name] is None]
        text = ", ".join(f"{name} {_shown(values[name])}" for name in pair)
        if interval is None:
            yield 0, f"{text}: {[*unmeasured, reason][0]}"
        elif claim.tolerance is None:
            sign = -1.0 if measure.smaller_is_better else 1.0
            yield interval._replace(mean=sign * interval.mean).sign, f"{text}: {_format(interval)}"
        else:
            yield _equivalent(interval, claim.tolerance), f"{text}: {_format(interval)}"


def _check_bound(
    claim: PaperClaim, names: Sequence[str], measure: RecipeMeasure, runs: Mapping[str, Sequence[History]]
) -> Checks:
    assert claim.bound is not None
    sign = 1.0 if claim.at_most is None else -1.0
    for name in names:
        seeds = seed_values(runs[name], measure) if name in runs else None
        if seeds is None:
            yield 0, _unmeasured(name, runs[name], measure) if name in runs else f"no run of {name}"
            continue
        interval = mean_interval([one.value for one in seeds])
        if measure.counted:
            interval = interval._replace(half=0.0)
        outcome = interval._replace(mean=sign * (interval.mean - claim.bound)).sign
        reached = all(one.reached for one in seeds)
        # what had passed at the end of a run without its target is a lower bound: it can only exceed a limit
        yield outcome if reached or outcome == sign else 0, f"{name} {'' if reached else 'over '}{_format(interval)}"


def _equivalent(interval: MeanInterval, tolerance: float) -> int:
    """Return 1 if the whole interval is within ± tolerance, -1 if it is outside, 0 if it is both."""
    if max(abs(interval.mean - interval.half), abs(interval.mean + interval.half)) <= tolerance:
        return 1
    return -1 if abs(interval.mean) - interval.half > tolerance else 0


def _unmeasured(name: str, histories: Sequence[History], measure: RecipeMeasure) -> str:
    place = next(place for place, history in enumerate(histories, 1) if read_measure(history, measure) is None)
    return f"{name}: run {place} of {len(histories)} has no finite {measure.metric} in its last round"


def _shown(values: Sequence[SeedValue] | None) -> str:
    if values is None:
        return "–"
    over = "" if all(one.reached for one in values) else "over "
    return f"{over}{_mean([one.value for one in values]):.4g}"


def _format(interval: MeanInterval) -> str:
    if interval.half == float("inf"):
        return f"{interval.mean:+.3g} ({interval.seeds} seed{'s' * (interval.seeds > 1)}: at least {MIN_SEEDS} decide)"
    return f"{interval.mean:+.3g} ± {interval.half:.2g}"
