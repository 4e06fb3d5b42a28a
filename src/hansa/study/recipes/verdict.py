"""What a recipe reads from runs, and its comparison with the paper: a rule for numbers and one for claims.

Both compare rows by paired differences over seeds. The rules are printed with every result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
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
    published: PublishedValue | None
    ours: SeedStatistics | None
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
    if measure.target is None:
        found = SeedValue(measure.factor * _statistic(history, measure))
    else:  # the rounds or hours until the target, or until the end of a run that does not reach it
        at = metrics.rounds_to(history, measure.target, measure.metric)
        totals = metrics.with_totals(history)
        record = next((record for record in totals if record["round"] == at), totals[-1])
        hours = float(record.get("simulated_total_seconds", math.nan)) / 3600
        found = SeedValue(float(record["round"]) if measure.statistic == "rounds_to" else hours, at is not None)
    return found if math.isfinite(found.value) else None


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
    first, second = values[: len(values) // 2], values[len(values) // 2 :]
    if measure.statistic == "max":
        return max(values)
    if measure.statistic == "jitter":
        steps = [abs(later - one) for one, later in pairwise(second if len(second) > 1 else values)]
        return fmean(steps) if steps else math.nan
    if measure.statistic == "growth":
        return fmean(second) / (fmean(first or [math.nan]) or math.nan)
    return fmean(values[-{"last": 1, "last5": 5, "last10": 10, "mean": len(values)}[measure.statistic] :])


class Measured(NamedTuple):
    """The numbers of a cell's seeds, in their order; or none, and why."""

    name: str
    seeds: Sequence[SeedValue]
    missing: str
    published: PublishedValue | None = None

    @property
    def ours(self) -> SeedStatistics | None:
        """The statistics over seeds, if all have the number."""
        complete = not self.missing and all(one.reached for one in self.seeds)
        return seed_statistics([one.value for one in self.seeds]) if complete else None

    def __str__(self) -> str:
        over = "" if all(one.reached for one in self.seeds) else "over "
        return f"{self.name} {over}{fmean(one.value for one in self.seeds):.4g}"


def measure_seeds(
    name: str, histories: Sequence[History], measure: RecipeMeasure, published: PublishedValue | None = None
) -> Measured:
    """Return the numbers of a cell.

    Args:
        name: Its name in evidence.
        histories: The histories of its seeds; none if it was not run.
        measure: What to read.
        published: The published number.
    """
    values = [read_measure(history, measure) for history in histories]
    missing = "" if values else f"no run of {name}"
    if None in values:
        place = f"run {values.index(None) + 1} of {len(values)}"
        missing = f"{name}: {place} has no finite {measure.metric} in its last round"
    return Measured(name, [] if missing else [one for one in values if one is not None], missing, published)


def difference(one: Measured, other: Measured, measure: RecipeMeasure) -> tuple[MeanInterval | None, str]:
    """Return the interval of the paired differences, or None and the reason why there is none.

    A run that ended without its target counts with what had passed by then, where that is more than the other run took.
    """
    if reason := one.missing or other.missing:
        return None, reason
    if len(one.seeds) != len(other.seeds):
        return None, f"{one}, {other}: {len(one.seeds)} and {len(other.seeds)} seeds"
    for first, second in zip(one.seeds, other.seeds, strict=True):
        if not first.reached and not second.reached:
            return None, f"{one}, {other}: neither reaches the target"
        if (not first.reached and first.value < second.value) or (not second.reached and second.value < first.value):
            return None, f"{one}, {other}: a run ended without the target before the other one reached it"
    interval = paired_interval([each.value for each in one.seeds], [each.value for each in other.seeds])
    interval = interval._replace(half=0.0) if measure.counted else interval
    return interval, f"{one}, {other}: {_format(interval)}"


def _format(interval: MeanInterval) -> str:
    if interval.half == math.inf:
        return f"{interval.mean:+.3g} ({interval.seeds} seed{'s' * (interval.seeds > 1)}: at least {MIN_SEEDS} decide)"
    return f"{interval.mean:+.3g} ± {interval.half:.2g}"


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
            (cell, measure_seeds(cell.row, histories[cell.row, cell.column], measure, cell.published.get(name)))
            for cell in recipe.cells(scale)
            if (cell.row, cell.column) in histories
        ]
        for cell, one in cells:
            ours, published, shift = one.ours, one.published, None
            if ours is not None and published is not None and not published.exceeded:
                shift = ours.mean - published.value if same_data or measure.counted else None
            verdict = _verdict(measure, compares, one, [found for other, found in cells if other.column == cell.column])
            comparisons.append(CellComparison(cell, name, published, ours, shift, verdict))
    return comparisons, list(check_claims(recipe, scale, histories))


