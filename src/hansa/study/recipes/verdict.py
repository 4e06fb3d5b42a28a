"""The numbers that a recipe reads from runs, and their comparison with the paper: a rule for numbers, one for claims.

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
    "a claim holds if the interval mean ± t s/sqrt(n) of the paired differences over seeds (95%, at least "
    f"{MIN_SEEDS} seeds) supports it for every pair, does not hold if one pair contradicts it, and is undecided "
    "otherwise"
)


class SeedValue(NamedTuple):
    """One run's number; if ``reached`` is false, the rounds or hours at the end of a run that missed its target."""

    value: float
    reached: bool = True


class CellComparison(NamedTuple):
    """A measured number and the published one; no ``difference`` between numbers on different data sets."""

    cell: RecipeCell
    measure: str
    published: PublishedValue | None
    ours: SeedStatistics | None
    difference: float | None
    verdict: Verdict


class ClaimCheck(NamedTuple):
    """A claim of the paper, whether it holds (None: undecided), and the evidence.

    Rows were compared in ``column``, or columns in ``row``.
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

    A curve that is not finite in the last round has no number except its best, so that a diverged run is not judged by
    its earlier rounds.

    >>> rounds = [{"round": r, "test_accuracy": r / 10, "simulated_seconds": 1800.0} for r in (1, 2, 3)]
    >>> read_measure(rounds, RecipeMeasure())
    SeedValue(value=30.0, reached=True)
    >>> read_measure(rounds, RecipeMeasure(statistic="hours_to", target=0.9, factor=1))
    SeedValue(value=1.5, reached=False)
    """
    if not len(history):
        return None
    if measure.target is None:
        number = SeedValue(measure.factor * _statistic(history, measure))
    else:  # rounds or hours to the target, or to the end of a run that misses it
        target_round = metrics.rounds_to(history, measure.target, measure.metric)
        totals = metrics.with_totals(history)
        record = next((record for record in totals if record["round"] == target_round), totals[-1])
        hours = float(record.get("simulated_total_seconds", math.nan)) / 3600
        value = float(record["round"]) if measure.statistic == "rounds_to" else hours
        number = SeedValue(value, reached=target_round is not None)
    return number if math.isfinite(number.value) else None