def _verdict(measure: RecipeMeasure, compares: str, one: Measured, column: Sequence[Measured]) -> Verdict:
    ours, published = one.ours, one.published
    if compares == "nothing" or published is None or one.missing:
        return "not comparable"
    clearly: Verdict = "differs" if measure.counted or len(one.seeds) >= MIN_SEEDS else "undecided"
    tolerance = measure.tolerance * abs(published.value) if measure.relative else measure.tolerance
    if compares == "numbers" and published.exceeded:  # the paper did not reach the target: agrees if no run did either
        within = [each.reached and each.value <= published.value for each in one.seeds]
        if any(within):
            return clearly if all(within) else "undecided"
        # a run that ended earlier without the target says nothing about the time until the bound
        return (
            "agrees" if all(each.reached or each.value >= published.value for each in one.seeds) else "not comparable"
        )
    if compares == "numbers" and ours is not None:
        allowed = tolerance + 2 * math.hypot(ours.std / math.sqrt(len(one.seeds)), published.standard_error)
        if abs(ours.mean - published.value) <= allowed:
            return "agrees"
    orders = [order for other in column if other is not one and (order := _order(measure, one, other)) is not None]
    if orders:
        return "differs" if -1 in orders else "undecided" if 0 in orders else "same order"
    if compares != "numbers":
        return "not comparable"
    if ours is None:  # the paper reached the target: it differs if all runs took longer
        if all(each.value > published.value + tolerance + 2 * published.standard_error for each in one.seeds):
            return clearly
        return "undecided" if any(each.reached for each in one.seeds) else "not comparable"
    return clearly


def _order(measure: RecipeMeasure, one: Measured, other: Measured) -> int | None:
    """Return 1 if a pair is in the published order, -1 if it is reversed, 0 if neither is clear.

    None if the paper does not separate it by more than twice its standard error.
    """
    first, second = one.published, other.published
    if first is None or second is None or first.exceeded or second.exceeded:
        return None
    gap = first.value - second.value
    if abs(gap) <= 2 * math.hypot(first.standard_error, second.standard_error):
        return None
    interval, _ = difference(one, other, measure)
    return 0 if interval is None else interval.sign * (1 if gap > 0 else -1)


def check_claims(recipe: Recipe, scale: str, histories: Histories) -> Iterator[ClaimCheck]:
    """Test every claim in every column (or row) in which at least two of what it compares were run."""
    measures = recipe.measured(scale)
    for claim in recipe.claims:
        across_rows = claim.across == "rows"
        compared = tuple(recipe.rows if across_rows else recipe.columns)
        settings = (claim.columns or recipe.columns) if across_rows else (claim.rows or recipe.rows)
        names = compared if claim.better and not claim.than else claim.named or claim.rows or compared
        for setting in settings:
            keys = {name: (name, setting) if across_rows else (setting, name) for name in names}
            if sum(key in histories for key in keys.values()) < (2 if claim.at_most is None else 1):
                continue
            holds: bool | None = None
            if recipe.at(scale).compares == "nothing":
                evidence = "not compared at this scale"
            elif claim.measure not in measures:
                evidence = "the target is that of other data"
            else:
                measure = measures[claim.measure]
                cells = {name: measure_seeds(name, histories.get(key, ()), measure) for name, key in keys.items()}
                parts = dict.fromkeys(_check_parts(claim, measure, cells))
                outcomes = {outcome for outcome, _ in parts}
                holds = False if -1 in outcomes else None if 0 in outcomes else True
                evidence = "; ".join(text for _, text in parts)
            yield ClaimCheck(claim, setting if across_rows else "", "" if across_rows else setting, holds, evidence)


def _check_parts(claim: PaperClaim, measure: RecipeMeasure, cells: Mapping[str, Measured]) -> Iterator[tuple[int, str]]:
    """Yield for each part of a claim 1 if it holds, -1 if it does not, 0 if that is open; and the evidence."""
    for one in cells.values() if claim.at_most is not None else ():
        if one.missing:
            yield 0, one.missing
            continue
        interval = mean_interval([each.value for each in one.seeds])
        interval = interval._replace(half=0.0) if measure.counted else interval
        outcome = interval._replace(mean=(claim.at_most or 0.0) - interval.mean).sign
        # what had passed at the end of a run without its target is a lower bound: it can only exceed a limit
        reached = all(each.reached for each in one.seeds)
        yield (
            outcome if reached or outcome == -1 else 0,
            f"{one.name} {'' if reached else 'over '}{_format(interval)}",
        )
    for first, second in claim.pairs(tuple(cells)):
        paired, text = difference(cells[first], cells[second], measure)
        if paired is None:
            yield 0, text
        elif claim.tolerance is None:
            yield paired._replace(mean=-paired.mean if measure.smaller_is_better else paired.mean).sign, text
        else:  # whether the whole interval is within ± tolerance, or outside, or both
            within = abs(paired.mean) + paired.half <= claim.tolerance
            outside = abs(paired.mean) - paired.half > claim.tolerance
            yield 1 if within else -1 if outside else 0, text