def _statistic(history: History, measure: RecipeMeasure) -> float:
    """Return a statistic of a curve, or NaN."""
    if measure.statistic == "per_round":
        # the last round, since the first may send less: all clients have the initial model
        totals = [float(record.get(measure.metric, math.nan)) for record in metrics.with_totals(history)]
        return totals[-1] - totals[-2] if len(totals) > 1 else totals[0]
    points = metrics.series(history, measure.metric)
    values = [value for _, value in points]
    if measure.statistic == "best":
        return (min if measure.smaller_is_better else max)(values, default=math.nan)
    if not values or points[-1][0] != int(history[-1]["round"]):
        return math.nan
    early, late = values[: len(values) // 2], values[len(values) // 2 :]
    if measure.statistic == "max":
        return max(values)
    if measure.statistic == "jitter":
        steps = [abs(later - earlier) for earlier, later in pairwise(late if len(late) > 1 else values)]
        return fmean(steps) if steps else math.nan
    if measure.statistic == "growth":
        return fmean(late) / (fmean(early or [math.nan]) or math.nan)
    return fmean(values[-{"last": 1, "last5": 5, "last10": 10, "mean": len(values)}[measure.statistic] :])


class Measured(NamedTuple):
    """The numbers of a cell's seeds in their order, or none and the reason."""

    name: str
    seeds: Sequence[SeedValue]
    missing: str
    published: PublishedValue | None = None

    @property
    def ours(self) -> SeedStatistics | None:
        """The statistics over seeds, if all reached the target."""
        complete = not self.missing and all(seed.reached for seed in self.seeds)
        return seed_statistics([seed.value for seed in self.seeds]) if complete else None

    def __str__(self) -> str:
        bound = "" if all(seed.reached for seed in self.seeds) else "over "
        return f"{self.name} {bound}{fmean(seed.value for seed in self.seeds):.4g}"


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
        run = f"run {values.index(None) + 1} of {len(values)}"
        missing = f"{name}: {run} has no finite {measure.metric} in its last round"
    return Measured(name, [] if missing else [value for value in values if value is not None], missing, published)


def difference(first: Measured, second: Measured, measure: RecipeMeasure) -> tuple[MeanInterval | None, str]:
    """Return the interval of the paired differences, or None and the reason.

    A run that missed its target counts with its length if that exceeds the number of the other run.
    """
    if reason := first.missing or second.missing:
        return None, reason
    if len(first.seeds) != len(second.seeds):
        return None, f"{first}, {second}: {len(first.seeds)} and {len(second.seeds)} seeds"
    for a, b in zip(first.seeds, second.seeds, strict=True):
        if not a.reached and not b.reached:
            return None, f"{first}, {second}: neither reaches the target"
        if (not a.reached and a.value < b.value) or (not b.reached and b.value < a.value):
            return None, f"{first}, {second}: a run ended without the target before the other one reached it"
    interval = paired_interval([seed.value for seed in first.seeds], [seed.value for seed in second.seeds])
    interval = interval._replace(half=0.0) if measure.counted else interval
    return interval, f"{first}, {second}: {_format(interval)}"


def _format(interval: MeanInterval) -> str:
    if interval.half == math.inf:
        return f"{interval.mean:+.3g} ({interval.seeds} seed{'s' * (interval.seeds > 1)}: at least {MIN_SEEDS} decide)"
    return f"{interval.mean:+.3g} ± {interval.half:.2g}"


def compare_with_paper(
    recipe: Recipe, scale: str, histories: Histories
) -> tuple[list[CellComparison], list[ClaimCheck]]:
    """Compare every cell that was run with its published number, and check every claim.

    A number within the rule `agrees`. Otherwise it has the `same order` if the paired differences over seeds have the
    published sign for every pair of its column that the paper separates by more than its spread, `differs` if one is
    reversed, and is `undecided` otherwise. The scale determines what is compared.
    """
    compares, same_data = recipe.at(scale).compares, recipe.same_data(scale)
    comparisons: list[CellComparison] = []
    for name, measure in recipe.measured(scale).items():
        cells = [
            (cell, measure_seeds(cell.row, histories[cell.row, cell.column], measure, cell.published.get(name)))
            for cell in recipe.cells(scale)
            if (cell.row, cell.column) in histories
        ]
        for cell, measured in cells:
            ours, published, shift = measured.ours, measured.published, None
            if ours is not None and published is not None and not published.exceeded:
                shift = ours.mean - published.value if same_data or measure.counted else None
            column = [row for other, row in cells if other.column == cell.column]
            verdict = _verdict(measure, compares, measured, column)
            comparisons.append(CellComparison(cell, name, published, ours, shift, verdict))
    return comparisons, list(check_claims(recipe, scale, histories))


def _verdict(measure: RecipeMeasure, compares: str, measured: Measured, column: Sequence[Measured]) -> Verdict:
    ours, published = measured.ours, measured.published
    if compares == "nothing" or published is None or measured.missing:
        return "not comparable"
    disagreement: Verdict = "differs" if measure.counted or len(measured.seeds) >= MIN_SEEDS else "undecided"
    tolerance = measure.tolerance * abs(published.value) if measure.relative else measure.tolerance
    if compares == "numbers" and published.exceeded:  # the paper missed the target: agrees if all runs did too
        reached_in_time = [seed.reached and seed.value <= published.value for seed in measured.seeds]
        if any(reached_in_time):
            return disagreement if all(reached_in_time) else "undecided"
        # a run that missed the target must be as long as the published bound
        as_long = all(seed.reached or seed.value >= published.value for seed in measured.seeds)
        return "agrees" if as_long else "not comparable"
    if compares == "numbers" and ours is not None:
        limit = tolerance + 2 * math.hypot(ours.std / math.sqrt(len(measured.seeds)), published.standard_error)
        if abs(ours.mean - published.value) <= limit:
            return "agrees"
    orders = [order for row in column if row is not measured and (order := _order(measure, measured, row)) is not None]
    if orders:
        return "differs" if -1 in orders else "undecided" if 0 in orders else "same order"
    if compares != "numbers":
        return "not comparable"
    if ours is None:  # the paper reached the target: differs if all runs took longer
        if all(seed.value > published.value + tolerance + 2 * published.standard_error for seed in measured.seeds):
            return disagreement
        return "undecided" if any(seed.reached for seed in measured.seeds) else "not comparable"
    return disagreement


def _order(measure: RecipeMeasure, first: Measured, second: Measured) -> int | None:
    """Return 1 if a pair is in the published order, -1 if it is reversed, 0 if neither is clear.

    None if the published difference is at most twice its standard error.
    """
    first_value, second_value = first.published, second.published
    if first_value is None or second_value is None or first_value.exceeded or second_value.exceeded:
        return None
    gap = first_value.value - second_value.value
    if abs(gap) <= 2 * math.hypot(first_value.standard_error, second_value.standard_error):
        return None
    interval, _ = difference(first, second, measure)
    return 0 if interval is None else interval.sign * (1 if gap > 0 else -1)


def check_claims(recipe: Recipe, scale: str, histories: Histories) -> Iterator[ClaimCheck]:
    """Test every claim in every column (or row) in which at least two of the compared rows (or columns) were run."""
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
                evidence = "the target is for other data"
            else:
                measure = measures[claim.measure]
                cells = {name: measure_seeds(name, histories.get(key, ()), measure) for name, key in keys.items()}
                parts = dict.fromkeys(_check_parts(claim, measure, cells))
                outcomes = {outcome for outcome, _ in parts}
                holds = False if -1 in outcomes else None if 0 in outcomes else True
                evidence = "; ".join(text for _, text in parts)
            yield ClaimCheck(claim, setting if across_rows else "", "" if across_rows else setting, holds, evidence)


def _check_parts(claim: PaperClaim, measure: RecipeMeasure, cells: Mapping[str, Measured]) -> Iterator[tuple[int, str]]:
    """Yield for each part of a claim 1 if it holds, -1 if it does not, 0 if it is undecided; and the evidence."""
    for cell in cells.values() if claim.at_most is not None else ():
        if cell.missing:
            yield 0, cell.missing
            continue
        interval = mean_interval([seed.value for seed in cell.seeds])
        interval = interval._replace(half=0.0) if measure.counted else interval
        outcome = interval._replace(mean=(claim.at_most or 0.0) - interval.mean).sign
        reached = all(seed.reached for seed in cell.seeds)  # otherwise a lower bound, which can only exceed the limit
        yield outcome if reached or outcome == -1 else 0, f"{cell.name} {'' if reached else 'over '}{_format(interval)}"
    for first, second in claim.pairs(tuple(cells)):
        paired, text = difference(cells[first], cells[second], measure)
        if paired is None:
            yield 0, text
        elif claim.tolerance is None:
            yield paired._replace(mean=-paired.mean if measure.smaller_is_better else paired.mean).sign, text
        else:  # whether the interval is within ± tolerance, outside, or both
            inside = abs(paired.mean) + paired.half <= claim.tolerance
            outside = abs(paired.mean) - paired.half > claim.tolerance
            yield 1 if inside else -1 if outside else 0, text
